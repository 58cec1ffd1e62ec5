"""A vendor to talk to: a loopback HTTP server whose every byte the test decides."""

import asyncio
import json
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import pytest

from dualclaw import ContentPart, Message, Role
from dualclaw_server.engine.model import (
    ChatModel,
    ModelError,
    ModelRequest,
    ModelResponse,
    ReasoningDelta,
    TextDelta,
)
from dualclaw_server.models.anthropic.api import AnthropicApi
from dualclaw_server.models.api import Api
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.chat.model import OpenAIChatModel
from dualclaw_server.models.endpoint import Endpoint, ModelTimeouts
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.responses.api import ResponsesApi

DEFAULT_SPLITS = 25
"""Random splits of each recording; the full run asks for more with DUALCLAW_TEST_SPLITS."""
PATIENCE = 60.0
"""Seconds a test waits for anything; only a test that fails needs so many."""
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@dataclass(slots=True)
class Asked:
    """A request as it arrived."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


@dataclass(slots=True)
class Connection:
    """The vendor's end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes) -> None:
        """Send each piece in a write of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def closed_by_peer(self, within: float = PATIENCE) -> bool:
        """Wait until the other side closes."""
        try:
            async with asyncio.timeout(within):
                return await self.reader.read(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True


Script = Callable[[Connection, Asked], Awaitable[None]]


@dataclass(slots=True)
class Vendor:
    """A running server: its address, and what was asked so far."""

    url: str
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    open: int = 0


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    """Read one request, or None at the end of the connection."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    line, *rest = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in rest)}
    return Asked(line, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


async def accepting_is_over() -> None:
    """Wait until what a server accepted just before it closed is a connection, which can be closed.

    asyncio has a task for each; one that ends with its loop leaves its socket to the garbage, and to a later test.
    """
    async with asyncio.timeout(PATIENCE):
        while any("_accept_connection" in repr(task.get_coro()) for task in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0)


@asynccontextmanager
async def vendor_of(
    script: Script, *, keep_alive: bool = False, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Vendor]:
    """Serve the script to every request (one per connection, unless kept alive) until the block ends."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        vendor.connections += 1
        vendor.open += 1
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(partial(over, writer))

    def over(writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        vendor.open -= 1
        tasks.discard(task)
        writer.close()  # also that of a task which was cancelled before it began

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (asked := await read_request(reader)) is not None:
                vendor.asked.append(asked)
                await script(Connection(reader, writer), asked)
                if not keep_alive:
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    vendor = Vendor(f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    try:
        yield vendor
    finally:
        server.close()
        await accepting_is_over()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE)
        await server.wait_closed()


@pytest.fixture
def vendor() -> Callable[[Script], AbstractAsyncContextManager[Vendor]]:
    """Return the maker of vendors."""
    return vendor_of


def says(*pieces: bytes) -> Script:
    """Return a script that answers with exactly these bytes and closes."""

    async def script(connection: Connection, asked: Asked) -> None:
        await connection.send(*pieces)

    return script


def streams(*events: object, done: bool = True) -> Script:
    """Return a script that streams each value as one event (a str as it is, else as JSON), then [DONE]."""
    return says(SSE_HEAD + event_bytes(*events, done=done))


def event_bytes(*events: object, done: bool = True) -> bytes:
    """Return the bytes of a stream of these events."""
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return b"".join(b"data: " + text.encode() + b"\n\n" for text in [*texts, *(["[DONE]"] if done else [])])


def answers(status: int, body: bytes, content_type: str = "application/json", **headers: str) -> Script:
    """Return a script that gives one whole HTTP answer."""
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-type: {content_type}\r\n{extra}"
    return says(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def chunk(content: object = None, finish: str | None = None, **delta: object) -> dict[str, object]:
    """Return a chunk with one choice."""
    if content is not None:
        delta["content"] = content
    return {"id": "c-1", "model": "m-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call_chunk(*calls: dict[str, object]) -> dict[str, object]:
    """Return a chunk with fragments of tool calls."""
    return chunk(tool_calls=list(calls))


def item_added(index: int | None, kind: str, item_id: str, **item: object) -> dict[str, object]:
    """Return the event that opens an output item of the Responses API."""
    return {"type": "response.output_item.added", "output_index": index, "item": {"type": kind, "id": item_id, **item}}


def item_done(index: int | None, kind: str, item_id: str, **item: object) -> dict[str, object]:
    """Return the event that finishes an output item."""
    return {"type": "response.output_item.done", "output_index": index, "item": {"type": kind, "id": item_id, **item}}


def item_delta(
    kind: str, piece: object, index: int | None = 0, item_id: str | None = None, **fields: object
) -> dict[str, object]:
    """Return an event that adds to an item."""
    return {"type": f"response.{kind}.delta", "delta": piece, "output_index": index, "item_id": item_id, **fields}


def response_over(status: str = "completed", **response: object) -> dict[str, object]:
    """Return the event that ends a response."""
    return {"type": f"response.{status}", "response": {"id": "resp_1", "model": "m-1", "status": status, **response}}


def item_call(index: int, item_id: str, call_id: str, arguments: str = "{}") -> list[dict[str, object]]:
    """Return the events that open a call and give its arguments."""
    head = item_added(index, "function_call", item_id, call_id=call_id, name="f", arguments="")
    return [head, item_delta("function_call_arguments", arguments, index, item_id)]


def asking(text: str = "hi") -> ModelRequest:
    """Return a request with one user message."""
    return ModelRequest([Message(id="u1", role=Role.ROLE_USER, parts=[ContentPart(text=text)])])


_TLS = ssl.create_default_context()  # reading the CAs once instead of once per model saves a minute of tests


@asynccontextmanager
async def model_at(vendor: Vendor, key: str = "", **arguments: object) -> AsyncIterator[OpenAIChatModel]:
    """Return a model that talks to the vendor, closed at the end of the block."""
    model = OpenAIChatModel("m", vendor.url, key, tls=_TLS, **arguments)  # type: ignore[arg-type]
    try:
        yield model
    finally:
        await model.aclose()


APIS: dict[str, Callable[[], Api]] = {"chat": ChatApi, "responses": ResponsesApi, "anthropic": AnthropicApi}


@asynccontextmanager
async def api_at(
    vendor: Vendor, api: Api, key: str = "", timeouts: ModelTimeouts | None = None, **arguments: object
) -> AsyncIterator[HttpChatModel]:
    """Return a model that speaks the API with the vendor, closed at the end of the block."""
    endpoint = Endpoint(vendor.url, api.path, key, timeouts=timeouts or ModelTimeouts(), auth=api.headers, tls=_TLS)
    model = HttpChatModel("m", endpoint, api, **arguments)  # type: ignore[arg-type]
    try:
        yield model
    finally:
        await model.aclose()


@pytest.fixture(scope="session")
def splits() -> int:
    """Return how many random splits a property test of recordings tries on each."""
    return int(os.environ.get("DUALCLAW_TEST_SPLITS", DEFAULT_SPLITS))


@dataclass(slots=True)
class Outcome:
    """What a stream gave: folded deltas, the response, the error, and the deltas one by one."""

    text: str = ""
    reasoning: str = ""
    response: ModelResponse | None = None
    error: ModelError | None = None
    deltas: list[TextDelta | ReasoningDelta] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """(id, name, args_json) of the calls."""
        assert self.response is not None, self.error
        found = [part.tool_call for part in self.response.message.parts if part.WhichOneof("part") == "tool_call"]
        return [(call.id, call.name, call.args_json) for call in found]


async def play(model: ChatModel, request: ModelRequest | None = None, within: float = PATIENCE) -> Outcome:
    """Run one stream to its end, whatever that is."""
    outcome = Outcome()
    async with asyncio.timeout(within), aclosing(model.stream(request or asking())) as stream:
        try:
            async for item in stream:
                match item:
                    case TextDelta():
                        outcome.text += item.text
                        outcome.deltas.append(item)
                    case ReasoningDelta():
                        outcome.reasoning += item.text
                        outcome.deltas.append(item)
                    case ModelResponse():
                        assert outcome.response is None
                        outcome.response = item
        except ModelError as error:
            outcome.error = error
    return outcome


async def responses_outcome(*events: object, done: bool = False, timeouts: ModelTimeouts | None = None) -> Outcome:
    """Play one stream of these events of the Responses API."""
    async with (
        vendor_of(streams(*events, done=done)) as served,
        api_at(served, ResponsesApi(), timeouts=timeouts) as model,
    ):
        return await play(model)


def port_of_nobody() -> socket.socket:
    """Return a socket that has a port of this machine and does not listen: as long as it is open nobody else does."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """Return this module: its functions and classes are what the tests are written with."""
    return sys.modules[__name__]
