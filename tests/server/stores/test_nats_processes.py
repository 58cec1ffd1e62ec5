"""Several processes on one NATS store: leases, takeovers, and what each learns of the others.

Each store object here has connections, caches and a heart of its own, as a process would; what only another process can
show (a loop that stands still) is done in one.
"""

import asyncio
import time
from contextlib import aclosing

import pytest

from dualclaw.errors import EngineError
from dualclaw_server.engine.store import Created, Fenced
from dualclaw_server.stores.nats import NatsStore, parse_address
from dualclaw_server.stores.nats.layout import token
from dualclaw_server.stores.nats.link import Link

LEASE = 4.0
"""Seconds; a heart that comes late by half of it still keeps its runs."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["nats_r1", "nats_r3"])
async def stores(request):
    """Makes stores on the same runs, open, with a short lease."""
    cluster = request.getfixturevalue(request.param)
    address = parse_address(cluster.url(lease=LEASE))
    made = []

    async def make():
        made.append(NatsStore(address, accept_loss=True, max_stall=60))
        await made[-1].open()
        return made[-1]

    yield make
    for store in made:
        await store.close()
    cluster.remove(address.name)


async def vanish(store):
    """End a store as kill -9 would: nothing is put back, nothing is said."""
    parts, store._parts = store._parts, None
    for claim in parts.heart.claims():
        parts.heart.drop(claim)
    await parts.heart.close()
    await parts.watch.close()
    parts.queue._closing = True
    parts.queue._ticking.cancel()
    await asyncio.gather(parts.queue._ticking, return_exceptions=True)
    await parts.client.close()


async def test_the_run_of_a_process_that_died_goes_on_in_another(stores, make, claim_now, writer, until):
    """Redelivered when the lease ends, not before it was lost; whatever the dead one still had is fenced."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    claim = await claim_now(first)
    log = writer(first, claim.key)
    await log.add(2, epoch=1)
    await vanish(first)
    taken = await claim_now(second)
    assert (taken.key, taken.redelivered) == (claim.key, True)
    await until(lambda: claim.lost)  # a change of leader delivers early; the old holder is fenced until it knows
    other = writer(second, claim.key)
    other.version, other.last_seq = 1, 2
    await other.add(1, epoch=2)
    await other.end(epoch=2)
    await taken.ack()
    assert await second.claim("default", "w", LEASE + 1) is None


async def test_a_held_run_stays_with_its_holder_for_many_leases(stores, make, claim_now):
    """The heartbeat needs no event loop: here the loop stands still for more than a lease."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    claim = await claim_now(first)
    first_end, deadline = claim.until, time.monotonic() + 100
    while claim.until < first_end + 1.5 * LEASE and not claim.lost and time.monotonic() < deadline:
        time.sleep(0.02)  # noqa: ASYNC251 - a tool that blocks
    assert not claim.lost
    assert await second.claim("default", "w", 0.3) is None
    await claim.nak(0)
    assert (await claim_now(second)).redelivered


async def test_a_lease_that_nobody_keeps_is_lost_and_its_ack_does_nothing(stores, make, claim_now, until):
    """JetStream honours the ack of an old delivery; a holder that was too slow must not send it, or work is lost."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    claim = await claim_now(first)
    first._parts.heart.drop(claim)
    taken = await claim_now(second)
    await until(lambda: claim.lost)
    claim._lost, claim.until = False, time.monotonic() + 60  # it believes otherwise
    await claim.ack()
    assert (await second.inspect(claim.key)).worker == "worker"
    await asyncio.sleep(LEASE * 1.5)
    assert not taken.lost
    assert await first.claim("default", "w", 0.2) is None
    await vanish(second)
    assert (await claim_now(first)).redelivered


async def test_two_writers_of_a_version_one_wins(stores, make):
    """Compare and set in the stream, whatever either process remembers."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    key = make.key("r1")
    for version in range(5):
        frame = make.frame(version + 1, text="a")
        outcomes = await asyncio.gather(
            first.append(key, frame, version), second.append(key, frame, version), return_exceptions=True
        )
        assert sorted(map(str, map(type, outcomes))) == [str(Fenced), str(int)]
    heads = [await store.head(key) for store in (first, second)]
    assert heads[0] == heads[1]
    assert heads[0].version == 5


async def test_a_writer_that_knows_the_end_of_its_log_is_fenced_all_the_same(stores, make, writer):
    """A frame of text is sent without a look at the log; the servers refuse it when another writer was there."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    log = writer(first, make.key("r1"))
    await log.add(2)
    await second.append(log.key, make.frame(3, text="taken over"), 1)
    with pytest.raises(Fenced):
        await log.add()
    assert [frame.first_seq for frame in await second.read(log.key, 0)] == [1, 3]


