"""Resume as its callers see it: sent again, sent too late, sent to the wrong run."""

import asyncio

import pytest

from dualclaw import RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.store import Head, RunKey, RunStore
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.hitl import Opinion, Policy
from dualclaw_server.stores.memory import MemoryStore

from .conftest import TIMEOUT, Opener, calls, results, turn
from .people import DONE, Ledger, SlowInbox, answer, asks, at_work, check, decide, ids, pay, resume, segment_of


def gated(ledger: Ledger) -> Agent:
    return Agent("a", tools=[ledger.tool()], interceptors=[asks()])


async def test_a_resume_sent_again_streams_the_same_segment(open_engine: Opener) -> None:
    """The same request_id changes nothing, also when the run is long over; another body is refused."""
    ledger = Ledger()
    engine = await open_engine(gated(ledger), turn(0, pay("p1"), pay("p2")), DONE)
    asked = await engine.ask("go", request_id="r0")
    first = await answer(engine, asked, decide("p1"), request_id="r1")
    ended = await answer(engine, first, decide("p2"), request_id="r2")
    for request_id, decision, events in (("r1", decide("p1"), first.events), ("r2", decide("p2"), ended.events)):
        again = await resume(engine, asked.key, decision, request_id=request_id)
        assert again.existing
        assert (await segment_of(engine, again)).events == events
    for request_id in ("r0", "r1"):
        with pytest.raises(EngineError) as reused:
            await resume(engine, asked.key, decide("p1", "reject"), request_id=request_id)
        assert reused.value.reason == "REQUEST_ID_REUSED"
    assert ledger.to == ["p1", "p2"]


async def test_a_run_that_waits_for_nobody_takes_no_answers(open_engine: Opener) -> None:
    """Running, finished or unknown: the refusal says which."""
    engine = await open_engine(Agent("a"), turn(0, {"text": "so far"}, {"hang": True}))
    started = await engine.start("go")
    with pytest.raises(EngineError) as running:
        await resume(engine, started.head.key, decide("p1"))
    assert (running.value.reason, running.value.metadata) == ("RUN_NOT_INTERRUPTED", {"state": "RUNNING"})
    await engine.cancel(started.head.key)
    await check(engine.store, await engine.read(started))
    with pytest.raises(EngineError) as final:
        await resume(engine, started.head.key)
    assert final.value.metadata == {"state": "CANCELLED"}
    with pytest.raises(EngineError) as unknown:
        await resume(engine, type(started.head.key)("tenant", "nowhere"), decide("p1"))
    assert unknown.value.reason == "UNKNOWN_RUN"


async def test_a_failed_run_does_not_look_interrupted(open_engine: Opener) -> None:
    """What a run says of itself after a park is what it came to in the end."""
    ledger = Ledger()
    engine = await open_engine(gated(ledger), turn(0, pay("p1")), turn(1, {"fail": "MODEL_AUTH"}))
    asked = await engine.ask("go")
    ended = await answer(engine, asked, decide("p1"))
    assert ended.last.error.diagnosis.code == "model.auth"
    run = (await engine.store.head(asked.key)).run
    assert (run.state, run.stop_reason, len(run.interrupts)) == (RunState.RUN_STATE_FAILED, 0, 0)
    messages = await engine.messages(asked.conversation_id)
    assert sorted(results(messages)) == sorted(calls(messages))


async def test_a_runner_that_drains_takes_no_answers(store: RunStore) -> None:
    """The caller is told to ask another process; the answer is not lost half-way."""
    ledger = Ledger()
    async with at_work(store, gated(ledger), turn(0, pay("p1")), DONE) as engine:
        asked = await engine.ask("go")
    async with at_work(store, gated(ledger), DONE) as engine:
        await engine.runner.drain(0)
        with pytest.raises(EngineError, match="shutting down") as draining:
            await resume(engine, asked.key, decide("p1"))
    assert draining.value.reason == "OVERLOADED"


async def test_an_answer_waits_for_a_run_that_takes_in_another_one() -> None:
    """The run is at work for a moment on the first answer; the second, to another question, is not refused for that."""
    ledger, slow = Ledger(), SlowInbox()
    await slow.open()
    agent = Agent("a", tools=[ledger.tool()], interceptors=[asks()])
    async with at_work(slow, agent, turn(0, pay("p1"), pay("p2")), DONE) as engine:
        asked = await engine.ask("go")
        slow.waits = True
        first = await resume(engine, asked.key, decide("p1"))
        await asyncio.wait_for(slow.waiting.wait(), TIMEOUT)
        second = asyncio.create_task(resume(engine, asked.key, decide("p2")))
        await asyncio.sleep(0.02)
        assert not second.done()
        slow.released.set()
        assert ids(await segment_of(engine, first)) == ["p2"]
        await segment_of(engine, await second)
    assert ledger.to == ["p1", "p2"]
    await slow.close()


class SlowHead(MemoryStore):
    """A store whose next head is read at once and arrives late, as over a slow line."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.arrive = asyncio.Event(), asyncio.Event()
        self.slow = False

    async def head(self, key: RunKey) -> Head:
        head = await super().head(key)
        if self.slow:
            self.slow = False
            self.taken.set()
            await self.arrive.wait()
        return head


async def test_no_answer_is_taken_that_was_not_checked_against_its_question() -> None:
    """A decision that arrives just before the run asks is checked once the question is there, and refused or taken."""
    store, ledger, go = SlowHead(), Ledger(), asyncio.Event()
    await store.open()

    async def when_told(call: Call, _: Trace) -> Opinion:
        await go.wait()
        return True

    policy = Policy("pay", ask=when_told, allowed=("approve", "reject"))
    agent = Agent("a", tools=[ledger.tool()], interceptors=[asks(policy)])
    async with at_work(store, agent, turn(0, pay("p1")), DONE) as engine:
        created = await engine.start("go")
        store.slow = True
        early = asyncio.create_task(resume(engine, created.head.key, decide("p1", "respond", response_json='"x"')))
        await asyncio.wait_for(store.taken.wait(), TIMEOUT)
        go.set()
        asked = await segment_of(engine, created)
        store.arrive.set()
        with pytest.raises(FieldError, match="must be one of APPROVE, REJECT"):
            await early
        await answer(engine, asked, decide("p1"))
    assert ledger.to == ["p1"]
    await store.close()
