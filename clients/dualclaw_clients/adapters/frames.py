"""Frames of the two SSE routes, as text and as bytes.

Rules
- The text forms define a frame: ``json.dumps(wire, ensure_ascii=False)`` with default separators. Front-ends
  in use were written against exactly these bytes.
- The byte forms give the same bytes, cheaper: text events are most of a stream, and there everything but the
  text is constant. orjson escapes exactly what json.dumps escapes (the tests walk every code point), but writes
  no space after ``:`` and ``,``; so it writes the string alone and never a whole event.
- A frame is one data line: JSON escapes every CR and LF. The native route escapes U+0085, U+2028 and U+2029 as
  well, because some readers split lines there; the original route leaves them, as it always did.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final

Wire = dict[str, object]
"""An event as ``to_wire`` writes it."""

HEARTBEAT: Final = b": heartbeat\n\n"
"""A comment that keeps idle connections open; readers of SSE ignore it. Never on the original route."""

DELTA_HEAD: Final = b'data: {"type": "delta", "content": '
REASONING_HEAD: Final = b'data: {"type": "reasoning", "content": '
TEXT_TAIL: Final = b"}\n\n"
"""A text event of the original route is its head, the quoted text, and this."""

_TEXT_HEADS: Final = {"delta": DELTA_HEAD, "reasoning": REASONING_HEAD}


def _quote_by_json(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


def _fastest_quote() -> Callable[[str], bytes]:
    try:
        import orjson  # noqa: PLC0415  # only the extra "web" brings it; an IM claw does without
    except ImportError:
        return _quote_by_json
    return orjson.dumps


quote: Final = _fastest_quote()
"""Writes a text as a JSON string in UTF-8. Lone surrogates raise; they never get past ``from_wire``."""


def original_text(wire: Mapping[str, object]) -> str:
    """Return the frame of the original route as text."""
    return f"data: {json.dumps(wire, ensure_ascii=False)}\n\n"


def original_frame(wire: Mapping[str, object]) -> bytes:
    """Return the frame of the original route: the bytes of ``original_text``."""
    if len(wire) == 2 and next(iter(wire)) == "type":
        content = wire.get("content")
        kind = wire["type"]
        if type(content) is str and type(kind) is str and kind in _TEXT_HEADS:
            return _TEXT_HEADS[kind] + quote(content) + TEXT_TAIL
    return original_text(wire).encode()


def native_text(wire: Mapping[str, object]) -> str:
    """Return the frame of the native route as text: ``id:`` is the seq, then one data line.

    There is no ``event:`` line, so that ``EventSource.onmessage`` gets every event. Without a seq there is no
    ``id:`` line either, and a client that reconnects goes on from the last id it saw.
    """
    data = json.dumps(wire, ensure_ascii=False)
    data = data.replace("\u0085", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    seq = wire.get("seq")
    # A number and nothing else: text here could smuggle in lines of its own.
    head = f"id: {seq}\n" if type(seq) is int and seq > 0 else ""
    return f"{head}data: {data}\n\n"


def native_frame(wire: Mapping[str, object]) -> bytes:
    """Return the frame of the native route: the bytes of ``native_text``."""
    return native_text(wire).encode()


def native_text_event(kind: str, content: str, seq: int, envelope: bytes) -> bytes:
    """Return the native frame of a delta or reasoning without a dict in between.

    Args:
        kind: "delta" or "reasoning".
        content: the piece of text.
        seq: position in the run, at least 1.
        envelope: what ``native_envelope`` gave for the other keys.
    """
    frame = b'id: %d\n%b%b, "seq": %d%b}\n\n' % (seq, _TEXT_HEADS[kind], quote(content), seq, envelope)
    # In UTF-8 no sequence occurs inside another, so bytes may be replaced without decoding.
    return (
        frame.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def native_envelope(trace_id: str, tenant_id: str, claw: str, run_id: str) -> bytes:
    """Return the envelope keys after ``seq``, each with its leading comma; empty ones are left out."""
    keys = (("trace_id", trace_id), ("tenant_id", tenant_id), ("claw", claw), ("run_id", run_id))
    return b"".join(b', "%b": %b' % (name.encode(), quote(value)) for name, value in keys if value)
