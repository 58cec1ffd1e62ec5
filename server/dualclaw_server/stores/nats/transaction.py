"""An operation on several subjects that happens as a whole, or not at all.

Rules:
- An operation reads documents from the leader, decides, and stages what it writes; each write names the sequence
  of what was read. All of it goes out as one atomic batch (``batches``).
- When somebody else was faster the operation runs anew on what is there now. So does one whose outcome is unknown:
  an operation recognises its own earlier success by its ``op``, which stays the same, and never does it twice.
- An operation that is most often the next thing its process does to a run may believe: it takes what the process knows
  (``known``), or presumes, and asks nobody. That is sound because what it believed it must also write, and each write
  names the sequence it builds on. Whatever else comes of a belief is not done: when a believing step wrote not all
  of it, or raised, it runs anew on what the leader says. And it believes at its first attempt only.
- The server can let a reader see a part of a batch for microseconds. Whatever two documents say together is told
  apart by version numbers in them (see ``log``), and a batch ends with the message others wait for.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar, cast

from dualclaw_server.engine.store import Ambiguous, StoreError, Unavailable
from dualclaw_server.stores.nats.batches import Batches
from dualclaw_server.stores.nats.known import Known
from dualclaw_server.stores.nats.layout import INLINE, D, Doc, Found, Stored, pack
from dualclaw_server.stores.nats.link import Again, ApiError, Conflict, Link, Uncertain, Write

log = logging.getLogger(__name__)
T = TypeVar("T")


class Transaction:
    """One attempt of an operation. ``known``: what it may believe; None: nothing."""

    def __init__(self, link: Link, op: str, attempt: int, known: Known | None = None) -> None:
        self.link = link
        self.subjects = link.subjects
        self.op = op
        self.attempt = attempt
        """0 for the first; above, an earlier one may have been stored after all."""
        self._known = known
        self._believed: set[str] = set()
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
            found: Found[D] | None
            stored = self._known.find(subject) if self._known is not None else None
            if stored is None:
                found = await self.link.find(subject, kind, bare=bare)
            else:
                self._believed.add(subject)
                found = await self.link.open(stored, kind, bare=bare)
            self._read[subject] = cast("Found[Doc] | None", found)
        return cast("Found[D] | None", self._read[subject])

    def presume_none(self, *subjects: str) -> None:
        """Believe, if that is allowed and nothing is known of them, that there is nothing on these subjects yet."""
        if self._known is not None:
            for subject in subjects:
                if subject not in self._read and self._known.find(subject) is None:
                    self._read[subject] = None
                    self._believed.add(subject)

    async def constant(self, subject: str, kind: type[D], seq: int) -> Found[D] | None:
        """Return a document that is never changed, only removed with another one that this transaction writes.

        It is believed only if it lies at ``seq``: under the same subject that of an earlier owner may be known.
        """
        stored = self._known.find(subject) if self._known is not None else None
        if stored is None or stored.seq != seq:
            return await self.link.find(subject, kind)
        return await self.link.open(stored, kind)

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
    def believed(self) -> frozenset[str]:
        """Subjects of what was not read from the leader."""
        return frozenset(self._believed)

    @property
    def unproved(self) -> bool:
        """True when something believed is not written, so that nothing will tell whether it is so."""
        return not self._believed <= {write.subject for write in self.writes if write.expect is not None}

    @property
    def writes(self) -> list[Write]:
        """What is staged, in the order in which it is to be stored."""
        return [*self._writes.values(), *self._last.values()]


class Transactor:
    """Runs operations."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._batches = Batches(link)
        self.known = Known(link.client)

    async def store(self, write: Write) -> int:
        """Store a message whose sender knows what it builds on; returns its sequence. Raises as ``Link.write``."""
        self.known.forget((write.subject,))
        seq = await self._batches.store([write])
        self.known.note(Stored(write.subject, seq, write.data))
        return seq

    async def run(
        self, op: str, step: Callable[[Transaction], Awaitable[T]], *, believing: bool = False, doubt: bool = False
    ) -> tuple[T, int]:
        """Run an operation until it is stored; returns its result, and the sequence of its last message (0: none).

        ``believing``: it may begin with what is known in this process; its step may then be called once more.
        ``doubt``: it may have been stored already, by ``store``.

        Raises:
            Ambiguous: it is unknown whether it was stored.
            Unavailable, Full: nothing was stored.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._link.patience
        uncertain = doubt
        attempt = 0
        while True:
            try:
                transaction, result = await self._step(op, step, attempt, believing=believing and not attempt)
                if not (writes := transaction.writes):
                    return result, 0
                # Whatever comes of it, and whoever leaves before: none of these is what it was.
                self.known.forget(write.subject for write in writes)
                seq = await self._batches.store(writes)
                if believing:
                    self._note(writes, seq)
                await _tidy(transaction.after)
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

    async def _step(
        self, op: str, step: Callable[[Transaction], Awaitable[T]], attempt: int, *, believing: bool
    ) -> tuple[Transaction, T]:
        """Run a step, anew without beliefs if nothing would prove them."""
        if believing:
            transaction = Transaction(self._link, op, attempt, self.known)
            try:
                result = await step(transaction)
            except Exception as error:
                if not transaction.believed or isinstance(error, Unavailable):
                    raise
            else:
                if not transaction.unproved:
                    return transaction, result
            self.known.forget(transaction.believed)
        transaction = Transaction(self._link, op, attempt)
        return transaction, await step(transaction)

    def _note(self, writes: list[Write], last: int) -> None:
        """Know what was stored, of it what the next operation may read."""
        for seq, write in enumerate(writes, last - len(writes) + 1):
            if write.expect is not None:
                self.known.note(Stored(write.subject, seq, write.data))


async def _tidy(tasks: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Do what follows on a transaction that is stored; it is so whatever comes of this."""
    for task in tasks:
        try:
            await task()
        except (StoreError, ApiError) as error:
            log.warning("something that is not needed any more stays in NATS: %s", error)
