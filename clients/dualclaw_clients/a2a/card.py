"""The agent card: what the engine tells of an agent, in A2A's words.

The public card is read without a key by anybody, so it names the agent and what it is for. Its tools stand on the
extended card, which the engine gives only to callers it knows.
"""

from dataclasses import dataclass
from typing import Final

from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    HTTPAuthSecurityScheme,
    SecurityRequirement,
    SecurityScheme,
    StringList,
)
from a2a.utils.constants import PROTOCOL_VERSION_1_0, TransportProtocol

from dualclaw import Agent, ListAgentsRequest
from dualclaw.errors import EngineError
from dualclaw_clients.a2a.parts import INPUT_MODES, OUTPUT_MODES
from dualclaw_clients.engine_client import EngineClient

BEARER: Final = "bearer"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where callers reach the claw."""

    json_rpc: str
    """URL of JSON-RPC."""
    grpc: str
    """HOST:PORT of gRPC."""


async def find_agent(engine: EngineClient, name: str, *, token: str) -> Agent:
    """Return an agent as the engine tells it; empty: its default one. Raises EngineError."""
    if name:
        return await engine.get_agent(name, token=token)
    page = await engine.list_agents(ListAgentsRequest(page_size=1), token=token)
    if not page.agents:
        raise EngineError("UNKNOWN_AGENT", "the engine has no agent")
    return page.agents[0]


def agent_card(
    agent: Agent, addresses: Addresses, version: str, *, tenant: str = "", extended: bool = False
) -> AgentCard:
    """Return the card of an agent.

    Args:
        agent: as the engine tells it; at least its name.
        addresses: where it is called.
        version: of the claw.
        tenant: what callers have to send for this agent to answer; empty: it is the claw's default.
        extended: with its tools.
    """
    about = agent.description.strip() or f"The agent {agent.name}."
    skills = [AgentSkill(id=agent.name, name=agent.name, description=about, tags=["agent"])]
    if extended:
        skills += [
            AgentSkill(
                id=f"{agent.name}/{tool.name}",
                name=tool.name,
                description=tool.description or tool.name,
                tags=["tool", "needs-approval"] if tool.needs_approval else ["tool"],
            )
            for tool in agent.tools
        ]
    return AgentCard(
        name=agent.name,
        description=about,
        version=version,
        supported_interfaces=[
            AgentInterface(
                url=url, protocol_binding=binding.value, protocol_version=PROTOCOL_VERSION_1_0, tenant=tenant
            )
            for url, binding in (
                (addresses.json_rpc, TransportProtocol.JSONRPC),
                (addresses.grpc, TransportProtocol.GRPC),
            )
        ],
        capabilities=AgentCapabilities(streaming=True, push_notifications=False, extended_agent_card=True),
        security_schemes={
            BEARER: SecurityScheme(
                http_auth_security_scheme=HTTPAuthSecurityScheme(
                    scheme="Bearer", description="A key of the engine, or a token it takes. Some engines need none."
                )
            )
        },
        security_requirements=[SecurityRequirement(schemes={BEARER: StringList()})],
        default_input_modes=INPUT_MODES,
        default_output_modes=OUTPUT_MODES,
        skills=skills,
    )
