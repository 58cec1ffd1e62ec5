"""Whole runs: behaviours that docs/parity.md promises and no other test shows."""

import asyncio

import pytest

from dualclaw import ContentPart, Message, Role, RunState, StopReason
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.model import ModelRequest
from dualclaw_server.engine.outcome import Outcome
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.engine.tool import ToolContext, ToolRaised, tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy

from .conftest import Opener, echo, kinds, turn
from .people import Ledger, answer, decide, pay

QUICK = RetryPolicy(attempts=3, first_delay=0.01, max_delay=0.01)


async def test_steps_are_counted_over_resumes(open_engine: Opener) -> None:
    """A run that was parked twice has no more model calls than one that never was."""
    ledger = Ledger()
    agent = Agent(
        "a", tools=[ledger.tool()], interceptors=[HitlInterceptor([Policy("pay")])], limits=Limits(max_steps=2)
    )
    engine = await open_engine(
        agent,
        turn(0, pay("p1"), tools=True),
        turn(1, pay("p2"), tools=True),
        {"when": {"tools": False}, "say": [{"text": "That is all I know."}]},
    )
    asked = await answer(engine, await engine.ask("go"), decide("p1"))
    ended = await answer(engine, asked, decide("p2"))
    assert ended.last.done.stop_reason == StopReason.STOP_REASON_STEP_LIMIT
    assert ended.last.done.content == "That is all I know."
    assert ledger.to == ["p1", "p2"]


class Remembers(Interceptor):
    """Sets a session value before the first model call."""

    async def on_agent_start(self, trace: Trace) -> Outcome | None:
        trace.session.set("name", "Anna")
        return None


async def test_braces_in_instructions_mean_nothing(open_engine: Opener) -> None:
    """JSON, templates of any kind and percent signs reach the model as they are, session values or not."""
    instructions = 'Answer as {"name": {name}}, {{name}}, ${name} or %(name)s: 100 %.'
    pattern = r'^Answer as \{"name": \{name\}\}, \{\{name\}\}, \$\{name\} or %\(name\)s: 100 %\.$'
    engine = await open_engine(
        Agent("a", instructions=instructions, interceptors=[Remembers()]), turn(0, {"text": "As told."}, system=pattern)
    )
    assert (await engine.ask("go")).last.done.content == "As told."


async def test_no_call_starts_before_its_answer_is_whole(open_engine: Opener) -> None:
    """A call in an answer that breaks off is never run, though its arguments were all there."""
    ledger = Ledger()
    broken: dict[str, object] = {"text": "Paying.", "chunk": 3}
    agent = Agent("a", tools=[ledger.tool()], retry=QUICK)
    script = turn(0, broken, pay("p1"), {"fail": "MODEL_STREAM_BROKEN"})
    engine = await open_engine(agent, script)
    asked = await engine.ask("go")
    assert asked.last.error.diagnosis.code == "model.stream_broken"
    assert ledger.entries == []
    assert asked.steps == []


async def test_instructions_and_prompts_are_in_no_event(open_engine: Opener) -> None:
    """What operators tell an agent is not for its users: neither the stream nor the conversation holds it."""
    agent = Agent("a", instructions="The discount is 40 %.", tools=[echo], limits=Limits(max_steps=1))
    engine = await open_engine(
        agent,
        turn(0, {"call": "echo", "args": {"text": "hi"}}, system="discount"),
        {"when": {"tools": False, "system": "discount"}, "say": [{"text": "Done."}]},
    )
    asked = await engine.ask("go")
    assert asked.last.done.content == "Done."
    everything = [*asked.events, *await engine.messages(asked.conversation_id)]
    assert not [item for item in everything if "discount" in str(item)]


async def test_cancelling_one_run_leaves_another_of_the_same_agent_alone(open_engine: Opener) -> None:
    """Two runs at once on one agent: the cancelled one ends, the other one finishes its tool and its answer."""
    gate = asyncio.Event()

    @tool(effect="read")
    async def wait() -> str:
        await gate.wait()
        return "waited"

    engine = await open_engine(
        Agent("a", tools=[wait]), turn(0, {"text": "{{user}}"}, {"call": "wait"}), turn(1, {"text": "{{result}}"})
    )
    first, second = await engine.start("first"), await engine.start("second")
    for started in (first, second):
        await engine.wait_for(started.head.key, lambda events: any(event.step.step.name for event in events))
    await engine.cancel(first.head.key)
    assert (await engine.read(first)).last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert (await engine.store.head(second.head.key)).state == RunState.RUN_STATE_RUNNING
    gate.set()
    assert (await engine.read(second)).last.done.content == "second\n\nwaited"


