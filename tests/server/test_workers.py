import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from dualclaw import ListAgentsRequest
from dualclaw.rpc import AgentServiceAsyncStub, EngineServiceAsyncStub
from dualclaw_server.settings import SettingsError, read_settings
from tests.server.conftest import ask
from tests.server.test_main import address_of, command, outcome

STEP = 0.05
PATIENCE = 100

pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def two_workers(folder: Path, *more: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run dualclaw-server with two workers on a database of its own."""
    options = ("--workers", "2", "--listen", "127.0.0.1:0", "--store", f"sqlite:{folder / 'runs.db'}")
    async with command(*options, *more, environ=environ) as process:
        yield process


def workers_of(process: asyncio.subprocess.Process) -> set[int]:
    """The processes that a supervisor has started and that live."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) == process.pid and state != "Z":
            found.add(int(entry.parent.name))
    return found


def lives(pid: int) -> bool:
    """Tell whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def own_channel(address: str) -> grpc.aio.Channel:
    """Return a connection that is shared with no other."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def refuses(address: str) -> bool:
    """Tell whether nobody takes a call any more."""
    async with own_channel(address) as channel:
        try:
            await AgentServiceAsyncStub(channel).ListAgents(ListAgentsRequest(), timeout=PATIENCE)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def answer(address: str) -> str:
    """Ask one question on a connection of its own."""
    async with own_channel(address) as channel:
        events = [e async for m in EngineServiceAsyncStub(channel).Run(ask("What is 6 * 7?")) for e in m.events]
    return events[-1].done.content


async def test_workers_share_one_address_and_drain_together(tmp_path: Path) -> None:
    """One address is announced, every connection is answered whoever gets it, and SIGTERM ends all with exit code 0."""
    async with two_workers(tmp_path) as process:
        address = await address_of(process)
        workers = workers_of(process)
        assert len(workers) == 2
        answers = await asyncio.gather(*(answer(address) for _ in range(12)))
        assert all("42" in each for each in answers)
        process.send_signal(signal.SIGTERM)
        code, _, errors = await outcome(process)
    assert code == 0, errors
    assert errors.count('"message": "stopped"') == 2
    assert not any(lives(pid) for pid in workers)


async def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    """SIGKILL of a worker costs its connections only: another one takes its place at the same address."""
    async with two_workers(tmp_path) as process:
        address = await address_of(process)
        before = workers_of(process)
        os.kill(min(before), signal.SIGKILL)
        async with asyncio.timeout(PATIENCE):
            while len(workers_of(process) - before) < 1 or len(workers_of(process)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(STEP)
            assert "42" in await answer(address)
        process.send_signal(signal.SIGTERM)
        code, _, errors = await outcome(process)
    assert "ended with -9; another one starts" in errors
    assert code == 0


async def test_no_worker_outlives_its_supervisor(tmp_path: Path) -> None:
    """Workers of a supervisor that was killed drain and end, so that the address is free for the next start."""
    async with two_workers(tmp_path) as process:
        await address_of(process)
        workers = workers_of(process)
        process.kill()
        async with asyncio.timeout(PATIENCE):
            while any(lives(pid) for pid in workers):  # noqa: ASYNC110  # nobody tells of the end of a grandchild
                await asyncio.sleep(STEP)
    assert len(workers) == 2


async def test_what_is_wrong_with_a_start_is_told_once(tmp_path: Path) -> None:
    """The first worker starts alone; what it cannot start for is the server's end, with that worker's exit code."""
    async with two_workers(tmp_path, "--model", "nobody:nothing") as process:
        code, out, errors = await outcome(process)
    assert (code, out) == (2, "")
    assert errors.count("DUALCLAW_MODEL") == 1


async def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    """Workers share a port with each other, never with a stranger."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        async with two_workers(tmp_path, "--listen", taken) as process:
            code, _, errors = await outcome(process)
    assert code == 1
    assert f"cannot listen on {taken}" in errors


async def test_the_address_is_nobody_elses_while_they_serve(tmp_path: Path) -> None:
    """A second server on the port of workers is refused, though theirs is shared."""
    async with two_workers(tmp_path) as process:
        address = await address_of(process)
        async with command("--listen", address, "--store", "memory:") as second:
            code, _, errors = await outcome(second)
    assert code == 1
    assert f"cannot listen on {address}" in errors


async def test_a_second_signal_ends_them_at_once(tmp_path: Path) -> None:
    """Whoever cannot wait for the drain asks again."""
    script = tmp_path / "script.json"
    script.write_text('{"name": "s", "turns": [{"say": [{"text": "a"}, {"hang": true}]}]}')
    async with two_workers(tmp_path, "--model", f"scripted:{script}", DUALCLAW_GRACE="600") as process:
        address = await address_of(process)
        workers = workers_of(process)
        channel = own_channel(address)
        call = EngineServiceAsyncStub(channel).Run(ask("anything"))
        await call.read()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            while len(workers_of(process)) == 2 and not await refuses(address):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(STEP)
        process.send_signal(signal.SIGTERM)
        code, _, _ = await outcome(process)
        call.cancel()
        await channel.close()
    assert code == 1
    assert not any(lives(pid) for pid in workers)


@pytest.mark.parametrize(
    ("more", "right"),
    [
        ({"DUALCLAW_STORE": "memory:"}, "use sqlite:PATH or nats://HOST, or one worker"),
        ({"DUALCLAW_LISTEN": "unix:/tmp/engine"}, "listen on HOST:PORT"),
    ],
)
def test_what_workers_cannot_share_is_refused(more: dict[str, str], right: str) -> None:
    """Neither a store within one process nor a socket file can be had by several."""
    with pytest.raises(SettingsError) as refused:
        read_settings({"DUALCLAW_WORKERS": "2", **more})
    [problem] = refused.value.problems
    assert problem.startswith("DUALCLAW_WORKERS: ")
    assert problem.endswith(right)
