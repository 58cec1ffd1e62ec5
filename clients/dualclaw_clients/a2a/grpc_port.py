"""The gRPC side: ``lf.a2a.v1.A2AService`` and ``grpc.health.v1`` on a port of their own.

This claw serves gRPC itself, so unlike the others it uses the library; the engine is still reached by EngineClient.
"""

from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Final, TypeVar

import grpc
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers.grpc_handler import DefaultGrpcServerCallContextBuilder, GrpcHandler
from a2a.types.a2a_pb2_grpc import add_A2AServiceServicer_to_server
from a2a.utils.constants import VERSION_HEADER
from a2a.utils.errors import VersionNotSupportedError
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dualclaw.status import code_of, trailing_of
from dualclaw_clients.a2a.http import bearer_of
from dualclaw_clients.a2a.refusals import Refused
from dualclaw_clients.a2a.tasks import BEARER_STATE, EngineTasks

SERVICE: Final = "lf.a2a.v1.A2AService"
_T = TypeVar("_T")


class GrpcPort:
    """The gRPC server of one claw."""

    def __init__(self, *, max_body: int) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_body),
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        self._health = health.aio.HealthServicer()

    def bind(self, listen: str) -> int:
        """Take an address to listen at; returns the port, 0 when it cannot be had."""
        try:
            return self._server.add_insecure_port(listen)
        except RuntimeError:
            return 0

    async def serve(self, tasks: EngineTasks) -> None:
        """Begin to answer calls."""
        add_A2AServiceServicer_to_server(_Handler(tasks, _Contexts()), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def leave(self) -> None:
        """Tell health checks that no more calls should come."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float) -> None:
        """Take no more calls, and end those that are open once the grace time is over."""
        await self._server.stop(grace)


class _Contexts(DefaultGrpcServerCallContextBuilder):
    def build(self, context: grpc.aio.ServicerContext[Message, Message]) -> ServerCallContext:
        call = super().build(context)
        pairs = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        call.state[BEARER_STATE] = bearer_of([value for key, value in pairs if key == "authorization"])
        versions = [value for key, value in pairs if key == VERSION_HEADER.lower() and value]
        if versions and versions[0].partition(".")[0] != "1":
            raise VersionNotSupportedError(f"A2A {versions[0][:20]!r} is not served here; 1.0 is")
        return call


class _Handler(GrpcHandler):
    """The SDK's servicer, which knows A2A's errors; what the transport refuses is told here."""

    async def _handle_unary(
        self,
        request: Message,
        context: grpc.aio.ServicerContext[Message, Message],
        handler_func: Callable[[ServerCallContext], Awaitable[_T]],
        default_response: _T,
    ) -> _T:
        try:
            return await super()._handle_unary(request, context, handler_func, default_response)
        except Refused as refused:
            error = refused.error
            await context.abort(code_of(error.reason), error.message, trailing_of(error))

    async def _handle_stream(
        self,
        request: Message,
        context: grpc.aio.ServicerContext[Message, Message],
        handler_func: Callable[[ServerCallContext], AsyncIterable[_T]],
    ) -> AsyncIterable[_T]:
        try:
            async for item in super()._handle_stream(request, context, handler_func):
                yield item
        except Refused as refused:
            error = refused.error
            await context.abort(code_of(error.reason), error.message, trailing_of(error))
