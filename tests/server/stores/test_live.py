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

    def add(self, frame, *, publish=True):
        self.frames.append(frame)
        if publish:
            self.live.publish(self.key, frame)

    async def read(self, key, after):
        self.reads += 1
        return [frame.after(after) for frame in self.frames if frame.last_seq > after], True

    def follow(self, after):
        return self.live.follow(self.key, after, self.read)


@pytest.fixture
def log(make):
    return Log(Live(max_pending=1000), make.key("r1"))


async def test_a_follower_that_keeps_up_reads_the_log_once(log, make, events_of):
    """Live frames come from memory, each as its own hand-over."""
    async with asyncio.timeout(5), aclosing(log.follow(0)) as frames:
        log.add(make.frame(1))
        seen = events_of(await anext(frames))
        for seq in range(2, 20):
            log.add(make.frame(seq))
            seen += events_of(await anext(frames))
    assert [event.seq for event in seen] == list(range(1, 20))
    assert log.reads == 1


async def test_a_follower_beyond_its_bound_keeps_nothing_and_reads_the_log(log, make, events_of):
    """Bytes per slow follower are bounded; it loses nothing."""
    async with asyncio.timeout(5), aclosing(log.follow(0)) as frames:
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
    async with asyncio.timeout(5), aclosing(log.follow(0)) as frames:
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
    async with asyncio.timeout(5), aclosing(log.follow(1)) as frames:
        seen = events_of(await anext(frames))
        log.live.publish(log.key, make.frame(1, 3))
        log.live.publish(log.key, make.frame(2, 4))
        seen += events_of(await anext(frames))
    assert [event.seq for event in seen] == [2, 3, 4, 5]


async def test_closing_ends_every_follower(log, make):
    """Nobody waits for a store that is gone."""
    async with asyncio.timeout(5), aclosing(log.follow(0)) as frames:
        waiting = asyncio.create_task(anext(frames))
        await asyncio.sleep(0.01)
        log.live.close()
        with pytest.raises(Unavailable):
            await waiting
    assert log.live.followers(log.key) == 0


async def test_a_ring_whose_waiter_left_is_passed_on():
    """The second sleeper wakes when the first was cancelled with the ring in its hand."""
    bell = Bell(time.time)
    first, second = (asyncio.create_task(bell.wait("p", bell.ticket("p"), 5)) for _ in range(2))
    await asyncio.sleep(0.01)
    bell.ring("p")
    first.cancel()
    assert await asyncio.wait_for(second, 1)
    assert await asyncio.gather(first, return_exceptions=True) != [True]


async def test_one_ring_wakes_one_sleeper():
    """A thousand idle workers do not all run for one item."""
    bell = Bell(time.time)
    ticket = bell.ticket("p")
    sleepers = [asyncio.create_task(bell.wait("p", ticket, 0.2)) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert bell.awaited() == ["p"]
    bell.ring("other")
    bell.ring("p")
    assert sorted(await asyncio.gather(*sleepers)) == [False] * 4 + [True]
    assert bell.awaited() == []


async def test_a_ring_between_ticket_and_wait_is_not_missed():
    """Work that appears while a claimer looks elsewhere ends its wait at once."""
    bell = Bell(time.time)
    ticket = bell.ticket("p")
    bell.ring("p")
    assert await asyncio.wait_for(bell.wait("p", ticket, 5), 1)


async def test_the_nearest_of_several_times_rings():
    """A later time does not hide an earlier one, nor the other way round."""
    for delays in ((0.05, 5.0), (5.0, 0.05)):
        bell = Bell(time.time)
        ticket = bell.ticket("p")
        for delay in delays:
            bell.ring_at("p", time.time() + delay)
        began = time.monotonic()
        assert await bell.wait("p", ticket, 2)
        assert 0.03 < time.monotonic() - began < 1
        bell.close()
