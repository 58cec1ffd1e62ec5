"""What every store does alike with a run's public record and its appends; pure functions over values.

The time of a record is whole microseconds since the epoch: what protobuf, SQLite and Python's clocks all
hold without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from dualclaw import Conversation, Run, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.store import FINAL, Answers, Fenced, Frame, Head, Sync

Clock = Callable[[], float]
"""Seconds since the epoch; ``time.time`` in service, a hand-moved one in tests."""

LEASE = 30.0
"""Seconds a run stays with a process that shows no sign of life, unless told otherwise."""

UNSPECIFIED = RunState.RUN_STATE_UNSPECIFIED
QUEUED = RunState.RUN_STATE_QUEUED
RUNNING = RunState.RUN_STATE_RUNNING
INTERRUPTED = RunState.RUN_STATE_INTERRUPTED


def micros(clock: Clock) -> int:
    """Return the present time in microseconds."""
    return int(clock() * 1_000_000)


def public_run(info: bytes, state: int, last_seq: int, created: int, updated: int) -> Run:
    """Return the public record with what the store knows better than its writer filled in."""
    run = Run.FromString(info)
    run.state = RunState.ValueType(state)
    if state != INTERRUPTED:
        run.ClearField("interrupts")
    run.last_seq = last_seq
    run.create_time.FromMicroseconds(created)
    run.update_time.FromMicroseconds(updated)
    return run


def public_conversation(conversation_id: str, title: str, created: int, updated: int, active: str) -> Conversation:
    """Return a conversation as people see it."""
    conversation = Conversation(id=conversation_id, title=title, active_run_id=active)
    conversation.create_time.FromMicroseconds(created)
    conversation.update_time.FromMicroseconds(updated)
    return conversation


def public_frame(frame: Frame) -> Frame:
    """Return the frame as readers see it, equal to what a later read gives; itself when nothing must go."""
    if not (frame.checkpoint or frame.messages or frame.signals or frame.run is not None or frame.sync is Sync.FULL):
        return frame
    return Frame(frame.epoch, frame.first_seq, frame.count, frame.body, frame.state, frame.durable, frame.ends_segment)


def next_state(
    frame: Frame, expect: int, *, version: int, last_seq: int, epoch: int, state: RunState.ValueType
) -> RunState.ValueType:
    """Return the state a run takes by an append, or refuse it. Nothing has been written yet.

    A frame of state QUEUED leaves the state as it is: a queued run may become RUNNING, by the store, while
    its worker still believes it waits.

    Raises:
        Fenced: another writer was faster, has a higher epoch, or the run is final.
        ValueError: the frame cannot follow; a defect of the writer.
    """
    if version != expect or frame.epoch < epoch or state in FINAL:
        raise Fenced(f"append on version {expect} (epoch {frame.epoch}) refused: version {version}, epoch {epoch}")
    if frame.first_seq != last_seq + 1:
        raise ValueError(f"frame begins at seq {frame.first_seq}, the log ends at {last_seq}")
    if frame.state == UNSPECIFIED:
        raise ValueError("a frame must say the run's state")
    if state == QUEUED and frame.state in (RUNNING, INTERRUPTED):
        raise ValueError("a queued run starts when the run before it ends, not by an append")
    return state if frame.state == QUEUED else frame.state


def check_answers(answers: Answers, answered: Set[str], head: Head, *, signal_known: bool) -> None:
    """Refuse answers that a run does not take. Nothing has been written yet.

    An answered question comes first, whatever the state: who was second shall learn that, also when the run is
    long finished. ``answered`` are the ids of the run's interrupts that have their answer; ``signal_known`` says
    that its inbox has had a signal of that id.

    Raises:
        EngineError: ALREADY_ANSWERED, RUN_NOT_INTERRUPTED, UNKNOWN_INTERRUPT.
        ValueError: the signal id was used before; a defect of the caller.
    """
    for name in answers.interrupt_ids:
        if name in answered:
            raise EngineError(
                "ALREADY_ANSWERED", f"question {name[:100]!r} has its answer already", {"interrupt_id": name}
            )
    if head.state != INTERRUPTED:
        state = RunState.Name(head.state).removeprefix("RUN_STATE_")
        raise EngineError("RUN_NOT_INTERRUPTED", f"the run waits for no answer, it is {state}", {"state": state})
    asked = {item.id for item in head.run.interrupts}
    for name in answers.interrupt_ids:
        if name not in asked:
            raise EngineError("UNKNOWN_INTERRUPT", f"the run asks no question {name[:100]!r}", {"interrupt_id": name})
    if signal_known:
        raise ValueError(f"a signal of id {answers.signal_id!r} exists")


def gone() -> Fenced:
    """Return the refusal of an append to a run that does not exist: its writer must stop like a fenced one."""
    return Fenced("append refused: there is no such run")


def unknown_run() -> EngineError:
    """Return the refusal for a run that does not exist, or belongs to another tenant."""
    return EngineError("UNKNOWN_RUN", "there is no such run")


def unknown_conversation() -> EngineError:
    """Return the refusal for a conversation that does not exist, or belongs to another tenant."""
    return EngineError("UNKNOWN_CONVERSATION", "there is no such conversation")


def conversation_busy(run_id: str) -> EngineError:
    """Return the refusal for a conversation whose active run is ``run_id``."""
    return EngineError("CONVERSATION_BUSY", "the conversation has an active run", {"run_id": run_id})


def request_id_reused(run_id: str) -> EngineError:
    """Return the refusal for a request_id that came with another body before."""
    return EngineError("REQUEST_ID_REUSED", "this request_id was used for another request", {"run_id": run_id})


def log_compacted(kept_from: int) -> EngineError:
    """Return the refusal for a position whose events are gone."""
    return EngineError(
        "LOG_COMPACTED",
        f"events before {kept_from} are gone; the conversation's messages are still there",
        {"kept_from": str(kept_from)},
    )


def overloaded(waiting: int) -> EngineError:
    """Return the refusal for a conversation whose queue is full."""
    return EngineError("OVERLOADED", f"{waiting} runs already wait in this conversation", retry_after=1.0)
