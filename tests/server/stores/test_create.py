"""create: idempotent, atomic, at most one active run per conversation."""

import asyncio
from dataclasses import replace

import pytest

from dualclaw import BusyPolicy, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.store import MAX_QUEUED

QUEUE = BusyPolicy.BUSY_POLICY_QUEUE
REPLACE = BusyPolicy.BUSY_POLICY_REPLACE
QUEUED, RUNNING = RunState.RUN_STATE_QUEUED, RunState.RUN_STATE_RUNNING
CANCELLED = RunState.RUN_STATE_CANCELLED


async def test_a_new_run_is_running_at_version_zero_and_waits_to_be_claimed(store, make, claim_now):
    """The first run of a conversation starts at once."""
    created = await store.create(make.new("r1"))
    assert (created.first_seq, created.existing) == (1, False)
    head = created.head
    assert (head.version, head.last_seq, head.epoch, head.state, head.conversation_id) == (0, 0, 0, RUNNING, "c-r1")
    assert head.run.agent == "helper"
    assert head.run.state == RUNNING
    assert head.run.create_time.seconds > 1_600_000_000
    assert await store.head(make.key("r1")) == head
    claim = await claim_now(store)
    assert claim.key == make.key("r1")
    assert not claim.redelivered


async def test_load_gives_what_create_stored(store, make):
    """A worker finds the record and the user's message."""
    await store.create(make.new("r1"))
    loaded = await store.load(make.key("r1"))
    assert loaded.record == b"record of r1"
    assert [(own.position, own.message.id) for own in loaded.messages] == [(0, "r1-0")]
    assert (loaded.checkpoint, loaded.checkpoint_seq, loaded.unread) == (b"", 0, ())


async def test_the_same_request_id_returns_the_first_run_and_stores_nothing(store, make):
    """A client that retries gets its run again."""
    first = await store.create(make.new("r1", request_id="q"))
    again = await store.create(make.new("r2", request_id="q"))
    assert again.existing
    assert again.head == first.head
    assert again.first_seq == 1
    with pytest.raises(EngineError, match="no such run"):
        await store.head(make.key("r2"))


async def test_concurrent_creates_with_one_request_id_make_one_run(store, make):
    """Twenty impatient clients start one run."""
    made = await asyncio.gather(*(store.create(make.new(f"r{n}", request_id="q")) for n in range(20)))
    assert len({created.head.key for created in made}) == 1
    assert sum(not created.existing for created in made) == 1
    page = await store.list_runs("acme", states=(), conversation_id="", page_size=50, page_token="")
    assert len(page.items) == 1


async def test_a_request_id_with_another_body_is_refused(store, make):
    """The fingerprint tells a retry from a mistake."""
    await store.create(make.new("r1", request_id="q"))
    with pytest.raises(EngineError) as refused:
        await store.create(make.new("r2", request_id="q", fingerprint="another"))
    assert refused.value.reason == "REQUEST_ID_REUSED"


async def test_an_empty_request_id_is_not_idempotent(store, make):
    """Who gives no request_id starts a run each time."""
    await store.create(make.new("r1"))
    assert not (await store.create(make.new("r2"))).existing


async def test_an_unknown_conversation_is_refused_and_nothing_is_stored(store, make):
    """A given conversation must exist."""
    with pytest.raises(EngineError) as refused:
        await store.create(make.new("r1", "nowhere", new_conversation=False, request_id="q"))
    assert refused.value.reason == "UNKNOWN_CONVERSATION"
    with pytest.raises(EngineError):
        await store.head(make.key("r1"))
    assert not (await store.create(make.new("r1", "here", request_id="q"))).existing


async def test_reject_names_the_active_run_and_stores_nothing(store, make):
    """A busy conversation takes no second run by default."""
    await store.create(make.new("r1", "c"))
    for policy in (BusyPolicy.BUSY_POLICY_UNSPECIFIED, BusyPolicy.BUSY_POLICY_REJECT):
        with pytest.raises(EngineError) as refused:
            await store.create(make.new("r2", "c", on_busy=policy))
        assert refused.value.reason == "CONVERSATION_BUSY"
        assert refused.value.metadata["run_id"] == "r1"
    with pytest.raises(EngineError):
        await store.head(make.key("r2"))


