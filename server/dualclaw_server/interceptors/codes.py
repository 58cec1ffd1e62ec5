"""How calls and segments ended, in one word, for records and spans."""

from __future__ import annotations

import asyncio

from dualclaw import StopReason
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import CallPhase, Stage
from dualclaw_server.engine.interceptor import EMPTY, Observation
from dualclaw_server.engine.outcome import stop_name
from dualclaw_server.engine.trace import Trace

OK = "ok"
FAILED = "failed"
SUSPENDED = "suspended"
CANCELLED = "cancelled"
BROKEN_OFF = "stopped"
"""Of a segment that was cancelled or failed, where its state does not say which."""
RUN_ENDINGS = frozenset(map(stop_name, StopReason.values())) | {BROKEN_OFF, "transferred"}
"""How a segment ends that has not failed."""


def call_code(trace: Trace, call: Call, observation: Observation, error: BaseException | None) -> str:
    """Return "ok", "suspended", "cancelled", the code of the diagnosis ("tool.timeout"), or "failed"."""
    if observation.is_error:
        return (
            observation.diagnosis.code if observation.diagnosis is not None and observation.diagnosis.code else FAILED
        )
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    if error is not None:
        return FAILED
    if observation is not EMPTY:
        return OK
    asked = any(question.call_id == call.id and not question.HasField("decision") for question in trace.questions)
    return SUSPENDED if asked or call.state.phase == CallPhase.CALL_PHASE_SUSPENDED else CANCELLED


def run_code(trace: Trace) -> str:
    """Return how an agent's segment ended: what it says itself, else as far as its state tells, else BROKEN_OFF."""
    if trace.ending:
        return trace.ending
    if any(not question.HasField("decision") for question in trace.questions):
        return "interrupted"
    if trace.checkpoint.stop_reason:
        return stop_name(trace.checkpoint.stop_reason)
    return "finished" if trace.checkpoint.stage == Stage.STAGE_END else BROKEN_OFF
