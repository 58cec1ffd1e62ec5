"""SqliteStore and processes: killed, hung, blocked, or side by side on one file."""

import asyncio
import signal
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from dualclaw_server.engine.store import Fenced
from dualclaw_server.stores import SqliteStore

WORKER = """
import asyncio, sys
from dualclaw import BusyPolicy, Delta, EngineEvent, Message, Run, RunResponse, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.store import Answers, Frame, NewRun, RunKey
from dualclaw_server.stores import SqliteStore

def frame(seq):
    body = RunResponse(events=[EngineEvent(seq=seq, delta=Delta(content=f"x{seq}"))]).SerializeToString()
    return Frame(1, seq, 1, body, RunState.RUN_STATE_RUNNING)

async def main(path, job):
    store = SqliteStore(path, lease=3600)
    await store.open()
    key = RunKey("acme", "r1")
    if job == "write":
        await store.create(NewRun(key, "c", True, "", "", "", b"", Run(id="r1"), Message(id="m"),
                                  BusyPolicy.BUSY_POLICY_REJECT, b""))
        claim = await store.claim("default", "w", 100)
        print("claimed", claim.key.run_id, flush=True)
        for seq in range(1, 1_000_000):
            await store.append(key, frame(seq), seq - 1)
            print("acked", seq, flush=True)
    elif job == "append":
        for line in sys.stdin:
            head = await store.head(key)
            await store.append(key, frame(head.last_seq + 1), head.version)
    elif job == "answer":
        sys.stdin.readline()
        for n in range(40):
            answers = Answers(key, (f"i{n}",), f"{n} by {sys.argv[3]}", b"", f"{n} by {sys.argv[3]}", "print")
            try:
                await store.answer(answers)
                print("won", n, flush=True)
            except EngineError as error:
                print(error.reason, n, flush=True)
    elif job == "claim":
        claim = await store.claim("default", "w", 100)
        print("claimed", claim.key.run_id, flush=True)
        woken = asyncio.Event()
        store.on_signal(lambda key: woken.set())
        await asyncio.wait_for(woken.wait(), 100)
        print("signalled", (await store.load(claim.key)).unread[0].signal_id, flush=True)
        await asyncio.sleep(3600)
    await store.close()

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.fixture
async def process(tmp_path):
    """Starts a worker process on a file; all are killed at the end."""
    started = []

    async def start(path: Path, job: str, *more: str) -> asyncio.subprocess.Process:
        command = (sys.executable, "-c", WORKER, str(path), job, *more)
        worker = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.returncode is None:
            worker.kill()
        worker.stdin.close()
        await asyncio.wait_for(worker.communicate(), 60)


async def line(worker):
    return (await asyncio.wait_for(worker.stdout.readline(), 100)).decode().split()


async def kill(worker):
    worker.send_signal(signal.SIGKILL)
    rest = await asyncio.wait_for(worker.stdout.read(), 100)
    await asyncio.wait_for(worker.wait(), 100)
    return rest.decode().splitlines()


async def test_a_killed_process_loses_no_acknowledged_frame_and_its_run_is_claimed_at_once(
    tmp_path, process, make, events_of
):
    """Kill -9 in the middle of a stream: all that was acknowledged is there, and the next process goes on at once:
    the lease, of an hour, is not waited for.
    """
    worker = await process(tmp_path / "runs.db", "write")
    assert await line(worker) == ["claimed", "r1"]
    while (await line(worker))[1] != "200":
        pass
    # The last line may be cut short; a shorter number is a smaller one.
    acked = max([200, *(int(text.split()[1]) for text in await kill(worker) if len(text.split()) == 2)])
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    claim = await asyncio.wait_for(store.claim("default", "w", 0), 100)
    assert claim is not None
    assert claim.key == make.key("r1")
    assert claim.redelivered
    head = await store.head(claim.key)
    assert head.last_seq in (acked, acked + 1)
    assert head.version == head.last_seq
    events = events_of(await store.read(claim.key, 0, limit=10_000_000))
    assert [event.seq for event in events] == list(range(1, head.last_seq + 1))
    await store.append(claim.key, make.frame(head.last_seq + 1, epoch=2), head.version)
    await store.close()


async def test_a_living_process_takes_over_from_a_killed_one_without_waiting_for_the_lease(tmp_path, process, make):
    """The lease is an hour; the lock says much sooner that nobody holds it any more."""
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    worker = await process(tmp_path / "runs.db", "write")
    assert await line(worker) == ["claimed", "r1"]
    assert await store.claim("default", "w", 0.2) is None
    waiting = asyncio.create_task(store.claim("default", "w", 90))
    await kill(worker)
    claim = await asyncio.wait_for(waiting, 100)
    assert claim is not None
    assert claim.redelivered
    await store.close()


async def test_a_follower_sees_what_another_process_writes(tmp_path, process, sqlite, make, writer, events_of):
    """Attach works from any process on the file, for stored and for live frames."""
    await sqlite.create(make.new("r1"))
    await writer(sqlite, make.key("r1")).add()
    worker = await process(tmp_path / "runs.db", "append")
    async with asyncio.timeout(100), aclosing(sqlite.follow(make.key("r1"), 0)) as frames:
        seen = events_of(await anext(frames))
        for n in range(2, 6):
            worker.stdin.write(b"one more\n")
            await worker.stdin.drain()
            seen += events_of(await anext(frames))
            assert [event.seq for event in seen] == list(range(1, n + 1))


async def test_a_thousand_followers_in_another_process_get_the_same_frames(tmp_path, sqlite, make, writer, collect):
    """A run is watched where it does not run: all get every event, and what one growth costs is not a read for each."""
    other = SqliteStore(tmp_path / "runs.db")
    await other.open()
    await sqlite.create(make.new("r1"))
    log = writer(sqlite, make.key("r1"))
    await log.add()
    followers = [asyncio.create_task(collect(other, log.key, 0, 21)) for _ in range(1000)]
    await asyncio.sleep(0.1)
    for _ in range(20):
        await log.add()
        await asyncio.sleep(0.01)
    async with asyncio.timeout(100):
        seen = await asyncio.gather(*followers)
    assert all(events == seen[0] for events in seen)
    assert [event.seq for event in seen[0]] == list(range(1, 22))
    await other.close()


async def test_another_process_claims_what_this_one_creates_and_hears_its_signals(
    tmp_path, process, sqlite, make, until
):
    """Work and signals cross processes, and what is in hand there is not delivered here."""
    worker = await process(tmp_path / "runs.db", "claim")
    await until(lambda: sqlite.polls)
    await sqlite.create(make.new("r1"))
    assert await line(worker) == ["claimed", "r1"]
    assert await sqlite.claim("default", "w", 0.1) is None
    await sqlite.signal(make.key("r1"), b"x", "approve")
    assert await line(worker) == ["signalled", "approve"]
    assert await sqlite.claim("default", "w", 0.1) is None


async def test_of_two_processes_that_answer_the_same_question_exactly_one_wins(tmp_path, process, sqlite, make, writer):
    """The other is told ALREADY_ANSWERED by its own call, and the winner's signal alone is in the inbox."""
    await sqlite.create(make.new("r1"))
    await writer(sqlite, make.key("r1")).park(asks=[f"i{n}" for n in range(40)])
    rivals = [await process(tmp_path / "runs.db", "answer", name) for name in ("left", "right")]
    for rival in rivals:
        rival.stdin.write(b"go\n")
        await rival.stdin.drain()
    outcomes = {"left": {}, "right": {}}
    for name, rival in zip(outcomes, rivals, strict=True):
        for _ in range(40):
            outcome, n = await line(rival)
            outcomes[name][n] = outcome
    inbox = {signal.signal_id for signal in (await sqlite.load(make.key("r1"))).unread}
    assert len(inbox) == 40
    for n in map(str, range(40)):
        assert {outcomes["left"][n], outcomes["right"][n]} == {"won", "ALREADY_ANSWERED"}
        winner = "left" if outcomes["left"][n] == "won" else "right"
        assert f"{n} by {winner}" in inbox


