"""Events on the wire: what is always written, what only when non-empty, what never.

The wire dicts here are written out by hand. The locks hold for all four forms a reader may see: protobuf, dict,
JSON text and SSE frame.
"""

import json

import pytest
from google.protobuf import json_format

from dualclaw import Diagnosis, EngineEvent, InterruptItem, Node, Step, StopReason, Usage
from dualclaw.events import (
    from_wire,
    make_delta,
    make_diagnosis,
    make_done,
    make_error,
    make_interrupt,
    make_reasoning,
    make_rewind,
    make_step,
    to_text,
    to_wire,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
BAD = make_diagnosis(
    code="tool.failed", severity="error", summary="坏了", detail="at line 3", hint="重试", retryable=True
)
BAD_DICT = {
    "code": "tool.failed",
    "severity": "error",
    "summary": "坏了",
    "detail": "at line 3",
    "hint": "重试",
    "retryable": True,
}

BARE: list[tuple[EngineEvent, dict[str, object]]] = [
    (make_delta(""), {"type": "delta", "content": ""}),
    (make_reasoning(""), {"type": "reasoning", "content": ""}),
    (make_step("thinking"), {"type": "step", "step": {"type": "thinking", "text": ""}}),
    (
        make_step("mcp"),
        {"type": "step", "step": {"type": "mcp", "server": "", "name": "", "args": {}, "result": ""}},
    ),
    *(
        (make_step(kind), {"type": "step", "step": {"type": kind, "name": "", "args": {}, "result": ""}})
        for kind in ("skill", "agent", "kb", "media")
    ),
    (
        make_done(message_id="", conversation_id=""),
        {
            "type": "done",
            "message_id": "",
            "conversation_id": "",
            "content": "",
            "process_steps": [],
            "used_skills": [],
            "used_mcp": [],
            "generating": False,
        },
    ),
    (make_error(""), {"type": "error", "message": ""}),
    (make_interrupt([]), {"type": "interrupt", "items": []}),
    (make_interrupt([InterruptItem()]), {"type": "interrupt", "items": [{"id": "", "kind": ""}]}),
    (make_rewind(""), {"type": "rewind", "content": ""}),
]


@pytest.mark.parametrize(("event", "wire"), BARE, ids=lambda v: v["type"] if isinstance(v, dict) else "")
def test_empty_event_writes_what_is_always_written_and_nothing_else(
    event: EngineEvent, wire: dict[str, object]
) -> None:
    """Old keys are there although empty, later keys are not; as dict, as JSON and read back."""
    assert to_wire(event) == wire
    assert json.dumps(to_wire(event)) == json.dumps(wire)
    assert from_wire(wire) == event


ADDED: list[tuple[EngineEvent, tuple[str, ...], object]] = [
    (make_step("skill", index=0), ("index",), 0),
    (make_step("skill", index=7), ("index",), 7),
    (make_step("skill", phase="start"), ("step", "phase"), "start"),
    (make_step("mcp", phase="ok"), ("step", "phase"), "ok"),
    (make_step("mcp", phase="fail"), ("step", "phase"), "fail"),
    (make_step("thinking", node={"id": "n"}), ("step", "node"), {"id": "n", "type": "", "label": ""}),
    (make_step("skill", result="r", diagnosis=BAD), ("step", "diagnosis"), BAD_DICT),
    (make_error("m", diagnosis=BAD), ("diagnosis",), BAD_DICT),
    (make_rewind("a", reasoning="b"), ("reasoning",), "b"),
    (make_rewind("a", reason="r"), ("reason",), "r"),
    (make_rewind("a", attempt=2), ("attempt",), 2),
    (make_delta("a", seq=1), ("seq",), 1),
    (make_delta("a", trace_id=TRACE), ("trace_id",), TRACE),
    (make_delta("a", tenant_id="t"), ("tenant_id",), "t"),
    (make_delta("a", claw="web"), ("claw",), "web"),
    (make_delta("a", run_id="r"), ("run_id",), "r"),
]


@pytest.mark.parametrize(("event", "path", "value"), ADDED)
def test_later_key_is_written_when_it_says_something(event: EngineEvent, path: tuple[str, ...], value: object) -> None:
    """An added field shows under its key with its value, and comes back when it is read."""
    wire = to_wire(event)
    assert wire is not None
    found: object = wire
    for key in path:
        assert isinstance(found, dict)
        found = found[key]
    assert found == value
    again = from_wire(wire)
    assert again is not None
    assert to_wire(again) == wire


def test_keys_come_in_their_order() -> None:
    """Front-ends and vectors compare texts, so the order of keys is part of the format."""
    event = make_step(
        "mcp",
        server="s",
        name="n",
        args={"b": 1, "a": 2},
        result="r",
        phase="fail",
        index=3,
        diagnosis=BAD,
        node=Node(id="i", type="tool", label="l"),
        seq=9,
        trace_id=TRACE,
        tenant_id="t",
        claw="web",
        run_id="run",
    )
    assert json.dumps(to_wire(event), ensure_ascii=False) == (
        '{"type": "step", "step": {"type": "mcp", "server": "s", "name": "n", "args": {"b": 1, "a": 2}, "result": "r", '
        '"diagnosis": {"code": "tool.failed", "severity": "error", "summary": "坏了", "detail": "at line 3", '
        '"hint": "重试", "retryable": true}, "phase": "fail", "node": {"id": "i", "type": "tool", "label": "l"}}, '
        f'"index": 3, "seq": 9, "trace_id": "{TRACE}", "tenant_id": "t", "claw": "web", "run_id": "run"}}'
    )


def test_delta_frame_has_46_bytes() -> None:
    """The frame that today's front-ends get, byte for byte."""
    frame = f"data: {json.dumps(to_wire(make_delta('你好')), ensure_ascii=False)}\n\n"
    assert frame == 'data: {"type": "delta", "content": "你好"}\n\n'
    assert len(frame.encode()) == 46


def test_what_is_for_protobuf_only_never_crosses() -> None:
    """Call ids, usage and stop reason are in the message, not on this wire."""
    step = make_step("skill", name="n", call_id="c", parent_call_id="p")
    assert (step.step.step.call_id, step.step.step.parent_call_id) == ("c", "p")
    done = make_done(
        message_id="m",
        conversation_id="c",
        usage=Usage(input_tokens=0, output_tokens=3),
        stop_reason="step_limit",
        process_steps=[step.step.step],
    )
    assert done.done.stop_reason == StopReason.STOP_REASON_STEP_LIMIT
    assert done.done.usage.HasField("input_tokens")
    assert not done.done.usage.HasField("cached_tokens")
    text = json.dumps([to_wire(step), to_wire(done)])
    for hidden in ("call_id", "usage", "tokens", "stop_reason", "step_limit"):
        assert hidden not in text


@pytest.mark.parametrize(("bare", "full"), [(make_step("skill"), make_step("skill", index=0))])
def test_index_absent_and_index_zero_differ_in_every_form(bare: EngineEvent, full: EngineEvent) -> None:
    """Presence is explicit in protobuf, protobuf JSON and on the wire."""
    assert not bare.step.HasField("index")
    assert full.step.HasField("index")
    assert bare.SerializeToString() != full.SerializeToString()
    assert EngineEvent.FromString(full.SerializeToString()).step.HasField("index")
    assert "index" not in json_format.MessageToDict(bare)["step"]
    assert json_format.MessageToDict(full)["step"]["index"] == 0


def test_protobuf_writes_only_what_is_not_empty() -> None:
    """In the binary form and in protobuf JSON an empty field takes no room; an empty payload still says its kind."""
    assert make_delta("").SerializeToString().hex() == "5200"
    assert make_done(message_id="", conversation_id="").SerializeToString().hex() == "6a00"
    assert json_format.MessageToDict(make_delta("")) == {"delta": {}}
    assert make_step("skill", args={}, diagnosis=Diagnosis(), node={}).step.step == Step(kind=2, node=Node())


@pytest.mark.parametrize(
    "event",
    [
        EngineEvent(),
        EngineEvent(seq=3),
        EngineEvent(step={"step": {"kind": 99, "name": "n"}}),
        EngineEvent(step={"step": {"name": "n"}}),
        EngineEvent(step={}),
        EngineEvent.FromString(bytes.fromhex("0801fa01020a00")),
    ],
)
def test_event_newer_than_this_code_has_no_wire_form(event: EngineEvent) -> None:
    """Adapters skip it; nothing half-known is written."""
    assert to_wire(event) is None
    assert to_text(event) == ""


def test_done_is_never_dropped_because_of_a_step() -> None:
    """Clients wait for done, so a step of unknown kind is left out of it and nothing more."""
    event = EngineEvent(done={"content": "a", "process_steps": [{"kind": 99}, {"kind": 2, "name": "n"}]})
    wire = to_wire(event)
    assert wire is not None
    assert wire["process_steps"] == [{"type": "skill", "name": "n", "args": {}, "result": ""}]


def test_engine_event_passes_from_wire_unchanged() -> None:
    """The very same object comes back, whatever is in it."""
    for event in (make_delta("a"), EngineEvent(), EngineEvent(seq=-5)):
        assert from_wire(event) is event


@pytest.mark.parametrize("number", [-1, -(2**31), -(2**40), 2**31, 2**70, True, 1.0, "1", None])
def test_number_out_of_range_is_unset_in_the_message(number: object) -> None:
    """A position that no engine gives is no position, in the message as on the wire."""
    step = from_wire({"type": "step", "step": {"type": "skill"}, "index": number, "seq": number})
    assert step is not None
    assert (step.seq, step.step.HasField("index")) == (0, False)
    assert from_wire({"type": "rewind", "content": "a", "attempt": number}) == make_rewind("a")
