"""What a process remembers of the runs it has just created, and when it must not: readers never notice."""

import asyncio
import threading
from contextlib import aclosing, closing

import pytest

from dualclaw import RunState
from dualclaw.errors import EngineError
from dualclaw_server.stores import SqliteStore, sqlite_read
from dualclaw_server.stores.sqlite_file import connect


@pytest.fixture
async def alone(sqlite, until):
    """A SQLite store that knows that it is alone on its file."""
    await until(lambda: sqlite._parts.peers.period)
    return sqlite


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dualclaw-reader")]


async def test_a_run_of_a_lone_process_needs_no_reader(alone, make, writer, claim_now):
    """From create to its end nothing is read back that was written a moment ago."""
    created = await alone.create(make.new("r1"))
    async with aclosing(alone.follow(created.head.key, 0)) as batches:
        waiting = asyncio.ensure_future(anext(batches))
        claim = await claim_now(alone)
        loaded = await alone.load(claim.key)
        assert not await alone.history("acme", "c-r1", "r1")
        log = writer(alone, claim.key)
        await log.add(0, durable=True, checkpoint=b"claimed")
        await log.end("m")
        assert [frame.last_seq for frame in await asyncio.wait_for(waiting, 100)] == [1]
        await claim.ack()
    assert (loaded.record, loaded.head) == (b"record of r1", created.head)
    assert readers() == []


async def test_a_fresh_run_is_what_the_file_says(alone, make):
    """Head, record, user message and inbox are those a reader finds; each caller gets messages of its own."""
    await alone.create(make.new("r1", request_id="q"))
    with closing(connect(alone._path, read_only=True)) as connection:
        stored = sqlite_read.load(connection, make.key("r1"))
    fresh = await alone.load(make.key("r1"))
    assert fresh == stored
    fresh.messages[0].message.id = "changed"
    fresh.head.run.agent = "changed"
    assert await alone.load(make.key("r1")) == stored


async def test_a_fresh_run_is_forgotten_by_whatever_changes_it(alone, make, writer):
    """A signal, a frame and a purge are seen by the next load."""
    for name in ("r1", "r2", "r3"):
        await alone.create(make.new(name))
    await alone.signal(make.key("r1"), b"body", "s")
    assert [signal.signal_id for signal in (await alone.load(make.key("r1"))).unread] == ["s"]
    await writer(alone, make.key("r2")).add(0, checkpoint=b"c", durable=True)
    loaded = await alone.load(make.key("r2"))
    assert (loaded.head.version, loaded.checkpoint) == (1, b"c")
    await alone.delete(make.key("r3"))
    with pytest.raises(EngineError, match="no such run"):
        await alone.load(make.key("r3"))


async def test_only_the_first_run_of_a_conversation_has_no_history(alone, make, writer, claim_now):
    """The second turn is given what the first one left."""
    await alone.create(make.new("r1", "c"))
    await writer(alone, make.key("r1")).end("m")
    await alone.create(make.new("r2", "c"))
    assert [message.id for message in await alone.history("acme", "c", "r2")] == ["r1-0", "m"]


async def test_a_run_that_another_process_works_on_is_read_from_the_file(alone, make, writer, until):
    """What was remembered before company came does not hide what the other has written."""
    await alone.create(make.new("r1"))
    other = SqliteStore(alone._path)
    await other.open()
    try:
        await until(lambda: alone.polls)
        await writer(other, make.key("r1")).add(2)
        assert (await alone.load(make.key("r1"))).head.last_seq == 2
    finally:
        await other.close()
    await until(lambda: alone._parts.peers.period)
    assert (await alone.load(make.key("r1"))).head.last_seq == 2
    async with aclosing(alone.follow(make.key("r1"), 0)) as batches:
        assert (await asyncio.wait_for(anext(batches), 100))[-1].last_seq == 2


async def test_what_a_newcomer_does_at_once_reaches_who_was_alone(alone, make, writer, claim_now, until):
    """Its first signal and its first frame come before it can have been noticed; neither is missed."""
    signalled = []
    alone.on_signal(signalled.append)
    await alone.create(make.new("r1"))
    await alone.create(make.new("r2"))
    claim = await claim_now(alone)
    free = make.key("r2" if claim.key.run_id == "r1" else "r1")
    async with aclosing(alone.follow(free, 0)) as batches:
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        other = SqliteStore(alone._path)
        await other.open()
        try:
            await other.signal(claim.key, b"body", "s")
            await writer(other, free).add()
            assert (await asyncio.wait_for(waiting, 100))[-1].last_seq == 1
            await until(lambda: claim.key in signalled)
        finally:
            await other.close()


async def test_the_item_of_a_run_goes_with_its_end(alone, make, writer, claim_now):
    """No ack is needed any more, and the claim is not lost by it: its holder has only come to its end."""
    await alone.create(make.new("r1"))
    claim = await claim_now(alone)
    await writer(alone, claim.key).end(state=RunState.RUN_STATE_SUCCEEDED)
    assert not (await alone.inspect(claim.key)).waiting
    assert not claim.lost
    commits = alone.commits
    await claim.ack()
    assert alone.commits == commits
