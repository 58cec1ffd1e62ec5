"""A run whose lease is lost is dropped: nothing is started for it any more, and whoever has it now finishes it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from dualclaw import RunState
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.backoff import MISSING_MOST, MOST, Backoff
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, ModelCall, ModelNext, Prompt, ToolNext, ToolRequest
from dualclaw_server.engine.interceptor import Observation as Observed
from dualclaw_server.engine.model import ChatModel, ModelChunk, ModelRequest, ModelResponse, ModelTraits, ToolSpec
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.engine.runner import Runner
from dualclaw_server.engine.store import Claim, Frame, Full, RunKey, StoreError, Unavailable
from dualclaw_server.engine.tool import tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.stores.memory import MemoryStore

from .conftest import Engine, at_work_with, scripted, turn, until
from .people import DONE, Ledger, pay


@dataclass
class Counted:
    """A scripted model that counts its calls."""

    model: ChatModel
    streams: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def traits(self) -> ModelTraits:
        return self.model.traits

    def with_tools(self, tools: Sequence[ToolSpec]) -> "Counted":
        return Counted(self.model.with_tools(tools), self.streams)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        self.streams.append("begun")
        async with aclosing(self.model.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate(self, request: ModelRequest) -> ModelResponse:
        self.streams.append("begun")
        return await self.model.generate(request)

    async def aclose(self) -> None:
        await self.model.aclose()


class Thief(Interceptor):
    """Has the run taken from its worker, once, at one moment of its life; notes how each agent ended."""

    def __init__(self, store: MemoryStore, at: str) -> None:
        super().__init__()
        self._store = store
        self._at = at
        self._stolen = False
        self.endings: list[str] = []

    async def steal(self, at: str, trace: Trace) -> None:
        if at == self._at and not self._stolen:
            self._stolen = True
            assert await self._store.release(trace.key)
            await asyncio.sleep(0.1)  # the next one is at work by now; were it not, this test would only see less

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> None:
        await self.steal("reason", trace)

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        await self.steal("stream", call.trace)
        async with aclosing(call_next(call)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def on_reason_retry(self, trace: Trace, error: Exception, attempt: int, prompt: Prompt) -> bool:
        await self.steal("retry", trace)
        return False

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> None:
        await self.steal("action", trace)

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observed:
        await self.steal("tool", request.trace)
        return await call_next(request)

    async def on_agent_end(self, trace: Trace) -> None:
        self.endings.append(trace.ending)


@pytest.mark.parametrize(
    ("at", "streams", "paid"),
    [
        ("reason", 2, 1),  # no model call was made by who lost it
        ("stream", 2, 1),
        ("action", 2, 1),  # what the model had asked for is saved
        ("tool", 2, 0),  # the start was saved, so nobody else may run it
    ],
)
async def test_nothing_is_started_once_the_lease_is_lost(at: str, streams: int, paid: int) -> None:
    """Neither model nor tool is called by who has lost the run; the next one finishes it, and told is put_back."""
    store, ledger = MemoryStore(), Ledger()
    await store.open()
    thief, model = Thief(store, at), Counted(scripted(turn(0, pay("p1")), DONE))
    agent = Agent("a", tools=[ledger.tool()], models=[model], interceptors=[thief])
    async with at_work_with(store, [agent]) as engine:
        asked = await engine.ask("go")
        await until(lambda: len(thief.endings) == 2)
    assert asked.last.done.content == "All done."
    assert len(model.streams) == streams
    assert len(ledger.to) == paid
    assert sorted(thief.endings) == ["finished", "put_back"]
    codes = [code for _, _, phase, code in asked.steps if phase == "fail"]
    assert codes == ([] if paid else ["tool.outcome_unknown"])
    await store.close()


async def test_no_further_attempt_at_a_model_call_is_made_once_the_lease_is_lost() -> None:
    """Of three attempts that a failing model would get, the second is not made by who has lost the run."""
    store = MemoryStore()
    await store.open()
    thief = Thief(store, "retry")
    model = Counted(scripted({"say": [{"fail": "MODEL_OVERLOADED"}]}))
    policy = RetryPolicy(attempts=3, first_delay=0.01)
    agent = Agent("a", models=[model], interceptors=[thief], retry=policy)
    async with at_work_with(store, [agent]) as engine:
        asked = await engine.ask("go")
        await until(lambda: len(thief.endings) == 2)
    assert asked.last.error.diagnosis.code == "model.overloaded"
    assert len(model.streams) == 1 + 3
    assert sorted(thief.endings) == ["model.overloaded", "put_back"]
    await store.close()


async def test_calls_under_way_are_abandoned_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A tool that is at work when the lease is lost is cancelled, its name is logged, its result is nobody's."""
    store, ledger = MemoryStore(), Ledger()
    await store.open()
    thief = Thief(store, "never")
    ledger.hanging = True
    agent = Agent("a", tools=[ledger.tool()], interceptors=[thief])
    with caplog.at_level(logging.WARNING):
        async with at_work_with(store, [agent], turn(0, pay("p1")), DONE) as engine:
            started = await engine.start("go")
            await ledger.begun("p1")
            assert await store.release(started.head.key)
            asked = await engine.read(started)
            await until(lambda: len(thief.endings) == 2)
    assert ledger.to == ["p1"]
    assert [code for _, _, phase, code in asked.steps if phase == "fail"] == ["tool.outcome_unknown"]
    assert sorted(thief.endings) == ["finished", "put_back"]
    assert any("calls under way are abandoned: pay" in record.message for record in caplog.records)
    await store.close()


