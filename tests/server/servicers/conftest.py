"""A real server around an engine whose runs are written by hand: tests append frames, the rpcs stream them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dualclaw import (
    Agent,
    BusyPolicy,
    ContentPart,
    Done,
    EngineEvent,
    InterceptorInfo,
    Interrupt,
    InterruptItem,
    Message,
    ResumeRequest,
    Role,
    Run,
    RunRequest,
    RunResponse,
    RunState,
)
from dualclaw.errors import EngineError
from dualclaw.events import make_delta, make_done
from dualclaw.rpc import AgentServiceAsyncStub, ConversationServiceAsyncStub, EngineServiceAsyncStub
from dualclaw_server.app import EngineServer
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.store import Answers, Created, Frame, NewRun, RunKey
from dualclaw_server.servicers.access import Access, anonymous_access
from dualclaw_server.settings import Settings
from dualclaw_server.stores.memory import MemoryStore

RUNNING = RunState.RUN_STATE_RUNNING
PARKED = RunState.RUN_STATE_INTERRUPTED
SUCCEEDED = RunState.RUN_STATE_SUCCEEDED


def question(text: str = "hello", **fields: str) -> RunRequest:
    return RunRequest(message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)]), **fields)


def delta(text: str) -> EngineEvent:
    return make_delta(text)


def done(text: str = "", stop_reason: str = "finished") -> EngineEvent:
    return make_done(message_id="m", conversation_id="c", content=text, stop_reason=stop_reason)


TIMEOUT = 60.0
"""Seconds a test waits for anything; only a test that fails needs so many."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; TimeoutError when it does not come to be."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():  # noqa: ASYNC110  # what is watched has no event to wait for
            await asyncio.sleep(0.01)


class WatchedStore(MemoryStore):
    """A memory store that counts its followers and can make them late."""

    def __init__(self) -> None:
        super().__init__()
        self.following = self.followed = 0
        self.on_time = asyncio.Event()
        self.on_time.set()

    async def follow(self, key: RunKey, after: int) -> AsyncGenerator[Sequence[Frame], None]:
        self.following += 1
        self.followed += 1
        try:
            async with contextlib.aclosing(super().follow(key, after)) as batches:
                async for frames in batches:
                    await self.on_time.wait()
                    yield frames
        finally:
            self.following -= 1


class HandRuns:
    """An engine that does nothing by itself: ``write`` appends a frame of events to a run."""

    def __init__(self) -> None:
        self.store = WatchedStore()
        self.readers: Counter[RunKey] = Counter()
        self.started: list[tuple[Caller, RunRequest, TraceParent]] = []
        self.resumed: list[tuple[Caller, ResumeRequest, TraceParent]] = []
        self.failure: BaseException | None = None
        self.before_start = asyncio.Event()
        self.before_start.set()
        self.drained = asyncio.Event()

    async def start(self, caller: Caller, request: RunRequest, trace: TraceParent) -> Created:
        self.started.append((caller, request, trace))
        await self.before_start.wait()
        if self.failure is not None:
            raise self.failure
        key, conversation_id = RunKey(caller.tenant, new_id()), request.conversation_id or new_id()
        return await self.store.create(
            NewRun(
                key=key,
                conversation_id=conversation_id,
                new_conversation=not request.conversation_id,
                title="hello",
                request_id=request.request_id,
                fingerprint="f",
                record=b"r",
                run=Run(id=key.run_id, conversation_id=conversation_id, agent="assistant"),
                message=Message(id=new_id(), role=Role.ROLE_USER, parts=request.message.parts),
                on_busy=BusyPolicy.BUSY_POLICY_REJECT,
                replace_signal=b"",
            )
        )

    async def cancel(self, caller: Caller, run_id: str, reason: str, trace: TraceParent) -> Run:
        return (await self.store.head(RunKey(caller.tenant, run_id))).run

    @contextlib.contextmanager
    def attached(self, key: RunKey, *, starter: RunRequest | None = None) -> Iterator[None]:
        self.readers[key] += 1
        try:
            yield
        finally:
            self.readers[key] -= 1

    async def resume(self, caller: Caller, request: ResumeRequest, trace: TraceParent) -> Created:
        self.resumed.append((caller, request, trace))
        return await self.store.answer(
            Answers(
                key=RunKey(caller.tenant, request.run_id),
                interrupt_ids=tuple(decision.interrupt_id for decision in request.decisions),
                signal_id=new_id(),
                signal=b"",
                request_id=request.request_id,
                fingerprint="f",
            )
        )

    async def agents_info(self, caller: Caller) -> Sequence[Agent]:
        return [Agent(name=name, description=caller.tenant) for name in ("main", "zebra", "ant")]

    async def set_interceptor_enabled(
        self, caller: Caller, agent_name: str, name: str, *, enabled: bool
    ) -> InterceptorInfo:
        if "operator" not in caller.roles:
            raise EngineError("PERMISSION_DENIED", "no operator")
        return InterceptorInfo(name=f"{agent_name}/{name}", enabled=enabled)

    async def serve(self) -> None:
        await self.drained.wait()

    async def drain(self, grace: float) -> None:
        self.drained.set()

    async def write(
        self,
        key: RunKey,
        *events: EngineEvent,
        state: RunState.ValueType = RUNNING,
        ends: bool | None = None,
    ) -> None:
        """Append a frame; it ends the segment when its last event is terminal, unless ``ends`` says otherwise."""
        head = await self.store.head(key)
        for seq, event in enumerate(events, head.last_seq + 1):
            event.seq = seq
        terminal = bool(events) and events[-1].WhichOneof("payload") in {"done", "error"}
        frame = Frame(
            epoch=1,
            first_seq=head.last_seq + 1,
            count=len(events),
            body=RunResponse(events=events).SerializeToString(),
            state=state,
            ends_segment=terminal if ends is None else ends,
        )
        await self.store.append(key, frame, head.version)

    async def park(self, key: RunKey, *items: InterruptItem) -> None:
        """End a run's segment with questions."""
        head = await self.store.head(key)
        run = Run()
        run.CopyFrom(head.run)
        run.interrupts.extend(items)
        asked = [EngineEvent(interrupt=Interrupt(items=items)), EngineEvent(done=Done())]
        for seq, event in enumerate(asked, head.last_seq + 1):
            event.seq = seq
        frame = Frame(
            epoch=1,
            first_seq=head.last_seq + 1,
            count=len(asked),
            body=RunResponse(events=asked).SerializeToString(),
            state=RunState.RUN_STATE_INTERRUPTED,
            durable=True,
            ends_segment=True,
            run=run,
        )
        await self.store.append(key, frame, head.version)


