"""A run that ends with its readers: who reads may be on another process than who works."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dualclaw import DisconnectPolicy, RunOptions, RunRequest, RunState, StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.runner import Runner
from dualclaw_server.engine.store import Created, RunStore

from .conftest import Engine, turn
from .people import Ledger, asks, pay

PATIENCE = 3.0
"""Seconds: what a machine with many others at work may stand still between two marks of a reader is far less."""
QUICK = 0.6
"""For a test that a machine that stands still makes see less, and never wrong."""
OPTIONS = RunOptions(on_disconnect=DisconnectPolicy.DISCONNECT_POLICY_CANCEL)
ENDLESS = turn(0, {"text": "half"}, {"hang": True}, user="talk")
Two = tuple[Engine, Engine]


@pytest.fixture
async def two(request: pytest.FixtureRequest, store: RunStore) -> AsyncIterator[Two]:
    """A process that answers calls and one that works, on one store; the parameter is their patience."""
    patience = getattr(request, "param", PATIENCE)
    agents = [Agent("a", tools=[Ledger().tool()], interceptors=[asks()])]
    script = [ENDLESS, turn(0, pay("p1"), user="pay")]
    api, worker = Engine(store, agents, script), Engine(store, agents, script)
    for engine in (api, worker):
        engine.runner = Runner(store, agents, model=engine.model, patience=patience)
    serve = asyncio.create_task(worker.runner.serve())
    yield api, worker
    for engine in (api, worker):
        await engine.runner.drain(0)
    await asyncio.wait({serve}, timeout=5)


async def state_of(engine: Engine, started: Created) -> RunState.ValueType:
    return (await engine.store.head(started.head.key)).state


async def test_a_reader_on_another_process_keeps_the_run_and_ends_it_by_leaving(two: Two) -> None:
    """The worker has no reader of its own, and leaves the run alone as long as its starter reads elsewhere."""
    api, _ = two
    started = await api.start("talk", options=OPTIONS)
    with api.runner.attached(started.head.key, starter=RunRequest(options=OPTIONS)):
        await asyncio.sleep(2.2 * PATIENCE)
        assert await state_of(api, started) == RunState.RUN_STATE_RUNNING
    assert (await api.read(started)).last.done.stop_reason == StopReason.STOP_REASON_CANCELLED


async def test_whoever_attaches_elsewhere_saves_a_run_that_its_starter_has_left(two: Two) -> None:
    """A reader who did not start the run finds out what it was started with; with the last reader it ends."""
    api, _ = two
    started = await api.start("talk", options=OPTIONS)
    with api.runner.attached(started.head.key):
        await asyncio.sleep(2.2 * PATIENCE)
        assert await state_of(api, started) == RunState.RUN_STATE_RUNNING
    assert (await api.read(started)).last.done.stop_reason == StopReason.STOP_REASON_CANCELLED


async def test_a_run_that_waits_for_people_is_not_cancelled_because_nobody_reads_it(two: Two) -> None:
    """Its starter's stream ends with the question, so leaving means nothing."""
    api, _ = two
    started = await api.start("pay", options=OPTIONS)
    with api.runner.attached(started.head.key, starter=RunRequest(options=OPTIONS)):
        await api.read(started)
    await asyncio.sleep(1.5 * PATIENCE)
    assert await state_of(api, started) == RunState.RUN_STATE_INTERRUPTED


@pytest.mark.parametrize("two", [QUICK], indirect=True)
@pytest.mark.parametrize("starter", [RunRequest(), None])
async def test_readers_of_other_runs_write_nothing(two: Two, starter: RunRequest | None) -> None:
    """Only runs that end with their readers have a mark in the store."""
    api, _ = two
    started = await api.start("talk")
    with api.runner.attached(started.head.key, starter=starter):
        await asyncio.sleep(QUICK)
        assert await api.store.get("tenant", f"readers/{started.head.key.run_id}") is None
    await asyncio.sleep(2 * QUICK)
    assert await state_of(api, started) == RunState.RUN_STATE_RUNNING
