"""compact: logs of runs that ended long ago go, everything people read stays."""

import asyncio
import time
from contextlib import aclosing

import pytest

from dualclaw import RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.store import RunMessage

FUTURE = 4e9


async def refusal(call):
    with pytest.raises(EngineError) as refused:
        await call
    return refused.value.reason, dict(refused.value.metadata)


async def test_a_compacted_log_is_refused_by_name_and_its_end_still_answers(store, make, writer):
    """Below its end every read says LOG_COMPACTED and from where on events are kept; at its end it is just over."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add(3)
    await log.end()
    before = await store.head(log.key)
    assert await store.compact(FUTURE) == 1
    for after in (0, 1, 3):
        assert await refusal(store.read(log.key, after)) == ("LOG_COMPACTED", {"kept_from": "5"})
        assert await refusal(anext(store.follow(log.key, after))) == ("LOG_COMPACTED", {"kept_from": "5"})
    assert await store.read(log.key, 4) == []
    head = await store.head(log.key)
    assert head.kept_from == 5
    assert (head.version, head.last_seq, head.run) == (before.version, before.last_seq, before.run)


async def test_record_messages_and_answers_stay_when_a_log_goes(store, make, writer, claim_now):
    """What people read and what keeps requests idempotent outlives the log."""
    await store.create(make.new("r1", "c", request_id="q"))
    claim = await claim_now(store)
    log = writer(store, claim.key)
    private = (RunMessage(1, make.message("shown")), RunMessage(2, make.message("inner"), "call_1"))
    await log.park(asks=["i1"], messages=private, checkpoint=b"saved", text="z" * 300_000)
    await store.answer(make.answers(log.key, "i1", request_id="q2"))
    await log.go_on(2)
    await store.signal(log.key, b"x", "never read")
    await log.end(epoch=2)
    await claim.ack()
    before = await store.load(log.key)
    listed = await store.list_runs("acme", states=(), conversation_id="c", page_size=0, page_token="")
    assert await store.compact(FUTURE) == 1
    loaded = await store.load(log.key)
    assert (loaded.record, loaded.messages, loaded.checkpoint) == (before.record, before.messages, b"")
    assert (len(before.unread), loaded.unread) == (2, ())
    assert await store.signal(log.key, b"y", "never read") is None
    page = await store.list_messages("acme", "c", page_size=0, page_token="")
    assert [message.id for message in page.items] == ["r1-0", "shown"]
    assert listed == await store.list_runs("acme", states=(), conversation_id="c", page_size=0, page_token="")
    assert (await store.inspect(log.key)).frames == ()
    known = await store.create(make.new("r9", "c", request_id="q"))
    assert (known.existing, known.head.key, known.first_seq, known.head.kept_from) == (True, log.key, 1, 3)
    assert (await store.answer(make.answers(log.key, "i1", request_id="q2"))).first_seq == 2
    assert (await refusal(store.answer(make.answers(log.key, "i1", signal_id="late"))))[0] == "ALREADY_ANSWERED"
    assert await store.signal(log.key, b"x", "late") is None


async def test_only_what_came_to_rest_before_that_time_goes(store, make, writer, claim_now):
    """A parked run waits for years if need be; running, queued and freshly ended ones are whole as well."""
    for name in ("old", "new", "parked", "running"):
        await store.create(make.new(name))
    await store.create(make.new("queued", "c-running", on_busy=2))
    logs = {name: writer(store, make.key(name)) for name in ("old", "new", "parked", "running")}
    await logs["running"].add()
    await logs["parked"].park(asks=["i1"])
    await logs["old"].end()
    await asyncio.sleep(0.02)
    between = time.time()
    await asyncio.sleep(0.02)
    await logs["new"].end()
    assert await store.compact(between) == 1
    for name, kept_from in (("old", 2), ("new", 1), ("parked", 1), ("running", 1), ("queued", 1)):
        assert (await store.head(make.key(name))).kept_from == kept_from
    assert await store.compact(FUTURE) == 1
    for name in ("parked", "running"):
        assert len(await store.read(make.key(name), 0)) == 1


async def test_the_oldest_go_first_and_no_more_than_asked(store, make, writer):
    """A long overdue file is worked off in bites; what is done is not done again."""
    names = [f"r{n}" for n in range(5)]
    for name in names:
        await store.create(make.new(name, tenant="t" if name == "r1" else "acme"))
    for name in ("r3", "r1", "r0", "r4", "r2"):
        await writer(store, make.key(name, "t" if name == "r1" else "acme")).end()
        await asyncio.sleep(0.002)
    assert await store.compact(FUTURE, limit=0) == 0
    assert await store.compact(FUTURE, limit=2) == 2
    kept = {name: (await store.head(make.key(name, "t" if name == "r1" else "acme"))).kept_from for name in names}
    assert kept == {"r0": 1, "r1": 2, "r2": 1, "r3": 2, "r4": 1}
    assert [await store.compact(FUTURE, limit=2) for _ in range(3)] == [2, 1, 0]


async def test_followers_at_that_moment(store, make, writer, events_of):
    """One that has everything notices nothing; one that still had to read learns that the log is gone."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    async with (
        asyncio.timeout(100),
        aclosing(store.follow(log.key, 0)) as prompt,
        aclosing(store.follow(log.key, 0)) as lagging,
    ):
        await log.add()
        seen = [events_of(await anext(follower)) for follower in (prompt, lagging)]
        for _ in range(10):
            await log.add(text="w" * 1000)
        await log.end()
        while seen[0][-1].seq < log.last_seq:
            seen[0] += events_of(await anext(prompt))
        assert await store.compact(FUTURE) == 1
        assert (await refusal(anext(lagging)))[0] == "LOG_COMPACTED"
        waiting = asyncio.create_task(anext(prompt))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert [event.seq for event in seen[0]] == list(range(1, 13))


async def test_a_run_that_ended_without_an_event_is_compacted_once(store, make):
    """There is nothing to miss in its log, so its beginning still answers."""
    await store.create(make.new("r1"))
    await store.append(make.key("r1"), make.frame(1, 0, state=RunState.RUN_STATE_FAILED, checkpoint=b"x"), 0)
    assert await store.compact(FUTURE) == 1
    assert await store.compact(FUTURE) == 0
    assert await store.read(make.key("r1"), 0) == []
    assert (await store.load(make.key("r1"))).checkpoint == b""


async def test_a_compacted_run_can_be_deleted_and_stays_so_over_a_restart(store, make, writer):
    """Compaction is a fact of the file; purging such a run works like any other."""
    for name in ("r1", "r2"):
        await store.create(make.new(name))
        await writer(store, make.key(name)).end()
    assert await store.compact(FUTURE) == 2
    await store.close()
    await store.open()
    assert (await refusal(store.read(make.key("r1"), 0)))[0] == "LOG_COMPACTED"
    await store.delete(make.key("r1"))
    assert await store.compact(FUTURE) == 0
    assert (await refusal(store.head(make.key("r1"))))[0] == "UNKNOWN_RUN"
