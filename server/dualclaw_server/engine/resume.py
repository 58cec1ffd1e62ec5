"""Answers to a run that asked: accepted where they arrive, taken in where the run is worked on.

Rules

- What is wrong with an answer is said to whoever gives it, with the name of the field, before anything is stored:
  an action the question does not allow, arguments that are no object or do not fit the tool, a response that does
  not fit the question's schema, a hash of other arguments than those that were shown.
- The approver is the authenticated subject, whatever the request says.
- History edits change what the model is given, never the transcript, and never come between calls and their results:
  what is appended follows the results that are still to come.
- Whoever works on the run reads its inbox after it has claimed the log, so every answer that was accepted before is
  in it. The answers are saved with the next frame, which also takes them out of the inbox; a crash before that
  leaves them there to be taken in again.
"""

from __future__ import annotations

import json
import logging
import time
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
from dualclaw_server.engine.adopt import MAX_ARGUMENTS
from dualclaw_server.engine.agent import Agent, AgentTool
from dualclaw_server.engine.caller import Caller
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.inbox import resumes_in
from dualclaw_server.engine.segment import Segment
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import Tool
from dualclaw_server.engine.trace import Trace

log = logging.getLogger(__name__)

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
        if given.remember not in RememberScope.values():
            wrong[f"{field}.remember"] = f"{given.remember} is no value of this enum"
        elif given.remember == RememberScope.REMEMBER_SCOPE_TENANT and "operator" not in caller.roles:
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
    if decision.remember > RememberScope.REMEMBER_SCOPE_CALL and not (action == _APPROVE and item.tool_name):
        yield "remember", "is for APPROVE of a tool's call only"
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
    args = parse_args(decision.args_json)
    if not isinstance(found, dict) or (found and not args):  # nested too deep reads as {}
        return "must be the JSON text of one object, nested at most 100 deep"
    decision.args_json = canonical_args(args)
    if len(decision.args_json) > MAX_ARGUMENTS:
        return f"has {len(decision.args_json)} characters, more than {MAX_ARGUMENTS}"
    tool = _tool_at(item.path, agents)
    return tool.problem(args) if tool is not None else ""


def _tool_at(path: Sequence[str], agents: Mapping[str, Agent]) -> Tool | None:
    """Return the tool a question's path leads to; None when it is gone, or was given to one run only."""
    agent = agents.get(path[0])
    for name in path[1:-1]:
        below = agent.all_tools if agent is not None else ()
        agent = next((tool.agent for tool in below if isinstance(tool, AgentTool) and tool.agent.name == name), None)
    return agent.tools_by_name.get(path[-1]) if agent is not None else None


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
    if not text.strip():
        raise FieldError({"message": f"has no text, which the open question {item.id} needs as its answer"})
    plain = json.dumps(_choice(text.strip(), item.response_schema_json) or text, ensure_ascii=False)
    problem = response_problem(plain, item.response_schema_json)
    if not problem:
        return plain
    if response_problem(text, item.response_schema_json):
        raise FieldError({"message": f"does not answer the open question {item.id}: {problem}"})
    return text


def _choice(text: str, schema_json: str) -> str:
    """Return the choice of a question that a message means by its number or, whatever the case, its text."""
    schema = json.loads(schema_json) if schema_json else {}
    if not isinstance(schema, dict):
        return ""
    kinds = [schema, *(kind for kind in schema.get("anyOf", ()) if isinstance(kind, dict))]
    choices: list[object] = next((kind["enum"] for kind in kinds if isinstance(kind.get("enum"), list)), [])
    texts = [choice for choice in choices if isinstance(choice, str)]
    meant = [choice for choice in texts if choice.casefold() == text.casefold()]
    if meant or len(texts) != len(choices):
        return text if text in meant else next(iter(meant), "")
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
    return texts[number - 1] if 0 < number <= len(texts) else ""


def only_question(items: Iterable[InterruptItem]) -> InterruptItem | None:
    """Return the one question that a message would answer; None when there is none, or more than one."""
    asked = [item for item in items if item.kind == InterruptKind.INTERRUPT_KIND_QUESTION]
    return asked[0] if len(asked) == 1 and _RESPOND in asked[0].allowed_actions else None


