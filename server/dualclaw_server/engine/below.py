"""Sub-agents: an agent at work for a call of another one.

Rules

- Its state lives inside the call's, its messages beside the run's, so a crash or a question in the middle of it costs
  nothing that is done. Once it is through, its answer is kept: asking again for the same call gives the same answer.
- Its steps stand beside the call's own, its words are the call's result. It shares session values, and nothing else
  by itself: it knows what it is asked, and not the conversation.
- What ends it, other than a question to people, ends its call and never the run: a failure, a limit of its own, an
  exit, an error in its strategy. What it leaves open is closed, in the stream too.
- It is bounded by its own limits and by those above it: tokens, calls and time of the run, how deep agents may call one
  another, for each agent counted from itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualclaw import ContentPart, Message, Role, StopReason
from dualclaw.errors import EngineError
from dualclaw.events import canonical_json
from dualclaw_server.engine.agent import AgentTool
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import Stage
from dualclaw_server.engine.clock import set_now
from dualclaw_server.engine.handoff import keep_output
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.interceptor import Observation
from dualclaw_server.engine.model import ModelError
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import End, Fail, Suspend
from dualclaw_server.engine.parked import Parked
from dualclaw_server.engine.store import StoreError
from dualclaw_server.engine.trace import Trace

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope

log = logging.getLogger(__name__)


async def run_below(scope: Scope, call: Call, tool: AgentTool, args: Mapping[str, object]) -> Observation:
    """Run a sub-agent, from its saved state if it has one, and return its answer. Raises Parked, Suspend."""
    deepest = _too_deep(scope.trace)
    if deepest:
        return failure("TOOL_FAILED", scope.texts.too_deep.format(name=tool.name, count=deepest), not_done=True)
    below = _Below(scope, call, tool, args)
    if not below.trace.checkpoint.stop_reason:
        failed = await below.run()
        if failed is not None:
            return failed
    return below.answer()


def _too_deep(above: Trace) -> int:
    """Return the limit that one more agent below would exceed; 0: none."""
    for trace in above.line():
        if trace.limits is not None and above.depth + 1 - trace.depth > trace.limits.max_depth:
            return trace.limits.max_depth
    return 0


class _Below:
    """A sub-agent and the call it works for."""

    def __init__(self, scope: Scope, call: Call, tool: AgentTool, args: Mapping[str, object]) -> None:
        self._scope = scope
        self._segment = scope.segment
        self._tool = tool
        self._agent = tool.agent
        above, state = scope.trace, call.state
        begun = state.HasField("child")
        if not begun:
            state.child.stage = Stage.STAGE_REASON
            set_now(state.child.start_time)
        messages = self._segment.messages_of(call.id)
        self.trace = Trace(
            above.key, above.record, state.child, (), messages, agent=tool.agent.name, parent=above, call_id=call.id
        )
        self.trace.recovered = begun and above.recovered
        if not messages:
            request = args.get("request")
            text = request if isinstance(request, str) else canonical_json(dict(args))
            message = Message(id=new_id(), role=Role.ROLE_USER, author=above.agent, parts=[ContentPart(text=text)])
            set_now(message.create_time)
            self._segment.put(self.trace.put(self.trace.reserve(), message))

    async def run(self) -> Observation | None:
        """Have it work to its end; returns why there is no answer, None when there is one. Raises Parked, Suspend."""
        inner: Scope | None = None
        summary = self._scope.texts.tool_failed.format(name=self._tool.name)
        seconds = min(self._tool.timeout, self._agent.limits.wall_time)
        try:
            async with asyncio.timeout(self._seconds_left(seconds)) as deadline:
                inner = await self._open()
                seconds = min(self._tool.timeout, inner.limits.wall_time)
                deadline.reschedule(asyncio.get_running_loop().time() + self._seconds_left(seconds))
                await inner.run()
            return None
        except (Parked, Suspend, StoreError):
            raise
        except End as end:
            if end.text and inner is not None:
                inner.say(inner.chain.mask(end.text))
            self.trace.checkpoint.stop_reason = end.stop_reason
            failed = None
        except Fail as fail:
            failed = failure("TOOL_FAILED", summary, detail=fail.error.message, error=fail.error)
        except EngineError as error:
            log.warning("sub-agent %s failed: %s", self._agent.name, error.message)
            retryable = isinstance(error, ModelError) and error.retryable
            failed = failure("TOOL_FAILED", summary, detail=error.message, retryable=retryable, error=error)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                summary = self._scope.texts.tool_timeout.format(name=self._tool.name, seconds=seconds)
                failed = failure("TOOL_TIMEOUT", summary, retryable=True, error=error)
            else:
                log.exception("sub-agent %s failed", self._agent.name)
                failed = failure("TOOL_FAILED", summary, detail=type(error).__name__, error=error)
        finally:
            self.trace.services = None  # its scope holds the trace: together they would be garbage for long
        if inner is not None and self.trace.checkpoint.calls:
            inner.close_calls(self._agent.texts.ended_early)
        return failed

    async def _open(self) -> Scope:
        nodes = self._scope.nodes.below.get(self._tool.name)
        if nodes is not None and nodes.agent.label != self._agent.name:  # a tool of this run only, by the same name
            nodes = None
        return await self._scope.open(self._segment, self._agent, self.trace, nodes)

    def _seconds_left(self, limit: float) -> float:
        used = time.time() - self.trace.checkpoint.start_time.ToMilliseconds() / 1000
        return limit - max(0.0, used)

    def answer(self) -> Observation:
        """Return what it has said, and what images and files its last message holds."""
        said = [message for message in self.trace.own_messages() if message.role == Role.ROLE_ASSISTANT]
        text = self.trace.said()
        last = said[-1].parts if said else ()
        media = [part for part in last if part.WhichOneof("part") in ("image", "file")]
        if not text.strip() and not media and self.trace.checkpoint.stop_reason == StopReason.STOP_REASON_FINISHED:
            summary = self._scope.texts.tool_failed.format(name=self._tool.name)
            return failure("TOOL_FAILED", summary, detail=self._scope.texts.agent_silent, retryable=True)
        if self._agent.output_key:
            keep_output(self.trace, self._agent.output_key, text, self._agent.texts)
        return Observation([*([ContentPart(text=text)] if text else []), *media])
