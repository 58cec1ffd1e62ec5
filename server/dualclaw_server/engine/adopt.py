"""Making a message of the model, or what an interceptor made of it, one of the conversation.

Whoever wrote it: its call ids are new to the conversation, its arguments canonical or known to be unusable, and
identity, author and time are the engine's. Arguments are shown to people several times over, in steps, in questions
and at the end of the run, so what nobody could read is not even tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from dualclaw import ContentPart, Message, Role, StepKind, ToolCall
from dualclaw.json_text import canonical_args_of
from dualclaw_server.engine.clock import set_now
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.tool import KINDS, Tool

MAX_ARGUMENTS = 256 * 1024
"""Characters of one call's arguments, canonical."""
_HEAD = 1_000
"""Characters kept of what cannot be used."""


def adopted(
    given: Message,
    bad: Mapping[str, str],
    *,
    author: str,
    tools: Mapping[str, Tool] | None,
    used: AbstractSet[str],
    identity: Message | None = None,
) -> tuple[Message, dict[str, str]]:
    """Return a message as the conversation has it, and the raw arguments of its calls that are no JSON object.

    Args:
        given: what was written; not changed.
        bad: raw arguments that are known to be no JSON object, by the id of the call.
        author: name of the agent.
        tools: by name; None: calls are left out.
        used: call ids that are taken.
        identity: the message it takes the place of, whose calls keep their ids; None: it is a new one.
    """
    message = Message(id=identity.id if identity else new_id(), role=Role.ROLE_ASSISTANT, author=author)
    if identity is not None:
        message.create_time.CopyFrom(identity.create_time)
        used = used - {call.id for call in calls_in(identity)}
    else:
        set_now(message.create_time)
    taken: set[str] = set()
    bad_arguments: dict[str, str] = {}
    for part in given.parts:
        kind = part.WhichOneof("part")
        if kind in ("tool_result", None):  # a result that no call gave, or nothing
            continue
        if kind != "tool_call":
            message.parts.append(part)
        elif tools is not None:
            call = _adopted_call(part.tool_call, tools.get(part.tool_call.name), used, taken)
            raw = part.tool_call.args_json
            if len(call.args_json) > MAX_ARGUMENTS:
                raw = f"{raw[: _HEAD // 4]}... ({len(call.args_json)} characters, more than {MAX_ARGUMENTS})"
                call.args_json = ""
            message.parts.append(ContentPart(tool_call=call))
            unusable = raw if "".join(raw.split()) not in ("", "{}") else bad.get(part.tool_call.id, "")
            if unusable and not call.args_json:
                bad_arguments[call.id] = unusable[:_HEAD]
    return message, bad_arguments


def _adopted_call(call: ToolCall, tool: Tool | None, used: AbstractSet[str], taken: set[str]) -> ToolCall:
    made = ToolCall()
    made.CopyFrom(call)
    made.args_json = canonical_args_of(call.args_json)
    if not call.id or call.id in used or call.id in taken:
        made.id = f"call_{new_id()}"
    taken.add(made.id)
    made.kind = KINDS[tool.kind] if tool else StepKind.STEP_KIND_SKILL
    made.server = tool.server if tool else ""
    return made


def copy_of(message: Message) -> Message:
    """Return a copy."""
    copied = Message()
    copied.CopyFrom(message)
    return copied


def calls_in(message: Message) -> Iterator[ToolCall]:
    """Yield the calls a message asks for."""
    return (part.tool_call for part in message.parts if part.WhichOneof("part") == "tool_call")
