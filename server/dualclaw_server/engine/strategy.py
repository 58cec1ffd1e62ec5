"""Strategies: how a run proceeds, as a function of its checkpoint, so that start and resume are the same code.

A strategy is a small class with a name and ``run(segment)``: it decides what comes next and leaves the doing
to the segment (``reason``, ``act``). It returns why the run ended; a limit's reason means that the text so
far is the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dualclaw import StopReason
from dualclaw_server.engine.checkpoint import Stage

if TYPE_CHECKING:
    from dualclaw_server.engine.segment import Segment


class Strategy(Protocol):
    """How a run proceeds. Implemented by Chat and ReAct, and by whoever wants another way."""

    @property
    def name(self) -> str:
        """Short name, for nodes and checkpoints."""

    async def run(self, segment: Segment) -> StopReason.ValueType:
        """Go on from the segment's checkpoint to the end of the run."""


class Chat:
    """One straight line: a single answer without tools. A call the model invents has no way to run."""

    name = "chat"

    async def run(self, segment: Segment) -> StopReason.ValueType:
        """Answer once."""
        await segment.reason(tools=False)
        return StopReason.STOP_REASON_FINISHED


class ReAct:
    """Reason, act on the calls the model asks for, reason again, until an answer has no calls."""

    name = "react"

    async def run(self, segment: Segment) -> StopReason.ValueType:
        """Loop until the model answers or a limit ends it."""
        checkpoint, limits = segment.trace.checkpoint, segment.limits
        while True:
            if checkpoint.stage != Stage.STAGE_ACT:
                if checkpoint.model_calls >= limits.max_steps:
                    await segment.last_answer()
                    return StopReason.STOP_REASON_STEP_LIMIT
                if not await segment.reason(tools=True):
                    return StopReason.STOP_REASON_FINISHED
            over_budget = segment.over_budget()
            if over_budget:
                segment.skip_calls(over_budget)
                return StopReason.STOP_REASON_BUDGET_EXCEEDED
            if await segment.act():
                return StopReason.STOP_REASON_RETURN_DIRECT
