"""The command line: asks an engine, follows and ends runs, and shows what there is.

Nothing a user can do wrong shows a traceback: it is a line on stderr and an exit code, listed in ``--help``.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence

from dualclaw import (
    BusyPolicy,
    ContentPart,
    Decision,
    DecisionAction,
    Message,
    ResumeRequest,
    Role,
    RunOptions,
    RunRequest,
    RunState,
    StopReason,
)
from dualclaw.errors import EngineError
from dualclaw_clients import cli_lists
from dualclaw_clients.cli_render import EventPrinter, Terminal, safe, safe_json, safe_line, short_name
from dualclaw_clients.command_line import checked, installed_version
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, NotServed, RunStream
from dualclaw_clients.settings import ClientSettings, SettingsError, check_target, load_settings, unknown_names

OK, FAILED, USAGE, REFUSED, UNREACHABLE, WAITS, CTRL_C, READER_LEFT = 0, 1, 2, 3, 4, 5, 130, 141

_ENDING = """\
exit codes:
  0    it worked
  1    the run failed, or somebody cancelled it
  2    wrong usage or settings
  3    the engine refused
  4    no engine can be reached
  5    the run waits for people to answer (see: dualclaw resume)
  130  ended by Ctrl-C
  141  the reader of the output left

environment:
  DUALCLAW_ENGINE   address of the engine (127.0.0.1:50051)
  DUALCLAW_API_KEY  key to show it; there is no option for it, because others can read command lines
  DUALCLAW_ENGINE_TLS, _CA_FILE, _CERT_FILE, _KEY_FILE   encryption
