"""The deadline: exact enough, cheap to move, and no obstacle to a real cancellation."""

import asyncio
import time

import pytest

from dualclaw_server.engine.deadline import Deadline

LONG = 60.0
"""Seconds that do not go by in any of these tests."""


async def value_after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "value"


async def test_what_comes_in_time_is_given_and_what_does_not_times_out() -> None:
    """One deadline serves many waits, longer and shorter, and a timeout leaves no cancellation behind."""
    deadline = Deadline()
    for _ in range(3):
        assert await deadline.wait(value_after(0.01), deadline.now() + LONG) == "value"
        start = deadline.now()
        with pytest.raises(TimeoutError):
            await deadline.wait(value_after(LONG), deadline.now() + 0.05)
        assert 0.04 < deadline.now() - start < LONG / 2
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    deadline.close()


async def test_time_between_waits_does_not_count() -> None:
    """While nobody waits the timer may fire; the next wait is not hurt by it."""
    deadline = Deadline()
    await deadline.wait(value_after(0), deadline.now() + 0.03)
    await asyncio.sleep(0.06)
    assert await deadline.wait(value_after(0.05), deadline.now() + LONG) == "value"
    deadline.close()


async def test_a_deadline_that_moved_on_is_kept() -> None:
    """A timer armed for an earlier wait does not cut a later one short, and still ends it in time."""
    deadline = Deadline()
    await deadline.wait(value_after(0), deadline.now() + 0.05)
    start = deadline.now()
    with pytest.raises(TimeoutError):
        await deadline.wait(value_after(LONG), start + 0.2)
    assert 0.19 < deadline.now() - start < LONG / 2
    deadline.close()


async def test_a_wait_without_a_due_time_ends_when_it_is_expired() -> None:
    """Without a due time nothing but ``expire`` ends the wait, also when a timer of an earlier wait fires meanwhile."""
    deadline = Deadline()
    deadline.expire()  # nobody waits: nothing happens
    await deadline.wait(value_after(0), deadline.now() + 0.02)
    assert await deadline.wait(value_after(0.05)) == "value"
    start = deadline.now()
    asyncio.get_running_loop().call_later(0.1, deadline.expire)
    with pytest.raises(TimeoutError):
        await deadline.wait(value_after(LONG))
    assert 0.09 < deadline.now() - start < LONG / 2
    assert await deadline.wait(value_after(0.01), deadline.now() + LONG) == "value"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    deadline.close()


async def test_a_real_cancellation_stays_one() -> None:
    """A task that is cancelled while it waits ends cancelled, not timed out, also under an outer timeout."""
    deadline = Deadline()
    task = asyncio.create_task(deadline.wait(value_after(LONG), deadline.now() + LONG))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02) as outer:
            await deadline.wait(value_after(LONG), deadline.now() + LONG)
    assert outer.expired()
    deadline.close()


async def test_a_cancellation_at_the_very_moment_of_the_timeout_is_not_lost() -> None:
    """When both happen in one turn of the loop the task ends cancelled."""
    deadline = Deadline()
    loop = asyncio.get_running_loop()
    due = loop.time() + 0.05

    async def wait() -> None:
        await deadline.wait(value_after(LONG), due)

    task = asyncio.create_task(wait())
    loop.call_soon(loop.call_at, due, task.cancel)
    loop.call_soon(block_until, due)  # both timers are due by then, so the loop runs them in the same turn
    with pytest.raises(asyncio.CancelledError):
        await task
    deadline.close()


def block_until(due: float) -> None:
    """Keep the loop busy, so that timers pile up."""
    loop = asyncio.get_running_loop()
    while loop.time() <= due:
        time.sleep(0.01)
