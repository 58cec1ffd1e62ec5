"""What calls leave in the checkpoint until their batch is through, beside their results.

- A result that is held back: the call has run, and ``on_tool_call_end`` asks people about what came of it. So the tool
  is not run again, and nothing of the result is told before people have let it go.
- A handoff, and the end of the run that a call, a person or an interceptor wants: a call that has ended is not asked
  again, so neither a crash nor a sibling that waits for people may lose what it wanted.
"""

from __future__ import annotations

from typing import cast

from dualclaw import StopReason, ToolResult
from dualclaw.errors import EngineError, Reason
from dualclaw_server.engine.checkpoint import CallState, Checkpoint
from dualclaw_server.engine.interceptor import Handoff, Observation
from dualclaw_server.engine.outcome import End, Fail


def hold_result(state: CallState, observation: Observation) -> None:
    """Hold back what came of a call, but for the exception behind it."""
    result = ToolResult(parts=observation.parts, is_error=observation.is_error, diagnosis=observation.diagnosis)
    state.held.Clear()
    state.held.result.CopyFrom(result)
    state.held.not_done = observation.not_done
    if observation.handoff is not None:
        state.held.handoff.kind, state.held.handoff.target = observation.handoff.kind, observation.handoff.target


def held_result(state: CallState) -> Observation | None:
    """Return what is held back of a call; None: nothing, so it has not run yet."""
    if not state.HasField("held"):
        return None
    held, result = state.held, state.held.result
    return Observation(
        list(result.parts),
        result.diagnosis if result.HasField("diagnosis") else None,
        is_error=result.is_error,
        handoff=Handoff(held.handoff.kind, held.handoff.target) if held.HasField("handoff") else None,
        not_done=held.not_done,
    )


def keep_handoff(state: CallState, handoff: Handoff) -> None:
    """Keep what a call that has ended does besides giving its result."""
    state.handoff.kind, state.handoff.target = handoff.kind, handoff.target


def first_handoff(checkpoint: Checkpoint) -> Handoff | None:
    """Return what the first call that does more than give a result does; None: there is none."""
    return next(
        (Handoff(state.handoff.kind, state.handoff.target) for state in checkpoint.calls if state.HasField("handoff")),
        None,
    )


def keep_ending(checkpoint: Checkpoint, wanted: End | Fail) -> None:
    """Keep that the batch at work ends the run."""
    match wanted:
        case End():
            checkpoint.ending.text, checkpoint.ending.stop_reason = wanted.text, wanted.stop_reason
        case Fail():
            checkpoint.ending.text, checkpoint.ending.error_reason = wanted.error.message, wanted.error.reason


def kept_ending(checkpoint: Checkpoint) -> End | Fail | None:
    """Return how the batch at work ends the run; None: it does not."""
    ending = checkpoint.ending
    match ending.WhichOneof("ending"):
        case "stop_reason":
            end = End(ending.text)
            end.stop_reason = StopReason.ValueType(ending.stop_reason)
            return end
        case "error_reason":
            return Fail(EngineError(cast("Reason", ending.error_reason), ending.text))
        case _:
            return None
