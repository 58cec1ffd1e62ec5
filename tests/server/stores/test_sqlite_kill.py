"""Kill -9 in the middle of whatever the store writes: the file is sound, and all that was acknowledged is there."""

import asyncio
import random
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dualclaw.errors import EngineError
from dualclaw_server.engine.store import Fenced
from dualclaw_server.stores import SqliteStore

CHURN = """
import asyncio, itertools, sys
from dualclaw import BusyPolicy, Delta, EngineEvent, InterruptItem, Message, Run, RunResponse, RunState
from dualclaw_server.engine.store import Answers, Frame, NewRun, RunKey, RunMessage, Sync
from dualclaw_server.stores import SqliteStore

QUEUED, RUNNING, PARKED, DONE = (RunState.ValueType(n) for n in (1, 2, 3, 4))

def frame(epoch, seq, state=RUNNING, size=10, **more):
    body = RunResponse(events=[EngineEvent(seq=seq, delta=Delta(content="x" * size))]).SerializeToString()
    return Frame(epoch, seq, 1, body, state, **more)

async def life(store, name, n, round):
    key = RunKey("acme", name)
    await store.create(NewRun(key, f"c{round}-{n % 3}", True, "", name, "", b"", Run(id=name), Message(id=name),
                              BusyPolicy.BUSY_POLICY_QUEUE, b""))
    print("created", name, flush=True)
    while (await store.head(key)).state == QUEUED:
        await asyncio.sleep(0.001)
    sent = [store.append(key, frame(1, seq, size=400_000 if seq == 3 else 10), seq - 1) for seq in range(1, 6)]
    await asyncio.gather(*sent)
    await store.wake(key, 4e9)
    said = (RunMessage(1, Message(id="a")), RunMessage(2, Message(id="b"), "call"))
    asked = Run(id=name, interrupts=[InterruptItem(id="i")])
    await store.append(key, frame(1, 6, PARKED, ends_segment=True, messages=said, run=asked, sync=Sync.FULL,
                                  checkpoint=b"k" * 300_000), 5)
    await store.answer(Answers(key, ("i",), "answer", b"", "", ""))
    await store.append(key, frame(2, 7, run=Run(id=name), signals=("answer",), checkpoint=b"l" * 300_000), 6)
    await store.append(key, frame(2, 8, DONE, ends_segment=True, sync=Sync.FULL), 7)
    print("ended", name, flush=True)
    if n % 4 == 0:
        await store.compact(4e9)
        print("compacted", name, flush=True)
    if n % 5 == 0:
        await store.delete(key)
        print("deleted", name, flush=True)

async def main(path, round):
    store = SqliteStore(path)
    await store.open()
    places = asyncio.Semaphore(9)
    async with asyncio.TaskGroup() as lives:
        for n in itertools.count():
            await places.acquire()
            task = lives.create_task(life(store, f"r{round}-{n}", n, round))
            task.add_done_callback(lambda done: places.release())

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""

FREEZER = """
import asyncio, sys
from dualclaw import RunState
from dualclaw_server.engine.store import Frame, Fenced
from dualclaw_server.stores import SqliteStore

async def main(path):
    store = SqliteStore(path, lease=5)
    await store.open()
    claim = await store.claim("default", "frozen", 100)
    await store.append(claim.key, Frame(1, 1, 0, b"", RunState.RUN_STATE_RUNNING), 0)
    print("claimed", claim.lost, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("lost", claim.lost, flush=True)
    try:
        await store.append(claim.key, Frame(1, 1, 0, b"", RunState.RUN_STATE_RUNNING), 1)
    except Fenced:
        print("fenced", flush=True)
    await claim.ack()
    await claim.nak(0)
    print("given back", flush=True)
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
async def start():
    """Starts a script in a process of its own; all are killed at the end."""
    started = []

    async def run(script, *args):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script, *map(str, args)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.returncode is None:
            process.kill()
        process.stdin.close()
        await asyncio.wait_for(process.communicate(), 60)


async def line(process):
    return (await asyncio.wait_for(process.stdout.readline(), 100)).decode().split()


def stopped(pid):
    """Tell whether every thread of a process stands still."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


async def test_a_file_is_sound_however_often_its_writer_is_killed(tmp_path, start, make, sound):
    """Lives of runs, side by side, with large payloads, parks, answers, compactions and purges; four kills."""
    path = tmp_path / "runs.db"
    chance = random.Random(7)
    said = []
    for attempt in range(4):
        process = await start(CHURN, path, attempt)
        said.append(await line(process))
        while attempt > 1 and said[-1][0] != "deleted":  # by then a run has been through all there is
            said.append(await line(process))
        await asyncio.sleep(chance.uniform(0.1, 0.5))
        process.send_signal(signal.SIGKILL)
        rest = (await asyncio.wait_for(process.stdout.read(), 100)).decode()
        said += [text.split() for text in rest.split("\n")[:-1]]
        await process.wait()
        sound(path)
    assert {what for what, _ in said} >= {"created", "ended", "compacted", "deleted"}
    store = SqliteStore(path)
    await store.open()
    last = {name: what for what, name in said}
    for name, what in last.items():
        try:
            head = await store.head(make.key(name))
        except EngineError:
            assert what == "deleted" or int(name.split("-")[1]) % 5 == 0
            continue
        assert what != "deleted"
        if what in ("ended", "compacted"):
            assert (head.state, head.last_seq) == (4, 8)
            assert what == "ended" or head.kept_from == 9
    await store.compact(4e9, limit=10_000)
    await store.close()
    sound(path)


async def test_a_frozen_process_loses_its_run_and_learns_it_when_it_wakes(tmp_path, start, make, until):
    """Its lock lives on, so the lease decides; awake again it is fenced, and gives back nothing that is another's."""
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    await store.create(make.new("r1"))
    process = await start(FREEZER, tmp_path / "runs.db")
    assert await line(process) == ["claimed", "False"]
    with closing(sqlite3.connect(tmp_path / "runs.db", timeout=100)) as lock:
        lock.execute("BEGIN IMMEDIATE")  # else it might be stopped in the middle of a beat, and keep the file to itself
        process.send_signal(signal.SIGSTOP)
        await until(lambda: stopped(process.pid))
    claim = await asyncio.wait_for(store.claim("default", "w", 90), 100)
    assert claim is not None
    assert claim.redelivered
    assert await store.append(claim.key, make.frame(1, 0, epoch=2), 1) == 2
    process.send_signal(signal.SIGCONT)
    process.stdin.write(b"go\n")
    await process.stdin.drain()
    assert [await line(process) for _ in range(3)] == [["lost", "True"], ["fenced"], ["given", "back"]]
    await asyncio.wait_for(process.wait(), 100)
    assert not claim.lost
    assert (await store.inspect(claim.key)).worker == "w"
    with pytest.raises(Fenced):
        await store.append(claim.key, make.frame(1, 0, epoch=1), 2)
    await claim.ack()
    await store.close()


async def test_the_number_of_a_process_is_never_used_again(tmp_path):
    """Unlike its pid: nobody takes a newcomer for the dead owner of a run."""
    numbers = []
    for _ in range(3):
        store = SqliteStore(tmp_path / "runs.db")
        await store.open()
        numbers.append(store._parts.owner)
        await store.close()
    assert len(set(numbers)) == 3
    assert numbers == sorted(numbers)
