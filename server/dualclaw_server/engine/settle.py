"""From an answer of the model to saved state: adopted, reviewed, settled.

What interceptors say to an answer is an outcome and maybe another message. When one of them asks people, the answer is
saved before it is reviewed; with their answers the review is held again, over the same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualclaw import Message, Role, Usage
from dualclaw_server.engine.adopt import adopted, calls_in, copy_of
from dualclaw_server.engine.checkpoint import CallPhase, Stage
from dualclaw_server.engine.model import ModelResponse
from dualclaw_server.engine.outcome import Outcome, Replace
from dualclaw_server.engine.steps import thought

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope


def adopt(
    scope: Scope, given: Message, bad: Mapping[str, str], *, tools: bool, identity: Message | None = None
) -> tuple[Message, dict[str, str]]:
    """Make a message the agent's own; see ``adopt.adopted``. Without ``tools`` its calls are left out."""
    used = scope.trace.call_ids() if tools else set[str]()
    known = scope.tools_by_name if tools else None
    return adopted(given, bad, author=scope.agent.name, tools=known, used=used, identity=identity)


def taken(outcome: Outcome | None, message: Message) -> tuple[Outcome | None, Message]:
    """Return what is left of an outcome once a message is replaced, and the message."""
    if isinstance(outcome, Replace) and isinstance(outcome.value, Message):
        return None, outcome.value
    return outcome, message


def settle(scope: Scope, message: Message, bad_arguments: Mapping[str, str]) -> bool:
    """Make the answer part of the saved state; returns whether it asks for calls."""
    trace, checkpoint, segment = scope.trace, scope.trace.checkpoint, scope.segment
    if scope.at_root:
        segment.answered(message.id if message.parts else "")
    for part in message.parts:
        if part.WhichOneof("part") == "reasoning" and part.reasoning.text:
            segment.writer.event(thought(scope, part.reasoning.text, trace.next_index()))
    if message.parts:
        segment.put(trace.put(trace.reserve(), message))
    _await_calls(scope, message, bad_arguments)
    checkpoint.stage = Stage.STAGE_ACT if checkpoint.calls else Stage.STAGE_END
    return bool(checkpoint.calls)


async def review_again(scope: Scope) -> bool:
    """Go on at the review of an answer that was suspended.

    An answer without calls is shown again: this segment has to say how the run came out.
    """
    trace, checkpoint = scope.trace, scope.trace.checkpoint
    saved = next(m for m in reversed(trace.own_messages()) if m.role == Role.ROLE_ASSISTANT)
    message = copy_of(saved)
    outcome = await scope.chain.reason_end(trace, ModelResponse(message, "stop", Usage()), message, 0.0)
    outcome, changed = taken(outcome, message)
    scope.obey(outcome)
    bad_arguments = {state.call.id: state.bad_arguments for state in checkpoint.calls}
    message, bad_arguments = adopt(scope, changed, bad_arguments, tools=bool(checkpoint.calls), identity=saved)
    replaced = message != saved
    if replaced:
        scope.segment.put(trace.put(trace.place_of(saved.id), message))
        del checkpoint.calls[:]
        _await_calls(scope, message, bad_arguments)
    if scope.at_root:
        if replaced or not checkpoint.calls:
            scope.segment.show(said_in(message))
        scope.segment.message_id = message.id
    checkpoint.stage = Stage.STAGE_ACT if checkpoint.calls else Stage.STAGE_END
    return bool(checkpoint.calls)


def _await_calls(scope: Scope, message: Message, bad_arguments: Mapping[str, str]) -> None:
    """Have the calls of a message wait for their turn."""
    trace, calls = scope.trace, list(calls_in(message))
    first = trace.reserve(len(calls))
    for offset, call in enumerate(calls):
        trace.checkpoint.calls.add(
            call=call,
            phase=CallPhase.CALL_PHASE_WAITING,
            index=trace.next_index(),
            position=first + offset,
            bad_arguments=bad_arguments.get(call.id, ""),
        )


def said_in(message: Message) -> str:
    """Return the text of a message."""
    return "".join(part.text for part in message.parts if part.WhichOneof("part") == "text")
