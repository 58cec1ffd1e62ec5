"""The bytes of frames: the cheap encoders against the text forms, and both against the golden vectors."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import httpx_sse
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualclaw import Diagnosis, Done, EngineEvent, Node, Phase, Step, StepEvent, StepKind
from dualclaw.events import make_delta, make_reasoning, to_wire
from dualclaw_clients.adapters import (
    HEARTBEAT,
    BufferAdapter,
    NativeSseAdapter,
    SseAdapter,
    native_frame,
    original_frame,
)
from dualclaw_clients.adapters.frames import quote

VECTORS = Path(__file__).resolve().parents[3] / "proto" / "vectors"
OF_EVENTS = (
    "args",
    "args_not_canonical",
    "delta",
    "done",
    "envelope",
    "error",
    "interrupt",
    "reasoning",
    "rewind",
    "step",
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
awkward = st.text(st.sampled_from('a"\\/\x00\b\t\n\f\r\x1b\x1f\x7f\x85\u2028\u2029\ufeff\uffff你😀'))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | awkward,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | awkward, inner, max_size=3),
    max_leaves=8,
)
wires = st.one_of(
    st.builds(
        lambda kind, content: {"type": kind, "content": content}, st.sampled_from(["delta", "reasoning", "x"]), values
    ),
    st.builds(lambda content: {"content": content, "type": "delta"}, texts),
    st.builds(
        lambda content, seq: {"type": "delta", "content": content, "seq": seq, "run_id": content},
        texts | awkward,
        st.integers(-1, 2**31 - 1),
    ),
    st.dictionaries(texts | awkward, values, max_size=4),
)


def test_the_fast_quote_escapes_every_code_point_as_json_dumps_does() -> None:
    """All of Unicode but surrogates, which cannot be UTF-8: U+007F, controls and separators included."""
    step = 0x800
    for start in range(0, 0x110000, step):
        if start != 0xD800:
            block = "".join(map(chr, range(start, start + step)))
            assert quote(block) == json.dumps(block, ensure_ascii=False).encode(), hex(start)


@given(wires)
def test_bytes_and_text_of_a_frame_are_the_same(wire: dict[str, object]) -> None:
    """The byte encoders give exactly the bytes of the text form, for dicts of any shape."""
    assert original_frame(wire) == SseAdapter.frame(wire).encode()
    assert native_frame(wire) == NativeSseAdapter.frame(wire).encode()


@given(st.sampled_from([make_delta, make_reasoning]), texts | awkward, st.integers(1, 2**31 - 1), awkward, awkward)
def test_text_events_skip_the_dict_and_keep_the_bytes(
    make: type, content: str, seq: int, trace_id: str, run_id: str
) -> None:
    """What encode gives for a text event is the frame of its wire dict, on both routes."""
    event: EngineEvent = make(content, seq=seq, trace_id=trace_id, run_id=run_id)
    wire = to_wire(event)
    assert wire is not None
    adapter = NativeSseAdapter(tenant_id=trace_id)
    adapter.claw = ""
    expected = {key: value for key, value in wire.items() if key != "run_id"}
    expected |= {key: value for key, value in (("tenant_id", trace_id), ("run_id", run_id)) if value}
    assert adapter.encode([event, event]).decode() == NativeSseAdapter.frame(expected) * 2
    thin = {"type": wire["type"], "content": content}
    assert SseAdapter().encode([event]).decode() == SseAdapter.frame(thin)


steps = st.builds(
    Step,
    kind=st.sampled_from([*StepKind.values(), 99]),
    name=texts | awkward,
    server=awkward,
    text=awkward,
    result=texts | awkward,
    args_json=st.sampled_from(
        ["", "{}", "[1]", "{", '{"b":1,"a":[1.0,null]}', '{"a": "\\u2028\u2028 \\ud800"}', '{"a": 1e999, "a": "é"}']
    ),
    phase=st.sampled_from([*Phase.values(), 77]),
    diagnosis=st.none() | st.builds(Diagnosis, code=awkward, summary=awkward, severity=st.sampled_from([0, 3, 50])),
    node=st.none() | st.builds(Node, id=awkward, type=awkward, label=awkward),
)
usual = st.one_of(
    st.builds(
        lambda step, index: EngineEvent(step=StepEvent(step=step, index=index)),
        steps,
        st.none() | st.integers(-1, 2**31 - 1),
    ),
    st.builds(
        lambda **fields: EngineEvent(done=Done(**fields)),
        message_id=awkward,
        conversation_id=awkward,
        content=texts | awkward,
        process_steps=st.lists(steps, max_size=3),
        used_skills=st.lists(awkward, max_size=2),
        used_mcp=st.lists(awkward, max_size=2),
        generating=st.booleans(),
    ),
)


@given(usual, st.integers(1, 2**31 - 1), awkward)
def test_steps_and_done_skip_the_dict_and_keep_the_bytes(event: EngineEvent, seq: int, trace_id: str) -> None:
    """What encode gives for them is the frame of the wire dict, on both routes; what has no wire form is dropped."""
    event.seq, event.trace_id = seq, trace_id
    wire = to_wire(event)
    native, original = NativeSseAdapter(claw=""), SseAdapter(claw="")
    if wire is None:
        assert native.encode([event]) == original.encode([event]) == b""
        assert native.dropped == original.dropped == 1
        return
    assert native.encode([event]).decode() == NativeSseAdapter.frame(wire)
    kept = {key: value for key, value in wire.items() if key != "seq"}
    if wire["type"] == "step":
        kept.pop("trace_id", None)
    assert original.encode([event]).decode() == SseAdapter.frame(kept)


@given(wires)
def test_a_native_frame_is_one_id_line_and_one_data_line(wire: dict[str, object]) -> None:
    """However lines are split, the frame has its own lines only, and the data is the wire dict."""
    frame = native_frame(wire).decode()
    seq = wire.get("seq")
    lines = frame.splitlines()
    has_id = isinstance(seq, int) and not isinstance(seq, bool) and seq > 0
    assert lines[:-2] == ([f"id: {seq}"] if has_id else [])
    assert frame.endswith("\n\n")
    assert json.loads(lines[-2].removeprefix("data: ")) == json.loads(json.dumps(wire))
    assert not set(frame) & set("\r\u0085\u2028\u2029")


def test_a_seq_that_is_no_number_makes_no_id_line() -> None:
    """Text in place of a seq cannot put lines of its own into the stream."""
    for seq in ("7\ndata: x", True, 0, -1, None, 1.5):
        assert native_frame({"type": "x", "seq": seq}).startswith(b"data: ")


def test_a_reader_of_sse_gets_what_was_written() -> None:
    """A decoder nobody here wrote reads ids and data back, heartbeats in between."""
    texts = ["a\n\nb\r\nc", "x\u2028y\u2029z\u0085", "data: 1\n\nid: 9", "你好😀\x00"]
    adapter = NativeSseAdapter()
    stream = b"".join(HEARTBEAT + adapter.encode([make_delta(text, seq=seq)]) for seq, text in enumerate(texts, 1))
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
    # This reader gives an event without data for a comment, as the standard says it should not.
    events = [event for event in httpx_sse.EventSource(response).iter_sse() if event.data]
    assert [(event.id, event.event, json.loads(event.data)["content"]) for event in events] == [
        (str(seq), "message", text) for seq, text in enumerate(texts, 1)
    ]


def test_without_orjson_the_bytes_are_the_same() -> None:
    """A claw installed without the fast library, such as an IM one, writes the same frames."""
    script = """