async def test_queued_runs_start_one_after_the_other_as_runs_end(store, make, writer, claim_now):
    """First come first served, each with a work item of its own, never two at once."""
    for name in ("r1", "r2", "r3"):
        created = await store.create(make.new(name, "c", on_busy=QUEUE))
        assert created.head.state == (RUNNING if name == "r1" else QUEUED)
    for name, following in (("r1", "r2"), ("r2", "r3"), ("r3", None)):
        assert (await store.get_conversation("acme", "c")).active_run_id == name
        claim = await claim_now(store)
        assert claim.key.run_id == name
        assert await store.claim("default", "other", 0) is None
        await writer(store, claim.key).end()
        if following:
            assert (await store.head(make.key(following))).state == RUNNING
        await claim.ack()
    assert (await store.get_conversation("acme", "c")).active_run_id == ""
    assert await store.claim("default", "w", 0) is None


async def test_a_parked_run_keeps_its_conversation_and_the_queue_waits(store, make, writer):
    """INTERRUPTED is active too."""
    await store.create(make.new("r1", "c"))
    await store.create(make.new("r2", "c", on_busy=QUEUE))
    await writer(store, make.key("r1")).park()
    assert (await store.head(make.key("r2"))).state == QUEUED
    assert (await store.get_conversation("acme", "c")).active_run_id == "r1"


async def test_more_than_eight_waiting_runs_are_refused(store, make):
    """The queue of a conversation is bounded."""
    for n in range(MAX_QUEUED + 1):
        await store.create(make.new(f"r{n}", "c", on_busy=QUEUE))
    with pytest.raises(EngineError) as refused:
        await store.create(make.new("late", "c", on_busy=QUEUE))
    assert refused.value.reason == "OVERLOADED"
    await store.create(make.new("elsewhere", "d", on_busy=QUEUE))


async def test_replace_signals_every_run_before_it_and_waits_last(store, make, writer, claim_now, until):
    """REPLACE cancels the active run and all that wait, then starts."""
    reached = []
    store.on_signal(reached.append)
    await store.create(make.new("r1", "c"))
    await store.create(make.new("r2", "c", on_busy=QUEUE))
    claim = await claim_now(store)
    created = await store.create(make.new("r3", "c", on_busy=REPLACE))
    assert created.head.state == QUEUED
    await until(lambda: len(set(reached)) == 2)
    assert list(dict.fromkeys(reached)) == [make.key("r1"), make.key("r2")]
    for name in ("r1", "r2"):
        unread = (await store.load(make.key(name))).unread
        assert [(signal.signal_id, signal.body) for signal in unread] == [("replace:r3", b"replaced")]
    assert (await store.load(make.key("r3"))).unread == ()

    queued = await claim_now(store)
    assert queued.key.run_id == "r2"
    await writer(store, queued.key).end(state=CANCELLED)
    await queued.ack()
    assert (await store.head(make.key("r3"))).state == QUEUED
    await writer(store, claim.key).end(state=CANCELLED)
    await claim.ack()
    assert (await claim_now(store)).key.run_id == "r3"
    assert (await store.get_conversation("acme", "c")).active_run_id == "r3"


async def test_replace_without_an_active_run_just_starts(store, make, writer):
    """There is nobody to cancel."""
    await store.create(make.new("r1", "c"))
    await writer(store, make.key("r1")).end()
    assert (await store.create(make.new("r2", "c", on_busy=REPLACE))).head.state == RUNNING
    assert (await store.load(make.key("r1"))).unread == ()


async def test_a_queued_run_that_ends_never_starts(store, make, writer):
    """A cancelled run leaves the queue; the one behind it moves up."""
    for name in ("r1", "r2", "r3"):
        await store.create(make.new(name, "c", on_busy=QUEUE))
    await writer(store, make.key("r2")).end(state=CANCELLED)
    await writer(store, make.key("r1")).end()
    assert (await store.head(make.key("r2"))).state == CANCELLED
    assert (await store.head(make.key("r3"))).state == RUNNING


async def test_a_queued_run_cannot_be_started_by_an_append(store, make, writer):
    """Only the end of the run before it starts a queued run; a frame of state QUEUED changes no state."""
    await store.create(make.new("r1", "c"))
    await store.create(make.new("r2", "c", on_busy=QUEUE))
    with pytest.raises(ValueError, match="queued"):
        await store.append(make.key("r2"), make.frame(1), 0)
    waiting = writer(store, make.key("r2"))
    await writer(store, make.key("r1")).end()
    await waiting.add(0, state=QUEUED)
    assert (await store.head(make.key("r2"))).state == RUNNING


async def test_a_conversation_id_that_exists_keeps_its_title(store, make, writer):
    """Creating a conversation twice changes nothing."""
    await store.create(make.new("r1", "c"))
    await writer(store, make.key("r1")).end()
    await store.create(replace(make.new("r2", "c"), title="another"))
    assert (await store.get_conversation("acme", "c")).title == "title of c"
