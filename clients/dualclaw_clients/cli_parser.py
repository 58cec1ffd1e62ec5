"""The arguments of the command line: what can be typed, and what is wrong with it before any engine is asked."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from google.protobuf import json_format

from dualclaw import BusyPolicy, Decision, DecisionAction, HistoryEdit, RememberScope, RetryMode, RunState
from dualclaw_clients.cli_render import short_name
from dualclaw_clients.command_line import checked, installed_version
from dualclaw_clients.conformance import command_parser as conformance
from dualclaw_clients.contract_check import command as contract_check
from dualclaw_clients.settings import check_target

_Number = TypeVar("_Number", bound=int)


def _by_name(name: Callable[[_Number], str], numbers: Sequence[_Number], prefix: str) -> Mapping[str, _Number]:
    return {short_name(name, number, prefix): number for number in numbers if number}


STATES = _by_name(RunState.Name, RunState.values(), "RUN_STATE_")
BUSY = _by_name(BusyPolicy.Name, BusyPolicy.values(), "BUSY_POLICY_")
ACTIONS = _by_name(DecisionAction.Name, DecisionAction.values(), "DECISION_ACTION_")
RETRIES = _by_name(RetryMode.Name, RetryMode.values(), "RETRY_MODE_")
SCOPES = _by_name(RememberScope.Name, RememberScope.values(), "REMEMBER_SCOPE_")

_ENDING = """\
exit codes:
  0    it worked
  1    the run failed, or somebody cancelled it; doctor found a fault; purge was not confirmed
  2    wrong usage or settings; the input cannot be read or the output not written
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


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of everything that can be typed."""
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
    talks = argparse.ArgumentParser(add_help=False)
    talks.add_argument(
        "--no-input", action="store_true", help="never ask the person at the terminal; say how to answer, and end"
    )
    parser = argparse.ArgumentParser(
        prog="dualclaw", description="Talk to a dualclaw engine.", epilog=_ENDING, parents=[common],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"dualclaw {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common, *parents])

    _add_ask(
        command(
            "ask",
            "Ask an agent and stream its answer. Ctrl-C cancels the run, twice quits. What the run asks back can be "
            "answered right there on a terminal.",
            lines,
            talks,
        )
    )
    attach = command("attach", "Show a run from any position on, and follow it. Ctrl-C leaves it running.", lines)
    attach.add_argument("run", type=clean, metavar="RUN")
    attach.add_argument("--after", type=_position, default=0, metavar="N", help="only events after this seq")
    attach.add_argument("--wait", action="store_true", help="stay until the run is final")

    _add_resume(
        command(
            "resume",
            "Answer a run that waits for people, and show how it goes on. Ctrl-C cancels the run.",
            lines,
            talks,
        )
    )

    cancel = command("cancel", "Ask a run to end.")
    cancel.add_argument("run", type=clean, metavar="RUN")
    cancel.add_argument("--reason", type=clean, default="", help="why, for the record")

    command("health", "Say whether the engine takes calls; exit code 0 if so, else 4.")

    runs = command("runs", "List runs, newest first.", lines)
    runs.add_argument("--state", nargs="+", action="extend", choices=STATES, default=[], help="only these")
    runs.add_argument("--conversation", type=clean, default="", metavar="ID", help="only this conversation's")
    runs.add_argument("--limit", type=_positive, default=50, metavar="N", help="at most so many (50)")

    _add_run(commands, common, lines)

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
    show.add_argument("id", type=clean, metavar="ID")
    show.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object a line")

    agents = command("agents", "List agents with their interceptors, or show one.", lines)
    agents.add_argument("name", type=clean, nargs="?", default="", metavar="NAME")

    graph = command("graph", "Draw an agent, its tools, sub-agents and interceptors as a Mermaid flowchart.")
    graph.add_argument("agent", type=clean, nargs="?", default="", metavar="AGENT", help="its name (the default agent)")
    graph.add_argument("--output", type=clean, default="", metavar="FILE", help="write it there instead of to stdout")

    command(
        "doctor",
        "Say what is configured, reachable and missing, and what to do about it; exit code 0 if nothing is in the way.",
        lines,
    )

    switch = command("interceptor", "Switch an interceptor of an agent for runs that begin or go on from now on.")
    switch.add_argument("agent", type=clean, metavar="AGENT")
    switch.add_argument("name", type=clean, metavar="INTERCEPTOR")
    switch.add_argument("state", choices=("on", "off"), metavar="on|off")

    contract_check.add_parser(commands)
    conformance.add_parser(commands)
    return parser


def check_usage(args: argparse.Namespace, parser: argparse.ArgumentParser, *, on_terminal: bool) -> None:
    """End with a usage error for options that do not fit; ``on_terminal`` says that a person can be asked."""
    if args.command == "run" and args.verb == "purge" and not (args.yes or on_terminal):
        parser.error("run purge: there is nobody to ask whether it is meant; say so with --yes")
    if args.command != "resume":
        return
    action = args.action
    if args.decision and (action is not None or args.id or args.all or args.comment):
        parser.error("resume: --decision holds whole answers; it stands in place of ACTION and its options")
    if (
        action is None
        and not args.history_edit
        and not args.decision
        and not (on_terminal and not args.json and not args.no_input)
    ):
        parser.error(f"resume: ACTION is missing, one of {', '.join(ACTIONS)}")
    if args.id and args.all:
        parser.error("resume: --id names questions and --all means every one; give one of the two")
    for option, given, wanted in (
        ("--args", args.args, "edit"),
        ("--response", args.response, "respond"),
        ("--response-json", args.response_json, "respond"),
    ):
        if given is not None and action != wanted:
            parser.error(f"resume: {option} is for {wanted}")
    if args.remember and action != "approve":
        parser.error("resume: --remember is for approve")
    if action == "edit" and args.args is None:
        parser.error("resume: edit needs --args with the new arguments")
    if action == "respond" and args.response is None and args.response_json is None:
        parser.error("resume: respond needs --response with the answer, or --response-json")


def _add_run(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    common: argparse.ArgumentParser,
    lines: argparse.ArgumentParser,
) -> None:
    text = "Look inside a run, or move it: for operators."
    verbs = commands.add_parser("run", help=text, description=text, parents=[common]).add_subparsers(
        dest="verb", required=True, metavar="VERB"
    )

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text, parents=[common, lines])
        made.add_argument("run", type=clean, metavar="RUN")
        return made

    verb("show", "Show where a run stands: its worker, epoch, frames, open calls, timers and unread signals.")
    retry = verb("retry", "Ask the question of a run that is at its end again, as a new run of its conversation.")
    retry.add_argument("--request-id", type=clean, default="", metavar="X", help="idempotency key of the new run")
    verb("release", "Take a run from the process that works on it, so that another one gets it at once.")
    purge = verb("purge", "Purge the log, checkpoint and record of a run that is at its end; its messages stay.")
    purge.add_argument("--yes", action="store_true", help="do not ask whether it is meant")


def clean(text: str) -> str:
    """Return an argument as valid Unicode: bytes the locale could not read become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _add_ask(ask: argparse.ArgumentParser) -> None:
    ask.add_argument("question", nargs="+", metavar="QUESTION", help="the question; - reads it from stdin")
    ask.add_argument("--agent", type=clean, default="", help="name of the agent (the engine's default)")
    ask.add_argument("--conversation", type=clean, default="", metavar="ID", help="go on with this conversation")
    ask.add_argument("--model", type=clean, default="", help="one of the agent's models")
    ask.add_argument("--max-steps", type=_positive, default=0, metavar="N", help="at most so many model calls")
    ask.add_argument(
        "--retry-mode", choices=RETRIES, default="live", help="if the model's stream breaks after text was shown (live)"
    )
    ask.add_argument("--on-busy", choices=BUSY, default="reject", help="if the conversation is busy (reject)")
    ask.add_argument("--request-id", type=clean, default="", metavar="X", help="idempotency key of the run")


