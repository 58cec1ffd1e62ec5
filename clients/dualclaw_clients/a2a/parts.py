"""Parts of messages on both sides: what an A2A part is to the engine, and how things are said in A2A."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from a2a.types.a2a_pb2 import ROLE_AGENT, Part, SendMessageConfiguration
from a2a.types.a2a_pb2 import Message as A2aMessage
from a2a.utils.errors import ContentTypeNotSupportedError
from google.protobuf import json_format, struct_pb2

from dualclaw import ContentPart, Media

OUTPUT_MODES: Final = ("text/plain", "application/json")
INPUT_MODES: Final = ("text/plain", "application/json", "image/*", "*/*")


def content_parts(parts: Iterable[Part]) -> list[ContentPart]:
    """Return an A2A message's parts as the engine takes them; data is given to it as JSON text.

    Raises:
        ContentTypeNotSupportedError: a part holds nothing this code knows.
    """
    found = []
    for number, part in enumerate(parts):
        match part.WhichOneof("content"):
            case "text":
                found.append(ContentPart(text=part.text))
            case "data":
                found.append(ContentPart(text=data_json(part)))
            case "raw":
                found.append(_media(part, Media(data=part.raw)))
            case "url":
                found.append(_media(part, Media(url=part.url)))
            case _:
                raise ContentTypeNotSupportedError(
                    f"parts[{number}] is empty or newer than this server; give text, data, raw or url"
                )
    return found


def _media(part: Part, media: Media) -> ContentPart:
    media.media_type = part.media_type or "application/octet-stream"
    media.name = part.filename
    return ContentPart(image=media) if media.media_type.startswith("image/") else ContentPart(file=media)


def check_output_modes(configuration: SendMessageConfiguration) -> None:
    """Check that the caller can take what comes back.

    Raises:
        ContentTypeNotSupportedError: none of the types it accepts is one of ``OUTPUT_MODES``.
    """
    accepted = [mode.partition(";")[0].strip().lower() for mode in configuration.accepted_output_modes]
    if accepted and not {"text/plain", "text/*", "*/*"} & set(accepted):
        raise ContentTypeNotSupportedError(f"answers are text/plain, and only {', '.join(accepted)} is accepted")


def data_value(part: Part) -> object:
    """Return the value of a data part as Python's JSON values; numbers are doubles in A2A, whole ones come as int."""
    return _whole(json_format.MessageToDict(part.data))


def _whole(value: object) -> object:
    match value:
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case list():
            return [_whole(each) for each in value]
        case dict():
            return {name: _whole(each) for name, each in value.items()}
    return value


def data_json(part: Part) -> str:
    """Return the value of a data part as JSON text, always the same: maps of protobuf come in any order."""
    return json.dumps(data_value(part), ensure_ascii=False, sort_keys=True)


def text_part(text: str) -> Part:
    """Return a part of text."""
    return Part(text=text, media_type="text/plain")


def data_part(value: Mapping[str, object]) -> Part:
    """Return a part of data."""
    return Part(data=json_format.ParseDict(dict(value), struct_pb2.Value()), media_type="application/json")


def agent_message(task_id: str, context_id: str, message_id: str, parts: Sequence[Part]) -> A2aMessage:
    """Return a message of the agent about a task."""
    return A2aMessage(message_id=message_id, task_id=task_id, context_id=context_id, role=ROLE_AGENT, parts=parts)