async def test_an_item_whose_run_ended_before_anybody_claimed_it_is_delivered_to_nobody(stores, make, writer):
    """Its message is still on the queue, and stale."""
    store = await stores()
    await store.create(make.new("r1"))
    await writer(store, make.key("r1")).end()
    assert await store.claim("default", "w", 0.5) is None
    assert not (await store.inspect(make.key("r1"))).waiting


async def test_followers_elsewhere_see_each_frame_at_once_and_once(stores, make, writer, events_of):
    """Small frames come republished, large ones by the log; nothing is missed where the writer changes."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    key = make.key("r1")

    async def watch(after):
        events = []
        async with aclosing(second.follow(key, after)) as frames:
            async for some in frames:
                events += events_of(some)
                if events[-1].seq >= 40:
                    return events
        return events

    watching = [asyncio.create_task(watch(after)) for after in (0, 0, 7)]
    log = writer(first, key)
    for n in range(20):
        await log.add(text="z" * 300_000 if n == 5 else "x")
        if n % 4 == 0:
            await asyncio.sleep(0.02)
    log.store = second
    for _ in range(20):
        await log.add(epoch=2)
    async with asyncio.timeout(100):
        seen = await asyncio.gather(*watching)
    assert [[event.seq for event in events] for events in seen] == [list(range(a + 1, 41)) for a in (0, 0, 7)]


async def test_a_lost_announcement_delays_a_follower_by_seconds_only(stores, make, writer, events_of):
    """Republished frames are a convenience; the log's end is looked at regularly."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    log = writer(first, make.key("r1"))
    await log.add()
    async with asyncio.timeout(100), aclosing(second.follow(log.key, 0)) as frames:
        events_of(await anext(frames))
        await (await second._parts.watch._runs[log.key].ready).unsubscribe()
        await log.add()
        assert [event.seq for event in events_of(await anext(frames))] == [2]


async def test_a_signal_reaches_the_worker_in_another_process(stores, make, claim_now):
    """A cancel from an api process is heard by the one that works; also when its note was lost."""
    api, worker = await stores(), await stores()
    reached = asyncio.Queue()
    worker.on_signal(reached.put_nowait)
    await api.create(make.new("r1"))
    claim = await claim_now(worker)
    await api.signal(claim.key, b"x", "s")
    assert await asyncio.wait_for(reached.get(), 100) == claim.key
    await api._parts.commands.signal(claim.key, b"y", "t")  # stored, and no note sent
    assert await asyncio.wait_for(reached.get(), 100) == claim.key
    assert [signal.signal_id for signal in (await worker.load(claim.key)).unread] == ["s", "t"]


async def test_each_signal_whose_note_was_lost_is_heard_of(stores, make, claim_now):
    """A run at work for hours gets more than one; the last of them may be the cancel."""
    api, worker = await stores(), await stores()
    reached = asyncio.Queue()
    worker.on_signal(reached.put_nowait)
    await api.create(make.new("r1"))
    claim = await claim_now(worker)
    for name in ("a", "b", "c"):
        await api._parts.commands.signal(claim.key, b"x", name)
        assert await asyncio.wait_for(reached.get(), 100) == claim.key


async def test_a_release_by_another_process_ends_the_claim(stores, make, claim_now, until):
    """At once by a note, and at the next heartbeat without one."""
    api, worker = await stores(), await stores()
    for noted in (True, False):
        name = f"r{noted}"
        await api.create(make.new(name))
        claim = await claim_now(worker)
        if noted:
            assert await api.release(claim.key)
        else:
            assert await api._parts.commands.release(claim.key)
        await until(lambda held=claim: held.lost)
        taken = await claim_now(api)
        assert (taken.key, taken.redelivered) == (claim.key, True)
        await taken.ack()


