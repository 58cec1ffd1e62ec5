"""Servers of a cluster die, freeze and come back: a stall, never a lost or doubled frame."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from dualclaw_server.engine.store import Ambiguous, Fenced, Unavailable
from dualclaw_server.stores.nats import NatsStore, parse_address
from tests.nats_servers import NatsServers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # The client's socket to a frozen server can never be flushed, so it outlives its event loop.
    pytest.mark.filterwarnings("ignore:.*StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three servers of this module's own, for they are killed."""
    servers = NatsServers(tmp_path_factory.mktemp("nats-failover"), 3)
    yield servers
    servers.stop()


@pytest.fixture
async def store(cluster):
    """A store on all three, which are all up again afterwards."""
    address = parse_address(cluster.url(lease=5, patience=100))
    made = NatsStore(address, accept_loss=True)
    await made.open()
    yield made
    for number, process in enumerate(cluster.processes):
        if process is None:
            cluster.start(number)
    await asyncio.to_thread(cluster.wait)
    await made.close()
    cluster.remove(address.name)


async def test_no_acknowledged_frame_is_lost_when_the_leader_dies_during_appends(cluster, store, make, writer, collect):
    """Four runs write on through the election; a follower sees each event once; every acknowledged version is there."""
    keys = [make.key(f"r{n}") for n in range(4)]
    for key in keys:
        await store.create(make.new(key.run_id))
    following = asyncio.create_task(collect(store, keys[0], 0, 80, 400))
    killed = asyncio.Event()

    async def write(key):
        log = writer(store, key)
        for n in range(80):
            # Some frames are batches: a checkpoint, messages.
            parts = {"checkpoint": b"at %d" % n, "messages": log.messages(f"m{n}")} if n % 10 == 9 else {}
            assert await asyncio.wait_for(log.send(**parts), 150) == n + 1
            if n == 20:
                killed.set()
            await asyncio.sleep(0.005)

    writing = [asyncio.create_task(write(key)) for key in keys]
    await asyncio.wait_for(killed.wait(), 150)
    await asyncio.to_thread(lambda: cluster.kill(cluster.leader(store._address.name)))
    async with asyncio.timeout(300):
        await asyncio.gather(*writing)
        assert [event.seq for event in await following] == list(range(1, 81))
    for key in keys:
        loaded = await store.load(key)
        assert (loaded.head.version, loaded.head.last_seq, loaded.checkpoint) == (80, 80, b"at 79")
        assert [event.seq for event in await collect(store, key, 0, 80)] == list(range(1, 81))


async def test_a_run_goes_through_its_life_while_a_server_is_down(cluster, store, make, writer, claim_now):
    """Two of three are a quorum: create, claim, park, answer, end; the third catches up when it is back."""
    await asyncio.to_thread(cluster.kill, 0)
    await store.create(make.new("r1", "c", request_id="q"))
    claim = await claim_now(store)
    log = writer(store, claim.key)
    await log.park(asks=["i1"])
    await claim.ack()
    cluster.start(0)
    await store.answer(make.answers(claim.key, "i1"))
    claim = await claim_now(store)
    await log.go_on(2, signals=("answer:i1",))
    await asyncio.to_thread(cluster.wait)
    await log.end(epoch=2)
    await claim.ack()
    assert (await store.create(make.new("r2", "c", request_id="q"))).existing
    page = await store.list_runs("acme", states=(), conversation_id="c", page_size=0, page_token="")
    assert [run.id for run in page.items] == ["r1"]


async def test_a_held_run_survives_the_servers_of_its_lease(cluster, store, make, writer, claim_now):
    """The heart reconnects; the claim is not lost, and its run is delivered to nobody else."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    leader = await asyncio.to_thread(cluster.leader, store._address.name)
    await asyncio.to_thread(cluster.kill, leader)
    log = writer(store, claim.key)
    await asyncio.wait_for(log.send(), 150)
    cluster.start(leader)
    await asyncio.to_thread(cluster.wait)
    if not claim.lost:
        await log.end()
        await claim.ack()
        assert await store.claim("default", "w", 6) is None
    else:
        # An election that took longer than the lease: then, and only then, somebody else gets it.
        assert (await claim_now(store)).redelivered


async def test_a_frozen_leader_is_a_stall(cluster, store, make, writer):
    """Frames written meanwhile are there once, and none of the frozen server's answers is taken for a new one."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add()
    leader = await asyncio.to_thread(cluster.leader, store._address.name)
    cluster.freeze(leader)
    try:
        for _ in range(3):
            await asyncio.wait_for(log.send(), 150)
    finally:
        cluster.thaw(leader)
    await asyncio.wait_for(log.send(), 150)
    async with asyncio.timeout(150):
        assert [frame.first_seq for frame in await store.read(log.key, 0)] == [1, 2, 3, 4, 5]


async def test_without_a_quorum_an_append_ends_within_its_patience_and_the_log_is_whole_afterwards(
    cluster, make, writer
):
    """Unavailable or Ambiguous, typed and bounded; when the servers are back the writer finds out how far it came.

    A server that had taken the frame down without a quorum may still bring it in after the log could be read again.
    """
    store = NatsStore(parse_address(cluster.url(patience=6)), accept_loss=True)
    await store.open()
    try:
        await store.create(make.new("r1"))
        log = writer(store, make.key("r1"))
        await log.add()
        for number in (0, 1):
            await asyncio.to_thread(cluster.kill, number)
        with pytest.raises((Ambiguous, Unavailable)) as refused:
            await asyncio.wait_for(log.send(), 90)
        for number in (0, 1):
            cluster.start(number)
        await asyncio.to_thread(cluster.wait)
        sent = False
        doubtful = int(refused.type is Ambiguous)
        async with asyncio.timeout(150):
            while not sent:
                try:
                    head = await store.head(log.key)
                    log.version, log.last_seq = head.version, head.last_seq
                    await log.send()
                    sent = True
                except Ambiguous:
                    doubtful += 1
                except (Unavailable, Fenced):
                    await asyncio.sleep(0.1)
            assert 1 <= head.version <= 1 + doubtful
            async with aclosing(store.follow(log.key, 0)) as frames:
                assert [frame.first_seq for frame in await anext(frames)] == list(range(1, head.version + 2))
    finally:
        await store.close()
        cluster.remove(store._address.name)


async def test_a_log_that_a_server_reads_short_is_no_other_writers(cluster, make, writer):
    """A server that was frozen may take itself for the leader still: what it has not got is read again, not Fenced."""
    store = NatsStore(parse_address(cluster.url(patience=6)), accept_loss=True)
    await store.open()
    try:
        await store.create(make.new("r1"))
        log = writer(store, make.key("r1"))
        await log.send()
        tails = store._parts.appender._tails
        tails[log.key] = replace(tails[log.key], seq=tails[log.key].seq + 100)  # as if it had written what is not read
        with pytest.raises(Unavailable):
            await asyncio.wait_for(log.send(), 90)
    finally:
        await store.close()
        cluster.remove(store._address.name)
