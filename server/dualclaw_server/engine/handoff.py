"""Tools that do more than give a result: hand over to another agent, or end the run.

What a call wants beyond its result takes effect when its whole batch is through, and the first in call order counts;
until then it is kept (``kept``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualclaw import ContentPart
from dualclaw.events import canonical_json
from dualclaw_server.engine.interceptor import Handoff
from dualclaw_server.engine.session import MAX_VALUE
from dualclaw_server.engine.texts import TEXTS, Texts
from dualclaw_server.engine.tool import NotDone, Tool, ToolOutput, tool

if TYPE_CHECKING:
    from dualclaw_server.engine.trace import Trace

TRANSFER = "transfer_to_agent"
_WORST = 6
"""JSON characters that one character can take."""


def transfer_tool(names: Sequence[str], texts: Texts = TEXTS["en"]) -> Tool:
    """Return the tool by which an agent hands the conversation over to one of the agents named."""
    listed = ", ".join(names)

    async def transfer(agent: str) -> ToolOutput:
        if agent not in names:
            raise NotDone(f"{texts.transfer_unknown.format(name=agent)} {texts.transfer_target.format(names=listed)}")
        return ToolOutput([ContentPart(text=texts.transferred.format(name=agent))], Handoff("transfer", agent))

    parameters = {
        "type": "object",
        "properties": {"agent": {"type": "string", "description": texts.transfer_target.format(names=listed)}},
        "required": ["agent"],
        "additionalProperties": False,
    }
    description = texts.transfer_description.format(names=listed)
    return Tool(TRANSFER, description, parameters, transfer, kind="agent", effect="read")


@tool(name="exit", effect="read")
async def exit_tool(answer: str) -> ToolOutput:
    """End the run with a final answer.

    Args:
        answer: What the user is to read.
    """
    return ToolOutput([ContentPart(text=answer)], Handoff("exit", answer))


def keep_output(trace: Trace, name: str, text: str, texts: Texts) -> None:
    """Store an agent's final text as the session value its ``output_key`` names; a too long one is cut and says so."""
    if len(canonical_json(text)) > MAX_VALUE:
        room = MAX_VALUE // _WORST - 100
        text = f"{text[:room]}\n{texts.result_truncated.format(count=len(text) - room)}"
    trace.session.set(name, text)
