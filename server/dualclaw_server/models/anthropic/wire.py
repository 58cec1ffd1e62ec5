"""The JSON of Anthropic's answers, typed as far as those who speak this API agree on it.

Fields declared ``object`` are those that gateways fill with various types; whoever reads them looks first.
Everything that is not declared here is skipped unparsed.
"""

import json
import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from dualclaw import Usage
from dualclaw_server.models.failures import (
    Redactor,
    UnreadableError,
    error_in,
    unreadable,
    unreadable_event,
)
from dualclaw_server.models.sse import ServerEvent
from dualclaw_server.models.usage import MOST_TOKENS

logger = logging.getLogger(__name__)

_WANTED: Final = "message of the Anthropic API"
_COUNTS: Final = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_THINKING: Final = "thinking_tokens"


class WireBlock(msgspec.Struct):
    """A block of content: whole in a message, mostly empty at its start in a stream."""

    kind: object = msgspec.field(default=None, name="type")
    text: object = None
    thinking: object = None
    signature: object = None
    data: object = None
    id: object = None
    name: object = None
    input: object = None


class WireDelta(msgspec.Struct):
    """What an event adds to a block, or to the message."""

    kind: object = msgspec.field(default=None, name="type")
    text: object = None
    thinking: object = None
    signature: object = None
    partial_json: object = None
    stop_reason: object = None


class WireMessage(msgspec.Struct):
    """A message: whole, or as it begins in a stream."""

    kind: object = msgspec.field(default=None, name="type")
    id: object = None
    model: object = None
    content: list[WireBlock | None] | None = None
    stop_reason: object = None
    usage: object = None
    error: object = None


class WireEvent(msgspec.Struct):
    """One event of a stream."""

    kind: object = msgspec.field(default=None, name="type")
    index: object = None
    message: WireMessage | None = None
    content_block: WireBlock | None = None
    delta: WireDelta | None = None
    usage: object = None
    error: object = None


_events = msgspec.json.Decoder(WireEvent)
_messages = msgspec.json.Decoder(WireMessage)


class WireReader:
    """Reads the JSON of one answer. Text that the fast parser refuses goes to the slow one before it is broken.

    Args:
        redact: takes secrets out of what goes into errors.
    """

    def __init__(self, redact: Redactor) -> None:
        self._redact = redact
        self._where = "the stream"

    def event(self, event: ServerEvent) -> WireEvent | None:
        """Return an event of a stream; None: it is a keepalive.

        Raises:
            ModelError: it is no event but holds an error; UnreadableError: it is neither.
        """
        try:
            return _events.decode(event.data)
        except (ValueError, RecursionError):
            pass
        if event.data.startswith(":"):
            logger.debug("skipped a keepalive that was sent as data")
            return None
        try:
            return msgspec.convert(json.loads(event.data), WireEvent)
        except (ValueError, RecursionError):
            named = event.event == "error"
            raise unreadable_event(event.data, self._redact, where=self._where, wanted=_WANTED, named=named) from None

    def message(self, text: str) -> WireMessage:
        """Return a whole message.

        Raises:
            ModelError: it holds an error; UnreadableError: it is no message.
        """
        self._where = "its answer"
        try:
            made = _messages.decode(text)
        except (ValueError, RecursionError):
            try:
                made = msgspec.convert(json.loads(text), WireMessage)
            except (ValueError, RecursionError):
                made = WireMessage()
        if made.error or (made.content is None and not made.stop_reason):
            raise self.unreadable(text)
        return made

    def raise_error(self, data: str, *, named: bool = False) -> None:
        """Raise the ModelError that the text holds, if any; named: whatever it holds is one."""
        error = error_in(data, self._redact, where=self._where, named=named)
        if error is not None:
            raise error

    def unreadable(self, data: str) -> UnreadableError:
        """Return what it means that the text is nothing of this API. Raises the ModelError it holds, if any."""
        self.raise_error(data)
        return unreadable(data, self._redact, wanted=_WANTED)


class UsageCount:
    """The tokens a call has cost so far.

    Reports are cumulative, and some hold zeros for what another one counts, so of each number the largest is
    right, in whatever order they come.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, report: object) -> None:
        """Take a report; what is no count in it is skipped."""
        if not isinstance(report, Mapping):
            return
        details = report.get("output_tokens_details")
        found = {name: report.get(name) for name in _COUNTS}
        if isinstance(details, Mapping):
            found[_THINKING] = details.get(_THINKING)
        for name, reported in found.items():
            value = int(reported) if isinstance(reported, float) and reported.is_integer() else reported
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS:
                self._counts[name] = max(value, self._counts.get(name, 0))

    def usage(self) -> Usage | None:
        """Return the counts as Usage, None without any. Our prompt tokens include what this API counts apart."""
        counts = self._counts
        if not counts:
            return None
        usage = Usage()
        if "input_tokens" in counts:
            prompt = sum(counts.get(name, 0) for name in _COUNTS if name != "output_tokens")
            usage.input_tokens = min(prompt, MOST_TOKENS)
        if "output_tokens" in counts:
            usage.output_tokens = counts["output_tokens"]
        if "cache_read_input_tokens" in counts:
            usage.cached_tokens = counts["cache_read_input_tokens"]
        if _THINKING in counts:
            usage.reasoning_tokens = counts[_THINKING]
        return usage
