"""Agents as tools of others: what is seen of them, what they share, what bounds them, how they fail."""

import asyncio
import json
from dataclasses import replace

import pytest

from dualclaw import ContentPart, Message, RunOptions, StepKind, StopReason
from dualclaw_server.engine.agent import Agent, Limits, agent_tool
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, Prompt, RunConfig
from dualclaw_server.engine.model import ModelResponse
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import ToolContext, tool
from dualclaw_server.engine.trace import Trace

from .conftest import TIMEOUT, at_work_with, calls, kinds, results, scripted, turn
from .teams import ASK_B, NEVER, checkpoint_of, echo_call, pair, step_named

# What is seen


async def test_steps_of_a_sub_agent_stand_beside_its_call(store: RunStore) -> None:
    """They name the call as their parent, share the run's indexes, and carry nodes of the agent's own graph."""
    agent = pair(
        turn(0, {"reasoning": "hm"}, {"text": "looking"}, echo_call("1"), echo_call("2", "f"), user="^find x$"),
        turn(1, {"text": "found {{result}}"}),
    )
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    done = asked.last.done
    assert asked.steps[:2] == [(0, "b", "start", ""), (1, "thinking", "", "")]
    assert asked.steps[-1] == (0, "b", "ok", "")
    assert [(s.kind, s.parent_call_id) for s in done.process_steps] == [
        (StepKind.STEP_KIND_AGENT, ""),
        (StepKind.STEP_KIND_THINKING, "B"),
        (StepKind.STEP_KIND_SKILL, "B"),
        (StepKind.STEP_KIND_SKILL, "B"),
    ]
    assert done.process_steps[0].result == "looking\n\nfound <2>"
    assert done.content == "b says: looking\n\nfound <2>"
    assert asked.view.reasoning == ""  # the client sees inner reasoning as a step, not as the agent's own
    ids = [node.id for node in agent.info.nodes]
    assert all(step.node.id in ids for step in done.process_steps)
    assert done.process_steps[2].node.id == "a/tool/b/b/tool/echo"
    assert list(done.used_skills) == ["echo"]


async def test_the_conversation_holds_nothing_of_a_sub_agents_work(store: RunStore) -> None:
    """Transcript and the next run's context have the call and its result, and none of the inner messages."""
    agent = pair(turn(0, echo_call("inner secret")), turn(1, {"text": "found"}))
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
        messages = await engine.messages(asked.conversation_id)
        again = await engine.ask("once more", conversation=asked.conversation_id)
        both = await engine.messages(asked.conversation_id)
    assert kinds(messages) == ["user", "assistant", "tool", "assistant"]
    assert results(messages) == {"B": "found"}
    assert "inner secret" not in str(messages)
    assert again.last.done.content == "b says: found"
    assert len(set(calls(both))) == 2


async def test_a_sub_agent_knows_its_request_and_nothing_else(store: RunStore) -> None:
    """Neither the conversation nor the outer instructions reach it; arguments of an own schema come as JSON."""
    seen: list[tuple[list[str], str]] = []

    class Look(Interceptor):
        async def on_reason_start(self, trace: Trace, prompt: Prompt) -> None:
            seen.append(([p.text for m in prompt.messages for p in m.parts], prompt.instructions))

    b = Agent("b", instructions="inner", models=[scripted(turn(0, {"text": "4"}))], interceptors=[Look()])
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "of": {"type": "string"}}, "required": ["n"]}
    double = agent_tool(b, name="double", parameters=schema)
    outer = scripted(turn(0, {"call": "double", "args": {"of": "x", "n": 2}}), turn(1, {"text": "{{result}}"}))
    agent = Agent("a", instructions="outer", models=[outer], tools=[double])
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("hello")
    assert asked.last.done.content == "4"
    assert [(list(map(json.loads, texts)), instructions) for texts, instructions in seen] == [
        ([{"n": 2, "of": "x"}], "inner")
    ]
    assert step_named(asked, "double").kind == StepKind.STEP_KIND_AGENT


async def test_arguments_that_do_not_fit_never_start_a_sub_agent(store: RunStore) -> None:
    """They are refused like those of any tool."""
    outer = scripted(turn(0, {"call": "b", "args": {"question": "x"}}), turn(1, {"text": "{{result}}"}))
    agent = Agent("a", models=[outer], sub_agents=[Agent("b", models=[scripted(NEVER)])])
    async with at_work_with(store, [agent], NEVER) as engine:
        assert "'request' is a required property" in (await engine.ask("go")).last.done.content


async def test_images_of_a_sub_agents_last_message_reach_the_caller(store: RunStore) -> None:
    """What is more than text is part of the result."""

    class Draw(Interceptor):
        async def on_reason_end(self, trace: Trace, response: ModelResponse, message: Message, duration: float) -> None:
            part = ContentPart()
            part.image.url = "http://x/y.png"
            message.parts.append(part)

    agent = pair(turn(0, {"text": "drawn"}), interceptors=[Draw()])
    async with at_work_with(store, [agent], NEVER) as engine:
        assert step_named(await engine.ask("go"), "b").result == "drawn\nhttp://x/y.png"


