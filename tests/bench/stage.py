"""Everything that runs during the benchmark, started when the first row needs it and ended together.

Ours are the commands that ship, ``dualclaw-server`` and ``dualclaw-web``, with settings any user would set: which
agent, which model, where the store is. No switch of theirs is set for the benchmark.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench import frameworks
from tests.bench.children import BenchError, Child, LoadClient, environment

BIN = Path(sys.executable).parent
_BARE = (
    *("--loop", "uvloop", "--http", "httptools", "--ws", "none", "--lifespan", "off"),
    *("--no-access-log", "--no-proxy-headers", "--no-server-header", "--no-date-header"),
)
"""Options of uvicorn that leave out all that can be left out."""


@dataclass(frozen=True)
class Target:
    """What the load client asks, and the processes whose CPU that costs."""

    name: str
    kind: str
    address: str
    servers: tuple[Child, ...]

    @property
    def ask(self) -> dict[str, object]:
        """The part of a command to the load client that names it."""
        return {"kind": self.kind, "address": self.address}


class Stage:
    """The processes.

    Args:
        folder: for logs and stores; whoever made it removes it.
        say: told what is going on, one line each.
        missing: filled with the peers that are not there, and why.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], missing: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._say = say
        self._children: dict[str, Child] = {}
        self._peers: dict[str, Target] | None = None
        self._client: LoadClient | None = None
        self.missing: dict[str, str] = {} if missing is None else missing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.stop()
        async with asyncio.TaskGroup() as group:
            for child in self._children.values():
                group.create_task(child.stop())

    @property
    def pids(self) -> list[int]:
        """Every process that belongs to the benchmark."""
        client = [self._client.pid] if self._client is not None else []
        return client + [child.pid for child in self._children.values() if child.alive]

    async def load(self) -> LoadClient:
        """Return the load client."""
        if self._client is None:
            self._client = await LoadClient.start(sys.executable, self._folder)
        return self._client

    async def provider(self) -> str:
        """Return the provider's address."""
        return (await self._module("provider", "tests.bench.provider")).address

    async def raw(self) -> Target:
        """Return the raw gRPC server."""
        server = await self._module("raw", "tests.bench.raw")
        return Target("raw grpc.aio", "raw", server.address, (server,))

    async def raw_gateway(self) -> Target:
        """Return the raw gateway; only its own CPU counts."""
        raw = await self.raw()
        command = [sys.executable, "-m", "uvicorn", "tests.bench.raw_gateway:app", "--port", "0", "--no-access-log"]
        gateway = await self._child("raw-gateway", [*command, "--lifespan", "off"], {"BENCH_RAW": raw.address})
        return Target("raw ASGI and grpc.aio", "raw-http", f"{gateway.address}/", (gateway,))

    async def floor(self) -> Target:
        """Return the floor, a bare engine and a bare gateway; the CPU of both counts."""
        server = await self._module("floor", "tests.bench.floor", BENCH_PROVIDER=await self.provider())
        command = [sys.executable, "-m", "uvicorn", "tests.bench.floor_gateway:app", "--port", "0", *_BARE]
        gateway = await self._child("floor-gateway", command, {"BENCH_FLOOR": server.address})
        return Target("floor", "peer", f"{gateway.address}/", (server, gateway))

    async def engine(self, store: str = "sqlite", use: str = "", **more: str) -> Target:
        """Return an engine with a store of its own; another ``use`` is another engine, ``more`` are settings of it."""
        name = "-".join(filter(None, ("engine", store, use)))
        settings = {
            "DUALCLAW_LISTEN": "127.0.0.1:0",
            "DUALCLAW_STORE": "memory:" if store == "memory" else f"sqlite:{self.store_file(use)}",
            "DUALCLAW_MODEL": "openai:bench",
            "DUALCLAW_MODEL_BASE_URL": await self.provider(),
            "DUALCLAW_MODEL_API_KEY": "none",
            "DUALCLAW_AGENTS": "tests.bench.agent:AGENTS",
            **more,
        }
        server = await self._child(name, [str(BIN / "dualclaw-server")], settings)
        return Target(f"engine, {store}", "engine", server.address, (server,))

    def store_file(self, use: str) -> Path:
        """Return where the SQLite store of an engine is."""
        return self._folder / f"store-{use or 'main'}.db"

    async def web(self, engine: Target | None = None, use: str = "") -> Target:
        """Return our gateway before an engine, the one with SQLite by default; the CPU of both counts."""
        engine = engine or await self.engine()
        settings = {"DUALCLAW_WEB_LISTEN": "127.0.0.1:0", "DUALCLAW_ENGINE": engine.address}
        gateway = await self._child("-".join(filter(None, ("gateway", use))), [str(BIN / "dualclaw-web")], settings)
        return Target(
            "engine and gateway", "original", f"{gateway.address}/messages/stream", (*engine.servers, gateway)
        )

    async def peers(self) -> dict[str, Target]:
        """Return the peers that could be installed and started; ``missing`` has the others. Raises BenchError: none."""
        if self._peers is None:
            self._peers = {}
            provider = await self.provider()
            self._say("installing and starting the peers")
            async with asyncio.TaskGroup() as group:
                for peer in frameworks.PEERS:
                    group.create_task(self._start_peer(peer, provider))
            for name in [peer.name for peer in frameworks.PEERS if peer.name in self._children]:
                await self._try_peer(self._peers, name)
        if not self._peers:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.missing.items())
            raise BenchError(f"no peer is there to compare with: {reasons}")
        return self._peers

    async def _start_peer(self, peer: frameworks.Peer, provider: str) -> None:
        try:
            child = await frameworks.start(peer, await frameworks.install(peer), provider, self._folder)
        except BenchError as error:
            self.missing[peer.name] = str(error)
            self._say(f"{peer.name} is not there: {error}")
            return
        self._children[peer.name] = child

    async def _try_peer(self, found: dict[str, Target], name: str) -> None:
        """Have a peer answer a little, which shows that it can and gets it warm."""
        child = self._children[name]
        target = Target(name, "peer", f"{child.address}/stream", (child,))
        try:
            await (await self.load()).do("run", {**target.ask, "runs": 4, "tokens": 20, "pace": 0})
        except BenchError as error:
            self.missing[name] = f"{error}: {child.tail()}"
            self._say(f"{name} does not answer: {error}")
            return
        found[name] = target

    async def _module(self, name: str, module: str, **settings: str) -> Child:
        return await self._child(name, [sys.executable, "-m", module], settings)

    async def _child(self, name: str, command: list[str], settings: dict[str, str]) -> Child:
        if name not in self._children:
            self._say(f"starting {name}")
            self._children[name] = await Child.start(name, command, self._folder, environment(**settings))
        return self._children[name]
