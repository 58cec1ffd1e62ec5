"""The rpcs that every engine of the contract has, as the protos say them: what each takes and what it answers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.message_factory import GetMessageClass

from dualclaw import GetAgentRequest, GetConversationRequest, RunRequest


@dataclass(frozen=True, slots=True)
class Rpc:
    """One rpc."""

    service: str
    """Its full name."""
    name: str
    request: type[ProtoMessage]
    response: type[ProtoMessage]
    streams: bool
    """It answers with a stream of responses."""

    @property
    def path(self) -> str:
        """What gRPC calls it by."""
        return f"/{self.service}/{self.name}"


def _rpcs() -> Iterator[Rpc]:
    for one in (RunRequest, GetConversationRequest, GetAgentRequest):  # one message of each file with a service
        for service in one.DESCRIPTOR.file.services_by_name.values():
            for method in service.methods:
                request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
                yield Rpc(service.full_name, method.name, request, response, method.server_streaming)


RPCS: Final[Mapping[str, Rpc]] = MappingProxyType({rpc.name: rpc for rpc in _rpcs()})
"""By their names, which no two services share."""
RPC_OF: Final[Mapping[type[ProtoMessage], Rpc]] = MappingProxyType({rpc.request: rpc for rpc in RPCS.values()})
"""By the request they take; each takes one of its own."""
