"""Handing over to another agent, and ending a run from a tool: what is seen, what is bounded, what outlives a crash."""

import asyncio
from dataclasses import replace

import pytest

from dualclaw import ContentPart, RunState, StopReason
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.handoff import exit_tool
from dualclaw_server.engine.interceptor import Handoff, Interceptor, Observation, RunConfig
from dualclaw_server.engine.outcome import Ask, End, Fail, Outcome, Replace, Suspend
from dualclaw_server.engine.plan import PlanReAct
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import Tool, ToolContext, ToolOutput, tool
from dualclaw_server.engine.trace import Trace

from .conftest import at_work_with, calls, kinds, results, scripted, texts, turn, until
from .teams import ASK_B, NEVER, checkpoint_of, ended, pair, resume, step_named


def over_to(agent: str, call_id: str = "t") -> dict[str, object]:
    return {"call": "transfer_to_agent", "id": call_id, "args": {"agent": agent}}


def front(*script: dict[str, object], to: tuple[str, ...] = ("b",), **fields: object) -> Agent:
    return Agent("a", models=[scripted(*script)], transfer_to=to, **fields)  # type: ignore[arg-type]


def back(*script: dict[str, object], name: str = "b", **fields: object) -> Agent:
    return Agent(name, models=[scripted(*script)], **fields)  # type: ignore[arg-type]


TRANSFER = turn(0, {"text": "One moment."}, over_to("b"))
ANSWER = turn(1, {"text": "b here."}, system="^You are b", user="^help$")


async def test_another_agent_takes_over(store: RunStore) -> None:
    """It sees the conversation, answers from then on, and stream, result, run and transcript say so."""
    agents = [front(TRANSFER), back(ANSWER, instructions="You are b.")]
    async with at_work_with(store, agents, NEVER) as engine:
        asked = await engine.ask("help")
        messages = await engine.messages(asked.conversation_id)
        again = await engine.ask("help", conversation=asked.conversation_id)
    done = asked.last.done
    assert done.content == "One moment.\n\nb here."
    assert done.stop_reason == StopReason.STOP_REASON_FINISHED
    assert [(s.name, s.result) for s in done.process_steps] == [("transfer_to_agent", "Handed over to b.")]
    assert [(kind, m.author) for kind, m in zip(kinds(messages), messages, strict=True)][1:] == [
        ("assistant", "a"), ("tool", "a"), ("assistant", "b")
    ]  # fmt: skip
    assert done.message_id == messages[-1].id
    run = (await store.head(asked.key)).run
    assert (run.state, run.agent, run.stop_reason) == (RunState.RUN_STATE_SUCCEEDED, "a", done.stop_reason)
    assert again.last.done.content == done.content  # the next run begins with the agent that is asked


@pytest.mark.parametrize(("to", "target"), [(("b",), "c"), (("b",), "nobody"), (("nobody",), "nobody")])
async def test_a_target_that_cannot_take_over_is_told_to_the_model(
    store: RunStore, to: tuple[str, ...], target: str
) -> None:
    """One that is not there, or that this agent may not hand over to, is an error observation; the run goes on."""
    agent = front(turn(0, over_to(target)), turn(1, {"text": "{{result}}"}), to=to)
    async with at_work_with(store, [agent, back(NEVER), back(NEVER, name="c")], NEVER) as engine:
        asked = await engine.ask("help")
    assert f"There is no agent named {target} to hand over to." in asked.last.done.content
    assert asked.last.done.process_steps[0].diagnosis.code == "tool.failed"


async def test_transfers_are_bounded(store: RunStore) -> None:
    """Agents that hand over to each other for ever end with an answer all the same."""
    loop = ({"when": {"tool_result": "no further time"}, "say": [{"text": "enough"}]}, {"say": [over_to("b", "")]})
    reply = ({"when": {"tool_result": "no further time"}, "say": [{"text": "enough"}]}, {"say": [over_to("a", "")]})
    limits = Limits(max_transfers=3)
    agents = [front(*loop, limits=limits), back(*reply, transfer_to=["a"], limits=limits)]
    async with at_work_with(store, agents, NEVER) as engine:
        asked = await engine.ask("help")
    assert asked.last.done.content == "enough"
    assert len(asked.last.done.process_steps) == 4
    assert (await checkpoint_of(store, asked.key)).transfers == 3


async def test_the_first_handoff_in_call_order_counts(store: RunStore) -> None:
    """Whichever tool is faster, and whatever the other one wants."""

    @tool(effect="read")
    async def slow() -> ToolOutput:
        await asyncio.sleep(0.1)
        return ToolOutput([ContentPart(text="to b")], Handoff("transfer", "b"))

    agent = front(turn(0, {"call": "slow"}, over_to("c"), {"call": "exit", "args": {"answer": "no"}}),
                  to=("b", "c"), tools=[slow, exit_tool])  # fmt: skip
    agents = [agent, back(turn(1, {"text": "b here"})), back(NEVER, name="c")]
    async with at_work_with(store, agents, NEVER) as engine:
        assert (await engine.ask("help")).last.done.content == "b here"


