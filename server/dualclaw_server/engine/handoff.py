"""Tools that do more than give a result: hand over to another agent, or end the run."""

from __future__ import annotations

from collections.abc import Sequence

from dualclaw import ContentPart
from dualclaw_server.engine.interceptor import Handoff
from dualclaw_server.engine.tool import Tool, ToolOutput, tool

TRANSFER = "transfer_to_agent"


def transfer_tool(names: Sequence[str]) -> Tool:
    """Return the tool by which an agent hands the conversation over to one of the agents named."""

    async def transfer(agent: str) -> ToolOutput:
        return ToolOutput([ContentPart(text=f"Handed over to {agent}.")], Handoff("transfer", agent))

    listed = ", ".join(names)
    parameters = {
        "type": "object",
        "properties": {"agent": {"type": "string", "description": f"One of: {listed}."}},
        "required": ["agent"],
        "additionalProperties": False,
    }
    description = f"Hand this conversation over to another agent, which answers from then on: {listed}."
    return Tool(TRANSFER, description, parameters, transfer, kind="agent", effect="idempotent")


@tool(name="exit", effect="idempotent")
async def exit_tool(answer: str) -> ToolOutput:
    """End the run with a final answer.

    Args:
        answer: What the user is to read.
    """
    return ToolOutput([ContentPart(text=answer)], Handoff("exit", answer))
