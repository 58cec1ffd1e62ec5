"""Judges of frames: their bytes, their JSON, their keys, and what each of the two routes adds or leaves out."""

import json
import re
from collections.abc import Iterator
from typing import Final

from dualclaw import EngineEvent
from dualclaw.events import from_wire, to_wire
from dualclaw_clients.conformance.seen import Evidence, Frame, HttpExchange, Unseen, last, text_of
from dualclaw_clients.conformance.stream_judges import Judge
from dualclaw_clients.conformance.web_seen import events_of, parse

_SEPARATORS: Final = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_ENVELOPE: Final = ("seq", "tenant_id", "claw", "run_id")
_ORIGINAL_TYPES: Final = frozenset({"delta", "reasoning", "step", "done", "error"})


def events_in(evidence: Evidence, scene: str, label: str) -> list[EngineEvent]:
    """Return the events of a stream. Raises Unseen."""
    return events_of(evidence.http(scene, label).frames)


def event_streams(evidence: Evidence) -> Iterator[tuple[str, HttpExchange]]:
    """Yield every event stream under "scene/label". Raises Unseen when there was none."""
    if not evidence.scenes.get("text") or not any(True for _ in evidence.streams()):
        raise Unseen("there was no event stream")
    yield from evidence.streams()


def _data_frames(evidence: Evidence) -> Iterator[tuple[str, Frame, dict[str, object]]]:
    for where, exchange in event_streams(evidence):
        for number, frame in enumerate(exchange.frames, 1):
            found = parse(frame)
            if found is not None:
                yield f"{where}, frame {number}", frame, found


def type_of(wire: dict[str, object]) -> str:
    """Return the type of an event as text, whatever it really is."""
    return str(wire.get("type"))


def framing(evidence: Evidence) -> Iterator[str]:
    """Frames and nothing else."""
    for where, exchange in event_streams(evidence):
        yield from (f"{where}: {fault}" for fault in exchange.faults)
        for number, frame in enumerate(exchange.frames, 1):
            if frame.data is not None and parse(frame) is None:
                yield f"{where}, frame {number}: one JSON object is expected; seen {frame.data[:120]!r}"


def bare_framing(evidence: Evidence) -> Iterator[str]:
    """Original frames: data alone."""
    yield from framing(evidence)
    for where, exchange in event_streams(evidence):
        for number, frame in enumerate(exchange.frames, 1):
            if frame.id is not None or frame.comment:
                yield f"{where}, frame {number}: no id line and no comment is expected; seen {frame.raw[:120]!r}"


def bytes_judge(*, escaped: bool) -> Judge:
    """Return the judge of a frame's JSON text; ``escaped``: of a route that escapes the separators."""

    def judge(evidence: Evidence) -> Iterator[str]:
        for where, frame, wire in _data_frames(evidence):
            wanted = json.dumps(wire, ensure_ascii=False)
            seen = (frame.data or b"").decode("utf-8", "replace")
            if escaped:  # that they are escaped is another check
                for raw, escape in _SEPARATORS.items():
                    wanted, seen = wanted.replace(raw, escape), seen.replace(raw, escape)
            if seen != wanted:
                yield f"{where}: {_first_difference(wanted, seen)}"

    return judge


def _first_difference(wanted: str, seen: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(wanted, seen, strict=False)) if a != b), min(len(wanted), len(seen)))
    start = max(0, place - 30)
    return f"at character {place} {wanted[start : place + 40]!r} is expected; seen {seen[start : place + 40]!r}"


def keys(evidence: Evidence) -> Iterator[str]:
    """The keys of the contract, in its order."""
    for where, _, wire in _data_frames(evidence):
        event = from_wire(wire)
        form = None if event is None else to_wire(event)
        if form is None:
            yield f"{where}: an event of the contract is expected; seen {json.dumps(wire, ensure_ascii=False)[:160]}"
        elif difference := _keys_differ(form, wire, ""):
            yield f"{where}: {difference}"


