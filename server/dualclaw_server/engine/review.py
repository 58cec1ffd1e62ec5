"""Before a batch runs: what people have decided about its calls, what interceptors say, what is still to be asked.

Rules

- A refused call (rejected, skipped, answered by a person) ends first; interceptors see only what may still run.
- An approval holds for the arguments it was given for. Whatever changes them afterwards, the call asks again, whoever
  asked first and whether they are still there.
- Refusals that end the run leave nothing to review.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualclaw import ContentPart, DecisionAction
from dualclaw.errors import EngineError
from dualclaw_server.engine import questions
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import CallPhase, Checkpoint, Question
from dualclaw_server.engine.interceptor import Observation
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import Ask, End, Fail, Replace, Suspend
from dualclaw_server.engine.texts import Texts

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope

log = logging.getLogger(__name__)

OUTCOME = "outcome"
"""Key of the engine's own question what became of a call that a crash interrupted."""


def verdict(scope: Scope, call: Call) -> tuple[Observation, End | None] | None:
    """Return what people made of a call instead of letting it run, and the end of the run if they want that; None:
    they did not refuse it.
    """
    texts = scope.texts
    asked = questions.refusal(scope.trace.root.checkpoint, call.id)
    if asked is None:
        return None
    decision, end = asked.decision, None
    detail = texts.comment.format(comment=decision.comment) if decision.comment else ""
    if decision.approver == questions.EXPIRED:
        detail = texts.approval_expired
    untouched = call.state.phase == CallPhase.CALL_PHASE_WAITING
    if decision.action == DecisionAction.DECISION_ACTION_RESPOND:
        text = questions.response_text(decision)
        return Observation([ContentPart(text=text)] if text else []), None
    if asked.asked_by == f"engine/{OUTCOME}":
        return failure("TOOL_OUTCOME_UNKNOWN", texts.tool_outcome_unknown.format(name=call.name), detail=detail), None
    if decision.action == DecisionAction.DECISION_ACTION_SKIP:
        summary = texts.tool_skipped.format(name=call.name)
        return failure("TOOL_SKIPPED", summary, detail=detail, not_done=untouched), None
    if asked.reject_ends_run:
        end = End(texts.rejected.format(name=call.name), "rejected")
    summary = texts.tool_rejected.format(name=call.name)
    return failure("TOOL_REJECTED", summary, detail=detail, not_done=untouched), end


async def review(scope: Scope, calls: Sequence[Call]) -> End | Fail | bool:
    """Have interceptors see the calls that are to run, and ask about each that no answer covers as it is then.

    Returns what ends the run, or whether the batch must wait for people.
    """
    outcome = await scope.chain.action_start(scope.trace, calls)
    by_id = {call.id: call for call in calls}
    asks_about_run = False
    match outcome:
        case None:
            pass
        case Replace(value=dict() as args) if args.keys() <= by_id.keys():
            for call_id, changed in args.items():
                by_id[call_id].change(changed)
        case Suspend():
            for ask in outcome.asks:
                if ask.call_id and ask.call_id not in by_id:
                    text = f"Interceptor {outcome.origin} asks about the call {ask.call_id!r}, which is not to run."
                    raise EngineError("INTERNAL", text)
                scope.ask_people(ask, outcome.origin, by_id.get(ask.call_id))
                asks_about_run = asks_about_run or not ask.call_id
        case End() | Fail():
            return outcome
        case _:
            text = "interceptor %s: on_action_start must replace by arguments of calls, by their id"
            log.error(text, outcome.origin)
    root = scope.trace.root.checkpoint
    for call in calls:
        _gate(scope, root, call)
    return asks_about_run or any(not asked.HasField("decision") for call in calls for asked in _all(root, call))


def _gate(scope: Scope, root: Checkpoint, call: Call) -> None:
    """Ask, or ask again, where no answer covers the call as it is now."""
    asked = questions.newest(root, call.id)
    if asked is None:
        if call.args_hash in root.unknown_outcomes:
            text = scope.texts.outcome_unknown_again.format(name=call.name)
            scope.ask_people(Ask(text, allowed=("approve", "reject", "skip", "respond")), "engine", call)
    elif not asked.HasField("decision"):
        if asked.item.args_hash != call.args_hash:  # what people see is not what would run
            asked.item.args_hash, asked.item.args_json = call.args_hash, scope.shown_args(call)
    elif not questions.allows(asked, call):
        scope.ask_again(asked, call)


def _all(root: Checkpoint, call: Call) -> list[Question]:
    return questions.about(root, call.id)


def notes(root: Checkpoint, call: Call, texts: Texts) -> list[ContentPart]:
    """Return what the model must know of what people did to a call that they let run, whatever came of it."""
    if questions.refusal(root, call.id) is not None:
        return []
    decisions = [asked.decision for asked in questions.about(root, call.id) if asked.HasField("decision")]
    made = []
    if call.state.original_args_json and any(d.action == DecisionAction.DECISION_ACTION_EDIT for d in decisions):
        made.append(texts.edited.format(args=call.state.call.args_json or "{}"))
    made += [texts.comment.format(comment=decision.comment) for decision in decisions if decision.comment]
    return [ContentPart(text=note) for note in made]
