"""gRPC stubs and servicers of the contract, taken from here and never from the generated modules.

The ``add_*`` functions register a servicer for ``grpc.aio`` in place of the generated ones, because of two things:

- Streams may be written as ready bytes: ``RunResponse``, ``ResumeResponse`` and ``AttachResponse`` are the same
  bytes on the wire (field 1, the events), so a stored frame goes out without being parsed.
- Bytes that are no message of the expected type are refused as INVALID_REQUEST; gRPC itself would answer UNKNOWN
  and fill the log with tracebacks.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from dualclaw.errors import FieldError
from dualclaw.status import code_of, trailing_of
from dualclaw.v1 import agent_service_pb2, conversation_service_pb2, engine_service_pb2, operator_service_pb2
from dualclaw.v1.agent_service_pb2_grpc import (
    AgentServiceServicer,
    AgentServiceStub,
)
from dualclaw.v1.conversation_service_pb2_grpc import (
    ConversationServiceServicer,
    ConversationServiceStub,
)
from dualclaw.v1.engine_service_pb2_grpc import EngineServiceServicer, EngineServiceStub
from dualclaw.v1.operator_service_pb2_grpc import OperatorServiceServicer, OperatorServiceStub

if TYPE_CHECKING:  # the asynchronous stubs are the same classes, typed for grpc.aio
    from dualclaw.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from dualclaw.v1.conversation_service_pb2_grpc import ConversationServiceAsyncStub
    from dualclaw.v1.engine_service_pb2_grpc import EngineServiceAsyncStub
    from dualclaw.v1.operator_service_pb2_grpc import OperatorServiceAsyncStub
else:
    AgentServiceAsyncStub, ConversationServiceAsyncStub = AgentServiceStub, ConversationServiceStub
    EngineServiceAsyncStub, OperatorServiceAsyncStub = EngineServiceStub, OperatorServiceStub

ENGINE_SERVICE = engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
CONVERSATION_SERVICE = conversation_service_pb2.DESCRIPTOR.services_by_name["ConversationService"].full_name
AGENT_SERVICE = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
OPERATOR_SERVICE = operator_service_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name


class _Serializable(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802  # protobuf names it so


def _bytes_or_message(value: bytes | _Serializable) -> bytes:
    return value if isinstance(value, bytes) else value.SerializeToString()


def add_engine_service(servicer: EngineServiceServicer, server: grpc.aio.Server) -> None:
    """Register an engine service; its streaming handlers may yield or write messages, or their bytes."""
    _add(engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"], servicer, server)


def add_conversation_service(servicer: ConversationServiceServicer, server: grpc.aio.Server) -> None:
    """Register a conversation service."""
    _add(conversation_service_pb2.DESCRIPTOR.services_by_name["ConversationService"], servicer, server)


def add_agent_service(servicer: AgentServiceServicer, server: grpc.aio.Server) -> None:
    """Register an agent service."""
    _add(agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"], servicer, server)


def add_operator_service(servicer: OperatorServiceServicer, server: grpc.aio.Server) -> None:
    """Register an operators' service."""
    _add(operator_service_pb2.DESCRIPTOR.services_by_name["OperatorService"], servicer, server)


def _add(service: ServiceDescriptor, servicer: object, server: grpc.aio.Server) -> None:
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        handle, request = getattr(servicer, method.name), GetMessageClass(method.input_type)
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _parsing_stream(handle, request),
                response_serializer=_bytes_or_message,
            )
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _parsing_call(handle, request),
                response_serializer=_bytes_or_message,
            )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


_Context = grpc.aio.ServicerContext[Any, Any]


def _parsing_call(
    handle: Callable[[Message, _Context], Awaitable[_Serializable]], request: type[Message]
) -> Callable[[bytes, _Context], Awaitable[_Serializable]]:
    async def call(data: bytes, context: _Context) -> _Serializable:
        return await handle(await _parse(request, data, context), context)

    return call


def _parsing_stream(
    handle: Callable[[Message, _Context], AsyncIterator[_Serializable | bytes]], request: type[Message]
) -> Callable[[bytes, _Context], AsyncIterator[_Serializable | bytes]]:
    async def stream(data: bytes, context: _Context) -> AsyncIterator[_Serializable | bytes]:
        async for response in handle(await _parse(request, data, context), context):
            yield response

    return stream


async def _parse(request: type[Message], data: bytes, context: _Context) -> Message:
    try:
        return request.FromString(data)
    except DecodeError:
        error = FieldError({"request": f"is no {request.DESCRIPTOR.full_name}; see the .proto files of the contract"})
        return await context.abort(code_of(error.reason), error.message, trailing_of(error))


__all__ = [
    "AGENT_SERVICE",
    "CONVERSATION_SERVICE",
    "ENGINE_SERVICE",
    "OPERATOR_SERVICE",
    "AgentServiceAsyncStub",
    "AgentServiceServicer",
    "AgentServiceStub",
    "ConversationServiceAsyncStub",
    "ConversationServiceServicer",
    "ConversationServiceStub",
    "EngineServiceAsyncStub",
    "EngineServiceServicer",
    "EngineServiceStub",
    "OperatorServiceAsyncStub",
    "OperatorServiceServicer",
    "OperatorServiceStub",
    "add_agent_service",
    "add_conversation_service",
    "add_engine_service",
    "add_operator_service",
]
