"""Golden vectors against a schema: what was written under the baseline must read, and be written, the same.

A vector is an event as bytes and as protobuf JSON, with the texts made of it. Both schemas read the bytes; if they see
different events, stored logs have changed their meaning. Vectors of the baseline may also be held against those of the
change: texts that differ are a change of the wire format, whoever made it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError, Message

from dualclaw_clients.contract_check.findings import Finding
from dualclaw_clients.contract_check.schema import EVENT, Schema

Vector = Mapping[str, object]

WHO: Final = {
    "VECTOR_BYTES": "Stored logs and older clients: bytes they have written or will be sent mean something else now.",
    "VECTOR_JSON": "Clients of the native routes and stored protobuf JSON: this event is no longer taken as it is.",
    "VECTOR_REMOVED": "Every client that is tested with the vectors: this behaviour is no longer promised.",
    "VECTOR_CHANGED": "Old front-ends and clients in every language: they write and expect the text of the baseline.",
}
_TEXTS: Final = ("binary", "wire", "frame", "to_text")


class VectorError(Exception):
    """A folder holds no usable vectors."""


def load(folder: Path) -> dict[str, Vector]:
    """Return the vectors of a folder by name. Raises VectorError."""
    found: dict[str, Vector] = {}
    for path in [*sorted(folder.glob("*.json")), folder / "inputs" / "from_binary.json"]:
        if not path.is_file():
            continue
        try:
            entries = json.loads(path.read_text("utf-8"))
            for entry in entries:
                bytes.fromhex(entry["binary"])
                found[f"{path.stem}/{entry['name']}"] = entry
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise VectorError(f"{path} is no file of vectors: {error}") from None
    if not found:
        raise VectorError(f"{folder} holds no vectors")
    return found


def judge_schema(old: Schema, new: Schema, vectors: Mapping[str, Vector]) -> Iterator[Finding]:
    """Hold a schema against the vectors of the baseline."""
    before, now = _event_class(old), _event_class(new)
    if before is None or now is None:
        return
    for name, vector in vectors.items():
        data = bytes.fromhex(str(vector["binary"]))
        was, is_now = _read(before, data), _read(now, data)
        if was != is_now:
            yield _finding("VECTOR_BYTES", name, f"its bytes read as {_short(is_now)}, and as {_short(was)} before")
        written = vector.get("event")
        if not isinstance(written, dict):
            continue
        try:
            event = json_format.ParseDict(written, now())
        except json_format.ParseError as error:
            yield _finding("VECTOR_JSON", name, f"its protobuf JSON is refused: {_short(str(error))}")
            continue
        if event.SerializeToString(deterministic=True) != data:
            yield _finding("VECTOR_JSON", name, "its protobuf JSON gives other bytes")


def judge_vectors(old: Mapping[str, Vector], new: Mapping[str, Vector]) -> Iterator[Finding]:
    """Hold the vectors of a change against those of the baseline; more of them are welcome."""
    for name, vector in old.items():
        now = new.get(name)
        if now is None:
            yield _finding("VECTOR_REMOVED", name, "is gone")
            continue
        for text in _TEXTS:
            if text in vector and vector[text] != now.get(text):
                yield _finding(
                    "VECTOR_CHANGED", name, f"its {text} is {_short(now.get(text))}, not {_short(vector[text])}"
                )


def _event_class(schema: Schema) -> type[Message] | None:
    pool = descriptor_pool.DescriptorPool()
    for file in schema.files.file:
        pool.Add(file)
    try:
        descriptor = pool.FindMessageTypeByName(EVENT)
    except KeyError:
        return None
    return message_factory.GetMessageClass(descriptor)


def _read(kind: type[Message], data: bytes) -> object:
    try:
        return json_format.MessageToDict(kind.FromString(data), preserving_proto_field_name=True)
    except (DecodeError, json_format.SerializeToJsonError) as error:
        return f"unreadable ({type(error).__name__})"


def _finding(rule: str, name: str, what: str) -> Finding:
    return Finding(rule, f"vector {name}", what, WHO[rule])


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 120 else f"{text[:117]}..."
