"""Tools and past tool calls as text, for models without tool calls: what ``text_tools`` and ``json_tools`` share.

Rules and their reasons:

- A call and its results follow each other whatever stands between them in the conversation: each call has
  exactly one result (``history.results``), told in a user turn, because the chat templates of such models know
  the roles user and assistant alone.
- Reasoning is told only where the wrapper wrote it itself; a vendor's sealed reasoning is no text.
- Schemas are read once per set of tools. References are put in place of what they name, because a schema that
  stands inside another one cannot point into itself; a recursive one becomes "anything", which the engine
  checks against the real schema before the tool runs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dualclaw import ContentPart, Media, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw.events import clean_text, diagnosis_text
from dualclaw_server.engine.model import ToolSpec
from dualclaw_server.models.history import NO_RESULT, results

Schema = dict[str, object]

_THOUGHT = "text:thought"
"""Signature of reasoning that a wrapper read out of plain text; the mark keeps vendors' APIs from sending it."""
_KEPT = ("type", "enum", "const", "required", "minItems", "maxItems")
_MOST_NODES = 1000


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool that may be called, with its schema as a constraint: nothing in it but what bounds a value."""

    spec: ToolSpec
    schema: Schema


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as it was read out of a text; ``arguments`` is the JSON of one object, or whatever stood there."""

    name: str
    arguments: str


class Wording(Protocol):
    """How one wrapper writes turns. Implemented by ``text_tools`` and ``json_tools``."""

    def answer(self, text: str) -> str:
        """Return an assistant turn without calls."""

    def calls(self, thought: str, text: str, calls: Sequence[ToolCall]) -> str:
        """Return an assistant turn with calls; ``thought`` and ``text`` may be empty."""

    def result(self, call: ToolCall, text: str, *, alone: bool) -> str:
        """Return what a call gave; ``alone``: it is the only one of its turn."""


