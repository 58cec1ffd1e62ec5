"""Spans: which there are, what they hang below, and that each ends once, however its work ended."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dualclaw import ContentPart, InterruptItem, Usage
from dualclaw_server.engine.checkpoint import CallPhase, Question, Stage
from dualclaw_server.engine.interceptor import EMPTY, ModelCall, Observation, ToolRequest
from dualclaw_server.engine.invoke import tool_context
from dualclaw_server.engine.model import (
    ModelChunk,
    ModelError,
    ModelOptions,
    ModelRequest,
    ModelResponse,
    Restart,
    TextDelta,
)
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import End
from dualclaw_server.engine.tool import Tool, tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.tracing import TracingInterceptor

from .traces import SPAN_ID, TRACE_ID, call_of, called, make_trace, model_call, response, result, user

OK_RESULT = Observation([ContentPart(text="found hunter2")])
DOWN = ModelError("MODEL_TIMEOUT", "slow", retryable=True)
ANSWER = response("hi hunter2", usage=Usage(input_tokens=10, output_tokens=2, cached_tokens=4), model="test-model-1")


def mask(value: object) -> object:
    return json.loads(json.dumps(value).replace("hunter2", "***"))


class Spans:
    """A tracer whose finished spans can be looked at; each must end once."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def interceptor(self, **options: object) -> TracingInterceptor:
        return TracingInterceptor(self.provider.get_tracer("test"), **options)  # type: ignore[arg-type]

    @property
    def all(self) -> Sequence[ReadableSpan]:
        found = self.exporter.get_finished_spans()
        assert len({span.context.span_id for span in found if span.context}) == len(found)
        return found

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all if span.name == name]
        return span