# What is shared


async def test_agents_share_session_values_on_purpose_only(store: RunStore) -> None:
    """output_key and session.set are seen by the agents above and beside; extras of interceptors are not."""
    seen: dict[str, object] = {}

    @tool(effect="read")
    async def put(context: ToolContext) -> str:
        context.trace.session.set("x", {"by": context.trace.agent})
        context.trace.extras("audit").set("mine", context.trace.agent)
        return "put"

    @tool(effect="read")
    async def get(context: ToolContext) -> str:
        seen.update(
            x=context.trace.session.get("x"), answer=context.trace.session.get("answer"),
            extra=context.trace.extras("audit").get("mine"),
        )  # fmt: skip
        return "got"

    inner = scripted(turn(0, {"call": "put"}), turn(1, {"text": "the answer"}))
    outer = scripted(turn(0, ASK_B), turn(1, {"call": "get"}), turn(2, {"text": "ok"}))
    b = Agent("b", models=[inner], tools=[put], output_key="answer")
    async with at_work_with(store, [Agent("a", models=[outer], tools=[get], sub_agents=[b])], NEVER) as engine:
        await engine.ask("go")
    assert seen == {"x": {"by": "b"}, "answer": "the answer", "extra": None}


async def test_an_output_too_long_to_keep_is_cut(store: RunStore) -> None:
    """The session value says what is missing; neither the call nor the run fails for it."""
    long = "\x01" * 300_000
    agent = pair(turn(0, {"text": long}), output_key="answer", parent={"output_key": "mine"})
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert asked.last.WhichOneof("payload") == "done"
    kept = (await checkpoint_of(store, asked.key)).session["answer"]
    assert "characters left out" in kept


async def test_usage_is_counted_once(store: RunStore) -> None:
    """The run's usage is what all its agents used."""
    inner = scripted(turn(0, {"text": "x"}, {"usage": {"input_tokens": 10, "output_tokens": 1}}))
    outer = scripted(
        turn(0, ASK_B, {"usage": {"input_tokens": 100, "output_tokens": 5}}),
        turn(1, {"text": "y"}, {"usage": {"input_tokens": 1000}}),
    )
    agent = Agent("a", models=[outer], sub_agents=[Agent("b", models=[inner])])
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert (asked.last.done.usage.input_tokens, asked.last.done.usage.output_tokens) == (1110, 6)


async def test_each_agent_has_its_own_interceptors(store: RunStore) -> None:
    """The parent's see the call of the sub-agent as one tool, the sub-agent's see what is in it."""
    seen: list[str] = []

    class Notes(Interceptor):
        async def on_agent_start(self, trace: Trace) -> None:
            seen.append(f"{self.name} {'/'.join(trace.path)}")

        async def on_tool_call_start(self, trace: Trace, call: Call) -> None:
            seen.append(f"{self.name} {call.name}")

        async def on_agent_end(self, trace: Trace) -> None:
            seen.append(f"{self.name} end")

    agent = pair(turn(0, echo_call("1")), turn(1, {"text": "x"}), interceptors=[Notes(name="in")],
                 parent={"interceptors": [Notes(name="out")]})  # fmt: skip
    async with at_work_with(store, [agent], NEVER) as engine:
        await engine.ask("go")
    assert seen == ["out a", "out b", "in a/b", "in echo", "in end", "out end"]


async def test_a_callers_options_are_for_the_agent_that_was_asked(store: RunStore) -> None:
    """max_steps of the request does not bind its sub-agents."""
    agent = pair(turn(0, echo_call("1")), turn(1, echo_call("2", "f")), turn(2, {"text": "three"}))
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go", options=RunOptions(max_steps=2))
    assert step_named(asked, "b").result == "three"
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED


# What bounds them


async def test_agents_call_one_another_only_so_deep(store: RunStore) -> None:
    """A call that would go deeper than an agent above allows fails, wherever the limit was set."""
    ask = {"call": "next", "args": {"request": "deeper"}}
    model = scripted(turn(0, ask, tools="next"), turn(1, {"text": "{{result}}"}), turn(0, {"text": "bottom"}))
    agent = Agent("d5", models=[model])
    for depth in (4, 3, 2, 1, 0):
        limits = Limits(max_depth=2) if depth == 1 else Limits()
        agent = Agent(f"d{depth}", models=[model], tools=[agent_tool(agent, name="next")], limits=limits)
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    steps = [step for step in asked.view.process_steps if step.kind == StepKind.STEP_KIND_AGENT]
    assert len(steps) == 4  # d1 to d3, and the call of d4 that failed
    assert "more than 2 deep" in steps[-1].diagnosis.summary
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED


