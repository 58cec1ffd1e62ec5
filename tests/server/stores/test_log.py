"""append, read, follow: one writer, every reader the same events."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from dualclaw import Run, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.store import Fenced, RunMessage, Sync

SUCCEEDED, INTERRUPTED = RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_INTERRUPTED
RUNNING = RunState.RUN_STATE_RUNNING


async def test_an_append_moves_the_head(store, make, writer):
    """Version counts frames, last_seq events; the public record follows."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    assert await log.add(0, epoch=3) == 1
    assert await log.add(4, epoch=3, run=Run(id="r1", agent="changed")) == 2
    head = await store.head(log.key)
    assert (head.version, head.last_seq, head.epoch, head.state) == (2, 4, 3, RUNNING)
    assert (head.run.agent, head.run.last_seq, head.run.state) == ("changed", 4, RUNNING)
    assert head.run.update_time.ToMicroseconds() >= head.run.create_time.ToMicroseconds()


async def test_an_append_on_another_version_is_fenced_and_changes_nothing(store, make, writer):
    """Compare and set: whoever missed an append must stop."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add()
    before = await store.head(log.key)
    for expect in (0, 2, -1):
        with pytest.raises(Fenced):
            await store.append(log.key, make.frame(2, state=SUCCEEDED), expect)
    with pytest.raises(Fenced):
        await store.append(make.key("nobody"), make.frame(1), 0)
    assert await store.head(log.key) == before
    assert len(await store.read(log.key, 0)) == 1


async def test_an_older_epoch_is_fenced(store, make, writer):
    """A writer that was taken over cannot write, even if it guesses the version."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add(0, epoch=2)
    with pytest.raises(Fenced):
        await store.append(log.key, make.frame(1), 1)


async def test_a_final_run_takes_no_more_frames(store, make, writer):
    """Final states are never left."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.end()
    with pytest.raises(Fenced):
        await log.add()
    assert (await store.head(log.key)).state == SUCCEEDED


async def test_a_frame_that_leaves_a_gap_is_a_defect_of_its_writer(store, make):
    """Seqs are contiguous or the append is refused."""
    await store.create(make.new("r1"))
    for first in (0, 2):
        with pytest.raises(ValueError, match="begins at"):
            await store.append(make.key("r1"), make.frame(first), 0)


async def test_appends_in_flight_take_effect_in_call_order(store, make, writer, collect):
    """A writer need not wait for one commit before the next append."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    sent = [log.send(1 + n % 3) for n in range(50)]
    assert await asyncio.gather(*sent) == list(range(1, 51))
    events = await collect(store, log.key, 0, log.last_seq)
    assert [event.seq for event in events] == list(range(1, log.last_seq + 1))


async def test_of_two_writers_in_flight_exactly_one_wins_each_version(store, make, events_of):
    """The loser is fenced, the log stays whole."""
    await store.create(make.new("r1"))
    key = make.key("r1")
    outcomes = await asyncio.gather(
        store.append(key, make.frame(1, text="a"), 0),
        store.append(key, make.frame(1, text="b"), 0),
        store.append(key, make.frame(2, text="a"), 1),
        store.append(key, make.frame(2, text="b"), 1),
        return_exceptions=True,
    )
    assert [outcome if isinstance(outcome, int) else type(outcome) for outcome in outcomes] == [1, Fenced, 2, Fenced]
    assert [event.delta.content for event in events_of(await store.read(key, 0))] == ["a1", "a2"]


async def test_one_runs_refused_append_does_not_touch_another_run(store, make, writer):
    """Operations share a commit, not their fate."""
    await store.create(make.new("r1"))
    await store.create(make.new("r2"))
    good, bad = writer(store, make.key("r1")), store.append(make.key("r2"), make.frame(1), 7)
    sent = good.send()
    with pytest.raises(Fenced):
        await bad
    assert await sent == 1


