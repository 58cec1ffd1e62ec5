"""The first frame of an epoch: nothing is sent behind it before the log is known to be this writer's."""

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from dualclaw import EngineEvent, RunResponse, RunState
from dualclaw.fold import RunView
from dualclaw_server.engine.frames import FrameWriter
from dualclaw_server.engine.pace import Pace
from dualclaw_server.engine.store import Fenced, StoreError
from dualclaw_server.stores.memory import MemoryStore

from .test_frames import KEY, GatedStore, create_run, make_writer, settle


@pytest.fixture
async def store() -> AsyncIterator[GatedStore]:
    store = GatedStore()
    await store.open()
    await create_run(store)
    yield store
    store.gate.set()
    await store.close()


async def folded(store: MemoryStore) -> RunView:
    view = RunView()
    for frame in await store.read(KEY, 0):
        for event in RunResponse.FromString(frame.body).events:
            assert view.apply(event), "a seq was given twice"
    return view


def successor(store: MemoryStore, view: RunView, version: int) -> FrameWriter:
    """The writer of who takes a run over that stands there."""
    envelope = EngineEvent(trace_id="u" * 32, run_id=KEY.run_id)
    return FrameWriter(store, KEY, view, epoch=2, version=version, envelope=envelope, pace=Pace())


async def test_a_claim_behind_a_refused_rewind_is_not_stored_by_accident(store: GatedStore) -> None:
    """The old writer gets one more delta in, at the very version and seq of the rewind: the claim must not fit."""
    old = make_writer(store)
    old.text("so far")
    await old.commit(checkpoint=b"1")
    head, view = await store.head(KEY), await folded(store)
    new = successor(store, view, head.version)

    old.text(" and on")
    await old.commit(checkpoint=b"")  # the old holder is alive, and faster
    new.rewind("", "", reason="the engine was restarted", attempt=1)
    claimed = new.commit(checkpoint=b"2")
    with pytest.raises(Fenced):
        await claimed
    assert isinstance(new.failure, Fenced)
    assert (await folded(store)).text == "so far and on"
    assert (await store.head(KEY)).epoch == 1


async def test_of_two_who_claim_a_new_run_the_loser_leaves_nothing_in_the_log(store: GatedStore) -> None:
    """Both write epoch 1: the loser's second frame would fit behind the winner's claim."""
    winner, loser = make_writer(store), make_writer(store)
    await winner.commit(checkpoint=b"winner")
    first = loser.commit(checkpoint=b"loser")
    second = loser.commit(checkpoint=b"loser, further")
    for refused in (first, second):
        with pytest.raises(Fenced):
            await refused
    loaded = await store.load(KEY)
    assert (loaded.head.version, loaded.checkpoint) == (1, b"winner")


async def test_what_waited_for_the_first_frame_goes_out_in_order(store: GatedStore) -> None:
    """Held frames follow as soon as the first is in, and others may be sent behind them at once."""
    store.gate.clear()
    writer = make_writer(store)
    commits = [writer.commit(checkpoint=b"0")]
    for number in range(1, 4):
        writer.text(str(number))
        commits.append(writer.commit(checkpoint=b"%d" % number))
    assert len(store.frames) == 1
    store.gate.set()
    assert await asyncio.gather(*commits) == [1, 2, 3, 4]
    assert [frame.checkpoint for frame in store.frames] == [b"0", b"1", b"2", b"3"]
    assert (await folded(store)).text == "123"
    store.gate.clear()
    later = [writer.commit(checkpoint=b"4"), writer.commit(checkpoint=b"5")]
    assert len(store.frames) == 6  # the log is this writer's: frames follow each other without waiting
    store.gate.set()
    assert await asyncio.gather(*later) == [5, 6]


async def test_the_end_of_a_run_may_wait_for_its_claim(store: GatedStore) -> None:
    """A terminal frame closes its writer at once, and is sent all the same once the claim is in."""
    store.gate.clear()
    writer = make_writer(store)
    writer.commit(checkpoint=b"0")
    ended = writer.commit(checkpoint=b"1", state=RunState.RUN_STATE_SUCCEEDED, ends_segment=True)
    store.gate.set()
    assert await ended == 2
    assert (await store.head(KEY)).state == RunState.RUN_STATE_SUCCEEDED


async def test_given_up_what_waits_is_not_sent(store: GatedStore) -> None:
    """A writer that lost its lease drops what it held back."""
    store.gate.clear()
    writer = make_writer(store)
    first = writer.commit(checkpoint=b"0")
    second = writer.commit(checkpoint=b"1")
    writer.give_up(StoreError("the lease is lost"))
    with pytest.raises(StoreError, match="lease"):
        await second
    store.gate.set()
    assert await first == 1
    assert len(store.frames) == 1


async def test_whoever_leaves_while_a_frame_is_held_breaks_the_writer_and_nothing_hangs(store: GatedStore) -> None:
    """A cancelled wait ends the writer, as ever; what was held behind it is dropped and told so."""
    store.gate.clear()
    writer, failures = make_writer(store), list[BaseException]()
    writer.on_failure = failures.append
    first, left, last = (writer.commit(checkpoint=b"%d" % number) for number in range(3))
    left.cancel()
    with pytest.raises(StoreError, match="cancelled"):
        await last
    store.gate.set()
    assert await first == 1
    assert len(store.frames) == len(failures) == 1


async def test_a_refusal_nobody_waits_for_any_more_is_no_news(store: GatedStore) -> None:
    """A held frame was sent, its caller has left, then it is refused: no exception is left for the event loop."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    store.gate.clear()
    writer, other = make_writer(store), make_writer(store, version=1, epoch=2)
    first, held = writer.commit(checkpoint=b"0"), writer.commit(checkpoint=b"1")
    await settle()
    taken = other.commit(checkpoint=b"2")
    await settle()
    store.gate.set()
    assert await first == 1
    assert len(store.frames) == 3
    held.cancel()  # it is on its way
    assert await taken == 2
    await settle()
    del held
    gc.collect()
    await settle()
    assert complaints == []
