"""Our messages as the messages of OpenAI's Chat Completions.

Rules and their reasons (a strict vendor answers 400 to whatever breaks them):

- The system text comes first and once: many chat templates refuse it anywhere else. So SYSTEM messages of the
  conversation join the instructions.
- An assistant message with calls is followed at once by one ``tool`` message per call, in call order, wherever
  in the conversation the results stand. A call without a result gets one that says so; a result without its
  call is left out.
- Call ids are there and unique within their message; arguments are always one JSON object; names have the
  characters the vendors allow, also when a model invented another.
- Messages that would be empty are left out; user messages in a row become one, because many templates insist
  on turns.
- Reasoning is not sent back: this API has no field for it that all vendors take.
- Images go where they are allowed, into user messages; in a tool's result a note stands in their place.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dualclaw import ContentPart, Media, Message, Role, ToolCall, ToolResult
from dualclaw.events import clean_text, diagnosis_text
from dualclaw_server.engine.model import ModelRequest, ToolSpec

NO_RESULT = "No result: this call was not completed."

# An enum's value costs a look-up in Python every time it is named.
_SYSTEM, _USER, _ASSISTANT = Role.ROLE_SYSTEM, Role.ROLE_USER, Role.ROLE_ASSISTANT
_BAD_NAME_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64
_MAGIC = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"), (b"RIFF", "image/webp"))

Wire = dict[str, object]


def tools_json(tools: Sequence[ToolSpec]) -> msgspec.Raw:
    """Return the request's ``tools`` as JSON, made once per set of tools.

    Raises:
        ValueError: a tool's parameters are not a JSON object.
    """
    made: list[Wire] = []
    for tool in tools:
        try:
            schema = msgspec.json.decode(tool.parameters or '{"type":"object","properties":{}}')
        except msgspec.DecodeError as error:
            raise ValueError(f"parameters of tool {tool.name!r} are not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise ValueError(f"parameters of tool {tool.name!r} are not a JSON object")
        function = {"name": tool.name, "description": clean_text(tool.description), "parameters": schema}
        made.append({"type": "function", "function": function})
    return msgspec.Raw(msgspec.json.encode(made))


def call_ids(messages: Iterable[Message]) -> frozenset[str]:
    """Return the ids of all calls in a conversation."""
    return frozenset(
        part.tool_call.id for message in messages for part in message.parts if part.WhichOneof("part") == "tool_call"
    )


def wire_messages(request: ModelRequest, tool_names: frozenset[str] = frozenset()) -> list[Wire]:
    """Return the request's messages in the form of the API.

    Args:
        request: the conversation.
        tool_names: tools the model may call; their names are sent as they are.
    """
    results = _results(request.messages)
    system = [clean_text(request.instructions)] if request.instructions else []
    made: list[Wire] = []
    for position, message in enumerate(request.messages):
        role = message.role
        if role == _SYSTEM:
            system += filter(None, [_text(message.parts)])
        elif role == _USER:
            _add_user(made, message.parts)
        elif role == _ASSISTANT:
            _add_assistant(made, message.parts, position, results, tool_names)
    if system:
        made.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return made


def _results(messages: Sequence[Message]) -> Mapping[tuple[int, str], ToolResult]:
    """Return each result under (position of the newest message before it that has its call, call id)."""
    owners: dict[str, int] = {}
    found: dict[tuple[int, str], ToolResult] = {}
    for position, message in enumerate(messages):
        for part in message.parts:
            match part.WhichOneof("part"):
                case "tool_call" if message.role == _ASSISTANT:
                    owners[part.tool_call.id] = position
                case "tool_result" if part.tool_result.call_id in owners:
                    call_id = part.tool_result.call_id
                    found.setdefault((owners[call_id], call_id), part.tool_result)
    return found


def _add_user(made: list[Wire], parts: Iterable[ContentPart]) -> None:
    content: list[Wire] = []
    for part in parts:
        match part.WhichOneof("part"):
            case "text" if part.text:
                content.append({"type": "text", "text": part.text})
            case "image":
                content.append(_media(part.image, "image"))
            case "file":
                content.append(_media(part.file, "file"))
    if not content:
        return
    before = made[-1] if made and made[-1]["role"] == "user" else None
    if before is not None:
        earlier = before["content"]
        content = [*(earlier if isinstance(earlier, list) else [{"type": "text", "text": earlier}]), *content]
        made.pop()
    if all(part["type"] == "text" for part in content):
        made.append({"role": "user", "content": "\n\n".join(str(part["text"]) for part in content)})
    else:
        made.append({"role": "user", "content": content})


def _add_assistant(
    made: list[Wire],
    parts: Sequence[ContentPart],
    position: int,
    results: Mapping[tuple[int, str], ToolResult],
    tool_names: frozenset[str],
) -> None:
    text = "".join(part.text for part in parts if part.WhichOneof("part") == "text")
    calls = [part.tool_call for part in parts if part.WhichOneof("part") == "tool_call"]
    if not calls:
        if text.strip():
            made.append({"role": "assistant", "content": text})
        return
    sent: list[Wire] = []
    answers: list[Wire] = []
    used: set[str] = set()
    for number, call in enumerate(calls):
        call_id = call.id if call.id and call.id not in used else f"{call.id or 'call'}_{position}_{number}"
        used.add(call_id)
        function = {"name": _name(call.name, tool_names), "arguments": _arguments(call)}
        sent.append({"id": call_id, "type": "function", "function": function})
        result = results.get((position, call.id)) if call_id == call.id else None
        answers.append({"role": "tool", "tool_call_id": call_id, "content": _result(result)})
    made.append({"role": "assistant", "content": text if text.strip() else None, "tool_calls": sent})
    made.extend(answers)


def _result(result: ToolResult | None) -> str:
    if result is None:
        return NO_RESULT
    pieces: list[str] = []
    for part in result.parts:
        match part.WhichOneof("part"):
            case "text" if part.text:
                pieces.append(part.text)
            case "image":
                pieces.append(_note(part.image, "image"))
            case "file":
                pieces.append(_note(part.file, "file"))
    text = "\n".join(pieces)
    if result.is_error and not text.strip():
        return diagnosis_text(result.diagnosis) or "The tool failed."
    return text


def _media(media: Media, kind: str) -> Wire:
    """Return a content part for an image or file of a user."""
    media_type = media.media_type or _sniff(media.data, kind)
    match media.WhichOneof("source"):
        case "url":
            if media_type.startswith("image/"):
                return {"type": "image_url", "image_url": {"url": media.url}}
            return {"type": "text", "text": f"{_note(media, kind)} {media.url}"}
        case "data":
            if media_type.startswith("text/"):
                return {"type": "text", "text": f"{_note(media, kind)}\n{media.data.decode('utf-8', 'replace')}"}
            address = f"data:{media_type};base64,{base64.b64encode(media.data).decode('ascii')}"
            if media_type.startswith("image/"):
                return {"type": "image_url", "image_url": {"url": address}}
            return {"type": "file", "file": {"filename": media.name or "file", "file_data": address}}
    return {"type": "text", "text": _note(media, kind)}


def _sniff(data: bytes, kind: str) -> str:
    found = next((name for magic, name in _MAGIC if data.startswith(magic)), None)
    return found or ("image/png" if kind == "image" else "application/octet-stream")


def _note(media: Media, kind: str) -> str:
    return f"[{' '.join(filter(None, [kind, media.media_type, media.name]))}]"


def _text(parts: Iterable[ContentPart]) -> str:
    return "\n\n".join(part.text for part in parts if part.WhichOneof("part") == "text" and part.text)


def _name(name: str, tool_names: frozenset[str]) -> str:
    if name in tool_names:
        return name
    return _BAD_NAME_CHARACTER.sub("_", name)[:_LONGEST_NAME] or "unknown"


def _arguments(call: ToolCall) -> str:
    """Return the arguments, or an empty object where they are not one: an edited history may hold anything."""
    if not call.args_json:
        return "{}"
    try:
        msgspec.json.decode(call.args_json, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return "{}"
    return call.args_json
