"""Spans of runs, model calls and tool calls, by OpenTelemetry's conventions for generative AI.

=====================  ==========  ==================================================================
``invoke_agent NAME``  INTERNAL    an agent in one segment; below the caller's span, or the tool call it works for
``chat MODEL``         CLIENT      one attempt at a model call; below its agent
``execute_tool NAME``  INTERNAL    one tool call; below its agent
=====================  ==========  ==================================================================

Rules and their reasons:

- All spans of a segment belong to one trace, the one its events name. The parent is passed explicitly, never taken
  from whatever is current: hooks run in tasks of their own. The one exception is a sub-agent whose interceptor is
  another object than its caller's; it takes the current span when that is of the same trace.
- No span is current over a ``yield``, where the code that goes on may be anybody's. A tool runs with its span
  current, and so does a model call that does not stream: the spans of libraries in there belong below.
- Every span ends once: on its end hook, with how it ended in ``dualclaw.outcome`` and, where that is an error, in
  ``error.type``; what has no end hook any more ends with its agent.
- Spans at work are the one state kept outside of the trace: they are of this process, and a crash loses them.
- A segment whose caller named no span hangs below a span id made from the run and the segment, so that a recovery
  joins it. A segment in another trace than the run's first links to that.
- Texts of the conversation are recorded only with ``content``, and then masked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from dualclaw import Usage
from dualclaw.errors import diagnosis_code
from dualclaw.events import canonical_json
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import (
    AnswerNext,
    Interceptor,
    ModelCall,
    ModelNext,
    Observation,
    ToolNext,
    ToolRequest,
)
from dualclaw_server.engine.model import ModelChunk, ModelError, ModelResponse, Restart
from dualclaw_server.engine.outcome import Outcome
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.codes import (
    BROKEN_OFF,
    CANCELLED,
    FAILED,
    OK,
    RUN_ENDINGS,
    SUSPENDED,
    call_code,
    run_code,
)
from dualclaw_server.interceptors.genai import PROVIDERS, UNKNOWN_PROVIDER, message_data, usage_attributes

log = logging.getLogger(__name__)

_NO_ERROR = frozenset({OK, SUSPENDED, CANCELLED})
_Key = tuple[str, str, str]
"""Tenant, run, and the call an agent works for."""


@dataclass(slots=True)
class _Agent:
    """An agent's spans at work."""

    span: Span
    tools: dict[str, Span] = field(default_factory=dict)
    failure: str = ""
    """Why its last model call failed; empty: it did not."""


class _Chat:
    """The span of one attempt at a model call; ends once."""

    def __init__(self, span: Span, agent: _Agent | None) -> None:
        self.span = span
        self._agent = agent
        self._began = time.monotonic()
        self._first = True
        self._ended = False

    def chunk(self, chunk: ModelChunk) -> None:
        """Note what arrives."""
        if isinstance(chunk, Restart):
            reason = diagnosis_code(chunk.error.reason)
            self.span.add_event("dualclaw.fallback", {"gen_ai.request.model": chunk.model, "error.type": reason})
        elif self._first:
            self._first = False
            self.span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._began)

    def end(self, code: str) -> None:
        """End it, unless it has ended."""
        if self._ended:
            return
        self._ended = True
        if self._agent is not None:
            self._agent.failure = "" if code in _NO_ERROR else code
        _end(self.span, code)


