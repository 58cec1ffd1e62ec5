"""Our messages as the input items of OpenAI's Responses API.

Rules and their reasons (``history`` has those that all APIs share):

- Nothing is stored at the vendor, so all that a later call needs is sent with it: ``store`` is false, and reasoning
  goes back in the sealed form it came in, before the item it led to. Reasoning that nothing follows is left out,
  and so is reasoning without a sealed form: OpenAI answers 400 to both.
- One answer is several items, in the order the model wrote them; the results of its calls follow, in call order.
- Items of calls and messages go without the vendor's ids, which it would look up among what it stored.
- This API has no stop texts and cannot go on from the beginning of an answer: both are refused, not ignored.
"""

from collections.abc import Iterable, Sequence

import msgspec

from dualclaw import ContentPart, Media, ReasoningPart, ToolResult
from dualclaw.events import clean_text
from dualclaw_server.engine.model import ModelOptions, ModelRequest, ToolSpec
from dualclaw_server.models.beginnings import NOTHING, Beginning, joined
from dualclaw_server.models.history import (
    AssistantTurn,
    CallIds,
    SentCall,
    Turn,
    UserTurn,
    signature_for,
    system_text,
    turns,
)
from dualclaw_server.models.media import media_address, media_text, media_type_of
from dualclaw_server.models.responses.dialect import OPENAI_RESPONSES, ResponsesDialect
from dualclaw_server.models.schema import fits_strict_mode, read_schema
from dualclaw_server.models.sending import (
    check_tool_choice,
    refusal,
    result_text,
    sent_arguments,
    sent_name,
    tool_parameters,
)

Wire = dict[str, object]


def response_tools_json(tools: Sequence[ToolSpec]) -> msgspec.Raw:
    """Return the request's ``tools`` as JSON, made once per set of tools.

    Not strict: strict mode would change what the schema says, such as which parameters may be left out.

    Raises:
        ValueError: a tool's parameters are not a JSON object.
    """
    made = [
        {
            "type": "function",
            "name": tool.name,
            "description": clean_text(tool.description),
            "parameters": tool_parameters(tool),
            "strict": False,
        }
        for tool in tools
    ]
    return msgspec.Raw(msgspec.json.encode(made))


def response_fields(
    request: ModelRequest,
    model: str,
    tools: msgspec.Raw | None,
    tool_names: frozenset[str],
    dialect: ResponsesDialect = OPENAI_RESPONSES,
    beginning: Beginning = NOTHING,
) -> Wire:
    """Return all fields of a request but ``stream``.

    Raises:
        ModelError: MODEL_BAD_RESPONSE, the API or the tools at hand cannot do what the request asks.
    """
    if request.prefix:
        raise refusal("the Responses API cannot go on from the beginning of an answer")
    made: Wire = {"model": model, "store": False}
    if system := system_text(request, beginning.system):
        made["instructions"] = system
    ids = CallIds(dialect.longest_call_id)
    rest = turns(request.messages, ids, place=len(beginning.messages), used=beginning.sent_ids)
    made["input"] = joined([], beginning, wire_turns(rest, tool_names, dialect))
    if dialect.encrypted_reasoning and not model.startswith(dialect.unsealed_models):
        made["include"] = ["reasoning.encrypted_content"]
    if dialect.reasoning_summary is not None:
        made["reasoning"] = {"summary": dialect.reasoning_summary}
    return made | _options(request.options, tools, tool_names, dialect)


def input_items(
    request: ModelRequest, tool_names: frozenset[str] = frozenset(), dialect: ResponsesDialect = OPENAI_RESPONSES
) -> list[Wire]:
    """Return the conversation as input items.

    Args:
        request: the conversation.
        tool_names: tools the model may call; their names are sent as they are.
        dialect: what the vendor varies.
    """
    return wire_turns(turns(request.messages, CallIds(dialect.longest_call_id)), tool_names, dialect)


def wire_turns(conversation: Iterable[Turn], tool_names: frozenset[str], dialect: ResponsesDialect) -> list[Wire]:
    """Return turns as input items."""
    made: list[Wire] = []
    for turn in conversation:
        if isinstance(turn, UserTurn):
            made.append({"role": "user", "content": _contents(turn.parts)})
        else:
            _add_assistant(made, turn, tool_names, dialect)
    return made


