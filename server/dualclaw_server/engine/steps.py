"""The steps people see of an agent's calls and thoughts, with nothing in them that must not be shown.

A call is one start and one end under the same index; a thought is a single event. Steps of a sub-agent stand
beside the call it works for and name it as their parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualclaw import Diagnosis, EngineEvent, StepKind
from dualclaw.errors import diagnosis_code
from dualclaw.events import make_diagnosis, make_step
from dualclaw_server.engine.agent import AgentTool
from dualclaw_server.engine.checkpoint import CallPhase

if TYPE_CHECKING:
    from dualclaw_server.engine.call import Call
    from dualclaw_server.engine.checkpoint import CallState
    from dualclaw_server.engine.scope import Scope
    from dualclaw_server.engine.segment import Segment
    from dualclaw_server.engine.texts import Texts
    from dualclaw_server.engine.tool import Tool

THINKING = StepKind.STEP_KIND_THINKING
_NAMES = {number: name.removeprefix("STEP_KIND_").lower() for name, number in StepKind.items()}


def announce(scope: Scope, call: Call, diagnosis: Diagnosis | None = None) -> None:
    """Tell people that a call has begun, or (``diagnosis``) waits for them, or waits no more.

    A thought has no beginning, and what the step says already is not said again.
    """
    if call.state.call.kind == THINKING:
        return
    event = step(scope, call, "start", "", diagnosis)
    if call.state.announced:
        before, now = scope.segment.writer.view.steps.get(call.state.index), event.step.step
        if before is None or before == now or not (before.HasField("diagnosis") or now.HasField("diagnosis")):
            return
    call.state.announced = True
    scope.segment.writer.event(event)


def step(scope: Scope, call: Call, phase: str, result: str = "", diagnosis: Diagnosis | None = None) -> EngineEvent:
    """Return the event of a call's step."""
    state = call.state
    event = make_step(
        _NAMES[state.call.kind],
        name=call.name,
        server=state.call.server,
        result=result,
        phase=phase,
        index=state.index,
        diagnosis=masked(scope, diagnosis) if diagnosis is not None else None,
        node=scope.nodes.tools.get(call.name),
        call_id=call.id,
        parent_call_id=scope.trace.call_id,
    )
    event.step.step.args_json = scope.shown_args(call)
    return event


def thought(scope: Scope, text: str, index: int, *, call: Call | None = None) -> EngineEvent:
    """Return the event of a thinking step: the model's own, or the result of a ``call`` that only thinks."""
    node = scope.nodes.model(scope.model.name) if call is None else scope.nodes.tools.get(call.name)
    return make_step("thinking", text=text, index=index, node=node, parent_call_id=scope.trace.call_id)


def close_steps_below(segment: Segment, state: CallState, tool: Tool | None, texts: Texts) -> None:
    """End every step that the sub-agent of a call has left open.

    Args:
        segment: where it is said.
        state: the call; what is open below it counts as ended afterwards.
        tool: the call's; None: not there any more.
        texts: of the agent above.
    """
    if not state.HasField("child"):
        return
    for inner in state.child.calls:
        inner_tool = tool.agent.tools_by_name.get(inner.call.name) if isinstance(tool, AgentTool) else None
        close_steps_below(segment, inner, inner_tool, texts)
        began = inner.phase == CallPhase.CALL_PHASE_STARTED and leaves_doubt(inner_tool)
        ended, inner.phase = inner.phase == CallPhase.CALL_PHASE_ENDED, CallPhase.CALL_PHASE_ENDED
        if ended or not inner.announced:
            continue
        summary = (texts.tool_abandoned if began else texts.tool_not_run).format(name=inner.call.name)
        code = diagnosis_code("TOOL_OUTCOME_UNKNOWN" if began else "TOOL_SKIPPED")
        segment.writer.event(
            make_step(
                _NAMES[inner.call.kind],
                name=inner.call.name,
                server=inner.call.server,
                phase="fail",
                index=inner.index,
                diagnosis=make_diagnosis(code=code, severity="error", summary=summary),
                call_id=inner.call.id,
                parent_call_id=state.call.id,
            )
        )


def leaves_doubt(tool: Tool | None) -> bool:
    """Tell whether a call that began and was stopped may have had an effect."""
    return tool is None or isinstance(tool, AgentTool) or tool.effect != "read"


def masked(scope: Scope, diagnosis: Diagnosis) -> Diagnosis:
    """Return a diagnosis with nothing in it that must not be shown."""
    texts = (diagnosis.summary, diagnosis.detail, diagnosis.hint)
    shown = tuple(scope.chain.mask(text) for text in texts)
    if shown == texts:
        return diagnosis
    made = Diagnosis()
    made.CopyFrom(diagnosis)
    made.summary, made.detail, made.hint = shown
    return made