async def test_exit_ends_the_run_with_its_answer(store: RunStore) -> None:
    """EXITED; the answer is shown and is the last message; siblings have run to their end."""
    agent = front(turn(0, {"text": "So:"}, {"call": "exit", "args": {"answer": "42"}}, over_to("b")), tools=[exit_tool])
    async with at_work_with(store, [agent, back(NEVER)], NEVER) as engine:
        asked = await engine.ask("help")
        messages = await engine.messages(asked.conversation_id)
    assert asked.last.done.content == "So:\n\n42"
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_EXITED
    assert (await store.head(asked.key)).state == RunState.RUN_STATE_SUCCEEDED
    assert texts(messages[-1]) == "42"
    assert list(results(messages)) == calls(messages)


async def test_exit_ends_a_sub_agent_only(store: RunStore) -> None:
    """The boundary of a sub-agent stops it: its answer is the call's result."""
    agent = pair(turn(0, {"call": "exit", "args": {"answer": "42"}}), tools=[exit_tool])
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert asked.last.done.content == "b says: 42"
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED


async def test_a_sub_agent_cannot_hand_the_conversation_over(store: RunStore) -> None:
    """It is not offered the tool; a tool of its own that wants it gets an error."""

    @tool(effect="read")
    async def sneak() -> ToolOutput:
        return ToolOutput([ContentPart(text="x")], Handoff("transfer", "c"))

    script = (turn(0, over_to("c"), {"call": "sneak"}, tools="sneak"), turn(1, {"text": "{{result:sneak}}"}))
    agent = pair(*script, tools=[sneak], transfer_to=["c"])
    async with at_work_with(store, [agent, back(NEVER, name="c")], NEVER) as engine:
        asked = await engine.ask("go")
    assert step_named(asked, "transfer_to_agent").diagnosis.code == "tool.unknown"
    assert "cannot hand the conversation over" in asked.last.done.content


@pytest.mark.parametrize("handoff", [Handoff("transfer", "nobody"), Handoff("vanish", "b")])
async def test_a_handoff_an_interceptor_makes_up_is_checked_too(store: RunStore, handoff: Handoff) -> None:
    """Wherever an observation comes from, its handoff must be one that can be done."""

    class Makes(Interceptor):
        async def on_tool_call_start(self, trace: Trace, call: Call) -> Outcome | None:
            return Replace(Observation([ContentPart(text="x")], handoff=handoff))

    agent = front(turn(0, over_to("b")), turn(1, {"text": "{{result}}"}), interceptors=[Makes()])
    async with at_work_with(store, [agent, back(NEVER)], NEVER) as engine:
        assert "tool.failed" in (await engine.ask("help")).last.done.content


async def test_the_agent_in_control_answers_for_its_own_limits_and_plan(store: RunStore) -> None:
    """A plan stays with who made it; steps are counted over the whole run."""
    plan = {"call": "create_plan", "args": {"steps": ["one", "two"]}}
    agents = [
        front(turn(0, plan), turn(1, over_to("b")), strategy=PlanReAct()),
        back(turn(2, {"text": "no plan"}, system="create_plan first"), strategy=PlanReAct()),
    ]
    async with at_work_with(store, agents, NEVER) as engine:
        asked = await engine.ask("help")
    assert asked.last.done.content == "no plan"
    assert (await checkpoint_of(store, asked.key)).model_calls == 3


@pytest.mark.parametrize("how", ["transfer", "shape"])
async def test_the_time_of_the_agent_in_control_counts(store: RunStore, how: str) -> None:
    """A shorter one holds from when it takes over, or from when before_agent has said so."""

    class Hurries(Interceptor):
        async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
            return replace(config, limits=replace(config.limits, wall_time=0.3))

    hang = turn(1, {"hang": True})
    agents = [front(TRANSFER), back(hang, limits=Limits(wall_time=0.3))]
    if how == "shape":
        agents = [front(TRANSFER), back(hang, interceptors=[Hurries()])]
    async with at_work_with(store, agents, NEVER) as engine:
        asked = await engine.ask("help")
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_BUDGET_EXCEEDED


async def test_the_final_text_is_kept_under_the_output_key(store: RunStore) -> None:
    """Of the agent in control when the run ends."""
    agents = [front(TRANSFER, output_key="first"), back(ANSWER, instructions="You are b.", output_key="last")]
    async with at_work_with(store, agents, NEVER) as engine:
        asked = await engine.ask("help")
    assert dict((await checkpoint_of(store, asked.key)).session) == {"last": '"One moment.\\n\\nb here."'}


# Crashes and questions


async def test_after_a_crash_the_agent_in_control_goes_on(store: RunStore) -> None:
    """The agent that handed over is not asked again."""
    hang = turn(1, {"text": "b is abo"}, {"hang": True})
    async with at_work_with(store, [front(TRANSFER), back(hang)], NEVER) as engine:
        started = await engine.start("help")
        await engine.wait_for(started.head.key, lambda events: "b is abo" in events[-1].delta.content)
    async with at_work_with(store, [front(NEVER), back(turn(1, {"text": "b went on"}))], NEVER) as engine:
        asked = await engine.read(started)
    assert asked.last.done.content == "One moment.\n\nb went on"
    assert len(asked.last.done.process_steps) == 1


