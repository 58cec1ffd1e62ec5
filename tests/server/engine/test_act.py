"""Tool calls of a run, seen through its log: how they run, and what becomes of those that cannot."""

import asyncio
import threading

import pytest

from dualclaw import (
    ContentPart,
    StepKind,
    StopReason,
)
from dualclaw_server.engine.adopt import MAX_ARGUMENTS
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.tool import ToolContext, ToolOutput, ToolRaised, tool
from dualclaw_server.tools.assistant import calculate

from .conftest import ANSWER, TIMEOUT, Opener, calls, echo, kinds, results, turn


async def test_tools_run_between_answers(open_engine: Opener) -> None:
    """A call is one step with start and end, its result reaches the model, texts are set apart by a blank line."""
    engine = await open_engine(
        Agent("a", tools=[calculate]),
        turn(0, {"reasoning": "Let me "}, {"reasoning": "think."}, {"text": "One moment."},
             {"call": "calculate", "args": {"expression": "6*7"}}, {"usage": {"input_tokens": 5, "output_tokens": 2}}),
        turn(1, {"text": "It is {{result}}."}, {"usage": {"input_tokens": 9, "reasoning_tokens": 1}}),
    )  # fmt: skip
    asked = await engine.ask("6*7?")
    done = asked.last.done
    assert done.content == "One moment.\n\nIt is 42."
    assert asked.view.reasoning == "Let me think."
    assert asked.steps == [(0, "thinking", "", ""), (1, "calculate", "start", ""), (1, "calculate", "ok", "")]
    assert [step.result for step in done.process_steps] == ["", "42"]
    assert done.process_steps[0].text == "Let me think."
    assert done.process_steps[1].args_json == '{"expression": "6*7"}'
    assert done.process_steps[1].node.id == "a/tool/calculate"
    assert list(done.used_skills) == ["calculate"]
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.reasoning_tokens) == (14, 2, 1)
    assert not done.usage.HasField("cached_tokens")
    messages = await engine.messages(asked.conversation_id)
    assert kinds(messages) == ["user", "assistant", "tool", "assistant"]
    assert results(messages) == {calls(messages)[0]: "42"}


async def test_parallel_tools_keep_call_order_for_the_model(open_engine: Opener) -> None:
    """Calls run side by side, events come as they happen, results stand in call order; a failure hides nothing."""
    called, gate = asyncio.Event(), asyncio.Event()

    @tool(effect="read")
    async def slow() -> str:
        await called.wait()
        await gate.wait()
        return "slow"

    @tool(effect="read")
    async def quick() -> str:
        called.set()
        return "quick"

    @tool(effect="read")
    async def broken() -> str:
        raise LookupError("no such thing")

    engine = await open_engine(
        Agent("a", tools=[slow, quick, broken]),
        turn(0, {"call": "slow", "id": "s"}, {"call": "broken", "id": "b"}, {"call": "quick", "id": "q"}),
        turn(1, {"text": "done"}),
    )
    started = await engine.start("go")
    await engine.wait_for(started.head.key, lambda events: len(events) == 5)  # three have begun, two of them ended
    gate.set()
    asked = await engine.read(started)
    phases = [(name, phase) for _, name, phase, _ in asked.steps]
    assert phases[:3] == [("slow", "start"), ("broken", "start"), ("quick", "start")]
    assert phases[-1] == ("slow", "ok")
    messages = await engine.messages(asked.conversation_id)
    assert kinds(messages) == ["user", "assistant", "tool", "tool", "tool", "assistant"]
    assert list(results(messages)) == ["s", "b", "q"]
    assert '"message": "broken failed. LookupError: no such thing"' in results(messages)["b"]


async def test_parallel_tools_are_bounded(open_engine: Opener) -> None:
    """No more calls are at work at once than the limit says; the others wait for their turn."""
    at_work = most = 0

    @tool(effect="read")
    async def work() -> str:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.01)
        at_work -= 1
        return "ok"

    engine = await open_engine(
        Agent("a", tools=[work], limits=Limits(parallel_tools=2)),
        turn(0, *[{"call": "work", "args": {}} for _ in range(7)]),
        turn(1, {"text": "done"}),
    )
    asked = await engine.ask("go")
    assert most == 2
    assert len(asked.last.done.process_steps) == 7


async def test_a_tools_result_can_be_the_answer(open_engine: Opener) -> None:
    """return_direct ends the run with the result as its text, and the conversation is closed by it."""

    @tool(effect="read", return_direct=True)
    async def report() -> str:
        return "the report"

    engine = await open_engine(Agent("a", tools=[report]), turn(0, {"text": "Here:"}, {"call": "report"}))
    asked = await engine.ask("report!")
    assert asked.last.done.content == "Here:\n\nthe report"
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_RETURN_DIRECT
    messages = await engine.messages(asked.conversation_id)
    assert kinds(messages) == ["user", "assistant", "tool", "assistant"]
    assert messages[-1].id == asked.last.done.message_id


async def test_tools_know_their_surroundings(open_engine: Opener) -> None:
    """A call is told tenant, subject, run and an idempotency key of its own."""
    seen: list[ToolContext] = []

    @tool(effect="idempotent")
    async def note(context: ToolContext) -> None:
        seen.append(context)

    engine = await open_engine(
        Agent("a", tools=[note]), turn(0, {"call": "note", "id": "x"}, {"call": "note", "id": "y"}), ANSWER
    )
    asked = await engine.ask("go")
    assert {c.tenant for c in seen} == {"tenant"}
    assert {c.run_id for c in seen} == {asked.key.run_id}
    assert len({c.idempotency_key for c in seen}) == 2
    assert [s.result for s in asked.last.done.process_steps] == ["[no output]"] * 2


