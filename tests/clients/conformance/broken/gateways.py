"""One broken gateway for every check of the two routes: what it does wrong, and which checks have to find it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .web_proxy import HonestWeb, Reply

Wire = dict[str, object]
Change = Callable[[Reply, Wire], Wire | None]


@dataclass(frozen=True)
class BrokenWeb:
    """A gateway that is wrong in one way."""

    name: str
    """What it does wrong."""
    hooks: Callable[[], HonestWeb]
    fails: tuple[str, ...]
    """Checks that must fail; others may only as far as these name them as implied."""
    timeout: float = 60
    """Seconds a response may take; less for a gateway that leaves them open."""


def native(wire: Wire, id_: object = None) -> bytes:
    """Return a native frame."""
    data = json.dumps(wire, ensure_ascii=False)
    for char in "\u0085\u2028\u2029":
        data = data.replace(char, f"\\u{ord(char):04x}")
    return f"id: {wire.get('seq') if id_ is None else id_}\ndata: {data}\n\n".encode()


def original(wire: Wire) -> bytes:
    """Return an original frame."""
    return f"data: {json.dumps(wire, ensure_ascii=False)}\n\n".encode()


class Altered(HonestWeb):
    """Changes the JSON of events of one scenario; None drops the frame."""

    def __init__(self, scenario: str, change: Change) -> None:
        self._scenario = scenario
        self._change = change

    def frame(self, reply: Reply, frame: bytes, wire: Wire | None) -> bytes:
        if wire is None or reply.scenario != self._scenario:
            return frame
        changed = self._change(reply, wire)
        if changed is None:
            return b""
        return native(changed) if frame.startswith(b"id:") else original(changed)


class Reframed(HonestWeb):
    """Changes the bytes of frames."""

    def __init__(self, change: Callable[[Reply, bytes, Wire], bytes]) -> None:
        self._change = change

    def frame(self, reply: Reply, frame: bytes, wire: Wire | None) -> bytes:
        return frame if wire is None else self._change(reply, frame, wire)


class Requests(HonestWeb):
    """Changes requests."""

    def __init__(self, change: Callable[[Reply], None]) -> None:
        self._change = change

    def request(self, reply: Reply) -> None:
        self._change(reply)


def altered(scenario: str, change: Change) -> Callable[[], HonestWeb]:
    return lambda: Altered(scenario, change)


def reframed(change: Callable[[Reply, bytes, Wire], bytes]) -> Callable[[], HonestWeb]:
    return lambda: Reframed(change)


def requests(change: Callable[[Reply], None]) -> Callable[[], HonestWeb]:
    return lambda: Requests(change)


def steps_of(wire: Wire) -> list[Wire]:
    found = wire.get("process_steps", [wire["step"]] if "step" in wire else [])
    assert isinstance(found, list)
    return found


def rename_fetch(_: Reply, wire: Wire) -> Wire:
    for step in steps_of(wire):
        if step.get("name") == "fetch":
            step["name"] = "fetched"
    if "used_mcp" in wire:
        wire["used_mcp"] = ["fetched"]
    return wire


def skip_seq(_: Reply, wire: Wire) -> Wire:
    seq = wire["seq"]
    assert isinstance(seq, int)
    return wire | {"seq": seq + (seq >= 3)}


def drop_done(_: Reply, wire: Wire) -> Wire | None:
    return None if wire["type"] == "done" else wire


class SwapsInterrupt(HonestWeb):
    """Sends the interrupt one event too early."""

    def frame(self, reply: Reply, frame: bytes, wire: Wire | None) -> bytes:
        if wire is None or reply.scenario != "question" or reply.method != "POST":
            return frame
        if wire["type"] == "step" and wire["seq"] == 2:
            return b""
        if wire["type"] == "interrupt":
            step = reply.wires[-2]
            return native(wire | {"seq": step["seq"]}) + native(step | {"seq": wire["seq"]})
        return frame


def drop_index(_: Reply, wire: Wire) -> Wire:
    if wire.get("index") == 0:
        del wire["index"]
    return wire


def longer_done(_: Reply, wire: Wire) -> Wire:
    return wire | {"content": f"{wire['content']}!"} if wire["type"] == "done" else wire


def other_result(_: Reply, wire: Wire) -> Wire:
    if wire["type"] == "done":
        steps_of(wire)[0]["result"] = "something else"
    return wire


def other_order(_: Reply, wire: Wire) -> Wire:
    used = wire.get("used_skills")
    return wire | {"used_skills": used[::-1]} if isinstance(used, list) else wire


def other_trace(_: Reply, wire: Wire) -> Wire:
    return wire | {"trace_id": "0af7651916cd43dd8448eb211c80319c"} if wire["seq"] == 2 else wire


def double_number(reply: Reply, frame: bytes, _: Wire) -> bytes:
    return frame.replace(b"12345678901234567890", b"1.2345678901234567e+19")


def dense_args(reply: Reply, frame: bytes, _: Wire) -> bytes:
    return frame.replace(b'"args": {"what": "it"}', b'"args": {"what":"it"}')


def one_less(reply: Reply) -> None:
    if reply.headers.get("last-event-id") in {"1", "2"} and not reply.query:
        reply.headers["last-event-id"] = str(int(reply.headers["last-event-id"]) - 1)


def forget_request_id(reply: Reply) -> None:
    if reply.path == "/v1/runs" and reply.body.startswith(b"{") and b"request_id" in reply.body:
        body = json.loads(reply.body)
        del body["request_id"]
        reply.body = json.dumps(body).encode()


class BreaksOff(HonestWeb):
    """Breaks the response off where the error would be told."""

    def frame(self, reply: Reply, frame: bytes, wire: Wire | None) -> bytes:
        if wire is not None and wire["type"] == "error" and reply.scenario == "error":
            raise ConnectionResetError("the run failed")
        return frame


def event_line(_: Reply, frame: bytes, wire: Wire) -> bytes:
    return b"event: " + str(wire["type"]).encode() + b"\n" + frame


def comment_before(_: Reply, frame: bytes, wire: Wire) -> bytes:
    return b": here it comes\n\n" + frame if wire["type"] == "done" else frame


def ascii_only(_: Reply, frame: bytes, wire: Wire) -> bytes:
    return frame.replace("你".encode(), b"\\u4f60") if wire["type"] == "delta" else frame


def extra_key(_: Reply, wire: Wire) -> Wire:
    return wire | {"version": 2} if wire["type"] == "delta" else wire


def empty_key(_: Reply, wire: Wire) -> Wire:
    return {"type": "step", "step": wire["step"], "index": wire["index"], "node": {}} | wire if "step" in wire else wire


def missing_key(_: Reply, wire: Wire) -> Wire:
    wire.pop("used_mcp", None)
    return wire


def other_id(_: Reply, frame: bytes, wire: Wire) -> bytes:
    return native(wire, id_=f"{wire['seq']}0") if wire["type"] == "delta" else frame


def raw_separator(_: Reply, frame: bytes, wire: Wire) -> bytes:
    return frame.replace(b"\\u2028", "\u2028".encode())


class Headers(HonestWeb):
    """Changes heads of streams."""

    def __init__(self, **changes: str | None) -> None:
        self._changes = {name.replace("_", "-"): value for name, value in changes.items()}

    def head(self, reply: Reply, headers: dict[str, str]) -> dict[str, str]:
        if headers.get("content-type") != "text/event-stream":
            return headers
        return {k: v for k, v in (headers | self._changes).items() if v is not None}


class Silent(HonestWeb):
    """Sends no heartbeats."""

    def frame(self, reply: Reply, frame: bytes, wire: Wire | None) -> bytes:
        return b"" if frame.startswith(b": heartbeat") else frame


class HoldsHead(HonestWeb):
    """Sends the head with the first event."""

    def holds_head(self, reply: Reply) -> bool:
        return True


class NothingLeft(HonestWeb):
    """Says 204 for a parked run as well."""

    def head(self, reply: Reply, headers: dict[str, str]) -> dict[str, str]:
        if reply.path.endswith("/events") and reply.scenario == "approval":
            reply.status = 204
            return {"x-run-id": headers["x-run-id"]}
        return headers

    def frame(self, reply: Reply, frame: bytes, wire: Wire | None) -> bytes:
        return b"" if reply.status == 204 else frame


def query_first(reply: Reply) -> None:
    if reply.query:
        reply.headers.pop("last-event-id", None)


class OtherStatus(HonestWeb):
    """Answers unknown runs with 400."""

    def head(self, reply: Reply, headers: dict[str, str]) -> dict[str, str]:
        if reply.status == 404:
            reply.status = 400
        return headers


def tolerate(reply: Reply) -> None:
    if b'"colour"' in reply.body:
        body = json.loads(reply.body)
        del body["colour"]
        reply.body = json.dumps(body).encode()


class EndsWithClient(HonestWeb):
    """Shows a run whose starter has left as one that says no more."""

    def frame(self, reply: Reply, frame: bytes, wire: Wire | None) -> bytes:
        left = reply.scenario == "slow" and reply.method == "GET" and reply.events > 5
        return b"" if left and wire is not None else frame


def add_seq(reply: Reply, wire: Wire) -> Wire:
    trace = {"trace_id": wire.pop("trace_id")} if "trace_id" in wire else {}
    return wire | {"seq": reply.events} | trace


def trace_everywhere(_: Reply, wire: Wire) -> Wire:
    return wire | {"trace_id": "0af7651916cd43dd8448eb211c80319c"}


def interrupt_too(_: Reply, frame: bytes, wire: Wire) -> bytes:
    waits = wire["type"] == "done" and any("diagnosis" in step and "❌" not in str(step) for step in steps_of(wire))
    return original({"type": "interrupt", "items": []}) + frame if waits else frame


def rest_of_rewind(reply: Reply, frame: bytes, wire: Wire) -> bytes:
    return (
        original({"type": "delta", "content": "right."}) + frame
        if wire["type"] == "done" and reply.scenario == "rewind"
        else frame
    )


class BadStatus(HonestWeb):
    """Refuses what is no JSON by its status."""

    def head(self, reply: Reply, headers: dict[str, str]) -> dict[str, str]:
        if reply.body == b"{":
            reply.status = 400
        return headers


def silent_wait(_: Reply, wire: Wire) -> Wire:
    for step in steps_of(wire):
        step.pop("diagnosis", None)
    return wire


def only_text(reply: Reply) -> None:
    reply.body = reply.body.replace(b'"conversation_id": 4242', b'"conversation_id": [4242]')


def forget_conversation(reply: Reply) -> None:
    if b'"blue"' in reply.body:
        body = json.loads(reply.body)
        del body["conversation_id"]
        reply.body = json.dumps(body).encode()


NATIVE: Sequence[BrokenWeb] = (
    BrokenWeb("calls a tool by another name", altered("tool", rename_fetch), ("S1",)),
    BrokenWeb("skips a seq", altered("tool", skip_seq), ("R1",)),
    BrokenWeb("drops the terminal event", altered("tool", drop_done), ("R2",)),
    BrokenWeb("sends the interrupt too early", SwapsInterrupt, ("R3",)),
    BrokenWeb("sends a step without its index", altered("tool", drop_index), ("R4",)),
    BrokenWeb("says another text in done", altered("tool", longer_done), ("R5",)),
    BrokenWeb("lists another result in done", altered("tool", other_result), ("R6",)),
    BrokenWeb("lists skills in another order", altered("tool", other_order), ("R7",)),
    BrokenWeb("changes the trace within a segment", altered("tool", other_trace), ("R8",)),
    BrokenWeb("prints arguments without spaces", reframed(dense_args), ("R9",)),
    BrokenWeb("follows one event too early", requests(one_less), ("R10",)),
    BrokenWeb("breaks off instead of telling the error", BreaksOff, ("R11",)),
    BrokenWeb("forgets the request_id", requests(forget_request_id), ("R12",)),
    BrokenWeb("reads big integers as doubles", reframed(double_number), ("W3",)),
    BrokenWeb("shows nothing of a run that was left", EndsWithClient, ("L1",), timeout=12),
    BrokenWeb("writes event lines", reframed(event_line), ("F1",)),
    BrokenWeb("escapes what is no control character", reframed(ascii_only), ("F2",)),
    BrokenWeb("adds a key", altered("text", extra_key), ("F3",)),
    BrokenWeb("leaves out a key that is always written", altered("text", missing_key), ("F3",)),
    BrokenWeb("has ids of its own", reframed(other_id), ("F4",)),
    BrokenWeb("leaves separators as they are", reframed(raw_separator), ("F5",)),
    BrokenWeb("lets proxies cache", lambda: Headers(cache_control=None), ("H1",)),
    BrokenWeb("has no heartbeats", Silent, ("H2",), timeout=12),
    BrokenWeb("holds the head back", HoldsHead, ("H3",), timeout=12),
    BrokenWeb("says 204 while a run waits", NothingLeft, ("H4",)),
    BrokenWeb("reads ?after first", requests(query_first), ("H5",)),
    BrokenWeb("answers 400 for what is unknown", OtherStatus, ("H6",)),
    BrokenWeb("names no run", lambda: Headers(x_run_id=None), ("H8",)),
    BrokenWeb("takes unknown keys", requests(tolerate), ("H9",)),
)
ORIGINAL: Sequence[BrokenWeb] = (
    BrokenWeb("calls a tool by another name", altered("tool", rename_fetch), ("S1",)),
    BrokenWeb("drops the terminal event", altered("tool", drop_done), ("R2",)),
    BrokenWeb("says another text in done", altered("tool", longer_done), ("R5",)),
    BrokenWeb("lists another result in done", altered("tool", other_result), ("R6",)),
    BrokenWeb("lists skills in another order", altered("tool", other_order), ("R7",)),
    BrokenWeb("reads big integers as doubles", reframed(double_number), ("W3",)),
    BrokenWeb("writes event lines", reframed(event_line), ("F1",)),
    BrokenWeb("writes comments", reframed(comment_before), ("F1",)),
    BrokenWeb("prints arguments without spaces", reframed(dense_args), ("F2",)),
    BrokenWeb("escapes what is no control character", reframed(ascii_only), ("F2",)),
    BrokenWeb("adds a key", altered("text", extra_key), ("F3",)),
    BrokenWeb("leaves out a key that is always written", altered("text", missing_key), ("F3",)),
    BrokenWeb("sends a seq", altered("text", add_seq), ("F6",)),
    BrokenWeb("sends the trace with every event", altered("tool", trace_everywhere), ("F6",)),
    BrokenWeb("sends interrupts", reframed(interrupt_too), ("F7",)),
    BrokenWeb("adds to what was withdrawn", reframed(rest_of_rewind), ("F8",)),
    BrokenWeb("lets proxies collect", lambda: Headers(x_accel_buffering=None), ("H1",)),
    BrokenWeb("refuses by the status", BadStatus, ("H7",)),
    BrokenWeb("does not say that a step waits", altered("approval", silent_wait), ("H10",)),
    BrokenWeb("takes conversations as text only", requests(only_text), ("H11",)),
    BrokenWeb("forgets the conversation", requests(forget_conversation), ("H12",)),
)
