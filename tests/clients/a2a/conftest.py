"""A real engine with the conformance agent, the A2A claw before it, and clients of the protocol's own SDK."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.client import ClientCallContext
from a2a.client.interceptors import BeforeArgs, ClientCallInterceptor
from a2a.client.service_parameters import ServiceParametersFactory
from a2a.types.a2a_pb2 import (
    ROLE_USER,
    Message,
    Part,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    Task,
    TaskState,
)

from dualclaw_clients.a2a.server import Claw, open_claw
from dualclaw_clients.a2a.settings import A2aSettings
from dualclaw_server.app import Parts, engine_server
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.servicers.access import Access, anonymous_access
from dualclaw_server.settings import Settings
from dualclaw_server.stores.memory import MemoryStore
from examples.conformance import AGENTS

BINDINGS = ("JSONRPC", "GRPC")
ROOT = Path(__file__).resolve().parents[3]
NODE = Path(__file__).parent / "node"


@asynccontextmanager
async def served(access: Access | None = None) -> AsyncIterator[str]:
    """Serve the conformance agent on a free port; gives the address."""
    unused = ScriptedModel.parse('{"turns": [{"say": [{"text": "unused"}]}]}')
    parts = Parts(MemoryStore(), unused, AGENTS, access or anonymous_access(loopback=True))
    settings = Settings(listen="127.0.0.1:0", store="memory:", grace=0.0)
    async with engine_server(settings, parts) as server:
        yield server.address


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    """The address of an engine that trusts loopback."""
    async with served() as address:
        yield address


@dataclass(frozen=True)
class Served:
    """A claw, and what makes clients of it."""

    claw: Claw
    engine: str
    client: "Callable[..., Client]"
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return self.claw.addresses.json_rpc


@asynccontextmanager
async def opened(engine: str, **settings: object) -> AsyncIterator[Served]:
    """Open a claw before an engine; everything ends with the block."""
    known = {"a2a_listen": "127.0.0.1:0", "a2a_grpc_listen": "127.0.0.1:0", "a2a_grace": 1.0}
    async with AsyncExitStack() as stack:
        claw = await stack.enter_async_context(open_claw(A2aSettings(engine=engine, **{**known, **settings})))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        card = await A2ACardResolver(http, claw.addresses.json_rpc).get_agent_card()

        def client(binding: str, *, streaming: bool = True, key: str = "", tenant: str = "", url: str = "") -> Client:
            mine = type(card)()
            mine.CopyFrom(card)
            for interface in mine.supported_interfaces:
                interface.tenant = tenant
                if interface.protocol_binding == "JSONRPC":
                    interface.url = url or interface.url
            config = ClientConfig(
                streaming=streaming,
                httpx_client=http,
                grpc_channel_factory=grpc.aio.insecure_channel,
                supported_protocol_bindings=[binding],
            )
            made = ClientFactory(config).create(mine, interceptors=[Bearer(key)] if key else [])
            if binding == "GRPC":
                stack.push_async_callback(made.close)
            return made

        yield Served(claw, engine, client, http)


class Bearer(ClientCallInterceptor):
    """Sends a bearer key with every call."""

    def __init__(self, key: str) -> None:
        self._key = key

    async def before(self, args: BeforeArgs) -> None:
        args.context = args.context or ClientCallContext()
        args.context.service_parameters = ServiceParametersFactory.create_from(
            args.context.service_parameters, [lambda given: given.update(authorization=f"Bearer {self._key}")]
        )

    async def after(self, args: object) -> None:
        pass


@pytest.fixture
async def served_claw(engine: str) -> AsyncIterator[Served]:
    """A claw with the settings it has by default."""
    async with opened(engine) as served:
        yield served


@pytest.fixture
async def cutting() -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Makes a relay before a URL that breaks each connection after 3,000 bytes to the client."""
    servers: list[asyncio.Server] = []

    async def relay(url: str) -> str:
        host, port = url.removeprefix("http://").rstrip("/").split(":")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            upstream, inner = await asyncio.open_connection(host, int(port))

            async def up() -> None:
                while data := await reader.read(65_536):
                    inner.write(data)

            sending = asyncio.create_task(up())
            try:
                left = 3_000
                while left > 0 and (data := await upstream.read(left)):
                    writer.write(data)
                    left -= len(data)
                await writer.drain()
                await asyncio.sleep(0.05)
            finally:
                sending.cancel()
                await asyncio.wait({sending})
                writer.transport.abort()
                inner.transport.abort()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}/"

    yield relay
    for server in servers:
        server.close()


@pytest.fixture(params=BINDINGS)
def client(request: pytest.FixtureRequest, served_claw: Served) -> Client:
    """A streaming client, once by JSON-RPC and once by gRPC."""
    return served_claw.client(request.param)


def message(text: str = "", *, parts: Sequence[Part] = (), message_id: str = "", now: bool = False, **where: str):
    """A request that sends a message."""
    return SendMessageRequest(
        message=Message(
            message_id=message_id or str(uuid.uuid4()),
            role=ROLE_USER,
            parts=[Part(text=text), *parts] if text else parts,
            **where,
        ),
        configuration=SendMessageConfiguration(return_immediately=now),
    )


class Seen:
    """What a stream has told: its kinds, states and text, as a client puts them together."""

    def __init__(self) -> None:
        self.first: Task | None = None
        self.kinds: list[str] = []
        self.states: list[str] = []
        self.artifacts: dict[str, str] = {}
        self.closed: set[str] = set()
        self.status_text = ""
        self.data: dict[str, object] = {}
        self.updates: list[StreamResponse] = []

    @property
    def text(self) -> str:
        """The newest answer."""
        return list(self.artifacts.values())[-1] if self.artifacts else ""

    @property
    def task_id(self) -> str:
        assert self.first is not None
        return self.first.id

    def take(self, response: StreamResponse) -> None:
        kind = response.WhichOneof("payload")
        assert kind is not None
        self.updates.append(response)
        self.kinds.append(kind)
        match kind:
            case "task":
                self.first = response.task
                self.artifacts = {a.artifact_id: a.parts[0].text for a in response.task.artifacts}
                self._status(response.task.status)
            case "status_update":
                self._status(response.status_update.status)
            case "artifact_update":
                update = response.artifact_update
                name, text = update.artifact.artifact_id, update.artifact.parts[0].text
                assert name not in self.closed
                assert not update.append or name in self.artifacts
                self.artifacts[name] = (self.artifacts[name] if update.append else "") + text
                if update.last_chunk:
                    self.closed.add(name)

    def _status(self, status) -> None:
        self.states.append(TaskState.Name(status.state).removeprefix("TASK_STATE_"))
        for part in status.message.parts:
            if part.HasField("text"):
                self.status_text = part.text


async def collect(stream, until: "Callable[[Seen], bool]" = lambda seen: False) -> Seen:
    """Read a stream to its end, or to where ``until`` says so."""
    seen = Seen()
    async with asyncio.timeout(100), contextlib.aclosing(stream):
        async for response in stream:
            seen.take(response)
            if until(seen):
                break
    return seen
