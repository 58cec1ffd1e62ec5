"""Saved state: the only place that touches the checkpoint schema, and where its format is checked.

A run's ``RunRecord`` is written once; its ``Checkpoint`` with every durable frame. Both carry the format
they were written in. An engine reads every format up to its own and refuses a newer one, leaving the run
as it is for an engine that knows it.
"""

from google.protobuf.message import DecodeError

from dualclaw.checkpoint.v1.checkpoint_pb2 import (
    CallPhase,
    CallState,
    CancelSignal,
    Checkpoint,
    Context,
    ContextItem,
    Plan,
    Question,
    ResumeSignal,
    RunRecord,
    Signal,
    Stage,
)

for _enum in (CallPhase, Stage):  # as the contract does with its own
    for _name, _number in _enum.items():
        setattr(_enum, _name, _number)

FORMAT = 1
"""The format this engine writes."""
_BEGUN = frozenset({CallPhase.CALL_PHASE_STARTED, CallPhase.CALL_PHASE_ENDED})


class UnreadableState(Exception):
    """Saved state that this engine cannot read: newer than it, or damaged. The run must be left alone."""


class DamagedState(UnreadableState):
    """Saved state that no engine can read."""


def load_record(data: bytes) -> RunRecord:
    """Return a run's record. Raises UnreadableState, DamagedState."""
    record = RunRecord()
    _parse(record, data, "run record")
    return record


def load_checkpoint(data: bytes) -> Checkpoint:
    """Return a checkpoint; a fresh one from no bytes. Raises UnreadableState, DamagedState."""
    checkpoint = Checkpoint()
    if data:
        _parse(checkpoint, data, "checkpoint")
    checkpoint.format = FORMAT
    for state in checkpoint.calls:  # saved by a release that did not write it, but showed every start
        state.announced = state.announced or state.phase in _BEGUN
    return checkpoint


def load_signal(data: bytes) -> Signal:
    """Return a signal from an inbox. Raises DamagedState."""
    try:
        return Signal.FromString(data)
    except DecodeError:
        raise DamagedState("a signal in the inbox is damaged") from None


def _parse(message: RunRecord | Checkpoint, data: bytes, what: str) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise DamagedState(f"the {what} is damaged") from None
    if message.format > FORMAT:
        raise UnreadableState(
            f"the {what} has format {message.format}, this engine knows up to {FORMAT}: a newer engine must take it"
        )


__all__ = [
    "FORMAT",
    "CallPhase",
    "CallState",
    "CancelSignal",
    "Checkpoint",
    "Context",
    "ContextItem",
    "DamagedState",
    "Plan",
    "Question",
    "ResumeSignal",
    "RunRecord",
    "Signal",
    "Stage",
    "UnreadableState",
    "load_checkpoint",
    "load_record",
    "load_signal",
]