async def test_an_answer_in_one_process_reaches_the_run_in_another(
    tmp_path, process, sqlite, make, writer, claim_now, until
):
    """The parked run is delivered there, and while it is in hand there its worker hears of the next answer."""
    await sqlite.create(make.new("r1"))
    claim = await claim_now(sqlite)
    await writer(sqlite, claim.key).park(asks=["i1", "i2"])
    await claim.ack()
    worker = await process(tmp_path / "runs.db", "claim")
    await until(lambda: sqlite.polls)
    await sqlite.answer(make.answers(claim.key, "i1"))
    assert await line(worker) == ["claimed", "r1"]
    await sqlite.answer(make.answers(claim.key, "i2"))
    assert await line(worker) == ["signalled", "answer:i1"]
    assert await sqlite.claim("default", "w", 0.1) is None


async def test_a_lone_process_never_polls(tmp_path, sqlite, make, until):
    """Looking for others begins when another comes and ends when it goes."""
    await sqlite.create(make.new("r1"))
    await asyncio.sleep(0.1)
    assert sqlite.polls == 0
    other = SqliteStore(tmp_path / "runs.db")
    await other.open()
    await until(lambda: sqlite.polls)
    assert (await other.head(make.key("r1"))).version == 0
    await other.close()
    await until(lambda: sqlite._parts.peers.period)  # it has noticed
    polls = sqlite.polls
    await asyncio.sleep(0.2)
    assert sqlite.polls == polls


