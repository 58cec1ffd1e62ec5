"""Servers as real processes that can be killed, frozen and started again in a tenth of a second.

A server needs more than a second to import what it is made of, and a sweep starts hundreds. So one process imports
everything, starts no thread and opens nothing, and forks itself for each server (``zygote``). What is
forked is a process like any other: it dies by its own SIGKILL and shares nothing with the next.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 30.0
END_TIMEOUT = 30.0


class Server:
    """One server process."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self.folder = folder
        loop = asyncio.get_running_loop()
        self.address: asyncio.Future[str] = loop.create_future()
        """Where it listens, once it does."""
        self.ended: asyncio.Future[int] = loop.create_future()
        """How it ended: an exit code, or minus the number of the signal."""

    async def ready(self) -> bool:
        """Wait until it listens; False when it ended before."""
        either: set[asyncio.Future[Any]] = {self.address, self.ended}
        await asyncio.wait(either, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        assert self.address.done() or self.ended.done(), f"no server after {START_TIMEOUT} s\n{self.log()}"
        return self.address.done()

    async def wait(self, timeout: float = END_TIMEOUT) -> int:
        """Wait for its end; returns how it was."""
        async with asyncio.timeout(timeout):
            return await asyncio.shield(self.ended)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """End it as a crash does; also when it is frozen."""
        self.send(signal.SIGKILL)
        await self.wait()

    def log(self) -> str:
        """What it and the servers of its folder have written."""
        path = self.folder / "server.log"
        return path.read_text() if path.exists() else ""


class Nursery:
    """Where servers are forked; an async context manager that leaves none behind."""

    def __init__(self) -> None:
        self._servers: dict[int, Server] = {}
        self._asked: list[tuple[Path, asyncio.Future[Server]]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.zygote"),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "OTEL_"))},
        )
        self._reader = asyncio.create_task(self._read(), name="zygote")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._reader is not None
        for server in self._servers.values():
            server.send(signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends its children and itself
        try:
            async with asyncio.timeout(END_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise
        finally:
            self._reader.cancel()
            await asyncio.wait({self._reader})

    async def start(self, folder: Path, environment: Mapping[str, str]) -> Server:
        """Start a server in a folder and wait until it listens, or has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        found: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._asked.append((folder, found))
        order = {"folder": str(folder), "environment": dict(environment)}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(START_TIMEOUT):
            server = await found
        await server.ready()
        return server

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            if "started" in said:
                folder, found = self._asked.pop(0)
                server = self._servers[said["started"]] = Server(said["started"], folder)
                if not found.done():
                    found.set_result(server)
            elif "address" in said:
                self._servers[said["pid"]].address.set_result(said["address"])
            else:
                self._servers.pop(said["pid"]).ended.set_result(said["ended"])
        for _, found in self._asked:
            if not found.done():
                found.set_exception(RuntimeError("the process that servers are forked from has ended"))
