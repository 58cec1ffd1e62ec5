"""The way every client reaches the engine; the only module of ``dualclaw_clients`` that uses gRPC.

A call that is refused raises EngineError; a stream that was accepted is kept alive by ``run_stream``. Status
codes are judged here: the engine's own words carry an ErrorInfo, the transport's do not, and only the
transport's are a reason to send a start again.

EngineError
  EngineUnreachable   no connection to an engine; nothing is known of what it would have said
  NotServed           the engine lacks the rpc that was called
"""

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, cast

import grpc

from dualclaw import (
    Agent,
    AttachRequest,
    CancelRequest,
    Conversation,
    DeleteConversationRequest,
    EngineEvent,
    GetAgentRequest,
    GetConversationRequest,
    GetRunRequest,
    InterceptorInfo,
    ListAgentsRequest,
    ListAgentsResponse,
    ListConversationsRequest,
    ListConversationsResponse,
    ListMessagesRequest,
    ListMessagesResponse,
    ListRunsRequest,
    ListRunsResponse,
    ResumeRequest,
    Run,
    RunRequest,
    RunResponse,
    SetInterceptorEnabledRequest,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw.rpc import (
    AgentServiceAsyncStub,
    AgentServiceStub,
    ConversationServiceAsyncStub,
    ConversationServiceStub,
    EngineServiceAsyncStub,
    EngineServiceStub,
)
from dualclaw.status import DETAILS_KEY, error_from_rpc
from dualclaw_clients.run_stream import (
    EngineUnreachable,
    Lost,
    NotServed,
    Reconnect,
    RunStream,
    StreamCall,
    StreamRequest,
)

__all__ = ["EngineClient", "EngineUnreachable", "NotServed", "Reconnect", "RunStream", "new_request_id"]

_Code = grpc.StatusCode
_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_Metadata = tuple[tuple[str, str], ...]

RUN_ID_KEY = "dualclaw-run-id"
CONVERSATION_ID_KEY = "dualclaw-conversation-id"
MAX_RECEIVE_BYTES = 64 * 1024 * 1024
UNARY_TIMEOUT = 30.0
HANG_UP_TIMEOUT = 0.5

_START_LOST = frozenset({_Code.UNAVAILABLE, _Code.INTERNAL, _Code.CANCELLED})
_ATTACH_LOST = _START_LOST | {_Code.ABORTED, _Code.RESOURCE_EXHAUSTED, _Code.DEADLINE_EXCEEDED}
_ATTACH_LATER = frozenset({"STORE_UNAVAILABLE", "OVERLOADED", "QUOTA_EXCEEDED", "SLOW_CLIENT"})
_OPTIONAL = ResumeRequest | SetInterceptorEnabledRequest
"""Requests of rpcs that an engine may do without; one that has not even the others is none."""


def new_request_id() -> str:
    """Return a fresh UUIDv7: unique, and sortable by the time it was made."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


class EngineClient:
    """A connection to one engine, shared by all calls; use it as an async context manager, or close it.

    Args:
        target: HOST:PORT, or any name gRPC can resolve.
        token: API key or JWT of the calls that bring none of their own.
        tenant: tenant to act for; only the role service may name one.
        subject: person to act for; only the role service may name one.
        root_certificates: PEM of the authorities to trust; implies TLS.
        tls: True: TLS with the system's authorities.
        private_key: PEM of the client's key, for mutual TLS; with ``certificate_chain``.
        certificate_chain: PEM of the client's certificate, for mutual TLS.
        reconnect: how lost streams are taken up again.
        metadata: called for each call, in the caller's context; its pairs are added (``traceparent``, ...).
    """

    def __init__(
        self,
        target: str,
        *,
        token: str = "",
        tenant: str = "",
        subject: str = "",
        root_certificates: bytes | None = None,
        tls: bool = False,
        private_key: bytes | None = None,
        certificate_chain: bytes | None = None,
        reconnect: Reconnect | None = None,
        metadata: Callable[[], Iterable[tuple[str, str]]] | None = None,
    ) -> None:
        if not target.strip():
            raise ValueError("the engine's address is empty; give HOST:PORT")
        self.target = target.strip()
        self.reconnect = reconnect or Reconnect()
        self._credentials: grpc.ChannelCredentials | None = None
        if tls or root_certificates is not None:
            self._credentials = grpc.ssl_channel_credentials(root_certificates, private_key, certificate_chain)
        self._token = token
        self._caller = _caller_metadata(tenant, subject)
        self._metadata = metadata
        self._link = _Link(self.target, self._credentials)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end every call that is open on it."""
        await self._link.close()

    def acting_for(self, *, tenant: str = "", subject: str = "") -> "EngineClient":
        """Return a client that acts for somebody else over the same connection; closing either closes both."""
        other = EngineClient(
            self.target, token=self._token, tenant=tenant, subject=subject,
            reconnect=self.reconnect, metadata=self._metadata,
        )  # fmt: skip
        other._link = self._link
        return other

    def run(self, request: RunRequest, *, token: str | None = None, timeout: float | None = None) -> RunStream:
        """Start a run; the stream is its first segment.

        ``timeout`` is seconds the whole stream may take, reconnections included; None: as long as it takes.
        """
        copy = RunRequest()
        copy.CopyFrom(request)
        copy.request_id = copy.request_id or new_request_id()
        return self._stream(copy, token, timeout)

    def attach(
        self,
        run_id: str,
        *,
        after_seq: int = 0,
        wait: bool = False,
        token: str | None = None,
        timeout: float | None = None,
    ) -> RunStream:
        """Follow a run from ``after_seq`` on; ``wait``: over parked phases, until it is final."""
        return self._stream(AttachRequest(run_id=run_id, after_seq=after_seq, wait=wait), token, timeout)

    def resume(self, request: ResumeRequest, *, token: str | None = None, timeout: float | None = None) -> RunStream:
        """Answer an interrupted run; the stream is its next segment."""
        copy = ResumeRequest()
        copy.CopyFrom(request)
        copy.request_id = copy.request_id or new_request_id()
        return self._stream(copy, token, timeout)

    async def cancel(self, run_id: str, reason: str = "", *, token: str | None = None) -> Run:
        """Ask a run to end; the answer may still say RUNNING, its stream tells the end."""
        request = CancelRequest(run_id=run_id, reason=reason)
        return (await self._unary(self._link.engine().Cancel, request, token)).run

    async def get_run(self, run_id: str, *, token: str | None = None) -> Run:
        """Return a run."""
        return (await self._unary(self._link.engine().GetRun, GetRunRequest(run_id=run_id), token)).run

    async def list_runs(self, request: ListRunsRequest | None = None, *, token: str | None = None) -> ListRunsResponse:
        """Return a page of runs, newest first."""
        return await self._unary(self._link.engine().ListRuns, request or ListRunsRequest(), token)

    async def list_conversations(
        self, request: ListConversationsRequest | None = None, *, token: str | None = None
    ) -> ListConversationsResponse:
        """Return a page of conversations, the last changed first."""
        method = self._link.conversations().ListConversations
        return await self._unary(method, request or ListConversationsRequest(), token)

    async def get_conversation(self, conversation_id: str, *, token: str | None = None) -> Conversation:
        """Return a conversation."""
        request = GetConversationRequest(conversation_id=conversation_id)
        return (await self._unary(self._link.conversations().GetConversation, request, token)).conversation

    async def list_messages(self, request: ListMessagesRequest, *, token: str | None = None) -> ListMessagesResponse:
        """Return a page of a conversation's messages, the oldest first."""
        return await self._unary(self._link.conversations().ListMessages, request, token)

    async def delete_conversation(self, conversation_id: str, *, token: str | None = None) -> None:
        """Delete a conversation with its messages and runs."""
        request = DeleteConversationRequest(conversation_id=conversation_id)
        await self._unary(self._link.conversations().DeleteConversation, request, token)

    async def list_agents(
        self, request: ListAgentsRequest | None = None, *, token: str | None = None
    ) -> ListAgentsResponse:
        """Return a page of agents, the default one first."""
        return await self._unary(self._link.agents().ListAgents, request or ListAgentsRequest(), token)

    async def get_agent(self, agent: str, *, token: str | None = None) -> Agent:
        """Return an agent with its tools, interceptors, nodes and models."""
        return (await self._unary(self._link.agents().GetAgent, GetAgentRequest(agent=agent), token)).agent

    async def set_interceptor_enabled(
        self, agent: str, interceptor: str, enabled: bool, *, token: str | None = None
    ) -> InterceptorInfo:
        """Switch an interceptor for runs that start from now on; returns it as it is now."""
        request = SetInterceptorEnabledRequest(agent=agent, interceptor=interceptor, enabled=enabled)
        return (await self._unary(self._link.agents().SetInterceptorEnabled, request, token)).interceptor

    async def check(self) -> bool:
        """Say whether the engine calls itself healthy (grpc.health.v1, service ""); False too when none answers."""
        # Both messages are a byte or two (empty request; status = 1, SERVING), which spares a dependency.
        method = self._link.channel().unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=lambda request: request,
            response_deserializer=lambda response: response,
        )
        try:
            return bool(await self._unary(method, b"", None) == b"\x08\x01")
        except EngineError:
            return False

    async def _unary(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Req, _Resp], request: _Req, token: str | None
    ) -> _Resp:
        try:
            return await method(request, metadata=self._call_metadata(token), timeout=UNARY_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            raise _lost(error, self._link, request).error from None
        except asyncio.CancelledError:
            _reraise_own_cancellation()
            raise EngineUnreachable("the client was closed during the call") from None

    def _call_metadata(self, token: str | None) -> _Metadata:
        bearer = self._token if token is None else token
        pairs = list(self._caller)
        if bearer:
            if not _is_ascii(bearer):
                raise EngineError("UNAUTHENTICATED", "the API key holds characters that no key has")
            pairs.append(("authorization", f"Bearer {bearer}"))
        if self._metadata is not None:
            pairs += self._metadata()
        return tuple(pairs)

    def _stream(self, request: StreamRequest, token: str | None, timeout: float | None) -> RunStream:
        def open_call(request: StreamRequest, remaining: float | None) -> StreamCall:
            stub, metadata = self._link.engine(), self._call_metadata(token)
            call: _GrpcCall
            match request:
                case RunRequest():
                    call = stub.Run(request, metadata=metadata, timeout=remaining)
                case ResumeRequest():
                    call = stub.Resume(request, metadata=metadata, timeout=remaining)
                case AttachRequest():
                    call = stub.Attach(request, metadata=metadata, timeout=remaining)
            return _Call(call, self._link, request)

        return RunStream(open_call, request, reconnect=self.reconnect, timeout=timeout, place=self.target)


class _Call:
    """A streaming call of any of the three rpcs, as ``run_stream`` wants it."""

    def __init__(self, call: "_GrpcCall", link: "_Link", request: StreamRequest) -> None:
        self._call = call
        self._link = link
        self._request = request
        self._reading = False

    async def accepted(self) -> tuple[str, str] | None:
        found = {str(key): value for key, value in await self._guard(self._call.initial_metadata()) or ()}
        if RUN_ID_KEY not in found:
            return None
        return str(found[RUN_ID_KEY]), str(found.get(CONVERSATION_ID_KEY, ""))

    async def read(self) -> Sequence[EngineEvent] | None:
        self._reading = True
        try:
            message = await self._guard(self._call.read())
        finally:
            self._reading = False
        return None if message is grpc.aio.EOF else cast("RunResponse", message).events

    async def hang_up(self) -> None:
        self._call.cancel()
        if self._reading:  # by another task, which sees the end itself
            return
        # A call that is cancelled and never read leaves the spans of interceptors open.
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(HANG_UP_TIMEOUT):
                await self._call.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, TimeoutError):
            pass
        except asyncio.CancelledError:  # the call's own; unless the caller was cancelled meanwhile
            if task is not None and task.cancelling() > cancels:
                raise

    async def _guard(self, step: Awaitable[_Resp]) -> _Resp:
        try:
            return await step
        except grpc.aio.AioRpcError as error:
            raise _lost(error, self._link, self._request) from None
        except asyncio.CancelledError:
            _reraise_own_cancellation()
            gone = EngineUnreachable("the client was closed while the stream was open")
            raise Lost(gone, again=False, attach=False, connected=True) from None


