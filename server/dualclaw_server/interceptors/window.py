"""The sliding window over a history: what stays, what goes, and what is cut when nothing more can go.

Rules, in the order in which they give way:

1. The oldest groups (``groups``) go first, whole, until the rest fits both limits.
2. The newest group and the newest one with calls never go: a model that loses the result it has just asked for
   asks for it again, to the limit of its steps. Nor do protected messages: the present question and what the
   operator has said (role SYSTEM).
3. If those alone are too much, long texts in them are cut to head and tail, the longest first, and protected ones
   only when cutting the others has not been enough. No text gets shorter than a floor; arguments of calls,
   reasoning and media stay whole, since a part of one is worth nothing or refused.

So the result fits, or it is at the floor and nothing but what never goes is left. Order is kept, and doing it again
changes nothing. Every message is counted once, and each group looked at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dualclaw import ContentPart, Message, Role
from dualclaw_server.interceptors.groups import groups_of
from dualclaw_server.interceptors.tokens import TokenCounter

FLOOR = 500
"""Characters that are left at least of a text that is cut."""
PROTECTED_FLOOR = 2_000
"""The same of a protected one."""

_SYSTEM = Role.ROLE_SYSTEM
_STEP = 0.7


@dataclass(frozen=True, slots=True)
class Window:
    """A history made smaller."""

    kept: tuple[Message, ...]
    """What stays, in order; cut ones keep their ids."""
    gone: tuple[Message, ...]
    """What went, in order."""
    tokens: int
    """Tokens of ``kept``."""
    cut: int
    """How many messages of ``kept`` were cut."""


def shrink(
    messages: Sequence[Message],
    counter: TokenCounter,
    *,
    tokens: int,
    count: int | None = None,
    protected: Collection[str] = (),
    marker: str,
) -> Window:
    """Return the newest part of a history that fits.

    Args:
        messages: the history.
        counter: counts tokens.
        tokens: what ``kept`` may cost.
        count: how many messages it may have; None: any number.
        protected: ids of messages that never go.
        marker: stands where text was cut; ``{count}`` in it is the number of characters left out.
    """
    costs = [counter.of(message) for message in messages]
    total, left = sum(costs), len(messages)

    def fits() -> bool:
        return total <= tokens and (count is None or left <= count)

    going: set[int] = set()
    if not fits():
        held = [message.role == _SYSTEM or (message.id != "" and message.id in protected) for message in messages]
        groups = groups_of(messages)
        newest = max(range(len(groups)), key=lambda index: groups[index].places[-1], default=-1)
        calling = [index for index, group in enumerate(groups) if group.has_calls]
        newest_calls = max(calling, key=lambda index: groups[index].places[-1], default=-1)
        for index, group in enumerate(groups):
            if fits():
                break
            if index in (newest, newest_calls) or any(held[place] for place in group.places):
                continue
            going.update(group.places)
            total -= sum(costs[place] for place in group.places)
            left -= len(group.places)
    kept = [message for place, message in enumerate(messages) if place not in going]
    gone = tuple(message for place, message in enumerate(messages) if place in going)
    if total <= tokens:
        return Window(tuple(kept), gone, total, 0)

    spared = {place for place, message in enumerate(kept) if message.role == _SYSTEM or message.id in protected}
    short = _cut(kept, counter, tokens, set(range(len(kept))) - spared, FLOOR, marker)
    short = _cut(short, counter, tokens, spared, PROTECTED_FLOOR, marker)
    cut = sum(before is not after for before, after in zip(kept, short, strict=True))
    return Window(tuple(short), gone, counter.total(short), cut)


def cut_text(text: str, limit: int, marker: str) -> str:
    """Return head and tail of a text, ``limit`` characters with the marker between; itself when it is no longer."""
    if len(text) <= limit:
        return text
    longest = f"\n{marker.format(count=len(text))}\n"
    room = max(0, limit - len(longest))
    head = room * 2 // 3
    note = f"\n{marker.format(count=len(text) - room)}\n"
    return text[:head] + note + text[len(text) - (room - head) :]


def _cut(
    messages: Sequence[Message], counter: TokenCounter, tokens: int, places: Iterable[int], floor: int, marker: str
) -> list[Message]:
    """Return messages with the texts at ``places`` cut to the largest common limit with which all of them fit."""
    made = list(messages)
    total = counter.total(made)
    chosen = {place: _longest(made[place]) for place in places}
    limit = max(chosen.values(), default=0)
    while total > tokens and limit > floor:
        limit = max(floor, int(limit * _STEP))
        for place, longest in chosen.items():
            if longest > limit:
                before = counter.of(made[place])
                made[place] = _shortened(messages[place], limit, marker)
                total += counter.of(made[place]) - before
    return made


def _texts(parts: Iterable[ContentPart]) -> Iterable[ContentPart]:
    """Yield the parts whose text may be cut, those in results included."""
    for part in parts:
        kind = part.WhichOneof("part")
        if kind == "text":
            yield part
        elif kind == "tool_result":
            yield from _texts(part.tool_result.parts)


def _longest(message: Message) -> int:
    return max((len(part.text) for part in _texts(message.parts)), default=0)


def _shortened(message: Message, limit: int, marker: str) -> Message:
    """Return a copy of a message with no text longer than ``limit`` characters."""
    made = Message()
    made.CopyFrom(message)
    for part in _texts(made.parts):
        part.text = cut_text(part.text, limit, marker)
    return made