async def test_read_trims_inside_frames_and_keeps_their_marks(store, make, writer, events_of):
    """A reader gets exactly the events after its position, whatever the frames."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add(0)
    await log.add(3)
    await log.add(0, checkpoint=b"c")
    await log.add(2, durable=True, sync=Sync.FULL, checkpoint=b"d", signals=("s",), run=Run(id="r1"))
    await log.add(1, durable=True, ends_segment=True, state=INTERRUPTED)
    for after in range(7):
        frames = await store.read(log.key, after)
        assert [event.seq for event in events_of(frames)] == list(range(after + 1, 7))
    first, second, last = await store.read(log.key, 0)
    assert (first.durable, second.durable, last.ends_segment, last.state) == (False, True, True, INTERRUPTED)
    assert (second.checkpoint, second.signals, second.run, second.messages) == (b"", (), None, ())


async def test_read_stops_at_its_limit_but_gives_at_least_one_frame(store, make, writer):
    """Bytes per read are bounded; one large frame still goes through."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    for _ in range(4):
        await log.add(text="y" * 1000)
    assert len(await store.read(log.key, 0, limit=10)) == 1
    assert len(await store.read(log.key, 0, limit=2500)) == 2
    assert len(await store.read(log.key, 1, limit=100_000)) == 3


async def test_large_bodies_and_checkpoints_come_back_whole(store, make, writer):
    """Payloads above 256 KiB take another way into the file, and the same way out."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    text = "z" * 300_000
    await log.add(text=text, checkpoint=b"k" * 400_000)
    await log.add(text=text, checkpoint=b"l" * 500_000)
    frames = await store.read(log.key, 0, limit=10_000_000)
    assert [frame.body for frame in frames] == [make.events(1, 1, text), make.events(2, 1, text)]
    loaded = await store.load(log.key)
    assert (loaded.checkpoint, loaded.checkpoint_seq) == (b"l" * 500_000, 2)


async def test_the_last_checkpoint_holds_until_the_next(store, make, writer):
    """Recovery starts at the newest checkpoint and its seq."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add(2, checkpoint=b"one")
    await log.add(3)
    loaded = await store.load(log.key)
    assert (loaded.checkpoint, loaded.checkpoint_seq, loaded.head.last_seq) == (b"one", 2, 5)
    await log.add(0, checkpoint=b"two")
    loaded = await store.load(log.key)
    assert (loaded.checkpoint, loaded.checkpoint_seq) == (b"two", 5)


async def test_a_message_stored_again_replaces_the_first(store, make, writer):
    """What a crash made the engine redo is there once."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    for name in ("first", "second"):
        await log.add(0, messages=(RunMessage(1, make.message(name)),))
    await log.add(0, messages=(RunMessage(2, make.message("third")),))
    own = (await store.load(log.key)).messages
    assert [(message.position, message.message.id) for message in own] == [(0, "r1-0"), (1, "second"), (2, "third")]


async def test_follow_from_every_position_equals_the_log(store, make, writer, collect):
    """Stored events, from wherever a client stands."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    for count in (1, 3, 0, 2, 5, 1):
        await log.add(count)
    whole = await collect(store, log.key, 0, log.last_seq)
    for after in range(log.last_seq):
        assert await collect(store, log.key, after, log.last_seq) == whole[after:]


async def test_followers_that_join_while_the_log_grows_miss_and_repeat_nothing(store, make, writer, collect):
    """Subscribing, reading and live frames overlap without a seam."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    total = 300
    followers = []
    for n in range(total):
        log.send(1 + n % 2)
        if n % 10 == 0:
            followers.append((n // 2, asyncio.create_task(collect(store, log.key, n // 2, 450))))
            await asyncio.sleep(0)
        if n % 50 == 0:
            await asyncio.sleep(0.005)
    assert log.last_seq == 450
    async with asyncio.timeout(100):
        for after, follower in followers:
            assert [event.seq for event in await follower] == list(range(after + 1, 451))


async def test_a_thousand_followers_get_the_same_frames(store, make, writer, collect):
    """One run may be watched by many."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add(2)
    followers = [asyncio.create_task(collect(store, log.key, 0, 8)) for _ in range(1000)]
    await asyncio.sleep(0.05)
    for _ in range(3):
        await log.add(2)
    async with asyncio.timeout(100):
        seen = await asyncio.gather(*followers)
    assert all(events == seen[0] for events in seen)
    assert [event.seq for event in seen[0]] == list(range(1, 9))