class TracingInterceptor(Interceptor):
    """Makes spans. Without an SDK at work they cost next to nothing.

    Args:
        tracer: makes the spans; None: the global provider's.
        content: True: messages, arguments and results are recorded, as ``mask`` leaves them.
        mask: takes credentials out of JSON data; needed for ``content``.
        providers: names of providers by glob of model names, before ``PROVIDERS``.
        order: almost the outermost by default.

    Raises ValueError for content without a mask.
    """

    def __init__(
        self,
        tracer: otel.Tracer | None = None,
        *,
        content: bool = False,
        mask: Callable[[object], object] | None = None,
        providers: Mapping[str, str] = MappingProxyType({}),
        name: str = "",
        order: int = -900,
        enabled: bool = True,
        switchable: bool = False,
        fail_closed: bool = False,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled, switchable=switchable, fail_closed=fail_closed)
        if content and mask is None:
            raise ValueError("content of conversations is traced only through a mask")
        self._tracer = tracer or otel.get_tracer("dualclaw_server")
        self._content = content
        self._masked = mask
        self._providers = {**providers, **{k: v for k, v in PROVIDERS.items() if k not in providers}}
        self._agents: dict[_Key, _Agent] = {}

    @property
    def live(self) -> int:
        """Spans at work."""
        return sum(1 + len(agent.tools) for agent in self._agents.values())

    # The run

    async def on_agent_start(self, trace: Trace) -> None:
        """Begin an agent's span."""
        self._close(_key(trace), CANCELLED)  # of a segment this process had lost
        attributes: dict[str, str | int | bool] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": trace.agent,
            "gen_ai.conversation.id": trace.conversation_id,
            "dualclaw.run.id": trace.key.run_id,
            "dualclaw.tenant": trace.key.tenant,
            "dualclaw.segment": trace.segment,
            "dualclaw.recovered": trace.recovered,
        }
        span = self._tracer.start_span(
            f"invoke_agent {trace.agent}", self._above(trace), attributes=attributes, links=_links(trace)
        )
        self._agents[_key(trace)] = _Agent(span)

    async def on_agent_end(self, trace: Trace) -> None:
        """End an agent's span and whatever is open below it."""
        self._close(_key(trace), run_code(trace), trace.usage)

    # The model

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        """Stand around an attempt that streams; its span is not current meanwhile."""
        chat = self._chat(call, streams=True)
        with _ending(chat):
            async with aclosing(call_next(call)) as chunks:
                async for chunk in chunks:
                    chat.chunk(chunk)
                    if isinstance(chunk, ModelResponse):
                        self._answered(chat, chunk)
                    yield chunk
            chat.end(FAILED)  # it has ended before, if there was an answer

    async def intercept_call(self, call: ModelCall, call_next: AnswerNext) -> ModelResponse:
        """Stand around an attempt that does not stream."""
        chat = self._chat(call, streams=False)
        with _ending(chat):
            with _current(chat.span):
                response = await call_next(call)
            self._answered(chat, response)
        return response

    # Tools

    async def on_tool_call_start(self, trace: Trace, call: Call) -> None:
        """Begin a call's span."""
        agent = self._agents.get(_key(trace))
        if agent is None:
            return
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.call.id": call.id,
            "gen_ai.tool.type": "datastore" if call.tool is not None and call.tool.kind == "kb" else "function",
            "gen_ai.agent.name": trace.agent,
        }
        if call.tool is not None and call.tool.description:
            attributes["gen_ai.tool.description"] = call.tool.description
        if self._content:
            attributes["gen_ai.tool.call.arguments"] = self._json(dict(call.args))
        span = self._tracer.start_span(f"execute_tool {call.name}", self._below(trace), attributes=attributes)
        if (earlier := agent.tools.pop(call.id, None)) is not None:
            _end(earlier, CANCELLED)
        agent.tools[call.id] = span

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        """Run a tool with its span current."""
        agent = self._agents.get(_key(request.trace))
        span = agent.tools.get(request.call.id) if agent is not None else None
        if span is None:
            return await call_next(request)
        with _current(span):
            return await call_next(request)

    async def on_tool_call_end(
        self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
    ) -> None:
        """End a call's span."""
        agent = self._agents.get(_key(trace))
        span = agent.tools.pop(call.id, None) if agent is not None else None
        if span is None:
            return
        if self._content and observation.parts:
            span.set_attribute("gen_ai.tool.call.result", self._json(observation.text))
        _end(span, call_code(trace, call, observation, error))

    # How it works

    def _close(self, key: _Key, code: str, usage: Usage | None = None) -> None:
        agent = self._agents.pop(key, None)
        if agent is None:
            return
        for span in agent.tools.values():
            _end(span, CANCELLED)
        agent.span.set_attributes(usage_attributes(usage))
        if code == BROKEN_OFF and agent.failure:
            code = agent.failure
        _end(agent.span, code, failed=code not in RUN_ENDINGS)

    def _above(self, trace: Trace) -> Context:
        """Return what an agent's span hangs below."""
        if trace.parent is not None:
            caller = self._agents.get(_key(trace.parent))
            if caller is not None and trace.call_id in caller.tools:
                return otel.set_span_in_context(caller.tools[trace.call_id], Context())
            current = otel.get_current_span()
            if otel.format_trace_id(current.get_span_context().trace_id) == _trace_id(trace):
                return otel.set_span_in_context(current, Context())
        context = _caller_of(trace, _trace_id(trace), trace.segment)
        return otel.set_span_in_context(NonRecordingSpan(context), Context()) if context is not None else Context()

    def _below(self, trace: Trace) -> Context:
        """Return what the spans of an agent's calls hang below."""
        agent = self._agents.get(_key(trace))
        if agent is None:
            return self._above(trace)
        return otel.set_span_in_context(agent.span, Context())

    def _chat(self, call: ModelCall, *, streams: bool) -> _Chat:
        options = call.request.options
        attributes: dict[str, str | int | float | bool | tuple[str, ...]] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": self._provider(call.model),
            "gen_ai.request.model": call.model,
            "gen_ai.request.stream": streams,
            "gen_ai.agent.name": call.trace.agent,
            "gen_ai.conversation.id": call.trace.conversation_id,
            "dualclaw.attempt": call.attempt,
        }
        for name, value in (
            ("temperature", options.temperature),
            ("top_p", options.top_p),
            ("max_tokens", options.max_output_tokens),
            ("stop_sequences", options.stop or None),
        ):
            if value is not None:
                attributes[f"gen_ai.request.{name}"] = value
        if self._content:
            attributes["gen_ai.input.messages"] = self._json(
                [message_data(message) for message in call.request.messages]
            )
            system = [{"type": "text", "content": call.request.instructions}]
            attributes["gen_ai.system_instructions"] = self._json(system)
        span = self._tracer.start_span(
            f"chat {call.model}", self._below(call.trace), SpanKind.CLIENT, attributes=attributes
        )
        return _Chat(span, self._agents.get(_key(call.trace)))

    def _provider(self, model: str) -> str:
        found = (provider for glob, provider in self._providers.items() if fnmatchcase(model, glob))
        return next(found, UNKNOWN_PROVIDER)

    def _answered(self, chat: _Chat, response: ModelResponse) -> None:
        chat.span.set_attribute("gen_ai.response.finish_reasons", (response.finish_reason,))
        for name, text in (("model", response.model), ("id", response.request_id)):
            if text:
                chat.span.set_attribute(f"gen_ai.response.{name}", text)
        chat.span.set_attributes(usage_attributes(response.usage))
        if self._content:
            answer = [{**message_data(response.message), "finish_reason": response.finish_reason}]
            chat.span.set_attribute("gen_ai.output.messages", self._json(answer))
        chat.end(OK)

    def _json(self, value: object) -> str:
        try:
            return canonical_json(self._masked(value) if self._masked is not None else None)
        except Exception:
            log.exception("a mask of traces failed; what it was given is left out")
            return "null"


