"""Agents below others when things go wrong: failures, cancels, time, crashes, and questions in the middle of them."""

import asyncio

import pytest

from dualclaw import ContentPart, EngineEvent, Phase, StopReason
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, Observation, Prompt, ToolNext, ToolRequest
from dualclaw_server.engine.outcome import Ask, End, Fail, Outcome, Suspend
from dualclaw_server.engine.scope import Scope
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import Tool, ToolContext, tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.stores.memory import MemoryStore

from .conftest import TIMEOUT, at_work_with, calls, echo, results, scripted, turn, until
from .teams import ASK_B, NEVER, begun, echo_call, pair, resume, step_named


def noting(ran: list[str]) -> Tool:
    """Return a tool that may never run twice, and notes that it ran."""

    @tool(effect="once")
    async def note(text: str) -> str:
        ran.append(text)
        return f"noted {text}"

    return note


def waiting(ran: list[str], *, hangs: bool) -> Tool:
    """Return a tool that may run again, and notes that it ran."""

    @tool(effect="read")
    async def wait() -> str:
        ran.append("wait")
        if hangs:
            await asyncio.sleep(60)
        return "waited"

    return wait


# How they fail


class Broken:
    """A strategy with a fault."""

    name = "broken"

    async def run(self, scope: Scope) -> StopReason.ValueType:
        raise LookupError("a fault in somebody's strategy")


class Ends(Interceptor):
    """Ends its agent when it calls a tool."""

    async def on_tool_call_start(self, trace: Trace, call: Call) -> Outcome | None:
        return End("ended early", "budget_exceeded")


class Refuses(Interceptor):
    """A guard that fails."""

    guard = True

    async def on_agent_start(self, trace: Trace) -> Outcome | None:
        raise LookupError("broken guard")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"models": [scripted({"say": [{"fail": "MODEL_AUTH", "message": "bad key"}]})]}, "bad key"),
        ({"models": [scripted({"say": []})]}, "without an answer"),
        ({"strategy": Broken()}, "LookupError"),
        ({"interceptors": [Refuses()]}, "Interceptor refuses failed in on_agent_start"),
    ],
)
async def test_a_sub_agent_that_fails_fails_its_call_only(
    store: RunStore, fields: dict[str, object], told: str
) -> None:
    """Model errors, empty answers, faulty strategies and guards are told to the agent above, and the run goes on."""
    agent = pair(turn(0, {"text": "x"}), **fields)
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert step_named(asked, "b").diagnosis.code == "tool.failed"
    assert told in asked.last.done.content
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED


async def test_an_end_inside_a_sub_agent_ends_the_sub_agent(store: RunStore) -> None:
    """Its words are the call's result; its open calls are closed; the run goes on."""
    agent = pair(turn(0, {"text": "hm"}, echo_call("1"), echo_call("2", "f")), interceptors=[Ends()])
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert asked.last.done.content == "b says: hm\n\nended early"


async def test_cancelling_the_run_reaches_inner_tools(store: RunStore) -> None:
    """They are really cancelled, every step is closed, the conversation is well-formed."""
    cancelled, hanging = asyncio.Event(), asyncio.Event()

    @tool(effect="once")
    async def hang() -> str:
        hanging.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    agent = pair(turn(0, {"call": "hang"}), tools=[hang])
    async with at_work_with(store, [agent], NEVER) as engine:
        started = await engine.start("go")
        await asyncio.wait_for(hanging.wait(), TIMEOUT)
        await engine.cancel(started.head.key)
        asked = await engine.read(started)
        messages = await engine.messages(asked.conversation_id)
    assert cancelled.is_set()
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert [step_named(asked, name).diagnosis.code for name in ("b", "hang")] == ["tool.outcome_unknown"] * 2
    assert list(results(messages)) == calls(messages)


async def test_the_runs_time_reaches_inner_tools(store: RunStore) -> None:
    """The wall time of the agent at the root ends everything below it."""
    agent = pair(turn(0, {"hang": True}), parent={"limits": Limits(wall_time=0.3)})
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_BUDGET_EXCEEDED


async def test_an_interceptors_own_timeout_leaves_no_step_open(store: RunStore) -> None:
    """Whoever stands around a sub-agent may give up on it; its steps are closed in the stream."""
    patience = asyncio.timeout(None)

    class Impatient(Interceptor):
        async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
            try:
                async with patience:
                    return await call_next(request)
            except TimeoutError:
                return Observation([ContentPart(text="gave up")])

    @tool(effect="read")
    async def hang() -> str:
        patience.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(60)
        return ""

    agent = pair(turn(0, {"call": "hang"}), tools=[hang], parent={"interceptors": [Impatient()]})
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert asked.last.done.content == "b says: gave up"
    assert step_named(asked, "hang").diagnosis.code == "tool.skipped"


