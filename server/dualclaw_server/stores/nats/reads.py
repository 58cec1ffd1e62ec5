"""Reading runs: where they stand, their log, and what a worker needs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from dualclaw import Message
from dualclaw_server.engine.store import (
    MAX_FRAME_INFOS,
    Frame,
    FrameInfo,
    Head,
    InboxSignal,
    Inspection,
    Loaded,
    RunKey,
    RunMessage,
    Unavailable,
)
from dualclaw_server.stores import records
from dualclaw_server.stores.nats import turns
from dualclaw_server.stores.nats.known import Known
from dualclaw_server.stores.nats.layout import (
    CheckpointDoc,
    Found,
    LogEntry,
    RecordDoc,
    RunDoc,
    SignalDoc,
    Stored,
    WorkDoc,
    state_of,
    unpack,
)
from dualclaw_server.stores.nats.link import Link, many

_CURSORS = 8192
"""Places in logs a process remembers, so that a reader who goes on need not search."""
_AT_ONCE = 256
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Position:
    """A run's document and the end of its log, which belong together."""

    key: RunKey
    run: Found[RunDoc]
    seq: int
    """Sequence of the log's last message; 0: there is none."""
    tail: LogEntry | None

    @property
    def last_seq(self) -> int:
        """Seq of the log's last event."""
        return 0 if self.tail is None else self.tail.last

    def head(self) -> Head:
        """Return it as callers see it."""
        doc, tail = self.run.doc, self.tail
        updated = doc.updated if tail is None else max(doc.updated, tail.at)
        return Head(
            self.key,
            0 if tail is None else tail.version,
            self.last_seq,
            0 if tail is None else tail.epoch,
            state_of(doc.state),
            doc.conversation,
            records.public_run(self.run.body, doc.state, self.last_seq, doc.created, updated),
            doc.kept_from,
        )