import sys
sys.modules["orjson"] = None
from dualclaw.events import make_delta
from dualclaw_clients.adapters import NativeSseAdapter, SseAdapter, frames
assert frames.quote is frames._quote_by_json
event = make_delta("\\x00\\x7f\\u2028\\"你", seq=3, run_id="r")
sys.stdout.buffer.write(SseAdapter().encode([event]) + NativeSseAdapter().encode([event]))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    event = make_delta('\x00\x7f\u2028"你', seq=3, run_id="r")
    assert result.stdout == SseAdapter().encode([event]) + NativeSseAdapter().encode([event])


def golden(*files: str) -> list[dict[str, str | None]]:
    """The vectors of some files, without protobuf's JSON of the events; a missing or empty file is an error."""
    vectors = []
    for file in files:
        entries = json.loads((VECTORS / f"{file}.json").read_text())
        assert entries
        vectors += [{key: entry.get(key) for key in ("name", "binary", "wire", "frame", "input")} for entry in entries]
    return vectors


def escaped(text: str) -> str:
    return text.replace("\u0085", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@pytest.mark.parametrize("vector", golden(*OF_EVENTS), ids=lambda vector: vector["name"])
def test_golden_frames_of_the_original_route(vector: dict[str, str | None]) -> None:
    """Every vector's event gives its frame, byte for byte, by the text form and by the fast path."""
    event = EngineEvent.FromString(bytes.fromhex(vector["binary"] or ""))
    adapter = SseAdapter()
    encoded = adapter.encode([event]).decode()
    if event.HasField("rewind"):
        # Not carried itself; on a front-end that shows nothing yet its texts are all new.
        assert vector["frame"] is None
        kinds = [json.loads(frame.removeprefix("data: "))["type"] for frame in encoded.split("\n\n") if frame]
        assert kinds == ["reasoning"] * bool(event.rewind.reasoning) + ["delta"] * bool(event.rewind.content)
    else:
        assert encoded == (vector["frame"] or "")
    assert adapter.dropped == (vector["wire"] is None)
    if vector["wire"] is not None:
        wire = json.loads(vector["wire"])
        assert original_frame(wire).decode() == SseAdapter.frame(wire) == f"data: {vector['wire']}\n\n"


@pytest.mark.parametrize("vector", golden(*OF_EVENTS, "inputs/from_binary"), ids=lambda vector: vector["name"])
def test_golden_frames_of_the_native_route(vector: dict[str, str | None]) -> None:
    """Every vector's event gives its wire text, separators escaped, behind an id line; none without a wire form."""
    event = EngineEvent.FromString(bytes.fromhex(vector["binary"] or ""))
    adapter = NativeSseAdapter(claw="")
    encoded = adapter.encode([event]).decode()
    if vector["wire"] is None:
        assert encoded == ""
        assert adapter.dropped == 1
    else:
        wire = json.loads(vector["wire"])
        id_line = f"id: {event.seq}\n" if event.seq > 0 else ""
        expected = f"{id_line}data: {escaped(vector['wire'])}\n\n"
        assert native_frame(wire).decode() == NativeSseAdapter.frame(wire) == expected
        if event.seq > 0:
            assert encoded == expected
        else:
            assert encoded.startswith("id: 1\n")
            assert json.loads(encoded.split("\n")[1].removeprefix("data: ")) == {**wire, "seq": 1}


@pytest.mark.parametrize("vector", golden("inputs/from_wire"), ids=lambda vector: vector["name"])
async def test_golden_payloads_of_older_producers(vector: dict[str, str | None]) -> None:
    """Whatever a producer sent is lifted to its wire text, or dropped; no adapter fails on it."""
    payload = json.loads(vector["input"] or "")
    native, original, buffer = NativeSseAdapter(claw=""), SseAdapter(), BufferAdapter()
    for adapter in (native, original, buffer):
        await adapter(payload)
        assert adapter.failed == 0
        assert adapter.dropped == (vector["wire"] is None)
    encoded = NativeSseAdapter(claw="").encode([payload]).decode()
    if vector["wire"] is None:
        assert encoded == ""
        assert native.queue.empty()
    else:
        wire = native.queue.get_nowait()
        assert wire is not None
        assert NativeSseAdapter.frame(wire) == encoded
        assert wire == {**json.loads(vector["wire"]), "seq": wire["seq"]}
    assert isinstance(buffer.assemble(), str | dict)
