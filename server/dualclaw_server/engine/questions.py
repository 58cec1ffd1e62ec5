"""Questions to people: asked by interceptors and tools, answered by Resume, by a message, or by time.

Rules

- Every question of a run, answered or not, stays in the checkpoint at its root. Its id is the call's id, or the
  address of who asked about the run; when the same is asked again (the arguments changed since) ``#2`` follows,
  so an id is never given twice and an answer always means what its giver saw.
- An approval holds for the arguments whose hash was shown, an edit for exactly the edited ones. The engine itself
  looks: whoever asked may be gone by then, and a stored decision counts whatever the policy has become.
- Answers add up. Nothing runs before every question is answered.
- A question that nobody answers in time counts as rejected, or skipped if it cannot be rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from dualclaw import Decision, DecisionAction, Diagnosis, InterruptItem, InterruptKind, RememberScope
from dualclaw.events import make_diagnosis, parse_args
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import CallState, Checkpoint, Question
from dualclaw_server.engine.outcome import Ask
from dualclaw_server.engine.texts import Texts
from dualclaw_server.engine.trace import Trace

EXPIRED = "expired"
"""Approver of a decision that time has made."""

ALLOWING = frozenset({DecisionAction.DECISION_ACTION_APPROVE, DecisionAction.DECISION_ACTION_EDIT})
"""Decisions after which a call may run."""
_KINDS = {
    "approval": InterruptKind.INTERRUPT_KIND_APPROVAL,
    "question": InterruptKind.INTERRUPT_KIND_QUESTION,
}


def record(trace: Trace, ask: Ask, asked_by: str, call: Call | None, shown_args: str = "") -> Question:
    """Put a question into the checkpoint, or find it there if it waits already.

    Args:
        trace: of the agent that asks.
        ask: what is asked.
        asked_by: interceptor or tool.
        call: what it is about; None: the run.
        shown_args: the call's arguments as people may see them; the hash covers the real ones.
    """
    questions = trace.root.checkpoint.questions
    base = call.id if call is not None else "/".join((*trace.path, asked_by))
    if ask.key:
        base = f"{base}/{ask.key}"
    by = f"{asked_by}/{ask.key}"
    args_hash = call.args_hash if call is not None else ""
    same = [question for question in questions if question.item.id == base or question.item.id.startswith(f"{base}#")]
    for question in same:
        if not question.HasField("decision") and question.item.args_hash == args_hash and question.asked_by == by:
            return question
    item = InterruptItem(
        id=base if not same else f"{base}#{len(same) + 1}",
        kind=_KINDS[ask.kind],
        prompt=ask.prompt,
        allowed_actions=[DecisionAction.Value(f"DECISION_ACTION_{action.upper()}") for action in ask.allowed],
        response_schema_json=ask.response_schema,
        path=[*trace.path, *([call.name] if call is not None else [])],
        args_hash=args_hash,
    )
    if call is not None:
        item.tool_name, item.args_json = call.name, shown_args
    if ask.expire_time is not None:
        item.expire_time.FromDatetime(ask.expire_time.astimezone(UTC).replace(tzinfo=None))
    question = questions.add(item=item, asked_by=by, reject_ends_run=ask.reject_ends_run)
    if call is not None:
        question.call_id, question.index = call.id, call.state.index
    return question


def open_items(root: Checkpoint) -> list[InterruptItem]:
    """Return what people still have to answer."""
    return [question.item for question in root.questions if not question.HasField("decision")]


def newest(root: Checkpoint, call_id: str) -> Question | None:
    """Return the last question about a call."""
    return next((question for question in reversed(root.questions) if question.call_id == call_id), None)


def answer(root: Trace, decisions: Iterable[Decision]) -> list[Question]:
    """Take in decisions; returns the questions they answer. One for what is unknown or answered is passed over."""
    waiting = {item.item.id: item for item in root.checkpoint.questions if not item.HasField("decision")}
    answered = []
    for decision in decisions:
        question = waiting.pop(decision.interrupt_id, None)
        if question is None:
            continue
        question.decision.CopyFrom(decision)
        if decision.action == DecisionAction.DECISION_ACTION_EDIT:
            _edit(root, question)
        else:
            question.decision.args_hash = question.item.args_hash
        answered.append(question)
    return answered


def expire(root: Trace, now: datetime) -> list[Question]:
    """Decide every open question whose time is over."""
    over = []
    for question in root.checkpoint.questions:
        if question.HasField("decision") or not question.item.HasField("expire_time"):
            continue
        if question.item.expire_time.ToDatetime(UTC) <= now:
            allowed = question.item.allowed_actions
            reject = DecisionAction.DECISION_ACTION_REJECT
            action = reject if reject in allowed else DecisionAction.DECISION_ACTION_SKIP
            over.append(Decision(interrupt_id=question.item.id, action=action, approver=EXPIRED))
    return answer(root, over)


def next_expiry(root: Checkpoint) -> float | None:
    """Return when the next open question expires, in seconds since the epoch; None: never."""
    times = [item.expire_time.ToMilliseconds() / 1000 for item in open_items(root) if item.HasField("expire_time")]
    return min(times, default=None)


def allows(question: Question, call: Call) -> bool:
    """Tell whether the answer to a question lets the call run with the arguments it has now."""
    decision = question.decision
    return decision.action in ALLOWING and decision.args_hash == call.args_hash


def response_text(decision: Decision) -> str:
    """Return a response as the model reads it: text as it is, other JSON as JSON."""
    try:
        value = json.loads(decision.response_json)
    except ValueError:
        return decision.response_json
    return value if isinstance(value, str) else decision.response_json


def waiting_diagnosis(item: InterruptItem, texts: Texts) -> Diagnosis:
    """Return what a step that waits for people says, for channels that show steps only."""
    approval = item.kind == InterruptKind.INTERRUPT_KIND_APPROVAL
    return make_diagnosis(
        code="approval.required" if approval else "input.required",
        severity="warning",
        summary=item.prompt,
        hint=texts.how_to_approve if approval else texts.how_to_respond,
    )


def remembered_name(scope: RememberScope.ValueType, conversation_id: str, agent: str, tool: str) -> str:
    """Return the name under which an approval is remembered for a conversation or the tenant."""
    place = conversation_id if scope == RememberScope.REMEMBER_SCOPE_CONVERSATION else "*"
    return f"approvals/{place}/{agent}/{tool}"


def calls_below(checkpoint: Checkpoint) -> Iterator[CallState]:
    """Yield the calls at work in an agent and in the sub-agents below it."""
    for state in checkpoint.calls:
        yield state
        if state.HasField("child"):
            yield from calls_below(state.child)


def _edit(root: Trace, question: Question) -> None:
    for state in calls_below(root.checkpoint):
        if state.call.id == question.call_id:
            call = Call(root, state, None)
            if call.open:
                call.change(parse_args(question.decision.args_json))
                question.decision.args_hash = call.args_hash