class Reader:
    """Reads runs. What a worker is given is ``known`` from then on."""

    def __init__(self, link: Link, known: Known) -> None:
        self._link = link
        self._known = known
        self._cursors: OrderedDict[tuple[RunKey, int], int] = OrderedDict()
        self._connection = 0

    def _look_at_connection(self) -> None:
        if self._connection != self._link.connection:
            self._connection = self._link.connection
            self._cursors.clear()

    def remember(self, key: RunKey, last_seq: int, seq: int) -> None:
        """Note where in the stream the frame lies that ends with an event."""
        self._look_at_connection()
        self._cursors[key, last_seq] = seq
        if len(self._cursors) > _CURSORS:
            self._cursors.popitem(last=False)

    async def position(self, key: RunKey) -> Position:
        """Return where a run stands, as the leader knows it. Raises EngineError UNKNOWN_RUN."""
        subjects = self._link.subjects
        for _ in range(_TRIES):
            run, log = await asyncio.gather(
                self._link.find(subjects.run(key, "doc"), RunDoc), self._link.last(subjects.run(key, "log"))
            )
            if run is None or run.doc.deleted:
                raise records.unknown_run()
            if (position := _fit(key, run, log)) is not None:
                return position
            await asyncio.sleep(0.001)
        raise Unavailable("a run changes faster than it can be read")

    async def load(self, key: RunKey) -> Loaded:
        """Return what a worker needs to go on."""
        found, loaded = await self._load(key)
        for part in ("doc", "rec", "log", "work"):
            stored = found.get(self._link.subjects.run(key, part))
            if stored is not None:
                self._known.note(stored)
        return loaded

    def known_place(self, key: RunKey) -> tuple[str, int]:
        """Return a run's conversation and its place there; empty and 0 when only the servers can tell.

        A place once given stays, so it may be known.
        """
        stored = self._known.find(self._link.subjects.run(key, "doc"))
        doc = None if stored is None else unpack(stored.data, RunDoc)[0]
        return ("", 0) if doc is None else (doc.conversation, doc.activation)

    async def _load(self, key: RunKey) -> tuple[dict[str, Stored], Loaded]:
        """Return what a worker needs, and all the run's documents."""
        subjects, link = self._link.subjects, self._link
        for _ in range(_TRIES):
            found = await link.snapshot(subjects.run(key, ">"))
            stored = found.get(subjects.run(key, "doc"))
            if stored is None:
                raise records.unknown_run()
            run = await link.open(stored, RunDoc)
            if run.doc.deleted:
                raise records.unknown_run()
            position = _fit(key, run, found.get(subjects.run(key, "log")))
            record = found.get(subjects.run(key, "rec"))
            if position is None or record is None:
                await asyncio.sleep(0.001)
                continue
            opened = await link.open(record, RecordDoc)
            checkpoint = found.get(subjects.run(key, "cp"))
            saved = None if checkpoint is None else await link.open(checkpoint, CheckpointDoc)
            messages = await turns.own_messages(link, key, opened, _part(found, "msg"))
            return found, Loaded(
                position.head(),
                opened.body[: opened.doc.cut],
                b"" if saved is None else saved.body,
                0 if saved is None else saved.doc.seq,
                tuple(
                    RunMessage(at, Message.FromString(said.body), said.scope) for at, said in sorted(messages.items())
                ),
                await self._unread(found),
            )
        raise Unavailable("a run changes faster than it can be read")

    async def _unread(self, found: dict[str, Stored]) -> tuple[InboxSignal, ...]:
        taken = {stored.subject.rpartition(".")[2] for stored in _part(found, "tk")}
        waiting = [one for one in _part(found, "in") if one.subject.rpartition(".")[2] not in taken]
        opened = [await self._link.open(one, SignalDoc) for one in waiting]
        return tuple(InboxSignal(one.doc.signal_id, one.body) for one in opened)

    async def inspect(self, key: RunKey) -> Inspection:
        """Return what an operator wants to know of a run."""
        found, loaded = await self._load(key)
        stored = found.get(self._link.subjects.run(key, "work"))
        work = WorkDoc() if stored is None else unpack(stored.data, WorkDoc)[0]
        infos: deque[FrameInfo] = deque(maxlen=MAX_FRAME_INFOS)
        log = found.get(self._link.subjects.run(key, "log"))
        if log is not None and loaded.head.kept_from <= loaded.head.last_seq:
            async with aclosing(self._entries(key, 1, log.seq)) as entries:
                async for one in entries:
                    entry = unpack(one.data, LogEntry)[0]
                    if entry.count and entry.first >= loaded.head.kept_from:
                        state = state_of(entry.state)
                        infos.append(FrameInfo(entry.first, entry.count, entry.epoch, state, entry.durable, entry.size))
        return Inspection(
            loaded.head,
            loaded.record,
            loaded.checkpoint,
            tuple(infos),
            loaded.unread,
            work.waiting or bool(work.token),
            work.worker,
            work.deliveries,
            work.ready,
            tuple(work.timers),
        )

    async def read(self, key: RunKey, after: int, limit: int) -> tuple[Sequence[Frame], bool]:
        """Return stored frames with events after a seq, and whether there are no more."""
        position = await self.position(key)
        kept_from = position.run.doc.kept_from
        if after + 1 < kept_from:
            raise records.log_compacted(kept_from)
        if after >= position.last_seq:
            return [], True
        frames: list[Frame] = []
        size = 0
        start = await self._place(key, after, position.seq)
        async with aclosing(self._entries(key, start, position.seq, limit)) as entries:
            async for stored in entries:
                entry, body = unpack(stored.data, LogEntry)
                if not entry.count or entry.last <= after:
                    continue
                if entry.first > (frames[-1].last_seq if frames else after) + 1:
                    # A hole: the log was compacted between the look at its head and this read, or begun too late.
                    self._cursors.pop((key, after), None)
                    return await self.read(key, after, limit)
                if frames and size + entry.size > limit:
                    return frames, False
                if entry.blob is not None:
                    body = await self._link.chunks(stored.subject, entry.blob)
                size += entry.size
                frame = entry.frame(body)
                frames.append(frame if frames else frame.after(after))
                self.remember(key, entry.last, stored.seq)
        return frames, True

    async def _entries(self, key: RunKey, start: int, end: int, size: int = 0) -> AsyncGenerator[Stored, None]:
        """Yield the log's messages from one sequence to another, whichever replica has them."""
        subject = self._link.subjects.run(key, "log")
        tries = 0
        while start <= end:
            found = await self._link.batch_from(subject, start, _AT_ONCE, size + 64 * 1024 if size else 0)
            if not found:
                # That replica is behind; or the log was purged under us, which its head tells.
                tries += 1
                await asyncio.sleep(0.005 * tries)
                if (await self.position(key)).seq < end or tries > _TRIES:
                    raise Unavailable("the log cannot be read")
            for one in found:
                if one.seq > end:
                    return
                yield one
                start = one.seq + 1

    async def _place(self, key: RunKey, after: int, end: int) -> int:
        """Return a sequence from which on the log's frames are all after a seq, or nearly."""
        self._look_at_connection()
        known = self._cursors.get((key, after))
        if known is not None:
            return known + 1
        if after <= 0:
            return 1
        subject = self._link.subjects.run(key, "log")
        low, high = 1, end
        # The log is sorted by seq, whatever lies between its messages in the stream.
        while low <= high:
            stored = await self._link.next(subject, (low + high) // 2)
            if stored is None:
                raise Unavailable("the log was purged while it was read")
            if unpack(stored.data, LogEntry)[0].last <= after:
                low = stored.seq + 1
            else:
                end = stored.seq
                high = (low + high) // 2 - 1
        return end


def _fit(key: RunKey, run: Found[RunDoc], log: Stored | None) -> Position | None:
    """Return a position if document and log belong together: a batch may be visible in parts for a moment."""
    if log is None:
        return Position(key, run, 0, None) if run.doc.version == 0 else None
    tail = unpack(log.data, LogEntry)[0]
    if tail.gone:
        raise records.unknown_run()
    if tail.turned > run.doc.version or run.doc.version > tail.version:
        return None
    return Position(key, run, log.seq, tail)


def _part(found: dict[str, Stored], kind: str) -> list[Stored]:
    """Return a kind of a run's documents, in the order they were stored."""
    return many(stored for subject, stored in found.items() if subject.split(".")[4] == kind)
