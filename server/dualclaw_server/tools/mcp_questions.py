"""What MCP servers ask people in the middle of a call (elicitation), as questions of the run, and the answers back.

A form becomes a question whose response must fit the form; a form of one field also takes its bare value, so that a
plain message answers it. An address to visit becomes a question too: whatever people respond means they went there.
A form may not carry patterns or references: its schema is the server's, and is checked where answers arrive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from mcp_types import ElicitRequestFormParams, ElicitRequestParams, ElicitRequestURLParams, ElicitResult

from dualclaw import DecisionAction
from dualclaw.events import canonical_json, clean_text
from dualclaw_server.engine import questions
from dualclaw_server.engine.checkpoint import Question
from dualclaw_server.engine.outcome import Ask
from dualclaw_server.engine.trace import Trace

PREFIX = "mcp-"
"""Begins the keys of these questions."""
MAX_PROMPT = 4_000
MAX_FIELDS = 50
_TYPES = ("string", "number", "integer", "boolean", "array")
_KEPT = ("title", "description", "default", "enumNames", "minLength", "maxLength", "minimum", "maximum", "format")
_KEPT_OF_LISTS = ("title", "description", "minItems", "maxItems")


class NoQuestion(Exception):
    """What the server asks cannot be asked; the text says why."""


def key_of(params: ElicitRequestParams, place: str) -> str:
    """Return the key of a question: the same for the same question at the same place of a call, in every process."""
    text = canonical_json([place, params.model_dump(by_alias=True, mode="json", exclude={"meta", "elicitation_id"})])
    return f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def ask_of(server: str, params: ElicitRequestParams, key: str) -> Ask:
    """Return what to ask people. Raises NoQuestion."""
    message = clean_text(params.message).strip()[:MAX_PROMPT]
    if isinstance(params, ElicitRequestURLParams):
        if urlsplit(params.url).scheme not in ("http", "https"):
            raise NoQuestion("it wants people to visit an address that is neither http nor https")
        prompt = f"{server}: {message}\n{clean_text(params.url)}"
        return Ask(prompt.strip(), kind="question", allowed=("respond", "skip"), key=key)
    properties, required = _fields(params)
    form = {
        "type": "object",
        "properties": properties,
        "required": [name for name in required if name in properties],
        "additionalProperties": False,
    }
    schema: object = form
    if len(properties) == 1:
        schema = {"anyOf": [form, next(iter(properties.values()))]}
    elif not properties:
        schema = {}  # a mere confirmation
    lines = [f"{server}: {message}"]
    if len(properties) > 1:
        lines += [_line(name, field, name in required) for name, field in properties.items()]
    try:
        return Ask(
            "\n".join(lines),
            kind="question",
            allowed=("respond", "skip"),
            response_schema=canonical_json(schema) if schema else "",
            key=key,
        )
    except ValueError as error:
        raise NoQuestion(f"its form cannot be used: {error}") from None


def reply_of(params: ElicitRequestParams, question: Question) -> ElicitResult:
    """Return people's answer as the server takes it: skipped is declined, expired is cancelled."""
    decision = question.decision
    if not decision.response_json:
        gone = decision.approver in (questions.EXPIRED, questions.WITHDRAWN)
        return ElicitResult(action="cancel" if gone else "decline")
    if isinstance(params, ElicitRequestURLParams):
        return ElicitResult(action="accept")
    properties, _ = _fields(params)
    value: object = json.loads(decision.response_json)
    if len(properties) == 1 and not isinstance(value, dict):
        value = {next(iter(properties)): value}
    content = value if isinstance(value, dict) and properties else {}
    return ElicitResult.model_validate({"action": "accept", "content": content})


def about(trace: Trace, call_id: str) -> dict[str, Question]:
    """Return what people were asked for a server about a call, by key; of several under one key the last."""
    found = {}
    for question in questions.about(trace.root.checkpoint, call_id):
        key = question.asked_by.partition("/")[2]
        if key.startswith(PREFIX):
            found[key] = question
    return found


def let_answers_through(trace: Trace) -> None:
    """Have calls that a server asked people about go on with the answer, instead of taking it for their result.

    A response to a question about a call is the call's result, and whoever skips it ends it. Here both are for the
    server, which waits. What people said stays in the decision: a response is one that has ``response_json``.
    """
    for question in trace.questions:
        decision = question.decision
        if not question.asked_by.partition("/")[2].startswith(PREFIX) or not question.HasField("decision"):
            continue
        if decision.approver != questions.WITHDRAWN:
            decision.action = DecisionAction.DECISION_ACTION_APPROVE
            decision.args_hash = question.item.args_hash


def _fields(params: ElicitRequestFormParams) -> tuple[dict[str, dict[str, object]], Sequence[str]]:
    """Return a form's fields, with nothing in them but what a form may have. Raises NoQuestion."""
    schema = params.requested_schema
    given, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(given, dict) or not isinstance(required, list) or len(given) > MAX_FIELDS:
        raise NoQuestion(f"its form is no object of at most {MAX_FIELDS} fields")
    fields = {}
    for name, field in given.items():
        if not isinstance(field, dict) or field.get("type") not in _TYPES:
            raise NoQuestion(f"field {str(name)[:100]!r} of its form is not one of {', '.join(_TYPES)}")
        made = {key: field[key] for key in _KEPT if key in field} | {"type": field["type"]}
        if field["type"] == "array":
            items = field.get("items")
            choices = _choices(items) if isinstance(items, dict) else {}
            made = {key: field[key] for key in _KEPT_OF_LISTS if key in field}
            made |= {"type": "array", "items": {"type": "string", **choices}}
        else:
            made |= _choices(field)
        fields[str(name)] = made
    return fields, [name for name in required if isinstance(name, str)]


def _choices(field: dict[str, object]) -> dict[str, object]:
    """Return the choices of a field, in whichever way its revision of the protocol writes them."""
    if isinstance(field.get("enum"), list):
        return {"enum": field["enum"]}
    for way in ("oneOf", "anyOf"):
        options = field.get(way)
        if isinstance(options, list):
            return {
                way: [{key: o[key] for key in ("const", "title") if key in o} for o in options if isinstance(o, dict)]
            }
    return {}


def _line(name: str, field: dict[str, object], required: bool) -> str:
    told = clean_text(str(field.get("description") or field.get("title") or ""))[:200]
    text = f"- {clean_text(name)[:100]}: {told}" if told and told != name else f"- {clean_text(name)[:100]}"
    return text if required else f"{text} (optional)"
