"""A run goes on where its checkpoint says, whoever takes it over: nothing finished is done twice."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

import pytest

from dualclaw import RunState, StopReason
from dualclaw_server.engine import worker as worker_module
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.checkpoint import FORMAT, Checkpoint
from dualclaw_server.engine.runner import Runner
from dualclaw_server.engine.store import Created, Frame, RunKey, RunStore
from dualclaw_server.engine.texts import TEXTS, Texts
from dualclaw_server.engine.tool import Effect, Lookup, Tool, tool
from dualclaw_server.stores.memory import MemoryStore

from .conftest import TIMEOUT, Asked, Engine, until

HANG: dict[str, object] = {"when": {"step": 0}, "say": [{"text": "half an ans"}, {"hang": True}]}
WHOLE: dict[str, object] = {"when": {"step": 0}, "say": [{"text": "a whole answer"}]}


@asynccontextmanager
async def at_work(store: RunStore, agent: Agent, *script: dict[str, object]) -> AsyncIterator[Engine]:
    """An engine on a store; at the end its unfinished runs are handed over, as a killed process leaves them."""
    engine = Engine(store, [agent], list(script))
    serve = asyncio.create_task(engine.runner.serve())
    try:
        yield engine
    finally:
        await engine.runner.drain(0)
        await asyncio.wait({serve}, timeout=5)


async def test_a_broken_answer_is_withdrawn_by_one_rewind(store: RunStore) -> None:
    """Text of an unfinished answer is rewound once, then the next attempt gives the answer; rules R1-R9 hold."""
    async with at_work(store, Agent("a"), HANG) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    async with at_work(store, Agent("a"), WHOLE) as engine:
        asked = await engine.read(started)
    payloads = [event.WhichOneof("payload") for event in asked.events]
    assert payloads.count("rewind") == 1
    assert payloads[-1] == "done"
    rewind = asked.events[payloads.index("rewind")].rewind
    assert (rewind.content, rewind.attempt) == ("", 1)
    assert asked.last.done.content == "a whole answer"
    assert len({event.trace_id for event in asked.events}) == 1


async def test_text_before_a_finished_step_stays(store: RunStore) -> None:
    """The rewind goes back to the text before the unfinished answer, not to the beginning of the segment."""

    @tool(effect="read")
    async def look() -> str:
        return "seen"

    agent = Agent("a", tools=[look])
    first = {"when": {"step": 0}, "say": [{"text": "Looking."}, {"call": "look"}]}
    broken = {"when": {"step": 1}, "say": [{"text": "I s"}, {"hang": True}]}
    async with at_work(store, agent, first, broken) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, lambda events: events[-1].delta.content.endswith("I s"))
    async with at_work(store, agent, {"when": {"step": 1}, "say": [{"text": "I saw it."}]}) as engine:
        asked = await engine.read(started)
    assert [e.rewind.content for e in asked.events if e.WhichOneof("payload") == "rewind"] == ["Looking."]
    assert asked.last.done.content == "Looking.\n\nI saw it."
    assert [phase for _, _, phase, _ in asked.steps] == ["start", "ok"]


def act(effect: Effect, runs: list[str], hangs: bool, lookup: Lookup | None = None) -> Tool:
    @tool(name="act", effect=effect, lookup=lookup)
    async def perform() -> str:
        runs.append(effect)
        if hangs:
            await asyncio.sleep(60)
        return "performed"

    return perform


async def crash_inside(store: RunStore, runs: list[str], before: Tool, after: Tool) -> tuple[Created, Asked]:
    """Take a run over while its only tool, which has then noted so, is at work."""
    script = [{"when": {"step": 0}, "say": [{"call": "act"}]}, {"when": {"step": 1}, "say": [{"text": "{{result}}"}]}]
    async with at_work(store, Agent("a", tools=[before]), *script) as engine:
        started = await engine.start("go")
        await until(lambda: bool(runs))
    async with at_work(store, Agent("a", tools=[after]), *script) as engine:
        return started, await engine.read(started)


@pytest.mark.parametrize("effect", ["read", "idempotent"])
async def test_calls_that_may_be_repeated_run_again(store: RunStore, effect: Effect) -> None:
    """The step keeps its index and is not started a second time."""
    runs: list[str] = []
    _, asked = await crash_inside(store, runs, act(effect, runs, hangs=True), act(effect, runs, hangs=False))
    assert runs == [effect, effect]
    assert [(index, phase) for index, _, phase, _ in asked.steps] == [(0, "start"), (0, "ok")]
    assert asked.last.done.content == "performed"


async def test_a_call_that_may_not_be_repeated_is_reported_unknown(store: RunStore) -> None:
    """A once tool runs at most once; model and user learn that the outcome is unknown."""
    runs: list[str] = []
    _, asked = await crash_inside(store, runs, act("once", runs, hangs=True), act("once", runs, hangs=False))
    assert runs == ["once"]
    assert [(phase, code) for _, _, phase, code in asked.steps] == [("start", ""), ("fail", "tool.outcome_unknown")]
    assert "tool.outcome_unknown" in asked.last.done.content
    assert list(asked.last.done.used_skills) == ["act"]


@pytest.mark.parametrize(("found", "ran"), [("found it", 1), (None, 2)])
async def test_a_reconcilable_call_asks_its_lookup(store: RunStore, found: str | None, ran: int) -> None:
    """What the lookup finds is the result; finding nothing means that it never happened, so it runs."""
    runs: list[str] = []
    keys: list[str] = []

    async def lookup(key: str) -> str | None:
        keys.append(key)
        return found

    before = act("reconcile", runs, hangs=True, lookup=lookup)
    _, asked = await crash_inside(store, runs, before, act("reconcile", runs, hangs=False, lookup=lookup))
    assert len(runs) == ran
    assert len(keys[0]) == 32
    assert asked.last.done.content == (found or "performed")


async def test_a_finished_call_is_never_run_again(store: RunStore) -> None:
    """Of two siblings the finished one keeps its result, only the other is settled anew."""
    runs: list[str] = []

    @tool(effect="once")
    async def done() -> str:
        runs.append("done")
        return "kept"

    script = [
        {"when": {"step": 0}, "say": [{"call": "done"}, {"call": "act"}]},
        {"when": {"step": 1}, "say": [{"text": "{{result:done}} {{result:act}}"}]},
    ]
    agent = Agent("a", tools=[done, act("read", runs, hangs=True)])
    async with at_work(store, agent, *script) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, lambda events: len(events) >= 3)
        await until(lambda: "read" in runs)
    async with at_work(store, Agent("a", tools=[done, act("read", runs, hangs=False)]), *script) as engine:
        asked = await engine.read(started)
    assert sorted(runs) == ["done", "read", "read"]
    assert asked.last.done.content == "kept performed"


async def test_broken_arguments_stay_broken(store: RunStore) -> None:
    """Arguments that were no JSON object do not become {} by a take-over: the call never runs."""
    runs: list[str] = []
    script = [
        {"when": {"step": 0}, "say": [{"call": "act"}, {"call": "late", "raw_args": '{"x": "cu'}]},
        {"when": {"step": 1}, "say": [{"text": "ok"}]},
    ]

    @tool(effect="read")
    async def late(x: str = "") -> str:
        runs.append("late")
        return x

    async with at_work(store, Agent("a", tools=[act("read", runs, hangs=True), late]), *script) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    async with at_work(store, Agent("a", tools=[act("read", runs, hangs=False), late]), *script) as engine:
        asked = await engine.read(started)
    assert "late" not in runs
    assert asked.last.done.process_steps[1].diagnosis.code == "tool.bad_arguments"


async def test_a_pending_call_whose_tool_is_gone_is_an_observation(store: RunStore) -> None:
    """A new version without the tool tells the model so instead of crashing."""
    runs: list[str] = []
    script = [{"when": {"step": 0}, "say": [{"call": "act"}]}, {"when": {"step": 1}, "say": [{"text": "ok"}]}]

    @tool(effect="read")
    async def other() -> str:
        return ""

    async with at_work(store, Agent("a", tools=[act("read", runs, hangs=True)]), *script) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    async with at_work(store, Agent("a", tools=[other]), *script) as engine:
        asked = await engine.read(started)
    assert asked.last.done.content == "ok"
    assert asked.last.done.process_steps[0].diagnosis.code == "tool.outcome_unknown"


async def test_a_worker_without_the_agent_puts_the_run_back(store: RunStore, caplog: pytest.LogCaptureFixture) -> None:
    """The run is not failed; a worker that has the agent finishes it."""
    async with at_work(store, Agent("a"), HANG) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    async with at_work(store, Agent("b"), WHOLE):
        await until(lambda: "agent a is not here" in caplog.text)
        assert (await store.head(started.head.key)).state == RunState.RUN_STATE_RUNNING
    await store.wake(started.head.key, 0)
    async with at_work(store, Agent("a"), WHOLE) as engine:
        assert (await engine.read(started)).last.done.content == "a whole answer"


async def test_time_in_which_nobody_worked_is_not_the_runs_own() -> None:
    """An outage longer than the wall time leaves a run what it had left of it."""
    away = 1000.0
    store = MemoryStore(clock=lambda: time.time() - away)
    await store.open()
    agent = Agent("a", limits=Limits(wall_time=600))
    async with at_work(store, agent, HANG) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    checkpoint = Checkpoint.FromString((await store.load(started.head.key)).checkpoint)
    checkpoint.start_time.FromMilliseconds(checkpoint.start_time.ToMilliseconds() - int(away * 1000))
    await append_raw(store, started.head.key, checkpoint.SerializeToString())
    away = 0.0
    slow = {"when": {"step": 0}, "say": [{"text": "a whole answer", "chunk": 5, "delay": 0.1}]}
    async with at_work(store, agent, slow) as engine:
        ended = await engine.read(started)
    assert ended.last.done.stop_reason == StopReason.STOP_REASON_FINISHED
    assert ended.last.done.content.endswith("a whole answer")
    await store.close()


async def append_raw(store: RunStore, key: RunKey, checkpoint: bytes) -> None:
    head = await store.head(key)
    frame = Frame(head.epoch + 1, head.last_seq + 1, 0, b"", RunState.RUN_STATE_RUNNING, True, checkpoint=checkpoint)
    await store.append(key, frame, head.version)


@pytest.mark.parametrize("saved", [Checkpoint(format=FORMAT + 1).SerializeToString(), b"\xff\xff"])
async def test_state_this_engine_cannot_read_is_left_intact(
    store: RunStore, saved: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of a newer engine, or a damaged one, is neither overwritten nor failed."""
    async with at_work(store, Agent("a"), HANG) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    await append_raw(store, started.head.key, saved)
    before = await store.head(started.head.key)
    async with at_work(store, Agent("a"), WHOLE):
        await until(lambda: "is left as it is" in caplog.text)
    after = await store.head(started.head.key)
    assert (after.version, after.state) == (before.version, RunState.RUN_STATE_RUNNING)


