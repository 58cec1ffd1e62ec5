"""SqliteStore and clocks that jump: leases end by the wall clock, the only one that processes share."""

import sqlite3
import time
from contextlib import closing

import pytest

from dualclaw_server.engine.store import Fenced
from dualclaw_server.stores import SqliteStore


class Hands:
    """A clock that a test may move, or stop."""

    def __init__(self) -> None:
        self.shift = 0.0
        self.stopped: float | None = None

    def __call__(self) -> float:
        return (time.time() if self.stopped is None else self.stopped) + self.shift


@pytest.fixture
async def opened(tmp_path):
    """Opens stores on one file, each a process of its own as far as leases go; all are closed at the end."""
    stores = []

    async def open_store(**options):
        store = SqliteStore(tmp_path / "runs.db", **options)
        await store.open()
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        await store.close()


async def test_a_clock_that_jumps_ahead_takes_no_run_from_a_living_worker(tmp_path, opened, make, claim_now, until):
    """Every lease looks over; but whoever lives beats before the time it is given is over, each time, and keeps it."""
    clock = Hands()
    clock.stopped = time.time()
    store, other = await opened(clock=clock, lease=9), await opened(clock=clock, lease=9)
    await store.create(make.new("r1"))
    claim = await claim_now(store)

    def warned():
        with closing(sqlite3.connect(tmp_path / "runs.db")) as connection:
            return connection.execute("SELECT warned FROM work").fetchone() == (1,)

    for _ in range(2):
        clock.shift += 3600.0
        assert await other.claim("default", "w", 0) is None  # half a lease is given, and it beats every third
        await until(lambda: not warned())
        clock.shift += 5.0
        assert await other.claim("default", "w", 0) is None
        assert not claim.lost
    await claim.ack()
    assert not (await store.inspect(make.key("r1"))).waiting


async def test_a_lease_that_nobody_keeps_ends_once_and_for_all(opened, make, claim_now):
    """The time for one more beat is given once; then somebody else works on the run, and fences the old worker."""
    clock = Hands()
    hung, other = await opened(clock=clock, lease=0.9, max_stall=-1), await opened(clock=clock, lease=0.9)
    await hung.create(make.new("r1"))
    claim = await claim_now(hung)
    taken = await claim_now(other)
    assert (taken.key, taken.redelivered) == (claim.key, True)
    assert claim.lost
    await other.append(claim.key, make.frame(1, 0, epoch=1), 0)
    with pytest.raises(Fenced):
        await hung.append(claim.key, make.frame(1), 0)


async def test_a_clock_that_goes_back_delays_no_work(opened, make, claim_now):
    """What was due stays due, for the process that sees the jump and for others; a lease is no longer than it was."""
    clock = Hands()
    store, other = await opened(clock=clock), await opened(clock=clock)
    await store.create(make.new("r1"))
    await store.create(make.new("r2"))
    held = await claim_now(store)
    clock.shift = -86_400.0
    claim = await claim_now(store)
    assert {held.key.run_id, claim.key.run_id} == {"r1", "r2"}
    seen = await store.inspect(held.key)
    assert seen.ready_time <= clock() + 31
    await store.create(make.new("r3"))
    assert (await claim_now(other)).key == make.key("r3")
    assert not held.lost


async def test_a_file_from_the_future_is_worked_on_at_once(opened, make, claim_now):
    """A machine whose clock was wrong left work behind; after the correction nobody waits for that day."""
    ahead = await opened(clock=lambda: time.time() + 86_400)
    await ahead.create(make.new("r1"))
    await ahead.create(make.new("r2"))
    await (await claim_now(ahead)).nak(5.0)
    await ahead.close()
    store = await opened()
    assert {(await claim_now(store)).key.run_id for _ in range(2)} == {"r1", "r2"}


async def test_a_back_off_has_its_bound(opened, make, claim_now):
    """Nothing is put back for longer than an hour, so what lies further ahead is a wrong clock's."""
    clock = Hands()
    store = await opened(clock=clock)
    await store.create(make.new("r1"))
    await (await claim_now(store)).nak(1e9)
    clock.shift = 3500.0
    assert await store.claim("default", "w", 0) is None
    clock.shift = 3601.0
    assert await store.claim("default", "w", 0) is not None


async def test_a_timer_keeps_the_time_of_the_wall(opened, make, claim_now, writer):
    """An approval expires at its hour: a jump over it fires it, a jump back puts it off."""
    clock = Hands()
    store = await opened(clock=clock)
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await store.wake(claim.key, clock() + 600)
    await writer(store, claim.key).park(asks=["i1"])
    await claim.ack()
    clock.shift = -600.0
    assert await store.claim("default", "w", 0) is None
    clock.shift = 601.0
    assert (await claim_now(store)).key == claim.key


async def test_times_that_run_backwards_keep_the_order_of_things(opened, make, writer):
    """Lists, messages and logs go by numbers, not by clocks."""
    clock = Hands()
    store = await opened(clock=clock)
    for n in range(3):
        clock.shift -= 1000.0
        await store.create(make.new(f"r{n}", "c", on_busy=2))
    for n in range(3):
        clock.shift -= 1000.0
        await writer(store, make.key(f"r{n}")).end(f"answer {n}")
    runs = await store.list_runs("acme", states=(), conversation_id="c", page_size=0, page_token="")
    assert [run.id for run in runs.items] == ["r2", "r1", "r0"]
    page = await store.list_messages("acme", "c", page_size=0, page_token="")
    assert [message.id for message in page.items] == [name for n in range(3) for name in (f"r{n}-0", f"answer {n}")]