@dataclass
class Bench:
    """A served HandRuns with stubs to call it."""

    runs: HandRuns
    server: EngineServer
    channel: grpc.aio.Channel
    spans: InMemorySpanExporter
    engine: EngineServiceAsyncStub = field(init=False)
    conversations: ConversationServiceAsyncStub = field(init=False)
    agents: AgentServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.engine = EngineServiceAsyncStub(self.channel)
        self.conversations = ConversationServiceAsyncStub(self.channel)
        self.agents = AgentServiceAsyncStub(self.channel)

    async def new_run(self, tenant: str = "default") -> RunKey:
        """Create a run that no rpc has started."""
        caller = Caller(tenant, "test", frozenset({"user"}))
        return (await self.runs.start(caller, question(), TraceParent("0" * 31 + "1"))).head.key

    async def settle(self) -> None:
        """Wait until no call is at work."""
        await until(lambda: not self.server.open_calls)

    async def span(self) -> ReadableSpan:
        """Return the one finished span; more than one, or none, fails."""
        await self.settle()
        await until(lambda: bool(self.spans.get_finished_spans()))
        await asyncio.sleep(0.05)
        (span,) = self.spans.get_finished_spans()
        return span


Serve = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def serve() -> Serve:
    """Return a function that serves HandRuns on a free port while its context lasts."""

    @contextlib.asynccontextmanager
    async def serving(
        *,
        patience: float = 60.0,
        access: Access | None = None,
        min_ping_interval: float = 10.0,
        client_options: Sequence[tuple[str, int]] = (),
        grace: float = 0.0,
    ) -> AsyncIterator[Bench]:
        spans, provider, runs = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False), HandRuns()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        await runs.store.open()
        server = EngineServer(
            Settings(listen="127.0.0.1:0"),
            runs,
            access or anonymous_access(loopback=True),
            provider=provider,
            patience=patience,
            min_ping_interval=min_ping_interval,
        )
        await server.start()
        try:
            async with grpc.aio.insecure_channel(server.address, options=client_options) as channel:
                yield Bench(runs, server, channel, spans)
        finally:
            await server.drain(grace)
            await runs.store.close()

    return serving


@pytest.fixture
async def bench(serve: Serve) -> AsyncIterator[Bench]:
    """A served HandRuns with the defaults."""
    async with serve() as made:
        yield made
