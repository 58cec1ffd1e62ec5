"""Appending to a run's log: compare and set, one frame of a run in flight, those of many runs together.

Rules:
- A frame names the sequence of the one before it on the log's subject: JetStream refuses it when another writer was
  faster. What this process knows of a log's end is kept, so a frame of mere text is one message and no read.
- A frame that changes the state, or brings more than events, is a batch with all that belongs to it; the run's
  document is part of each, so nothing else that looks at the state happens at the same time.
- A log that reads shorter than what this process has written comes from a server that was frozen or cut off and takes
  itself for the leader still: that is no other writer's doing, and it is read again.
- Ambiguous: the tail is read. The own frame id there means stored; the version it built on, another try; else Fenced.
- An append on a queued run always looks at its document: another run's end makes it RUNNING.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dualclaw import RunState
from dualclaw_server.engine.store import FINAL, Frame, RunKey, Unavailable
from dualclaw_server.stores import records
from dualclaw_server.stores.nats import turns, work
from dualclaw_server.stores.nats.layout import (
    INLINE,
    CheckpointDoc,
    Found,
    LogEntry,
    RestDoc,
    RunDoc,
    Subjects,
    pack,
    state_of,
)
from dualclaw_server.stores.nats.link import Again, Conflict, Link, Uncertain, Write
from dualclaw_server.stores.nats.transaction import Transaction, Transactor
from dualclaw_server.stores.records import INTERRUPTED, QUEUED, RUNNING, Clock

_KEPT = 4096
"""Logs whose end a process remembers."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a log, as its writer knows it."""

    seq: int
    version: int
    last: int
    epoch: int
    state: RunState.ValueType
    turned: int


@dataclass(slots=True)
class _Wanted:
    frame: Frame
    expect: int
    future: asyncio.Future[int]


Told = Callable[[RunKey, Frame, int], None]
"""Learns of a committed frame (as readers see it) and its sequence."""