class FailsOnce(Interceptor):
    """Fails the second model call of its agent, once."""

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        done = trace.extras(self.name)
        if trace.model_calls == 1 and "failed" not in done:
            done.set("failed", True)
            return Fail(EngineError("INTERNAL", "once"))
        return None


async def test_a_sub_agent_that_is_tried_again_goes_on_where_it_failed(store: RunStore) -> None:
    """call_next called again repeats no finished inner call, and an answer that is there is given again."""
    ran: list[str] = []
    observations: list[Observation] = []

    class Again(Interceptor):
        async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
            observations.extend([await call_next(request) for _ in range(3)])
            return observations[-1]

    agent = pair(
        turn(0, {"call": "note", "args": {"text": "x"}}), turn(1, {"text": "done {{result}}"}),
        tools=[noting(ran)], interceptors=[FailsOnce()], parent={"interceptors": [Again()]},
    )  # fmt: skip
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert ran == ["x"]
    assert [(item.is_error, item.text) for item in observations[1:]] == [(False, "done noted x")] * 2
    assert observations[0].is_error
    assert asked.last.done.content == "b says: done noted x"


# Crashes


async def test_a_crash_inside_a_sub_agent_repeats_nothing_that_is_done(store: RunStore) -> None:
    """Its finished calls keep their results, the one at work is settled, and it is asked nothing a second time."""
    ran: list[str] = []
    script = (
        turn(0, {"call": "note", "args": {"text": "1"}}),
        turn(1, {"call": "note", "args": {"text": "2"}}, {"call": "wait"}),
        turn(2, {"text": "{{result:note}} {{result:wait}}"}),
    )
    agents = [pair(*script, tools=[noting(ran), waiting(ran, hangs=hangs)]) for hangs in (True, False)]
    async with at_work_with(store, agents[:1], NEVER) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, lambda events: sum(map(is_end_of_note, events)) == 2)
        await until(lambda: "wait" in ran)
    async with at_work_with(store, agents[1:], NEVER) as engine:
        asked = await engine.read(started)
    assert sorted(ran) == ["1", "2", "wait", "wait"]
    assert asked.last.done.content == "b says: noted 2 waited"


def is_end_of_note(event: EngineEvent) -> bool:
    return event.step.step.name == "note" and event.step.step.phase == Phase.PHASE_OK


async def test_a_sub_agent_that_was_through_is_not_run_again(store: RunStore) -> None:
    """Its answer is kept from the moment it is given, though its call's result is not saved yet."""
    through, gate = asyncio.Event(), asyncio.Event()

    class Lingers(Interceptor):
        async def on_agent_end(self, trace: Trace) -> None:
            through.set()
            await gate.wait()

    @tool(effect="read")
    async def tick() -> str:
        await through.wait()
        return "tick"

    def team(b_plays: dict[str, object], *interceptors: Interceptor, hangs: bool) -> Agent:
        c = Agent("c", tools=[tick, waiting([], hangs=hangs)], models=[
            scripted(turn(0, {"call": "tick"}), turn(1, {"call": "wait"}), turn(2, {"text": "c is done"}))
        ])  # fmt: skip
        b = Agent("b", models=[scripted(b_plays)], interceptors=interceptors)
        both = turn(0, ASK_B, {"call": "c", "id": "C", "args": {"request": "tick"}})
        outer = scripted(both, turn(1, {"text": "{{result:b}} and {{result:c}}"}))
        return Agent("a", models=[outer], sub_agents=[b, c])

    async with at_work_with(store, [team(turn(0, {"text": "b is done"}), Lingers(), hangs=True)], NEVER) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, begun("wait"))
        asyncio.get_running_loop().call_later(0.2, gate.set)  # while the process is being taken away
    async with at_work_with(store, [team(NEVER, hangs=False)], NEVER) as engine:
        asked = await engine.read(started)
    assert asked.last.done.content == "b is done and c is done"