class _GrpcCall(Protocol):
    async def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...

    async def read(self) -> object: ...

    def cancel(self) -> bool: ...


class _Link:
    """The channel of a client; made at the first call, because it belongs to the event loop of that call."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.target = target
        self.closed = False
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None

    def channel(self) -> grpc.aio.Channel:
        if self.closed:
            raise EngineUnreachable("this client is closed")
        if self._channel is None:
            options = _channel_options(self.target)
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.target, options)
            else:
                self._channel = grpc.aio.secure_channel(self.target, self._credentials, options)
        return self._channel

    def engine(self) -> EngineServiceAsyncStub:
        return EngineServiceStub(self.channel())

    def conversations(self) -> ConversationServiceAsyncStub:
        return ConversationServiceStub(self.channel())

    def agents(self) -> AgentServiceAsyncStub:
        return AgentServiceStub(self.channel())

    def is_down(self) -> bool:
        """Say whether the last try to connect failed; a connection that broke leaves the channel idle."""
        if self._channel is None or self.closed:
            return True
        return self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def close(self) -> None:
        self.closed = True
        if self._channel is not None:
            await self._channel.close()


def _channel_options(target: str) -> list[tuple[str, int]]:
    options = [
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
        # Retry policies from DNS would fight the rules above.
        ("grpc.service_config_disable_resolution", 1),
        # gRPC's own pause between connection attempts grows to two minutes; a restarted engine is back sooner.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Connections are this client's own: another client's failed attempts must not delay it.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if target.rpartition(":")[0] in {"127.0.0.1", "localhost", "[::1]"} or target.startswith("unix:"):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def _lost(error: grpc.aio.AioRpcError, link: _Link, request: object) -> Lost:
    """Judge a status: what it means to people, and what may be tried again."""
    code, connected = error.code(), not link.is_down()
    meant = error_from_rpc(error)
    if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return Lost(meant, again=False, attach=meant.reason in _ATTACH_LATER, connected=True)
    detail = {"detail": meant.message[:300]}
    if code is _Code.UNAVAILABLE and connected:
        meant = EngineUnreachable(f"the connection to the engine at {link.target} broke", detail)
    elif code is _Code.UNAVAILABLE:
        text = f"no engine answers at {link.target}; start it with `dualclaw-server` or set DUALCLAW_ENGINE"
        meant = EngineUnreachable(text, detail)
    elif code is _Code.UNIMPLEMENTED and isinstance(request, _OPTIONAL):
        # An rpc's request is named after it; buf's lint sees to that.
        meant = NotServed(link.target, type(request).__name__.removesuffix("Request"), meant.message)
    elif code is _Code.UNIMPLEMENTED:
        text = f"what answers at {link.target} is no dualclaw engine, or one of another version"
        hint = "Check the address; DUALCLAW_ENGINE or --engine names the engine."
        meant = EngineError("INTERNAL", text, {"grpc_code": code.name, "hint": hint, **detail})
    return Lost(meant, again=code in _START_LOST, attach=code in _ATTACH_LOST, connected=connected)


def _reraise_own_cancellation() -> None:
    """Re-raise the CancelledError at hand if this task is being cancelled; gRPC also raises it for a closed call."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise  # noqa: PLE0704  # called from except blocks only


def _caller_metadata(tenant: str, subject: str) -> _Metadata:
    pairs = tuple((key, value) for key, value in (("dualclaw-tenant", tenant), ("dualclaw-subject", subject)) if value)
    for key, value in pairs:
        if not _is_ascii(value):
            raise FieldError({key: "must be printable ASCII"})
    return pairs


def _is_ascii(text: str) -> bool:
    return text.isascii() and text.isprintable() and text == text.strip()