def _options(
    options: ModelOptions, tools: msgspec.Raw | None, tool_names: frozenset[str], dialect: ResponsesDialect
) -> Wire:
    made: Wire = {}
    if options.stop:
        raise refusal("the Responses API has no stop texts")
    check_tool_choice(options, tool_names)
    if tools is not None:
        made["tools"] = tools
        if options.tool_choice in ("auto", "none", "required"):
            made["tool_choice"] = options.tool_choice
        elif options.tool_choice is not None:
            made["tool_choice"] = {"type": "function", "name": options.tool_choice}
        if options.parallel_tool_calls is not None:
            made["parallel_tool_calls"] = options.parallel_tool_calls
    for name in ("temperature", "top_p", "max_output_tokens"):
        if (value := getattr(options, name)) is not None:
            made[name] = value
    if options.response_schema is not None:
        schema = read_schema(options.response_schema)
        strict = fits_strict_mode(schema) if dialect.schema_strict is None else dialect.schema_strict
        made["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": strict}}
    return made


def _add_assistant(
    made: list[Wire], turn: AssistantTurn, tool_names: frozenset[str], dialect: ResponsesDialect
) -> None:
    calls = iter(turn.calls)
    waiting: list[Wire] = []
    for part in turn.parts:
        item: Wire | None = None
        match part.WhichOneof("part"):
            case "reasoning":
                if (reasoning := _reasoning(part.reasoning, dialect)) is not None:
                    waiting.append(reasoning)
            case "text" if part.text.strip():
                item = {"role": "assistant", "content": part.text}
            case "tool_call":
                item = _call(next(calls), tool_names)
        if item is not None:
            made += [*waiting, item]
            waiting.clear()
    for call in turn.calls:
        output = _result(call.result, dialect)
        made.append({"type": "function_call_output", "call_id": call.id, "output": output})


def _reasoning(part: ReasoningPart, dialect: ResponsesDialect) -> Wire | None:
    """Return a reasoning item, or None: it is another API's, or there is nothing of it that may go back."""
    kind = signature_for("responses", part)
    if kind is None:
        return None
    summary: list[Wire] = []
    item: Wire = {"type": "reasoning", "summary": summary}
    if part.id and dialect.reasoning_ids:
        item["id"] = part.id
    if part.text and kind == "content":
        item["content"] = [{"type": "reasoning_text", "text": part.text}]
    elif part.text:
        summary.append({"type": "summary_text", "text": part.text})
    if part.redacted and dialect.encrypted_reasoning:
        # Beside the sealed form OpenAI takes no content.
        item.pop("content", None)
        item["encrypted_content"] = part.redacted.decode("utf-8", "replace")
        return item
    return item if dialect.reasoning_text_back and part.text else None


def _call(sent: SentCall, tool_names: frozenset[str]) -> Wire:
    return {
        "type": "function_call",
        "call_id": sent.id,
        "name": sent_name(sent.call.name, tool_names),
        "arguments": sent_arguments(sent.call),
    }


def _result(result: ToolResult | None, dialect: ResponsesDialect) -> object:
    pictured = result is not None and any(
        part.WhichOneof("part") == "image" and part.image.WhichOneof("source") for part in result.parts
    )
    if result is None or not pictured or not dialect.images_in_results:
        return result_text(result)
    return _contents([part for part in result.parts if part.WhichOneof("part") != "text" or part.text])


def _contents(parts: Sequence[ContentPart]) -> list[Wire]:
    made: list[Wire] = []
    for part in parts:
        match part.WhichOneof("part"):
            case "text":
                made.append({"type": "input_text", "text": part.text})
            case "image":
                made.append(_media(part.image, "image"))
            case "file":
                made.append(_media(part.file, "file"))
    return made


def _media(media: Media, kind: str) -> Wire:
    text = media_text(media, kind)
    if text is not None:
        return {"type": "input_text", "text": text}
    if media_type_of(media, kind).startswith("image/"):
        return {"type": "input_image", "image_url": media_address(media, kind)}
    return {"type": "input_file", "filename": media.name or "file", "file_data": media_address(media, kind)}
