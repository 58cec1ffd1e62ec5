"""Our messages as the messages of the Anthropic API.

Rules and their reasons (the API answers 400 to whatever breaks them):

- Turns alternate, begin with the user and end with the user; only the beginning of an answer that is to be gone
  on with (``ModelRequest.prefix``) may stand behind, and that without white space at its end. Where the
  conversation begins or ends otherwise, a short user text makes up for it.
- The results of all calls of a message come in one user message right behind it, in call order and before
  anything else the user says; each call has exactly one. ``history`` sees to their number and to the ids.
- No block of text is empty or only white space; models write such blocks themselves, before a call.
- Thinking goes back as it came, every block and in its order, if it was signed by this API; what another API has
  reasoned does not go along. A message cannot end with thinking, so an answer that broke off there loses it.
- Images may stand in results too. In an assistant's message there is no place for them.
"""

from collections.abc import Iterable, Sequence

import msgspec

from dualclaw import ContentPart, ReasoningPart
from dualclaw.events import clean_text
from dualclaw_server.engine.model import ModelRequest, ToolSpec
from dualclaw_server.models.anthropic.dialect import DEFAULT_DIALECT, AnthropicDialect
from dualclaw_server.models.anthropic.media import media_block
from dualclaw_server.models.beginnings import NOTHING, Beginning
from dualclaw_server.models.history import (
    NO_RESULT,
    AssistantTurn,
    SentCall,
    Turn,
    UserTurn,
    error_text,
    signature_for,
    turns,
)
from dualclaw_server.models.sending import sent_arguments, sent_name, tool_parameters

Wire = dict[str, object]

LEFT_OUT = "(The beginning of the conversation is left out.)"
GO_ON = "Continue."

_THINKING = ("thinking", "redacted_thinking")


def tools_json(tools: Sequence[ToolSpec]) -> msgspec.Raw:
    """Return the request's ``tools`` as JSON, made once per set of tools.

    Raises:
        ValueError: a tool's parameters are not a JSON object.
    """
    made: list[Wire] = []
    for tool in tools:
        wire: Wire = {"name": tool.name, "input_schema": {"type": "object", **tool_parameters(tool)}}
        if tool.description.strip():
            wire["description"] = clean_text(tool.description)
        made.append(wire)
    return msgspec.Raw(msgspec.json.encode(made))


def wire_messages(
    request: ModelRequest,
    tool_names: frozenset[str] = frozenset(),
    dialect: AnthropicDialect = DEFAULT_DIALECT,
    beginning: Beginning = NOTHING,
) -> list[Wire]:
    """Return the request's messages in the form of the API.

    Args:
        request: the conversation behind its beginning.
        tool_names: tools the model may call; their names are sent as they are.
        dialect: what this vendor varies.
        beginning: what stands before; it is not returned.
    """
    rest = turns(request.messages, place=len(beginning.messages), used=beginning.sent_ids)
    made = wire_turns(rest, tool_names, dialect)
    if made and made[0]["role"] == "assistant" and not beginning.messages:
        made.insert(0, {"role": "user", "content": [_text(LEFT_OUT)]})
    prefix = clean_text(request.prefix).rstrip()
    if not made or (made[-1]["role"] == "assistant" and not prefix):
        _add(made, "user", [_text(GO_ON)])
    if prefix:
        _add(made, "assistant", [_text(prefix)])
    return made


def wire_turns(conversation: Iterable[Turn], tool_names: frozenset[str], dialect: AnthropicDialect) -> list[Wire]:
    """Return turns in the form of the API."""
    made: list[Wire] = []
    for turn in conversation:
        if isinstance(turn, UserTurn):
            _add(made, "user", _content(turn.parts))
        else:
            _add(made, "assistant", _said(turn, tool_names, dialect))
            _add(made, "user", [_result(call) for call in turn.calls])
    return made


def used_tools(messages: Sequence[Wire]) -> list[str]:
    """Return the names of the tools that were called, as they are sent, each once."""
    return list(dict.fromkeys(str(block["name"]) for block in _blocks(messages) if block["type"] == "tool_use"))


def resumes_without_thinking(messages: Sequence[Wire]) -> bool:
    """Return whether the model is in the middle of calls that it, or another model, began without thinking."""
    if len(messages) < 2 or not any(block["type"] == "tool_result" for block in _blocks(messages[-1:])):
        return False
    return not any(block["type"] in _THINKING for block in _blocks(messages[-2:-1])[:1])


def _add(made: list[Wire], role: str, blocks: list[Wire]) -> None:
    if not blocks:
        return
    before = made[-1] if made else None
    if before is not None and before["role"] == role and isinstance(before["content"], list):
        before["content"].extend(blocks)
    else:
        made.append({"role": role, "content": blocks})


def _blocks(messages: Iterable[Wire]) -> list[Wire]:
    return [block for message in messages if isinstance(message["content"], list) for block in message["content"]]


def _content(parts: Iterable[ContentPart]) -> list[Wire]:
    """Return text, images and files as blocks."""
    made: list[Wire] = []
    for part in parts:
        match part.WhichOneof("part"):
            case "text" if part.text.strip():
                made.append(_text(part.text))
            case "image":
                made.append(media_block(part.image, "image"))
            case "file":
                made.append(media_block(part.file, "file"))
    return made


def _said(turn: AssistantTurn, tool_names: frozenset[str], dialect: AnthropicDialect) -> list[Wire]:
    """Return what the model has said, in its order."""
    made: list[Wire] = []
    calls = iter(turn.calls)
    for part in turn.parts:
        match part.WhichOneof("part"):
            case "text" if part.text.strip():
                made.append(_text(part.text))
            case "reasoning":
                made += _thinking(part.reasoning, dialect)
            case "tool_call":
                sent = next(calls)
                arguments = msgspec.Raw(sent_arguments(sent.call).encode())
                name = sent_name(sent.call.name, tool_names)
                made.append({"type": "tool_use", "id": sent.id, "name": name, "input": arguments})
    while made and made[-1]["type"] in _THINKING:
        made.pop()
    return made


def _thinking(part: ReasoningPart, dialect: AnthropicDialect) -> list[Wire]:
    signature = signature_for("anthropic", part)
    if signature is None:
        return []
    if part.redacted:
        return [{"type": "redacted_thinking", "data": part.redacted.decode("utf-8", "replace")}]
    if signature:
        return [{"type": "thinking", "thinking": part.text, "signature": signature}]
    return [{"type": "thinking", "thinking": part.text}] if dialect.unsigned_thinking and part.text.strip() else []


def _result(sent: SentCall) -> Wire:
    made: Wire = {"type": "tool_result", "tool_use_id": sent.id}
    if sent.result is None:
        return {**made, "content": [_text(NO_RESULT)], "is_error": True}
    content = _content(sent.result.parts)
    if sent.result.is_error:
        return {**made, "content": content or [_text(error_text(sent.result))], "is_error": True}
    return {**made, "content": content} if content else made


def _text(text: str) -> Wire:
    return {"type": "text", "text": clean_text(text)}
