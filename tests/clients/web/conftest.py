"""A real gateway (uvicorn on a free port) in front of the scripted engine."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest

from dualclaw_clients.engine_client import EngineClient, Reconnect
from dualclaw_clients.http_heads import HEAD_TIMEOUT
from dualclaw_clients.web.__main__ import Gateway
from dualclaw_clients.web.access import AccessPolicy, policy_for
from dualclaw_clients.web.app import BODY_LIMIT, WebApp

QUESTION = {"message": {"role": "ROLE_USER", "parts": [{"text": "hi"}]}}


@dataclass
class Running:
    """A gateway that serves, and a client of it."""

    gateway: Gateway
    app: WebApp
    url: str
    http: httpx.AsyncClient


class Gateways:
    """Starts gateways in front of the fake engine; all of them end with the test."""

    def __init__(self, stack: AsyncExitStack, target: str) -> None:
        self._stack = stack
        self._target = target

    async def start(
        self,
        *,
        policy: AccessPolicy | None = None,
        body_limit: int = BODY_LIMIT,
        heartbeat: float = 15.0,
        stall: float = 60.0,
        token: str = "",
        reconnect: float = 60.0,
        head_timeout: float = HEAD_TIMEOUT,
    ) -> Running:
        """Start one; ``token`` is the gateway's own key, which callers must never profit from."""
        engine = await self._stack.enter_async_context(
            EngineClient(self._target, token=token, reconnect=Reconnect(total=reconnect, first=0.02))
        )
        app = WebApp(
            engine,
            policy=policy or policy_for("127.0.0.1"),
            body_limit=body_limit,
            heartbeat=heartbeat,
            stall=stall,
        )
        gateway = Gateway(app, "127.0.0.1", 0, head_timeout=head_timeout)
        serving = asyncio.create_task(gateway.serve())
        self._stack.push_async_callback(_stop, gateway, serving)
        async with asyncio.timeout(60):
            while not gateway.started:  # noqa: ASYNC110  # uvicorn has a flag and no event
                await asyncio.sleep(0.005)
        # Plain http: an empty context spares every test the loading of the system's certificates.
        unused = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client = httpx.AsyncClient(base_url=gateway.address, timeout=60, verify=unused)
        http = await self._stack.enter_async_context(client)
        return Running(gateway, app, gateway.address, http)


async def _stop(gateway: Gateway, serving: "asyncio.Task[None]") -> None:
    gateway.should_exit = True
    await asyncio.wait_for(serving, 60)


@pytest.fixture
async def gateways(fake_engine) -> AsyncIterator[Gateways]:
    """Starts gateways with settings of the test's own."""
    async with AsyncExitStack() as stack:
        yield Gateways(stack, fake_engine.target)


@pytest.fixture
async def web(gateways: Gateways) -> Running:
    """A gateway with the settings it has by default."""
    return await gateways.start()


class Relay:
    """A TCP relay in front of a gateway that can break every connection, as a lost network does."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut_after: list[int] = []
        self.url = ""

    def cut_after(self, *sizes: int) -> None:
        """Break the first connections after so many bytes to the client each."""
        self._cut_after = list(sizes)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        self._writers |= {writer, inner_writer}
        up = asyncio.create_task(_copy(reader, inner_writer))
        try:
            left = self._cut_after.pop(0) if self._cut_after else None
            with contextlib.suppress(ConnectionError):
                while data := await inner_reader.read(65_536 if left is None else left):
                    writer.write(data)
                    await writer.drain()
                    if left is not None:
                        left -= len(data)
                        if left <= 0:
                            break
        finally:
            up.cancel()
            await asyncio.wait({up})
            for end in (writer, inner_writer):
                end.transport.abort() if left is not None else end.close()
                self._writers.discard(end)
            self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


@pytest.fixture
async def relay(web: Running) -> AsyncIterator[Relay]:
    """A breakable way to the default gateway."""
    relay = Relay(int(web.url.rpartition(":")[2]))
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()


@pytest.fixture
def question() -> Callable[..., dict[str, object]]:
    """Build the protobuf JSON of a RunRequest."""

    def build(**fields: object) -> dict[str, object]:
        return {**QUESTION, **fields}

    return build
