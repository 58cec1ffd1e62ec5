"""Processes of the benchmark: servers that say where they listen, and the load client that is told what to do."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import orjson

ROOT = Path(__file__).resolve().parents[2]
_ADDRESS = re.compile(r"(?:listening on|running on) (\S+)")
_POLL = 0.02


class BenchError(Exception):
    """Something could not be measured; says what and why."""


class Disturbed(BenchError):
    """The machine did not let a measurement be what it was to be."""


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without settings of ours or of telemetry, and with those given."""
    dropped = ("DUALCLAW_", "OTEL_", "LANGSMITH_", "LANGCHAIN_", "OPENAI_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


class Child:
    """A server in a process of its own; ``address`` is where it says it listens."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.address = ""
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str], timeout: float = 60.0
    ) -> Self:
        """Start a server and wait until it listens. Raises BenchError with what it wrote."""
        log = folder / f"{name}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out
            )
        child = cls(name, process, log)
        try:
            async with asyncio.timeout(timeout):
                child.address = await child._listening()
        except TimeoutError:
            await child.stop()
            raise BenchError(f"{name} does not listen after {timeout:g} s: {child.tail()}") from None
        except BaseException:
            await child.stop()
            raise
        return child

    async def _listening(self) -> str:
        while True:
            if found := _ADDRESS.search(self._log.read_text("utf-8", "replace")):
                return found[1]
            if self._process.returncode is not None:
                raise BenchError(f"{self.name} ended with {self._process.returncode}: {self.tail()}")
            await asyncio.sleep(_POLL)

    def tail(self) -> str:
        """Return the end of what it wrote."""
        return " | ".join(self._log.read_text("utf-8", "replace").strip().splitlines()[-5:])

    @property
    def alive(self) -> bool:
        """False once it has ended."""
        return self._process.returncode is None

    async def stop(self, patience: float = 3.0) -> None:
        """End it: it may have answers open that nobody waits for, so it is not asked twice."""
        for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), wait)


class LoadClient:
    """The process that asks; one command at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, python: str, folder: Path) -> Self:
        """Start it; it reads its first command at once."""
        with (folder / "load.log").open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                python, "-m", "tests.bench.load", cwd=ROOT, env=environment(), stderr=out,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=16 << 20,
            )  # fmt: skip
        return cls(process)

    async def do(
        self,
        command: str,
        values: Mapping[str, object],
        *,
        timeout: float = 120.0,
        mark: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Have something done and return the answer; ``mark`` is called for each mark on the way.

        Raises:
            BenchError: it failed, or took longer than ``timeout`` seconds.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        what = f"{command} {values.get('kind', '')}".strip()
        self._process.stdin.write(orjson.dumps({"do": command, "timeout": timeout, **values}) + b"\n")
        try:
            async with asyncio.timeout(timeout + 10.0):
                while True:
                    line = await self._process.stdout.readline()
                    if not line:
                        raise BenchError(f"{what}: the load client has ended; see load.log")
                    answer: dict[str, Any] = orjson.loads(line)
                    if "mark" not in answer:
                        break
                    if mark is not None:
                        mark(answer)
        except TimeoutError:
            raise BenchError(f"{what}: no answer after {timeout:g} s") from None
        if "error" in answer:
            raise BenchError(f"{what}: {answer['error']}")
        return answer

    async def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 5.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
