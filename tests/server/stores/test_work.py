"""claim, ack, nak, signal, wake: every run that is due is delivered to exactly one worker."""

import asyncio
import time

import pytest

from dualclaw import BusyPolicy, RunState
from dualclaw.errors import EngineError

INTERRUPTED = RunState.RUN_STATE_INTERRUPTED
QUEUED, SUCCEEDED = RunState.RUN_STATE_QUEUED, RunState.RUN_STATE_SUCCEEDED


async def leave(waiting):
    """Have claimers leave, whatever they have by then."""
    for waiter in waiting:
        waiter.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_two_claimers_never_get_the_same_item(store, make, until):
    """A work item is in one hand at a time."""
    for n in range(10):
        await store.create(make.new(f"r{n}"))
    waiting = [asyncio.create_task(store.claim("default", f"w{n}", 100)) for n in range(15)]
    await until(lambda: sum(waiter.done() for waiter in waiting) >= 10)
    await asyncio.sleep(0.05)
    keys = [waiter.result().key for waiter in waiting if waiter.done()]
    assert len(keys) == len(set(keys)) == 10
    await leave(waiting)


async def test_items_are_delivered_in_the_order_they_became_due(store, make, claim_now):
    """Nobody waits behind later arrivals."""
    for n in range(4):
        await store.create(make.new(f"r{n}"))
        await asyncio.sleep(0.002)
    assert [(await claim_now(store)).key.run_id for _ in range(4)] == ["r0", "r1", "r2", "r3"]


async def test_a_waiting_claimer_is_woken_by_a_new_run(store, make):
    """No polling, no delay: each time within a second, but for the moments in which the machine stands still."""
    for n in range(30):
        waiting = asyncio.create_task(store.claim("default", "w", 100))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        began = time.monotonic()
        await store.create(make.new(f"r{n}"))
        claim = await asyncio.wait_for(waiting, 100)
        assert claim.key == make.key(f"r{n}")
        if time.monotonic() - began < 1:
            return
    raise AssertionError("it was late each time")


async def test_each_of_many_waiting_claimers_gets_one_of_many_new_runs(store, make, until):
    """No wake is lost among sleepers, also when some of them leave."""
    waiting = [asyncio.create_task(store.claim("default", f"w{n}", 100)) for n in range(30)]
    await asyncio.sleep(0.05)
    creates = [asyncio.create_task(store.create(make.new(f"r{n}"))) for n in range(10)]
    for leaver in waiting[::3]:
        leaver.cancel()
    await asyncio.gather(*creates)
    left = [waiter for n, waiter in enumerate(waiting) if n % 3]
    await until(lambda: sum(waiter.done() for waiter in left) >= 10)
    await asyncio.sleep(0.05)
    keys = {waiter.result().key for waiter in left if waiter.done()}
    assert len(keys) == sum(waiter.done() for waiter in left) == 10
    await leave(waiting)


async def test_a_claim_whose_caller_left_goes_to_the_next(store, make, claim_now):
    """A cancelled claimer holds nothing."""
    for n in range(20):
        await store.create(make.new(f"r{n}"))
        leaving = asyncio.create_task(store.claim("default", "w", 100))
        for _ in range(n % 5):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        if leaving.cancelled():
            claim = await claim_now(store)
            assert claim.key.run_id == f"r{n}"
            await claim.ack()


async def test_claim_returns_none_when_the_time_is_over(store):
    """An idle worker gets its turn back, not before."""
    began = time.monotonic()
    assert await asyncio.wait_for(store.claim("default", "w", 0.1), 100) is None
    assert time.monotonic() - began > 0.08


async def test_pools_are_apart(store, make, claim_now):
    """A worker claims from its own pool only."""
    await store.create(make.new("r1", pool="gpu"))
    assert await store.claim("default", "w", 0) is None
    claim = await store.claim("gpu", "w", 100)
    assert claim is not None
    assert claim.key == make.key("r1")


