"""Tools that do more than give a result: hand over to another agent, or end the run.

What a call wants beyond its result takes effect when its whole batch is through, and the first in call order counts.
Until then it is kept in the checkpoint, so that neither a crash nor a sibling that waits for people loses it: its
call has ended and will not be asked again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualclaw import ContentPart, StopReason
from dualclaw.errors import EngineError
from dualclaw.events import canonical_json
from dualclaw_server.engine.checkpoint import Checkpoint
from dualclaw_server.engine.interceptor import Handoff
from dualclaw_server.engine.outcome import End, Fail
from dualclaw_server.engine.session import MAX_VALUE
from dualclaw_server.engine.texts import TEXTS, Texts
from dualclaw_server.engine.tool import NotDone, Tool, ToolOutput, tool

if TYPE_CHECKING:
    from dualclaw_server.engine.trace import Trace

TRANSFER = "transfer_to_agent"
_KEPT = "/handoff/"
_WANTED = "/wanted"
"""Keys among an agent's extras; those of interceptors begin with their name, which has no slash."""
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


# What is wanted, in the checkpoint


def keep_handoff(checkpoint: Checkpoint, index: int, handoff: Handoff) -> None:
    """Keep what the call with a step's index does besides giving its result."""
    checkpoint.extras[f"{_KEPT}{index}"] = canonical_json([handoff.kind, handoff.target])


def first_handoff(checkpoint: Checkpoint) -> Handoff | None:
    """Return the first one that is kept, in call order."""
    indexes = [int(key.removeprefix(_KEPT)) for key in checkpoint.extras if key.startswith(_KEPT)]
    if not indexes:
        return None
    kind, target = json.loads(checkpoint.extras[f"{_KEPT}{min(indexes)}"])
    return Handoff(kind, target)


def keep_outcome(checkpoint: Checkpoint, wanted: End | Fail) -> None:
    """Keep that a call, or a person's answer to one, ends the run."""
    match wanted:
        case End():
            kept = ["end", wanted.text, StopReason.Name(wanted.stop_reason)]
        case Fail():
            kept = ["fail", wanted.error.message, wanted.error.reason]
    checkpoint.extras[_WANTED] = canonical_json(kept)


def kept_outcome(checkpoint: Checkpoint) -> End | Fail | None:
    """Return the outcome that is kept; None: the batch goes on."""
    if _WANTED not in checkpoint.extras:
        return None
    kind, text, name = json.loads(checkpoint.extras[_WANTED])
    if kind == "fail":
        return Fail(EngineError(name, text))
    end = End(text)
    end.stop_reason = StopReason.Value(name)
    return end


def forget_endings(checkpoint: Checkpoint) -> None:
    """Forget what is kept: it is done now."""
    for key in [key for key in checkpoint.extras if key == _WANTED or key.startswith(_KEPT)]:
        del checkpoint.extras[key]


def keep_output(trace: Trace, name: str, text: str, texts: Texts) -> None:
    """Store an agent's final text as the session value its ``output_key`` names; a too long one is cut and says so."""
    if len(canonical_json(text)) > MAX_VALUE:
        room = MAX_VALUE // _WORST - 100
        text = f"{text[:room]}\n{texts.result_truncated.format(count=len(text) - room)}"
    trace.session.set(name, text)
