"""Strategies: how a run proceeds, as a function of its checkpoint, so that start and resume are the same code.

A strategy is a small class with a name and ``run(scope)``: it decides what comes next and leaves the doing
to the scope (``reason``, ``act``). It returns why the run ended; a limit's reason means that the text so
far is the answer. One that needs tools of its own brings them (``BringsTools``). An instance serves all runs
and keeps nothing of any: what must be known later goes into the checkpoint (``scope.trace.session``, or
``scope.trace.extras`` under a name of its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from dualclaw import StopReason
from dualclaw_server.engine.checkpoint import Stage

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope
    from dualclaw_server.engine.texts import Texts
    from dualclaw_server.engine.tool import Tool


class Strategy(Protocol):
    """How a run proceeds. Implemented by Chat, ReAct and PlanReAct, and by whoever wants another way."""

    @property
    def name(self) -> str:
        """Short name, for nodes and checkpoints."""

    async def run(self, scope: Scope) -> StopReason.ValueType:
        """Go on from the scope's checkpoint to the end of the run."""


@runtime_checkable
class BringsTools(Protocol):
    """A strategy with tools of its own, such as those that make a plan."""

    def tools_in(self, texts: Texts) -> Sequence[Tool]:
        """Return the tools that are given to the model beside the agent's, described in its language."""


def tools_of(strategy: Strategy | None, texts: Texts) -> tuple[Tool, ...]:
    """Return the tools a strategy brings."""
    if not hasattr(strategy, "tools_in"):  # to ask a protocol takes long, and every run asks
        return ()
    return tuple(cast("BringsTools", strategy).tools_in(texts))


class Chat:
    """One straight line: a single answer without tools. A call the model invents has no way to run."""

    name = "chat"

    async def run(self, scope: Scope) -> StopReason.ValueType:
        """Answer once."""
        checkpoint = scope.trace.checkpoint
        if checkpoint.stage == Stage.STAGE_ACT and await scope.act():  # of a run that had tools when this was saved
            return StopReason.STOP_REASON_RETURN_DIRECT
        await scope.reason(tools=False)
        return StopReason.STOP_REASON_FINISHED


class ReAct:
    """Reason, act on the calls the model asks for, reason again, until an answer has no calls."""

    name = "react"

    async def run(self, scope: Scope) -> StopReason.ValueType:
        """Loop until the model answers or a limit ends it."""
        checkpoint, limits = scope.trace.checkpoint, scope.limits
        while True:
            if checkpoint.stage != Stage.STAGE_ACT:
                if checkpoint.model_calls >= limits.max_steps and checkpoint.stage != Stage.STAGE_REVIEW:
                    await scope.last_answer()
                    return StopReason.STOP_REASON_STEP_LIMIT
                if not await scope.reason(tools=True, extra_instructions=self.guidance(scope)):
                    beyond = checkpoint.model_calls > limits.max_steps  # the last answer, after its review
                    return StopReason.STOP_REASON_STEP_LIMIT if beyond else StopReason.STOP_REASON_FINISHED
            over_budget = scope.over_budget()
            if over_budget:
                scope.skip_calls(over_budget)
                return StopReason.STOP_REASON_BUDGET_EXCEEDED
            if await scope.act():
                return StopReason.STOP_REASON_RETURN_DIRECT

    def guidance(self, scope: Scope) -> str:
        """Return what is added to the instructions of the next model call; here nothing."""
        return ""