async def test_an_acked_item_is_gone(store, make, claim_now):
    """Work is delivered once when it is done."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await claim.ack()
    await claim.ack()
    await claim.nak(0)
    assert await store.claim("default", "w", 0.05) is None


async def test_a_naked_item_comes_again_after_its_delay(store, make, claim_now):
    """Put back: not at once, not never, and marked as delivered before."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    began = time.monotonic()
    await claim.nak(0.2)
    again = await claim_now(store)
    assert time.monotonic() - began > 0.15
    assert again.redelivered


async def test_a_signal_returns_what_was_stored_under_its_id(store, make, writer):
    """Of two answers with one id the first counts, also after it was taken and after the run has ended."""
    await store.create(make.new("r1"))
    key = make.key("r1")
    assert await store.signal(key, b"first", "s") is None
    assert await store.signal(key, b"second", "s") == b"first"
    assert [signal.body for signal in (await store.load(key)).unread] == [b"first"]
    log = writer(store, key)
    await log.add(0, signals=("s", "unknown"))
    assert await store.signal(key, b"third", "s") == b"first"
    await log.end()
    assert await store.signal(key, b"fourth", "s") == b"first"


async def test_unread_signals_come_in_order_until_a_frame_takes_them(store, make, writer):
    """The inbox is a queue; what a frame takes is read."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    for name in ("b", "a", "c"):
        await store.signal(log.key, name.encode(), name)
    assert [signal.signal_id for signal in (await store.load(log.key)).unread] == ["b", "a", "c"]
    await log.add(0, signals=("a", "b"))
    assert [signal.signal_id for signal in (await store.load(log.key)).unread] == ["c"]


async def test_a_final_run_takes_no_signal(store, make, claim_now, writer):
    """Nothing is stored, nobody is woken."""
    await store.create(make.new("r1"))
    claim_before = await claim_now(store)
    await writer(store, make.key("r1")).end()
    await claim_before.ack()
    reached = []
    store.on_signal(reached.append)
    assert await store.signal(make.key("r1"), b"late", "s") is None
    assert (await store.load(make.key("r1"))).unread == ()
    assert await store.claim("default", "w", 0.02) is None
    assert reached == []


async def test_a_signal_to_an_unknown_run_is_refused(store, make):
    """There is no inbox for it."""
    with pytest.raises(EngineError) as refused:
        await store.signal(make.key("nobody"), b"x", "s")
    assert refused.value.reason == "UNKNOWN_RUN"


async def test_a_signal_for_a_run_in_hand_calls_back_and_does_not_deliver_it_again(
    store, make, claim_now, writer, until
):
    """A signal must not steal a running run; its worker is told."""
    reached = []
    store.on_signal(reached.append)
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await store.signal(claim.key, b"x", "s")
    await until(lambda: reached)
    assert set(reached) == {claim.key}
    assert await store.claim("default", "other", 0.02) is None
    assert not claim.lost
    log = writer(store, claim.key)
    await log.add(0, signals=("s",))
    await log.park()
    await claim.ack()
    assert await store.claim("default", "other", 0.02) is None


async def test_a_signal_that_was_not_read_before_the_park_delivers_the_run_again(store, make, claim_now, writer):
    """No answer is lost between the last look into the inbox and the ack."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await writer(store, claim.key).park()
    await store.signal(claim.key, b"x", "s")
    assert await store.claim("default", "other", 0.02) is None
    await claim.ack()
    again = await claim_now(store)
    assert again.key == claim.key
    assert not again.redelivered


