"""Runs the command line as people do: as a process of its own."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

import pytest


@dataclass
class Finished:
    code: int
    out: str
    err: str


class CommandLine:
    """Starts ``python -m dualclaw_clients.cli``; the engine's address comes from the environment."""

    def __init__(self, engine: str) -> None:
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("DUALCLAW_")}
        self.env.pop("PYTHONUNBUFFERED", None)  # output must arrive in time without its help
        self.env |= {"DUALCLAW_ENGINE": engine, "PYTHONUTF8": "1", "COLUMNS": "200"}

    @staticmethod
    def command(*args: str) -> list[str]:
        """What is started."""
        return [sys.executable, "-m", "dualclaw_clients.cli", *args]

    async def start(self, *args: str, out: int = asyncio.subprocess.PIPE, err: int = asyncio.subprocess.PIPE):
        """Start it and leave it running."""
        return await asyncio.create_subprocess_exec(
            *self.command(*args),
            stdin=asyncio.subprocess.PIPE, stdout=out, stderr=err, env=self.env,
        )  # fmt: skip

    async def __call__(self, *args: str, stdin: bytes = b"") -> Finished:
        """Run it to its end."""
        return await self.finish(await self.start(*args), stdin)

    async def redirected(self, redirection: str, *args: str) -> Finished:
        """Run it to its end by a shell that redirects one of its streams first, such as ``>&-``."""
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", f'exec "$@" {redirection}', "sh", *self.command(*args), env=self.env,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return await self.finish(process)

    async def finish(self, process, stdin: bytes = b"") -> Finished:
        """Wait for the end of a process."""
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), 100)
        finally:
            if process.returncode is None:
                process.kill()
        return Finished(process.returncode, out.decode(), err.decode())

    async def on_terminal(self, *args: str) -> Finished:
        """Run it with stdout and stderr on one pseudo terminal; ``out`` is everything on the screen."""
        master, slave = os.openpty()
        process = await self.start(*args, out=slave, err=slave)
        os.close(slave)
        process.stdin.close()
        try:
            screen = await asyncio.wait_for(asyncio.to_thread(_read_all, master), 100)
            code = await asyncio.wait_for(process.wait(), 60)
        finally:
            if process.returncode is None:
                process.kill()
            os.close(master)
        return Finished(code, screen.decode(), "")

    @staticmethod
    def press_ctrl_c(process) -> None:
        """Do what the terminal does for Ctrl-C."""
        process.send_signal(signal.SIGINT)


def _read_all(fd: int) -> bytes:
    pieces = []
    while True:
        try:
            piece = os.read(fd, 65_536)
        except OSError:  # EIO: the last process has closed the terminal
            piece = b""
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)


@pytest.fixture
def dualclaw(fake_engine) -> CommandLine:
    """The command line with the fake as its engine."""
    return CommandLine(fake_engine.target)