async def test_ids_of_inner_calls_stay_unique_after_a_crash(store: RunStore) -> None:
    """A later sub-agent whose model repeats the id of an earlier one's call gets another."""
    inner = (turn(0, {"call": "echo", "id": "same", "args": {"text": "x"}}), turn(1, {"text": "ok"}))
    ran: list[str] = []
    outer = scripted(
        turn(0, ASK_B), turn(1, {"call": "wait"}), turn(2, {**ASK_B, "id": "B2"}), turn(3, {"text": "done"})
    )
    agents = [
        Agent("a", models=[outer], tools=[waiting(ran, hangs=hangs)], sub_agents=[
            Agent("b", models=[scripted(*inner)], tools=[echo])
        ])
        for hangs in (True, False)
    ]  # fmt: skip
    async with at_work_with(store, agents[:1], NEVER) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, begun("wait"))
    async with at_work_with(store, agents[1:], NEVER) as engine:
        asked = await engine.read(started)
    ids = [step.call_id for step in asked.view.process_steps if step.name == "echo"]
    assert len(set(ids)) == 2
    assert asked.last.done.content == "done"


# Questions


@tool(effect="once")
async def consult(context: ToolContext) -> str:
    """Ask a person."""
    raise Suspend(Ask("Which one?", kind="question"))


async def test_a_question_inside_a_sub_agent_parks_the_run(store: RunStore) -> None:
    """It names the path to it; with the answer the sub-agent goes on, elsewhere too, and repeats nothing."""
    ran: list[str] = []
    script = (
        turn(0, {"call": "note", "args": {"text": "1"}}, {"call": "consult", "id": "Q"}),
        turn(1, {"text": "{{result:note}}, {{result:consult}}"}),
    )
    async with at_work_with(store, [pair(*script, tools=[noting(ran), consult])], NEVER) as engine:
        asked = await engine.ask("go")
        (item,) = asked.events[-2].interrupt.items
        assert (item.id, list(item.path)) == ("Q", ["a", "b", "consult"])
        assert asked.last.done.stop_reason == StopReason.STOP_REASON_INTERRUPTED
    async with at_work_with(store, [pair(*script, tools=[noting(ran), consult])], NEVER) as engine:
        asked = await resume(engine, asked, Q="the left one")
    assert ran == ["1"]
    assert asked.last.done.content == "b says: noted 1, the left one"
    assert step_named(asked, "consult").parent_call_id == "B"


async def test_sub_agents_ask_at_once(store: RunStore) -> None:
    """Both questions stand in one interrupt, and each answer reaches who asked."""
    inner = scripted(turn(0, {"call": "consult", "id": "Q"}), turn(1, {"text": "{{result}}"}))
    outer = scripted(turn(0, ASK_B, {**ASK_B, "id": "B2"}), turn(1, {"text": "ok"}))
    agent = Agent("a", models=[outer], sub_agents=[Agent("b", models=[inner], tools=[consult])])
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
        items = asked.events[-2].interrupt.items
        answers = {item.id: f"answer {number}" for number, item in enumerate(items)}
        parents = {step.call_id: step.parent_call_id for step in asked.view.process_steps if step.name == "consult"}
        asked = await resume(engine, asked, **answers)
        messages = await engine.messages(asked.conversation_id)
    assert len(answers) == 2
    assert results(messages) == {parents[item.id]: answers[item.id] for item in items}


async def test_a_question_nobody_needs_any_more_is_withdrawn(store: RunStore) -> None:
    """When the sub-agent ends all the same, its question is not asked with the next one."""

    @tool(effect="read")
    async def stop() -> str:
        raise End("enough", "exited")

    inner = scripted(turn(0, {"call": "consult", "id": "Q"}, {"call": "stop"}))
    outer = scripted(turn(0, ASK_B), turn(1, {"call": "consult", "id": "Q2"}), turn(2, {"text": "{{result}}"}))
    b = Agent("b", models=[inner], tools=[consult, stop])
    async with at_work_with(store, [Agent("a", models=[outer], tools=[consult], sub_agents=[b])], NEVER) as engine:
        asked = await engine.ask("go")
        assert [item.id for item in asked.events[-2].interrupt.items] == ["Q2"]
        asked = await resume(engine, asked, Q2="yes")
    assert asked.last.done.content == "yes"
    steps = {step.call_id: step.diagnosis.code for step in asked.view.process_steps if step.name == "consult"}
    assert steps == {"Q": "tool.skipped", "Q2": ""}


async def test_time_spent_waiting_for_people_is_not_the_sub_agents() -> None:
    """Its wall time does not run while the run is parked."""
    store = MemoryStore()
    await store.open()
    script = (turn(0, {"call": "consult", "id": "Q"}), turn(1, {"text": "{{result}}"}))
    async with at_work_with(store, [pair(*script, tools=[consult], limits=Limits(wall_time=4))], NEVER) as engine:
        asked = await engine.ask("go")
        await asyncio.sleep(4.1)
        asked = await resume(engine, asked, Q="late")
    assert asked.last.done.content == "b says: late"
