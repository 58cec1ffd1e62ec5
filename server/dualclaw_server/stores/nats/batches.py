"""Batches on their way: what many runs write at the same time goes out together.

Rules:
- A server in no cluster syncs each message that comes by itself, and stages each atomic batch on its disk, in a
  directory that is made, synced and removed, one batch at a time: that takes as long for one message as for a hundred.
  So while one batch is on its way, what else is to be written gathers, and is the next one.
- Each operation still happens as a whole or not at all, and learns of its own fate only: a batch of several that is
  refused is tried again in halves.
- No subject is twice in a batch: the second write would not build on what its operation has read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from dualclaw_server.engine.store import StoreError
from dualclaw_server.stores.nats.link import Again, Link, Uncertain, Write

MAX_BATCH = 1000
"""Messages the server takes in one batch."""
_MOST, _MOST_BYTES = 200, 1 << 20
"""Messages, and their bytes, of several operations in one batch; a single one may be larger."""


@dataclass(slots=True)
class _Wanted:
    writes: Sequence[Write]
    stored: asyncio.Future[int]


class Batches:
    """Stores the writes of operations."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[_Wanted] = []
        self._sender: asyncio.Task[None] | None = None

    async def store(self, writes: Sequence[Write]) -> int:
        """Store all of them or none; returns the sequence of the last one. Raises as ``Link.write``."""
        if len(writes) > MAX_BATCH:
            raise StoreError(f"an operation of {len(writes)} parts is more than a batch of JetStream takes")
        wanted = _Wanted(writes, asyncio.get_running_loop().create_future())
        self._waiting.append(wanted)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name="batches")
        return await wanted.stored

    async def _send(self) -> None:
        some: list[_Wanted] = []
        try:
            while some := self._gather():
                await self._store(some)
        finally:
            self._sender = None
            for wanted in (*some, *self._waiting):
                wanted.stored.cancel()
            self._waiting.clear()

    def _gather(self) -> list[_Wanted]:
        """Take from those that wait, in their order, what may go together; whoever has left meanwhile is dropped."""
        some: list[_Wanted] = []
        later: list[_Wanted] = []
        subjects: set[str] = set()
        size = 0
        for wanted in self._waiting:
            if wanted.stored.done():
                continue
            names = {write.subject for write in wanted.writes}
            size += sum(len(write.data) for write in wanted.writes)
            fits = len(subjects) + len(names) <= _MOST and size <= _MOST_BYTES and subjects.isdisjoint(names)
            (later if some and not fits else some).append(wanted)
            subjects |= names
        self._waiting = later
        return some

    async def _store(self, some: Sequence[_Wanted]) -> None:
        try:
            seq = await self._link.write([write for wanted in some for write in wanted.writes])
        except (Again, Uncertain) as error:
            for wanted in some:
                _fail(wanted, type(error)(str(error)))
        except Exception as error:  # a conflict, no room: nothing was stored, and it may be the fault of one of them
            if len(some) == 1:
                _fail(some[0], error)
                return
            half = len(some) // 2
            await self._store(some[:half])
            await self._store(some[half:])
        else:
            for wanted in reversed(some):
                if not wanted.stored.done():
                    wanted.stored.set_result(seq)
                seq -= len(wanted.writes)


def _fail(wanted: _Wanted, error: Exception) -> None:
    if not wanted.stored.done():
        wanted.stored.set_exception(error)
