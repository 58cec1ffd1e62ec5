"""The command line: asks an engine, follows, answers and ends runs, and shows what there is.

Nothing a user can do wrong shows a traceback: it is a line on stderr and an exit code, listed in ``--help``.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing

from google.protobuf.json_format import SerializeToJsonError

from dualclaw import ContentPart, Message, ResumeRequest, Role, RunOptions, RunRequest, RunState
from dualclaw.errors import EngineError
from dualclaw_clients import cli_doctor, cli_graph, cli_lists, cli_operate
from dualclaw_clients.cli_answers import AnswerUsage, Person, decision_template, decisions_by_id, decisions_for
from dualclaw_clients.cli_parser import BUSY, RETRIES, STATES, check_usage, clean, make_parser
from dualclaw_clients.cli_render import Terminal, safe, safe_line, short_name
from dualclaw_clients.cli_talk import CTRL_C, FAILED, OK, Talk
from dualclaw_clients.contract_check import command as contract_check
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, NotServed
from dualclaw_clients.settings import ClientSettings, SettingsError, editor, load_settings, unknown_names

USAGE, REFUSED, UNREACHABLE, READER_LEFT = 2, 3, 4, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; ``argv`` is without the program's name (None: sys.argv)."""
    _open_missing_streams()
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
        _discard_output()
        return READER_LEFT
    except OSError as error:
        _discard_output()
        return _tell_of(error)
    return code


def _open_missing_streams() -> None:
    """Open what was closed at start, which Python has None for: nothing comes in, and what goes out is lost."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for the life of the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # as above
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as above


def _discard_output() -> None:
    """Throw away what is still buffered: Python flushes stdout once more at exit, and that must not fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell_of(error: OSError) -> int:
    with contextlib.suppress(OSError):  # stderr may be on the same full disk
        sys.stderr.write(f"dualclaw: the input cannot be read or the output not written: {error.strerror or error}\n")
        sys.stderr.flush()
    return USAGE


def _main(argv: Sequence[str] | None, terminal: Terminal) -> int:
    parser = make_parser()
    on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    try:
        args = parser.parse_args(argv)
        check_usage(args, parser, on_terminal=on_terminal)
        question = _question(args, parser) if args.command == "ask" else ""
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else USAGE
    if args.command == "doctor":
        return _doctor(args, terminal)
    if args.command == "contract":
        return contract_check.run(args, sys.stdout, sys.stderr)
    if args.command == "conformance":
        from dualclaw_clients.conformance import command as conformance  # noqa: PLC0415  # heavy, and for this alone

        return conformance.run(args, sys.stdout, sys.stderr)
    if args.command == "run" and args.verb == "purge" and not args.yes and not cli_operate.is_meant(args.run, terminal):
        return FAILED
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
        person = Person(terminal, sys.stdin.fileno(), editor()) if on_terminal and _may_ask(args) else None
        return asyncio.run(_dispatch(args, question, client, terminal, person))
    except EngineUnreachable as error:
        terminal.line(f"dualclaw: {safe(error.message)}", "red")
        return UNREACHABLE
    except SerializeToJsonError as error:  # such as a time beyond all calendars
        terminal.line(f"dualclaw: what the engine answered has no JSON form: {safe_line(str(error))}", "red")
        return REFUSED
    except cli_graph.OutputProblem as error:
        terminal.line(f"dualclaw: {safe_line(str(error))}", "red")
        return USAGE
    except AnswerUsage as error:
        for line in (f"dualclaw: resume: {error}", *error.lines):
            terminal.line(line)
        return USAGE
    except EngineError as error:
        reason = "" if isinstance(error, NotServed) else f" ({error.reason})"
        terminal.line(f"dualclaw: refused: {safe(error.message)}{reason}", "red")
        if error.reason == "CONVERSATION_BUSY" and (run_id := error.metadata.get("run_id")):
            terminal.line(f"  see: dualclaw attach {safe_line(run_id)}, or ask with --on-busy queue or replace")
        elif error.hint:
            terminal.line(f"  {safe_line(error.hint)}")
        return REFUSED


