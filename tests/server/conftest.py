"""A whole engine in this process: memory store, a scripted model, real gRPC on a free port."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import grpc
import pytest

from dualclaw import ContentPart, Message, Role, RunRequest
from dualclaw.rpc import AgentServiceAsyncStub, ConversationServiceAsyncStub, EngineServiceAsyncStub
from dualclaw_server.app import EngineServer, Parts, engine_server
from dualclaw_server.engine.agent import Agent
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.servicers.access import anonymous_access
from dualclaw_server.settings import Settings
from dualclaw_server.stores.memory import MemoryStore

Turn = dict[str, object]
HELLO: tuple[Turn, ...] = ({"say": [{"text": "Hello, world.", "chunk": 4}]},)


@dataclass
class Served:
    """A served engine with stubs to call it."""

    server: EngineServer
    store: MemoryStore
    channel: grpc.aio.Channel
    engine: EngineServiceAsyncStub = field(init=False)
    conversations: ConversationServiceAsyncStub = field(init=False)
    agents: AgentServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.engine = EngineServiceAsyncStub(self.channel)
        self.conversations = ConversationServiceAsyncStub(self.channel)
        self.agents = AgentServiceAsyncStub(self.channel)

    @property
    def address(self) -> str:
        """HOST:PORT it listens on."""
        return self.server.address


ServeEngine = Callable[..., AbstractAsyncContextManager[Served]]


def ask(text: str = "hello", **fields: str) -> RunRequest:
    """Return a question to the default agent; ``fields`` are other fields of the request."""
    return RunRequest(message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)]), **fields)


@pytest.fixture
def server() -> ServeEngine:
    """Return ``server(*turns, agents=..., grace=...)``: serves an engine that plays these turns (default: Hello)."""

    @contextlib.asynccontextmanager
    async def serving(
        *turns: Turn,
        agents: Sequence[Agent] = (Agent(name="assistant"),),
        grace: float = 0.0,
        listen: str = "127.0.0.1:0",
    ) -> AsyncIterator[Served]:
        store = MemoryStore()
        model = ScriptedModel.parse(json.dumps({"name": "script", "turns": turns or HELLO}))
        parts = Parts(store, model, agents, anonymous_access(loopback=True))
        settings = Settings(listen=listen, store="memory:", grace=grace)
        async with engine_server(settings, parts) as made, grpc.aio.insecure_channel(made.address) as channel:
            yield Served(made, store, channel)

    return serving