async def test_large_results_are_cut_and_say_so(open_engine: Opener) -> None:
    """A result of megabytes keeps head and tail; the step tells what is missing."""

    @tool(effect="read")
    async def flood() -> str:
        return "a" * 3_000_000 + "END"

    engine = await open_engine(Agent("a", tools=[flood]), turn(0, {"call": "flood"}), ANSWER)
    step = (await engine.ask("go")).last.done.process_steps[0]
    assert len(step.result) < 70_000
    assert step.result.endswith("END")
    assert step.diagnosis.code == "result.truncated"


async def test_results_may_carry_media(open_engine: Opener) -> None:
    """Images of a tool stay parts of its result; people see their address."""

    @tool(effect="read", kind="media")
    async def draw() -> ToolOutput:
        part = ContentPart()
        part.image.url = "http://x/y.png"
        return ToolOutput([part])

    engine = await open_engine(Agent("a", tools=[draw]), turn(0, {"call": "draw"}), ANSWER)
    step = (await engine.ask("go")).last.done.process_steps[0]
    assert step.kind == StepKind.STEP_KIND_MEDIA
    assert step.result == "http://x/y.png"


# What goes wrong with calls


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        ({"call": "ecko", "args": {"text": "x"}}, "tool.unknown", "Tools there are: echo"),
        ({"call": "echo", "args": {"text": 5}}, "tool.bad_arguments", "text: 5 is not of type 'string'"),
        ({"call": "echo", "args": {}}, "tool.bad_arguments", "'text' is a required property"),
        ({"call": "echo", "raw_args": '{"text": "cut'}, "tool.bad_arguments", "not one usable JSON object"),
        ({"call": "echo", "raw_args": "[1]"}, "tool.bad_arguments", "not one usable JSON object"),
        ({"call": "echo", "args": {"text": "x" * MAX_ARGUMENTS}}, "tool.bad_arguments", f"more than {MAX_ARGUMENTS}"),
    ],
)
async def test_calls_that_cannot_run_are_told_to_the_model(
    open_engine: Opener, call: dict[str, object], code: str, told: str
) -> None:
    """They never run, the user sees a failed step, the model learns what would be right, the run goes on."""
    engine = await open_engine(Agent("a", tools=[echo]), turn(0, call), turn(1, {"text": "I see"}))
    asked = await engine.ask("go")
    assert asked.last.done.content == "I see"
    assert [(phase, found) for _, _, phase, found in asked.steps] == [("start", ""), ("fail", code)]
    assert told in next(iter(results(await engine.messages(asked.conversation_id)).values()))
    assert list(asked.last.done.used_skills) == []
    assert asked.last.done.process_steps[0].kind == StepKind.STEP_KIND_SKILL


async def test_a_tool_that_hangs_times_out(open_engine: Opener) -> None:
    """Async, plain, and deaf to cancellation: each ends with tool.timeout and the run goes on."""
    release, release_thread = asyncio.Event(), threading.Event()

    @tool(effect="read", timeout=0.05)
    async def hangs() -> str:
        await asyncio.sleep(60)
        return ""

    @tool(effect="once", timeout=0.05)
    def blocks() -> str:
        release_thread.wait(TIMEOUT)
        return ""

    @tool(effect="read", timeout=0.05)
    async def deaf() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return ""

    engine = await open_engine(
        Agent("a", tools=[hangs, blocks, deaf]),
        turn(0, {"call": "hangs"}, {"call": "blocks"}, {"call": "deaf"}),
        turn(1, {"text": "on"}),
    )
    asked = await engine.ask("go")
    release.set()
    release_thread.set()
    assert asked.last.done.content == "on"
    assert [s.diagnosis.code for s in asked.last.done.process_steps] == ["tool.timeout"] * 3
    assert [s.diagnosis.retryable for s in asked.last.done.process_steps] == [True, False, True]


async def test_a_tool_may_refuse_politely(open_engine: Opener) -> None:
    """ToolRaised carries text for the model and needs no traceback."""

    @tool(effect="read")
    async def picky() -> str:
        raise ToolRaised("not on Sundays")

    engine = await open_engine(Agent("a", tools=[picky]), turn(0, {"call": "picky"}), ANSWER)
    step = (await engine.ask("go")).last.done.process_steps[0]
    assert step.diagnosis.detail == "not on Sundays"
    assert "not on Sundays" in step.result


async def test_call_ids_are_unique_over_the_conversation(open_engine: Opener) -> None:
    """A model that repeats an id, in one answer or a later turn, gets one result for each call all the same."""
    engine = await open_engine(
        Agent("a", tools=[echo]),
        turn(0, {"call": "echo", "args": {"text": "1"}, "id": "x"}, {"call": "echo", "args": {"text": "2"}, "id": "x"}),
        turn(1, {"text": "ok"}),
    )
    first = await engine.ask("go")
    await engine.ask("again", conversation=first.conversation_id)
    messages = await engine.messages(first.conversation_id)
    assert len(set(calls(messages))) == 4
    assert sorted(results(messages)) == sorted(calls(messages))
    assert sorted(results(messages).values()) == ["<1>", "<1>", "<2>", "<2>"]


async def test_a_chat_runs_no_invented_call(open_engine: Opener) -> None:
    """Without tools a hallucinated call has no way to run and leaves no dangling call behind."""
    engine = await open_engine(Agent("a"), turn(0, {"text": "hm"}, {"call": "rm", "args": {"path": "/"}}))
    asked = await engine.ask("go")
    assert asked.last.done.content == "hm"
    assert asked.steps == []
    assert calls(await engine.messages(asked.conversation_id)) == []