def says(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


def below(span: ReadableSpan, parent: ReadableSpan) -> bool:
    assert span.context is not None
    assert parent.context is not None
    return span.parent is not None and span.parent.span_id == parent.context.span_id


def request_of(trace: Trace, call_id: str = "c1") -> ToolRequest:
    @tool(name="look")
    async def look() -> str:
        """Look."""
        return ""

    call = call_of(trace, call_id, tool=look)
    return ToolRequest(trace, call, look, call.args, tool_context(call, trace))


async def stream(
    tracing: TracingInterceptor, trace: Trace, *chunks: ModelChunk | BaseException, stop: int = 99
) -> None:
    """Have the interceptor stand around an attempt whose reader stops after some chunks."""

    async def model(call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
        for chunk in chunks:
            assert not otel.get_current_span().get_span_context().is_valid, "a span is current over a yield"
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    async with aclosing(tracing.intercept_stream(model_call(trace), model)) as seen:
        async for _ in seen:
            assert not otel.get_current_span().get_span_context().is_valid, "a span is current over a yield"
            stop -= 1
            if stop == 0:
                break


async def test_a_segment_is_one_tree_in_the_trace_of_its_caller() -> None:
    """Agent below the caller's span, model and tool below the agent, with the conventions' names and attributes."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor()
    await tracing.on_agent_start(trace)
    await stream(tracing, trace, TextDelta("hi"), ANSWER)
    request = request_of(trace)
    await tracing.on_tool_call_start(trace, request.call)
    await tracing.on_tool_call_end(trace, request.call, OK_RESULT, None, 0.1)
    trace.checkpoint.stage = Stage.STAGE_END
    trace.add_usage(ANSWER.usage)
    await tracing.on_agent_end(trace)

    agent, chat, execute = spans.one("invoke_agent agent"), spans.one("chat test-model"), spans.one("execute_tool look")
    for span in spans.all:
        assert span.context is not None
        assert otel.format_trace_id(span.context.trace_id) == TRACE_ID
        assert span.status.status_code == StatusCode.UNSET
        assert says(span, "error.type") is None
    assert agent.parent is not None
    assert otel.format_span_id(agent.parent.span_id) == SPAN_ID
    assert below(chat, agent)
    assert below(execute, agent)
    assert (agent.kind, chat.kind, execute.kind) == (SpanKind.INTERNAL, SpanKind.CLIENT, SpanKind.INTERNAL)
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "_OTHER",
        "gen_ai.request.model": "test-model",
        "gen_ai.response.model": "test-model-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.stream": True,
        "gen_ai.conversation.id": "conversation",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "dualclaw.outcome": "ok",
    }
    assert {name: says(chat, name) for name in wanted} == wanted
    assert says(chat, "gen_ai.usage.reasoning.output_tokens") is None
    first = says(chat, "gen_ai.response.time_to_first_chunk")
    assert isinstance(first, float)
    wanted = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.call.id": "c1",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.description": "Look.",
        "gen_ai.tool.call.arguments": None,
        "gen_ai.tool.call.result": None,
    }
    assert {name: says(execute, name) for name in wanted} == wanted
    wanted = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "agent",
        "dualclaw.run.id": "run",
        "dualclaw.outcome": "finished",
        "gen_ai.usage.input_tokens": 10,
    }
    assert {name: says(agent, name) for name in wanted} == wanted
    assert tracing.live == 0


async def test_an_attempt_ends_once_however_it_ended() -> None:
    """Answer, failure, cancel, a reader that leaves, an outcome, a bug, an empty stream: one span, one final code."""
    for chunks, stop, code, error in (
        ((TextDelta("a"), ANSWER), 99, "ok", None),
        ((TextDelta("a"), ANSWER), 2, "ok", None),
        ((TextDelta("a"), ANSWER), 1, "cancelled", None),
        ((TextDelta("a"), DOWN), 99, "model.timeout", "model.timeout"),
        ((asyncio.CancelledError(),), 99, "cancelled", None),
        ((End("over"),), 99, "cancelled", None),
        ((ZeroDivisionError(),), 99, "failed", "failed"),
        ((TextDelta("a"),), 99, "failed", "failed"),
    ):
        spans, trace = Spans(), make_trace()
        tracing = spans.interceptor()
        with suppress(ModelError, asyncio.CancelledError, End, ZeroDivisionError):
            await stream(tracing, trace, *chunks, stop=stop)
        chat = spans.one("chat test-model")
        assert (says(chat, "dualclaw.outcome"), says(chat, "error.type")) == (code, error)
        assert chat.status.status_code == (StatusCode.ERROR if error else StatusCode.UNSET)


async def test_a_fallback_is_an_event_of_the_attempt() -> None:
    """A router's change of model does not end the span; it says which model went on and why."""
    spans, trace = Spans(), make_trace()
    await stream(spans.interceptor(), trace, Restart("other", DOWN), ANSWER)
    (event,) = spans.one("chat test-model").events
    assert event.name == "dualclaw.fallback"
    assert dict(event.attributes or {}) == {"gen_ai.request.model": "other", "error.type": "model.timeout"}


async def test_a_stream_may_be_closed_in_another_task() -> None:
    """A generator begun in one task and closed in another leaves no context behind and ends its span."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor()
    await tracing.on_agent_start(trace)

    async def model(call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
        yield TextDelta("a")
        yield ANSWER

    chunks = tracing.intercept_stream(model_call(trace), model)
    assert await asyncio.create_task(anext(chunks)) == TextDelta("a")  # type: ignore[arg-type]
    await asyncio.create_task(chunks.aclose())  # type: ignore[arg-type]
    assert says(spans.one("chat test-model"), "dualclaw.outcome") == "cancelled"


async def test_calls_beside_the_conversation_have_spans_and_are_current() -> None:
    """A model call that does not stream has a span of its own, with what libraries do in it below."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor(providers={"test-*": "deepseek"})
    options = ModelOptions(temperature=0.5, top_p=0.9, max_output_tokens=100, stop=("x",))
    call = ModelCall(trace, "test-model", ModelRequest([], options=options), 1)

    async def model(inner: ModelCall) -> ModelResponse:
        with spans.provider.get_tracer("http").start_as_current_span("POST"):
            return ANSWER

    assert await tracing.intercept_call(call, model) is ANSWER
    assert not otel.get_current_span().get_span_context().is_valid
    chat = spans.one("chat test-model")
    assert below(spans.one("POST"), chat)
    wanted = {
        "gen_ai.request.stream": False,
        "gen_ai.provider.name": "deepseek",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 100,
        "gen_ai.request.stop_sequences": ("x",),
    }
    assert {name: says(chat, name) for name in wanted} == wanted


async def test_a_tools_own_spans_hang_below_its_call() -> None:
    """A tool, in the loop or in a thread, runs with its span current; nothing is current behind it."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor()
    await tracing.on_agent_start(trace)
    request = request_of(trace)
    await tracing.on_tool_call_start(trace, request.call)

    def in_thread() -> str:
        with spans.provider.get_tracer("tool").start_as_current_span("query"):
            return "found"

    threaded: Tool = tool(in_thread)

    async def run(inner: ToolRequest) -> Observation:
        await threaded.call({}, inner.context)
        return OK_RESULT

    assert await tracing.intercept_tool(request, run) is OK_RESULT
    assert not otel.get_current_span().get_span_context().is_valid
    await tracing.on_tool_call_end(trace, request.call, OK_RESULT, None, 0.1)
    assert below(spans.one("query"), spans.one("execute_tool look"))


@pytest.mark.parametrize("shared", [True, False], ids=["one interceptor", "two interceptors"])
async def test_a_sub_agent_hangs_below_the_call_it_works_for(shared: bool) -> None:
    """With the same interceptor or one of its own, its agent span is a child of the call's span."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor()
    theirs = tracing if shared else spans.interceptor()
    await tracing.on_agent_start(trace)
    request = request_of(trace, "c")
    await tracing.on_tool_call_start(trace, request.call)

    async def run(inner: ToolRequest) -> Observation:
        helper = make_trace(parent=trace, agent="helper")
        await theirs.on_agent_start(helper)
        await stream_nothing(theirs, helper)
        await theirs.on_agent_end(helper)
        return OK_RESULT

    async def stream_nothing(interceptor: TracingInterceptor, below_trace: Trace) -> None:
        async def model(call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
            yield ANSWER

        async with aclosing(interceptor.intercept_stream(model_call(below_trace), model)) as chunks:
            assert [chunk async for chunk in chunks] == [ANSWER]

    await tracing.intercept_tool(request, run)
    await tracing.on_tool_call_end(trace, request.call, OK_RESULT, None, 0.1)
    await tracing.on_agent_end(trace)
    assert below(spans.one("invoke_agent helper"), spans.one("execute_tool look"))
    assert below(spans.one("chat test-model"), spans.one("invoke_agent helper"))
    assert (tracing.live, theirs.live) == (0, 0)


@pytest.mark.parametrize(
    ("observation", "error", "code", "failed"),
    [
        (OK_RESULT, None, "ok", False),
        (failure("PERMISSION_DENIED", "no"), None, "permission.denied", True),
        (EMPTY, asyncio.CancelledError(), "cancelled", False),
        (EMPTY, None, "suspended", False),
    ],
)
async def test_a_call_ends_with_its_code(
    observation: Observation, error: BaseException | None, code: str, failed: bool
) -> None:
    """Success, refusal, cancel and suspension are told apart; only an error marks the span as one."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor()
    await tracing.on_agent_start(trace)
    call = call_of(trace)
    call.state.phase = CallPhase.CALL_PHASE_SUSPENDED
    await tracing.on_tool_call_start(trace, call)
    await tracing.on_tool_call_end(trace, call, observation, error, 0.1)
    await tracing.on_tool_call_end(trace, call, observation, error, 0.1)
    span = spans.one("execute_tool look")
    assert says(span, "dualclaw.outcome") == code
    assert says(span, "error.type") == (code if failed else None)
    assert span.status.status_code == (StatusCode.ERROR if failed else StatusCode.UNSET)


async def test_what_has_no_end_hook_ends_with_its_agent() -> None:
    """A call that was left behind, and a segment this process had lost, do not stay open."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor()
    await tracing.on_agent_start(trace)
    await tracing.on_tool_call_start(trace, call_of(trace))
    assert tracing.live == 2
    trace.recovered = True
    await tracing.on_agent_start(trace)
    assert tracing.live == 1
    assert says(spans.one("execute_tool look"), "dualclaw.outcome") == "cancelled"
    await tracing.on_agent_end(trace)
    await tracing.on_agent_end(trace)
    assert tracing.live == 0
    assert [says(span, "dualclaw.recovered") for span in spans.all if span.name == "invoke_agent agent"] == [
        False,
        True,
    ]


async def interrupt(trace: Trace, tracing: TracingInterceptor) -> None:
    trace.checkpoint.questions.append(Question(item=InterruptItem(id="q")))


async def fail(trace: Trace, tracing: TracingInterceptor) -> None:
    with pytest.raises(ModelError):
        await stream(tracing, trace, DOWN)


async def recover_and_stop(trace: Trace, tracing: TracingInterceptor) -> None:
    await fail(trace, tracing)
    await stream(tracing, trace, ANSWER)


@pytest.mark.parametrize(
    ("before", "code", "failed"),
    [(interrupt, "interrupted", False), (fail, "model.timeout", True), (recover_and_stop, "stopped", False)],
)
async def test_an_agent_ends_with_its_code(
    before: Callable[[Trace, TracingInterceptor], object], code: str, failed: bool
) -> None:
    """A question is no error, a model that failed to the last is one, a failure that was overcome is none."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor()
    await tracing.on_agent_start(trace)
    await before(trace, tracing)  # type: ignore[misc]
    await tracing.on_agent_end(trace)
    agent = spans.one("invoke_agent agent")
    assert says(agent, "dualclaw.outcome") == code
    assert says(agent, "error.type") == (code if failed else None)
    assert agent.status.status_code == (StatusCode.ERROR if failed else StatusCode.UNSET)


async def test_a_segment_in_another_trace_links_to_the_first() -> None:
    """A resume belongs to the trace of who resumed and links to where the run began; recoveries share a parent."""
    spans, trace = Spans(), make_trace()
    tracing = spans.interceptor()
    trace.checkpoint.segment, trace.checkpoint.trace_id = 2, "c" * 32
    for _ in range(2):
        await tracing.on_agent_start(trace)
        await tracing.on_agent_end(trace)
    one, other = spans.all
    assert one.context is not None
    assert otel.format_trace_id(one.context.trace_id) == "c" * 32
    assert one.parent is not None
    assert other.parent is not None
    assert one.parent.span_id == other.parent.span_id != int(SPAN_ID, 16)
    (link,) = one.links
    assert otel.format_trace_id(link.context.trace_id) == TRACE_ID
    assert otel.format_span_id(link.context.span_id) == SPAN_ID


async def test_a_run_without_a_trace_begins_one() -> None:
    """Nothing breaks without ids; the spans of a segment still make one tree."""
    spans, trace = Spans(), make_trace()
    trace.record.ClearField("trace_id")
    trace.checkpoint.ClearField("trace_id")
    tracing = spans.interceptor()
    await tracing.on_agent_start(trace)
    await stream(tracing, trace, ANSWER)
    await tracing.on_agent_end(trace)
    assert spans.one("invoke_agent agent").parent is None
    assert below(spans.one("chat test-model"), spans.one("invoke_agent agent"))


@pytest.mark.parametrize("content", [True, False])
async def test_content_is_recorded_only_when_asked_for_and_masked(content: bool) -> None:
    """Messages, arguments and results appear in the conventions' form, without credentials; else nowhere."""
    spans = Spans()
    trace = make_trace([user("old hunter2"), called("x", args="{}"), result("x", "r")], [user("new", message_id="q")])
    tracing = spans.interceptor(content=content, mask=mask)
    await tracing.on_agent_start(trace)
    await stream(tracing, trace, ANSWER)
    call = call_of(trace, args='{"key": "hunter2"}')
    await tracing.on_tool_call_start(trace, call)
    await tracing.on_tool_call_end(trace, call, OK_RESULT, None, 0.1)
    await tracing.on_agent_end(trace)
    everything = " ".join(str(dict(span.attributes or {})) for span in spans.all)
    assert "hunter2" not in everything
    assert ("***" in everything) is content
    if content:
        chat, execute = spans.one("chat test-model"), spans.one("execute_tool look")
        told = json.loads(str(says(chat, "gen_ai.input.messages")))
        assert told[0] == {"role": "user", "parts": [{"type": "text", "content": "old ***"}]}
        assert told[1]["parts"] == [{"type": "tool_call", "id": "x", "name": "look", "arguments": "{}"}]
        assert told[2]["parts"] == [{"type": "tool_call_response", "id": "x", "response": "r"}]
        assert json.loads(str(says(chat, "gen_ai.output.messages")))[0]["finish_reason"] == "stop"
        assert says(execute, "gen_ai.tool.call.arguments") == '{"key": "***"}'
        assert says(execute, "gen_ai.tool.call.result") == '"found ***"'


async def test_a_mask_that_fails_hides_everything_and_breaks_nothing() -> None:
    """The span goes on without the content; without any mask content is refused at once."""

    def broken(value: object) -> object:
        raise ZeroDivisionError

    spans, trace = Spans(), make_trace()
    await stream(spans.interceptor(content=True, mask=broken), trace, ANSWER)
    assert says(spans.one("chat test-model"), "gen_ai.output.messages") == "null"
    with pytest.raises(ValueError, match="mask"):
        spans.interceptor(content=True)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["start", "end", "agent_start", "agent_end", "chat"]), st.integers(0, 2), st.integers(0, 1)
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(EVENTS)
async def test_no_order_of_hooks_leaves_a_span_open_or_ends_one_twice(events: Sequence[tuple[str, int, int]]) -> None:
    """Whatever is called when, for whichever of two runs: once the agents have ended, every span has, once."""
    spans = Spans()
    tracing = spans.interceptor()
    traces = [make_trace(run_id=str(number)) for number in range(2)]
    calls = [[call_of(trace, f"c{number}") for number in range(3)] for trace in traces]
    for event, number, run in events:
        trace = traces[run]
        if event == "start":
            await tracing.on_tool_call_start(trace, calls[run][number])
        elif event == "end":
            await tracing.on_tool_call_end(trace, calls[run][number], OK_RESULT, None, 0.0)
        elif event == "agent_start":
            await tracing.on_agent_start(trace)
        elif event == "agent_end":
            await tracing.on_agent_end(trace)
        else:
            await stream(tracing, trace, ANSWER)
    for trace in traces:
        await tracing.on_agent_end(trace)
    assert tracing.live == 0
    begun = sum(event in ("agent_start", "chat") for event, _, _ in events)
    assert sum(not span.name.startswith("execute_tool") for span in spans.all) == begun
    assert all(span.end_time is not None and says(span, "dualclaw.outcome") for span in spans.all)
