"""The frame writer: what coalesces, when it commits, and what happens when it cannot."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import BusyPolicy, ContentPart, EngineEvent, Message, Role, Run, RunResponse, RunState
from dualclaw.events import make_rewind, make_step
from dualclaw.fold import RunView
from dualclaw_server.engine.frames import FRAME_TIME, MAX_TEXT, MAX_WAITING, FrameWriter
from dualclaw_server.engine.pace import Pace
from dualclaw_server.engine.store import Fenced, Frame, NewRun, RunKey, StoreError
from dualclaw_server.stores.memory import MemoryStore

from .conftest import TIMEOUT

KEY = RunKey("t", "run")


class GatedStore(MemoryStore):
    """A memory store whose appends land only while the gate is open, and which keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.frames: list[Frame] = []

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        self.frames.append(frame)
        stored = super().append(key, frame, expect)

        async def land() -> int:
            await self.gate.wait()
            return await stored

        return land()


@pytest.fixture
async def store() -> AsyncIterator[GatedStore]:
    store = GatedStore()
    await store.open()
    await create_run(store)
    yield store
    store.gate.set()
    await store.close()


async def create_run(store: MemoryStore) -> None:
    message = Message(id="m", role=Role.ROLE_USER, parts=[ContentPart(text="hi")])
    run = Run(id=KEY.run_id, conversation_id="c")
    await store.create(NewRun(KEY, "c", True, "hi", "", "f", b"", run, message, BusyPolicy.BUSY_POLICY_REJECT, b""))


def make_writer(store: MemoryStore, version: int = 0, epoch: int = 1) -> FrameWriter:
    envelope = EngineEvent(trace_id="t" * 32, run_id=KEY.run_id)
    return FrameWriter(store, KEY, RunView(), epoch=epoch, version=version, envelope=envelope, pace=Pace())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def logged(store: MemoryStore) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while frames := await store.read(KEY, len(events)):
        for frame in frames:
            events += RunResponse.FromString(frame.body).events
    return events


async def texts_logged(store: MemoryStore, count: int) -> list[str]:
    """Wait until the log has so many events of text; return what they say."""
    async with asyncio.timeout(TIMEOUT):
        while len(events := await logged(store)) < count:  # noqa: ASYNC110
            await asyncio.sleep(FRAME_TIME)
    return [event.delta.content for event in events]


async def test_the_first_text_after_a_quiet_time_commits_at_once(store: GatedStore) -> None:
    """A person sees the first token without waiting for a frame to fill; what follows soon waits for its frame."""
    writer = make_writer(store)
    began = asyncio.get_running_loop().time()
    writer.text("H")
    writer.text("e")
    await settle()
    assert [frame.count for frame in store.frames] == [1]
    writer.text("llo")
    soon = asyncio.get_running_loop().time() - began < FRAME_TIME / 2
    assert len(store.frames) == 1 or not soon  # a machine that is so slow proves nothing
    assert await texts_logged(store, 2) == ["He", "llo"]
    assert len(store.frames) == 2


async def test_a_last_text_goes_with_the_end_it_comes_with(store: GatedStore) -> None:
    """What one read of the model brings is one frame: an answer that comes at once is one message to its reader."""
    writer = make_writer(store)
    writer.text("all")
    await writer.commit(checkpoint=b"x", ends_segment=True, state=RunState.RUN_STATE_SUCCEEDED)
    await settle()
    assert [(frame.count, frame.durable) for frame in store.frames] == [(1, True)]


async def test_text_accumulates_while_a_commit_is_in_flight(store: GatedStore) -> None:
    """However long a commit takes, there is one frame of text in flight, and the next one has it all."""
    writer = make_writer(store)
    store.gate.clear()
    for piece in "abcdefgh":
        writer.text(piece)
        await asyncio.sleep(FRAME_TIME / 4)
    assert len(store.frames) == 1
    store.gate.set()
    assert await texts_logged(store, 2) == ["a", "bcdefgh"]


async def test_another_event_seals_the_text_before_it(store: GatedStore) -> None:
    """Order is kept over kinds: reasoning, text and steps come out as they went in, numbered without gap."""
    writer = make_writer(store)
    writer.reasoning("hm")
    writer.text("a")
    writer.text("b")
    writer.event(make_step("skill", name="s", phase="start", index=0))
    writer.text("c")
    await writer.commit(checkpoint=b"x")
    events = await logged(store)
    assert [event.WhichOneof("payload") for event in events] == ["reasoning", "delta", "step", "delta"]
    assert [event.seq for event in events] == [1, 2, 3, 4]
    assert {event.run_id for event in events} == {"run"}
    assert events[1].delta.content == "ab"
    assert store.frames[-1].checkpoint == b"x"


async def test_long_text_is_cut_into_events_without_losing_any(store: GatedStore) -> None:
    """An event holds at most MAX_TEXT bytes, whatever the model sends in one piece, and no character is split."""
    writer = make_writer(store)
    text = "字🙂x" * MAX_TEXT
    writer.text(text)
    await writer.commit(checkpoint=b"")
    contents = [event.delta.content for event in await logged(store)]
    assert "".join(contents) == text == writer.view.text
    assert max(len(content.encode()) for content in contents) <= MAX_TEXT