async def test_a_lagging_follower_gets_everything_many_frames_at_once(store, make, writer, events_of):
    """Beyond its bound a follower reads the log again instead of keeping frames (the bound here is 4 KiB)."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add()
    async with asyncio.timeout(100), aclosing(store.follow(log.key, 0)) as frames:
        seen = events_of(await anext(frames))
        for _ in range(100):
            await log.add(text="w" * 200)
        batches = 0
        while seen[-1].seq < log.last_seq:
            seen += events_of(await anext(frames))
            batches += 1
    assert [event.seq for event in seen] == list(range(1, 102))
    assert batches <= 3


async def test_a_live_frame_equals_the_stored_one(store, make, writer):
    """Whoever follows and whoever reads later see the same frame."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    async with asyncio.timeout(100), aclosing(store.follow(log.key, 0)) as frames:
        waiting = asyncio.create_task(anext(frames))
        await asyncio.sleep(0.05)
        await log.add(2, durable=True, sync=Sync.FULL, checkpoint=b"c", messages=log.messages("m"))
        assert list(await waiting) == list(await store.read(log.key, 0))


async def test_follow_of_an_unknown_run_is_refused_and_of_a_deleted_one_ends(store, make):
    """A follower never waits for a run that is not there."""
    with pytest.raises(EngineError, match="no such run"):
        await anext(store.follow(make.key("nobody"), 0))
    await store.create(make.new("r1"))
    async with asyncio.timeout(100), aclosing(store.follow(make.key("r1"), 0)) as frames:
        waiting = asyncio.create_task(anext(frames))
        await asyncio.sleep(0.05)
        await store.delete(make.key("r1"))
        with pytest.raises(EngineError, match="no such run"):
            await waiting


async def test_a_follower_of_a_run_whose_conversation_is_deleted_ends(store, make, writer):
    """It would wait for ever: the run is gone with its conversation."""
    await store.create(make.new("r1", "c"))
    log = writer(store, make.key("r1"))
    await log.end()
    async with asyncio.timeout(100), aclosing(store.follow(log.key, log.last_seq)) as frames:
        waiting = asyncio.create_task(anext(frames))
        await asyncio.sleep(0.05)
        await store.delete_conversation("acme", "c")
        with pytest.raises(EngineError, match="no such run"):
            await waiting


async def test_a_closed_follower_is_forgotten(store, make, writer):
    """Leaving costs the run nothing afterwards."""
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add()
    for _ in range(3):
        async with asyncio.timeout(100), aclosing(store.follow(log.key, 0)) as frames:
            await anext(frames)
            assert store._live.followers(log.key) == 1
    assert store._live.followers(log.key) == 0


async def test_delete_purges_the_log_and_keeps_the_messages(store, make, writer):
    """A deleted run is unknown, its request_id free, the conversation as people saw it."""
    await store.create(make.new("r1", "c", request_id="q"))
    log = writer(store, make.key("r1"))
    await log.add(text="z" * 300_000)
    await log.end("answer")
    await store.delete(log.key)
    await store.delete(log.key)
    for read in (store.head, store.load):
        with pytest.raises(EngineError):
            await read(log.key)
    page = await store.list_messages("acme", "c", page_size=0, page_token="")
    assert [message.id for message in page.items] == ["r1-0", "answer"]
    assert not (await store.create(make.new("r1", "c", request_id="q"))).existing
    assert await store.read(log.key, 0) == []


async def test_deleting_an_active_run_starts_the_next_and_fences_its_worker(store, make, writer):
    """A purge must not leave a conversation blocked for ever."""
    await store.create(make.new("r1", "c"))
    await store.create(replace(make.new("r2", "c"), on_busy=2))
    await store.delete(make.key("r1"))
    assert (await store.head(make.key("r2"))).state == RUNNING
    with pytest.raises(Fenced):
        await writer(store, make.key("r1")).add()
