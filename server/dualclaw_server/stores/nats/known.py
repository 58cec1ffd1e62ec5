"""What this process knows of documents without asking: those it wrote, or read for a run it works on.

Rules:
- A document here was the newest of its subject once. It may be that no more, so nothing that is only read may rest on
  it: who takes one writes it too, and JetStream refuses the write if the document has changed (see ``transaction``).
- What is larger than ``_LARGEST`` is not kept, and the one not used for the longest goes first.
- With a new connection nothing is known: servers that may have lost what they had could give a sequence again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from nats.aio.client import Client

from dualclaw_server.stores.nats.layout import Stored

MOST_BYTES = 16 * 1024 * 1024
"""What all of them may take together, roughly."""
_LARGEST = 64 * 1024
_OBJECT = 512
"""Bytes of a document beside its data."""


class Known:
    """The documents known last, by subject."""

    def __init__(self, client: Client, most_bytes: int = MOST_BYTES) -> None:
        self._client = client
        self._connection = 0
        self._most = most_bytes
        self._size = 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes they take, roughly."""
        return self._size

    def find(self, subject: str) -> Stored | None:
        """Return what is known of a subject."""
        self._look_at_connection()
        stored = self._kept.get(subject)
        if stored is not None:
            self._kept.move_to_end(subject)
        return stored

    def note(self, stored: Stored) -> None:
        """Keep a document, unless a newer one is known."""
        self._look_at_connection()
        known = self._kept.get(stored.subject)
        if known is not None and known.seq >= stored.seq:
            return
        self.forget((stored.subject,))
        if len(stored.data) > _LARGEST:
            return
        self._kept[stored.subject] = stored
        self._size += _OBJECT + len(stored.data)
        while self._size > self._most:
            self.forget((next(iter(self._kept)),))

    def forget(self, subjects: Iterable[str]) -> None:
        """Have them read when they are wanted next."""
        for subject in subjects:
            stored = self._kept.pop(subject, None)
            if stored is not None:
                self._size -= _OBJECT + len(stored.data)

    def _look_at_connection(self) -> None:
        connection = self._client.stats["reconnects"]
        if connection != self._connection:
            self._connection = connection
            self._kept.clear()
            self._size = 0
