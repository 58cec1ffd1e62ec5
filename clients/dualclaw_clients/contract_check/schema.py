"""A contract as the judges see it: a FileDescriptorSet, with everything in it by its full name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

OURS: Final = "dualclaw."
"""Beginning of the packages whose names the wire format is made of."""
EVENT: Final = "dualclaw.v1.EngineEvent"


@dataclass(frozen=True)
class Field:
    """A field of a message."""

    message: str
    """Full name of its message."""
    proto: FieldDescriptorProto
    oneof: str
    """Name of the oneof it is in; "" for none. A proto3 optional is in none."""

    @property
    def name(self) -> str:
        """Its full name."""
        return f"{self.message}.{self.proto.name}"

    @property
    def is_repeated(self) -> bool:
        """Whether it is a list or a map."""
        return self.proto.label == FieldDescriptorProto.LABEL_REPEATED

    @property
    def has_presence(self) -> bool:
        """Whether readers can tell that it was not set."""
        is_message = self.proto.type == FieldDescriptorProto.TYPE_MESSAGE
        return not self.is_repeated and (self.proto.proto3_optional or bool(self.oneof) or is_message)

    @property
    def kind(self) -> str:
        """Its type in words."""
        name = self.proto.type_name.removeprefix(".")
        plain = FieldDescriptorProto.Type.Name(self.proto.type).removeprefix("TYPE_").lower()
        return f"repeated {name or plain}" if self.is_repeated else name or plain


@dataclass(frozen=True)
class Schema:
    """Everything a contract declares."""

    files: FileDescriptorSet

    @cached_property
    def file_of(self) -> Mapping[str, FileDescriptorProto]:
        """Its files by path, without what it imports from elsewhere."""
        return {file.name: file for file in self.files.file if not file.name.startswith("google/")}

    @cached_property
    def messages(self) -> Mapping[str, DescriptorProto]:
        """Its messages, those inside others included; map entries are none."""
        return {
            name: message
            for file in self.file_of.values()
            for name, message in _messages(file.package, file.message_type)
        }

    @cached_property
    def enums(self) -> Mapping[str, EnumDescriptorProto]:
        """Its enums, those inside messages included."""
        found = {f"{file.package}.{enum.name}": enum for file in self.file_of.values() for enum in file.enum_type}
        for name, message in self.messages.items():
            found |= {f"{name}.{enum.name}": enum for enum in message.enum_type}
        return found

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """The fields of its messages by full name."""
        found = [
            Field(name, proto, _oneof(message, proto))
            for name, message in self.messages.items()
            for proto in message.field
        ]
        return {field.name: field for field in found}

    @cached_property
    def by_number(self) -> Mapping[tuple[str, int], Field]:
        """The fields of its messages by message and number, which is what bytes know."""
        return {(field.message, field.proto.number): field for field in self.fields.values()}


def _messages(scope: str, messages: Iterable[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
    for message in messages:
        if not message.options.map_entry:
            name = f"{scope}.{message.name}"
            yield name, message
            yield from _messages(name, message.nested_type)


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return message.oneof_decl[field.oneof_index].name
