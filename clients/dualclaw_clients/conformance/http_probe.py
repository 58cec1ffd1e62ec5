"""HTTP/1.1 to a web gateway, read byte by byte: an HTTP library would mend or hide what the kit looks for.

One connection for each request. A response is read as far as it goes; what breaks HTTP itself is a fault that is
told, and nothing is tried twice.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from dualclaw_clients.conformance.seen import Frame, HttpExchange
from dualclaw_clients.conformance.web_seen import read_frames

HEAD_LIMIT = 64 * 1024
MOST_BYTES = 4 * 1024 * 1024
"""Bytes of a body that are read; no scenario has a quarter of it."""
_PIECE = 64 * 1024
_CONNECT_TIMEOUT = 10.0


class HttpFault(Exception):
    """What came is no HTTP."""


@dataclass(slots=True)
class _Head:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class OpenResponse:
    """A response that is being read."""

    def __init__(self, request: str, reader: asyncio.StreamReader, limit: float) -> None:
        self._reader = reader
        self._limit = limit
        self._seen = HttpExchange(request)
        self._body = bytearray()
        self._ended = False
        self._chunks: AsyncIterator[bytes] | None = None

    @property
    def frames(self) -> Sequence[Frame]:
        """The whole frames that have come so far."""
        return read_frames(bytes(self._body), complete=False)[0]

    @property
    def head(self) -> HttpExchange:
        """The response without its body."""
        return self._seen

    async def read_head(self) -> bool:
        """Read status and headers; False when none come in time."""
        try:
            async with asyncio.timeout(self._limit):
                head = await _read_head(self._reader)
        except TimeoutError:
            self._end(late=True)
            return False
        except asyncio.IncompleteReadError as error:
            self._end(cut=f"there is no response: the connection ends after {len(error.partial)} bytes")
            return False
        except (OSError, asyncio.LimitOverrunError, HttpFault) as error:
            self._end(cut=f"there is no response: {error}")
            return False
        self._seen = replace(self._seen, status=head.status, headers=head.headers)
        self._chunks = _chunks(self._reader, head)
        return True

    async def until(self, enough: Callable[[Sequence[Frame]], bool], limit: float = 0) -> bool:
        """Read until the frames are enough; False when the response ended, or its time, before that."""
        with contextlib.suppress(TimeoutError):
            async with self._in_time(limit or self._limit):
                while not enough(self.frames):
                    if self._ended or not await self._read():
                        return False
                return True
        return False

    @contextlib.asynccontextmanager
    async def _in_time(self, limit: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(limit) as clock:
                yield
        finally:
            if clock.expired():
                self._seen = replace(self._seen, late=True)
                self._ended = True

    async def rest(self) -> HttpExchange:
        """Read to the end and return the exchange."""
        with contextlib.suppress(TimeoutError):
            async with self._in_time(self._limit):
                while not self._ended and await self._read():
                    pass
        return self.leave()

    def leave(self) -> HttpExchange:
        """Return what has come."""
        body = bytes(self._body)
        if self._seen.headers.get("content-type", "").startswith("text/event-stream"):
            frames, faults = read_frames(body, complete=self._seen.complete)
            return replace(self._seen, body=body, frames=frames, faults=faults)
        return replace(self._seen, body=body)

    async def _read(self) -> bool:
        if self._chunks is None:
            return False
        try:
            self._body += await anext(self._chunks)
        except StopAsyncIteration:
            self._end(complete=True)
            return False
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, HttpFault) as error:
            self._end(cut=f"the response breaks off after {len(self._body)} bytes of its body: {error}")
            return False
        if len(self._body) > MOST_BYTES:
            self._end(cut=f"the response was left after {len(self._body)} bytes, for it has no end")
            return False
        return True

    def _end(self, *, complete: bool = False, late: bool = False, cut: str = "") -> None:
        self._seen = replace(self._seen, complete=complete, late=late or self._seen.late, cut=cut)
        self._ended = True


class HttpProbe:
    """The gateway under test.

    Args:
        url: ``http://HOST:PORT`` or ``https://...``, with a path before the routes if there is one.
        key: shown as ``Authorization: Bearer KEY``; "" for none.
        context: of TLS; None: the system's authorities.
        timeout: seconds any response may take.
    """

    def __init__(
        self, url: str, *, key: str = "", context: ssl.SSLContext | None = None, timeout: float = 30.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
        self.url = url
        self.timeout = timeout
        self._host, self._authority = parts.hostname, parts.netloc.rpartition("@")[2]
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._tls = (context or ssl.create_default_context()) if parts.scheme == "https" else None
        self.key = key

    @contextlib.asynccontextmanager
    async def open(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[OpenResponse]:
        """Send a request and read the head; leaving the block hangs up. ``body``: JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {
            "host": self._authority,
            "connection": "close",
            "accept-encoding": "gzip, br",
            "content-length": str(len(data)),
            **({"content-type": "application/json"} if data else {}),
            **({"authorization": f"Bearer {self.key}"} if self.key else {}),
            **(headers or {}),
        }
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items())
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=HEAD_LIMIT)
        try:
            writer.write(f"{head}\r\n".encode("latin-1") + data)
            response = OpenResponse(f"{method} {path}", reader, self.timeout)
            await response.read_head()
            yield response
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def send(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> HttpExchange:
        """Send a request and read its whole response."""
        async with self.open(method, path, body, headers) as response:
            return await response.rest()


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise HttpFault(f"{first[:80]!r} is no status line")
    head = _Head(int(rest[:3]))
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise HttpFault(f"{line[:80]!r} is no header")
        head.headers[name.strip().lower()] = value.strip()
    return head


async def _chunks(reader: asyncio.StreamReader, head: _Head) -> AsyncIterator[bytes]:
    """Yield the body as it comes."""
    if head.status in {204, 304}:
        return
    length = head.headers.get("content-length")
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        while size := _number((await reader.readuntil(b"\r\n"))[:-2].split(b";")[0].strip(), 16, "size of a chunk"):
            async for data in _exactly(reader, size):
                yield data
            if await reader.readexactly(2) != b"\r\n":
                raise HttpFault("a chunk is longer than it says")
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # a trailer
    elif length is not None:
        async for data in _exactly(reader, _number(length.encode(), 10, "content-length")):
            yield data
    else:
        while data := await reader.read(_PIECE):
            yield data


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    """Yield so many bytes, in pieces: what a server announces may be larger than all memory."""
    while size:
        data = await reader.read(min(size, _PIECE))
        if not data:
            raise HttpFault(f"{size} bytes are missing")
        size -= len(data)
        yield data


def _number(text: bytes, base: int, what: str) -> int:
    try:
        if not text.isalnum():  # int() takes signs and underscores
            raise ValueError
        return int(text, base)
    except ValueError:
        raise HttpFault(f"{text[:40]!r} is no {what}") from None
