"""Names and forms of OpenTelemetry's conventions for generative AI (in development; as of 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dualclaw import ContentPart, Message, Role, Usage

PROVIDERS: Mapping[str, str] = MappingProxyType(
    {
        "gpt-*": "openai",
        "chatgpt-*": "openai",
        "o[0-9]*": "openai",
        "claude*": "anthropic",
        "gemini*": "gcp.gemini",
        "deepseek*": "deepseek",
        "mistral*": "mistral_ai",
        "magistral*": "mistral_ai",
        "kimi*": "moonshot_ai",
        "moonshot*": "moonshot_ai",
        "grok*": "x_ai",
        "command*": "cohere",
    }
)
"""Name of the provider by glob of model names; a vendor that hosts others' models has to be named."""
UNKNOWN_PROVIDER = "_OTHER"

_ROLES = {Role.ROLE_SYSTEM: "system", Role.ROLE_USER: "user", Role.ROLE_ASSISTANT: "assistant", Role.ROLE_TOOL: "tool"}


def usage_attributes(usage: Usage | None) -> dict[str, int]:
    """Return the attributes of what was reported."""
    found: dict[str, int] = {}
    if usage is None:
        return found
    if usage.HasField("input_tokens"):
        found["gen_ai.usage.input_tokens"] = usage.input_tokens
    if usage.HasField("output_tokens"):
        found["gen_ai.usage.output_tokens"] = usage.output_tokens
    if usage.HasField("reasoning_tokens"):
        found["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    if usage.HasField("cached_tokens"):
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return found


def message_data(message: Message) -> dict[str, object]:
    """Return a message as JSON data of ``gen_ai.input.messages`` and ``gen_ai.output.messages``."""
    return {"role": _ROLES.get(message.role, "unknown"), "parts": [_part_data(part) for part in message.parts]}


def _part_data(part: ContentPart) -> dict[str, object]:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "content": part.text}
        case "reasoning":
            return {"type": "reasoning", "content": part.reasoning.text}
        case "tool_call":
            call = part.tool_call
            return {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.args_json}
        case "tool_result":
            text = "\n".join(inner.text for inner in part.tool_result.parts)
            return {"type": "tool_call_response", "id": part.tool_result.call_id, "response": text}
        case other:
            return {"type": other or "unknown"}
