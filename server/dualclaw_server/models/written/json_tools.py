"""Tools for a model without tool calls, by constrained JSON: the answer's schema offers the tools and an answer.

The endpoint holds the model to ``response_format: json_schema``, so even a tiny model gives a call that can be
read; examples show it when to call. Rules and their reasons:

- The schema is one choice, each branch flat: ``{"tool": NAME, "arguments": ...}`` or ``{"answer": TEXT}``. It
  holds nothing but what bounds a value, without references (``written.tool_text``), for
  grammars are made of it on each call.
- A tool choice is a choice of branches: "required" leaves out the answer, a name all tools but one.
- Past turns are told in the same JSON, because a model writes what it has read; so are the examples, as turns.

How the answer is read is in ``written.choice_text``, what holds for every model that writes its calls in
``written.model``.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dualclaw import ContentPart, Message, Role, ToolCall
from dualclaw.events import parse_args
from dualclaw_server.engine.model import ChatModel, ModelRequest
from dualclaw_server.models.schema import read_schema
from dualclaw_server.models.written.choice_text import ANSWER, ARGUMENTS, TOOL, ChoiceReader
from dualclaw_server.models.written.model import WrittenToolsModel
from dualclaw_server.models.written.tool_text import BoundTool, Schema, describe, plain_schema, sample, tell

_FORM = """\
Reply with one JSON object.
To use a tool: {{"tool": "NAME", "arguments": {{...}}}}
To answer: {{"answer": "TEXT"}}
Tools:
{tools}
The result of a tool follows. Then use a tool again, or answer."""
_ANSWER_ONLY = 'Tools are no longer available. Reply with one JSON object: {"answer": "TEXT"}'
_MUST_CALL = "This time you must use a tool; do not answer yet."


@dataclass(frozen=True, slots=True)
class Example:
    """A turn that shows what to do: what is asked, and the JSON object of the reply."""

    ask: str
    reply: str


class JsonToolsModel(WrittenToolsModel):
    """Gives tool calls to a model that has none, at an endpoint that holds answers to a schema. Owns the inner model.

    Args:
        inner: the model; it is never given tools.
        examples: turns put before every conversation with tools, short for small models; None: made up of the
            tools. A reply names a tool, or answers.

    Raises:
        ValueError: the reply of an example is neither of the two forms.
    """

    def __init__(self, inner: ChatModel, examples: Sequence[Example] | None = None) -> None:
        for example in examples or ():
            if not ({TOOL, ANSWER} & parse_args(example.reply).keys()):
                forms = f'{{"{TOOL}": NAME, "{ARGUMENTS}": {{...}}}} or {{"{ANSWER}": TEXT}}'
                raise ValueError(f"the reply of an example must be {forms}, not {example.reply!r}")
        super().__init__(inner, _ChoiceForm(examples))


class _ChoiceForm:
    """One JSON object: a tool and its arguments, or an answer."""

    def __init__(self, examples: Sequence[Example] | None) -> None:
        self._examples = examples

    def request(
        self, request: ModelRequest, tools: Sequence[BoundTool], *, must_call: bool, images: bool
    ) -> ModelRequest:
        """Return the request with the choice as its answer's schema, examples first and the calls told."""
        lines = [request.instructions] if request.instructions else []
        lines.append(_FORM.format(tools=describe(tools)) if tools else _ANSWER_ONLY)
        if must_call:
            lines.append(_MUST_CALL)
        examples = [] if must_call or not tools else self._turns(tools)
        messages = [*examples, *tell(request.messages, self, images=images)]
        schema = _choice(tools, _answer_schema(request.options.response_schema), must_call=must_call)
        options = replace(request.options, response_schema=_json(schema))
        return ModelRequest(messages, "\n\n".join(lines), options)

    def reader(self, request: ModelRequest, tools: Sequence[BoundTool]) -> ChoiceReader:
        """Return a reader for one answer."""
        return ChoiceReader(structured=request.options.response_schema is not None)

    def answer(self, text: str) -> str:
        """Return an answer as the model writes it."""
        return _json({ANSWER: text})

    def calls(self, thought: str, text: str, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them; it has no place for words beside a call."""
        return "\n".join(_json({TOOL: call.name, ARGUMENTS: parse_args(call.args_json)}) for call in calls)

    def result(self, call: ToolCall, text: str, *, alone: bool) -> str:
        """Return a result, always with its tool's name: a small model forgets what it asked."""
        return f"Result of {call.name}: {text}"

    def _turns(self, tools: Sequence[BoundTool]) -> list[Message]:
        examples = _made_up(tools[0]) if self._examples is None else self._examples
        turns: list[Message] = []
        for example in examples:
            turns.append(Message(role=Role.ROLE_USER, parts=[ContentPart(text=example.ask)]))
            turns.append(Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(text=example.reply)]))
        return turns


def _made_up(tool: BoundTool) -> list[Example]:
    """Return a call, what to do with its result, and an answer without one."""
    name = tool.spec.name
    return [
        Example(f"Use {name}.", _json({TOOL: name, ARGUMENTS: sample(tool.schema)})),
        Example(f"Result of {name}: ok", _json({ANSWER: "It says: ok"})),
        Example("Hello!", _json({ANSWER: "Hello! How can I help you?"})),
    ]


def _choice(tools: Sequence[BoundTool], answer: Schema, *, must_call: bool) -> Schema:
    branches = [_branch({TOOL: {"const": tool.spec.name}, ARGUMENTS: tool.schema}) for tool in tools]
    if not must_call:
        branches.append(_branch({ANSWER: answer}))
    return branches[0] if len(branches) == 1 else {"oneOf": branches}


def _branch(properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _answer_schema(wanted: str | None) -> Schema:
    """Return the schema of the answer: any text, or what the caller wants.

    Raises:
        ModelError: MODEL_BAD_RESPONSE, what the caller wants is no schema.
    """
    if wanted is None:
        return {"type": "string"}
    schema = read_schema(wanted)
    return plain_schema(schema) if '"$ref"' in wanted else schema


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
