"""A reader of server-sent events that works on bytes, right for every place the network may cut them.

Rules and their reasons:

- Only LF, CR and CRLF end a line. ``str.splitlines`` also breaks at U+2028, U+0085, VT and FF, which cuts
  JSON in half; so lines are split before anything is decoded, and a code point cut by the network is whole
  again by the time it is.
- A CR that ends a read ends its line; an LF that starts the next read belongs to it. Taking it for a blank
  line would make two events of one.
- Only data makes an event: a comment, an id or an event name followed by a blank line dispatches nothing, nor
  does data that is empty. Keepalives are built of those.
- Every read hands over all the events it completes, so that whoever follows can work on the batch.
- The bytes of an unfinished line are kept as the pieces they came in and joined once, so an event of
  megabytes in small pieces costs linear time. ``max_event_bytes`` bounds what a peer can make us keep.
"""

import msgspec

from dualclaw.events import clean_text

_BOM = b"\xef\xbb\xbf"

DEFAULT_MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLargeError(ValueError):
    """An event grew past the reader's bound; the reader is of no more use."""


class ServerEvent(msgspec.Struct, frozen=True, gc=False):
    """One event: its name ("message" is written as ""), its data lines joined by LF, and the last id seen."""

    data: str
    event: str = ""
    id: str = ""


class HalfJoiner:
    """Joins the halves of surrogate pairs that came in different events, as JSON escapes may.

    ``feed`` the pieces of one text, then ``flush``; both return text without lone halves: those become U+FFFD.
    """

    def __init__(self) -> None:
        self._half = ""

    def feed(self, piece: str) -> str:
        """Take the next piece, which is not empty; hold back a half at its end."""
        if not self._half and piece.isascii():
            return piece
        piece, self._half = self._half + piece, ""
        if "\ud800" <= piece[-1] <= "\udbff":
            piece, self._half = piece[:-1], piece[-1]
        return clean_text(piece)

    def flush(self) -> str:
        """Give back what was held; the text is over."""
        half, self._half = self._half, ""
        return "\ufffd" if half else ""


class SSEReader:
    """Turns the bytes of an event stream into events. Feed it reads as they come, then ``finish`` at the end.

    The events are the same for every way of cutting the bytes. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, *, max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._head: bytes | None = b""
        self._partial: list[bytes] = []
        self._partial_size = 0
        self._after_cr = False
        self._data: list[bytes] = []
        self._data_size = 0
        self._event = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """Return the events this read completes, oldest first.

        Raises:
            EventTooLargeError: an event is larger than the bound.
        """
        if self._head is not None:
            chunk = self._skip_bom(chunk)
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk[0] == 0x0A:
                chunk = chunk[1:]
        if not chunk:
            return []
        if b"\r" in chunk:
            self._after_cr = chunk[-1] == 0x0D
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = chunk.split(b"\n")
        rest = lines.pop()
        events: list[ServerEvent] = []
        if lines:
            if self._partial:
                self._partial.append(lines[0])
                lines[0] = b"".join(self._partial)
                self._partial.clear()
                self._partial_size = 0
            for line in lines:
                # Most events are one line of data and a blank one.
                if line[:6] == b"data: " and not self._data and len(line) <= self._max:
                    self._data.append(line[6:])
                    self._data_size = len(line) - 5
                elif not line and len(self._data) == 1 and self._data[0]:
                    events.append(ServerEvent(self._data.pop().decode("utf-8", "replace"), self._event, self._id))
                    self._data_size, self._event = 0, ""
                else:
                    self._line(line, events)
        if rest:
            self._partial.append(rest)
            self._partial_size += len(rest)
            self._check(self._partial_size)
        return events

    def finish(self) -> list[ServerEvent]:
        """Return the event that the end of the stream left without its blank line, if any.

        The standard drops it; some servers forget the last line end, and whether such an event is whole its
        JSON says.
        """
        events: list[ServerEvent] = []
        if self._head:
            self._partial.append(self._head)
        self._head = None
        line = b"".join(self._partial)
        self._partial.clear()
        self._partial_size = 0
        if line:
            self._line(line, events)
        self._line(b"", events)
        return events

    def _skip_bom(self, chunk: bytes) -> bytes:
        """Hold the first bytes back while they may be a byte order mark."""
        head = (self._head or b"") + chunk
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self._head = head
            return b""
        self._head = None
        return head.removeprefix(_BOM)

    def _line(self, line: bytes, events: list[ServerEvent]) -> None:
        if not line:
            self._dispatch(events)
        elif line.startswith(b"data:"):
            self._add_data(line[6:] if line[5:6] == b" " else line[5:])
        elif line[0] != 0x3A:
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._add_data(value)
            elif name == b"event":
                self._check(len(value))
                self._event = value.decode("utf-8", "replace")
            elif name == b"id" and b"\0" not in value:
                self._check(len(value))
                self._id = value.decode("utf-8", "replace")

    def _add_data(self, value: bytes) -> None:
        self._data.append(value)
        self._data_size += len(value) + 1
        self._check(self._data_size)

    def _dispatch(self, events: list[ServerEvent]) -> None:
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            if data:
                events.append(ServerEvent(data.decode("utf-8", "replace"), self._event, self._id))
            self._data.clear()
            self._data_size = 0
        self._event = ""

    def _check(self, size: int) -> None:
        if size > self._max:
            raise EventTooLargeError(f"an event is larger than {self._max} bytes")
