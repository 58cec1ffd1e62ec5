"""Sub-agents: an agent at work for a call of another one.

Its state lives inside the call's, its messages beside the run's, so a crash or a question in the middle of it costs
nothing that is done. Its steps stand beside the call's own, its words are the call's result. What ends it, other
than a question to people, ends its call and never the run; session values are shared, nothing else is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualclaw import ContentPart, Message, Role
from dualclaw.errors import EngineError
from dualclaw.events import canonical_json
from dualclaw_server.engine.agent import AgentTool
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import Stage
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.interceptor import Observation
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import End, Fail
from dualclaw_server.engine.parked import Transferred
from dualclaw_server.engine.trace import Trace

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope

log = logging.getLogger(__name__)


async def run_below(scope: Scope, call: Call, tool: AgentTool, args: Mapping[str, object]) -> Observation:
    """Run a sub-agent, from its saved state if it has one, and return its answer. Raises Parked."""
    above, segment, state = scope.trace, scope.segment, call.state
    if above.depth + 1 > scope.limits.max_depth:
        text = scope.texts.too_deep.format(name=tool.name, count=scope.limits.max_depth)
        return failure("TOOL_FAILED", text, not_done=True)
    begun = state.HasField("child")
    if not begun:
        state.child.stage = Stage.STAGE_REASON
    messages = segment.messages_of(call.id)
    trace = Trace(
        above.key, above.record, state.child, (), messages, agent=tool.agent.name, parent=above, call_id=call.id
    )
    trace.recovered = begun and above.recovered
    if not messages:
        request = args.get("request")
        text = request if isinstance(request, str) else canonical_json(dict(args))
        message = Message(id=new_id(), role=Role.ROLE_USER, author=scope.agent.name, parts=[ContentPart(text=text)])
        message.create_time.GetCurrentTime()
        segment.put(trace.put(trace.reserve(), message))
    summary = scope.texts.tool_failed.format(name=tool.name)
    try:
        inner = await scope.open(segment, tool.agent, trace)
        try:
            await inner.run()
            answer = inner.said()
        except End as end:
            answer = "\n\n".join(filter(None, [inner.said(), end.text]))
    except Fail as fail:
        return failure("TOOL_FAILED", summary, detail=fail.error.message, error=fail.error)
    except Transferred as transferred:
        text = scope.texts.transfer_unknown.format(name=transferred.agent)
        return failure("TOOL_FAILED", summary, detail=text)
    except EngineError as error:
        log.warning("sub-agent %s failed: %s", tool.agent.name, error.message)
        return failure("TOOL_FAILED", summary, detail=error.message, error=error)
    if tool.agent.output_key:
        above.session.set(tool.agent.output_key, answer)
    return Observation([ContentPart(text=answer)] if answer else [])