async def test_a_run_that_takes_every_worker_down_is_given_up(store: RunStore) -> None:
    """After too many recoveries the run fails with its partial text kept, instead of crashing workers for ever."""
    async with at_work(store, Agent("a"), HANG) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    checkpoint = Checkpoint.FromString((await store.load(started.head.key)).checkpoint)
    checkpoint.recoveries = worker_module.MAX_RECOVERIES
    await append_raw(store, started.head.key, checkpoint.SerializeToString())
    async with at_work(store, Agent("a"), HANG) as engine:
        asked = await engine.read(started)
    assert "too many restarts" in asked.last.error.message
    assert asked.last.error.diagnosis.code == "internal"


async def test_a_run_that_gets_further_is_not_given_up(store: RunStore) -> None:
    """Many restarts in a long run are no fault of the run: each answer and each result begins the count anew."""
    async with at_work(store, Agent("a"), HANG) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    checkpoint = Checkpoint.FromString((await store.load(started.head.key)).checkpoint)
    checkpoint.recoveries = worker_module.MAX_RECOVERIES - 1
    await append_raw(store, started.head.key, checkpoint.SerializeToString())
    runs: list[str] = []
    agent = Agent("a", tools=[act("read", runs, hangs=True)])
    async with at_work(store, agent, {"when": {"step": 0}, "say": [{"call": "act"}]}) as engine:
        await engine.wait_for(started.head.key, lambda events: events[-1].WhichOneof("payload") == "step")
    assert Checkpoint.FromString((await store.load(started.head.key)).checkpoint).recoveries == 0


