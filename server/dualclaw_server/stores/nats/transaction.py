"""An operation on several subjects that happens as a whole, or not at all.

Rules:
- An operation reads documents from the leader, decides, and stages what it writes; each write names the sequence
  of what was read. All of it goes out as one atomic batch (``batches``).
- When somebody else was faster the operation runs anew on what is there now. So does one whose outcome is unknown:
  an operation recognises its own earlier success by its ``op``, which stays the same, and never does it twice.
- The server can let a reader see a part of a batch for microseconds. Whatever two documents say together is told
  apart by version numbers in them (see ``log``), and a batch ends with the message others wait for.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from dualclaw_server.engine.store import Ambiguous, Unavailable
from dualclaw_server.stores.nats.batches import Batches
from dualclaw_server.stores.nats.layout import INLINE, D, Doc, Found, pack
from dualclaw_server.stores.nats.link import Again, Conflict, Link, Uncertain, Write

log = logging.getLogger(__name__)
T = TypeVar("T")


class Transaction:
    """One attempt of an operation."""

    def __init__(self, link: Link, op: str, attempt: int) -> None:
        self.link = link
        self.subjects = link.subjects
        self.op = op
        self.attempt = attempt
        """0 for the first; above, an earlier one may have been stored after all."""
        self._read: dict[str, Found[Doc] | None] = {}
        self._writes: dict[str, Write] = {}
        self._last: dict[str, Write] = {}
        self.after: list[Callable[[], Awaitable[None]]] = []
        """What to do once it is stored; none of it matters for what is true."""

    async def get(self, subject: str, kind: type[D], *, bare: bool = False) -> Found[D] | None:
        """Return a document; what is read here must still be there when the transaction commits, if it is written.

        The same object each time, so one part of an operation sees what another has changed. ``bare``: without a
        body that is in chunks.
        """
        if subject not in self._read:
            found = await self.link.find(subject, kind, bare=bare)
            self._read[subject] = cast("Found[Doc] | None", found)
        return cast("Found[D] | None", self._read[subject])

    async def put(
        self,
        subject: str,
        doc: Doc,
        body: bytes = b"",
        *,
        blind: bool = False,
        last: bool = False,
        history: bool = False,
    ) -> None:
        """Stage a document. It must have been read before, unless ``blind``; ``last``: at the end of the batch."""
        doc.op, doc.blob = self.op, None
        if len(body) > INLINE:
            doc.blob = await self.link.put_chunks(subject, body)
            body = b""
        expect = None
        if not blind:
            found = self._read[subject]
            expect = 0 if found is None else found.seq
        write = Write(subject, pack(doc, body), expect, history)
        (self._last if last else self._writes)[subject] = write

    @property
    def writes(self) -> list[Write]:
        """What is staged, in the order in which it is to be stored."""
        return [*self._writes.values(), *self._last.values()]


class Transactor:
    """Runs operations."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.batches = Batches(link)

    async def run(self, op: str, step: Callable[[Transaction], Awaitable[T]]) -> tuple[T, int]:
        """Run an operation until it is stored; returns its result, and the sequence of its last message (0: none).

        Raises:
            Ambiguous: it is unknown whether it was stored.
            Unavailable, Full: nothing was stored.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._link.patience
        uncertain = False
        attempt = 0
        while True:
            try:
                transaction = Transaction(self._link, op, attempt)
                result = await step(transaction)
                if not (writes := transaction.writes):
                    return result, 0
                seq = await self.batches.store(writes)
                for task in transaction.after:
                    await task()
                return result, seq
            except Conflict:
                pause = random.uniform(0, 0.002 * min(attempt + 1, 25))
            except Again:
                pause = 0.1
            except Uncertain:
                uncertain, pause = True, 0.1
            except Unavailable as error:
                if uncertain:
                    raise Ambiguous(f"it is unknown whether it was stored: {error}") from error
                raise
            attempt += 1
            if loop.time() > deadline or self._link.client.is_closed:
                if uncertain:
                    raise Ambiguous("it is unknown whether it was stored: NATS does not answer")
                raise Unavailable("NATS does not answer, or others write the same all the time")
            await asyncio.sleep(pause)
