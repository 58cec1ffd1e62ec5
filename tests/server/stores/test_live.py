"""Live and Bell: the parts that hand frames and work over, by themselves."""

import asyncio
import time
from contextlib import aclosing

import pytest

from dualclaw_server.engine.store import Unavailable
from dualclaw_server.stores.bell import Bell
from dualclaw_server.stores.live import Live


class Log:
    """A log in a list, and how often it was read."""

    def __init__(self, live, key):
        self.live = live
        self.key = key
        self.frames = []
        self.reads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False

    def add(self, frame, *, publish=True):
        self.frames.append(frame)
        if publish:
            self.live.publish(self.key, frame)

    async def read(self, key, after):
        self.reads += 1
        if self.broken:
            raise Unavailable("broken")
        seen = list(self.frames)
        await self.gate.wait()
        return [frame.after(after) for frame in seen if frame.last_seq > after], True

    def follow(self, after):
        return self.live.follow(self.key, after, self.read)


async def turns():
    """Let every task come as far as it does without anybody's help."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def log(make):
    return Log(Live(max_pending=1000), make.key("r1"))


async def test_a_follower_that_keeps_up_reads_the_log_once(log, make, events_of):
    """Live frames come from memory, each as its own hand-over."""
    async with asyncio.timeout(100), aclosing(log.follow(0)) as frames:
        log.add(make.frame(1))
        seen = events_of(await anext(frames))
        for seq in range(2, 20):
            log.add(make.frame(seq))
            seen += events_of(await anext(frames))
    assert [event.seq for event in seen] == list(range(1, 20))
    assert log.reads == 1


async def test_a_follower_beyond_its_bound_keeps_nothing_and_reads_the_log(log, make, events_of):
    """Bytes per slow follower are bounded; it loses nothing."""
    async with asyncio.timeout(100), aclosing(log.follow(0)) as frames:
        log.add(make.frame(1))
        seen = events_of(await anext(frames))
        (subscriber,) = log.live._subscribers[log.key]
        for seq in range(2, 100):
            log.add(make.frame(seq, text="w" * 100))
            assert subscriber.size <= 1000
            assert sum(len(frame.body) for frame in subscriber.frames) <= 1000
        seen += events_of(await anext(frames))
    assert [event.seq for event in seen] == list(range(1, 100))
    assert log.reads == 2


async def test_a_gap_in_the_live_frames_is_filled_from_the_log(log, make, events_of):
    """Frames another process wrote in between were never handed over here, at the front or in the middle."""
    async with asyncio.timeout(100), aclosing(log.follow(0)) as frames:
        log.add(make.frame(1))
        seen = events_of(await anext(frames))
        log.add(make.frame(2), publish=False)
        log.add(make.frame(3))
        seen += events_of(await anext(frames))
        log.add(make.frame(4))
        log.add(make.frame(5), publish=False)
        log.add(make.frame(6, 2))
        seen += events_of(await anext(frames))
    assert [event.seq for event in seen] == list(range(1, 8))


async def test_frames_that_were_read_are_not_shown_again_when_they_come_live(log, make, events_of):
    """The seam between log and live is trimmed by seq, also inside a frame."""
    log.add(make.frame(1, 3))
    async with asyncio.timeout(100), aclosing(log.follow(1)) as frames:
        seen = events_of(await anext(frames))
        log.live.publish(log.key, make.frame(1, 3))
        log.live.publish(log.key, make.frame(2, 4))
        seen += events_of(await anext(frames))
    assert [event.seq for event in seen] == [2, 3, 4, 5]


async def test_a_thousand_that_attach_at_once_share_the_reads(log, make, events_of):
    """The second read serves all who came while the first was under way, and all get the very same frames."""
    log.add(make.frame(1, 3))
    log.gate.clear()
    followers = [log.follow(0) for _ in range(1000)]
    first = asyncio.create_task(anext(followers[0]))
    await turns()
    rest = [asyncio.create_task(anext(follower)) for follower in followers[1:]]
    await turns()
    log.gate.set()
    async with asyncio.timeout(100):
        batches = [await first, *(await asyncio.gather(*rest))]
    assert log.reads == 2
    assert all(batch == batches[0] for batch in batches)
    assert len({id(batch[0].body) for batch in batches}) == 1
    for follower in followers:
        await follower.aclose()


async def test_a_run_that_grows_elsewhere_is_read_once_for_all_its_followers(log, make, events_of):
    """However many watch a run of another process, each growth costs a read, not one for each of them."""
    followers = [log.follow(0) for _ in range(300)]
    log.add(make.frame(1))
    async with asyncio.timeout(100):
        await asyncio.gather(*(anext(follower) for follower in followers))
        before = log.reads
        for seq in range(2, 12):
            waiting = [asyncio.create_task(anext(follower)) for follower in followers]
            await asyncio.sleep(0)
            log.add(make.frame(seq), publish=False)
            log.live.reread(log.key)
            for batch in await asyncio.gather(*waiting):
                assert [event.seq for event in events_of(batch)] == [seq]
    assert log.reads - before <= 20
    for follower in followers:
        await follower.aclose()


async def test_nobody_joins_a_read_that_has_begun(log, make, events_of):
    """Such a read may miss what was committed before the joiner came; the joiner's own read comes after it."""
    log.gate.clear()
    early, late = log.follow(0), log.follow(0)
    first = asyncio.create_task(anext(early))
    await turns()
    log.frames.append(make.frame(1))  # committed, and told to nobody who is here
    second = asyncio.create_task(anext(late))
    await turns()
    log.gate.set()
    async with asyncio.timeout(100):
        assert [event.seq for event in events_of(await second)] == [1]
        log.live.reread(log.key)
        assert [event.seq for event in events_of(await first)] == [1]
    for follower in (early, late):
        await follower.aclose()


