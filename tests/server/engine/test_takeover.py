"""Whoever takes a run over goes on where it stands: after a crash, a lost lease, an update, with its agent gone."""

import asyncio
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from dualclaw import Message, RunState, StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor, Prompt
from dualclaw_server.engine.model import ModelResponse
from dualclaw_server.engine.outcome import Ask, Suspend
from dualclaw_server.engine.store import Frame, RunKey, RunStore
from dualclaw_server.engine.trace import Trace
from dualclaw_server.stores.memory import MemoryStore

from .conftest import CALLER, TIMEOUT, Engine, at_work_with, calls, results, turn
from .people import DONE, Ledger, asks, at_work, decide, next_segment, pay, resume, segment_of

BASELINE = Path(__file__).resolve().parents[3] / "proto/baseline/v0.1.0.binpb"


def as_baseline_saves_it(checkpoint: bytes) -> bytes:
    """Return a checkpoint with nothing in it that the first release did not know."""
    files = descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)  # type: ignore[no-untyped-call]  # protobuf's pool is untyped
    old = message_factory.GetMessageClass(pool.FindMessageTypeByName("dualclaw.checkpoint.v1.Checkpoint"))
    made: Message = old.FromString(checkpoint)
    made.DiscardUnknownFields()  # type: ignore[attr-defined]  # of every message
    return made.SerializeToString()


async def test_a_run_that_the_first_release_has_saved_goes_on() -> None:
    """Calls that were at work keep their index and are not started a second time for people; none runs twice."""
    store, ledger = MemoryStore(), Ledger()
    await store.open()
    tools = [ledger.tool(), ledger.tool("look", effect="read")]
    script = [turn(0, pay("p1"), {"call": "look", "id": "l1", "args": {"to": "l1"}}), DONE]
    ledger.hanging = True
    async with at_work(store, Agent("a", tools=tools), *script) as engine:
        started = await engine.start("go")
        await ledger.begun("p1", "l1")
    ledger.hanging = False
    loaded = await store.load(started.head.key)
    head = loaded.head
    old = as_baseline_saves_it(loaded.checkpoint)
    assert old != loaded.checkpoint
    frame = Frame(head.epoch, head.last_seq + 1, 0, b"", RunState.RUN_STATE_RUNNING, durable=True, checkpoint=old)
    await store.append(head.key, frame, head.version)
    async with at_work(store, Agent("a", tools=tools), *script) as engine:
        asked = await engine.read(started)
    assert [phase for _, _, phase, _ in asked.steps].count("start") == 2
    assert ledger.to.count("p1") == 1
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED
    await store.close()


class AsksBeforeTheSecond(Interceptor):
    """Asks before the second model call."""

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Suspend | None:
        if trace.model_calls == 1 and trace.answer_to(self.name) is None:
            return Suspend(Ask("Go on?"))
        return None


async def test_a_crash_in_a_later_segment_withdraws_no_more_than_that_segments_text(store: RunStore) -> None:
    """Text that the segment before had said is not said again by whoever recovers this one."""
    ledger = Ledger()
    agent = Agent("a", tools=[ledger.tool("look", effect="read")], interceptors=[AsksBeforeTheSecond()])
    look = {"call": "look", "id": "l1", "args": {"to": "l1"}}
    first = turn(0, {"text": "Looking."}, look)
    async with at_work(store, agent, first, turn(1, {"text": "Half an ans"}, {"hang": True})) as engine:
        asked = await segment_of(engine, await engine.start("go"))
        created = await resume(engine, asked.key, *(decide(item.id) for item in asked.events[-2].interrupt.items))
        await engine.wait_for(asked.key, lambda events: events[-1].delta.content == "Half an ans")
    async with at_work(store, agent, first, turn(1, {"text": "A whole answer."})) as engine:
        asked = await segment_of(engine, created)
    assert [event.rewind.content for event in asked.events if event.WhichOneof("payload") == "rewind"] == [""]
    assert asked.last.done.content == "A whole answer."


class AsksAfterTheFirst(Interceptor):
    """Asks about the first answer of the model, whatever it is."""

    async def on_reason_end(
        self, trace: Trace, response: ModelResponse, message: Message, duration: float
    ) -> Suspend | None:
        if trace.answer_to(self.name) is None:
            return Suspend(Ask("Fine?"))
        return None


