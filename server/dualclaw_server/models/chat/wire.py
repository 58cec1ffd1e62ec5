"""The JSON of Chat Completions answers, typed as far as vendors agree on it.

Fields declared ``object`` are those that vendors fill with various types; whoever reads them looks first.
Everything that is not declared here is skipped unparsed.
"""

from collections.abc import Mapping

import msgspec

from dualclaw import Usage
from dualclaw_server.models.usage import set_tokens


class WireFunction(msgspec.Struct):
    """The function a call names; any field may come in any fragment."""

    name: object = None
    arguments: object = None


class WireCall(msgspec.Struct):
    """A fragment of a tool call."""

    index: object = None
    id: object = None
    function: WireFunction | None = None
    extra_content: object = None


class WireDelta(msgspec.Struct):
    """What a chunk adds to a choice, or the whole message of an answer that is not streamed."""

    content: object = None
    reasoning_content: object = None
    reasoning: object = None
    reasoning_details: object = None
    refusal: object = None
    tool_calls: list[WireCall | None] | None = None
    function_call: WireFunction | None = None


class WireChoice(msgspec.Struct):
    """One of the answers; only the first is asked for."""

    index: object = 0
    delta: WireDelta | None = None
    message: WireDelta | None = None
    finish_reason: object = None
    usage: object = None


class WireChunk(msgspec.Struct):
    """One event of a stream, or one whole answer."""

    id: object = None
    model: object = None
    choices: list[WireChoice | None] | None = None
    usage: object = None
    error: object = None
    kind: object = msgspec.field(default=None, name="type")


chunk_decoder = msgspec.json.Decoder(WireChunk)


def read_usage(report: Mapping[str, object] | None) -> Usage:
    """Return a usage report as Usage; what it does not say stays absent."""
    usage = Usage()
    if report is None:
        return usage
    output, prompt = report.get("completion_tokens_details"), report.get("prompt_tokens_details")
    found = {
        "input_tokens": report.get("prompt_tokens"),
        "output_tokens": report.get("completion_tokens"),
        "reasoning_tokens": output.get("reasoning_tokens") if isinstance(output, dict) else None,
        "cached_tokens": prompt.get("cached_tokens")
        if isinstance(prompt, dict)
        else report.get("prompt_cache_hit_tokens", report.get("cached_tokens") or None),  # the latter: Kimi
    }
    return set_tokens(usage, found)
