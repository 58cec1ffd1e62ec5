"""Results that are not given yet: a call has run, and ``on_tool_call_end`` asks people about what came of it.

They are kept in the checkpoint, out of everybody's sight, so that the tool is not run again and nothing of a result
is told before people have let it go.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode

from dualclaw import ToolResult
from dualclaw.events import canonical_json
from dualclaw_server.engine.checkpoint import Checkpoint
from dualclaw_server.engine.interceptor import Handoff, Observation

_KEPT = "/result/"
"""Begins keys among an agent's extras; those of interceptors begin with their name, which has no slash."""


def keep_result(checkpoint: Checkpoint, call_id: str, observation: Observation) -> None:
    """Keep what came of a call, but for the exception behind it."""
    result = ToolResult(parts=observation.parts, is_error=observation.is_error, diagnosis=observation.diagnosis)
    handoff = observation.handoff
    checkpoint.extras[_KEPT + call_id] = canonical_json(
        {
            "result": b64encode(result.SerializeToString()).decode(),
            "handoff": [handoff.kind, handoff.target] if handoff is not None else None,
            "not_done": observation.not_done,
        }
    )


def kept_result(checkpoint: Checkpoint, call_id: str) -> Observation | None:
    """Return what is kept of a call; None: nothing, so it has not run yet."""
    text = checkpoint.extras.get(_KEPT + call_id)
    if text is None:
        return None
    kept = json.loads(text)
    result = ToolResult.FromString(b64decode(kept["result"]))
    return Observation(
        list(result.parts),
        result.diagnosis if result.HasField("diagnosis") else None,
        is_error=result.is_error,
        handoff=Handoff(*kept["handoff"]) if kept["handoff"] else None,
        not_done=kept["not_done"],
    )


def forget_result(checkpoint: Checkpoint, call_id: str) -> None:
    """The call has ended: what is kept of it is not needed any more."""
    checkpoint.extras.pop(_KEPT + call_id, None)
