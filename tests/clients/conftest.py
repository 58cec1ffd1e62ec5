"""A scripted engine on a real loopback socket, for tests of everything that talks to one.

``fake_engine.on("Run", [steps])`` scripts the next call of a streaming rpc; scripts are used up in order and
the last one stays. A script is a list of steps, played one after the other:

- an EngineEvent, or a list of them: one message. An event without seq gets the next one of the log; events
  without run_id and trace_id get the fake's. Every event of a ``Run`` or ``Resume`` script is in the log from
  the start of the call, also when the stream breaks before it: the run goes on without its reader.
- a number: a pause in seconds.            - an asyncio.Event: a pause until it is set.
- an EngineError: refused with its rich status.   - a grpc.StatusCode: ended with that bare status.
- "cut": the TCP connections break; what was sent before may be lost, unless an event tells that it was read.
- "hang": nothing more, until the client leaves.
- "headers": the initial metadata now (they come before the first message or pause by themselves).
- "no-headers": none are sent by this call (say so first).

Steps that refuse come before the headers when they are first, as in an engine that refuses a start. ``Attach``
without a script sends the log after ``after_seq`` and ends. Unary rpcs answer from ``runs``, ``conversations``,
``messages`` and ``agents``; ``refuse[rpc]`` makes one raise. ``calls`` records every call: rpc, request, metadata
and, once it is over, whether the client left it.
"""

# ruff: noqa: N802  # the servicers' methods are named by the protos

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import pytest
from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dualclaw import (
    Agent,
    AttachRequest,
    AttachResponse,
    CancelResponse,
    Conversation,
    DeleteConversationResponse,
    EngineEvent,
    GetAgentResponse,
    GetConversationResponse,
    GetRunResponse,
    InterceptorInfo,
    ListAgentsResponse,
    ListConversationsResponse,
    ListMessagesResponse,
    ListRunsResponse,
    Message,
    ResumeResponse,
    Run,
    RunResponse,
    SetInterceptorEnabledResponse,
)
from dualclaw.errors import EngineError
from dualclaw.rpc import (
    AgentServiceServicer,
    ConversationServiceServicer,
    EngineServiceServicer,
    add_agent_service,
    add_conversation_service,
    add_engine_service,
)
from dualclaw.status import code_of, trailing_of

Step = EngineEvent | Sequence[EngineEvent] | float | asyncio.Event | EngineError | grpc.StatusCode | str
_T = TypeVar("_T")


