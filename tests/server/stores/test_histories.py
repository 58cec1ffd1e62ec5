"""Histories that stores keep: a turn is given the same messages again, and everything that others have changed."""

import sqlite3
from contextlib import closing

import pytest

from dualclaw import BusyPolicy, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.history import History
from dualclaw_server.stores.histories import SHORTEST, Histories
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.stores.sqlite import SqliteStore

QUEUE, CANCELLED = BusyPolicy.BUSY_POLICY_QUEUE, RunState.RUN_STATE_CANCELLED


async def turns(store, make, writer, first, count, conversation="c"):
    """Store so many finished runs with an answer each."""
    for number in range(first, first + count):
        await store.create(make.new(f"r{number}", conversation))
        await writer(store, make.key(f"r{number}")).end(f"a{number}")


def expected(last):
    return [name for number in range(last + 1) for name in (f"r{number}-0", f"a{number}")]


def ids(messages):
    return [message.id for message in messages]


@pytest.fixture(params=["memory", "sqlite"])
async def keeping(request, tmp_path):
    """A store that keeps histories."""
    store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "runs.db")
    await store.open()
    yield store
    await store.close()


async def test_each_turn_is_given_the_messages_of_the_one_before_and_the_new_ones(keeping, make, writer):
    """The very same objects come again, and the ids of their calls with them."""
    await turns(keeping, make, writer, 0, SHORTEST)
    before = History()
    for number in range(SHORTEST, SHORTEST + 5):
        await keeping.create(make.new(f"r{number}", "c"))
        history = await keeping.history("acme", "c", f"r{number}")
        assert ids(history) == expected(number - 1)
        assert all(one is other for one, other in zip(before, history, strict=False))
        assert history.call_ids == frozenset()
        again = await keeping.history("acme", "c", f"r{number}")
        assert all(one is other for one, other in zip(history, again, strict=True))
        before = history
        await writer(keeping, make.key(f"r{number}")).end(f"a{number}")


async def test_what_a_run_still_writes_is_seen_by_those_behind_it(keeping, make, writer):
    """A question cancelled in the queue has its place before the active run has ended; nothing is settled by it."""
    await turns(keeping, make, writer, 0, SHORTEST)
    for name in ("r16", "cancelled", "r17"):
        await keeping.create(make.new(name, "c", on_busy=QUEUE))
    await writer(keeping, make.key("cancelled")).end(state=CANCELLED)
    early = ids(await keeping.history("acme", "c", "cancelled"))
    await keeping.history("acme", "c", "r17")
    await writer(keeping, make.key("r16")).end("a16")
    assert early == [*expected(15), "r16-0"]
    assert ids(await keeping.history("acme", "c", "cancelled")) == expected(16)
    assert ids(await keeping.history("acme", "c", "r17")) == [*expected(16), "cancelled-0"]


async def test_an_earlier_run_still_sees_only_what_came_before_it(keeping, make, writer):
    """What is kept for the active run is not given to another one."""
    await turns(keeping, make, writer, 0, SHORTEST)
    await keeping.create(make.new("r16", "c"))
    await keeping.history("acme", "c", "r16")
    assert ids(await keeping.history("acme", "c", "r9")) == expected(8)


async def test_a_conversation_deleted_by_another_process_is_not_remembered(tmp_path, make, writer):
    """Nor is it mixed up with a new one of the same name."""
    one, other = SqliteStore(tmp_path / "runs.db"), SqliteStore(tmp_path / "runs.db")
    await one.open()
    await other.open()
    try:
        await turns(one, make, writer, 0, SHORTEST)
        await one.create(make.new("r16", "c"))
        assert len(await one.history("acme", "c", "r16")) == 2 * SHORTEST
        await writer(one, make.key("r16")).end("a16")
        await turns(other, make, writer, 17, 1)
        await one.create(make.new("r18", "c"))
        assert ids(await one.history("acme", "c", "r18")) == expected(17)
        await writer(one, make.key("r18")).end("a18")
        await other.delete_conversation("acme", "c")
        with pytest.raises(EngineError, match="conversation"):
            await one.history("acme", "c", "r18")
        await turns(other, make, writer, 30, 1)
        await one.create(make.new("r31", "c"))
        assert ids(await one.history("acme", "c", "r31")) == ["r30-0", "a30"]
    finally:
        await other.close()
        await one.close()


async def test_a_message_taken_out_of_the_file_is_gone(tmp_path, make, writer):
    """An operator who removes what must not be there need not restart the engines."""
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    try:
        await turns(store, make, writer, 0, SHORTEST)
        await store.create(make.new("r16", "c"))
        assert len(await store.history("acme", "c", "r16")) == 2 * SHORTEST
        with closing(sqlite3.connect(tmp_path / "runs.db")) as file, file:
            file.execute("DELETE FROM messages WHERE activation = 3 AND position = 1")
        assert ids(await store.history("acme", "c", "r16")) == [name for name in expected(15) if name != "a2"]
    finally:
        await store.close()


def test_memory_is_bounded(make):
    """Of many histories those read last stay, within the bound; short ones are never kept."""
    histories = Histories(100_000)
    for number in range(50):
        messages = History(make.message(f"{number}-{place}") for place in range(SHORTEST))
        assert histories.keep(number, None, 2, SHORTEST, messages, 10_000) == messages
        assert 0 < histories.size <= 100_000
    kept = histories.find(49, 2)
    assert kept is not None
    assert kept.count == SHORTEST
    assert histories.find(0, 2) is None
    assert histories.find(49, 1) is None
    histories.keep(60, None, 2, 1, History([make.message("x")]), 10)
    assert histories.find(60, 2) is None
