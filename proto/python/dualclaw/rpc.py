"""gRPC stubs and servicers of the contract, taken from here and never from the generated modules.

Streams may be written as ready bytes: ``RunResponse``, ``ResumeResponse`` and ``AttachResponse`` are the
same bytes on the wire (field 1, the events), so a stored frame goes out without being parsed. The
``add_*`` functions below therefore register serializers that pass ``bytes`` through.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from dualclaw.v1 import agent_service_pb2, conversation_service_pb2, engine_service_pb2
from dualclaw.v1.agent_service_pb2_grpc import (
    AgentServiceServicer,
    AgentServiceStub,
    add_AgentServiceServicer_to_server,
)
from dualclaw.v1.conversation_service_pb2_grpc import (
    ConversationServiceServicer,
    ConversationServiceStub,
    add_ConversationServiceServicer_to_server,
)
from dualclaw.v1.engine_service_pb2_grpc import EngineServiceServicer, EngineServiceStub

if TYPE_CHECKING:  # the asynchronous stubs are the same classes, typed for grpc.aio
    from dualclaw.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from dualclaw.v1.conversation_service_pb2_grpc import ConversationServiceAsyncStub
    from dualclaw.v1.engine_service_pb2_grpc import EngineServiceAsyncStub
else:
    AgentServiceAsyncStub, ConversationServiceAsyncStub = AgentServiceStub, ConversationServiceStub
    EngineServiceAsyncStub = EngineServiceStub

ENGINE_SERVICE = engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
CONVERSATION_SERVICE = conversation_service_pb2.DESCRIPTOR.services_by_name["ConversationService"].full_name
AGENT_SERVICE = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name


class _Serializable(Protocol):
    def SerializeToString(self) -> bytes: ...  # noqa: N802  # protobuf names it so


def _bytes_or_message(value: bytes | _Serializable) -> bytes:
    return value if isinstance(value, bytes) else value.SerializeToString()


def add_engine_service(servicer: EngineServiceServicer, server: grpc.aio.Server) -> None:
    """Register an engine service whose streaming handlers may yield messages or their bytes."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    pb = engine_service_pb2
    streams: tuple[tuple[str, Callable[[bytes], object]], ...] = (
        ("Run", pb.RunRequest.FromString),
        ("Resume", pb.ResumeRequest.FromString),
        ("Attach", pb.AttachRequest.FromString),
    )
    unary: tuple[tuple[str, Callable[[bytes], object]], ...] = (
        ("Cancel", pb.CancelRequest.FromString),
        ("GetRun", pb.GetRunRequest.FromString),
        ("ListRuns", pb.ListRunsRequest.FromString),
    )
    for name, parse in streams:
        handlers[name] = grpc.unary_stream_rpc_method_handler(getattr(servicer, name), parse, _bytes_or_message)
    for name, parse in unary:
        handlers[name] = grpc.unary_unary_rpc_method_handler(getattr(servicer, name), parse, _bytes_or_message)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ENGINE_SERVICE, handlers),))


add_conversation_service = add_ConversationServiceServicer_to_server
add_agent_service = add_AgentServiceServicer_to_server

__all__ = [
    "AGENT_SERVICE",
    "CONVERSATION_SERVICE",
    "ENGINE_SERVICE",
    "AgentServiceAsyncStub",
    "AgentServiceServicer",
    "AgentServiceStub",
    "ConversationServiceAsyncStub",
    "ConversationServiceServicer",
    "ConversationServiceStub",
    "EngineServiceAsyncStub",
    "EngineServiceServicer",
    "EngineServiceStub",
    "add_agent_service",
    "add_conversation_service",
    "add_engine_service",
]
