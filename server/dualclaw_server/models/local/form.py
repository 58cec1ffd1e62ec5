"""The form in which the local model is given tools: constrained JSON, as in ``written.json_tools``, for a tiny model.

What differs, and why (each was measured):

- A tool is told by its name and the first sentence of its description. Schemas as text are not understood, and
  cost seconds; the grammar made of them holds all the same.
- The examples are whole turns, with result and answer, and those most like the question (``examples``).
- They stand between what was said before and the question, and of what was said before only questions and answers
  are told: whatever stands last is what it does, and one note taken would make it take notes of everything.
- Texts of arguments are bounded: a model that has lost its way repeats itself until the tokens run out, and a call
  that was cut off cannot be run.
- Once a tool has given a result only an answer is left for the question, and after a few calls that failed, too: it
  makes nothing of a second result, and would call without end. The grammar alone says so; the text stays as it is,
  so that what was read of it need not be read again.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dualclaw import ContentPart, Message, Role, ToolCall
from dualclaw.events import parse_args
from dualclaw_server.engine.model import ModelRequest
from dualclaw_server.models.local.examples import examples_for, first_sentence
from dualclaw_server.models.schema import read_schema
from dualclaw_server.models.written.choice_text import ANSWER, ARGUMENTS, TOOL, ChoiceReader
from dualclaw_server.models.written.tool_text import BoundTool, Schema, plain_schema, tell

MOST_CALLS: Final = 3
"""For one question."""
LONGEST_TEXT: Final = 240
"""Characters of a text in the arguments of a call."""

_OFFER = "Use a tool or answer. Reply in JSON.\n{tools}"
_ANSWER_ONLY = "Answer. Reply in JSON."
_MUST_CALL = "Use a tool. Reply in JSON.\n{tools}"


class LocalForm:
    """One JSON object, ``{"tool": NAME, "arguments": {...}}`` or ``{"answer": TEXT}``."""

    def request(
        self, request: ModelRequest, tools: Sequence[BoundTool], *, must_call: bool, images: bool
    ) -> ModelRequest:
        """Return the request with the examples that are most like it, and the choice as its answer's schema."""
        offer = _ANSWER_ONLY if not tools else _MUST_CALL if must_call else _OFFER
        told = "\n".join(f"{tool.spec.name}: {first_sentence(tool.spec.description)}" for tool in tools)
        lines = [request.instructions, offer.format(tools=told)]
        at = last_question(request.messages)
        earlier = [message for message in request.messages[:at] if not _is_about_calls(message)]
        now = request.messages[at:]
        messages = [
            *tell(earlier, self, images=images),
            *self._turns(now, tools),
            *tell(now, self, images=images),
        ]
        choice = tools if must_call or may_call(request.messages) else ()
        schema = _choice(choice, _answer(request.options.response_schema), must_call=must_call)
        options = replace(request.options, response_schema=_json(schema))
        return ModelRequest(messages, "\n\n".join(filter(None, lines)), options)

    def reader(self, request: ModelRequest, tools: Sequence[BoundTool]) -> ChoiceReader:
        """Return a reader for one answer."""
        return ChoiceReader(structured=request.options.response_schema is not None)

    def answer(self, text: str) -> str:
        """Return an answer as the model writes it."""
        return _json({ANSWER: text})

    def calls(self, thought: str, text: str, calls: Sequence[ToolCall]) -> str:
        """Return calls as the model writes them; it has no place for words beside a call."""
        return "\n".join(_call(call.name, parse_args(call.args_json)) for call in calls)

    def result(self, call: ToolCall, text: str, *, alone: bool) -> str:
        """Return a result, always with its tool's name: a small model forgets what it asked."""
        return _result(call.name, text)

    def _turns(self, now: Sequence[Message], tools: Sequence[BoundTool]) -> list[Message]:
        question = "\n".join(part.text for message in now[:1] for part in message.parts if part.text)
        turns: list[Message] = []
        for example in examples_for(question, tools):
            turns.append(_says(Role.ROLE_USER, example.ask))
            if example.tool:
                turns.append(_says(Role.ROLE_ASSISTANT, _call(example.tool, example.arguments)))
                turns.append(_says(Role.ROLE_USER, _result(example.tool, example.result)))
            turns.append(_says(Role.ROLE_ASSISTANT, self.answer(example.answer)))
        return turns


def last_question(messages: Sequence[Message]) -> int:
    """Return where the last thing a person said is; 0 when nobody said anything."""
    return max((at for at, message in enumerate(messages) if message.role == Role.ROLE_USER), default=0)


def may_call(messages: Sequence[Message]) -> bool:
    """Tell whether a tool may still be called since a person last said something."""
    calls = 0
    for message in reversed(messages):
        if message.role == Role.ROLE_USER:
            break
        for part in message.parts:
            if part.HasField("tool_result") and not part.tool_result.is_error:
                return False
            calls += part.HasField("tool_call")
    return calls < MOST_CALLS


def _is_about_calls(message: Message) -> bool:
    return any(part.HasField("tool_call") or part.HasField("tool_result") for part in message.parts)


def _says(role: Role.ValueType, text: str) -> Message:
    return Message(role=role, parts=[ContentPart(text=text)])


def _call(name: str, arguments: object) -> str:
    return _json({TOOL: name, ARGUMENTS: arguments})


def _result(name: str, text: str) -> str:
    return f"Result of {name}: {text}"


def _choice(tools: Sequence[BoundTool], answer: Schema, *, must_call: bool) -> Schema:
    branches = [_branch({TOOL: {"const": tool.spec.name}, ARGUMENTS: _bounded(tool.schema)}) for tool in tools]
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


def _bounded(schema: Schema) -> Schema:
    """Return the schema with a bound on every text that has none."""
    made: Schema = {}
    for key, value in schema.items():
        match value:
            case dict():
                made[key] = _bounded(value)
            case list():
                made[key] = [_bounded(each) if isinstance(each, dict) else each for each in value]
            case _:
                made[key] = value
    if schema.get("type") == "string" and not schema.keys() & {"enum", "const"}:
        made["maxLength"] = LONGEST_TEXT
    return made


def _answer(wanted: str | None) -> Schema:
    """Return the schema of the answer: any text, or what the caller wants. Raises ModelError: that is no schema."""
    if wanted is None:
        return {"type": "string"}
    schema = read_schema(wanted)
    return plain_schema(schema) if '"$ref"' in wanted else schema


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
