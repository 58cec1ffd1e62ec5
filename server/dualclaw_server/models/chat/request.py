"""Our messages as the messages of OpenAI's Chat Completions.

Rules and their reasons (a strict vendor answers 400 to whatever breaks them; ``history`` has those that all APIs
share):

- The system text comes first and once: many chat templates refuse it anywhere else.
- An assistant message with calls is followed at once by one ``tool`` message per call, in call order, wherever
  in the conversation the results stand.
- Arguments are always one JSON object; names have the characters the vendors allow, also when a model invented
  another.
- Answers of plain text in a row become one, as users' messages do, because many templates insist on turns.
- Reasoning goes back only where the dialect says how: this API has no field for it that all vendors take.
- Images go where they are allowed, into user messages; in a tool's result a note stands in their place.
"""

from collections.abc import Iterable, Sequence

import msgspec

from dualclaw import Media, ReasoningPart
from dualclaw.events import clean_text
from dualclaw_server.engine.model import ModelError, ModelRequest, ToolSpec
from dualclaw_server.models.beginnings import NOTHING, Beginning
from dualclaw_server.models.chat.dialect import DEFAULT_DIALECT, ChatDialect
from dualclaw_server.models.chat.options import schema_text
from dualclaw_server.models.history import (
    AssistantTurn,
    CallIds,
    Turn,
    UserTurn,
    signature_for,
    system_text,
    turns,
)
from dualclaw_server.models.media import media_address, media_text, media_type_of
from dualclaw_server.models.sending import result_text, sent_arguments, sent_name, tool_parameters

_NO_REASONING = " "  # stands for reasoning that is not ours; an empty text counts as missing

Wire = dict[str, object]


def tools_json(tools: Sequence[ToolSpec]) -> msgspec.Raw:
    """Return the request's ``tools`` as JSON, made once per set of tools.

    Raises:
        ValueError: a tool's parameters are not a JSON object.
    """
    made: list[Wire] = []
    for tool in tools:
        described = {
            "name": tool.name,
            "description": clean_text(tool.description),
            "parameters": tool_parameters(tool),
        }
        made.append({"type": "function", "function": described})
    return msgspec.Raw(msgspec.json.encode(made))


def ids_of(dialect: ChatDialect) -> CallIds:
    """Return what the vendor takes as call ids."""
    return CallIds(dialect.longest_call_id, "short" if dialect.exact_call_id else "any")


def wire_turns(conversation: Iterable[Turn], tool_names: frozenset[str], dialect: ChatDialect) -> list[Wire]:
    """Return turns in the form of the API."""
    made: list[Wire] = []
    for turn in conversation:
        if isinstance(turn, UserTurn):
            _add_user(made, turn)
        else:
            _add_assistant(made, turn, tool_names, dialect)
    return made


def wire_messages(
    request: ModelRequest,
    tool_names: frozenset[str] = frozenset(),
    dialect: ChatDialect = DEFAULT_DIALECT,
    beginning: Beginning = NOTHING,
) -> list[Wire]:
    """Return the request's messages in the form of the API, the system's first.

    Args:
        request: the conversation behind its beginning.
        tool_names: tools the model may call; their names are sent as they are.
        dialect: what the vendor varies.
        beginning: what stands before, and was translated before; only its system texts are returned.

    Raises:
        ModelError: MODEL_BAD_RESPONSE, there is a prefix and the vendor cannot continue one.
    """
    said = system_text(request, beginning.system)
    system = "\n\n".join(filter(None, [said, schema_text(request.options, dialect)]))
    rest = turns(request.messages, ids_of(dialect), place=len(beginning.messages), used=beginning.sent_ids)
    made: list[Wire] = [{"role": "system", "content": system}] if system else []
    made += wire_turns(rest, tool_names, dialect)
    if request.prefix:
        made.append(_prefill(request.prefix, dialect))
    return made


