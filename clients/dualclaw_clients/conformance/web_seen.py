"""What a web gateway has sent, read strictly: bytes into frames, frames into events."""

import json
import re
from collections.abc import Sequence
from typing import Final

from dualclaw import EngineEvent, StopReason
from dualclaw.events import from_wire
from dualclaw_clients.conformance.seen import Frame, HttpExchange

_ID: Final = re.compile(rb"id: ([0-9]+)")
_WAITS: Final = ("approval.required", "input.required")
_NO_TRACE: Final = "f" * 32


def read_frames(body: bytes, *, complete: bool) -> tuple[tuple[Frame, ...], tuple[str, ...]]:
    """Return the frames of a body and what breaks the framing.

    A frame ends with a blank line; ``complete`` says that no more will come, so that half a frame is a fault.
    """
    frames, faults = [], []
    *whole, rest = body.split(b"\n\n")
    for number, block in enumerate(whole, 1):
        raw, ids, data, other = block + b"\n\n", [], [], []
        comments = 0
        for line in block.split(b"\n"):
            if found := _ID.fullmatch(line):
                ids.append(found[1].decode())
            elif line.startswith(b"data: "):
                data.append(line.removeprefix(b"data: "))
            elif line.startswith(b":"):
                comments += 1
            else:
                other.append(line)
        if other or b"\r" in block or len(data) > 1 or len(ids) > 1 or (data and comments) or not (data or comments):
            faults.append(f"frame {number} is no frame of one data line: {_shown(raw)}")
        frames.append(Frame(raw, ids[0] if ids else None, data[0] if data else None, comment=bool(comments)))
    if rest and complete:
        faults.append(f"the body ends in the middle of a frame: {_shown(rest)}")
    return tuple(frames), tuple(faults)


def _shown(raw: bytes) -> str:
    return repr(raw[:120]) + ("..." if len(raw) > 120 else "")


def parse(frame: Frame) -> dict[str, object] | None:
    """Return the JSON object of a frame, None when it has none."""
    if frame.data is None:
        return None
    try:
        found = json.loads(frame.data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def events_of(frames: Sequence[Frame]) -> list[EngineEvent]:
    """Return the events of frames as they are; what is no event is left out."""
    wires = [parse(frame) for frame in frames]
    events = [from_wire(wire) for wire in wires if wire is not None]
    return [event for event in events if event is not None]


def lifted(exchange: HttpExchange, before: int) -> list[EngineEvent]:
    """Return the events of a stream with what its wire format does not carry, so that the rules can be applied.

    stop_reason is not on this wire: a done right after an interrupt, or with a step that waits for people, is
    INTERRUPTED. The original route has no envelope either; seq is then the place of the frame, after ``before`` others.
    """
    events = events_of(exchange.frames)
    thin = all(not event.seq and not event.run_id for event in events)
    previous: EngineEvent | None = None
    for place, event in enumerate(events, before + 1):
        if event.WhichOneof("payload") == "done":
            asked = previous is not None and previous.WhichOneof("payload") == "interrupt"
            waits = any(step.diagnosis.code in _WAITS for step in event.done.process_steps)
            if asked or (thin and waits):
                event.done.stop_reason = StopReason.STOP_REASON_INTERRUPTED
        if thin:
            event.seq, event.trace_id, event.run_id = place, _NO_TRACE, "run"
        previous = event
    return events
