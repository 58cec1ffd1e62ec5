"""The rules of a stream as a function: a good stream passes, every kind of bad one is named."""

from collections.abc import Callable

import pytest

from dualclaw import EngineEvent
from dualclaw.events import (
    make_delta,
    make_done,
    make_error,
    make_interrupt,
    make_reasoning,
    make_rewind,
    make_step,
)
from dualclaw.fold import RunView
from dualclaw.rules import check_stream

FIRST, SECOND = "0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"
ASKS = {"code": "approval.required", "severity": "warning", "summary": "Send?"}


def ending(view: RunView, **fields: object) -> EngineEvent:
    """The ``done`` that says what the view says, with these fields changed."""
    said: dict[str, object] = {
        "message_id": "m",
        "conversation_id": "c",
        "content": view.text,
        "process_steps": view.process_steps,
        "used_skills": view.used_skills,
        "used_mcp": view.used_mcp,
        "stop_reason": "finished",
    }
    return make_done(**{**said, **fields})  # type: ignore[arg-type]


def stream(*events: EngineEvent | Callable[[RunView], EngineEvent]) -> list[EngineEvent]:
    """A run of these events with right envelopes; a callable is given the view so far."""
    view, found, trace = RunView(), [], FIRST
    for entry in events:
        event = entry(view) if callable(entry) else entry
        if view.terminal is not None:
            trace = SECOND
        event.seq, event.trace_id, event.run_id = len(found) + 1, trace, "r"
        view.apply(event)
        found.append(event)
    return found


def start(index: int = 0, name: str = "n", **fields: object) -> EngineEvent:
    return make_step("skill", name=name, phase="start", index=index, **fields)  # type: ignore[arg-type]


def end(index: int = 0, name: str = "n", phase: str = "ok", **fields: object) -> EngineEvent:
    return make_step("skill", name=name, phase=phase, index=index, result="r", **fields)  # type: ignore[arg-type]


def parked(view: RunView) -> EngineEvent:
    return ending(view, stop_reason="interrupted")


def asks() -> EngineEvent:
    return make_interrupt([{"id": "i", "kind": "approval", "args": {"a": 1}}])


