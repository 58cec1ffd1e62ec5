"""inspect and release: what operators see of a run, and how they take it from a worker that hangs."""

import asyncio
import time

import pytest

from dualclaw.errors import EngineError
from dualclaw_server.engine.store import MAX_FRAME_INFOS, Fenced, FrameInfo


async def test_an_inspection_shows_where_a_run_stands(store, make, writer):
    """Head, record, checkpoint, frames with their sizes, and the signals nobody has read."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add(0, epoch=1, durable=True)
    await log.add(2, durable=True, checkpoint=b"saved")
    await log.add(1, text="z" * 300_000)
    await store.signal(log.key, b"please", "s")
    seen = await store.inspect(log.key)
    assert seen.head == await store.head(log.key)
    assert (seen.record, seen.checkpoint) == (b"record of r1", b"saved")
    assert [frame for frame in seen.frames if frame.count] == [
        FrameInfo(1, 2, 1, log.make.frame(1).state, True, len(make.events(1, 2))),
        FrameInfo(3, 1, 1, log.make.frame(1).state, False, len(make.events(3, 1, "z" * 300_000))),
    ]
    assert [(signal.signal_id, signal.body) for signal in seen.unread] == [("s", b"please")]


async def test_an_inspection_shows_who_works_and_when_a_run_is_due(store, make, writer, claim_now):
    """Waiting, in hand, put back, done: each shows as what it is."""
    await store.create(make.new("r1"))
    key = make.key("r1")
    seen = await store.inspect(key)
    assert (seen.waiting, seen.worker, seen.deliveries, seen.timers) == (True, "", 0, ())
    assert seen.ready_time <= time.time() + 1
    claim = await claim_now(store)
    seen = await store.inspect(key)
    assert (seen.waiting, seen.worker, seen.deliveries) == (True, "worker", 1)
    assert seen.ready_time > time.time()
    await claim.nak(300)
    seen = await store.inspect(key)
    assert (seen.waiting, seen.worker, seen.deliveries) == (True, "", 1)
    assert time.time() + 200 < seen.ready_time < time.time() + 400
    await store.release(key)
    claim = await claim_now(store)
    for after in (900.0, 500.0):
        await store.wake(key, 4_000_000_000 + after)
    await writer(store, key).park(asks=["i1"])
    await claim.ack()
    seen = await store.inspect(key)
    assert (seen.waiting, seen.worker, seen.deliveries, seen.ready_time) == (False, "", 0, 0.0)
    assert seen.timers == (4_000_000_500.0, 4_000_000_900.0)


async def test_an_inspection_lists_the_newest_frames_of_a_long_log(store, make, writer):
    """Oldest first, at most a thousand: an operator's page stays a page."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    for _ in range(MAX_FRAME_INFOS + 2):
        log.send()
    await log.add()
    frames = (await store.inspect(log.key)).frames
    assert [frame.first_seq for frame in frames] == list(range(4, MAX_FRAME_INFOS + 4))


async def test_what_is_not_there_cannot_be_inspected_or_released(store, make):
    """UNKNOWN_RUN, for another tenant's run too."""
    await store.create(make.new("r1"))
    for key in (make.key("nobody"), make.key("r1", "other")):
        for call in (store.inspect(key), store.release(key)):
            with pytest.raises(EngineError) as refused:
                await call
            assert refused.value.reason == "UNKNOWN_RUN"


async def test_a_released_run_is_taken_from_its_worker(store, make, claim_now, writer):
    """Its claim is lost, at once in this process; the next holder fences it, and its ack does nothing."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    log = writer(store, claim.key)
    await log.add(0, epoch=1)
    assert await store.release(claim.key)
    assert claim.lost
    taken = await claim_now(store)
    assert (taken.key, taken.redelivered, taken.lost) == (claim.key, True, False)
    await store.append(claim.key, make.frame(1, 0, epoch=2), 1)
    with pytest.raises(Fenced):
        await log.add()
    await claim.ack()
    await claim.nak(0)
    assert not taken.lost
    assert await store.claim("default", "w", 0.05) is None
    await taken.ack()
    assert not (await store.inspect(claim.key)).waiting


async def test_a_deleted_run_is_taken_from_its_worker(store, make, claim_now):
    """It starts no further call for a run that is gone; giving the item back does nothing."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await store.delete(claim.key)
    assert claim.lost
    await claim.nak(0)
    assert await store.claim("default", "w", 0.02) is None


async def test_a_release_ends_a_back_off(store, make, claim_now):
    """What was put back for minutes is delivered at once; a sleeping worker is woken for it."""
    await store.create(make.new("r1"))
    await (await claim_now(store)).nak(500)
    waiting = asyncio.create_task(store.claim("default", "w", 100))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert await store.release(make.key("r1"))
    assert (await asyncio.wait_for(waiting, 100)).redelivered


async def test_a_run_without_a_work_item_has_nothing_to_release(store, make, claim_now, writer):
    """A parked run waits for people and a finished one for nobody: False, and nothing is delivered."""
    await store.create(make.new("r1"))
    await store.create(make.new("r2"))
    for name in ("r1", "r2"):
        claim = await claim_now(store)
        log = writer(store, make.key(name))
        await (log.park(asks=["i1"]) if name == "r1" else log.end())
        await claim.ack()
        assert not await store.release(make.key(name))
    assert await store.claim("default", "w", 0.02) is None


async def test_a_release_swallows_no_signal(store, make, claim_now):
    """One that came while the run was in hand is in the inbox of whoever claims next."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await store.signal(claim.key, b"x", "s")
    await store.release(claim.key)
    taken = await claim_now(store)
    assert [signal.signal_id for signal in (await store.load(taken.key)).unread] == ["s"]