@tool(effect="once")
async def consult(context: ToolContext) -> str:
    """Ask a person."""
    raise Suspend(Ask("Sure?", kind="question"))


@tool(effect="read", return_direct=True)
async def report() -> str:
    """Report."""
    return "the report"


@pytest.mark.parametrize(
    ("call", "content", "stop_reason"),
    [
        (over_to("b"), "b here", StopReason.STOP_REASON_FINISHED),
        ({"call": "exit", "args": {"answer": "bye"}}, "bye", StopReason.STOP_REASON_EXITED),
        ({"call": "report"}, "the report", StopReason.STOP_REASON_RETURN_DIRECT),
    ],
)
async def test_a_handoff_beside_a_call_that_waits_for_people_is_not_lost(
    store: RunStore, call: dict[str, object], content: str, stop_reason: StopReason.ValueType
) -> None:
    """It takes effect when the whole batch is through, in another process too."""

    def agents() -> list[Agent]:
        b = back(turn(1, {"text": "b here"}, tool_result=".*"))
        script = (turn(0, call, {"call": "consult", "id": "Q"}), turn(1, {"text": "a went on"}))
        return [front(*script, tools=[consult, exit_tool, report]), b]

    async with at_work_with(store, agents(), NEVER) as engine:
        asked = await engine.ask("help")
        assert asked.last.done.stop_reason == StopReason.STOP_REASON_INTERRUPTED
    async with at_work_with(store, agents(), NEVER) as engine:
        asked = await resume(engine, asked, Q="yes")
    assert asked.last.done.content == content
    assert asked.last.done.stop_reason == stop_reason


async def test_a_question_after_a_transfer_comes_back_to_who_asked(store: RunStore) -> None:
    """The run is parked and resumed with the agent in control."""
    asks = (turn(1, {"call": "consult", "id": "Q"}), turn(2, {"text": "{{result}}"}))
    async with at_work_with(store, [front(TRANSFER), back(*asks, tools=[consult])], NEVER) as engine:
        asked = await engine.ask("help")
        (item,) = asked.events[-2].interrupt.items
        assert list(item.path) == ["b", "consult"]
    async with at_work_with(store, [front(NEVER), back(*asks, tools=[consult])], NEVER) as engine:
        asked = await resume(engine, asked, Q="yes")
    assert asked.last.done.content == "yes"


@pytest.mark.parametrize("outcome", [End("stop here", "exited"), Fail(EngineError("INTERNAL", "stop here"))])
async def test_a_wish_to_end_outlives_a_crash(store: RunStore, outcome: Outcome) -> None:
    """A call that ended the run has ended itself, so whoever takes over ends the run too, and runs nothing more."""
    ran: list[str] = []
    gate, stopped = asyncio.Event(), asyncio.Event()

    @tool(effect="once")
    async def stop() -> str:
        stopped.set()
        raise outcome

    def working(*, hangs: bool) -> Tool:
        @tool(effect="read")
        async def work() -> str:
            ran.append("work")
            await (asyncio.sleep(60) if hangs else gate.wait())
            return ""

        return work

    @tool(effect="read")
    async def tick() -> str:
        await stopped.wait()
        await asyncio.sleep(0.1)  # its end is taken in before the next step of the other is saved, with it
        return "tick"

    def team(*, hangs: bool) -> Agent:
        inner = scripted(turn(0, {"call": "tick"}), turn(1, {"call": "work"}), turn(2, {"text": "b"}))
        b = Agent("b", models=[inner], tools=[tick, working(hangs=hangs)])
        outer = scripted(turn(0, {"call": "stop"}, ASK_B), turn(1, {"text": "went on"}))
        return Agent("a", models=[outer], tools=[stop], sub_agents=[b])

    async with at_work_with(store, [team(hangs=True)], NEVER) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, ended("stop"))
        await until(lambda: bool(ran))
    gate.set()
    async with at_work_with(store, [team(hangs=False)], NEVER) as engine:
        asked = await engine.read(started)
    assert (asked.last.done.content or asked.last.error.message) == "stop here"
    assert ran == ["work"]


def test_an_agents_transfers_are_in_its_record_and_graph() -> None:
    """GetAgent shows the tool, the agents behind it are nodes; clashes and loops are refused."""
    agent = Agent("a", transfer_to=["b", "c"])
    assert [item.name for item in agent.info.tools] == ["transfer_to_agent"]
    assert [node.id for node in agent.info.nodes] == ["a", "a/strategy/react", "a/tool/transfer_to_agent", "b", "c"]
    assert "n2 --> n3" in agent.nodes.mermaid()
    for wrong, problem in ((["a"], "hand over to itself"), (["b", "b"], "repeated: b")):
        with pytest.raises(ValueError, match=problem):
            Agent("a", transfer_to=wrong)


def test_the_transfer_tool_speaks_the_agents_language() -> None:
    """Its description is from the table of the agent's locale."""
    assert Agent("a", transfer_to=["b"], locale="zh").info.tools[0].description.startswith("将本对话移交")
