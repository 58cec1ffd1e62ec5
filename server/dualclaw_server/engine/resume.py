"""Answers to a run that asked: accepted where they arrive, taken in where the run is worked on.

Rules

- What is wrong with an answer is said to whoever gives it, with the name of the field, before anything is stored:
  an action the question does not allow, arguments that are no object or do not fit the tool, a response that does
  not fit the question's schema, a hash of other arguments than those that were shown.
- The approver is the authenticated subject, whatever the request says.
- Whoever works on the run reads its inbox after it has claimed the log, so every answer that was accepted before is
  in it. The answers are saved with the next frame, which also takes them out of the inbox; a crash before that
  leaves them there to be taken in again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import jsonschema

from dualclaw import (
    Decision,
    DecisionAction,
    HistoryEdit,
    InterruptItem,
    InterruptKind,
    Message,
    RememberScope,
    ResumeRequest,
    Role,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw.json_text import canonical_args, parse_args
from dualclaw_server.engine import questions
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.caller import Caller
from dualclaw_server.engine.checkpoint import ResumeSignal, load_signal
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.segment import Segment
from dualclaw_server.engine.store import InboxSignal, RunStore
from dualclaw_server.engine.trace import Trace

_APPROVE = DecisionAction.DECISION_ACTION_APPROVE
_EDIT = DecisionAction.DECISION_ACTION_EDIT
_RESPOND = DecisionAction.DECISION_ACTION_RESPOND
_WRITTEN = frozenset({Role.ROLE_SYSTEM, Role.ROLE_USER, Role.ROLE_ASSISTANT})


# Where answers arrive


def checked_decisions(
    caller: Caller, request: ResumeRequest, items: Sequence[InterruptItem], agents: Mapping[str, Agent]
) -> list[Decision]:
    """Return a request's decisions as they are stored. Those about unknown questions are left to the store.

    Raises:
        FieldError: naming every field that is wrong.
        EngineError: PERMISSION_DENIED.
    """
    wrong: dict[str, str] = {}
    by_id = {item.id: item for item in items}
    seen: set[str] = set()
    made = []
    for number, given in enumerate(request.decisions):
        field = f"decisions[{number}]"
        if given.interrupt_id in seen:
            wrong[f"{field}.interrupt_id"] = "is answered twice in this request"
        seen.add(given.interrupt_id)
        decision = Decision()
        decision.CopyFrom(given)
        decision.approver = caller.subject
        item = by_id.get(given.interrupt_id)
        if item is not None:
            for name, problem in _problems(decision, item, agents):
                wrong[f"{field}.{name}"] = problem
        if given.remember == RememberScope.REMEMBER_SCOPE_TENANT and "operator" not in caller.roles:
            raise EngineError("PERMISSION_DENIED", "Remembering an approval for the tenant needs the role operator.")
        made.append(decision)
    if wrong:
        raise FieldError(wrong)
    return made


def _problems(decision: Decision, item: InterruptItem, agents: Mapping[str, Agent]) -> Iterable[tuple[str, str]]:
    """Yield what is wrong with one decision; makes its arguments canonical."""
    action = decision.action
    if action not in item.allowed_actions:
        names = ", ".join(_name(allowed) for allowed in item.allowed_actions)
        yield "action", f"must be one of {names}" if action else f"is missing; one of {names}"
    if decision.args_hash and decision.args_hash != item.args_hash:
        yield "args_hash", "is of other arguments than the question shows; read it again"
    if decision.remember > RememberScope.REMEMBER_SCOPE_CALL and action != _APPROVE:
        yield "remember", "is for APPROVE only"
    if action == _EDIT:
        problem = _edit_problem(decision, item, agents)
        if problem:
            yield "args_json", problem
    elif decision.args_json:
        yield "args_json", "is for EDIT only"
    if action == _RESPOND:
        problem = response_problem(decision.response_json, item.response_schema_json)
        if problem:
            yield "response_json", problem
    elif decision.response_json:
        yield "response_json", "is for RESPOND only"


def _edit_problem(decision: Decision, item: InterruptItem, agents: Mapping[str, Agent]) -> str:
    if not item.tool_name:
        return "there are no arguments to edit"
    try:
        found = json.loads(decision.args_json or "{}")
    except (ValueError, RecursionError):
        return "must be the JSON text of one object"
    if not isinstance(found, dict):
        return "must be the JSON text of one object"
    args = parse_args(decision.args_json)
    decision.args_json = canonical_args(args)
    agent = agents.get(item.path[-2]) if len(item.path) > 1 else None
    tool = agent.tools_by_name.get(item.tool_name) if agent is not None else None
    return tool.problem(args) if tool is not None else ""


def response_problem(response_json: str, schema_json: str) -> str:
    """Return what is wrong with a response; empty when it fits its question."""
    if not response_json:
        return "is missing: the answer as JSON text"
    try:
        value = json.loads(response_json)
    except (ValueError, RecursionError):
        return 'must be JSON text, such as "yes" in quotes'
    if not schema_json:
        return ""
    validator = jsonschema.Draft202012Validator(json.loads(schema_json))
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    return error.message[:500] if error is not None else ""


def message_as_response(text: str, item: InterruptItem) -> str:
    """Return a user's message as the response to a question. Raises FieldError when it does not fit."""
    plain = json.dumps(text, ensure_ascii=False)
    if not response_problem(plain, item.response_schema_json):
        return plain
    problem = response_problem(text, item.response_schema_json)
    if problem:
        raise FieldError({"message": f"does not answer the open question {item.id}: {problem}"})
    return text


