"""Saved state that cannot be read stops nobody from ending the run."""

import asyncio

import pytest

from dualclaw import RunState, StopReason
from dualclaw.rules import check_stream
from dualclaw_server.engine.agent import Agent, agent_tool
from dualclaw_server.engine.checkpoint import FORMAT, Checkpoint
from dualclaw_server.engine.store import FINAL, Frame, RunKey, RunStore
from dualclaw_server.engine.tool import Tool, tool
from dualclaw_server.interceptors.hitl import Policy

from .conftest import at_work_with, calls, results, scripted, turn, until
from .people import asks

DAMAGED = b"\xff\xff"
WHOLE = turn(0, {"text": "a whole answer"})


async def put(store: RunStore, key: RunKey, checkpoint: bytes) -> None:
    head = await store.head(key)
    frame = Frame(head.epoch + 1, head.last_seq + 1, 0, b"", head.state, True, checkpoint=checkpoint)
    await store.append(key, frame, head.version)


async def end_of(store: RunStore, key: RunKey) -> RunState.ValueType:
    async with asyncio.timeout(30):
        while (state := (await store.head(key)).state) not in FINAL:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return state


def hanging(runs: list[str]) -> Tool:
    @tool(name="act", effect="once")
    async def perform() -> str:
        runs.append("begun")
        await asyncio.sleep(600)
        return "performed"

    return perform


async def test_a_run_whose_checkpoint_is_damaged_can_be_cancelled(store: RunStore) -> None:
    """It ends with what people have seen of it, its call is not made again, and its conversation goes on."""
    runs: list[str] = []
    agent = Agent("a", tools=[hanging(runs)])
    async with at_work_with(store, [agent], turn(0, {"text": "Let me see."}, {"call": "act"})) as engine:
        started = await engine.start("go")
        await until(lambda: bool(runs))
    key = started.head.key
    await put(store, key, DAMAGED)
    async with at_work_with(store, [agent], WHOLE) as engine:
        await engine.cancel(key)
        ended = await engine.read(started)
        assert ended.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
        assert ended.last.done.content == "Let me see."
        assert await end_of(store, key) == RunState.RUN_STATE_CANCELLED
        after = await engine.ask("and now?", conversation=started.head.conversation_id)
        said = await engine.messages(started.head.conversation_id)
    assert after.last.done.content == "a whole answer"
    assert runs == ["begun"]
    (step,) = ended.last.done.process_steps
    assert step.diagnosis.code == "tool.outcome_unknown"
    assert set(results(said)) == set(calls(said)) == {step.call_id}


async def test_a_question_whose_checkpoint_is_damaged_can_be_cancelled(store: RunStore) -> None:
    """A run that waits for people ends too, and the tool they were asked about never runs."""
    runs: list[str] = []
    agent = Agent("a", tools=[hanging(runs)], interceptors=[asks(Policy("act"))])
    async with at_work_with(store, [agent], turn(0, {"call": "act"})) as engine:
        asked = await engine.ask("go")
        assert asked.last.done.stop_reason == StopReason.STOP_REASON_INTERRUPTED
    await put(store, asked.key, DAMAGED)
    async with at_work_with(store, [agent], WHOLE) as engine:
        await engine.cancel(asked.key)
        assert await end_of(store, asked.key) == RunState.RUN_STATE_CANCELLED
        ended = await engine.wait_for(
            asked.key, lambda found: found[-1].WhichOneof("payload") == "done" and len(found) > len(asked.events)
        )
    assert runs == []
    assert check_stream(ended) == []
    (step,) = ended[-1].done.process_steps
    assert step.diagnosis.code == "tool.skipped"
    assert not (await store.head(asked.key)).run.interrupts


async def test_steps_of_a_sub_agent_are_ended_too(store: RunStore) -> None:
    """Also the call of an agent below the one that speaks to the client ends, and names its parent."""
    runs: list[str] = []
    below = Agent("below", models=[scripted(turn(0, {"call": "act"}))], tools=[hanging(runs)])
    agent = Agent("a", tools=[agent_tool(below)])
    async with at_work_with(store, [agent], turn(0, {"call": "below", "args": {"request": "do it"}})) as engine:
        started = await engine.start("go")
        await until(lambda: bool(runs))
    await put(store, started.head.key, DAMAGED)
    async with at_work_with(store, [agent], WHOLE) as engine:
        await engine.cancel(started.head.key)
        ended = await engine.read(started)
    above, inner = ended.last.done.process_steps
    assert (above.name, inner.name, inner.parent_call_id) == ("below", "act", above.call_id)
    assert {step.diagnosis.code for step in (above, inner)} == {"tool.outcome_unknown"}
    assert runs == ["begun"]


async def test_the_state_of_a_newer_engine_is_left_to_it(store: RunStore, caplog: pytest.LogCaptureFixture) -> None:
    """A cancel waits for an engine that can read it, for that one knows what the run has done."""
    async with at_work_with(store, [Agent("a")], turn(0, {"text": "half"}, {"hang": True})) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, bool)
    await put(store, started.head.key, Checkpoint(format=FORMAT + 1).SerializeToString())
    before = await store.head(started.head.key)
    async with at_work_with(store, [Agent("a")], WHOLE) as engine:
        await engine.cancel(started.head.key)
        await until(lambda: "a newer engine must take it" in caplog.text)
    after = await store.head(started.head.key)
    assert (after.epoch, after.state) == (before.epoch, RunState.RUN_STATE_RUNNING)
