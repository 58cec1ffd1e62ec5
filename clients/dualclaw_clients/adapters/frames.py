"""Frames of the two SSE routes, as text and as bytes.

Rules
- The text forms define a frame: ``json.dumps(wire, ensure_ascii=False)`` with default separators. Front-ends
  in use were written against exactly these bytes.
- The byte forms give the same bytes, cheaper: text events are most of a stream, steps and ``done`` most of what a run
  costs anyway, and in them everything but texts and arguments is constant. orjson escapes exactly what json.dumps
  escapes (the tests walk every code point), but writes no space after ``:`` and ``,``; so it writes strings alone
  and never a whole event.
- A frame is one data line: JSON escapes every CR and LF. The native route escapes U+0085, U+2028 and U+2029 as
  well, because some readers split lines there; the original route leaves them, as it always did.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from dualclaw import Done, Step, StepEvent
from dualclaw.diagnosis import diagnosis_to_dict, has_content
from dualclaw.json_text import parse_args
from dualclaw.names import KIND_NAMES, PHASE_NAMES

Wire = dict[str, object]
"""An event as ``to_wire`` writes it."""

HEARTBEAT: Final = b": heartbeat\n\n"
"""A comment that keeps idle connections open; readers of SSE ignore it. Never on the original route."""

DELTA_HEAD: Final = b'data: {"type": "delta", "content": '
REASONING_HEAD: Final = b'data: {"type": "reasoning", "content": '
TEXT_TAIL: Final = b"}\n\n"
"""A text event of the original route is its head, the quoted text, and this."""

_TEXT_HEADS: Final = {"delta": DELTA_HEAD, "reasoning": REASONING_HEAD}


_encode: Final = json.JSONEncoder(ensure_ascii=False).encode
"""What ``json.dumps`` with ``ensure_ascii=False`` does; that would make an encoder for each frame."""


def _quote_by_json(text: str) -> bytes:
    return _encode(text).encode()


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
    return f"data: {_encode(wire)}\n\n"


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
    data = _encode(wire)
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
    return _one_line(b'id: %d\n%b%b, "seq": %d%b}\n\n' % (seq, _TEXT_HEADS[kind], quote(content), seq, envelope))


def step_event_head(event: StepEvent) -> bytes | None:
    """Return the JSON of a step event up to its envelope keys; None when it has no wire form."""
    step = step_json(event.step)
    if step is None:
        return None
    if event.HasField("index") and event.index >= 0:
        return b'{"type": "step", "step": %b, "index": %d' % (step, event.index)
    return b'{"type": "step", "step": %b' % step


def done_head(done: Done) -> bytes:
    """Return the JSON of a done event up to its envelope keys."""
    return (
        b'{"type": "done", "message_id": %b, "conversation_id": %b, "content": %b, "process_steps": [%b], '
        b'"used_skills": [%b], "used_mcp": [%b], "generating": %b'
        % (
            quote(done.message_id),
            quote(done.conversation_id),
            quote(done.content),
            b", ".join(text for step in done.process_steps if (text := step_json(step)) is not None),
            b", ".join(map(quote, done.used_skills)),
            b", ".join(map(quote, done.used_mcp)),
            b"true" if done.generating else b"false",
        )
    )


def step_json(step: Step) -> bytes | None:
    """Return the JSON of a step: what ``step_to_wire`` makes of it, without the dict."""
    kind = KIND_NAMES.get(step.kind)
    if kind is None:
        return None
    if kind == "thinking":
        found = b'{"type": "thinking", "text": %b' % quote(step.text)
    else:
        args = step.args_json
        found = b'{"type": "%b"%b, "name": %b, "args": %b, "result": %b' % (
            kind.encode(),
            b', "server": %b' % quote(step.server) if kind == "mcp" else b"",
            quote(step.name),
            (_args if len(args) > _SHORT_ARGS else _short_args)(args),
            quote(step.result),
        )
    if step.HasField("diagnosis") and has_content(step.diagnosis):
        found += b', "diagnosis": %b' % _encode(diagnosis_to_dict(step.diagnosis)).encode()
    if phase := PHASE_NAMES.get(step.phase):
        found += b', "phase": "%b"' % phase.encode()
    if step.HasField("node"):
        node = step.node
        if node.id or node.type or node.label:
            found += b', "node": {"id": %b, "type": %b, "label": %b}' % (
                quote(node.id),
                quote(node.type),
                quote(node.label),
            )
    return found + b"}"


def _args(text: str) -> bytes:
    return _encode(parse_args(text)).encode()


_SHORT_ARGS: Final = 500
_short_args: Final = lru_cache(256)(_args)
"""A call's arguments come with its start, its end and the run's end."""


def native_event(head: bytes, seq: int, envelope: bytes) -> bytes:
    """Return the native frame of an event whose JSON begins with this head; see ``native_text_event``."""
    return _one_line(b'id: %d\ndata: %b, "seq": %d%b}\n\n' % (seq, head, seq, envelope))


def _one_line(frame: bytes) -> bytes:
    # In UTF-8 no sequence occurs inside another, so bytes may be replaced without decoding.
    return (
        frame.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def native_envelope(trace_id: str, tenant_id: str, claw: str, run_id: str) -> bytes:
    """Return the envelope keys after ``seq``, each with its leading comma; empty ones are left out."""
    keys = (("trace_id", trace_id), ("tenant_id", tenant_id), ("claw", claw), ("run_id", run_id))
    return b"".join(b', "%b": %b' % (name.encode(), quote(value)) for name, value in keys if value)