def only_question(items: Iterable[InterruptItem]) -> InterruptItem | None:
    """Return the one question that a message would answer; None when there is none, or more than one."""
    asked = [item for item in items if item.kind == InterruptKind.INTERRUPT_KIND_QUESTION]
    return asked[0] if len(asked) == 1 and _RESPOND in asked[0].allowed_actions else None


def check_edits(caller: Caller, edits: Sequence[HistoryEdit], known: Mapping[str, Message]) -> None:
    """Check history edits against the messages there are, by id.

    Raises:
        FieldError: naming every edit that is wrong.
        EngineError: PERMISSION_DENIED.
    """
    if edits and "operator" not in caller.roles:
        raise EngineError("PERMISSION_DENIED", "Editing the history needs the role operator.")
    wrong: dict[str, str] = {}
    for number, edit in enumerate(edits):
        field = f"history_edits[{number}]"
        match edit.WhichOneof("edit"):
            case "append":
                problem = _message_problem(edit.append)
            case "replace":
                problem = _target_problem(edit.replace.id, known) or _message_problem(edit.replace)
            case "remove_message_id":
                problem = _target_problem(edit.remove_message_id, known)
            case "insert_before":
                target = edit.insert_before.message_id
                unknown = "" if target in known else f"there is no message {target!r} in this conversation"
                problem = unknown or _message_problem(edit.insert_before.message)
            case _:
                problem = "says nothing: set append, replace, remove_message_id or insert_before"
        if problem:
            wrong[field] = problem
    if wrong:
        raise FieldError(wrong)


def _target_problem(message_id: str, known: Mapping[str, Message]) -> str:
    message = known.get(message_id)
    if message is None:
        return f"there is no message {message_id!r} in this conversation"
    if any(part.WhichOneof("part") in ("tool_call", "tool_result") for part in message.parts):
        return "holds tool calls or results, which stay together"
    return ""


def _message_problem(message: Message) -> str:
    if message.role not in _WRITTEN:
        return "its role must be SYSTEM, USER or ASSISTANT"
    kinds = {part.WhichOneof("part") for part in message.parts}
    if not kinds or not kinds <= {"text", "image", "file"}:
        return "its parts must be text, images or files, at least one"
    return ""


def _name(action: DecisionAction.ValueType) -> str:
    return DecisionAction.Name(action).removeprefix("DECISION_ACTION_")


# Where the run is worked on


def resumes_in(unread: Iterable[InboxSignal]) -> list[tuple[str, ResumeSignal]]:
    """Return the answers in an inbox, in order, with the id of their signal."""
    found = []
    for signal in unread:
        body = load_signal(signal.body)
        if body.WhichOneof("signal") == "resume":
            found.append((signal.signal_id, body.resume))
    return found


async def take_answers(segment: Segment, store: RunStore) -> None:
    """Take everything people and time have decided into the run; the log must be claimed."""
    root = segment.trace
    loaded = await store.load(root.key)
    for signal_id, resume in resumes_in(loaded.unread):
        segment.signals.append(signal_id)
        for question in questions.answer(root, resume.decisions):
            await _remember(segment, question.decision, question.item)
        if resume.history_edits:
            edit_context(root, resume.history_edits)
    questions.expire(root, datetime.now(UTC))


async def _remember(segment: Segment, decision: Decision, item: InterruptItem) -> None:
    if decision.remember <= RememberScope.REMEMBER_SCOPE_CALL or decision.action != _APPROVE or not item.tool_name:
        return
    agent = item.path[-2] if len(item.path) > 1 else segment.trace.agent
    name = questions.remembered_name(decision.remember, segment.trace.conversation_id, agent, item.tool_name)
    value = {"approver": decision.approver, "time": datetime.now(UTC).isoformat()}
    await segment.keep_value(name, json.dumps(value).encode())


def edit_context(trace: Trace, edits: Iterable[HistoryEdit]) -> None:
    """Change what the model is given; the transcript stays as it is."""
    context = trace.context()
    for edit in edits:
        places = {message.id: place for place, message in enumerate(context)}
        match edit.WhichOneof("edit"):
            case "append":
                context.append(_new(edit.append))
            case "replace" if edit.replace.id in places:
                context[places[edit.replace.id]] = edit.replace
            case "remove_message_id" if edit.remove_message_id in places:
                del context[places[edit.remove_message_id]]
            case "insert_before" if edit.insert_before.message_id in places:
                context.insert(places[edit.insert_before.message_id], _new(edit.insert_before.message))
            case _:
                continue
    trace.rewrite_context(context)


def _new(message: Message) -> Message:
    made = Message()
    made.CopyFrom(message)
    made.id = new_id()
    return made