"""

_STATES = {short_name(RunState.Name, number, "RUN_STATE_"): number for number in RunState.values() if number}
_BUSY = {short_name(BusyPolicy.Name, number, "BUSY_POLICY_"): number for number in BusyPolicy.values() if number}
_ACTIONS = {
    short_name(DecisionAction.Name, number, "DECISION_ACTION_"): number for number in DecisionAction.values() if number
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; ``argv`` is without the program's name (None: sys.argv)."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a narrow locale must not break an answer
    terminal = Terminal(sys.stdout, sys.stderr)
    try:
        code = _main(argv, terminal)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return CTRL_C
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    return code


def _main(argv: Sequence[str] | None, terminal: Terminal) -> int:
    parser = _parser()
    try:
        args = parser.parse_args(argv)
        question = _question(args, parser) if args.command == "ask" else ""
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else USAGE
    for warning in unknown_names():
        terminal.line(f"dualclaw: warning: {warning}", "yellow")
    try:
        settings = load_settings(ClientSettings)
        client = settings.connect(getattr(args, "engine", ""))
    except SettingsError as error:
        for problem in error.problems:
            terminal.line(f"dualclaw: {safe_line(problem)}", "red")
        return USAGE
    try:
        return asyncio.run(_dispatch(args, question, client, terminal))
    except EngineUnreachable as error:
        terminal.line(f"dualclaw: {safe(error.message)}", "red")
        return UNREACHABLE
    except EngineError as error:
        reason = "" if isinstance(error, NotServed) else f" ({error.reason})"
        terminal.line(f"dualclaw: refused: {safe(error.message)}{reason}", "red")
        if error.reason == "CONVERSATION_BUSY" and (run_id := error.metadata.get("run_id")):
            terminal.line(f"  see: dualclaw attach {safe_line(run_id)}, or ask with --on-busy queue or replace")
        elif error.hint:
            terminal.line(f"  {safe_line(error.hint)}")
        return REFUSED


async def _dispatch(args: argparse.Namespace, question: str, client: EngineClient, terminal: Terminal) -> int:
    async with client:
        match args.command:
            case "ask":
                stream = client.run(_run_request(args, question))
                return await _show_stream(stream, terminal, args.json, cancel_by=client)
            case "attach":
                stream = client.attach(args.run, after_seq=args.after, wait=args.wait)
                return await _show_stream(stream, terminal, args.json, cancel_by=None)
            case "resume":
                stream = client.resume(await _decisions(args, client))
                return await _show_stream(stream, terminal, args.json, cancel_by=client)
            case "health":
                healthy = await client.check()
                terminal.print(f"{client.target}: {'serving' if healthy else 'not serving'}")
                return OK if healthy else UNREACHABLE
            case "cancel":
                run = await client.cancel(args.run, args.reason)
                terminal.print(f"run {safe_line(run.id)}: {short_name(RunState.Name, run.state, 'RUN_STATE_')}")
            case "runs":
                states = [_STATES[state] for state in args.state]
                await cli_lists.show_runs(
                    client, terminal, states=states, conversation_id=args.conversation,
                    limit=args.limit, as_json=args.json,
                )  # fmt: skip
            case "conversations" if args.id:
                await cli_lists.show_conversation(client, terminal, args.id, as_json=args.json)
            case "conversations":
                await cli_lists.show_conversations(client, terminal, limit=args.limit, as_json=args.json)
            case "agents" if args.name:
                await cli_lists.show_agent(client, terminal, args.name, as_json=args.json)
            case "agents":
                await cli_lists.show_agents(client, terminal, as_json=args.json)
    return OK


class _CtrlC:
    """What Ctrl-C does: once ``first`` is set the first press calls it, and any later one ends the program."""

    def __init__(self) -> None:
        self.first: Callable[[], Coroutine[None, None, None]] | None = None
        self.presses = 0
        self._task = asyncio.current_task()
        self._first_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "_CtrlC":
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._pressed)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._first_task is not None:  # its answer may come after the stream's end
            await asyncio.wait({self._first_task}, timeout=2)
            self._first_task.cancel()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _pressed(self) -> None:
        self.presses += 1
        if self.presses == 1 and self.first is not None:
            self._first_task = asyncio.create_task(self.first())
        elif self._task is not None:
            self._task.cancel()


async def _show_stream(stream: RunStream, terminal: Terminal, as_json: bool, *, cancel_by: EngineClient | None) -> int:
    printer = EventPrinter(terminal, as_json=as_json, from_start=stream.last_seq == 0)

    async def cancel() -> None:
        terminal.line("cancelling the run; Ctrl-C again quits at once", "yellow")
        try:
            if cancel_by is not None:
                await cancel_by.cancel(stream.run_id, "Ctrl-C at the command line")
        except EngineError as error:
            terminal.line(f"dualclaw: not cancelled: {safe(error.message)}", "red")

    async with _CtrlC() as ctrl_c:
        try:
            async with stream:
                if cancel_by is not None:
                    ctrl_c.first = cancel
                async for event in stream:
                    printer.show(event)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not ctrl_c.presses or task is None:
                raise
            task.uncancel()  # it was Ctrl-C, and it ends here
            if stream.run_id:
                terminal.line(f"quit; the run may go on: dualclaw attach {safe_line(stream.run_id)}", "yellow")
            return CTRL_C
    printer.finish(stream.run_id, stream.conversation_id)
    if ctrl_c.presses:
        return CTRL_C
    if printer.failed or printer.stop_reason == StopReason.STOP_REASON_CANCELLED:
        return FAILED
    return WAITS if printer.stop_reason == StopReason.STOP_REASON_INTERRUPTED else OK


def _run_request(args: argparse.Namespace, question: str) -> RunRequest:
    return RunRequest(
        agent=args.agent,
        conversation_id=args.conversation,
        request_id=args.request_id,
        message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=question)]),
        claw="cli",
        options=RunOptions(model=args.model, max_steps=args.max_steps),
        on_busy=_BUSY[args.on_busy],
    )


async def _decisions(args: argparse.Namespace, client: EngineClient) -> ResumeRequest:
    ids = args.id or [item.id for item in (await client.get_run(args.run)).interrupts]
    decisions = [
        Decision(
            interrupt_id=interrupt_id,
            action=_ACTIONS[args.action],
            args_json=args.args if args.action == "edit" else "",
            response_json=safe_json(args.text) if args.action == "respond" else "",
            comment=args.comment,
        )
        for interrupt_id in ids
    ]
    return ResumeRequest(run_id=args.run, decisions=decisions)


def _question(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    words = [_clean(word) for word in args.question]
    text = " ".join(words)
    if words == ["-"]:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not text.strip():
        parser.error("the question is empty")
    return text.rstrip("\r\n")


def _clean(text: str) -> str:
    """Return an argument as valid Unicode: bytes the locale could not read become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 0x7FFFFFFF:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _position(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--engine",
        metavar="HOST:PORT",
        type=checked(check_target),
        default=argparse.SUPPRESS,
        help="address of the engine",
    )
    lines = argparse.ArgumentParser(add_help=False)
    lines.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    parser = argparse.ArgumentParser(
        prog="dualclaw", description="Talk to a dualclaw engine.", epilog=_ENDING, parents=[common],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"dualclaw {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common, *parents])

    ask = command("ask", "Ask an agent and stream its answer. Ctrl-C cancels the run, twice quits.", lines)
    ask.add_argument("question", nargs="+", metavar="QUESTION", help="the question; - reads it from stdin")
    ask.add_argument("--agent", type=_clean, default="", help="name of the agent (the engine's default)")
    ask.add_argument("--conversation", type=_clean, default="", metavar="ID", help="go on with this conversation")
    ask.add_argument("--model", type=_clean, default="", help="one of the agent's models")
    ask.add_argument("--max-steps", type=_positive, default=0, metavar="N", help="at most so many model calls")
    ask.add_argument("--on-busy", choices=_BUSY, default="reject", help="if the conversation is busy (reject)")
    ask.add_argument("--request-id", type=_clean, default="", metavar="X", help="idempotency key of the run")

    attach = command("attach", "Show a run from any position on, and follow it. Ctrl-C leaves it running.", lines)
    attach.add_argument("run", type=_clean, metavar="RUN")
    attach.add_argument("--after", type=_position, default=0, metavar="N", help="only events after this seq")
    attach.add_argument("--wait", action="store_true", help="stay until the run is final")

    answer = command(
        "resume", "Answer a run that waits for people, and show how it goes on (where the engine serves it).", lines
    )
    answer.add_argument("run", type=_clean, metavar="RUN")
    answer.add_argument("action", choices=_ACTIONS, metavar="ACTION", help=", ".join(_ACTIONS))
    answer.add_argument("--id", type=_clean, action="append", help="the question answered (all that are open)")
    answer.add_argument("--args", type=_clean, default="", metavar="JSON", help="with edit: the new arguments")
    answer.add_argument("--text", type=_clean, default="", help="with respond: the answer")
    answer.add_argument("--comment", type=_clean, default="", help="a remark for the record and the model")

    cancel = command("cancel", "Ask a run to end.")
    cancel.add_argument("run", type=_clean, metavar="RUN")
    cancel.add_argument("--reason", type=_clean, default="", help="why, for the record")

    command("health", "Say whether the engine takes calls; exit code 0 if so, else 4.")

    runs = command("runs", "List runs, newest first.", lines)
    runs.add_argument("--state", nargs="+", action="extend", choices=_STATES, default=[], help="only these")
    runs.add_argument("--conversation", type=_clean, default="", metavar="ID", help="only this conversation's")
    runs.add_argument("--limit", type=_positive, default=50, metavar="N", help="at most so many (50)")

    conversations = command(
        "conversations", "List conversations, the last changed first; `conversations show ID` shows one.", lines
    )
    conversations.usage = "%(prog)s [-h] [--engine HOST:PORT] [--json] [--limit N] [show ID]"
    conversations.add_argument("--limit", type=_positive, default=50, metavar="N", help="at most so many (50)")
    conversations.set_defaults(id="")
    show_text = "Show the conversation with this id and its messages, the oldest first."
    show = conversations.add_subparsers(
        metavar="show ID", prog="dualclaw conversations", help=show_text[:1].lower() + show_text[1:].rstrip(".")
    ).add_parser("show", parents=[common], description=show_text)
    show.add_argument("id", type=_clean, metavar="ID")
    show.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object a line")

    agents = command("agents", "List agents, or show one.", lines)
    agents.add_argument("name", type=_clean, nargs="?", default="", metavar="NAME")
    return parser


if __name__ == "__main__":
    sys.exit(main())