@contextmanager
def _ending(chat: _Chat) -> Iterator[None]:
    """End a span with what is raised."""
    try:
        yield
    except ModelError as error:
        chat.end(diagnosis_code(error.reason))
        raise
    except (asyncio.CancelledError, GeneratorExit, Outcome):
        chat.end(CANCELLED)
        raise
    except BaseException:
        chat.end(FAILED)
        raise


@contextmanager
def _current(span: Span) -> Iterator[None]:
    """Have a span current within one task; it is neither ended nor marked."""
    with otel.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        yield


def _end(span: Span, code: str, *, failed: bool | None = None) -> None:
    """End a span with how it ended; ``failed`` None: as the code says."""
    span.set_attribute("dualclaw.outcome", code)
    if code not in _NO_ERROR if failed is None else failed:
        span.set_attribute("error.type", code)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def _key(trace: Trace) -> _Key:
    return (trace.key.tenant, trace.key.run_id, trace.call_id)


def _trace_id(trace: Trace) -> str:
    return trace.root.checkpoint.trace_id or trace.record.trace_id


def _caller_of(trace: Trace, trace_id: str, segment: int) -> SpanContext | None:
    """Return the span a segment was asked for in; None: the run has no trace."""
    if not trace_id:
        return None
    record = trace.record
    span_id = record.parent_span_id if trace_id == record.trace_id else ""
    if not span_id:
        seed = "\x00".join((trace.key.tenant, trace.key.run_id, str(segment)))
        span_id = hashlib.sha256(seed.encode()).hexdigest()[:16]
    context = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(1))
    return context if context.is_valid else None


def _links(trace: Trace) -> tuple[Link, ...]:
    """Return a link to the run's first trace from a segment in another one."""
    first = trace.record.trace_id
    if trace.parent is not None or not first or _trace_id(trace) == first:
        return ()
    context = _caller_of(trace, first, 1)
    return (Link(context),) if context is not None else ()
