"""What a run takes, for whoever plans machines: ``python -m tests.bench.sizing [--open N] [--parked N]``.

Prints figures of this machine, not ratios: CPU of a run and of a token, memory of an open run and of one that waits for
people, bytes on the disk, messages to NATS. ``docs/sizing.md`` has them and says what follows.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import grpc
import msgspec
from rich.console import Console

from dualclaw import ContentPart, Message, Role, RunRequest, StopReason
from dualclaw.rpc import EngineServiceAsyncStub
from tests.bench import machine
from tests.bench.measuring import cpu_of, rest, whole
from tests.bench.report import number
from tests.bench.stage import Stage, Target
from tests.nats_servers import NatsServers

_TOKENS = 50
_PACE = 30
_WAVE = 250
"""Runs that are opened at once."""
_QUIET = 10.0
"""Seconds for which idle runs are watched."""
_FOREVER = 3_600_000
"""Milliseconds between two tokens of a run that is open and idle."""


class Sizing:
    """The measurements; each prints its lines."""

    def __init__(self, stage: Stage, console: Console) -> None:
        self._stage = stage
        self._console = console

    def _say(self, what: str, value: float, unit: str) -> None:
        self._console.print(f"{what:<66} {number(value):>9} {unit}", soft_wrap=True)

    async def cpu(self) -> None:
        """CPU of a run and of a token, engine and gateway apart; and what a run leaves on the disk."""
        web = await self._stage.web()
        await whole(self._stage, web, runs=16, tokens=_TOKENS)
        file = self._stage.store_file("")
        before = _size(file)
        short = await whole(self._stage, web, runs=64, tokens=1)
        long = await whole(self._stage, web, runs=64, tokens=_TOKENS, pace=_PACE)
        for name in short.cpu:
            each = (long.cpu[name] - short.cpu[name]) / 64 / (_TOKENS - 1)
            self._say(f"{name}: CPU of a run with two model calls, two tools, one token", short.cpu[name] / 64e-3, "ms")
            self._say(f"{name}: CPU of a further token, {_PACE} ms apart, 64 runs", each * 1e6, "us")
        self._say(f"SQLite: disk, runs of 1 and of {_TOKENS} tokens, on average", (_size(file) - before) / 128e3, "kB")

    async def open_runs(self, count: int) -> None:
        """Memory and CPU of runs that are open and wait for their model."""
        engine = await self._stage.engine(
            use="open", DUALCLAW_CAPACITY=str(count + 64), DUALCLAW_MODEL_TIMEOUT_IDLE="3600"
        )
        await whole(self._stage, engine, runs=64, tokens=_TOKENS)
        await rest(engine)
        base, began = _memory(engine), time.perf_counter()
        self._say("engine at rest: memory", base / 1e6, "MB")
        client = await self._stage.load()
        for _ in range(0, count, _WAVE):
            await client.do("hold", {**engine.ask, "runs": _WAVE, "tokens": 3, "pace": _FOREVER}, timeout=600)
        self._say(f"{count:,} runs opened in", time.perf_counter() - began, "s")
        await rest(engine)
        self._say(f"engine, {count:,} open runs: memory of each", (_memory(engine) - base) / count / 1e3, "kB")
        await self._watch(f"engine, {count:,} open runs", engine)
        beside = await whole(self._stage, engine, runs=1, tokens=_TOKENS)
        self._say("engine, one more run beside them: first text after", beside.firsts[0] * 1e3, "ms")
        await client.do("release", {"provider": await self._stage.provider()}, timeout=600)
        await rest(engine)
        self._say("engine, when all have ended: memory above that at rest", (_memory(engine) - base) / 1e6, "MB")

    async def parked_runs(self, count: int) -> None:
        """Memory, disk and CPU of runs that wait for people."""
        engine = await self._stage.engine(use="parked")
        await _park(engine.address, _WAVE)
        await rest(engine)
        file = self._stage.store_file("parked")
        base, disk = _memory(engine), _size(file)
        await _park(engine.address, count)
        await rest(engine)
        self._say(f"engine, {count:,} parked runs: memory of each", (_memory(engine) - base) / count / 1e3, "kB")
        self._say("SQLite: disk of a parked run", (_size(file) - disk) / count / 1e3, "kB")
        await self._watch(f"engine, {count:,} parked runs", engine)

    async def workers(self) -> None:
        """What a second process brings: runs a second of one worker and of two, on the same address and store."""
        found = []
        for count in (1, 2):
            engine = await self._stage.engine(use=f"workers{count}", DUALCLAW_WORKERS=str(count))
            client = await self._stage.load()
            ask = {**engine.ask, "runs": 256, "tokens": _TOKENS, "pace": 0, "channels": 8}
            best = max([256 / (await client.do("run", ask))["seconds"] for _ in range(4)])
            self._say(f"{count} worker{'s' if count > 1 else ''}: runs a second", best, "")
            found.append(best)
        self._say("speed-up of the second worker", found[1] / found[0], "x")

    async def nats(self, folder: Path) -> None:
        """Messages and bytes that a run and a token put into the stream, on one NATS server."""
        with _nats(folder) as servers:
            engine = await self._stage.engine(
                use="nats",
                DUALCLAW_STORE=servers.url("SIZING"),
                DUALCLAW_ACCEPT_LOSS="1",
            )
            await whole(self._stage, engine, runs=16, tokens=_TOKENS)
            found = []
            for tokens in (1, _TOKENS):
                before = _stream(servers)
                spent = await whole(self._stage, engine, runs=64, tokens=tokens, pace=_PACE)
                after = _stream(servers)
                found.append([(after[0] - before[0]) / 64, (after[1] - before[1]) / 64, spent.total / 64])
            short, long = found
            self._say("NATS: messages of a run with one token", short[0], "")
            self._say("NATS: bytes of a run with one token", short[1] / 1e3, "kB")
            self._say(f"NATS: messages of a further token, {_PACE} ms apart", (long[0] - short[0]) / (_TOKENS - 1), "")
            self._say("NATS: bytes of a further token", (long[1] - short[1]) / (_TOKENS - 1), "")
            self._say("engine on NATS: CPU of a run with one token", short[2] * 1e3, "ms")
            self._say("engine on NATS: CPU of a further token", (long[2] - short[2]) / (_TOKENS - 1) * 1e6, "us")

    async def _watch(self, what: str, target: Target) -> None:
        before = sum(cpu_of(target).values())
        await asyncio.sleep(_QUIET)
        self._say(f"{what}: CPU while nothing happens", (sum(cpu_of(target).values()) - before) / _QUIET * 100, "%")


async def _park(address: str, count: int) -> None:
    """Start runs that wait for people, some at a time, and read each to its question."""
    places = asyncio.Semaphore(32)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = EngineServiceAsyncStub(channel)

        async def park() -> None:
            message = Message(role=Role.ROLE_USER, parts=[ContentPart(text="bench tokens=1 pace=0")])
            async with places:
                last = [event async for part in stub.Run(RunRequest(message=message, agent="asking"))
                        for event in part.events][-1]  # fmt: skip
            if last.done.stop_reason != StopReason.STOP_REASON_INTERRUPTED:
                raise AssertionError(f"the run did not park: {last}")

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(park())


def _memory(target: Target) -> int:
    return sum(machine.memory_bytes(server.pid) for server in target.servers)


def _size(file: Path) -> int:
    return sum(part.stat().st_size for part in (file, file.with_name(f"{file.name}-wal")) if part.exists())


@contextlib.contextmanager
def _nats(folder: Path) -> Iterator[NatsServers]:
    servers = NatsServers(folder, 1)
    try:
        yield servers
    finally:
        servers.stop()


class _State(msgspec.Struct):
    last_seq: int
    bytes: int


def _stream(servers: NatsServers) -> tuple[int, int]:
    state = msgspec.convert(servers.ask("STREAM.INFO.SIZING")["state"], _State)
    return state.last_seq, state.bytes


@contextlib.asynccontextmanager
async def _stage(console: Console) -> AsyncIterator[tuple[Stage, Path]]:
    with tempfile.TemporaryDirectory(prefix="dualclaw-sizing-") as folder:
        async with Stage(Path(folder), lambda line: console.print(line, style="dim")) as stage:
            yield stage, Path(folder)


async def _measure(options: argparse.Namespace) -> None:
    console = Console(highlight=False)
    async with _stage(console) as (stage, folder):
        sizing = Sizing(stage, console)
        await sizing.cpu()
        await sizing.open_runs(options.open)
        await sizing.parked_runs(options.parked)
        await sizing.workers()
        await sizing.nats(folder / "nats")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sizing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--open", type=int, default=10_000, metavar="N", help="open runs (10000)")
    parser.add_argument("--parked", type=int, default=10_000, metavar="N", help="runs that wait for people (10000)")
    asyncio.run(_measure(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
