"""Questions to people: asked by interceptors and tools, answered by Resume, by a message, or by time.

Rules

- Every question of a run, answered or not, stays in the checkpoint at its root. Its id is the call's id, or the
  address of who asked about the run; when the same is asked again (the arguments changed since) ``#2`` follows,
  so an id is never given twice and an answer always means what its giver saw.
- One refusal of a call stands, whoever else asked about it and was told otherwise.
- An approval holds for the arguments whose hash was shown, an edit for exactly the edited ones. The engine itself
  looks: whoever asked may be gone by then, and a stored decision counts whatever the policy has become.
- Answers add up. Nothing runs before every question is answered.
- A question that nobody answers in time counts as rejected, or skipped if it cannot be rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC
from typing import cast

from dualclaw import Decision, DecisionAction, Diagnosis, InterruptItem, InterruptKind, RememberScope
from dualclaw.events import make_diagnosis, parse_args
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import CallState, Checkpoint, Question
from dualclaw_server.engine.outcome import Action, Ask
from dualclaw_server.engine.texts import Texts
from dualclaw_server.engine.trace import Trace

EXPIRED = "expired"
"""Approver of a decision that time has made."""
WITHDRAWN = "withdrawn"
"""Approver of a question's end when what it was about has ended without an answer."""

ALLOWING = frozenset({DecisionAction.DECISION_ACTION_APPROVE, DecisionAction.DECISION_ACTION_EDIT})
"""Decisions after which a call may run."""
_KINDS = {
    "approval": InterruptKind.INTERRUPT_KIND_APPROVAL,
    "question": InterruptKind.INTERRUPT_KIND_QUESTION,
}


def record(trace: Trace, ask: Ask, asked_by: str, call: Call | None, shown_args: str = "") -> tuple[Question, bool]:
    """Put a question into the checkpoint, or find it there if it waits already; says whether it is new.

    Args:
        trace: of the agent that asks.
        ask: what is asked.
        asked_by: interceptor or tool.
        call: what it is about; None: the agent's run.
        shown_args: the call's arguments as people may see them; the hash covers the real ones.
    """
    asked = trace.root.checkpoint.questions
    by = f"{asked_by}/{ask.key}"
    call_id, args_hash = (call.id, call.args_hash) if call is not None else (trace.call_id, "")
    for question in asked:
        if (
            not question.HasField("decision")
            and (question.call_id, question.asked_by, question.item.args_hash) == (call_id, by, args_hash)
            and _about_call(question) is (call is not None)
        ):
            return question, False
    address = [call.id] if call is not None else [*trace.path, *filter(None, [trace.call_id]), asked_by]
    item = InterruptItem(
        id=_free_id(asked, "/".join([*address, *filter(None, [ask.key])])),
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
    question = asked.add(item=item, call_id=call_id, asked_by=by, reject_ends_run=ask.reject_ends_run)
    if call is not None:
        question.index = call.state.index
    return question, True


def same_ask(question: Question) -> Ask:
    """Return what was asked, to be asked again."""
    item = question.item
    approval = item.kind == InterruptKind.INTERRUPT_KIND_APPROVAL
    names = (DecisionAction.Name(action).removeprefix("DECISION_ACTION_").lower() for action in item.allowed_actions)
    return Ask(
        item.prompt,
        "approval" if approval else "question",
        allowed=[cast("Action", name) for name in names],
        response_schema=item.response_schema_json,
        expire_time=item.expire_time.ToDatetime(UTC) if item.HasField("expire_time") else None,
        reject_ends_run=question.reject_ends_run,
        key=question.asked_by.partition("/")[2],
    )


def _free_id(asked: Iterable[Question], base: str) -> str:
    """Return an id nobody was given yet; call ids come from outside, so any of them may look like ours."""
    taken = {question.item.id for question in asked}
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}#{number}"
    return name


def _about_call(question: Question) -> bool:
    """False for a question about an agent's run; a sub-agent's names the call it works for all the same."""
    return question.HasField("index")


def open_items(root: Checkpoint) -> list[InterruptItem]:
    """Return what people still have to answer."""
    return [question.item for question in root.questions if not question.HasField("decision")]


def about(root: Checkpoint, call_id: str) -> list[Question]:
    """Return everything people were asked about a call, in order."""
    return [question for question in root.questions if question.call_id == call_id and _about_call(question)]


def newest(root: Checkpoint, call_id: str) -> Question | None:
    """Return the last question about a call."""
    return next(reversed(about(root, call_id)), None)


def refusal(root: Checkpoint, call_id: str) -> Question | None:
    """Return the first question about a call whose answer is that it shall not run, or not any further.

    One refusal stands, whatever else was asked about the call and answered.
    """
    return next(
        (asked for asked in about(root, call_id) if asked.HasField("decision") and not _allowing(asked)),
        None,
    )


def _allowing(question: Question) -> bool:
    return question.decision.action in ALLOWING


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


def expire(root: Trace, now: float) -> list[Question]:
    """Decide every open question whose time is over; ``now`` in seconds since the epoch."""
    over = []
    for item in open_items(root.checkpoint):
        if item.HasField("expire_time") and _expiry(item) <= now:
            reject = DecisionAction.DECISION_ACTION_REJECT
            action = reject if reject in item.allowed_actions else DecisionAction.DECISION_ACTION_SKIP
            over.append(Decision(interrupt_id=item.id, action=action, approver=EXPIRED))
    return answer(root, over)


def withdraw(root: Checkpoint, state: CallState) -> None:
    """Close every open question of a call that has ended without the answer, and of the sub-agent it ran."""
    ended = {state.call.id}
    if state.HasField("child"):
        ended.update(below.call.id for below in calls_below(state.child))
    for question in root.questions:
        if question.call_id in ended and not question.HasField("decision"):
            question.decision.interrupt_id, question.decision.approver = question.item.id, WITHDRAWN
            question.decision.action = DecisionAction.DECISION_ACTION_SKIP


def next_expiry(root: Checkpoint) -> float | None:
    """Return when the next open question expires, in seconds since the epoch; None: never."""
    return min((_expiry(item) for item in open_items(root) if item.HasField("expire_time")), default=None)


def _expiry(item: InterruptItem) -> float:
    return item.expire_time.ToMicroseconds() / 1_000_000  # one way to compute it, or a timer fires before it is due


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
    """Return the name under which an approval is remembered for a conversation or the tenant.

    Raises ValueError for any other scope: what nobody has checked must not come to hold for everybody.
    """
    match scope:
        case RememberScope.REMEMBER_SCOPE_CONVERSATION:
            place = conversation_id
        case RememberScope.REMEMBER_SCOPE_TENANT:
            place = "*"
        case _:
            raise ValueError(f"scope {scope} remembers nothing")
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
                edited = parse_args(question.decision.args_json)
                call.change(_unmasked(edited, parse_args(question.item.args_json), dict(call.args)))
                question.decision.args_hash = call.args_hash


def _unmasked(edited: dict[str, object], shown: Mapping[str, object], real: Mapping[str, object]) -> dict[str, object]:
    """Return edited arguments in which whatever was left as it was shown is what it really is."""
    return {name: _left(value, shown.get(name), real.get(name)) for name, value in edited.items()}


def _left(edited: object, shown: object, real: object) -> object:
    if isinstance(edited, dict) and isinstance(shown, dict) and isinstance(real, dict):
        return _unmasked(edited, shown, real)
    if isinstance(edited, list) and isinstance(shown, list) and isinstance(real, list) and len(edited) == len(shown):
        return [_left(*values) for values in zip(edited, shown, real, strict=False)]
    return real if isinstance(edited, str) and edited == shown else edited