def _keys_differ(wanted: object, seen: object, path: str) -> str:
    """Return the first place where keys differ, or values do because their type is wrong; "" for none."""
    place = path or "the event"
    if isinstance(wanted, dict) and isinstance(seen, dict):
        if list(wanted) != list(seen):
            return f"{place} is expected to have the keys {list(wanted)}; seen {list(seen)}"
        found = (_keys_differ(wanted[key], seen[key], f"{path}.{key}" if path else str(key)) for key in wanted)
        return next((text for text in found if text), "")
    if isinstance(wanted, list) and isinstance(seen, list) and len(wanted) == len(seen):
        pairs = enumerate(zip(wanted, seen, strict=True))
        found = (_keys_differ(one, other, f"{path}[{index}]") for index, (one, other) in pairs)
        return next((text for text in found if text), "")
    return "" if wanted == seen else f"{place} is expected to be {wanted!r:.80}; seen {seen!r:.80}"


def canonical_args(evidence: Evidence) -> Iterator[str]:
    """R9 in a frame: the text of args is what Python prints of them."""
    evidence.http("args", "start")
    for where, frame, wire in _data_frames(evidence):
        step = wire.get("step")
        if not isinstance(step, dict) or "args" not in step:
            continue
        text = (frame.data or b"").decode("utf-8", "replace")
        wanted = '"args": ' + json.dumps(step["args"], ensure_ascii=False)
        for raw, escape in _SEPARATORS.items():
            text, wanted = text.replace(raw, escape), wanted.replace(raw, escape)
        if wanted not in text:
            seen = re.search(r'"args".{0,160}', text)
            yield f"{where}: {wanted[:160]} is expected; seen {seen[0] if seen else text[:160]}"


def args_judge(text: str) -> Judge:
    """Return the judge of the arguments as a frame writes them."""

    def judge(evidence: Evidence) -> Iterator[str]:
        exchange = evidence.http("args", "start")
        steps = [frame for frame in exchange.frames if type_of(parse(frame) or {}) in {"step", "done"}]
        if not steps:
            yield "args: a frame of step is expected; there is none"
        for frame in steps:
            seen = (frame.data or b"").decode("utf-8", "replace").replace("\u2028", "\\u2028")
            if text.replace("\u2028", "\\u2028") not in seen:
                yield f"args/start: the arguments {text} are expected; seen {seen[:300]}"

    return judge


def ids(evidence: Evidence) -> Iterator[str]:
    """Each id is the seq, and the envelope is whole."""
    for where, frame, wire in _data_frames(evidence):
        if frame.id != str(wire.get("seq")):
            yield f"{where}: id {wire.get('seq')} is expected, as the seq; seen {frame.id}"
        if missing := [key for key in ("seq", "trace_id", "run_id") if not wire.get(key)]:
            yield f"{where}: the envelope is expected to have {missing}; seen {list(wire)}"


def escapes(evidence: Evidence) -> Iterator[str]:
    """No separator that some readers end a line at."""
    evidence.http("args", "start")
    for where, frame, _ in _data_frames(evidence):
        text = (frame.data or b"").decode("utf-8", "replace")
        if raw := [escape for char, escape in _SEPARATORS.items() if char in text]:
            yield f"{where}: {', '.join(raw)} is expected as an escape; seen as the character itself"


def thin(evidence: Evidence) -> Iterator[str]:
    """The envelope stays behind, but for the trace of an end."""
    for where, _, wire in _data_frames(evidence):
        if extra := [key for key in _ENVELOPE if key in wire]:
            yield f"{where}: none of {list(_ENVELOPE)} is expected; seen {extra}"
        ends = type_of(wire) in {"done", "error"}
        if "trace_id" in wire and not ends:
            yield f"{where}: trace_id is expected on done and error only; seen on {wire.get('type')}"
        if wire.get("type") == "done" and not wire.get("trace_id"):
            yield f"{where}: done is expected to have the trace_id; seen {list(wire)}"


def five_types(evidence: Evidence) -> Iterator[str]:
    """Five types and no more."""
    evidence.http("rewind", "start"), evidence.http("approve", "start")
    for where, _, wire in _data_frames(evidence):
        if type_of(wire) not in _ORIGINAL_TYPES:
            yield f"{where}: one of {sorted(_ORIGINAL_TYPES)} is expected; seen {wire.get('type')!r}"


def shown(evidence: Evidence) -> Iterator[str]:
    """What was shown before a rewind is continued, or left alone."""
    events = events_in(evidence, "rewind", "start")
    end, said = last(events), text_of(events)
    content = end.done.content if end is not None else ""
    if not (content.startswith(said) or "This is wrong. ".startswith(said)):
        yield f"rewind: text that {content!r} begins with, or nothing after what was withdrawn; seen {said!r}"
