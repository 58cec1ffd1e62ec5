"""Events in every shape there is: the wire round trip, and payloads nobody foresaw."""

import json
import math
import re

from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualclaw import Diagnosis, EngineEvent, InterruptItem, Node, Step, StepEvent, Usage
from dualclaw.events import canonical_json, from_wire, to_text, to_wire

# Time says nothing here: the machine may be busy with other things.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

TEXT = st.one_of(st.just(""), st.text(max_size=12))
INT32 = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-2, 5))
ENUM = st.integers(0, 12) | st.just(2**31 - 1)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
OBJECTS = st.dictionaries(
    TEXT,
    st.recursive(SCALARS | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)),
    max_size=3,
)
ARGS = st.one_of(st.just(""), OBJECTS.map(canonical_json), TEXT, st.sampled_from(['{"a":1e999}', "[]", '{"a":NaN}']))
DIAGNOSES = st.builds(
    Diagnosis, code=TEXT, severity=ENUM, summary=TEXT, detail=TEXT, hint=TEXT, retryable=st.booleans()
)
STEPS = st.builds(
    Step,
    kind=ENUM,
    name=TEXT,
    text=TEXT,
    server=TEXT,
    args_json=ARGS,
    result=TEXT,
    phase=ENUM,
    diagnosis=st.none() | DIAGNOSES,
    node=st.none() | st.builds(Node, id=TEXT, type=TEXT, label=TEXT),
    call_id=TEXT,
    parent_call_id=TEXT,
)
TIMES = st.builds(
    Timestamp,
    seconds=st.integers(-(2**63), 2**63 - 1) | st.integers(-62135596800, 253402300799),
    nanos=INT32 | st.integers(0, 999_999_999),
)
ITEMS = st.builds(
    InterruptItem,
    id=TEXT,
    kind=ENUM,
    tool_name=TEXT,
    args_json=ARGS,
    prompt=TEXT,
    allowed_actions=st.lists(ENUM, max_size=4),
    response_schema_json=ARGS,
    path=st.lists(TEXT, max_size=3),
    args_hash=TEXT,
    expire_time=st.none() | TIMES,
)
TEXTS = st.lists(TEXT, max_size=3)
PAYLOADS = st.one_of(
    st.fixed_dictionaries({"delta": st.fixed_dictionaries({"content": TEXT})}),
    st.fixed_dictionaries({"reasoning": st.fixed_dictionaries({"content": TEXT})}),
    st.fixed_dictionaries({"step": st.builds(StepEvent, step=st.none() | STEPS, index=st.none() | INT32)}),
    st.fixed_dictionaries(
        {
            "done": st.fixed_dictionaries(
                {
                    "message_id": TEXT,
                    "conversation_id": TEXT,
                    "content": TEXT,
                    "process_steps": st.lists(STEPS, max_size=3),
                    "used_skills": TEXTS,
                    "used_mcp": TEXTS,
                    "generating": st.booleans(),
                    "usage": st.none() | st.builds(Usage, input_tokens=st.none() | INT32),
                    "stop_reason": ENUM,
                }
            )
        }
    ),
    st.fixed_dictionaries({"error": st.fixed_dictionaries({"message": TEXT, "diagnosis": st.none() | DIAGNOSES})}),
    st.fixed_dictionaries({"interrupt": st.fixed_dictionaries({"items": st.lists(ITEMS, max_size=3)})}),
    st.fixed_dictionaries(
        {"rewind": st.fixed_dictionaries({"content": TEXT, "reasoning": TEXT, "reason": TEXT, "attempt": INT32})}
    ),
    st.just({}),
)
EVENTS = st.builds(
    lambda payload, meta: EngineEvent(**payload, **meta),
    PAYLOADS,
    st.fixed_dictionaries({"seq": INT32, "trace_id": TEXT, "tenant_id": TEXT, "claw": TEXT, "run_id": TEXT}),
)

WEIRD_TEXT = st.text(st.characters(codec=None) | st.characters(codec=None, categories=("Cs",)), max_size=6)
WEIRD_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | WEIRD_TEXT
    | st.binary(max_size=3)
    | st.sampled_from([5000, 50]).map(lambda digits: 10**digits)
)
WEIRD = st.recursive(
    WEIRD_SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(WEIRD_TEXT | st.integers() | st.none(), inner, max_size=4)
    ),
)
TYPES = ["delta", "reasoning", "step", "done", "error", "interrupt", "rewind", "thinking", "skill", "mcp", "approval"]
KEYS = re.findall(
    r"\w+",
    "content message_id conversation_id process_steps used_skills used_mcp generating message diagnosis items index "
    "seq trace_id tenant_id claw run_id reasoning reason attempt id kind tool_name args prompt allowed_actions "
    "response_schema path args_hash expire_time type text server name result phase node label code severity summary "
    "detail hint retryable",
)


def shaped(inner: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    """Dicts that look like parts of events and hold anything."""
    keys = st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    return st.builds(lambda kind, rest: {**rest, "type": kind}, st.sampled_from(TYPES) | inner, keys)


PAYLOAD_LIKE = shaped(WEIRD | shaped(WEIRD | st.lists(shaped(WEIRD), max_size=3)) | st.lists(shaped(WEIRD), max_size=3))
STEP_LIKE = st.builds(lambda step, rest: {**rest, "type": "step", "step": step}, shaped(WEIRD), shaped(WEIRD))


@calm
@given(EVENTS)
def test_wire_survives_being_read(event: EngineEvent) -> None:
    """For every event: reading its wire and writing it again gives the same, to the byte."""
    wire = to_wire(event)
    if wire is None:
        return
    again = from_wire(wire)
    assert again is not None
    assert to_wire(again) == wire
    assert json.dumps(to_wire(again), ensure_ascii=False) == json.dumps(wire, ensure_ascii=False)


@calm
@given(EVENTS)
def test_wire_is_plain_json(event: EngineEvent) -> None:
    """A wire dict holds JSON values only: it can be printed strictly, encoded and parsed without loss."""
    wire = to_wire(event)
    text = json.dumps(wire, ensure_ascii=False, allow_nan=False)
    assert json.loads(text.encode()) == wire
    assert isinstance(to_text(event), str)


@calm
@given(WEIRD | PAYLOAD_LIKE | STEP_LIKE)
def test_reading_never_fails(payload: object) -> None:
    """Any payload gives an event or None, and the event's wire is clean and stable."""
    event = from_wire(payload)
    if event is None:
        return
    wire = to_wire(event)
    assert wire is not None
    json.dumps(wire, ensure_ascii=False, allow_nan=False).encode()
    again = from_wire(wire)
    assert again is not None
    assert to_wire(again) == wire


def test_payload_that_contains_itself_is_read() -> None:
    """Arguments without end read as none."""
    cycle: dict[str, object] = {"type": "skill", "name": "n", "b": math.nan}
    cycle["args"] = cycle
    event = from_wire({"type": "step", "step": cycle})
    assert event is not None
    assert event.step.step == Step(kind=2, name="n")


def test_payload_of_any_depth_is_read() -> None:
    """Nesting beyond the interpreter's recursion limit is no error, wherever it stands."""
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    step = {"type": "skill", "name": deep, "args": {"a": deep}, "node": {"id": deep}, "diagnosis": {"code": deep}}
    event = from_wire({"type": "step", "step": step, "index": deep, "seq": deep})
    assert event == EngineEvent(step={"step": {"kind": 2}})
    assert from_wire({"type": "done", "process_steps": deep, "used_mcp": deep}) is not None
    assert from_wire({"type": "interrupt", "items": [{"args": {"a": deep}, "path": deep}]}) is not None