async def test_of_two_processes_that_answer_exactly_one_wins(stores, make, writer, claim_now):
    """Decisions are create-if-absent for each question."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    claim = await claim_now(first)
    await writer(first, claim.key).park(asks=["i1"])
    await claim.ack()
    calls = [store.answer(make.answers(claim.key, "i1", signal_id=str(n))) for n, store in enumerate((first, second))]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Created", "EngineError"]
    assert [it.reason for it in outcomes if isinstance(it, EngineError)] == ["ALREADY_ANSWERED"]
    assert isinstance(next(it for it in outcomes if not isinstance(it, EngineError)), Created)
    assert len((await second.load(claim.key)).unread) == 1


async def test_lists_show_what_other_processes_did(stores, make, writer):
    """New runs, new states, and what is gone; a page is never short for it."""
    first, second = await stores(), await stores()

    async def listed(store):
        page = await store.list_runs("acme", states=(), conversation_id="", page_size=3, page_token="")
        return [(run.id, run.state) for run in page.items]

    for n in range(4):
        await first.create(make.new(f"r{n}"))
    assert [name for name, _ in await listed(second)] == ["r3", "r2", "r1"]
    await writer(first, make.key("r3")).end()
    await first.delete(make.key("r2"))
    assert [name for name, _ in await listed(second)] == ["r3", "r1", "r0"]
    assert await listed(first) == await listed(second)
    await first.delete_conversation("acme", "c-r3")
    page = await second.list_conversations("acme", page_size=0, page_token="")
    assert {it.id for it in page.items} == {"c-r0", "c-r1", "c-r2"}


async def test_timers_fire_in_whichever_process_is_there(stores, make, claim_now, writer):
    """The one that set it is gone; another one's worker is delivered the run when its time has come."""
    first, second = await stores(), await stores()
    await first.create(make.new("r1"))
    claim = await claim_now(first)
    at = time.time() + 1
    await first.wake(claim.key, at)
    await writer(first, claim.key).park(asks=["i1"])
    await claim.ack()
    await vanish(first)
    taken = await claim_now(second)
    assert time.time() >= at
    assert (taken.key, taken.redelivered) == (claim.key, False)


async def test_a_run_that_is_put_back_for_longer_than_a_lease_is_delivered_by_a_timer(stores, make, claim_now):
    """A long back-off holds no place among those in hand, and outlives the process that gave it."""
    first, second = await stores(), await stores()
    for name in ("r1", "r2"):
        await first.create(make.new(name))
    began = time.monotonic()
    for delay in (LEASE + 1, 300):
        await (await claim_now(first)).nak(delay)
    consumer = f"CONSUMER.INFO.{second._address.name}.pool-{token('default')}"
    async with asyncio.timeout(100):  # acks go out without waiting for an answer
        while b'"num_ack_pending":0' not in await second._parts.queue._link.call(consumer, {}):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await vanish(first)
    seen = await second.inspect(make.key("r1"))
    assert (seen.waiting, seen.worker) == (True, "")
    taken = await claim_now(second)
    assert (taken.key, taken.redelivered) == (make.key("r1"), True)
    assert time.monotonic() - began >= LEASE + 1
    # A signal does not wait for the back-off to end; what the timer brings later is stale then.
    await second.signal(make.key("r2"), b"x", "s")
    assert (await claim_now(second)).key == make.key("r2")


async def test_a_consumer_that_is_gone_is_made_anew(stores, make, claim_now):
    """Whoever deletes it must not have stopped the work of all processes until they are started again."""
    store = await stores()
    link = store._parts.reader._link
    assert await store.claim("default", "w", 0.1) is None
    await link.call(f"CONSUMER.DELETE.{link.subjects.stream}.pool-{token('default')}", {})
    await store.create(make.new("r1"))
    assert (await claim_now(store)).key == make.key("r1")


async def test_a_claim_does_not_wait_for_a_consumer_that_is_made_anew(stores, make, claim_now):
    """An election looks as if the consumer were gone; its end is nothing a claim of a moment waits for."""

    class Mute(Link):
        asked = 0

        async def call(self, subject, body):
            if subject.startswith("CONSUMER.CREATE."):
                self.asked += 1
                await asyncio.Event().wait()
            return await super().call(subject, body)

    store = await stores()
    assert await store.claim("default", "w", 0.1) is None
    queue = store._parts.queue
    mute = queue._link = Mute(queue._link.client, queue._link.subjects)
    for _ in range(2):
        queue._refusing.add(f"pool-{token('default')}")
        assert await asyncio.wait_for(store.claim("default", "w", 0.1), 100) is None
    await store.create(make.new("r1"))
    assert (await claim_now(store)).key == make.key("r1")
    assert mute.asked == 1