GOOD = {
    "answer": lambda: stream(make_delta("a"), make_delta("b"), ending),
    "nothing_said": lambda: stream(ending),
    "failure": lambda: stream(make_delta("a"), make_error("bad")),
    "rewind": lambda: stream(make_delta("abc"), make_rewind("a"), make_delta("d"), ending),
    "steps": lambda: stream(
        make_reasoning("t"),
        make_step("thinking", text="t", index=0),
        start(1, args={"a": 1.0}),
        start(2, name="x"),
        end(2, name="x", phase="fail", diagnosis={"code": "tool.unknown", "severity": "error", "summary": "s"}),
        end(1),
        make_delta("a"),
        ending,
    ),
    "interrupted": lambda: stream(make_delta("a"), start(), asks(), parked),
    "resumed": lambda: stream(start(), asks(), parked, end(), make_delta("b"), ending),
    "asked_again": lambda: stream(start(), asks(), parked, asks(), parked, end(), ending),
    "cancelled_while_parked": lambda: stream(
        start(), asks(), parked, end(phase="fail"), lambda view: ending(view, stop_reason="cancelled")
    ),
    "step_begins_and_ceases_to_wait": lambda: stream(
        start(), start(diagnosis=ASKS), asks(), parked, start(), end(), ending
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_stream_passes(name: str) -> None:
    """What the contract allows is not complained about."""
    assert check_stream(GOOD[name]()) == []


def changed(events: list[EngineEvent], position: int, **fields: object) -> list[EngineEvent]:
    """The events, one of them with another envelope."""
    for key, value in fields.items():
        setattr(events[position], key, value)
    return events


def raw_args(text: str) -> EngineEvent:
    """A start whose args_json is this very text."""
    event = start()
    event.step.step.args_json = text
    return event


BAD: list[tuple[str, str, Callable[[], list[EngineEvent]]]] = [
    ("R1", "starts_at_0", lambda: changed(stream(make_delta("a"), ending), 0, seq=0)),
    ("R1", "gap", lambda: changed(stream(make_delta("a"), ending), 1, seq=3)),
    ("R1", "repeat", lambda: changed(stream(make_delta("a"), ending), 1, seq=1)),
    ("R1", "starts_anew_in_a_later_segment", lambda: changed(stream(asks(), parked, ending), 2, seq=1)),
    ("R2", "no_events", list),
    ("R2", "no_end", lambda: stream(make_delta("a"))),
    ("R2", "event_after_done", lambda: stream(ending, make_delta("a"), ending)),
    ("R2", "event_after_error", lambda: stream(make_error("bad"), ending)),
    ("R3", "interrupt_without_done", lambda: stream(asks(), make_delta("a"), ending)),
    ("R3", "interrupt_then_finished", lambda: stream(asks(), ending)),
    ("R3", "interrupted_without_interrupt", lambda: stream(parked)),
    ("R3", "empty_interrupt", lambda: stream(make_interrupt([]), parked)),
    ("R4", "no_index", lambda: stream(make_step("thinking", text="t"), ending)),
    ("R4", "no_phase", lambda: stream(make_step("skill", name="n", index=0), ending)),
    ("R4", "end_without_start", lambda: stream(end(), ending)),
    ("R4", "two_starts", lambda: stream(start(), start(), end(), ending)),
    ("R4", "second_start_after_a_crash", lambda: stream(start(args={"a": 1}), start(), end(), ending)),
    ("R4", "two_ends", lambda: stream(start(), end(), end(phase="fail"), ending)),
    ("R4", "start_after_end", lambda: stream(start(), end(), start(), end(), ending)),
    ("R4", "index_of_another_step", lambda: stream(start(), end(name="m"), ending)),
    ("R4", "open_in_a_final_run", lambda: stream(start(), ending)),
    ("R4", "open_in_a_failed_run", lambda: stream(start(), make_error("bad"))),
    ("R4", "thinking_with_phase", lambda: stream(make_step("thinking", text="t", phase="ok", index=0), ending)),
    (
        "R4",
        "thinking_twice",
        lambda: stream(make_step("thinking", text="t", index=0), make_step("thinking", text="u", index=0), ending),
    ),
    ("R5", "text_missing", lambda: stream(make_delta("a"), lambda view: ending(view, content=""))),
    ("R5", "text_trimmed", lambda: stream(make_delta("a "), lambda view: ending(view, content="a"))),
    ("R5", "text_of_segment_before", lambda: stream(make_delta("a"), asks(), parked, lambda v: ending(v, content="a"))),
    ("R6", "step_missing", lambda: stream(start(), end(), lambda view: ending(view, process_steps=[]))),
    ("R6", "other_result", lambda: stream(start(), end(), lambda v: ending(v, process_steps=[start().step.step]))),
    ("R6", "other_order", lambda: stream(start(), end(), start(1, name="m"), end(1, name="m"),
                                         lambda v: ending(v, process_steps=v.process_steps[::-1]))),
    ("R7", "skill_missing", lambda: stream(start(), end(), lambda view: ending(view, used_skills=[]))),
    ("R7", "skill_too_many", lambda: stream(lambda view: ending(view, used_skills=["n"]))),
    ("R7", "mcp_too_many", lambda: stream(lambda view: ending(view, used_mcp=["n"]))),
    ("R8", "no_trace", lambda: changed(stream(make_delta("a"), ending), 1, trace_id="")),
    ("R8", "upper_case", lambda: changed(stream(ending), 0, trace_id=FIRST.upper())),
    ("R8", "all_zero", lambda: changed(stream(ending), 0, trace_id="0" * 32)),
    ("R8", "trace_changes", lambda: changed(stream(make_delta("a"), ending), 1, trace_id=SECOND)),
    ("R8", "no_run_id", lambda: changed(stream(ending), 0, run_id="")),
    ("R8", "run_id_changes", lambda: changed(stream(make_delta("a"), ending), 1, run_id="s")),
    ("R9", "compact", lambda: stream(raw_args('{"a":1}'), end(), ending)),
    ("R9", "no_json", lambda: stream(raw_args("a"), end(), ending)),
    ("R9", "a_list", lambda: stream(raw_args("[]"), end(), ending)),
    ("R9", "float", lambda: stream(raw_args('{"a": 1E2}'), end(), ending)),
    ("R9", "escaped", lambda: stream(raw_args('{"a": "\\u4f60"}'), end(), ending)),
    ("R9", "duplicate_key", lambda: stream(raw_args('{"a": 1, "a": 1}'), end(), ending)),
    ("R9", "in_done", lambda: stream(start(), raw_args('{"a":1}'), ending)),
    ("R9", "in_interrupt", lambda: stream(EngineEvent(interrupt={"items": [{"id": "i", "args_json": "{ }"}]}), parked)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "name", "make"), BAD, ids=[f"{rule}_{name}" for rule, name, _ in BAD])
def test_bad_stream_is_named_by_its_rule(rule: str, name: str, make: Callable[[], list[EngineEvent]]) -> None:
    """Each way of breaking a rule is found, and the message begins with the rule and says where."""
    found = check_stream(make())
    assert any(violation.startswith(f"{rule} at ") for violation in found), (name, found)


def test_one_fault_is_told_once() -> None:
    """A lost event is one violation and not one for every event that follows."""
    events = stream(*(make_delta("a") for _ in range(20)), ending)
    assert check_stream(changed(events, 4, trace_id="x")) == ["R8 at 5: trace_id 'x' is not 32 hex digits"]


def test_events_are_not_changed_by_being_checked() -> None:
    """The stream may be used further."""
    events = changed(stream(make_delta("a"), ending), 1, seq=9)
    before = [event.SerializeToString() for event in events]
    check_stream(events)
    assert [event.SerializeToString() for event in events] == before
