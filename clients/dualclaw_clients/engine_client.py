"""The way every client reaches the engine; gRPC itself is used here and in ``engine_link`` below it, nowhere else.

A call that is refused raises EngineError; a stream that was accepted is kept alive by ``run_stream``.

EngineError
  EngineUnreachable   no connection to an engine; nothing is known of what it would have said
  NotServed           the engine lacks the rpc that was called
"""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar

import grpc

from dualclaw import (
    Agent,
    AttachRequest,
    CancelRequest,
    Conversation,
    DeleteConversationRequest,
    GetAgentRequest,
    GetConversationRequest,
    GetRunRequest,
    InspectRunRequest,
    InspectRunResponse,
    InterceptorInfo,
    ListAgentsRequest,
    ListAgentsResponse,
    ListConversationsRequest,
    ListConversationsResponse,
    ListMessagesRequest,
    ListMessagesResponse,
    ListRunsRequest,
    ListRunsResponse,
    PurgeRunRequest,
    ReleaseRunRequest,
    ReleaseRunResponse,
    ResumeRequest,
    RetryRunRequest,
    Run,
    RunRequest,
    SetInterceptorEnabledRequest,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw_clients.engine_link import Call, GrpcCall, Link, lost, reraise_own_cancellation
from dualclaw_clients.run_stream import EngineUnreachable, NotServed, Reconnect, RunStream, StreamCall, StreamRequest

__all__ = ["EngineClient", "EngineUnreachable", "NotServed", "Reconnect", "RunStream", "new_request_id"]

_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_Metadata = tuple[tuple[str, str], ...]

UNARY_TIMEOUT = 30.0


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
        self._link = Link(self.target, self._credentials)

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

    async def inspect_run(self, run_id: str, *, token: str | None = None) -> InspectRunResponse:
        """Return a run from inside: who works on it, its frames, its open calls; for operators."""
        return await self._unary(self._link.operators().InspectRun, InspectRunRequest(run_id=run_id), token)

    async def release_run(self, run_id: str, *, token: str | None = None) -> ReleaseRunResponse:
        """Take a run from the process that works on it, or end its back-off; for operators."""
        return await self._unary(self._link.operators().ReleaseRun, ReleaseRunRequest(run_id=run_id), token)

    async def retry_run(self, run_id: str, *, request_id: str = "", token: str | None = None) -> Run:
        """Ask the question of a final run again and return the new run; for operators.

        ``request_id`` makes it idempotent; empty: a new one is made.
        """
        request = RetryRunRequest(run_id=run_id, request_id=request_id or new_request_id())
        return (await self._unary(self._link.operators().RetryRun, request, token)).run

    async def purge_run(self, run_id: str, *, token: str | None = None) -> None:
        """Purge the log, checkpoint and record of a final run; for operators."""
        await self._unary(self._link.operators().PurgeRun, PurgeRunRequest(run_id=run_id), token)

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
            answer = await method(request, metadata=self._call_metadata(token), timeout=UNARY_TIMEOUT)
            self._link.reached = True
            return answer
        except grpc.aio.AioRpcError as error:
            raise lost(error, self._link, request).error from None
        except asyncio.CancelledError:
            reraise_own_cancellation()
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
            call: GrpcCall
            match request:
                case RunRequest():
                    call = stub.Run(request, metadata=metadata, timeout=remaining)
                case ResumeRequest():
                    call = stub.Resume(request, metadata=metadata, timeout=remaining)
                case AttachRequest():
                    call = stub.Attach(request, metadata=metadata, timeout=remaining)
            return Call(call, self._link, request)

        return RunStream(open_call, request, reconnect=self.reconnect, timeout=timeout, place=self.target)


def _caller_metadata(tenant: str, subject: str) -> _Metadata:
    pairs = tuple((key, value) for key, value in (("dualclaw-tenant", tenant), ("dualclaw-subject", subject)) if value)
    for key, value in pairs:
        if not _is_ascii(value):
            raise FieldError({key: "must be printable ASCII"})
    return pairs


def _is_ascii(text: str) -> bool:
    return text.isascii() and text.isprintable() and text == text.strip()
