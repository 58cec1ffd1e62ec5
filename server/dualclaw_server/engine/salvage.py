"""What was under way in a run whose checkpoint is damaged, as far as its messages and its log tell it.

That is enough to end the run well, and not enough to go on with it: what interceptors, plans and sessions kept is lost.
"""

from __future__ import annotations

from dualclaw import Phase
from dualclaw.fold import RunView
from dualclaw_server.engine.checkpoint import CallPhase, Checkpoint
from dualclaw_server.engine.store import Loaded


def salvage(checkpoint: Checkpoint, loaded: Loaded, view: RunView) -> None:
    """Fill an empty checkpoint with the calls that have no result.

    A call counts as begun when its step was shown as begun and not as one that waits for people.
    """
    shown = {step.call_id: (index, step) for index, step in view.steps.items() if step.call_id}
    checkpoint.segment = 1
    checkpoint.next_index = view.next_index
    checkpoint.next_position = max((message.position for message in loaded.messages), default=-1) + 1

    def add_calls(below: Checkpoint, scope: str) -> None:
        messages = [item.message for item in loaded.messages if item.scope == scope]
        answered = {p.tool_result.call_id for m in messages for p in m.parts if p.WhichOneof("part") == "tool_result"}
        for part in (part for message in messages for part in message.parts):
            if part.WhichOneof("part") != "tool_call" or part.tool_call.id in answered:
                continue
            state = below.calls.add(call=part.tool_call, position=checkpoint.next_position)
            checkpoint.next_position += 1
            if found := shown.get(state.call.id):
                state.index, step = found
                state.announced = True
                begun = step.phase == Phase.PHASE_START and not step.HasField("diagnosis")
            else:
                state.index, begun = checkpoint.next_index, False
                checkpoint.next_index += 1
            state.phase = CallPhase.CALL_PHASE_STARTED if begun else CallPhase.CALL_PHASE_WAITING
            if any(item.scope == state.call.id for item in loaded.messages):
                add_calls(state.child, state.call.id)

    add_calls(checkpoint, "")