class Mute(Texts):
    """Words of the engine, without the one that closes a failed turn."""

    def __getattribute__(self, name: str) -> object:
        if name == "failed":
            raise RuntimeError("no words")
        return super().__getattribute__(name)


class Wordless(Agent):
    """An agent whose failed turns cannot be closed, as only a fault of the engine's own could make one."""

    @property
    def texts(self) -> Texts:
        return Mute(**asdict(TEXTS["en"]))


async def test_a_run_that_cannot_even_be_failed_ends_all_the_same(store: RunStore) -> None:
    """When closing its turn takes every worker down, the run still gets its one error event and is FAILED."""
    async with at_work(store, Agent("a"), HANG) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    checkpoint = Checkpoint.FromString((await store.load(started.head.key)).checkpoint)
    checkpoint.recoveries = worker_module.MAX_RECOVERIES
    await append_raw(store, started.head.key, checkpoint.SerializeToString())
    async with at_work(store, Wordless("a"), HANG) as engine:
        asked = await engine.read(started)
    assert asked.last.error.diagnosis.code == "internal"
    assert (await store.head(started.head.key)).state == RunState.RUN_STATE_FAILED


async def test_a_cancel_that_came_while_nobody_worked_is_obeyed(store: RunStore) -> None:
    """The wish waits in the inbox; the next worker ends the run without calling the model again."""
    async with at_work(store, Agent("a"), HANG) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    idle = Engine(store, [Agent("a")], [WHOLE])
    assert (await idle.cancel(started.head.key)).state == RunState.RUN_STATE_RUNNING
    async with at_work(store, Agent("a"), {"say": [{"fail": "MODEL_AUTH"}]}) as engine:
        asked = await engine.read(started)
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED


async def test_a_draining_engine_takes_no_new_runs(store: RunStore) -> None:
    """Starts are refused with a time to come back, runs at work may end within the grace time."""
    script: dict[str, object] = {"say": [{"text": "I "}, {"sleep": 0.2}, {"text": "made it"}]}
    async with at_work(store, Agent("a"), script) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
        draining = asyncio.create_task(engine.runner.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(Exception, match="shutting down"):
            await engine.start("more")
        await draining
        assert (await store.head(started.head.key)).state == RunState.RUN_STATE_SUCCEEDED


def test_an_engine_needs_agents_with_names_of_their_own() -> None:
    """No agent, or two of one name, is refused when the engine is made."""
    model = Engine(MemoryStore(), [Agent("a")], [WHOLE]).model
    with pytest.raises(ValueError, match="at least one agent"):
        Runner(MemoryStore(), [], model=model)
    with pytest.raises(ValueError, match="repeated: a"):
        Runner(MemoryStore(), [Agent("a"), Agent("a")], model=model)


async def test_a_cancel_while_calls_are_settled_loses_no_result(store: RunStore) -> None:
    """What was settled before a lookup that hangs is in the conversation when the run is cancelled there."""
    asking = asyncio.Event()

    async def lookup(_: str) -> None:
        asking.set()
        await asyncio.sleep(60)

    @tool(effect="once")
    async def write() -> str:
        await asyncio.sleep(60)
        return ""

    agent = Agent("a", tools=[write, act("reconcile", [], hangs=True, lookup=lookup)])
    script: dict[str, object] = {"when": {"step": 0}, "say": [{"call": "write"}, {"call": "act"}]}
    async with at_work(store, agent, script) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, lambda events: len(events) == 2)
    async with at_work(store, agent, script) as engine:
        await asyncio.wait_for(asking.wait(), TIMEOUT)
        await engine.cancel(started.head.key)
        asked = await engine.read(started)
        messages = await engine.messages(asked.conversation_id)
    assert [code for _, _, phase, code in asked.steps if phase == "fail"] == ["tool.outcome_unknown"] * 2
    parts = [part for message in messages for part in message.parts]
    called = [part.tool_call.id for part in parts if part.WhichOneof("part") == "tool_call"]
    assert [part.tool_result.call_id for part in parts if part.WhichOneof("part") == "tool_result"] == called


async def test_a_run_claimed_while_the_process_begins_to_drain_is_left_to_the_next(store: RunStore) -> None:
    """An item that arrives with the order to drain is put back at once: no work goes on behind the drain."""
    engine = Engine(store, [Agent("a")], [HANG])
    serve = asyncio.create_task(engine.runner.serve())
    await asyncio.sleep(0.05)
    started = await engine.start("go")
    await engine.runner.drain(1)
    drained = (await store.head(started.head.key)).version  # 0, unless the run came to work before the order
    await asyncio.wait({serve}, timeout=5)
    await asyncio.sleep(0.05)
    version = (await store.head(started.head.key)).version
    async with at_work(store, Agent("a"), WHOLE) as other:
        assert (await other.read(started)).last.done.content == "a whole answer"
    assert version == drained