def thought_part(text: str) -> ContentPart:
    """Return reasoning that was written as plain text."""
    return ContentPart(reasoning=ReasoningPart(text=text, signature=_THOUGHT))


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether there is anything in a conversation that a model without tool calls cannot be sent."""
    return any(
        part.WhichOneof("part") in ("tool_call", "tool_result") for message in messages for part in message.parts
    )


def tell(messages: Sequence[Message], wording: Wording, *, images: bool) -> list[Message]:
    """Return the conversation without tool calls: they and their results are told.

    Args:
        messages: the conversation.
        wording: how turns are written.
        images: whether the images of results may be sent; else a note stands for them.
    """
    answers = results(messages)
    told: list[Message] = []
    for position, message in enumerate(messages):
        if message.role == Role.ROLE_TOOL:
            continue
        if message.role != Role.ROLE_ASSISTANT:
            told.append(message)
            continue
        text = "".join(part.text for part in message.parts if part.WhichOneof("part") == "text")
        calls = [part.tool_call for part in message.parts if part.WhichOneof("part") == "tool_call"]
        if not calls:
            if text.strip():
                told.append(Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(text=wording.answer(text))]))
            continue
        thoughts = (part.reasoning for part in message.parts if part.WhichOneof("part") == "reasoning")
        thought = "\n".join(part.text for part in thoughts if part.signature == _THOUGHT)
        written = ContentPart(text=wording.calls(thought, text, calls))
        told.append(Message(role=Role.ROLE_ASSISTANT, parts=[written]))
        parts: list[ContentPart] = []
        for call in calls:
            result = answers.get((position, call.id))
            line = wording.result(
                call, NO_RESULT if result is None else _result_text(result, images), alone=len(calls) == 1
            )
            parts.append(ContentPart(text=line if not parts else f"\n{line}"))
            if result is not None and images:
                parts += [part for part in result.parts if part.WhichOneof("part") == "image"]
        told.append(Message(role=Role.ROLE_USER, parts=parts))
    return told


def bind(tools: Sequence[ToolSpec]) -> tuple[BoundTool, ...]:
    """Return the tools with their schemas read.

    Raises:
        ValueError: a tool's parameters are not a JSON object.
    """
    bound: list[BoundTool] = []
    for tool in tools:
        try:
            schema: object = json.loads(tool.parameters or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"parameters of tool {tool.name!r} are not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise ValueError(f"parameters of tool {tool.name!r} are not a JSON object")
        bound.append(BoundTool(tool, {"type": "object", **plain_schema(schema)}))
    return tuple(bound)


def plain_schema(schema: Schema) -> Schema:
    """Return what a schema demands, without its references: they stand in place."""
    return _Plain(schema).read(schema)


def describe(tools: Sequence[BoundTool]) -> str:
    """Return the tools as lines of instructions: name, description, schema with its descriptions."""
    return "\n".join(
        f"- {tool.spec.name}: {clean_text(tool.spec.description).strip()} Schema: {_compact(tool.spec.parameters)}"
        for tool in tools
    )


def sample(schema: object) -> object:
    """Return a short value that fits a schema, for examples: its own example where it has one."""
    if not isinstance(schema, Mapping):
        return "..."
    if "const" in schema:
        return schema["const"]
    if isinstance(values := schema.get("enum"), list) and values:
        return values[0]
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and options:
            return sample(options[0])
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    match kind:
        case "object":
            properties = schema.get("properties")
            required = schema.get("required")
            named = properties if isinstance(properties, Mapping) else {}
            return {str(name): sample(named.get(name)) for name in (required if isinstance(required, list) else [])}
        case "array":
            return [sample(schema.get("items"))]
        case "integer" | "number":
            return 1
        case "boolean":
            return True
        case "null":
            return None
    return "..."


class _Plain:
    """Copies what constrains a value and leaves out what only describes it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._open: list[str] = []
        self._nodes = 0

    def read(self, value: object) -> Schema:
        """Return the schema without references; {} for whatever cannot be expressed so."""
        self._nodes += 1
        if not isinstance(value, dict) or self._nodes > _MOST_NODES:
            return {}
        reference = value.get("$ref")
        if isinstance(reference, str):
            return self._named(reference)
        made: Schema = {key: value[key] for key in _KEPT if key in value}
        for key in ("anyOf", "oneOf"):
            if isinstance(options := value.get(key), list):
                made[key] = [self.read(option) for option in options]
        if isinstance(options := value.get("allOf"), list):
            return self._joined([{key: inner for key, inner in value.items() if key != "allOf"}, *options])
        if "items" in value:
            made["items"] = self.read(value["items"])
        properties = value.get("properties")
        more = value.get("additionalProperties")
        if isinstance(properties, dict):
            made["properties"] = {name: self.read(inner) for name, inner in properties.items()}
        if isinstance(more, dict) and more:
            made["additionalProperties"] = self.read(more)
        elif "properties" in made and more in (None, False):
            made["additionalProperties"] = False
        return made

    def _joined(self, schemas: Sequence[object]) -> Schema:
        """Return one schema for all of these: properties and what is required add up, of the rest the last counts."""
        made: Schema = {}
        properties: Schema = {}
        required: list[object] = []
        for schema in map(self.read, schemas):
            made |= schema
            if isinstance(found := schema.get("properties"), dict):
                properties |= found
            if isinstance(names := schema.get("required"), list):
                required += names
        return made | ({"properties": properties} if properties else {}) | ({"required": required} if required else {})

    def _named(self, reference: str) -> Schema:
        target: object = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            if step:
                key = step.replace("~1", "/").replace("~0", "~")
                target = target.get(key) if isinstance(target, dict) else None
        if reference in self._open or not reference.startswith("#"):
            return {}
        self._open.append(reference)
        try:
            return self.read(target)
        finally:
            self._open.pop()


def _compact(parameters: str) -> str:
    return json.dumps(json.loads(parameters or "{}"), ensure_ascii=False, separators=(",", ":"))


def _result_text(result: ToolResult, images: bool) -> str:
    pieces: list[str] = []
    for part in result.parts:
        match part.WhichOneof("part"):
            case "text" if part.text:
                pieces.append(part.text)
            case "image":
                pieces.append("[the image below]" if images else _note(part.image, "image"))
            case "file":
                pieces.append(_note(part.file, "file"))
    text = clean_text("\n".join(pieces))
    if result.is_error and not text.strip():
        return diagnosis_text(result.diagnosis) or "The tool failed."
    return text


def _note(media: Media, kind: str) -> str:
    return f"[{' '.join(filter(None, [kind, media.media_type, media.name]))}]"