async def test_the_model_is_held_back_when_commits_fall_behind(store: GatedStore) -> None:
    """Beyond MAX_WAITING bytes the writer is congested, and room waits until enough is committed."""
    writer = make_writer(store)
    store.gate.clear()
    while not writer.congested:
        writer.text("x" * 10_000)
    waiting = asyncio.create_task(writer.room())
    await asyncio.sleep(FRAME_TIME)
    assert not waiting.done()
    store.gate.set()
    await asyncio.wait_for(waiting, TIMEOUT)
    assert not writer.congested
    assert len(writer.view.text) <= MAX_WAITING + 20_000


async def test_a_fenced_writer_stops_for_good(store: GatedStore) -> None:
    """Once another writer owns the log the loser is told once, its commit raises, and nothing of it is kept."""
    loser, winner = make_writer(store), make_writer(store, epoch=2)
    await winner.commit(checkpoint=b"winner")
    told: list[BaseException] = []
    loser.on_failure = told.append
    loser.text("lost")
    with pytest.raises(Fenced):
        await loser.commit(checkpoint=b"loser")
    with pytest.raises(Fenced):
        loser.text("more")
    assert len(told) == 1
    assert isinstance(told[0], Fenced)
    assert await logged(store) == []


async def test_a_congested_reader_learns_of_the_failure(store: GatedStore) -> None:
    """Whoever waits for room is not left waiting when the log is lost."""
    loser, winner = make_writer(store), make_writer(store, epoch=2)
    await winner.commit(checkpoint=b"")
    store.gate.clear()
    while not loser.congested:
        loser.text("x" * 10_000)
    waiting = asyncio.create_task(loser.room())
    await settle()
    store.gate.set()
    with pytest.raises(Fenced):
        await asyncio.wait_for(waiting, TIMEOUT)


async def test_cancelling_a_wait_for_a_commit_does_not_break_the_writer(store: GatedStore) -> None:
    """The frame is on its way all the same, and the writer goes on."""
    writer = make_writer(store)
    store.gate.clear()
    waiting = asyncio.create_task(_shielded(writer.commit(checkpoint=b"1")))
    await settle()
    waiting.cancel()
    await settle()
    store.gate.set()
    writer.text("on")
    await writer.commit(checkpoint=b"2")
    assert writer.failure is None
    assert writer.view.text == "on"


async def _shielded(future: asyncio.Future[int]) -> int:
    return await asyncio.shield(future)


_OPERATION = st.one_of(
    st.tuples(st.just("text"), st.text(max_size=8)),
    st.tuples(st.just("reasoning"), st.text(max_size=8)),
    st.tuples(st.just("step"), st.just("")),
    st.tuples(st.just("rewind"), st.text(max_size=4)),
    st.tuples(st.just("commit"), st.just("")),
    st.tuples(st.just("pause"), st.just("")),
)


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(_OPERATION, max_size=40))
def test_the_log_says_what_the_writer_was_told(operations: list[tuple[str, str]]) -> None:
    """For any order of writes and commits the log is numbered 1..n and folds to the very view the engine has."""

    async def run() -> None:
        store = MemoryStore()
        await store.open()
        await create_run(store)
        writer = make_writer(store)
        expected = ""
        for operation, text in operations:
            match operation:
                case "text":
                    writer.text(text)
                    expected += text
                case "reasoning":
                    writer.reasoning(text)
                case "step":
                    writer.event(make_step("skill", name="s", phase="start", index=0))
                case "rewind":
                    writer.event(make_rewind(text))
                    expected = text
                case "commit":
                    await writer.commit(checkpoint=b"c", state=RunState.RUN_STATE_RUNNING)
                case _:
                    await asyncio.sleep(0)
        await writer.commit(checkpoint=b"end")
        events = await logged(store)
        view = RunView()
        for event in events:
            view.apply(event)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert view.text == writer.view.text == expected
        assert view.reasoning == writer.view.reasoning
        await store.close()

    asyncio.run(run())


async def test_a_step_is_never_committed_without_the_state_it_belongs_to(store: GatedStore) -> None:
    """A step cannot be withdrawn after a crash, so neither timer nor landing frame sends it before its checkpoint."""
    writer = make_writer(store)
    store.gate.clear()
    writer.text("a")
    await settle()
    writer.text("b")
    writer.event(make_step("thinking", text="hm", index=0))
    store.gate.set()
    await asyncio.sleep(FRAME_TIME * 3)
    writer.text("c")
    await asyncio.sleep(FRAME_TIME * 3)
    assert [event.delta.content for event in await logged(store)] == ["a"]
    await writer.commit(checkpoint=b"x")
    assert [frame.durable for frame in store.frames] == [False, True]
    assert [event.WhichOneof("payload") for event in await logged(store)] == ["delta", "delta", "step", "delta"]


async def test_nothing_follows_a_terminal_frame(store: GatedStore) -> None:
    """Whoever still holds the writer of a segment that has ended (a model that ignores its cancellation) is refused."""
    writer = make_writer(store)
    store.gate.clear()
    ended = writer.commit(checkpoint=b"x", ends_segment=True, state=RunState.RUN_STATE_SUCCEEDED)
    with pytest.raises(StoreError):
        writer.text("late")
    store.gate.set()
    assert await ended == 1
    assert len(store.frames) == 1