async def test_an_agent_given_to_itself_is_bounded(store: RunStore) -> None:
    """A cycle, which only before_agent can make, ends at the limit of depth with an error observation."""

    class Again(Interceptor):
        async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
            return replace(config, tools=(agent_tool(agents[0], name="me"),))

    model = scripted(turn(0, {"call": "me", "args": {"request": "again"}}), turn(1, {"text": "{{result}}"}))
    agents = [Agent("a", models=[model], interceptors=[Again()], limits=Limits(max_depth=3))]
    async with at_work_with(store, agents, NEVER) as engine:
        asked = await engine.ask("go")
    assert len(asked.last.done.process_steps) == 4
    assert "more than 3 deep" in asked.last.done.content


async def test_a_sub_agents_own_step_limit_gives_a_last_answer(store: RunStore) -> None:
    """After its last step it answers without tools, and the agent above goes on."""
    agent = pair(
        turn(0, echo_call("1"), tools=True),
        turn(1, echo_call("2", "f"), tools=True),
        {"when": {"tools": False, "system": "no steps left"}, "say": [{"text": "what I know"}]},
        limits=Limits(max_steps=2),
    )
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert step_named(asked, "b").result == "what I know"
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED


@pytest.mark.parametrize("whose", ["inner", "outer"])
async def test_tokens_of_the_whole_run_bound_a_sub_agent(store: RunStore, whose: str) -> None:
    """Its own budget ends the sub-agent alone; the budget above it ends it too, and then the run."""
    mine, above = (Limits(max_tokens=50), Limits()) if whose == "inner" else (Limits(), Limits(max_tokens=50))
    loop = {"say": [{"call": "echo", "args": {"text": "x"}}, {"usage": {"input_tokens": 40}}]}
    agent = pair(loop, limits=mine, parent={"limits": above})
    outer = scripted(turn(0, ASK_B), turn(1, {"call": "b", "args": {"request": "more"}}), turn(2, {"text": "ok"}))
    agent = replace(agent, models=[outer])
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    echoes = [step for step in asked.view.process_steps if step.name == "echo"]
    ran = [step for step in echoes if not step.HasField("diagnosis")]
    reasons = {"inner": StopReason.STOP_REASON_FINISHED, "outer": StopReason.STOP_REASON_BUDGET_EXCEEDED}
    assert asked.last.done.stop_reason == reasons[whose]
    assert len(ran) == {"inner": 2, "outer": 1}[whose]


@pytest.mark.parametrize("bound", ["agent", "tool"])
async def test_a_sub_agent_that_hangs_times_out(store: RunStore, bound: str) -> None:
    """Its wall time, or the timeout of its tool, ends the call; what it had open is closed and really cancelled."""
    cancelled = asyncio.Event()

    @tool(effect="once")
    async def hang() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    limits = Limits(wall_time=3) if bound == "agent" else Limits()
    b = Agent("b", models=[scripted(turn(0, {"call": "hang"}))], tools=[hang], limits=limits)
    as_tool = agent_tool(b) if bound == "agent" else replace(agent_tool(b), timeout=3)
    agent = Agent("a", models=[scripted(turn(0, ASK_B), turn(1, {"text": "on"}))], tools=[as_tool])
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert asked.last.done.content == "on"
    assert step_named(asked, "b").diagnosis.code == "tool.timeout"
    assert step_named(asked, "hang").diagnosis.code == "tool.outcome_unknown"
    assert step_named(asked, "hang").node.id == "a/tool/b/b/tool/hang"
    assert cancelled.is_set()


async def test_time_a_sub_agents_preparation_takes_is_its_own(store: RunStore) -> None:
    """A before_agent that hangs ends with its wall time, like everything else of it."""

    class Hangs(Interceptor):
        async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
            await asyncio.sleep(60)
            return config

    agent = pair(turn(0, {"text": "x"}), interceptors=[Hangs()], limits=Limits(wall_time=0.3))
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert step_named(asked, "b").diagnosis.code == "tool.timeout"


async def test_sub_agents_work_side_by_side(store: RunStore) -> None:
    """Two calls of one agent run at once; steps, plans and results are kept apart, ids stay unique."""
    meeting = asyncio.Barrier(2)

    @tool(effect="read")
    async def meet(who: str) -> str:
        async with asyncio.timeout(TIMEOUT):
            await meeting.wait()
        return f"met as {who}"

    meet_call = {"call": "meet", "id": "same", "args": {"who": "{{user}}"}}
    inner = scripted(turn(0, meet_call), turn(1, {"text": "{{result}}"}))
    asks = [{"call": "b", "id": place, "args": {"request": who}} for place, who in (("1", "one"), ("2", "two"))]
    outer = scripted(turn(0, *asks), turn(1, {"text": "ok"}))
    agent = Agent("a", models=[outer], sub_agents=[Agent("b", models=[inner], tools=[meet])])
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
        messages = await engine.messages(asked.conversation_id)
    assert results(messages) == {"1": "met as one", "2": "met as two"}
    inner_steps = [step for step in asked.last.done.process_steps if step.name == "meet"]
    assert {(step.parent_call_id, step.result) for step in inner_steps} == {("1", "met as one"), ("2", "met as two")}
    assert len({step.call_id for step in inner_steps}) == 2