class Appender:
    """Appends frames.

    Args:
        link, transactor: of this store.
        clock: seconds since the epoch.
        told: called on the event loop for each committed frame with events, before its writer learns of it.
        writer: id of this process.
    """

    def __init__(self, link: Link, transactor: Transactor, clock: Clock, told: Told, writer: str) -> None:
        self._link = link
        self._subjects: Subjects = link.subjects
        self._transactor = transactor
        self._clock = clock
        self._told = told
        self._writer = writer
        self._tails: OrderedDict[RunKey, _Tail] = OrderedDict()
        self._lanes: dict[RunKey, deque[_Wanted]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        """Store a frame; the awaitable gives the new version. Frames of a run take effect in call order."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._closing:
            future.set_exception(Unavailable("the store is closed"))
            return future
        lane = self._lanes.get(key)
        wanted = _Wanted(frame, expect, future)
        if lane is not None:
            lane.append(wanted)
            return future
        self._lanes[key] = deque([wanted])
        task = asyncio.create_task(self._work(key), name=f"appends {key.run_id[:40]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    async def close(self) -> None:
        """Finish what was begun."""
        self._closing = True
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=self._link.patience + 5)
            for task in late:
                task.cancel()

    def forget(self, key: RunKey) -> None:
        """Look again before the next append."""
        self._tails.pop(key, None)

    async def _work(self, key: RunKey) -> None:
        lane = self._lanes[key]
        try:
            while lane:
                wanted = lane.popleft()
                try:
                    version = await self._store(key, wanted.frame, wanted.expect)
                except Exception as error:
                    if not wanted.future.done():
                        wanted.future.set_exception(error)
                else:
                    if not wanted.future.done():
                        wanted.future.set_result(version)
        finally:
            del self._lanes[key]
            for wanted in lane:
                wanted.future.cancel()

    async def _store(self, key: RunKey, frame: Frame, expect: int) -> int:
        op = secrets.token_hex(8)
        tail = self._tails.pop(key, None)
        before = tail.seq if tail is not None else None
        doubt = False
        if tail is not None and tail.version == expect and _is_text(frame, tail):
            entry = self._entry(frame, expect, op, tail.turned)
            _check(frame, expect, tail)
            write = Write(self._subjects.run(key, "log"), pack(entry, frame.body), tail.seq, keep_history=True)
            try:
                seq = await self._transactor.store(write)
            except (Conflict, Again):
                pass
            except Uncertain:
                doubt = True
            else:
                self._committed(key, frame, entry, tail.state, seq)
                return entry.version
        step = _Append(self, key, frame, expect, before)
        entry, seq = await self._transactor.run(op, step, believing=not doubt, doubt=doubt)
        self._committed(key, frame, entry, step.state, seq or step.found)
        return entry.version

    def _entry(self, frame: Frame, expect: int, op: str, turned: int, *, at: int = 0) -> LogEntry:
        return LogEntry(
            op=op,
            version=expect + 1,
            first=frame.first_seq,
            count=frame.count,
            epoch=frame.epoch,
            state=frame.state,
            at=at or records.micros(self._clock),
            turned=turned,
            size=len(frame.body),
            durable=frame.durable,
            ends=frame.ends_segment,
            writer=self._writer,
        )

    def _committed(self, key: RunKey, frame: Frame, entry: LogEntry, state: RunState.ValueType, seq: int) -> None:
        if state not in FINAL:
            self._tails[key] = _Tail(seq, entry.version, entry.last, entry.epoch, state, entry.turned)
            if len(self._tails) > _KEPT:
                self._tails.popitem(last=False)
        if frame.count:
            self._told(key, records.public_frame(frame), seq)


class _Append:
    """A frame as an operation."""

    def __init__(self, appender: Appender, key: RunKey, frame: Frame, expect: int, before: int | None) -> None:
        self._appender = appender
        self._key = key
        self._frame = frame
        self._expect = expect
        self._wrote = before
        """Sequence of this process's own last frame, if it is known."""
        self._before = before
        self.state = frame.state
        """The run's state since then, which a frame of state QUEUED leaves as it is."""
        self.found = 0
        """Sequence of the frame when an earlier attempt had stored it."""

    async def __call__(self, tx: Transaction) -> LogEntry:
        key, frame, expect = self._key, self._frame, self._expect
        subject = tx.subjects.run(key, "log")
        log = await tx.get(subject, LogEntry, bare=True)
        run = await tx.get(tx.subjects.run(key, "doc"), RunDoc)
        if run is None or run.doc.deleted or (log is not None and log.doc.gone):
            raise records.gone()
        if self._wrote is not None and (log is None or log.seq < self._wrote):
            raise Again("the log was read from a server that is behind")
        if mine := await self._mine(tx, subject, log):
            self.state = state_of(run.doc.state)
            return mine
        tail = _tail_of(log, state_of(run.doc.state))
        state = _check(frame, expect, tail)
        if tail.version == expect:
            self._before = tail.seq
        now = records.micros(self._appender._clock)
        self.state = state
        turns_over = state != tail.state or state in (QUEUED, INTERRUPTED) or not _is_plain(frame)
        turned = expect + 1 if turns_over else max(tail.turned, run.doc.version)
        entry = self._appender._entry(frame, expect, tx.op, turned, at=now)
        if turns_over:
            await self._turn(tx, run, state, now)
        await tx.put(subject, entry, frame.body, last=True, history=True)
        return entry

    async def _mine(self, tx: Transaction, subject: str, log: Found[LogEntry] | None) -> LogEntry | None:
        """Return this very frame if an earlier attempt has stored it after all."""
        if log is None or log.doc.version <= self._expect:
            return None
        found: Found[LogEntry] | None = log
        if log.doc.version > self._expect + 1:
            if self._before is None:
                return None
            stored = await tx.link.next(subject, self._before + 1)
            found = None if stored is None else await tx.link.open(stored, LogEntry, bare=True)
        if found is None or found.doc.op != tx.op:
            return None
        self.found = found.seq
        return found.doc

    async def _turn(self, tx: Transaction, run: Found[RunDoc], state: RunState.ValueType, now: int) -> None:
        """Stage all that a frame brings beside its events."""
        key, frame, doc = self._key, self._frame, run.doc
        brought = turns.said(frame.messages)
        if frame.messages:
            parts, body = turns.pack_messages(brought)
            await tx.put(tx.subjects.run(key, "msg", str(self._expect + 1)), parts, body, blind=True)
        if frame.checkpoint:
            await self._put_checkpoint(tx, doc)
        await work.take_signals(tx, key, frame.signals)
        doc.state, doc.updated, doc.version = state, now, self._expect + 1
        if state == INTERRUPTED or state in FINAL:
            conversation = await turns.conversation_of(tx, key.tenant, doc.conversation)
            if conversation is not None:
                await turns.show(tx, doc, conversation, await turns.read_messages(tx, run) | brought)
                conversation.updated = now
                if state in FINAL:
                    await turns.leave(tx, doc, conversation, now)
                await turns.store_conversation(tx, key.tenant, conversation)
        elif brought:
            await turns.change_turn(tx, doc, brought)
        if state in FINAL:
            if await work.drop(tx, key, held_too=False):
                tx.after.append(lambda: tx.link.purge(tx.subjects.timers_of(key), stream=tx.subjects.timers_stream))
            rest = RestDoc(tenant=key.tenant, run_id=key.run_id, rested=now)
            await tx.put(tx.subjects.rest(key), rest, blind=True)
        await turns.store_run(tx, run, None if frame.run is None else frame.run.SerializeToString())

    async def _put_checkpoint(self, tx: Transaction, doc: RunDoc) -> None:
        subject = tx.subjects.run(self._key, "cp")
        checkpoint = CheckpointDoc(seq=self._frame.last_seq)
        await tx.put(subject, checkpoint, self._frame.checkpoint, blind=True)
        old, doc.checkpoint = doc.checkpoint, checkpoint.blob
        if old is not None and old != checkpoint.blob:
            dropped = tx.subjects.blob(subject, old[0], "*")
            tx.after.append(lambda: tx.link.purge(dropped))


def _tail_of(log: Found[LogEntry] | None, state: RunState.ValueType) -> _Tail:
    if log is None:
        return _Tail(0, 0, 0, 0, state, 0)
    return _Tail(log.seq, log.doc.version, log.doc.last, log.doc.epoch, state, log.doc.turned)


def _check(frame: Frame, expect: int, tail: _Tail) -> RunState.ValueType:
    return records.next_state(
        frame, expect, version=tail.version, last_seq=tail.last, epoch=tail.epoch, state=tail.state
    )


def _is_plain(frame: Frame) -> bool:
    """True for a frame of nothing but events."""
    return not (frame.checkpoint or frame.messages or frame.signals or frame.run is not None)


def _is_text(frame: Frame, tail: _Tail) -> bool:
    """True for a frame that is one message: it changes nothing but the log's end."""
    return frame.state == tail.state == RUNNING and _is_plain(frame) and len(frame.body) <= INLINE
