"""Raw gRPC to an engine: every status, every event and every fault as it came.

``engine_client`` would be the wrong tool here: it attaches again, drops what repeats and explains statuses, which is
all there to hide what the kit looks for. So responses are read as bytes and parsed here, where what is no message of
the contract becomes a fault that is told, and nothing is ever tried twice.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from google.rpc import error_details_pb2, status_pb2

from dualclaw import AttachRequest, EngineEvent, ResumeRequest, RunRequest, RunResponse
from dualclaw.status import DETAILS_KEY
from dualclaw_clients.conformance.rpcs import RPC_OF
from dualclaw_clients.conformance.seen import Exchange, Status

_M = TypeVar("_M", bound=ProtoMessage)
StreamRequest = RunRequest | ResumeRequest | AttachRequest

MOST_EVENTS = 20_000
"""Events of a stream that are read; no scenario has a fifth of it."""
MOST_BYTES = 32 * 1024 * 1024
"""Bytes of a stream that are read, and of one message."""
_OPTIONS = [
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]


class OpenStream:
    """A streaming call that is open: read it as far as you like, act in between, read on."""

    def __init__(
        self, rpc: str, request: ProtoMessage, call: "grpc.aio.UnaryStreamCall[ProtoMessage, bytes]", limit: float
    ):
        self._rpc = rpc
        self._request = request
        self._call = call
        self._limit = limit
        self._events: list[EngineEvent] = []
        self._faults: list[str] = []
        self._status: Status | None = None
        self._late = False
        self._bytes = 0

    @property
    def events(self) -> Sequence[EngineEvent]:
        """What has come so far."""
        return self._events

    async def until(self, enough: Callable[[Sequence[EngineEvent]], bool]) -> bool:
        """Read until what has come is enough; False when the stream ended, or its time, before that."""
        try:
            async with asyncio.timeout(self._limit):
                while not enough(self._events):
                    if self._status is not None or not await self._read():
                        return False
        except TimeoutError:
            self._late = True
            return False
        return True

    async def rest(self) -> Exchange:
        """Read to the end and return the whole exchange."""
        await self.until(lambda _: False)
        return self.leave()

    def leave(self) -> Exchange:
        """Hang up, if it is open, and return what has come."""
        if self._status is None:
            self._call.cancel()
        return Exchange(
            self._rpc,
            self._request,
            tuple(self._events),
            status=self._status,
            late=self._late,
            faults=tuple(self._faults),
        )

    async def _read(self) -> bool:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._status = status_of(error)
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._status = Status("CANCELLED", "the channel was closed")
            return False
        if not isinstance(data, bytes):
            self._status = Status("OK")
            return False
        number = len(self._events) + 1
        self._bytes += len(data)
        if number > MOST_EVENTS or self._bytes > MOST_BYTES:
            self._faults.append(f"the stream was left after {number - 1} events, for it has no end")
            raise TimeoutError
        try:
            events = RunResponse.FromString(data).events  # the three responses are the same bytes
        except DecodeError as error:
            self._faults.append(f"the message after event {number - 1} is no {self._rpc}Response: {error}")
            return True
        if not events:
            self._faults.append(f"the message after event {number - 1} has no events")
        self._events.extend(events)
        return True


class EngineProbe:
    """A channel to the server under test; use it as an async context manager.

    Args:
        target: HOST:PORT.
        key: shown as ``authorization: Bearer KEY``; "" for none.
        credentials: of TLS; None: plain text.
        timeout: seconds any call may take.
    """

    def __init__(
        self, target: str, *, key: str = "", credentials: grpc.ChannelCredentials | None = None, timeout: float = 30.0
    ) -> None:
        self.target = target
        self.timeout = timeout
        self.key = key
        self._credentials = credentials
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        options = list(_OPTIONS)
        if self.target.rpartition(":")[0] in {"127.0.0.1", "localhost", "[::1]"}:
            options.append(("grpc.enable_http_proxy", 0))
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self.target, options)
        else:
            self._channel = grpc.aio.secure_channel(self.target, self._credentials, options)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    def as_caller(self, key: str) -> "EngineProbe":
        """Return a probe of the same server that shows another key, or none; it has a channel of its own."""
        return EngineProbe(self.target, key=key, credentials=self._credentials, timeout=self.timeout)

    @contextlib.asynccontextmanager
    async def open(self, request: StreamRequest) -> AsyncIterator[OpenStream]:
        """Start a streaming call; leaving the block hangs up."""
        rpc = RPC_OF[type(request)]
        method = self._live().unary_stream(rpc.path, request_serializer=_bytes, response_deserializer=_unchanged)
        call = method(request, metadata=self._metadata)
        stream = OpenStream(rpc.name, request, call, self.timeout)
        try:
            yield stream
        finally:
            call.cancel()

    async def stream(self, request: StreamRequest) -> Exchange:
        """Make a streaming call and read it to its end."""
        async with self.open(request) as stream:
            return await stream.rest()

    async def call(self, request: ProtoMessage) -> Exchange:
        """Make a unary call."""
        return await self.send(request, _bytes(request))

    async def send(self, request: ProtoMessage, data: bytes) -> Exchange:
        """Make a unary call with these bytes in the request's place, whatever they are."""
        rpc = RPC_OF[type(request)]
        method = self._live().unary_unary(rpc.path, request_serializer=_unchanged, response_deserializer=_unchanged)
        try:
            answer = await method(data, metadata=self._metadata, timeout=self.timeout)
        except grpc.aio.AioRpcError as error:
            status = status_of(error)
            return Exchange(rpc.name, request, status=status, late=status.code == "DEADLINE_EXCEEDED")
        try:
            return Exchange(rpc.name, request, response=rpc.response.FromString(answer), status=Status("OK"))
        except DecodeError as error:
            fault = f"is no {rpc.response.DESCRIPTOR.name}: {error}"
            return Exchange(rpc.name, request, status=Status("OK"), faults=(fault,))

    async def is_there(self, patience: float) -> bool:
        """Say whether a connection comes about within so many seconds."""
        try:
            async with asyncio.timeout(patience):
                await self._live().channel_ready()
        except TimeoutError:
            return False
        return True

    def _live(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError("enter the probe first")
        return self._channel


def status_of(error: grpc.aio.AioRpcError) -> Status:
    """Return a status with what its details say."""
    code, text = error.code().name, error.details() or ""
    trailing: Iterable[tuple[str, str | bytes]] = tuple(error.trailing_metadata() or ())
    raw = next((value for key, value in trailing if key == DETAILS_KEY and isinstance(value, bytes)), b"")
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    with contextlib.suppress(DecodeError):  # then it has no ErrorInfo, which the judges say
        for detail in status_pb2.Status.FromString(raw).details:
            detail.Unpack(info) or detail.Unpack(bad)
    fields = tuple(violation.field for violation in bad.field_violations)
    return Status(code, text, info.domain, info.reason, dict(info.metadata), fields, len(text.encode()) + len(raw))


def _bytes(message: ProtoMessage) -> bytes:
    return message.SerializeToString()


def _unchanged(data: bytes) -> bytes:
    return data
