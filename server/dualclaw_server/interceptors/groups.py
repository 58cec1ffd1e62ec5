"""Messages that stay or go together: a call is never without its results, nor a result without its call.

Vendors answer 400 to either, for ever, once it is in a context. Rules:

- A message with calls and every later message with a result for one of them are one group, wherever they stand. A
  result belongs to the newest message before it that has its call, as the request translators see it too.
- A message that holds results of several groups joins them to one.
- Everything else is a group of its own, also a result whose call is nowhere before it.

Reasoning stands in the message of its calls, so vendors that want it back with them get it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualclaw import Message, Role

_ASSISTANT = Role.ROLE_ASSISTANT


@dataclass(frozen=True, slots=True)
class Group:
    """Messages by their places in the history, in order; never empty."""

    places: tuple[int, ...]
    has_calls: bool


def groups_of(messages: Sequence[Message]) -> list[Group]:
    """Return the groups of a history in the order of their first messages; every message is in exactly one."""
    first = list(range(len(messages)))  # of each place, an earlier place in the same group, or itself
    owners: dict[str, int] = {}
    calling: set[int] = set()

    def head(place: int) -> int:
        while first[place] != place:
            first[place] = first[first[place]]
            place = first[place]
        return place

    for place, message in enumerate(messages):
        for part in message.parts:
            kind = part.WhichOneof("part")
            if kind == "tool_call" and message.role == _ASSISTANT:
                owners[part.tool_call.id] = place
                calling.add(place)
            elif kind == "tool_result" and part.tool_result.call_id in owners:
                one, other = head(owners[part.tool_result.call_id]), head(place)
                first[max(one, other)] = min(one, other)

    members: dict[int, list[int]] = {}
    for place in range(len(messages)):
        members.setdefault(head(place), []).append(place)
    return [Group(tuple(places), not calling.isdisjoint(places)) for places in members.values()]