async def test_a_tool_that_raises_a_stores_error_has_failed_like_any_other() -> None:
    """What a tool's own store says is no word of the engine's: the model is told, and the run goes on."""
    store = MemoryStore()
    await store.open()

    @tool(name="pay", effect="read")
    async def broken(to: str) -> str:
        raise Unavailable("the database of the tool")

    async with at_work_with(store, [Agent("a", tools=[broken])], turn(0, pay("p1")), DONE) as engine:
        asked = await engine.ask("go")
    assert [(phase, code) for _, _, phase, code in asked.steps] == [("start", ""), ("fail", "tool.failed")]
    assert asked.last.done.content == "All done."
    await store.close()


class Stingy(MemoryStore):
    """A store that is full until it is told otherwise, and notes when work was claimed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.full = True
        self.claims: list[float] = []

    async def claim(self, pool: str, worker: str, wait: float) -> Claim | None:
        claim = await super().claim(pool, worker, wait)
        if claim is not None:
            self.claims.append(asyncio.get_running_loop().time())
        return claim

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        if not self.full:
            return super().append(key, frame, expect)
        future = asyncio.get_running_loop().create_future()
        future.set_exception(Full("planned"))
        return future


async def test_a_run_that_meets_a_full_store_goes_on_when_there_is_room_and_makes_no_busy_loop() -> None:
    """It is put back for longer and longer; the model is not called for ever; with room again it comes to its end."""
    store = Stingy()
    await store.open()
    model = ScriptedModel.parse('{"name": "test", "turns": [{"say": [{"text": "Hello"}]}]}')
    engine = Engine(store, [Agent("a")], [])
    engine.runner = Runner(store, [Agent("a")], model=model, retry=0.05)
    serve = asyncio.create_task(engine.runner.serve())
    started = await engine.start("go")
    await until(lambda: len(store.claims) >= 4)
    assert (await store.head(started.head.key)).version == 0
    waits = [later - sooner for sooner, later in pairwise(store.claims)]
    assert all(wait > 0.9 * due for wait, due in zip(waits, (0.05, 0.1, 0.2, 0.4), strict=False)), waits
    store.full = False
    asked = await engine.read(started)
    assert asked.last.done.content == "Hello"
    assert asked.last.seq == len(asked.events)
    await engine.runner.drain(0)
    await asyncio.wait({serve}, timeout=5)
    await store.close()


class Silent(Stingy):
    """A store whose first append fails late, when the model is already being waited for."""

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        if not self.full:
            return super().append(key, frame, expect)
        self.full = False

        async def fail() -> int:
            await asyncio.sleep(0.1)
            raise StoreError("planned")

        return asyncio.ensure_future(fail())


async def test_a_claim_that_is_refused_late_ends_the_work_though_the_model_is_silent() -> None:
    """A model that says nothing must not keep a run at work whose log belongs to somebody else."""
    store = Silent()
    await store.open()
    model = Counted(scripted({"say": [{"hang": True}]}))
    agent = Agent("a", models=[model])
    runner = Runner(store, [agent], model=model, retry=0.01)
    serve = asyncio.create_task(runner.serve())
    asker = Engine(store, [agent], [])
    started = await asker.start("go")
    await until(lambda: len(model.streams) == 2)
    assert (await store.head(started.head.key)).state == RunState.RUN_STATE_RUNNING
    await runner.drain(0)
    await asyncio.wait({serve}, timeout=5)
    await store.close()


class Overtaken(MemoryStore):
    """A store in which somebody else writes one more frame just before the worker's first."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Awaitable[int]] = []

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        if not self.others:
            self.others.append(super().append(key, Frame(frame.epoch, 1, 0, b"", RunState.RUN_STATE_RUNNING), expect))
        return super().append(key, frame, expect)


async def test_a_claim_that_comes_behind_another_writers_last_frame_is_made_again_soon() -> None:
    """Nothing has failed and the run is its own: it must not wait as if the store had."""
    store = Overtaken()
    await store.open()
    agent, model = Agent("a"), ScriptedModel.parse('{"name": "test", "turns": [{"say": [{"text": "Hello"}]}]}')
    runner = Runner(store, [agent], model=model, retry=3_600)
    serve = asyncio.create_task(runner.serve())
    engine = Engine(store, [agent], [])
    asked = await engine.read(await engine.start("go"))
    assert await store.others[0] == 1
    assert asked.last.done.content == "Hello"
    await runner.drain(0)
    await asyncio.wait({serve}, timeout=5)
    await store.close()


def test_delays_double_up_to_their_bound_and_begin_anew_after_success() -> None:
    """5, 10, 20 ... 300 s for each run by itself; 60 s at most for what any process may bring."""
    backoff, key, other = Backoff(), RunKey("t", "a"), RunKey("t", "b")
    assert [backoff.delay(key) for _ in range(8)] == [5, 10, 20, 40, 80, 160, MOST, MOST]
    assert backoff.delay(key, MISSING_MOST) == MISSING_MOST
    assert backoff.delay(other) == 5
    backoff.forget(key)
    assert backoff.delay(key) == 5