def _doctor(args: argparse.Namespace, terminal: Terminal) -> int:
    report = cli_doctor.Report(terminal, as_json=args.json)
    for finding in cli_doctor.of_installation(unknown_names()):
        report.add(finding)
    try:
        settings = load_settings(ClientSettings)
        client = settings.connect(getattr(args, "engine", ""))
    except SettingsError as error:
        for finding in cli_doctor.of_settings(error.problems):
            report.add(finding)
        return FAILED

    async def examine() -> None:
        async with client, aclosing(cli_doctor.examine(client, settings)) as findings:
            async for finding in findings:
                report.add(finding)

    asyncio.run(examine())
    return FAILED if report.failed else OK


async def _dispatch(
    args: argparse.Namespace, question: str, client: EngineClient, terminal: Terminal, person: Person | None
) -> int:
    async with client:
        talk = Talk(client, terminal, person, as_json=getattr(args, "json", False))
        match args.command:
            case "ask":
                return await talk.ask(_run_request(args, question))
            case "attach":
                return await talk.attach(args.run, after_seq=args.after, wait=args.wait)
            case "resume" if args.action is None and not args.history_edit and not args.decision:
                return await talk.answer(args.run)
            case "resume":
                return await talk.resume(await _resume_request(args, client))
            case "health":
                healthy = await client.check()
                terminal.print(f"{client.target}: {'serving' if healthy else 'not serving'}")
                return OK if healthy else UNREACHABLE
            case "cancel":
                run = await client.cancel(args.run, args.reason)
                terminal.print(f"run {safe_line(run.id)}: {short_name(RunState.Name, run.state, 'RUN_STATE_')}")
            case "runs":
                states = [STATES[state] for state in args.state]
                await cli_lists.show_runs(
                    client, terminal, states=states, conversation_id=args.conversation,
                    limit=args.limit, as_json=args.json,
                )  # fmt: skip
            case "run":
                await _operate(args, client, terminal)
            case "graph":
                await cli_graph.draw(client, terminal, args.agent, args.output)
            case "conversations" if args.id:
                await cli_lists.show_conversation(client, terminal, args.id, as_json=args.json)
            case "conversations":
                await cli_lists.show_conversations(client, terminal, limit=args.limit, as_json=args.json)
            case "agents" if args.name:
                await cli_lists.show_agent(client, terminal, args.name, as_json=args.json)
            case "agents":
                await cli_lists.show_agents(client, terminal, as_json=args.json)
            case "interceptor":
                info = await client.set_interceptor_enabled(args.agent, args.name, args.state == "on")
                state = "on" if info.enabled else "off"
                terminal.print(f"interceptor {safe_line(info.name)} of {safe_line(args.agent)}: {state}")
    return OK


async def _operate(args: argparse.Namespace, client: EngineClient, terminal: Terminal) -> None:
    match args.verb:
        case "show":
            await cli_operate.show_run(client, terminal, args.run, as_json=args.json)
        case "retry":
            await cli_operate.retry_run(client, terminal, args.run, args.request_id, as_json=args.json)
        case "release":
            await cli_operate.release_run(client, terminal, args.run, as_json=args.json)
        case "purge":
            await cli_operate.purge_run(client, terminal, args.run, as_json=args.json)


def _may_ask(args: argparse.Namespace) -> bool:
    return args.command in ("ask", "resume") and not args.json and not args.no_input


def _run_request(args: argparse.Namespace, question: str) -> RunRequest:
    return RunRequest(
        agent=args.agent,
        conversation_id=args.conversation,
        request_id=args.request_id,
        message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=question)]),
        claw="cli",
        options=RunOptions(
            model=args.model,
            max_steps=args.max_steps,
            retry_mode=RETRIES[args.retry_mode],
        ),
        on_busy=BUSY[args.on_busy],
    )


async def _resume_request(args: argparse.Namespace, client: EngineClient) -> ResumeRequest:
    request = ResumeRequest(
        run_id=args.run, request_id=args.request_id, decisions=args.decision, history_edits=args.history_edit
    )
    if args.action is not None:
        template = decision_template(
            args.action,
            args=args.args,
            response=args.response,
            response_json=args.response_json,
            comment=args.comment,
            remember=args.remember or "",
        )
        if args.id:
            request.decisions.extend(decisions_by_id(args.id, template))
        else:
            run = await client.get_run(args.run)
            request.decisions.extend(decisions_for(run, template, answer_all=args.all))
    return request


def _question(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    words = [clean(word) for word in args.question]
    text = " ".join(words)
    if words == ["-"]:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not text.strip():
        parser.error("the question is empty")
    return text.rstrip("\r\n")


if __name__ == "__main__":
    sys.exit(main())
