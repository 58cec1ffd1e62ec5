"""What a run does, seen through its log: answers, limits, failures, cancels, conversations."""

import asyncio
import gc
import threading

import pytest

from dualclaw import (
    BusyPolicy,
    DisconnectPolicy,
    RetryMode,
    RunOptions,
    RunRequest,
    RunState,
    StopReason,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.caller import Caller
from dualclaw_server.engine.tool import tool

from .conftest import ANSWER, CALLER, TIMEOUT, TRACE, Opener, calls, echo, kinds, results, texts, turn, until

# Answers


async def test_a_chat_answers_and_is_kept(open_engine: Opener) -> None:
    """Text comes as deltas, done repeats it, and both messages are in the conversation."""
    engine = await open_engine(Agent("a"), ANSWER)
    asked = await engine.ask("Hi there\nsecond line")
    done = asked.last.done
    assert asked.view.text == done.content == "Hello, world"
    assert done.stop_reason == StopReason.STOP_REASON_FINISHED
    assert asked.last.trace_id == TRACE.trace_id
    assert asked.last.claw == "test"
    messages = await engine.messages(asked.conversation_id)
    assert [texts(message) for message in messages] == ["Hi there\nsecond line", "Hello, world"]
    assert messages[1].id == done.message_id
    assert (await engine.store.get_conversation("tenant", asked.conversation_id)).title == "Hi there"
    head = await engine.store.head(asked.key)
    assert head.state == RunState.RUN_STATE_SUCCEEDED
    assert head.run.stop_reason == StopReason.STOP_REASON_FINISHED


async def test_the_conversation_goes_on(open_engine: Opener) -> None:
    """The model of a second run is given the messages of the first."""
    engine = await open_engine(
        Agent("a"),
        {"when": {"user": "first"}, "say": [{"text": "one"}]},
        {"when": {"user": "second"}, "say": [{"text": "you said {{user}}"}]},
    )
    first = await engine.ask("first")
    second = await engine.ask("second", conversation=first.conversation_id)
    assert second.last.done.content == "you said second"
    assert [texts(m) for m in await engine.messages(first.conversation_id)] == [
        "first",
        "one",
        "second",
        "you said second",
    ]


# Limits


async def test_the_step_limit_gives_a_real_answer(open_engine: Opener) -> None:
    """After the last step one call without tools answers; the reason says so."""
    engine = await open_engine(
        Agent("a", tools=[echo], limits=Limits(max_steps=3)),
        {"when": {"tools": True}, "say": [{"call": "echo", "args": {"text": "again"}}]},
        {"when": {"tools": False, "system": "no steps left"}, "say": [{"text": "What I know: {{result}}"}]},
    )
    asked = await engine.ask("go")
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_STEP_LIMIT
    assert asked.last.done.content == "What I know: <again>"
    assert len(asked.last.done.process_steps) == 3


async def test_the_step_limit_never_ends_in_silence(open_engine: Opener) -> None:
    """When even the last call gives no text, the engine says what happened."""
    engine = await open_engine(
        Agent("a", tools=[echo], limits=Limits(max_steps=1), locale="zh"),
        {"when": {"tools": True}, "say": [{"call": "echo", "args": {"text": "x"}}]},
        {"when": {"tools": False}, "say": [{"call": "echo", "args": {"text": "x"}}]},
    )
    asked = await engine.ask("go")
    assert asked.last.done.content == "在得到答案之前已达到步骤上限。"
    assert kinds(await engine.messages(asked.conversation_id))[-1] == "assistant"


async def test_callers_only_lower_the_step_limit(open_engine: Opener) -> None:
    """A lower max_steps holds for the run; a higher one is refused by name."""
    loop = {"when": {"tools": True}, "say": [{"call": "echo", "args": {"text": "x"}}]}
    last = {"when": {"tools": False}, "say": [{"text": "end"}]}
    engine = await open_engine(Agent("a", tools=[echo], limits=Limits(max_steps=5)), loop, last)
    asked = await engine.ask("go", options=RunOptions(max_steps=2))
    assert len(asked.last.done.process_steps) == 2
    with pytest.raises(FieldError) as refused:
        await engine.start("go", options=RunOptions(max_steps=6, model="other"))
    assert set(refused.value.fields) == {"options.max_steps", "options.model"}
    with pytest.raises(EngineError, match="Interceptor 'hitl' of agent a cannot be switched") as switched:
        await engine.start("go", options=RunOptions(interceptors={"hitl": False}))
    assert switched.value.reason == "NOT_SWITCHABLE"


@pytest.mark.parametrize("limits", [Limits(max_tokens=10), Limits(max_tool_calls=1)])
async def test_budgets_end_the_run_before_more_tools(open_engine: Opener, limits: Limits) -> None:
    """Over a budget no call runs; each gets a result, the run ends with BUDGET_EXCEEDED and says why."""
    engine = await open_engine(
        Agent("a", tools=[echo], limits=limits),
        turn(0, {"call": "echo", "args": {"text": "1"}}, {"call": "echo", "args": {"text": "2"}},
             {"usage": {"input_tokens": 8, "output_tokens": 8}}),
    )  # fmt: skip
    asked = await engine.ask("go")
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_BUDGET_EXCEEDED
    assert "used up" in asked.last.done.content
    assert [s.diagnosis.code for s in asked.last.done.process_steps] == ["tool.skipped"] * 2
    messages = await engine.messages(asked.conversation_id)
    assert sorted(results(messages)) == sorted(calls(messages))
    assert kinds(messages)[-1] == "assistant"


async def test_wall_time_ends_a_run_and_keeps_its_text(open_engine: Opener) -> None:
    """A run that takes too long ends with BUDGET_EXCEEDED; what was shown is kept."""
    engine = await open_engine(Agent("a", limits=Limits(wall_time=3)), turn(0, {"text": "so far"}, {"hang": True}))
    asked = await engine.ask("go")
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_BUDGET_EXCEEDED
    assert asked.last.done.content == "so far"
    assert texts((await engine.messages(asked.conversation_id))[-1]) == "so far"


# Failures and cancels


async def test_a_failed_model_is_an_error_event(open_engine: Opener, caplog: pytest.LogCaptureFixture) -> None:
    """The run fails with the model's reason and one line in the log; what was shown stays."""
    engine = await open_engine(
        Agent("a"),
        turn(0, {"text": "partial"}, {"fail": "MODEL_OVERLOADED", "message": "Too busy.", "retryable": True}),
    )
    asked = await engine.ask("go")
    error = asked.last.error
    assert (error.message, error.diagnosis.code, error.diagnosis.retryable) == ("Too busy.", "model.overloaded", True)
    lines = [record for record in caplog.records if record.message == "run failed: MODEL_OVERLOADED"]
    assert [(line.run_id, line.trace_id) for line in lines] == [(asked.key.run_id, TRACE.trace_id)]  # type: ignore[attr-defined]
    head = await engine.store.head(asked.key)
    assert head.state == RunState.RUN_STATE_FAILED
    assert head.run.error == error
    assert [texts(m) for m in await engine.messages(asked.conversation_id)] == ["go", "partial"]


async def test_a_fault_of_the_engine_tells_no_details(open_engine: Opener) -> None:
    """An unforeseen exception ends the run as INTERNAL with the trace id; its text stays in the log."""

    class Broken:
        name = "broken"

        async def run(self, segment: object) -> StopReason.ValueType:
            raise RuntimeError("secret detail")

    engine = await open_engine(Agent("a", strategy=Broken()), ANSWER)  # type: ignore[arg-type]
    asked = await engine.ask("go")
    assert asked.last.error.diagnosis.code == "internal"
    assert "secret" not in str(asked.last)
    assert TRACE.trace_id in asked.last.error.message


async def test_cancel_keeps_partial_text(open_engine: Opener) -> None:
    """A cancelled run ends with done, CANCELLED and the text so far, which is in the conversation too."""
    engine = await open_engine(Agent("a"), turn(0, {"text": "half an ans"}, {"hang": True}), ANSWER)
    started = await engine.start("go")
    await engine.wait_for(started.head.key, lambda events: len(events) > 0)
    await engine.cancel(started.head.key)
    asked = await engine.read(started)
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert asked.last.done.content == "half an ans"
    assert (await engine.store.head(asked.key)).state == RunState.RUN_STATE_CANCELLED
    assert [texts(m) for m in await engine.messages(asked.conversation_id)] == ["go", "half an ans"]
    assert (await engine.cancel(asked.key)).state == RunState.RUN_STATE_CANCELLED


async def test_cancel_ends_tools_and_leaves_no_dangling_call(open_engine: Opener) -> None:
    """Async tools are really cancelled, plain ones abandoned; each call has a result and the turn is closed."""
    cancelled, begun = asyncio.Event(), asyncio.Event()
    in_thread, over = threading.Event(), threading.Event()

    @tool(effect="read")
    async def waits() -> str:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    @tool(effect="once")
    def writes() -> str:
        in_thread.set()
        over.wait(TIMEOUT)
        return ""

    engine = await open_engine(
        Agent("a", tools=[waits, writes, echo], limits=Limits(parallel_tools=2)),
        turn(0, {"call": "waits"}, {"call": "writes"}, {"call": "echo", "args": {"text": "x"}}, user="go"),
        {"when": {"user": "next"}, "say": [{"text": "fresh"}]},
    )
    started = await engine.start("go")
    await until(lambda: begun.is_set() and in_thread.is_set())
    await engine.cancel(started.head.key)
    asked = await engine.read(started)
    over.set()
    assert cancelled.is_set()
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert [s.diagnosis.code for s in asked.last.done.process_steps] == [
        "tool.skipped",
        "tool.outcome_unknown",
        "tool.skipped",
    ]
    messages = await engine.messages(asked.conversation_id)
    assert sorted(results(messages)) == sorted(calls(messages))
    assert kinds(messages)[-1] == "assistant"
    assert (await engine.ask("next", conversation=asked.conversation_id)).last.done.content == "fresh"


async def test_a_run_nobody_may_see_is_unknown(open_engine: Opener) -> None:
    """Runs and conversations of one tenant do not exist for another."""
    engine = await open_engine(Agent("a"), ANSWER)
    asked = await engine.ask("go")
    stranger = Caller("other", "s", frozenset({"user"}))
    with pytest.raises(EngineError) as run:
        await engine.runner.cancel(stranger, asked.key.run_id, "", TRACE)
    with pytest.raises(EngineError) as conversation:
        await engine.start("go", conversation=asked.conversation_id, caller=stranger)
    assert [run.value.reason, conversation.value.reason] == ["UNKNOWN_RUN", "UNKNOWN_CONVERSATION"]


async def test_unknown_agents_are_named(open_engine: Opener) -> None:
    """The refusal lists the agents there are."""
    engine = await open_engine(Agent("assistant"), ANSWER)
    with pytest.raises(EngineError, match=r"'asistant'; there are: assistant\.") as refused:
        await engine.start("go", agent="asistant")
    assert refused.value.reason == "UNKNOWN_AGENT"


# Requests and conversations


async def test_the_same_request_gives_the_same_run(open_engine: Opener) -> None:
    """A request id makes a start idempotent, also at the same moment; with another body it is refused."""
    engine = await open_engine(Agent("a"), ANSWER)
    started = await asyncio.gather(*[engine.start("go", request_id="r") for _ in range(5)])
    assert len({s.head.key for s in started}) == 1
    assert [s.existing for s in started].count(False) == 1
    first = await engine.read(started[0])
    again = await engine.read(await engine.start("go", request_id="r"))
    assert again.events == first.events
    with pytest.raises(EngineError) as reused:
        await engine.start("other", request_id="r")
    assert reused.value.reason == "REQUEST_ID_REUSED"


async def test_a_busy_conversation_refuses_queues_or_replaces(open_engine: Opener) -> None:
    """REJECT names the active run; QUEUE waits its turn; REPLACE cancels everything before it."""
    engine = await open_engine(
        Agent("a"),
        {"when": {"user": "hang"}, "say": [{"text": "…"}, {"hang": True}]},
        {"say": [{"text": "answer to {{user}}"}]},
    )
    hanging = await engine.start("hang")
    conversation = hanging.head.conversation_id
    with pytest.raises(EngineError) as busy:
        await engine.start("no", conversation=conversation)
    assert busy.value.reason == "CONVERSATION_BUSY"
    assert busy.value.metadata["run_id"] == hanging.head.key.run_id
    queued = await engine.start("queued", conversation=conversation, on_busy=BusyPolicy.BUSY_POLICY_QUEUE)
    assert queued.head.state == RunState.RUN_STATE_QUEUED
    await engine.cancel(queued.head.key)
    cancelled = await engine.read(queued)
    assert cancelled.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    waiting = await engine.start("waiting", conversation=conversation, on_busy=BusyPolicy.BUSY_POLICY_QUEUE)
    new = await engine.start("new", conversation=conversation, on_busy=BusyPolicy.BUSY_POLICY_REPLACE)
    assert (await engine.read(hanging)).last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert (await engine.read(waiting)).last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert (await engine.read(new)).last.done.content == "answer to new"
    messages = await engine.messages(conversation)
    assert kinds(messages) == ["user", "assistant"] * (len(messages) // 2)


async def test_queued_runs_follow_each_other(open_engine: Opener) -> None:
    """Runs that wait start by themselves, first come first served, each with what was said before it."""
    engine = await open_engine(
        Agent("a"),
        {"when": {"user": "1"}, "say": [{"sleep": 0.05}, {"text": "one"}]},
        {"say": [{"text": "after {{user}}"}]},
    )
    first = await engine.start("1")
    rest = [
        await engine.start(str(n), conversation=first.head.conversation_id, on_busy=BusyPolicy.BUSY_POLICY_QUEUE)
        for n in range(2, 6)
    ]
    await asyncio.gather(*[engine.read(started) for started in [first, *rest]])
    said = [texts(m) for m in await engine.messages(first.head.conversation_id)]
    assert said == ["1", "one", "2", "after 2", "3", "after 3", "4", "after 4", "5", "after 5"]


async def test_hold_shows_nothing_before_the_answer_is_whole(open_engine: Opener) -> None:
    """With HOLD no text is seen while the model still writes; without it the first text is."""
    engine = await open_engine(Agent("a"), turn(0, {"text": "early"}, {"hang": True}))
    held = await engine.start("go", options=RunOptions(retry_mode=RetryMode.RETRY_MODE_HOLD))
    live = await engine.start("go")
    await engine.wait_for(live.head.key, lambda events: len(events) > 0)
    assert (await engine.store.head(held.head.key)).last_seq == 0
    await engine.cancel(held.head.key)
    assert (await engine.read(held)).last.done.content == ""


async def test_a_run_can_be_cancelled_when_its_readers_leave(open_engine: Opener) -> None:
    """on_disconnect CANCEL ends the run once nobody is attached; by default it goes on."""
    engine = await open_engine(Agent("a"), turn(0, {"text": "x"}, {"hang": True}))
    options = RunOptions(on_disconnect=DisconnectPolicy.DISCONNECT_POLICY_CANCEL)
    kept = await engine.start("go")
    started = await engine.start("go", options=options)  # and read at once: nobody's patience ends between the two
    request = RunRequest(options=options)
    with engine.runner.attached(started.head.key, starter=request):
        pass
    with engine.runner.attached(started.head.key):
        await engine.wait_for(started.head.key, bool)
        await asyncio.sleep(0.4)
        assert (await engine.store.head(started.head.key)).state == RunState.RUN_STATE_RUNNING
    assert (await engine.read(started)).last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    with engine.runner.attached(kept.head.key, starter=RunRequest()):
        pass
    await asyncio.sleep(0.4)
    assert (await engine.store.head(kept.head.key)).state == RunState.RUN_STATE_RUNNING


async def test_a_run_whose_starter_never_came_to_read_is_cancelled(open_engine: Opener) -> None:
    """A client that leaves while its run is being stored, or a process that dies with it, still counts as gone."""
    engine = await open_engine(Agent("a"), turn(0, {"text": "half"}, {"hang": True}))
    started = await engine.start("go", options=RunOptions(on_disconnect=DisconnectPolicy.DISCONNECT_POLICY_CANCEL))
    asked = await engine.read(started)
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED


async def test_a_run_deleted_before_its_readers_patience_ends_makes_no_noise(
    open_engine: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """The starter of a CANCEL run leaves after its end and deletes it: the late cancel finds nothing, silently."""
    engine = await open_engine(Agent("a"), ANSWER)
    options = RunOptions(on_disconnect=DisconnectPolicy.DISCONNECT_POLICY_CANCEL)
    started = await engine.start("go", options=options)
    with engine.runner.attached(started.head.key, starter=RunRequest(options=options)):
        asked = await engine.read(started)
        await asyncio.sleep(0.05)
    await engine.store.delete_conversation(CALLER.tenant, asked.conversation_id)
    with caplog.at_level("ERROR", "asyncio"):
        await asyncio.sleep(0.4)
        gc.collect()
    assert [record.message for record in caplog.records] == []