async def test_a_tool_that_is_deaf_to_a_cancel_is_left_behind(open_engine: Opener) -> None:
    """The run ends CANCELLED though the tool goes on, its call has a result, and the next message is answered."""
    release = asyncio.Event()

    @tool(effect="once")
    async def deaf() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "too late"

    engine = await open_engine(
        Agent("a", tools=[deaf]), {"when": {"user": "next"}, "say": [{"text": "Next."}]}, turn(0, {"call": "deaf"})
    )
    started = await engine.start("go")
    await engine.wait_for(started.head.key, lambda events: any(event.step.step.name for event in events))
    await engine.cancel(started.head.key)
    asked = await engine.read(started)
    assert not release.is_set()
    release.set()
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert asked.last.done.process_steps[0].diagnosis.code == "tool.outcome_unknown"
    assert (await engine.ask("next", conversation=asked.conversation_id)).last.done.content == "Next."


def test_the_limits_are_those_the_table_names() -> None:
    """Whoever changes a default changes what people were told."""
    assert Limits() == Limits(
        max_steps=20,
        wall_time=600,
        max_tokens=1_000_000,
        max_tool_calls=200,
        parallel_tools=8,
        max_result=16_000,
        max_depth=4,
        max_transfers=10,
    )


async def test_a_call_beside_the_conversation_is_paid_for_by_the_run(open_engine: Opener) -> None:
    """What a tool or an interceptor asks a model aside is in the usage of the run, failed or not."""

    @tool(effect="read")
    async def aside(context: ToolContext, question: str) -> str:
        request = ModelRequest([Message(role=Role.ROLE_USER, parts=[ContentPart(text=question)])])
        return (await context.trace.ask(request)).message.parts[0].text

    engine = await open_engine(
        Agent("a", tools=[aside]),
        {"when": {"user": "^aside$"}, "say": [{"text": "psst"}, {"usage": {"input_tokens": 100, "output_tokens": 7}}]},
        turn(0, {"call": "aside", "args": {"question": "aside"}}, {"usage": {"input_tokens": 10, "output_tokens": 1}}),
        turn(1, {"text": "{{result}}"}, {"usage": {"input_tokens": 20, "output_tokens": 2}}),
    )
    done = (await engine.ask("go")).last.done
    assert done.content == "psst"
    assert (done.usage.input_tokens, done.usage.output_tokens) == (130, 10)


@tool(effect="read", return_direct=True)
async def first() -> str:
    """Give a report, slowly."""
    await asyncio.sleep(0.05)
    return "first report"


@tool(effect="read", return_direct=True)
async def second() -> str:
    """Give another report."""
    return "second report"


@tool(effect="read", return_direct=True)
async def failing() -> str:
    """Give no report."""
    raise ToolRaised("out of paper")


@pytest.mark.parametrize(
    ("batch", "content", "stop_reason"),
    [
        (("first", "second"), "first report", StopReason.STOP_REASON_RETURN_DIRECT),
        (("second", "first"), "second report", StopReason.STOP_REASON_RETURN_DIRECT),
        (("echo", "second"), "second report", StopReason.STOP_REASON_RETURN_DIRECT),
        (("failing", "first"), "first report", StopReason.STOP_REASON_RETURN_DIRECT),
        (("failing",), "In my own words.", StopReason.STOP_REASON_FINISHED),
    ],
)
async def test_the_first_direct_result_in_call_order_is_the_answer(
    open_engine: Opener, batch: tuple[str, ...], content: str, stop_reason: StopReason.ValueType
) -> None:
    """Whichever tool is faster and whatever stands beside it; one that failed is told to the model instead."""
    calls: list[dict[str, object]] = [{"call": name, "args": {"text": "x"} if name == "echo" else {}} for name in batch]
    engine = await open_engine(
        Agent("a", tools=[echo, first, second, failing]), turn(0, *calls), turn(1, {"text": "In my own words."})
    )
    asked = await engine.ask("go")
    assert (asked.last.done.content, asked.last.done.stop_reason) == (content, stop_reason)
    messages = await engine.messages(asked.conversation_id)
    assert kinds(messages) == ["user", "assistant", *["tool"] * len(batch), "assistant"]
