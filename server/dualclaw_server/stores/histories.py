"""Histories that were read lately, so that a turn costs what is new in its conversation and not what is old.

Rules and their reasons:

- What came before the run that is active in a conversation is settled: every run before it is final, takes no more
  frames, and its messages stay until the conversation is deleted. Only such a history is kept, and only read for
  the active run; a run that waits sees what is still being written, so its history is always read whole.
- A conversation is known by the store's own number, which is never used again; a deleted one is found no more.
- Who keeps one says how many messages it was made of, so that one from which something was taken is read anew.
- A short one is not kept: reading it costs no more than keeping it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from dualclaw_server.engine.history import History

MOST_BYTES = 32 * 1024 * 1024
"""What all that are kept may take together, roughly."""
SHORTEST = 16
"""Messages below which a history is not kept."""
_OBJECT = 512
"""Bytes of a message beside its content."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A history that was read: everything in places before ``place``, made of ``count`` stored messages."""

    place: int
    count: int
    messages: History
    size: int


class Histories:
    """The histories read last, by the number of their conversation. For any thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._size = 0
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes they take, roughly."""
        return self._size

    def find(self, conversation: int, place: int) -> Kept | None:
        """Return what is kept of the history before a place."""
        with self._lock:
            kept = self._kept.get(conversation)
            if kept is None or kept.place > place:
                return None
            self._kept.move_to_end(conversation)
            return kept

    def keep(
        self, conversation: int, before: Kept | None, place: int, count: int, added: History, size: int
    ) -> History:
        """Keep a history that goes further than ``before``, and return it.

        Args:
            conversation: its number.
            before: what it goes on from; None: from the beginning.
            place: the first place that is not in it.
            count: stored messages it is made of, those of ``before`` included.
            added: the messages behind those of ``before``.
            size: bytes of their content.
        """
        messages = before.messages.then(added) if before is not None else added
        size += _OBJECT * len(added) + (before.size if before is not None else 0)
        with self._lock:
            self._drop(conversation)
            if len(messages) >= SHORTEST and size <= self._most:
                self._kept[conversation] = Kept(place, count, messages, size)
                self._size += size
                while self._size > self._most:
                    self._drop(next(iter(self._kept)))
        return messages

    def _drop(self, conversation: int) -> None:
        kept = self._kept.pop(conversation, None)
        if kept is not None:
            self._size -= kept.size
