"""Beginnings of conversations as they are sent, kept, so that a turn does not translate what earlier turns did.

Rules and their reasons:

- Only messages of which the caller says that they are never changed and come again as the same objects
  (``ModelRequest.settled``) are kept, and a beginning is used only for those very objects.
- A beginning starts with a user's message, and ends before one that says something, behind an answer without calls,
  when every call has its result. There nothing that follows can change how it reads: no turn is joined to one before
  it, no result belongs into it, and ``history.turns`` of both parts are the turns of the whole. So requests are the
  same bytes, kept or not, which vendors' caches count on.
- Memory is bounded: those that were not used for longest go first, and short ones are not worth their place.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_

import msgspec

from dualclaw import ContentPart, Message, Role
from dualclaw_server.engine.history import calls_of
from dualclaw_server.models.history import AssistantTurn, CallIds, Turn, call_ids, is_said, system_texts, turns
from dualclaw_server.models.sending import sent_name

MOST_BYTES = 32 * 1024 * 1024
"""What the beginnings of one model may take together, roughly."""
SHORTEST = 16
"""Messages below which a beginning is not kept."""
_OBJECT = 512
"""Bytes of a message beside its content."""
_MOST_PIECES = 64

_USER, _ASSISTANT = Role.ROLE_USER, Role.ROLE_ASSISTANT


class Beginning:
    """What was sent of a conversation already. One with no messages is that of any."""

    __slots__ = ("call_ids", "messages", "pieces", "sent_ids", "size", "system", "tools")

    def __init__(self) -> None:
        self.messages: tuple[Message, ...] = ()
        self.pieces: tuple[bytes, ...] = ()
        """Its turns as JSON values with commas between; so are several pieces."""
        self.system: tuple[str, ...] = ()
        """Its system texts."""
        self.call_ids: frozenset[str] = frozenset()
        """Ids of its calls."""
        self.sent_ids: frozenset[str] = frozenset()
        """The ids they were sent with."""
        self.tools: tuple[str, ...] = ()
        """Names of the tools it calls, as they are sent, each once."""
        self.size = 0


NOTHING = Beginning()


class Beginnings:
    """The beginnings that one model has sent last. For one event loop.

    Args:
        render: makes of turns what is sent of them; of no turns the empty list.
        ids: what the vendor takes as call ids.
        prepare: makes of messages those that are sent.
        most_bytes: what all may take together.
    """

    def __init__(
        self,
        render: Callable[[Sequence[Turn], frozenset[str]], Sequence[object]],
        ids: CallIds,
        prepare: Callable[[Sequence[Message]], Sequence[Message]],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._render = render
        self._ids = ids
        self._prepare = prepare
        self._most = most_bytes
        self._kept: OrderedDict[tuple[int, frozenset[str]], Beginning] = OrderedDict()
        self.size = 0
        """Bytes they take, roughly."""

    def of(self, messages: Sequence[Message], settled: int, tool_names: frozenset[str]) -> Beginning:
        """Return the longest beginning there is of a conversation, made longer where that can be.

        Args:
            messages: the conversation.
            settled: how many of them, from the first, are never changed and come again.
            tool_names: tools the model may call; their names are sent as they are.
        """
        if settled < SHORTEST:
            return NOTHING
        key = id(messages[0]), tool_names
        found = self._kept.get(key, NOTHING)
        if len(found.messages) > settled or not all(map(is_, found.messages, messages)):
            found = NOTHING
        end = _end(messages, len(found.messages), settled)
        if end > len(found.messages):
            found = self._longer(found, messages[len(found.messages) : end], tool_names)
            self._keep(key, found)
        elif found is not NOTHING:
            self._kept.move_to_end(key)
        return found

    def _longer(self, before: Beginning, added: Sequence[Message], tool_names: frozenset[str]) -> Beginning:
        added_turns = turns(
            self._prepare(added), self._ids, place=len(before.messages), used=before.sent_ids, at_end=False
        )
        calls = [call for turn in added_turns if isinstance(turn, AssistantTurn) for call in turn.calls]
        pieces = (*before.pieces, msgspec.json.encode(self._render(added_turns, tool_names))[1:-1])
        made = Beginning()
        made.messages = (*before.messages, *added)
        made.pieces = pieces if len(pieces) < _MOST_PIECES else (b",".join(pieces),)
        made.system = (*before.system, *system_texts(added))
        made.call_ids = before.call_ids | call_ids(added)
        made.sent_ids = before.sent_ids.union(call.id for call in calls)
        made.tools = tuple(dict.fromkeys((*before.tools, *(sent_name(call.call.name, tool_names) for call in calls))))
        made.size = before.size + len(pieces[-1]) + _OBJECT * len(added)
        return made

    def _keep(self, key: tuple[int, frozenset[str]], beginning: Beginning) -> None:
        self._drop(key)
        if len(beginning.messages) >= SHORTEST and beginning.size <= self._most:
            self._kept[key] = beginning
            self.size += beginning.size
            while self.size > self._most:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: tuple[int, frozenset[str]]) -> None:
        dropped = self._kept.pop(key, None)
        if dropped is not None:
            self.size -= dropped.size


def joined(first: Sequence[object], beginning: Beginning, rest: Sequence[object]) -> object:
    """Return a list for a request: ``first``, then what the beginning holds, then the rest."""
    if not beginning.pieces:
        return [*first, *rest]
    lists = (msgspec.json.encode(each)[1:-1] for each in (first, rest) if each)
    before = [next(lists)] if first else []
    return msgspec.Raw(b"[%b]" % b",".join((*before, *beginning.pieces, *lists)))


def _end(messages: Sequence[Message], start: int, settled: int) -> int:
    """Return where the longest beginning ends that nothing behind it can change; ``start`` is the end of another."""
    end = start
    begun, answered = start > 0, False
    waiting: set[str] = set()
    for place in range(start, min(settled + 1, len(messages))):
        message = messages[place]
        if message.role == _USER:
            speaks = any(map(_speaks, message.parts))
            if answered and speaks and not waiting:
                end = place
            begun = begun or speaks
            answered = answered and not any(map(is_said, message.parts))
        elif message.role == _ASSISTANT:
            if not begun:
                return start
            calls = calls_of(message)
            waiting |= calls
            if calls:
                answered = False
            elif any(part.WhichOneof("part") == "text" and part.text.strip() for part in message.parts):
                answered = True
        waiting.difference_update(
            part.tool_result.call_id for part in message.parts if part.WhichOneof("part") == "tool_result"
        )
    return end


def _speaks(part: ContentPart) -> bool:
    """Return whether every API sends something for it."""
    return is_said(part) and (part.WhichOneof("part") != "text" or bool(part.text.strip()))
