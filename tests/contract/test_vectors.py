"""Python's side of the golden vectors: the same files every other language reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from dualclaw import EngineEvent
from dualclaw.events import from_wire, to_text, to_wire

FOLDER = Path(__file__).resolve().parents[2] / "proto" / "vectors"
Vector = dict[str, Any]


def load(folder: Path) -> list[Vector]:
    """The vectors of all files of a folder."""
    return [vector for path in sorted(folder.glob("*.json")) for vector in json.loads(path.read_text(encoding="utf-8"))]


EVENTS = load(FOLDER)
by_name = pytest.mark.parametrize("vector", EVENTS, ids=lambda v: v["name"])


def text_of(wire: object) -> str | None:
    """A wire dict as the frame writer prints it."""
    return None if wire is None else json.dumps(wire, ensure_ascii=False)


def original_frame(wire: dict[str, object] | None) -> str | None:
    """The frame of the original route: five types, the envelope gone but for the trace id of what ends a segment."""
    if wire is None or wire["type"] in ("interrupt", "rewind"):
        return None
    kept = {"trace_id"} if wire["type"] in ("done", "error") else set()
    thin = {k: v for k, v in wire.items() if k in kept or k not in ("seq", "trace_id", "tenant_id", "claw", "run_id")}
    return f"data: {json.dumps(thin, ensure_ascii=False)}\n\n"


@by_name
def test_binary_and_protobuf_json_are_the_same_event(vector: Vector) -> None:
    """The bytes are the event, and the event gives the bytes."""
    event = json_format.ParseDict(vector["event"], EngineEvent())
    assert event.SerializeToString(deterministic=True).hex() == vector["binary"]
    assert EngineEvent.FromString(bytes.fromhex(vector["binary"])) == event


@by_name
def test_wire_text_is_exact(vector: Vector) -> None:
    """Keys, their order, spaces, escapes and numbers are those of the vector."""
    assert text_of(to_wire(EngineEvent.FromString(bytes.fromhex(vector["binary"])))) == vector["wire"]


@by_name
def test_frame_is_exact(vector: Vector) -> None:
    """The frame of the original route, byte for byte."""
    assert original_frame(to_wire(EngineEvent.FromString(bytes.fromhex(vector["binary"])))) == vector["frame"]


@by_name
def test_plain_text_is_exact(vector: Vector) -> None:
    """What a channel without structure shows."""
    assert to_text(EngineEvent.FromString(bytes.fromhex(vector["binary"]))) == vector["to_text"]


@pytest.mark.parametrize("vector", [v for v in EVENTS if v["wire"] is not None], ids=lambda v: v["name"])
def test_reading_the_wire_back_loses_nothing_of_it(vector: Vector) -> None:
    """Wire to event to wire gives the same text."""
    event = from_wire(json.loads(vector["wire"]))
    assert event is not None
    assert text_of(to_wire(event)) == vector["wire"]


@pytest.mark.parametrize("vector", json.loads((FOLDER / "inputs/from_wire.json").read_text()), ids=lambda v: v["name"])
def test_foreign_payload_is_lifted(vector: Vector) -> None:
    """Whatever a producer sent becomes the event of the vector, or none."""
    event = from_wire(json.loads(vector["input"]))
    assert (None if event is None else text_of(to_wire(event))) == vector["wire"]


@pytest.mark.parametrize(
    "vector", json.loads((FOLDER / "inputs/from_binary.json").read_text()), ids=lambda v: v["name"]
)
def test_bytes_of_other_engines_are_read(vector: Vector) -> None:
    """Bytes of newer engines, and bytes that no engine should send, have the wire form of the vector."""
    assert text_of(to_wire(EngineEvent.FromString(bytes.fromhex(vector["binary"])))) == vector["wire"]


def test_the_frame_of_46_bytes_is_among_them() -> None:
    """The one frame the contract spells out, measured in bytes."""
    frames = [vector["frame"] for vector in EVENTS if vector["frame"]]
    (exact,) = (frame for frame in frames if frame == 'data: {"type": "delta", "content": "你好"}\n\n')
    assert len(exact.encode()) == 46


def test_vectors_are_what_their_sources_say(python: Any, root: Path) -> None:
    """The committed files are those that the hand-written sources give."""
    done = python("proto/vectors/generate.py", "--check", cwd=root)
    assert done.returncode == 0, done.stderr


def test_generator_does_not_use_what_it_tests() -> None:
    """The vectors are written without the package under test, but for the message that gives the binary."""
    lines = [line for path in FOLDER.glob("*.py") for line in path.read_text().splitlines() if "dualclaw" in line]
    assert [line for line in lines if line.startswith(("import", "from"))] == ["from dualclaw import EngineEvent"]


def test_every_kind_of_event_and_step_has_vectors() -> None:
    """No event kind, step kind, phase or severity is without a vector."""
    payloads = {key for vector in EVENTS for key in vector["event"]}
    assert {field.name for field in EngineEvent.DESCRIPTOR.fields} <= payloads
    text = json.dumps([vector["event"] for vector in EVENTS])
    for enum in ("StepKind", "Phase", "Severity", "InterruptKind", "DecisionAction"):
        for name in EngineEvent.DESCRIPTOR.file.enum_types_by_name[enum].values_by_name:
            assert name in text or name.endswith("_UNSPECIFIED"), name


def test_every_vector_has_the_fields_the_contract_names() -> None:
    """A reader in any language may take every file of the folder and find the same keys in each entry."""
    assert {tuple(vector) for vector in EVENTS} == {("name", "event", "binary", "wire", "frame", "to_text")}


def test_names_are_unique() -> None:
    """A name finds one vector."""
    names = [vector["name"] for vector in EVENTS]
    assert len(names) == len(set(names))