async def test_two_stores_on_one_file_append_to_one_log(tmp_path, sqlite, make, events_of):
    """What a store remembers of a log is never older than the file: the right version wins, the stale is fenced."""
    other = SqliteStore(tmp_path / "runs.db")
    await other.open()
    await sqlite.create(make.new("r1"))
    key = make.key("r1")
    for n in range(20):
        writes, lags = (sqlite, other) if n % 2 else (other, sqlite)
        assert await writes.append(key, make.frame(n + 1), n) == n + 1
        with pytest.raises(Fenced):
            await lags.append(key, make.frame(n + 1), n)
    assert [event.seq for event in events_of(await other.read(key, 0))] == list(range(1, 21))
    await other.close()


def stand_still(until):
    """Block the event loop, as a tool may, until something has happened elsewhere."""
    deadline = time.monotonic() + 100
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)


async def test_the_heart_keeps_a_lease_while_the_event_loop_is_blocked(tmp_path, make, claim_now):
    """A blocking tool does not cost the run its worker, however short the lease."""
    store = SqliteStore(tmp_path / "runs.db", lease=6)
    other = SqliteStore(tmp_path / "runs.db", lease=6)
    await store.open()
    await other.open()
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    end = claim.until
    stand_still(lambda: claim.until > end + 6 or claim.lost)
    assert not claim.lost
    assert await other.claim("default", "w", 0.3) is None
    assert not claim.lost
    await claim.ack()
    await store.close()
    await other.close()


async def test_one_beat_keeps_all_leases(tmp_path, make, claim_now, until):
    """A heart with a thousand runs in hand costs one statement each third of a lease."""
    store = SqliteStore(tmp_path / "runs.db", lease=6)
    await store.open()
    for n in range(5):
        await store.create(make.new(f"r{n}"))
    claims = [await claim_now(store) for _ in range(5)]
    beats = []
    store._parts.heart._connection.set_trace_callback(beats.append)
    await until(lambda: len([text for text in beats if text.startswith("UPDATE")]) >= 2)
    store._parts.heart._connection.set_trace_callback(None)
    assert all(str(claim.delivery.token) in beats[-1] for claim in claims)
    assert not any(claim.lost for claim in claims)
    await store.close()


async def test_a_hung_process_loses_its_runs(tmp_path, make, claim_now):
    """When the loop has not ticked for max_stall the heart stops, and the run goes to somebody else."""
    store = SqliteStore(tmp_path / "runs.db", lease=0.4, max_stall=0.3)
    other = SqliteStore(tmp_path / "runs.db")
    await store.open()
    await other.open()
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    stand_still(lambda: claim.lost)
    assert claim.lost
    taken = await claim_now(other)
    assert taken.redelivered
    await claim.nak(0)
    assert not taken.lost
    await claim.ack()
    assert await other.claim("default", "w", 0.05) is None
    await taken.ack()
    await store.close()
    await other.close()


async def test_a_claim_taken_away_is_lost_at_the_next_beat(tmp_path, make, claim_now, until):
    """A worker learns from the heart that somebody else holds its run, before its lease is over."""
    store = SqliteStore(tmp_path / "runs.db", lease=12)
    await store.open()
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    other = SqliteStore(tmp_path / "runs.db")
    await other.open()
    await other.release(make.key("r1"))
    assert (await claim_now(other)).redelivered
    await until(lambda: claim.lost)
    assert time.monotonic() < claim.until
    await other.close()
    await store.close()
