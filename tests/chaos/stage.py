"""A folder with servers on one store, one door that leads to a living one, and what comes after each death.

The door is a Unix socket that clients know; it is a link to the socket of one server, as a load balancer's address
stands for one. No port is taken, so no test meets another.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, Reconnect

from .failing_parts import script
from .ledger import Ledger
from .processes import Nursery, Server

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds for what takes a moment on an idle machine."""
RECONNECT = Reconnect(total=PATIENCE, first=0.05, longest=0.4)
LEASE = 3.0
"""Seconds; short, so that a frozen process, or a dead one of another machine, loses its runs within a test."""
AGAIN = 0.05
"""Seconds before a lost call is made again."""


class Stage:
    """Servers on one store.

    Args:
        nursery: where they are forked.
        folder: an empty folder with a short name.
        store: the store's address; empty: a SQLite file in the folder.
    """

    def __init__(self, nursery: Nursery, folder: Path, store: str = "") -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "effects")
        self.servers: list[Server] = []
        self._nursery = nursery
        self._store = store or f"sqlite:{folder / 'runs.db'}"
        (folder / "script.json").write_text(script(), "utf-8")

    @property
    def door(self) -> str:
        """Where clients call."""
        return f"unix:{self.folder / 'door'}"

    def client(self, address: str = "", reconnect: Reconnect = RECONNECT) -> EngineClient:
        """Return a client, of the door unless another address is given."""
        return EngineClient(address or self.door, reconnect=reconnect)

    async def start(self, name: str = "", **more: str) -> Server:
        """Start a server with more in its environment; it may have ended already when this returns."""
        environment = {
            "DUALCLAW_LISTEN": f"unix:{self.folder / (name or f's{len(self.servers)}')}",
            "DUALCLAW_STORE": self._store,
            "DUALCLAW_MODEL": f"scripted:{self.folder / 'script.json'}",
            "DUALCLAW_LEASE": str(LEASE),
            "DUALCLAW_GRACE": "0",
            **more,
        }
        server = await self._nursery.start(self.folder, environment)
        self.servers.append(server)
        return server

    def lead_to(self, server: Server, door: str = "door") -> None:
        """Have a door lead to a server from now on."""
        link = self.folder / f"{door}.new"
        link.symlink_to(server.address.result().removeprefix("unix:"))
        os.replace(link, self.folder / door)

    async def close(self) -> None:
        """Kill what is left."""
        await asyncio.gather(*[server.kill() for server in self.servers])

    def fired(self) -> list[str]:
        """Return the points that servers have written down, in their order."""
        path = self.folder / "fired"
        return path.read_text().split() if path.exists() else []

    def log(self) -> str:
        """Return what the servers have written last."""
        path = self.folder / "server.log"
        return path.read_text()[-6_000:] if path.exists() else ""


class Succession:
    """Servers that die one after another, and the last one, which lives.

    Args:
        stage: where.
        environments: what each server has in its environment beside the settings.
        standby: True: the last server is there from the beginning, and claims nothing before it is needed.
    """

    def __init__(self, stage: Stage, environments: Sequence[Mapping[str, str]], *, standby: bool = False) -> None:
        self._stage = stage
        self._environments = environments
        self._standby = standby
        self._last: Server | None = None
        self._at_work: Server | None = None
        self._deaths: asyncio.Task[list[int]] | None = None

    @property
    def at_work(self) -> Server:
        """The server that the door leads to."""
        assert self._at_work is not None
        return self._at_work

    @property
    def spare(self) -> str:
        """Address of the server that stands by; empty: none does."""
        return self._last.address.result() if self._last is not None else ""

    async def begin(self) -> None:
        """Start, and wait until there is a server to call."""
        if self._standby:
            self._last = await self._stage.start("spare", CHAOS_GATE="gate", **self._environments[-1])
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deaths = asyncio.create_task(self._follow(called), name="succession")
        either: set[asyncio.Future[Any]] = {called, self._deaths}
        await asyncio.wait(either, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        if self._deaths.done():
            await self._deaths
        assert called.done(), f"no server came up\n{self._stage.log()}"

    async def _follow(self, called: asyncio.Future[None]) -> list[int]:
        ends: list[int] = []
        for environment in self._environments[:-1]:
            server = await self._stage.start(**environment)
            if server.address.done():
                self._lead_to(server, called)
            ends.append(await server.wait(PATIENCE))
        (self._stage.folder / "gate").touch()
        last = self._last or await self._stage.start(**self._environments[-1])
        self._lead_to(last, called)
        return ends

    def _lead_to(self, server: Server, called: asyncio.Future[None]) -> None:
        self._at_work = server
        self._stage.lead_to(server)
        if not called.done():
            called.set_result(None)

    async def over(self, timeout: float = 5.0) -> list[int]:
        """Return how all but the last ended; raises TimeoutError when one of them lives on."""
        assert self._deaths is not None
        async with asyncio.timeout(timeout):
            return await asyncio.shield(self._deaths)

    async def close(self) -> None:
        """End what watches."""
        if self._deaths is not None:
            self._deaths.cancel()
            await asyncio.wait({self._deaths})


async def persist(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call as often as it takes; only a connection that was lost is a reason to make it again."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except EngineUnreachable:
                await asyncio.sleep(AGAIN)
