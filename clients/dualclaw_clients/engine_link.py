"""The connection under the engine client: its channel, its calls, and what their statuses mean.

Status codes are judged here: the engine's own words carry an ErrorInfo, the transport's do not, and only the
transport's are a reason to send a start again.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import grpc

from dualclaw import (
    EngineEvent,
    InspectRunRequest,
    PurgeRunRequest,
    ReleaseRunRequest,
    ResumeRequest,
    RetryRunRequest,
    RunResponse,
    SetInterceptorEnabledRequest,
)
from dualclaw.errors import EngineError
from dualclaw.rpc import (
    AgentServiceAsyncStub,
    AgentServiceStub,
    ConversationServiceAsyncStub,
    ConversationServiceStub,
    EngineServiceAsyncStub,
    EngineServiceStub,
    OperatorServiceAsyncStub,
    OperatorServiceStub,
)
from dualclaw.status import DETAILS_KEY, error_from_rpc
from dualclaw_clients.run_stream import EngineUnreachable, Lost, NotServed, StreamRequest

_Code = grpc.StatusCode
_EOF = grpc.aio.EOF

RUN_ID_KEY = "dualclaw-run-id"
CONVERSATION_ID_KEY = "dualclaw-conversation-id"
MAX_RECEIVE_BYTES = 64 * 1024 * 1024
HANG_UP_TIMEOUT = 0.5

_START_LOST = frozenset({_Code.UNAVAILABLE, _Code.INTERNAL, _Code.CANCELLED})
_ATTACH_LOST = _START_LOST | {_Code.ABORTED, _Code.RESOURCE_EXHAUSTED, _Code.DEADLINE_EXCEEDED}
_ATTACH_LATER = frozenset({"STORE_UNAVAILABLE", "OVERLOADED", "QUOTA_EXCEEDED", "SLOW_CLIENT"})
_OPTIONAL = (
    ResumeRequest
    | SetInterceptorEnabledRequest
    | InspectRunRequest
    | ReleaseRunRequest
    | RetryRunRequest
    | PurgeRunRequest
)
"""Requests of rpcs that an engine may do without; one that has not even the others is none."""


class Link:
    """The channel of a client; made at the first call, because it belongs to the event loop of that call."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.target = target
        self.closed = False
        self.reached = False
        """An engine has answered a call."""
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._engine: EngineServiceAsyncStub | None = None

    def channel(self) -> grpc.aio.Channel:
        """Return the channel, made if it is the first call."""
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
        """Return the stub of EngineService; one for all calls, because making it costs more than a call."""
        channel = self.channel()
        if self._engine is None:
            self._engine = EngineServiceStub(channel)
        return self._engine

    def conversations(self) -> ConversationServiceAsyncStub:
        """Return the stub of ConversationService."""
        return ConversationServiceStub(self.channel())

    def agents(self) -> AgentServiceAsyncStub:
        """Return the stub of AgentService."""
        return AgentServiceStub(self.channel())

    def operators(self) -> OperatorServiceAsyncStub:
        """Return the stub of OperatorService."""
        return OperatorServiceStub(self.channel())

    def is_down(self) -> bool:
        """Say whether the last try to connect failed; a connection that broke leaves the channel idle."""
        if self._channel is None or self.closed:
            return True
        return self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def close(self) -> None:
        """Close the channel and end every call on it."""
        self.closed = True
        if self._channel is not None:
            await self._channel.close()


class Call:
    """A streaming call of any of the three rpcs, as ``run_stream`` wants it."""

    __slots__ = ("_call", "_link", "_reading", "_request")

    def __init__(self, call: "GrpcCall", link: "Link", request: StreamRequest) -> None:
        self._call = call
        self._link = link
        self._request = request
        self._reading = False

    async def accepted(self) -> tuple[str, str] | None:
        """Wait for the headers; run id and conversation id, None when they name no run."""
        try:
            found = {str(key): value for key, value in await self._call.initial_metadata() or ()}
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._judged(error) from None
        if RUN_ID_KEY not in found:
            return None
        self._link.reached = True
        return str(found[RUN_ID_KEY]), str(found.get(CONVERSATION_ID_KEY, ""))

    async def read(self) -> Sequence[EngineEvent] | None:
        """Return the events of the next message; None at an end with OK."""
        self._reading = True
        try:
            message = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._judged(error) from None
        finally:
            self._reading = False
        return None if message is _EOF else cast("RunResponse", message).events

    async def hang_up(self) -> None:
        """End the call at once and see it end."""
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

    def _judged(self, error: grpc.aio.AioRpcError | asyncio.CancelledError) -> Lost:
        """Return what the error at hand means; raises it again if it is the reader's own cancellation."""
        if isinstance(error, grpc.aio.AioRpcError):
            return lost(error, self._link, self._request)
        reraise_own_cancellation()
        gone = EngineUnreachable("the client was closed while the stream was open")
        return Lost(gone, again=False, attach=False, connected=True)


class GrpcCall(Protocol):
    """What the calls of gRPC have in common."""

    async def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Wait for the headers."""

    async def read(self) -> object:
        """Return the next message, or EOF."""

    def cancel(self) -> bool:
        """End the call."""


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


def lost(error: grpc.aio.AioRpcError, link: Link, request: object) -> Lost:
    """Judge a status: what it means to people, and what may be tried again."""
    code, connected = error.code(), not link.is_down()
    meant = error_from_rpc(error)
    if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        link.reached = True
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
    return Lost(meant, again=code in _START_LOST, attach=code in _ATTACH_LOST, connected=connected, known=link.reached)


def reraise_own_cancellation() -> None:
    """Re-raise the CancelledError at hand if this task is being cancelled; gRPC also raises it for a closed call."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise  # noqa: PLE0704  # called from except blocks only
