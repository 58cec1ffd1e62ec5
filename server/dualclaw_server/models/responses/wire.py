"""The JSON of Responses answers, typed as far as vendors agree on it.

Fields declared ``object`` are those that vendors fill with various types; whoever reads them looks first.
Everything that is not declared here is skipped unparsed.
"""

from collections.abc import Mapping

import msgspec

from dualclaw import Usage
from dualclaw_server.models.usage import set_tokens

Odd = str | int | float | bool | None
"""What may stand where an object is expected: events of kinds that are not known here have other shapes."""


class WireItem(msgspec.Struct):
    """An output item: a message, a reasoning block, a function call, or something that is skipped."""

    kind: object = msgspec.field(default=None, name="type")
    id: object = None
    call_id: object = None
    name: object = None
    arguments: object = None
    content: object = None
    summary: object = None
    encrypted_content: object = None


class WireResponse(msgspec.Struct):
    """The response as a whole: of an answer that is not streamed, or of the events that begin and end a stream."""

    id: object = None
    model: object = None
    status: object = None
    error: object = None
    incomplete_details: object = None
    output: list[WireItem | Odd] | Odd = None
    usage: object = None


class WireEvent(msgspec.Struct):
    """One event of a stream."""

    kind: object = msgspec.field(default=None, name="type")
    response: WireResponse | Odd | list[object] = None
    item: WireItem | Odd | list[object] = None
    item_id: object = None
    output_index: object = None
    content_index: object = None
    summary_index: object = None
    delta: object = None
    text: object = None
    refusal: object = None
    name: object = None
    arguments: object = None
    error: object = None


event_decoder = msgspec.json.Decoder(WireEvent)
response_decoder = msgspec.json.Decoder(WireResponse)


def read_usage(report: object) -> Usage | None:
    """Return a usage report as Usage, what it does not say absent; None: there is no report."""
    if not isinstance(report, dict):
        return None
    return set_tokens(
        Usage(),
        {
            "input_tokens": report.get("input_tokens"),
            "output_tokens": report.get("output_tokens"),
            "reasoning_tokens": _inner(report, "output_tokens_details").get("reasoning_tokens"),
            "cached_tokens": _inner(report, "input_tokens_details").get("cached_tokens"),
        },
    )


def _inner(report: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = report.get(name)
    return value if isinstance(value, dict) else {}
