"""Recordings of vendors' answers, replayed as if the vendor gave them.

A recording is the body of an HTTP answer as it came, in a file of its own, and beside it ``FILE.json``, which
says what it is (``RecordingNote``; ``record`` writes both). Rules and their reasons:

- The replay goes through the very code that talks to the vendor: the request is translated, the HTTP answer read,
  the stream folded, every wait bounded. Only the bytes come from a file. So an agent that is tested offline meets
  whatever the vendor's stream has met: pieces cut anywhere, a broken end, an error in the middle, a 429.
- A recording stands without its note too, if its API is told; then it is a 200 and an event stream.
- It is read when the script is read, so what is missing or wrong is found before anything runs.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import httpx
import msgspec

from dualclaw_server.models.anthropic.api import AnthropicApi
from dualclaw_server.models.api import Api
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.endpoint import Endpoint, ModelTimeouts
from dualclaw_server.models.history import ApiName
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.responses.api import ResponsesApi

API_NAMES: Sequence[ApiName] = get_args(ApiName)

Splits = Literal["recorded"] | Sequence[int]
"""How the body is cut: as it came, or in pieces of these sizes, the last of them again and again; (): not at all."""

_EVENT_STREAM = {"content-type": "text/event-stream"}
_NO_HOST = "http://recording.invalid"


class RecordingError(ValueError):
    """A recording cannot be replayed; the text says which and why."""


class RecordingNote(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a recording: the JSON beside it. Has no secret in it."""

    api: ApiName
    vendor: str = ""
    """Name of the vendor, as a setting calls it."""
    model: str = "recorded"
    """The model's name at the vendor."""
    time: str = ""
    """When it was recorded, RFC 3339."""
    status: int = 200
    """HTTP status."""
    headers: dict[str, str] = msgspec.field(default_factory=lambda: dict(_EVENT_STREAM))
    """The headers of the answer that mean something to a client."""
    chunks: tuple[int, ...] = ()
    """Bytes of each piece, as they were read; together the whole file."""
    request: msgspec.Raw = msgspec.Raw(b"null")
    """The body of the request."""


@dataclass(frozen=True, slots=True)
class Recording:
    """An answer to be replayed, ``delay`` seconds between its pieces."""

    note: RecordingNote
    pieces: Sequence[bytes] = field(repr=False)
    delay: float = 0.0

    def model(self) -> HttpChatModel:
        """Return a model whose vendor gives this answer to everything. Close it."""
        api = api_named(self.note.api)
        endpoint = Endpoint(_NO_HOST, api.path, "", timeouts=ModelTimeouts(), transport=_Transport(self))
        return HttpChatModel(self.note.model, endpoint, api)


def note_path(recording: Path) -> Path:
    """Return where the note of a recording is."""
    return recording.with_name(f"{recording.name}.json")


def api_named(name: ApiName) -> Api:
    """Return a wire API as its own vendor speaks it."""
    match name:
        case "chat":
            return ChatApi()
        case "responses":
            return ResponsesApi()
        case "anthropic":
            return AnthropicApi()


def load_recording(path: Path, *, api: str | None = None, splits: Splits = (), delay: float = 0.0) -> Recording:
    """Read a recording.

    Args:
        path: the file with the body; its note is looked for beside it.
        api: name of the wire API; None: the note says it.
        splits: how the body is cut.
        delay: seconds before each piece but the first.

    Raises:
        RecordingError: a file cannot be read, or the note and what is asked do not fit.
    """
    if api is not None and api not in API_NAMES:
        raise RecordingError(f"api must be one of {', '.join(API_NAMES)}")
    try:
        body = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    note = _read_note(note_path(path))
    if note is None:
        if api is None:
            raise RecordingError(f"api is missing: {note_path(path).name}, which would say it, is not there")
        note = msgspec.convert({"api": api}, RecordingNote)
    elif api is not None and api != note.api:
        raise RecordingError(f"api is {api}, but {note_path(path).name} says {note.api}")
    if splits == "recorded":
        if sum(note.chunks) != len(body):
            raise RecordingError(f"{note_path(path).name} does not say how {path.name} was split")
        return Recording(note, _cut(body, note.chunks), delay)
    return Recording(note, _cut(body, splits), delay)


def _read_note(path: Path) -> RecordingNote | None:
    try:
        note = msgspec.json.decode(path.read_bytes(), type=RecordingNote)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise RecordingError(f"{path} is no note of a recording: {error}") from None
    if not 200 <= note.status <= 599 or any(size < 0 for size in note.chunks):
        raise RecordingError(f"{path} is no note of a recording: status and chunks are out of range")
    return note


def _cut(body: bytes, sizes: Sequence[int]) -> Sequence[bytes]:
    pieces: list[bytes] = []
    at = number = 0
    while at < len(body):
        size = sizes[min(number, len(sizes) - 1)] if sizes else len(body)
        pieces.append(body[at : at + max(1, size)])
        at += max(1, size)
        number += 1
    return pieces


class _Transport(httpx.AsyncBaseTransport):
    """A vendor that gives one answer, whatever it is asked."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        note = self._recording.note
        return httpx.Response(note.status, headers=_usable(note.headers), stream=_Body(self._recording))


class _Body(httpx.AsyncByteStream):
    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number, piece in enumerate(self._recording.pieces):
            # Without a delay the loop still gets its turn, so that a long recording can be cancelled.
            await asyncio.sleep(self._recording.delay if number else 0)
            yield piece


def _usable(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers but those that speak of the connection or of a coding that is undone already."""
    gone = ("content-encoding", "content-length", "transfer-encoding", "connection")
    return {name: value for name, value in headers.items() if name.lower() not in gone}
