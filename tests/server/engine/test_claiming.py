"""How a worker asks its store for work: side by side, within its capacity, and by one scout while the store fails."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dualclaw import RunState
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.runner import Runner
from dualclaw_server.engine.store import Claim, Unavailable
from dualclaw_server.engine.worker import CLAIMERS
from dualclaw_server.stores.memory import MemoryStore

from .conftest import Engine, scripted, until


class Slow(MemoryStore):
    """A store whose claims are answered when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asking = self.asked = 0
        self.answers = asyncio.Event()
        self.away = False

    async def claim(self, pool: str, worker: str, wait: float) -> Claim | None:
        self.asking += 1
        self.asked += 1
        try:
            await self.answers.wait()
            if self.away:
                raise Unavailable("planned")
        finally:
            self.asking -= 1
        return await super().claim(pool, worker, wait)


@asynccontextmanager
async def at_work(store: Slow, capacity: int, *script: dict[str, object]) -> AsyncIterator[Engine]:
    await store.open()
    engine = Engine(store, [Agent("a")], [])
    engine.runner = Runner(store, [Agent("a")], model=scripted(*script), capacity=capacity)
    serve = asyncio.create_task(engine.runner.serve())
    try:
        yield engine
    finally:
        await engine.runner.drain(0)
        async with asyncio.timeout(30):
            await serve
        await store.close()


@pytest.mark.parametrize(("capacity", "together"), [(1, 1), (3, 3), (100, CLAIMERS)])
async def test_claims_are_under_way_together_and_never_more_than_may_be_worked_on(capacity: int, together: int) -> None:
    """A place within the capacity comes before the claim, so a process is never given more than it may work on."""
    store = Slow()
    async with at_work(store, capacity, {"say": [{"text": "half"}, {"hang": True}]}) as engine:
        await until(lambda: store.asking == together)
        started = [await engine.start("go") for _ in range(capacity + 2)]
        store.answers.set()
        for one in started[: min(capacity, CLAIMERS)]:
            await engine.wait_for(one.head.key, bool)
        if capacity < CLAIMERS:
            await until(lambda: store.asking == 0)
            assert store.asked == capacity
            states = [(await store.head(one.head.key)).version > 0 for one in started]
            assert states.count(True) == capacity


async def test_while_the_store_fails_one_claim_tries_again_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """One line of log a try, not one for every claim; with the store back all of them go on."""
    store = Slow()
    store.away = True
    with caplog.at_level(logging.ERROR):
        async with at_work(store, 100, {"say": [{"text": "Hello"}]}) as engine:
            await until(lambda: store.asking == CLAIMERS)
            store.answers.set()
            await until(lambda: store.asked > CLAIMERS)  # the scout's second try
            lines = [record.message for record in caplog.records if "the store gives no work" in record.message]
            assert len(lines) - (store.asked - CLAIMERS) in (0, 1)
            store.away = False
            store.answers.clear()
            asked = await asyncio.wait_for(asyncio.gather(_wait_all(store), engine.ask("go")), 60)
            assert asked[1].last.done.content == "Hello"


async def _wait_all(store: Slow) -> None:
    """Answer, and see that every claimer asks again."""
    before = store.asked
    store.answers.set()
    await until(lambda: store.asked >= before + CLAIMERS)


async def test_what_arrives_as_the_process_drains_is_put_back_at_once() -> None:
    """Claims that are answered after the drain began take nothing with them: the next process has it at once."""
    store = Slow()
    async with at_work(store, 100, {"say": [{"text": "Hello"}]}) as engine:
        await until(lambda: store.asking == CLAIMERS)
        started = [await engine.start("go") for _ in range(CLAIMERS)]
        store.answers.set()
        await engine.runner.drain(0)
        async with at_work_again(store) as other:
            for one in started:
                asked = await other.read(one)
                assert asked.last.done.content == "Hello"
                assert (await store.head(one.head.key)).state == RunState.RUN_STATE_SUCCEEDED


@asynccontextmanager
async def at_work_again(store: Slow) -> AsyncIterator[Engine]:
    engine = Engine(store, [Agent("a")], [{"say": [{"text": "Hello"}]}])
    serve = asyncio.create_task(engine.runner.serve())
    try:
        yield engine
    finally:
        await engine.runner.drain(0)
        async with asyncio.timeout(30):
            await serve