def check_edits(caller: Caller, edits: Sequence[HistoryEdit], trace: Trace) -> None:
    """Check history edits against what the model would be given now.

    Raises:
        FieldError: naming every edit that is wrong.
        EngineError: PERMISSION_DENIED.
    """
    if "operator" not in caller.roles:
        raise EngineError("PERMISSION_DENIED", "Editing the history needs the role operator.")
    _, _, wrong = _edited(trace.context(), edits)
    if wrong:
        raise FieldError(wrong)


def _edited(
    context: Sequence[Message], edits: Iterable[HistoryEdit]
) -> tuple[list[Message], list[Message], dict[str, str]]:
    """Return a context with edits made one after the other, what is to follow it, and what is wrong with which edit."""
    made, appended, wrong = list(context), list[Message](), dict[str, str]()
    for number, edit in enumerate(edits):
        places = {message.id: place for place, message in enumerate(made)}
        kind = edit.WhichOneof("edit")
        match kind:
            case "append":
                target, message, problem = "", edit.append, _message_problem(edit.append)
            case "replace":
                target, message, problem = edit.replace.id, edit.replace, _message_problem(edit.replace)
            case "remove_message_id":
                target, message, problem = edit.remove_message_id, Message(), ""
            case "insert_before":
                target, message = edit.insert_before.message_id, edit.insert_before.message
                problem = _message_problem(message)
            case _:
                wrong[f"history_edits[{number}]"] = (
                    "says nothing: set append, replace, remove_message_id or insert_before"
                )
                continue
        place = places.get(target, -1)
        if kind != "append":
            problem = _target_problem(target, made[place] if place >= 0 else None, kind) or problem
        if problem:
            wrong[f"history_edits[{number}]"] = problem
        elif kind == "append":
            appended.append(_new(message))
        elif kind == "replace":
            made[place] = message
        elif kind == "remove_message_id":
            del made[place]
        else:
            made.insert(place, _new(message))
    return made, appended, wrong


def _target_problem(message_id: str, message: Message | None, kind: str) -> str:
    if message is None:
        return f"there is no message {message_id!r} in what the model is given"
    parts = {part.WhichOneof("part") for part in message.parts}
    if kind == "insert_before":
        return "holds the results of calls, which stay with their calls" if "tool_result" in parts else ""
    return "holds tool calls or results, which stay together" if parts & {"tool_call", "tool_result"} else ""


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


async def take_answers(segment: Segment, store: RunStore) -> None:
    """Take everything people and time have decided into the run; the log must be claimed."""
    root = segment.trace
    loaded = await store.load(root.key)
    for signal_id, resume in resumes_in(loaded.unread):
        segment.signals.append(signal_id)
        for question in questions.answer(root, resume.decisions):
            await _remember(segment, question.decision, question.item)
        edit_context(segment, resume.history_edits)
    questions.expire(root, time.time())


async def _remember(segment: Segment, decision: Decision, item: InterruptItem) -> None:
    if decision.remember <= RememberScope.REMEMBER_SCOPE_CALL or decision.action != _APPROVE or not item.tool_name:
        return
    agent = item.path[-2] if len(item.path) > 1 else segment.trace.agent
    name = questions.remembered_name(decision.remember, segment.trace.conversation_id, agent, item.tool_name)
    value = {"approver": decision.approver, "time": datetime.now(UTC).isoformat()}
    await segment.keep_value(name, json.dumps(value).encode())


def edit_context(segment: Segment, edits: Sequence[HistoryEdit]) -> None:
    """Change what the model is given; the transcript stays as it is. An edit that fits no more is left out."""
    trace = segment.trace
    context = trace.context()
    made, appended, wrong = _edited(context, edits)
    for field, problem in wrong.items():
        log.warning("run %s: %s is left out, it %s", trace.key.run_id, field, problem)
    if made != context:
        trace.rewrite_context(made)
    for message in appended:
        segment.put(trace.put_aside(message))


def _new(message: Message) -> Message:
    made = Message()
    made.CopyFrom(message)
    made.id = new_id()
    return made