async def test_an_empty_answer_is_not_reviewed_again_but_asked_for_again(store: RunStore) -> None:
    """There is no message to go on from when people have answered, so the model is called once more."""
    agent = Agent("a", interceptors=[AsksAfterTheFirst()])
    script = [{"when": {}, "say": []}]
    async with at_work(store, agent, *script) as engine:
        asked = await segment_of(engine, await engine.start("go"))
    async with at_work(store, agent, {"when": {}, "say": [{"text": "Here."}]}) as engine:
        (item,) = asked.events[-2].interrupt.items
        asked = await segment_of(engine, await resume(engine, asked.key, decide(item.id)))
    assert asked.last.done.content == "Here."
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED


async def test_a_run_whose_agent_is_gone_can_be_cancelled(store: RunStore) -> None:
    """It ends in its agent's name, its arguments are shown to nobody, and its conversation is free again."""
    ledger = Ledger()
    agent = Agent("gone", tools=[ledger.tool()], interceptors=[asks()])
    async with at_work(store, agent, turn(0, pay("p1")), DONE) as engine:
        asked = await segment_of(engine, await engine.start("go"))
    async with at_work_with(store, [Agent("other")]) as engine:
        await engine.cancel(asked.key)
        asked = await next_segment(engine, asked)
        assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
        assert [step.args_json for step in asked.last.done.process_steps] == [""]
        messages = await engine.messages(asked.conversation_id)
        assert sorted(results(messages)) == calls(messages) == ["p1"]
        again = await engine.ask("and now?", conversation=asked.conversation_id)
        assert again.last.done.content == "Hello, world"
    assert ledger.to == []


class Gates(Interceptor):
    """Holds each model call until it is let through, and tells of every end of the agent."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.gates = [asyncio.Event(), asyncio.Event()]
        self.reached = [asyncio.Event(), asyncio.Event()]
        self.endings: list[str] = []
        self.ended = asyncio.Event()

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> None:
        number, self.calls = self.calls, self.calls + 1
        self.reached[number].set()
        await self.gates[number].wait()

    async def on_agent_end(self, trace: Trace) -> None:
        self.endings.append(trace.ending)
        self.ended.set()


async def test_an_agent_that_is_put_back_has_not_been_cancelled(store: RunStore) -> None:
    """Its end hooks learn that another worker goes on with the run, which nobody has asked to end."""
    gates = Gates()
    async with at_work(store, Agent("a", interceptors=[gates])) as engine:
        started = await engine.start("go")
        await asyncio.wait_for(gates.reached[0].wait(), TIMEOUT)
    assert gates.endings == ["put_back"]
    gates.gates[1].set()
    async with at_work(store, Agent("a", interceptors=[gates])) as engine:
        await engine.read(started)
    assert gates.endings == ["put_back", "finished"]


async def test_switches_hold_for_a_segment_even_over_a_crash(store: RunStore) -> None:
    """An interceptor that was on when the segment began is on for whoever recovers it; the next run has it off."""
    gates = Gates()
    gates.switchable = True
    agent = Agent("a", interceptors=[gates])
    async with at_work(store, agent) as engine:
        started = await engine.start("go")
        await asyncio.wait_for(gates.reached[0].wait(), TIMEOUT)
    await Engine(store, [agent], []).runner.set_interceptor_enabled(CALLER, "a", "gates", enabled=False)
    gates.gates[1].set()
    async with at_work(store, agent) as engine:
        await engine.read(started)
        assert gates.endings == ["put_back", "finished"]
        await engine.ask("and now?")
    assert gates.calls == 2


async def claimed(store: RunStore, key: RunKey, *, epoch: int) -> None:
    """Wait until the store knows that the run has been claimed so many times: the claim goes with its first frame."""
    async with asyncio.timeout(TIMEOUT):
        while (await store.load(key)).head.epoch < epoch:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_run_that_this_very_process_lost_and_took_anew_can_still_be_cancelled(store: RunStore) -> None:
    """The old work is fenced off, or dropped when it finds its lease lost; its end takes nothing from the new one."""
    gates = Gates()
    async with at_work(store, Agent("a", interceptors=[gates]), {"say": [{"text": "first"}]}) as engine:
        started = await engine.start("go")
        await asyncio.wait_for(gates.reached[0].wait(), TIMEOUT)
        await claimed(store, started.head.key, epoch=1)
        assert await store.release(started.head.key)
        await asyncio.wait_for(gates.reached[1].wait(), TIMEOUT)
        await claimed(store, started.head.key, epoch=2)
        gates.gates[0].set()
        await asyncio.wait_for(gates.ended.wait(), TIMEOUT)
        await asyncio.sleep(0.2)  # the rest of the old work; were it slower, this test would only see less
        await engine.cancel(started.head.key)
        asked = await engine.read(started)
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert gates.endings == ["put_back", "cancelled"]
