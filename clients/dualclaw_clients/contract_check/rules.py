"""The rules beyond buf, as one table: what protobuf allows and readers of this contract do not survive.

buf knows bytes and generated code. It does not know that the wire format is made of the names of enum values, that old
front-ends read certain keys in every event, or that protobuf JSON turns 64-bit integers into text. A judge is pure: two
schemas in, findings out. Where buf refuses the same change, both speak: buf names the line, the rule here says who
would notice.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from dualclaw_clients.contract_check.findings import Finding
from dualclaw_clients.contract_check.schema import EVENT, OURS, Schema

Found = Iterator[tuple[str, str]]
"""Pairs of where and what."""

WIRE_KEYS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "dualclaw.v1.Delta": ("content",),
        "dualclaw.v1.Reasoning": ("content",),
        "dualclaw.v1.StepEvent": ("step", "index"),
        "dualclaw.v1.Step": ("kind", "name", "text", "server", "args_json", "result", "phase", "diagnosis", "node"),
        "dualclaw.v1.Diagnosis": ("code", "severity", "summary", "detail", "hint", "retryable"),
        "dualclaw.v1.Node": ("id", "type", "label"),
        "dualclaw.v1.Done": (
            "message_id", "conversation_id", "content", "process_steps", "used_skills", "used_mcp", "generating",
        ),
        "dualclaw.v1.Error": ("message", "diagnosis"),
        "dualclaw.v1.Interrupt": ("items",),
        "dualclaw.v1.InterruptItem": (
            "id", "kind", "tool_name", "args_json", "prompt", "allowed_actions", "response_schema_json", "path",
            "args_hash", "expire_time",
        ),
        "dualclaw.v1.Rewind": ("content", "reasoning", "reason", "attempt"),
        EVENT: ("seq", "trace_id", "tenant_id", "claw", "run_id"),
    }
)  # fmt: skip
"""Fields that stand behind the keys of the wire format."""
_LONG: Final = frozenset(
    {
        FieldDescriptorProto.TYPE_INT64, FieldDescriptorProto.TYPE_UINT64, FieldDescriptorProto.TYPE_SINT64,
        FieldDescriptorProto.TYPE_FIXED64, FieldDescriptorProto.TYPE_SFIXED64,
    }
)  # fmt: skip
_OPTIONS: Final = ("go_package", "java_package", "java_multiple_files")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    id: str
    """Its id, as findings and documentation name it."""
    text: str
    """What it demands."""
    who: str
    """What would break for whom if it did not hold."""
    judge: Callable[[Schema, Schema], Found]
    """Compares the baseline with the protos at hand."""


def judge(old: Schema, new: Schema) -> list[Finding]:
    """Return everything the rules find, in the order of the table."""
    return [Finding(rule.id, where, what, rule.who) for rule in RULES for where, what in rule.judge(old, new)]


def _presence_lost(old: Schema, new: Schema) -> Found:
    for number, field in old.by_number.items():
        now = new.by_number.get(number)
        if now and field.has_presence and not now.has_presence and not now.is_repeated:
            yield field.name, "was optional and no longer is"


def _presence_gained(old: Schema, new: Schema) -> Found:
    for number, field in old.by_number.items():
        now = new.by_number.get(number)
        if now and not field.has_presence and not field.is_repeated and now.has_presence:
            yield field.name, "is optional now and was not"


def _wire_key_lost(old: Schema, new: Schema) -> Found:
    for message, names in WIRE_KEYS.items():
        for name in names:
            if f"{message}.{name}" in old.fields and f"{message}.{name}" not in new.fields:
                number = old.fields[f"{message}.{name}"].proto.number
                now = new.by_number.get((message, number))
                yield f"{message}.{name}", f"is called {now.proto.name} now" if now else "is gone"


def _wire_key_retyped(old: Schema, new: Schema) -> Found:
    for message, names in WIRE_KEYS.items():
        for name in names:
            before, now = old.fields.get(f"{message}.{name}"), new.fields.get(f"{message}.{name}")
            if before and now and before.kind != now.kind:
                yield before.name, f"was {before.kind} and is {now.kind} now"


def _enum_name_changed(old: Schema, new: Schema) -> Found:
    for name, enum in old.enums.items():
        if (now := new.enums.get(name)) is None:
            continue
        names: dict[int, list[str]] = {}
        for value in now.value:
            names.setdefault(value.number, []).append(value.name)
        for value in enum.value:
            called = names.get(value.number)
            if called is None:
                yield f"{name}.{value.name}", "is gone"
            elif called[0] != value.name:
                yield f"{name}.{value.name}", f"is called {called[0]} now"


def _enum_name_prefix(old: Schema, new: Schema) -> Found:
    for name, enum in new.enums.items():
        if not name.startswith(OURS):
            continue
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", name.rpartition(".")[2]).upper() + "_"
        known = {value.name for value in old.enums[name].value} if name in old.enums else set()
        for value in enum.value:
            if value.name not in known and not value.name.startswith(prefix):
                yield f"{name}.{value.name}", f"does not begin with {prefix}"
            if value.name not in known and value.number == 0 and value.name != f"{prefix}UNSPECIFIED":
                yield f"{name}.{value.name}", f"is 0, which has to be {prefix}UNSPECIFIED"


def _long_integer(old: Schema, new: Schema) -> Found:
    for name, field in new.fields.items():
        before = old.fields.get(name)
        if name.startswith(OURS) and field.proto.type in _LONG and (before is None or before.proto.type not in _LONG):
            yield name, f"is {field.kind}; use int32, or string for an id"


def _outside_payload(old: Schema, new: Schema) -> Found:
    for name, field in new.fields.items():
        is_message = field.proto.type == FieldDescriptorProto.TYPE_MESSAGE and not field.is_repeated
        if field.message == EVENT and is_message and field.oneof != "payload":
            yield name, "stands beside the oneof payload"


def _file_options(old: Schema, new: Schema) -> Found:
    wanted: dict[str, list[str]] = {}
    for file in old.file_of.values():
        given = wanted.setdefault(file.package, list(_OPTIONS))
        wanted[file.package] = [option for option in given if file.options.HasField(option)]  # type: ignore[arg-type]
    for path, file in new.file_of.items():
        if path not in old.file_of:
            absent = [option for option in _wanted(file, wanted) if not file.options.HasField(option)]  # type: ignore[arg-type]
            if absent:
                yield path, f"is new and lacks {', '.join(absent)}"


def _wanted(file: FileDescriptorProto, known: Mapping[str, list[str]]) -> list[str]:
    """Return the options a new file needs: those its package has everywhere, or, in a new package, any package has."""
    if file.package in known:
        return known[file.package]
    return [option for option in _OPTIONS if known and all(option in options for options in known.values())]


RULES: Final = (
    Rule(
        "PRESENCE_LOST",
        "A field that tells unset from zero keeps telling it.",
        "Old front-ends: a step's index 0, or 0 tokens, can no longer be told from none. Go clients: a pointer becomes "
        "a value and does not compile. Stored logs: what was set to 0 reads as never set.",
        _presence_lost,
    ),
    Rule(
        "PRESENCE_GAINED",
        "A field that is always there stays always there.",
        "Go clients: a value becomes a pointer and does not compile. Writers in every language: a zero that used to be "
        "left out is written, so bytes, golden vectors and hashes of stored events differ.",
        _presence_gained,
    ),
    Rule(
        "WIRE_KEY_LOST",
        "A field behind a key of the wire format keeps its name.",
        "Old front-ends: they read this key in the event's JSON and find nothing. Older clients of the native route "
        "and stored protobuf JSON: the key is no longer understood.",
        _wire_key_lost,
    ),
    Rule(
        "WIRE_KEY_RETYPED",
        "A field behind a key of the wire format keeps its type.",
        "Old front-ends: the key holds a value of another JSON type. Go and Java clients: the getter has another type. "
        "Stored logs: old bytes are misread or dropped.",
        _wire_key_retyped,
    ),
    Rule(
        "ENUM_NAME_CHANGED",
        "A value of an enum keeps its name under its number.",
        "Old front-ends: the wire format writes values by their lower-case names, so they get a word they do not know. "
        "Clients in Go, Java and TypeScript: the constant is gone. Stored protobuf JSON: the old name is refused.",
        _enum_name_changed,
    ),
    Rule(
        "ENUM_NAME_PREFIX",
        "A new value begins with its enum's name, and 0 is UNSPECIFIED.",
        "Everybody who reads the wire format: its word is the value's name without the prefix, so this one comes out "
        "wrong or differs between languages. C++ and Go: values of two enums may clash.",
        _enum_name_prefix,
    ),
    Rule(
        "INTEGER_64_BIT",
        "No field is a 64-bit integer.",
        "Old front-ends and every JavaScript client: protobuf JSON writes it as text (\"5\"), and numbers beyond 2^53 "
        "lose digits.",
        _long_integer,
    ),
    Rule(
        "PAYLOAD_OUTSIDE_ONEOF",
        "A new kind of event is a member of the oneof payload.",
        "Readers that are older than it: they skip an event whose payload they do not know, but take this one for an "
        "event of another kind, or for one without content.",
        _outside_payload,
    ),
    Rule(
        "FILE_OPTIONS",
        "A new file has the Go and Java options its package has.",
        "Go and Java clients: its code lands in another package, and moving it later breaks every import.",
        _file_options,
    ),
)  # fmt: skip
"""The rules, in the order they are told."""
