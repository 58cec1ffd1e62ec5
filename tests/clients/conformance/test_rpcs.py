"""The rpcs as the kit reads them from the protos."""

from dualclaw import AttachRequest, GetRunRequest, GetRunResponse, ListAgentsRequest
from dualclaw_clients.conformance.rpcs import RPC_OF, RPCS


def test_rpcs_are_those_of_the_protos() -> None:
    """Where they are, what they take and answer, and which of them stream."""
    assert RPC_OF[GetRunRequest].path == "/dualclaw.v1.EngineService/GetRun"
    assert RPC_OF[GetRunRequest].response is GetRunResponse
    assert RPC_OF[ListAgentsRequest].path == "/dualclaw.v1.AgentService/ListAgents"
    assert RPC_OF[AttachRequest].streams
    assert sorted(name for name, rpc in RPCS.items() if rpc.streams) == ["Attach", "Resume", "Run"]
    assert len(RPC_OF) == len(RPCS) == 13


def test_operators_rpcs_are_no_part_of_what_every_engine_has() -> None:
    """They belong to one implementation."""
    assert not {rpc.service for rpc in RPCS.values()} - {
        "dualclaw.v1.EngineService",
        "dualclaw.v1.ConversationService",
        "dualclaw.v1.AgentService",
    }