async def test_a_shared_read_survives_those_who_leave_and_its_failure_reaches_all(log, make):
    """One client's end is not another's; a failed read is told to everybody who waits for it, and tried anew after."""
    log.add(make.frame(1))
    log.gate.clear()
    followers = [log.follow(0) for _ in range(3)]
    waiting = [asyncio.create_task(anext(follower)) for follower in followers]
    await turns()
    waiting[0].cancel()
    await turns()
    log.gate.set()
    async with asyncio.timeout(100):
        assert [len(await one) for one in waiting[1:]] == [1, 1]
    await asyncio.gather(waiting[0], return_exceptions=True)
    log.broken = True
    failing = [asyncio.create_task(anext(log.follow(0))) for _ in range(3)]
    async with asyncio.timeout(100):
        assert [type(one) for one in await asyncio.gather(*failing, return_exceptions=True)] == [Unavailable] * 3
    log.broken = False
    async with asyncio.timeout(100), aclosing(log.follow(0)) as frames:
        assert len(await anext(frames)) == 1
    for follower in followers:
        await follower.aclose()


async def test_a_thousand_stalled_followers_keep_the_same_few_frames(log, make):
    """What waits for them is bounded for all together, not only for each."""
    log.add(make.frame(1))
    followers = [log.follow(0) for _ in range(1000)]
    async with asyncio.timeout(100):
        await asyncio.gather(*(anext(follower) for follower in followers))
    for seq in range(2, 500):
        log.add(make.frame(seq, text="w" * 90))
        waiting = {id(frame): len(frame.body) for one in log.live._subscribers[log.key] for frame in one.frames}
        assert sum(waiting.values()) <= 1000
    for follower in followers:
        await follower.aclose()


async def test_closing_ends_every_follower(log, make):
    """Nobody waits for a store that is gone."""
    async with asyncio.timeout(100), aclosing(log.follow(0)) as frames:
        waiting = asyncio.create_task(anext(frames))
        await turns()
        log.live.close()
        with pytest.raises(Unavailable):
            await waiting
    assert log.live.followers(log.key) == 0


async def test_a_ring_whose_waiter_left_is_passed_on():
    """The second sleeper wakes when the first was cancelled with the ring in its hand."""
    bell = Bell(time.time)
    first, second = (asyncio.create_task(bell.wait("p", bell.ticket("p"), 100)) for _ in range(2))
    await turns()
    bell.ring("p")
    first.cancel()
    await turns()
    assert second.done()
    assert await second
    assert await asyncio.gather(first, return_exceptions=True) != [True]


async def test_one_ring_wakes_one_sleeper():
    """A thousand idle workers do not all run for one item."""
    bell = Bell(time.time)
    ticket = bell.ticket("p")
    sleepers = [asyncio.create_task(bell.wait("p", ticket, 100)) for _ in range(5)]
    await turns()
    assert bell.awaited() == ["p"]
    bell.ring("other")
    bell.ring("p")
    await turns()
    assert [sleeper.result() for sleeper in sleepers if sleeper.done()] == [True]
    for sleeper in sleepers:
        sleeper.cancel()
    await asyncio.gather(*sleepers, return_exceptions=True)
    assert bell.awaited() == []


async def test_a_sleeper_nobody_rings_for_gets_its_turn_back():
    """It is told that its time is over, and is not waited for any more."""
    bell = Bell(time.time)
    assert not await asyncio.wait_for(bell.wait("p", bell.ticket("p"), 0.05), 100)
    assert bell.awaited() == []


async def test_a_ring_between_ticket_and_wait_is_not_missed():
    """Work that appears while a claimer looks elsewhere ends its wait at once."""
    bell = Bell(time.time)
    ticket = bell.ticket("p")
    bell.ring("p")
    waiting = asyncio.create_task(bell.wait("p", ticket, 100))
    await turns()
    assert waiting.done()
    assert await waiting


async def test_the_nearest_of_several_times_rings():
    """A later time does not hide an earlier one, nor the other way round."""
    for delays in ((0.05, 3600.0), (3600.0, 0.05)):
        bell = Bell(time.time)
        ticket = bell.ticket("p")
        for delay in delays:
            bell.ring_at("p", time.time() + delay)
        began = time.monotonic()
        assert await bell.wait("p", ticket, 100)
        assert time.monotonic() - began > 0.03
        bell.close()
