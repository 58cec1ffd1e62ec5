"""The commands of operators: one run from inside, taken from a process, asked again, purged."""

import sys

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message as ProtoMessage

from dualclaw import FrameInfo, InspectRunResponse, Phase, RunState
from dualclaw_clients.cli_render import Terminal, question_lines, safe, safe_json, safe_line, short_name, time_text
from dualclaw_clients.engine_client import EngineClient

_PHASES = {"": "not started", "start": "begun", "ok": "ended well", "fail": "ended badly"}


async def show_run(client: EngineClient, terminal: Terminal, run_id: str, *, as_json: bool) -> None:
    """Show a run from inside: what is stored of it, who works on it, and what it waits for."""
    shown = await client.inspect_run(run_id)
    if as_json:
        _print_json(shown, terminal)
        return
    run = shown.run
    state = short_name(RunState.Name, run.state, "RUN_STATE_")
    terminal.print(f"run {safe_line(run.id)}: {state}")
    for name, text in (
        ("agent", run.agent),
        ("conversation", run.conversation_id),
        ("asked by", run.claw),
        ("created", time_text(run.create_time)),
        ("changed", time_text(run.update_time)),
        ("at work", _work(shown)),
        ("log", _log(shown)),
        ("claims", _claims(shown)),
        ("error", run.error.message),
        ("woken at", ", ".join(map(time_text, shown.timer_times))),
        ("unread", ", ".join(shown.unread_signals)),
    ):
        if text:
            terminal.print(f"  {name + ':':14}{safe_line(text)}")
    if run.error.diagnosis.hint:
        terminal.print(f"  {'':14}{safe(run.error.diagnosis.hint)}")
    for item in run.interrupts:
        for line in question_lines(item, run.id):
            terminal.print(line)
    if shown.open_calls:
        calls = [
            [call.call_id, call.tool_name, _PHASES.get(phase := short_name(Phase.Name, call.phase, "PHASE_"), phase)]
            for call in shown.open_calls
        ]
        terminal.print("calls of the unfinished message:")
        terminal.table("", ["call", "tool", "phase"], calls)
    terminal.print("frames, oldest first:")
    rows = [_row(frame) for frame in shown.frames]
    terminal.table("", ["events", "epoch", "state", "kind", "bytes"], rows)


async def retry_run(client: EngineClient, terminal: Terminal, run_id: str, request_id: str, *, as_json: bool) -> None:
    """Ask the question of a run again and say which run does it."""
    run = await client.retry_run(run_id, request_id=request_id)
    if as_json:
        _print_json(run, terminal)
        return
    terminal.print(f"run {safe_line(run.id)}: {short_name(RunState.Name, run.state, 'RUN_STATE_')}")
    terminal.line(f"  follow it: dualclaw attach {safe_line(run.id)}")


async def release_run(client: EngineClient, terminal: Terminal, run_id: str, *, as_json: bool) -> None:
    """Take a run from its worker and say whether there was anything to take."""
    answer = await client.release_run(run_id)
    if as_json:
        _print_json(answer, terminal)
        return
    state = short_name(RunState.Name, answer.run.state, "RUN_STATE_")
    what = (
        "released, the next free worker takes it" if answer.released else "nobody has to work on it; nothing was done"
    )
    terminal.print(f"run {safe_line(run_id)}: {state}; {what}")


async def purge_run(client: EngineClient, terminal: Terminal, run_id: str, *, as_json: bool) -> None:
    """Purge a run and say so."""
    await client.purge_run(run_id)
    terminal.print(safe_json({"purged": run_id}) if as_json else f"run {safe_line(run_id)}: purged")


def is_meant(run_id: str, terminal: Terminal) -> bool:
    """Ask the person at the terminal whether a run shall be purged; anything but yes is a no."""
    terminal.line(f"This purges the log, checkpoint and record of run {safe_line(run_id)}; its messages stay.", "bold")
    terminal.prompt("There is no way back. Type yes to go on: ")
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        terminal.line("")
    if answer.strip().lower() == "yes":
        return True
    terminal.line("nothing was purged", "yellow")
    return False


def _work(shown: InspectRunResponse) -> str:
    """Say who has to do something about the run, and until when."""
    if shown.worker:
        return f"{shown.worker}, its lease ends {time_text(shown.ready_time)}"
    if shown.HasField("ready_time"):
        return f"nobody; it can be claimed from {time_text(shown.ready_time)} on"
    if shown.run.interrupts:
        return "nobody; it waits for people"
    return "nobody; nothing is to be done"


def _log(shown: InspectRunResponse) -> str:
    first, last = shown.kept_from_seq, shown.run.last_seq
    kept = f"events {first} to {last}" if first <= last else f"no events of {last}" if last else "no events yet"
    compacted = ", those before are compacted away" if first > 1 else ""
    return f"{kept}{compacted}; {shown.version} frames in all"


def _claims(shown: InspectRunResponse) -> str:
    parts = [f"epoch {shown.epoch}"]
    if shown.segment:
        parts.append(f"segment {shown.segment}")
    if shown.deliveries:
        parts.append(f"delivered {_times(shown.deliveries)}")
    if shown.recoveries:
        parts.append(f"this segment was taken over {_times(shown.recoveries)}")
    return ", ".join(parts)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _row(frame: FrameInfo) -> list[str]:
    last = frame.first_seq + frame.event_count - 1
    events = str(frame.first_seq) if last == frame.first_seq else f"{frame.first_seq}-{last}"
    return [
        events if frame.event_count else "none",
        str(frame.epoch),
        short_name(RunState.Name, frame.state, "RUN_STATE_"),
        "durable" if frame.durable else "text",
        str(frame.size),
    ]


def _print_json(message: ProtoMessage, terminal: Terminal) -> None:
    terminal.print(safe_json(MessageToDict(message, preserving_proto_field_name=True)))