@dataclass
class Call:
    """One call the fake has got."""

    rpc: str
    request: ProtoMessage
    metadata: dict[str, str]
    time_remaining: float | None
    left: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine(EngineServiceServicer, ConversationServiceServicer, AgentServiceServicer):
    """See the module's text."""

    run_id = "0190aaaa-0000-7000-8000-00000000000a"
    conversation_id = "0190aaaa-0000-7000-8000-00000000000c"
    trace_id = "0af7651916cd43dd8448eb211c80319c"

    def __init__(self) -> None:
        self.log: list[EngineEvent] = []
        self.calls: list[Call] = []
        self.cancelled = asyncio.Event()
        self.runs: dict[str, Run] = {}
        self.conversations: dict[str, Conversation] = {}
        self.messages: dict[str, list[Message]] = {}
        self.agents: dict[str, Agent] = {}
        self.refuse: dict[str, EngineError] = {}
        self.health = health.aio.HealthServicer()
        self._scripts: dict[str, list[list[Step]]] = {}
        self._server: grpc.aio.Server | None = None
        self._listener: asyncio.Server | None = None
        self._place: socket.socket | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Condition()
        self._inner = self.port = 0

    @property
    def target(self) -> str:
        """Address for clients; stays the same over ``stop`` and ``start``."""
        return f"127.0.0.1:{self.port}"

    def on(self, rpc: str, steps: Sequence[Step]) -> None:
        """Script the next call of ``Run``, ``Resume`` or ``Attach``."""
        self._scripts.setdefault(rpc, []).append(list(steps))

    def calls_of(self, rpc: str) -> list[Call]:
        """Return the calls of one rpc in order."""
        return [call for call in self.calls if call.rpc == rpc]

    async def wait_for_call(self, rpc: str, number: int = 1, timeout: float = 60.0) -> Call:
        """Wait until an rpc has been called so often; returns that call."""
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(lambda: len(self.calls_of(rpc)) >= number)
        return self.calls_of(rpc)[number - 1]

    async def start(self) -> None:
        """Listen; after ``stop`` at the same port again."""
        if self._server is None:
            self._server = grpc.aio.server(options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)])
            add_engine_service(self, self._server)
            add_conversation_service(self, self._server)
            add_agent_service(self, self._server)
            health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
            await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
            self._inner = self._server.add_insecure_port("127.0.0.1:0")
            await self._server.start()
        # Clients come through a relay, because a gRPC server has no way to break a connection like a dying host.
        self._listener = await asyncio.start_server(self._relay, sock=self._place or _bound(0))
        self._place = None
        self.port = self._listener.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Break every open connection, as a dying host does."""
        for writer in self._open:
            writer.transport.abort()

    async def stop(self) -> None:
        """Break every connection and refuse new ones."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            # Bound and not listening: who connects is refused, and nobody else gets the port meanwhile.
            self._place = _bound(self.port)
        self.cut()
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: not self._open)

    async def close(self) -> None:
        """Stop for good."""
        await self.stop()
        if self._place is not None:
            self._place.close()
            self._place = None
        if self._server is not None:
            await self._server.stop(grace=None)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner)
        pipes = [
            asyncio.ensure_future(_pipe(reader, inner_writer)),
            asyncio.ensure_future(_pipe(inner_reader, writer)),
        ]
        self._open |= {writer, inner_writer}
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            for end in (writer, inner_writer):
                end.close()
                self._open.discard(end)
            await self._tell()

    async def Run(self, request, context):
        async for events in self._play("Run", request, context):
            yield RunResponse(events=events)

    async def Resume(self, request, context):
        async for events in self._play("Resume", request, context):
            yield ResumeResponse(events=events)

    async def Attach(self, request, context):
        async for events in self._play("Attach", request, context):
            yield AttachResponse(events=events)

    async def _play(self, rpc, request, context):
        call = await self._record(rpc, request, context)
        scripts = self._scripts.get(rpc)
        if scripts:
            steps = scripts.pop(0) if len(scripts) > 1 else scripts[0]
            messages = self._numbered(steps, is_start=rpc != "Attach")
        else:
            after = request.after_seq if isinstance(request, AttachRequest) else 0
            messages = ["headers", [event for event in self.log if event.seq > after]]
        sent_headers = False
        try:
            for step in messages:
                if step == "no-headers":
                    sent_headers = True
                    continue
                if not sent_headers and not isinstance(step, EngineError | grpc.StatusCode) and step != "cut":
                    sent_headers = True
                    await context.send_initial_metadata(
                        (("dualclaw-run-id", self.run_id), ("dualclaw-conversation-id", self.conversation_id))
                    )
                if isinstance(step, list):
                    if step:
                        yield step
                else:
                    await self._do(step, context)
        except (asyncio.CancelledError, GeneratorExit):
            call.left = True
            raise
        finally:
            call.over.set()

    async def _do(self, step, context):
        if isinstance(step, EngineError):
            await context.abort(code_of(step.reason), step.message, trailing_of(step))
        elif isinstance(step, grpc.StatusCode):
            await context.abort(step, "a status of the script")
        elif isinstance(step, asyncio.Event):
            await asyncio.wait_for(step.wait(), 100)
        elif step == "hang":
            await asyncio.sleep(100)
        elif step == "cut":
            self.cut()
            await asyncio.sleep(100)
        elif isinstance(step, int | float):
            await asyncio.sleep(step)
        else:
            assert step == "headers", f"no such step: {step!r}"

    def _numbered(self, steps, *, is_start):
        numbered = []
        for step in steps:
            if isinstance(step, EngineEvent) or (isinstance(step, Sequence) and not isinstance(step, str)):
                events = [step] if isinstance(step, EngineEvent) else list(step)
                numbered.append([self._stamped(event, is_start) for event in events])
            else:
                numbered.append(step)
        return numbered

    def _stamped(self, event, is_start):
        copy = EngineEvent()
        copy.CopyFrom(event)
        copy.run_id = copy.run_id or self.run_id
        copy.trace_id = copy.trace_id or self.trace_id
        if is_start and not copy.seq:
            copy.seq = len(self.log) + 1
        if copy.seq > len(self.log):
            self.log.append(copy)
        return copy

    async def _record(self, rpc, request, context):
        metadata = dict(context.invocation_metadata() or ())
        call = Call(rpc, request, metadata, context.time_remaining())
        self.calls.append(call)
        await self._tell()
        return call

    async def _tell(self):
        async with self._changed:
            self._changed.notify_all()

    async def _answer(self, rpc, request, context):
        (await self._record(rpc, request, context)).over.set()
        if rpc in self.refuse:
            error = self.refuse[rpc]
            await context.abort(code_of(error.reason), error.message, trailing_of(error))

    async def _found(self, items: dict[str, _T], name: str, error: EngineError, context) -> _T:
        if name not in items:
            await context.abort(code_of(error.reason), error.message, trailing_of(error))
        return items[name]

    async def Cancel(self, request, context):
        await self._answer("Cancel", request, context)
        self.cancelled.set()
        return CancelResponse(run=self.runs.get(request.run_id, Run(id=request.run_id)))

    async def GetRun(self, request, context):
        await self._answer("GetRun", request, context)
        unknown = EngineError("UNKNOWN_RUN", f"no run {request.run_id}")
        return GetRunResponse(run=await self._found(self.runs, request.run_id, unknown, context))

    async def ListRuns(self, request, context):
        await self._answer("ListRuns", request, context)
        fits = [
            run
            for run in self.runs.values()
            if (not request.states or run.state in request.states)
            and (not request.conversation_id or run.conversation_id == request.conversation_id)
        ]
        items, token = _page(fits, request)
        return ListRunsResponse(runs=items, next_page_token=token)

    async def ListConversations(self, request, context):
        await self._answer("ListConversations", request, context)
        items, token = _page(list(self.conversations.values()), request)
        return ListConversationsResponse(conversations=items, next_page_token=token)

    async def GetConversation(self, request, context):
        await self._answer("GetConversation", request, context)
        unknown = EngineError("UNKNOWN_CONVERSATION", f"no conversation {request.conversation_id}")
        found = await self._found(self.conversations, request.conversation_id, unknown, context)
        return GetConversationResponse(conversation=found)

    async def ListMessages(self, request, context):
        await self._answer("ListMessages", request, context)
        unknown = EngineError("UNKNOWN_CONVERSATION", f"no conversation {request.conversation_id}")
        await self._found(self.conversations, request.conversation_id, unknown, context)
        items, token = _page(self.messages.get(request.conversation_id, []), request)
        return ListMessagesResponse(messages=items, next_page_token=token)

    async def DeleteConversation(self, request, context):
        await self._answer("DeleteConversation", request, context)
        unknown = EngineError("UNKNOWN_CONVERSATION", f"no conversation {request.conversation_id}")
        await self._found(self.conversations, request.conversation_id, unknown, context)
        del self.conversations[request.conversation_id]
        return DeleteConversationResponse()

    async def ListAgents(self, request, context):
        await self._answer("ListAgents", request, context)
        items, token = _page(list(self.agents.values()), request)
        return ListAgentsResponse(agents=items, next_page_token=token)

    async def GetAgent(self, request, context):
        await self._answer("GetAgent", request, context)
        unknown = EngineError("UNKNOWN_AGENT", f"no agent {request.agent}")
        return GetAgentResponse(agent=await self._found(self.agents, request.agent, unknown, context))

    async def SetInterceptorEnabled(self, request, context):
        await self._answer("SetInterceptorEnabled", request, context)
        info = InterceptorInfo(name=request.interceptor, enabled=request.enabled, switchable=True)
        return SetInterceptorEnabledResponse(interceptor=info)


def _bound(port: int) -> socket.socket:
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", port))
    return place


def _page(items, request):
    start = int(request.page_token or 0)
    end = start + (request.page_size or 50)
    return items[start:end], str(end) if end < len(items) else ""


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


@pytest.fixture
async def fake_engine() -> AsyncIterator[FakeEngine]:
    """An engine that does what the test's script says."""
    engine = FakeEngine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
