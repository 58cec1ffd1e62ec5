"""One tool call at work: its hooks, the tool, and whatever can go wrong with it.

A call is a task of its own. A tool that ignores its timeout or the run's cancellation is left behind after GRACE
seconds; its result is dropped. What stands around the tool (``intercept_tool``) never sees an exception of it,
only an Observation that says what happened.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import time
from typing import TYPE_CHECKING

from dualclaw.errors import EngineError
from dualclaw.json_text import canonical_args, parse_args
from dualclaw_server.engine import questions
from dualclaw_server.engine.agent import AgentTool
from dualclaw_server.engine.below import run_below
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.hooks import InterceptorFailed
from dualclaw_server.engine.interceptor import EMPTY, Observation, ToolRequest
from dualclaw_server.engine.kept import held_result, hold_result
from dualclaw_server.engine.observations import failure, said, traceback_of
from dualclaw_server.engine.outcome import Fail, Outcome, Replace, Suspend
from dualclaw_server.engine.parked import Parked
from dualclaw_server.engine.store import StoreError
from dualclaw_server.engine.tool import NotDone, Tool, ToolContext, ToolOutput, ToolRaised, as_parts

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope
    from dualclaw_server.engine.trace import Trace

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds a cancelled call has to come to an end."""


class Invocation:
    """One call of a batch, from its start hooks to its end hooks."""

    def __init__(self, scope: Scope, call: Call) -> None:
        self._scope = scope
        self._trace = scope.trace
        self._texts = scope.texts
        self._call = call
        self._started = 0

    async def run(self) -> tuple[Observation, Outcome | None]:
        """Return what came of it, and what is wanted beyond that: End, Fail, Suspend or Parked."""
        began = time.monotonic()
        try:
            observation, wanted = await self._work()
        except (asyncio.CancelledError, StoreError) as error:
            await self._finish(Observation(error=error), began)
            raise
        observation, late = await self._finish(self._checked(observation), began)
        observation = self._checked(observation)
        if wanted is None and isinstance(late, Suspend):
            hold_result(self._call.state, observation)
        return observation, wanted or late

    async def _work(self) -> tuple[Observation, Outcome | None]:
        chain, call = self._scope.chain, self._call
        try:
            outcome = await chain.tool_call_start(self._trace, call, self._reached)
            if outcome is None:
                return await self._through(), None
            if isinstance(outcome, Replace) and isinstance(outcome.value, Observation):
                return outcome.value, None
            return EMPTY, outcome
        except Outcome as wanted:
            return EMPTY, wanted
        except InterceptorFailed as error:
            return self._withheld(error), None
        except StoreError:
            raise
        except EngineError as error:
            return EMPTY, Fail(error)
        except Exception as error:  # an engine that fails on one call must not leave it without its end
            log.exception("call %s of %s cannot be worked on", call.id, call.name)
            summary = self._texts.tool_failed.format(name=call.name)
            return failure("TOOL_FAILED", summary, detail=type(error).__name__, error=error), None

    async def _finish(self, observation: Observation, began: float) -> tuple[Observation, Outcome | None]:
        duration = time.monotonic() - began
        return await self._scope.chain.tool_call_end(
            self._trace, self._call, observation, duration, self._started, self._withheld
        )

    def _reached(self, count: int) -> None:
        self._started = count

    def _withheld(self, error: InterceptorFailed) -> Observation:
        summary = self._texts.interceptor_withheld.format(name=self._call.name)
        return failure("TOOL_FAILED", summary, error=error)

    # The tool

    async def _through(self) -> Observation:
        """Run the tool, if it can be run, through every interceptor."""
        call, tool = self._call, self._call.tool
        if (held := held_result(call.state)) is not None:
            return held
        if tool is None:
            names = ", ".join(sorted(self._scope.tools_by_name)) or "none"
            summary = self._texts.tool_unknown.format(name=call.name)
            return failure("TOOL_UNKNOWN", summary, hint=f"Tools there are: {names}", not_done=True)
        if call.state.bad_arguments:
            return self._bad_arguments(tool, f"not one usable JSON object: {call.state.bad_arguments[:500]}")
        if problem := tool.problem(call.args):
            return self._bad_arguments(tool, problem)
        request = ToolRequest(
            self._trace, call, tool, parse_args(call.state.call.args_json), tool_context(call, self._trace)
        )
        return await self._scope.chain.tool(self._invoke, self._withheld)(request)

    def _ask_again_if_changed(self, request: ToolRequest) -> None:
        """Ask again when an interceptor has changed what people have approved. Raises Parked."""
        call = self._call
        asked = questions.newest(self._trace.root.checkpoint, call.id)
        if asked is None or asked.decision.action not in questions.ALLOWING:
            return
        args = canonical_args(request.args)
        if args == call.state.call.args_json:
            return
        call.take(args)
        self._scope.ask_again(asked, call)
        raise Parked

    def _bad_arguments(self, tool: Tool, problem: str) -> Observation:
        return failure(
            "TOOL_BAD_ARGUMENTS",
            self._texts.tool_bad_arguments.format(name=tool.name),
            detail=problem,
            hint=f"Schema of {tool.name}: {tool.parameters_json}",
            retryable=True,
            not_done=True,
        )

    async def _invoke(self, request: ToolRequest) -> Observation:
        """Run the tool itself. Raises Outcome only."""
        tool = request.tool
        self._ask_again_if_changed(request)
        if isinstance(tool, AgentTool):
            return await run_below(self._scope, request.call, tool, request.args)
        args = request.args
        if self._scope.chain:  # who may have changed them, or tries again with what the tool has made of them
            if problem := tool.problem(args):
                return self._bad_arguments(tool, problem)
            args = copy.deepcopy(dict(args))
        self._scope.segment.lease.check()
        task = asyncio.create_task(tool.call(args, request.context))
        try:
            done, _ = await asyncio.wait({task}, timeout=tool.timeout)
        except asyncio.CancelledError:
            await self._leave(task)
            raise
        if not done:
            await self._leave(task)
            summary = self._texts.tool_timeout.format(name=tool.name, seconds=tool.timeout)
            return failure("TOOL_TIMEOUT", summary, retryable=tool.effect != "once")
        summary = self._texts.tool_failed.format(name=tool.name)
        if task.cancelled():
            return failure("TOOL_FAILED", summary, detail="it cancelled itself")
        error = task.exception()
        if error is None:
            output = task.result()
            return Observation(output.parts, handoff=output.handoff)
        if isinstance(error, Replace):
            return error.value if isinstance(error.value, Observation) else Observation(as_parts(error.value))
        if isinstance(error, Outcome | InterceptorFailed):
            raise error
        if isinstance(error, ToolRaised):
            undone = isinstance(error, NotDone)
            return failure("TOOL_FAILED", summary, detail=said(error), retryable=undone, error=error, not_done=undone)
        log.warning("tool %s raised\n%s", tool.name, traceback_of(error, self._scope.chain.mask))
        detail = f"{type(error).__name__}: {said(error)}"
        return failure("TOOL_FAILED", summary, detail=detail, retryable=tool.effect != "once", error=error)

    def _checked(self, observation: Observation) -> Observation:
        """Return an observation, or why what it does beside being one cannot be done."""
        handoff = observation.handoff
        if handoff is None or observation.is_error or handoff.kind == "exit":
            return observation
        texts, segment, limit = self._texts, self._scope.segment, self._scope.limits.max_transfers
        if handoff.kind != "transfer":
            return failure("TOOL_FAILED", texts.handoff_unknown.format(kind=handoff.kind), not_done=True)
        if not self._scope.at_root:
            return failure("TOOL_FAILED", texts.transfer_below, not_done=True)
        if handoff.target not in segment.agents:
            text = texts.transfer_unknown.format(name=handoff.target)
            return failure("TOOL_FAILED", text, hint=f"Agents there are: {', '.join(segment.agents)}", not_done=True)
        if self._trace.root.checkpoint.transfers >= limit:
            return failure("TOOL_FAILED", texts.transfer_limit.format(count=limit), not_done=True)
        return observation

    async def _leave(self, task: asyncio.Task[ToolOutput]) -> None:
        """Cancel a call's task; when it does not end in time, hold on to it until it does."""
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE)
        if task.done():
            if not task.cancelled():
                task.exception()
            return
        log.warning("a tool ignores its cancellation and is left behind")
        abandoned = self._scope.segment.abandoned
        abandoned.add(task)

        def over(left: asyncio.Task[ToolOutput]) -> None:
            abandoned.discard(left)
            if not left.cancelled():
                left.exception()

        task.add_done_callback(over)


def tool_context(call: Call, trace: Trace) -> ToolContext:
    """Return what a call may know of its surroundings."""
    key, record = trace.key, trace.record
    identity = "\x00".join((key.tenant, key.run_id, call.id))
    return ToolContext(
        tenant=key.tenant,
        subject=record.subject,
        run_id=key.run_id,
        conversation_id=trace.conversation_id,
        call_id=call.id,
        idempotency_key=hashlib.sha256(identity.encode()).hexdigest()[:32],
        metadata=dict(record.request.metadata),
        trace=trace,
    )