def _add_resume(resume: argparse.ArgumentParser) -> None:
    resume.add_argument("run", type=clean, metavar="RUN")
    resume.add_argument(
        "action",
        nargs="?",
        choices=ACTIONS,
        metavar="ACTION",
        help=f"{', '.join(ACTIONS)}; left out on a terminal: every question is asked there",
    )
    resume.add_argument(
        "--id", type=clean, action="append", metavar="ID", help="the question answered; needed if several are open"
    )
    resume.add_argument("--all", action="store_true", help="answer every open question that takes the action")
    resume.add_argument("--args", type=clean, metavar="JSON", help="with edit: the new arguments, one object")
    answer = resume.add_mutually_exclusive_group()
    answer.add_argument("--response", type=clean, metavar="TEXT", help="with respond: the answer in words")
    answer.add_argument("--response-json", type=clean, metavar="JSON", help="with respond: the answer as any JSON")
    resume.add_argument("--comment", type=clean, default="", help="a remark for the record and the model")
    resume.add_argument(
        "--remember",
        choices=SCOPES,
        help="with approve: for this call alone (the default), the conversation, or the tenant (role operator)",
    )
    resume.add_argument(
        "--history-edit",
        type=_history_edit,
        action="append",
        default=[],
        metavar="JSON",
        help="change what the model is given (role operator), as protobuf JSON of a HistoryEdit, such as "
        '{"remove_message_id": "ID"}; may be repeated',
    )
    resume.add_argument(
        "--decision",
        type=_decision,
        action="append",
        default=[],
        metavar="JSON",
        help="in place of ACTION: a whole answer as JSON of a Decision, such as "
        '{"interrupt_id": "ID", "action": "edit", "args_json": "{}"}; repeated, all are given together or none',
    )
    resume.add_argument("--request-id", type=clean, default="", metavar="X", help="idempotency key of the answer")


def _decision(text: str) -> Decision:
    try:
        found = json.loads(clean(text))
        if isinstance(found, dict) and found.get("action") in ACTIONS:
            found["action"] = ACTIONS[found["action"]]
        decision = json_format.ParseDict(found, Decision())
    except (ValueError, TypeError, ArithmeticError, RecursionError, json_format.ParseError) as error:
        raise argparse.ArgumentTypeError(f"is no Decision as JSON: {error}") from None
    if not decision.interrupt_id or not decision.action:
        raise argparse.ArgumentTypeError(f"needs interrupt_id and action, one of {', '.join(ACTIONS)}")
    return decision


def _history_edit(text: str) -> HistoryEdit:
    try:
        return json_format.Parse(clean(text), HistoryEdit())
    except (ArithmeticError, RecursionError, json_format.ParseError) as error:
        raise argparse.ArgumentTypeError(f"is no HistoryEdit as JSON: {error}") from None


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 0x7FFFFFFF:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _position(text: str) -> int:
    return 0 if text == "0" else _positive(text)