def _prefill(prefix: str, dialect: ChatDialect) -> Wire:
    match dialect.prefill:
        case "plain":
            return {"role": "assistant", "content": prefix}
        case "prefix" | "partial":
            return {"role": "assistant", "content": prefix, dialect.prefill: True}
    raise ModelError("MODEL_BAD_RESPONSE", "This vendor cannot go on from the beginning of an answer.", retryable=False)


def _add_user(made: list[Wire], turn: UserTurn) -> None:
    content: list[Wire] = []
    for part in turn.parts:
        match part.WhichOneof("part"):
            case "text":
                content.append({"type": "text", "text": part.text})
            case "image":
                content.append(_media(part.image, "image"))
            case "file":
                content.append(_media(part.file, "file"))
    if all(part["type"] == "text" for part in content):
        made.append({"role": "user", "content": "\n\n".join(str(part["text"]) for part in content)})
    else:
        made.append({"role": "user", "content": _joined(content)})


def _joined(content: list[Wire]) -> list[Wire]:
    """Return the parts with neighbouring texts made one."""
    made: list[Wire] = []
    for part in content:
        if made and part["type"] == made[-1]["type"] == "text":
            made[-1] = {"type": "text", "text": f"{made[-1]['text']}\n\n{part['text']}"}
        else:
            made.append(part)
    return made


def _add_assistant(made: list[Wire], turn: AssistantTurn, tool_names: frozenset[str], dialect: ChatDialect) -> None:
    text = turn.text if turn.text.strip() else ""
    reasoning = _reasoning(turn, dialect)
    if not turn.calls:
        before = made[-1] if made else {}
        if text and not reasoning and before.get("role") == "assistant" and before.keys() == {"role", "content"}:
            made[-1] = {"role": "assistant", "content": f"{before['content']}\n\n{text}"}
        elif text:
            made.append({"role": "assistant", "content": text, **reasoning})
        return
    sent: list[Wire] = []
    answers: list[Wire] = []
    for sent_call in turn.calls:
        call = sent_call.call
        function = {"name": sent_name(call.name, tool_names), "arguments": sent_arguments(call)}
        made_call: Wire = {"id": sent_call.id, "type": "function", "function": function}
        if dialect.call_signatures and (signature := signature_for("chat", call)):
            made_call["extra_content"] = {"google": {"thought_signature": signature}}
        sent.append(made_call)
        answers.append({"role": "tool", "tool_call_id": sent_call.id, "content": result_text(sent_call.result)})
    made.append({"role": "assistant", "content": text or None, "tool_calls": sent, **reasoning})
    made.extend(answers)


def _reasoning(turn: AssistantTurn, dialect: ChatDialect) -> Wire:
    """Return the field that gives an answer's reasoning back, if the dialect has one."""
    ours = [part.reasoning for part in turn.parts if part.WhichOneof("part") == "reasoning"]
    ours = [part for part in ours if signature_for("chat", part) is not None]
    text = "".join(part.text for part in ours)
    match dialect.reasoning_back:
        case "turn" if turn.latest and turn.calls and text:
            return {"reasoning_content": text}
        case "calls" if turn.calls:
            return {"reasoning_content": text or _NO_REASONING}
        case "details":
            details = list(filter(None, map(_detail, ours)))
            return {"reasoning_details": details} if details else {}
    return {}


def _detail(part: ReasoningPart) -> Wire | None:
    """Return a block as it came: what the vendor said of it was kept as its signature."""
    try:
        detail = msgspec.json.decode(signature_for("chat", part) or "", type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return None
    if part.redacted:
        detail["data"] = part.redacted.decode("utf-8", "replace")
    elif part.text:
        detail["summary" if detail.get("type") == "reasoning.summary" else "text"] = part.text
    return detail


def _media(media: Media, kind: str) -> Wire:
    """Return a content part for an image or file of a user."""
    text = media_text(media, kind)
    if text is not None:
        return {"type": "text", "text": text}
    address = media_address(media, kind)
    if media_type_of(media, kind).startswith("image/"):
        return {"type": "image_url", "image_url": {"url": address}}
    return {"type": "file", "file": {"filename": media.name or "file", "file_data": address}}
