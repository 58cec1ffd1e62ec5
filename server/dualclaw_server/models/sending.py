"""What every API's request says in the same way: names, arguments, schemas, results, the choice of a tool."""

import re

import msgspec

from dualclaw import ToolCall, ToolResult
from dualclaw_server.engine.model import ModelError, ModelOptions, ToolSpec
from dualclaw_server.models.history import NO_RESULT, error_text
from dualclaw_server.models.media import media_note

Wire = dict[str, object]

_BAD_NAME_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_NAME = 64


def sent_name(name: str, tool_names: frozenset[str]) -> str:
    """Return a tool's name with only the characters that vendors allow; names of given tools stay."""
    if name in tool_names:
        return name
    return _BAD_NAME_CHARACTER.sub("_", name)[:_LONGEST_NAME] or "unknown"


def sent_arguments(call: ToolCall) -> str:
    """Return the arguments, or an empty object where they are not one: an edited history may hold anything."""
    if not call.args_json:
        return "{}"
    try:
        msgspec.json.decode(call.args_json, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return "{}"
    return call.args_json


def tool_parameters(tool: ToolSpec) -> Wire:
    """Return a tool's schema.

    Raises:
        ValueError: it is not a JSON object; the text names the tool.
    """
    try:
        return msgspec.json.decode(tool.parameters or '{"type":"object","properties":{}}', type=Wire)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"parameters of tool {tool.name!r} are not a JSON object: {error}") from None


def result_text(result: ToolResult | None) -> str:
    """Return a result as text; media are notes."""
    if result is None:
        return NO_RESULT
    pieces: list[str] = []
    for part in result.parts:
        match part.WhichOneof("part"):
            case "text" if part.text:
                pieces.append(part.text)
            case "image":
                pieces.append(media_note(part.image, "image"))
            case "file":
                pieces.append(media_note(part.file, "file"))
    text = "\n".join(pieces)
    if result.is_error and not text.strip():
        return error_text(result)
    return text


def check_tool_choice(options: ModelOptions, tool_names: frozenset[str]) -> None:
    """Refuse a demand for a call that the tools at hand cannot meet.

    Raises:
        ModelError: MODEL_BAD_RESPONSE.
    """
    choice = options.tool_choice
    if choice in (None, "auto", "none") or (choice == "required" and tool_names) or choice in tool_names:
        return
    known = ", ".join(sorted(tool_names)) or "none"
    raise refusal(f"tool_choice is {choice!r}, but the model has these tools: {known}")


def refusal(why: str) -> ModelError:
    """Return the error of a request that cannot be made."""
    return ModelError("MODEL_BAD_RESPONSE", f"The request cannot be made: {why}.", retryable=False)