async def test_a_signal_wakes_a_parked_run(store, make, claim_now, writer):
    """An approval after days delivers the run."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await writer(store, claim.key).park()
    await claim.ack()
    waiting = asyncio.create_task(store.claim("default", "w", 100))
    await asyncio.sleep(0.02)
    await store.signal(claim.key, b"x", "s")
    assert (await asyncio.wait_for(waiting, 100)).key == claim.key


async def test_a_signal_delivers_a_queued_run(store, make, claim_now):
    """A waiting run can be cancelled."""
    await store.create(make.new("r1", "c"))
    await store.create(make.new("r2", "c", on_busy=BusyPolicy.BUSY_POLICY_QUEUE))
    await claim_now(store)
    assert await store.claim("default", "w", 0) is None
    await store.signal(make.key("r2"), b"x", "s")
    assert (await claim_now(store)).key == make.key("r2")
    assert (await store.head(make.key("r2"))).state == QUEUED


async def test_a_run_promoted_while_in_hand_is_delivered_after_the_ack(store, make, claim_now, writer):
    """A worker that found nothing to do for a queued run does not swallow its start."""
    await store.create(make.new("r1", "c"))
    await store.create(make.new("r2", "c", on_busy=BusyPolicy.BUSY_POLICY_QUEUE))
    first = await claim_now(store)
    await store.signal(make.key("r2"), b"x", "s")
    second = await claim_now(store)
    await writer(store, first.key).end()
    assert await store.claim("default", "w", 0.02) is None
    await second.ack()
    assert (await claim_now(store)).key == make.key("r2")


async def test_a_timer_wakes_a_parked_run_at_its_time(store, make, claim_now, writer):
    """An approval that nobody gives expires."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    at = time.time() + 0.2
    await store.wake(claim.key, at)
    await writer(store, claim.key).park()
    await claim.ack()
    assert (await claim_now(store)).key == claim.key
    assert time.time() >= at


async def test_the_timer_of_a_parked_run_survives_a_restart(store, make, claim_now, writer):
    """Days later the process is another one; the run is delivered once, not before its time, with an empty inbox."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await writer(store, claim.key).park(asks=["i1"])
    at = time.time() + 0.3
    await store.wake(claim.key, at)
    await claim.ack()
    await store.close()
    await store.open()
    again = await claim_now(store)
    assert time.time() >= at
    assert (again.key, again.redelivered) == (claim.key, False)
    assert (await store.load(claim.key)).unread == ()
    await again.ack()
    assert await store.claim("default", "w", 0.02) is None


async def test_the_timer_of_a_run_that_ended_while_parked_never_fires(store, make, claim_now, writer):
    """Cancelled before its question expired: nothing is delivered, after a restart either."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    log = writer(store, claim.key)
    await log.park(asks=["i1"])
    await claim.ack()
    await store.wake(log.key, time.time() + 0.05)
    await log.end(epoch=2, state=RunState.RUN_STATE_CANCELLED)
    assert await store.claim("default", "w", 0.1) is None
    await store.close()
    await store.open()
    assert await store.claim("default", "w", 0.02) is None


async def test_a_timer_that_fires_while_the_run_is_in_hand_delivers_it_afterwards(store, make, claim_now, writer):
    """Whatever else happens, the run is delivered at or after its time."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await store.wake(claim.key, time.time() - 1)
    assert await store.claim("default", "w", 0.02) is None
    await writer(store, claim.key).park()
    await claim.ack()
    assert (await claim_now(store)).key == claim.key


async def test_the_end_of_a_run_drops_its_timers_and_wakes(store, make, claim_now, writer):
    """A final run is delivered to nobody."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await store.wake(claim.key, time.time() + 0.05)
    await store.signal(claim.key, b"x", "s")
    await writer(store, claim.key).end()
    await claim.ack()
    await store.wake(claim.key, time.time())
    assert await store.claim("default", "w", 0.15) is None


async def test_a_wake_for_an_unknown_run_is_refused(store, make):
    """There is nothing to wake."""
    with pytest.raises(EngineError):
        await store.wake(make.key("nobody"), time.time())


async def test_close_hands_items_on_and_open_finds_everything_again(store, make, claim_now, writer):
    """A store that was closed and opened again goes on; what was in hand is claimable at once."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    log = writer(store, claim.key)
    await log.add(3)
    await store.close()
    await store.close()
    assert claim.lost
    await claim.ack()
    await store.open()
    await store.open()
    again = await claim_now(store)
    assert again.key == claim.key
    assert again.redelivered
    await claim.ack()
    assert await store.claim("default", "w", 0) is None
    assert (await store.head(log.key)).last_seq == 3
    await log.add()
