"""SqliteStore: runs, logs, queue and conversations in one SQLite file; the default.

Who does what:
- one writer thread commits the operations of all runs in shared transactions (``sqlite_writer``); what they
  do is in ``sqlite_write`` (runs, conversations) and ``sqlite_work`` (the queue);
- a few read connections answer reads (``sqlite_read``);
- the heart, its own thread and connection, keeps the leases of claimed runs (``sqlite_leases``);
- the peers thread sleeps, or watches other processes on the file (``sqlite_peers``, ``sqlite_owners``).

Everything is told on the event loop, after the commit: first the callers, then the followers.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from dualclaw import Conversation, Message, Run, RunState
from dualclaw_server.engine.history import History
from dualclaw_server.engine.store import (
    Answers,
    Claim,
    Created,
    Frame,
    Head,
    Inspection,
    Loaded,
    NewRun,
    Page,
    RunKey,
    Sync,
    Unavailable,
)
from dualclaw_server.stores import sqlite_read, sqlite_retention, sqlite_work, sqlite_write
from dualclaw_server.stores.bell import Bell
from dualclaw_server.stores.histories import Histories
from dualclaw_server.stores.live import MAX_PENDING, Live
from dualclaw_server.stores.records import LEASE, Clock
from dualclaw_server.stores.sqlite_file import BUSY_TIMEOUT, connect, prepare, prepare_writer, settle, store_error
from dualclaw_server.stores.sqlite_fresh import FreshRuns
from dualclaw_server.stores.sqlite_leases import MAX_STALL, Heart, SqliteClaim
from dualclaw_server.stores.sqlite_operations import Append, Call
from dualclaw_server.stores.sqlite_owners import OwnerLocks, PipeBell
from dualclaw_server.stores.sqlite_peers import Interests, News, Peers
from dualclaw_server.stores.sqlite_read import Readers
from dualclaw_server.stores.sqlite_transaction import Effects, Transaction
from dualclaw_server.stores.sqlite_writer import GATHER, Writer

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _File:
    """The file as it was opened, before anything works on it; ``undo`` gives everything back."""

    tx: Transaction
    locks: OwnerLocks
    pipe: PipeBell
    beating: sqlite3.Connection
    watching: sqlite3.Connection
    inbox: int
    """Number of the newest signal in it."""
    undo: ExitStack


def _give_back(opening: asyncio.Future[_File]) -> None:
    """Close a file whose opener has left."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().undo.close()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is there between ``open`` and ``close``."""

    owner: int
    writer: Writer
    readers: Readers
    heart: Heart
    peers: Peers
    locks: OwnerLocks
    pipe: PipeBell

    def join(self) -> None:
        """Wait for all threads, then give the locks back; blocks."""
        self.writer.join()
        self.heart.join()
        self.peers.join()
        self.readers.close()
        self.pipe.close()
        self.locks.close()


class SqliteStore:
    """A RunStore in one SQLite file.

    Args:
        path: the file; it and its folder are created. ``-wal``, ``-shm``, ``-owners``, ``-bell`` lie beside it.
        clock: seconds since the epoch.
        lease: seconds a run stays with a process that shows no sign of life.
        max_stall: seconds without a tick of the event loop after which this process gives up its runs.
        max_bytes: largest size of the file; beyond it appends are Full. None: the disk decides.
        max_pending: bytes of live frames one follower may keep waiting.
        gather: seconds between two commits of nothing but text.
        busy_timeout: seconds to wait for another process's transaction before a write is Unavailable.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock = time.time,
        lease: float = LEASE,
        max_stall: float = MAX_STALL,
        max_bytes: int | None = None,
        max_pending: int = MAX_PENDING,
        gather: float = GATHER,
        busy_timeout: float = BUSY_TIMEOUT,
    ) -> None:
        self._path = Path(path)
        self._clock = clock
        self._lease = lease
        self._max_stall = max_stall
        self._max_bytes = max_bytes
        self._gather = gather
        self._busy_timeout = busy_timeout
        self._live = Live(max_pending)
        self._bell = Bell(clock)
        self._histories = Histories()
        self._fresh = FreshRuns(self._alone_since)
        self._callbacks: list[Callable[[RunKey], None]] = []
        self._parts: _Parts | None = None
        self._changing = asyncio.Lock()

    @property
    def commits(self) -> int:
        """How many transactions this process has committed since ``open``."""
        return self._open_parts().writer.commits

    @property
    def polls(self) -> int:
        """How often this process has looked for others' commits; 0 as long as it is alone."""
        return self._open_parts().peers.polls

    async def open(self) -> None:
        """Make the file ready, take over what dead processes held, and start the threads.

        Raises:
            StoreError: the file is not ours, damaged, or of a newer release; it is unchanged.
        """
        async with self._changing:
            if self._parts is None:
                opening = asyncio.ensure_future(asyncio.to_thread(self._open_file))
                try:
                    self._parts = self._start(await asyncio.shield(opening))
                except asyncio.CancelledError:
                    opening.add_done_callback(_give_back)
                    raise

    def _open_file(self) -> _File:
        prepare(self._path)
        with ExitStack() as undo:
            try:
                locks = OwnerLocks(self._path)
                undo.callback(locks.close)
                pipe = PipeBell(self._path)
                undo.callback(pipe.close)
                writing, beating = (connect(self._path, timeout=self._busy_timeout) for _ in range(2))
                watching = connect(self._path, read_only=True)
                for connection in (writing, beating, watching):
                    undo.callback(connection.close)
                prepare_writer(beating, None)
                prepare_writer(writing, self._max_bytes)
                tx = Transaction(writing, self._clock, 0)
                tx.begin(full=False)
                sqlite_work.register(tx, locks)
                (inbox,) = writing.execute("SELECT coalesce(max(id), 0) FROM inbox").fetchone()
                tx.flush()
                tx.commit()
            except sqlite3.Error as error:
                raise store_error(error) from error
            except OSError as error:
                raise Unavailable(f"{self._path} cannot be opened: {error}") from error
            pipe.ring()
            return _File(tx, locks, pipe, beating, watching, inbox, undo.pop_all())

    def _start(self, file: _File) -> _Parts:
        writer = Writer(file.tx, self._tell, self._gather)
        heart = Heart(file.beating, self._clock, self._lease, self._max_stall)
        interests = Interests(self._live.followed, self._live.follows, heart.holds, self._bell.awaited)
        peers = Peers(file.watching, file.tx.owner, file.inbox, file.locks, file.pipe, interests, self._tell_news)
        parts = _Parts(file.tx.owner, writer, Readers(self._path), heart, peers, file.locks, file.pipe)
        for part in (writer, heart, peers):
            part.start()
        return parts

    async def close(self) -> None:
        """Commit what waits, end followers and threads, and make what is in hand claimable at once."""
        async with self._changing:
            parts, self._parts = self._parts, None
            if parts is None:
                return
            self._live.close()
            self._bell.close()
            self._fresh.clear()
            parts.heart.finish()
            parts.peers.finish()
            last = Call(partial(sqlite_work.release, owner=parts.owner), full=False, unwanted=None)
            parts.writer.submit(last)
            parts.writer.finish()
            await asyncio.to_thread(parts.join)
            await asyncio.to_thread(settle, self._path)
            if (error := last.future.exception()) is not None:
                log.warning("leases were not released: %s", error)

    def _alone_since(self) -> int | None:
        return self._parts.peers.period if self._parts is not None else None

    def _open_parts(self) -> _Parts:
        if self._parts is None:
            raise Unavailable("the store is not open")
        return self._parts

    def _tell(self, effects: Effects) -> None:
        """Tell what a commit has changed; what is known of fresh runs first, for the others may ask for it."""
        for key, frame in effects.frames:
            self._live.publish(key, frame)
        for key in effects.gone:
            self._live.reread(key)
        for pool, due in effects.ready:
            self._bell.ring_at(pool, due)
        for new, head, begins in effects.created:
            self._fresh.add(new, head, begins=begins)
        for key in chain(effects.signals, effects.gone):
            self._fresh.forget(key)
        if self._parts is not None:
            if effects.taken:
                self._parts.heart.lose(effects.taken)
            if effects.ended:
                self._parts.heart.end(effects.ended)
        self._call_back(effects.signals)

    def _tell_news(self, news: News) -> None:
        for key in news.grown:
            self._live.reread(key)
        for pool, due in news.ready:
            self._bell.ring_at(pool, due)
        self._call_back(news.signalled)
        if self._parts is not None:
            for owner in news.dead:
                self._parts.writer.submit(Call(partial(sqlite_work.release, owner=owner), full=False, unwanted=None))

    def _call_back(self, keys: Sequence[RunKey]) -> None:
        for key in keys:
            for callback in self._callbacks:
                try:
                    callback(key)
                except Exception:
                    log.exception("a signal callback failed")

    async def _write(
        self, do: Callable[[Transaction], T], *, full: bool = False, unwanted: Callable[[T], None] | None = None
    ) -> T:
        """Have the writer do it; ``full``: the commit must survive a power loss."""
        call = Call(do, full=full, unwanted=unwanted)
        self._open_parts().writer.submit(call)
        return await call.wait()

    async def create(self, new: NewRun) -> Created:
        """Store a new run with its work item, or return the one its request_id already made."""
        return await self._write(partial(sqlite_write.create, new=new), full=True)

    async def signal(self, key: RunKey, body: bytes, signal_id: str) -> bytes | None:
        """Put a wish into the run's inbox and wake it."""
        return await self._write(partial(sqlite_write.signal, key=key, body=body, signal_id=signal_id), full=True)

    async def answer(self, answers: Answers) -> Created:
        """Record that questions of a parked run are answered, put the signal into its inbox and wake it."""
        return await self._write(partial(sqlite_write.answer, answers=answers), full=True)

    def on_signal(self, callback: Callable[[RunKey], None]) -> None:
        """Have ``callback`` called whenever a signal reached a run's inbox."""
        self._callbacks.append(callback)

    async def wake(self, key: RunKey, at: float) -> None:
        """Have the run claimed at ``at``, whatever else happens; the park after it makes it survive a power loss."""
        await self._write(partial(sqlite_work.wake, key=key, at=at))

    async def claim(self, pool: str, worker: str, wait: float) -> Claim | None:
        """Return the next work item, waiting up to ``wait`` seconds for one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        take = partial(sqlite_work.claim, pool=pool, worker=worker, lease=self._lease)
        while True:
            ticket = self._bell.ticket(pool)
            asked = time.monotonic()
            delivery = await self._write(take, unwanted=self._put_back)
            if delivery is not None:
                claim = SqliteClaim(delivery, asked + self._lease, self._ack, self._nak)
                self._open_parts().heart.hold(claim)
                return claim
            if not await self._bell.wait(pool, ticket, deadline - loop.time()):
                return None

    def _put_back(self, delivery: sqlite_work.Delivery | None) -> None:
        if delivery is not None and self._parts is not None:
            do = partial(sqlite_work.nak, delivery=delivery, delay=0.0)
            self._parts.writer.submit(Call(do, full=False, unwanted=None))

    async def _ack(self, claim: SqliteClaim) -> None:
        if self._parts is not None and self._parts.heart.drop(claim):
            await self._write(partial(sqlite_work.ack, delivery=claim.delivery))

    async def _nak(self, claim: SqliteClaim, delay: float) -> None:
        if self._parts is not None and self._parts.heart.drop(claim):
            await self._write(partial(sqlite_work.nak, delivery=claim.delivery, delay=delay))

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        """Store a frame on top of version ``expect``; the awaitable gives the new version once committed."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._parts is None:
            future.set_exception(Unavailable("the store is not open"))
        else:
            self._fresh.appending(key, frame)
            self._parts.writer.submit(Append(key, frame, expect, frame.sync is Sync.FULL, future))
        return future

    async def head(self, key: RunKey) -> Head:
        """Return where a run stands."""
        return await self._open_parts().readers.run(sqlite_read.head, key)

    async def load(self, key: RunKey) -> Loaded:
        """Return what a worker needs to go on."""
        parts = self._open_parts()
        if (loaded := self._fresh.loaded(key)) is not None:
            return loaded
        return await parts.readers.run(sqlite_read.load, key)

    async def read(self, key: RunKey, after: int, limit: int = 262_144) -> Sequence[Frame]:
        """Return stored frames with events after seq ``after``."""
        return (await self._read(key, after, limit))[0]

    async def _read(self, key: RunKey, after: int, limit: int = 262_144) -> tuple[Sequence[Frame], bool]:
        return await self._open_parts().readers.run(sqlite_read.frames, key, after, limit)

    def follow(self, key: RunKey, after: int) -> AsyncGenerator[Sequence[Frame], None]:
        """Yield frames with events after seq ``after``: stored ones, then live ones."""
        return self._live.follow(key, after, self._read, lambda: after == 0 and self._fresh.silent(key))

    async def list_runs(
        self,
        tenant: str,
        *,
        states: Collection[RunState.ValueType],
        conversation_id: str,
        page_size: int,
        page_token: str,
    ) -> Page[Run]:
        """List runs, newest first."""
        readers = self._open_parts().readers
        return await readers.run(sqlite_read.list_runs, tenant, states, conversation_id, page_size, page_token)

    async def inspect(self, key: RunKey) -> Inspection:
        """Return what an operator wants to know of a run."""
        return await self._open_parts().readers.run(sqlite_read.inspect, key)

    async def release(self, key: RunKey) -> bool:
        """Take the run from whoever works on it and deliver its work item anew at once."""
        return await self._write(partial(sqlite_work.take_back, key=key))

    async def compact(self, before: float, limit: int = 100) -> int:
        """Drop the logs of final runs that came to rest before that time, and give the disk its room back."""
        compacted = 0
        for run in await self._write(partial(sqlite_retention.resting, before=before, limit=limit)):
            while (done := await self._write(partial(sqlite_retention.compact_step, run=run))) is False:
                pass
            compacted += done is True
        while await self._write(sqlite_retention.buried_step):
            pass
        while await self._write(sqlite_retention.shrink_step):
            pass
        return compacted

    async def delete(self, key: RunKey) -> None:
        """Purge a run's log and record."""
        while await self._write(partial(sqlite_retention.empty_step, key=key)):
            pass
        await self._write(partial(sqlite_write.delete, key=key))

    async def get_conversation(self, tenant: str, conversation_id: str) -> Conversation:
        """Return a conversation."""
        return await self._open_parts().readers.run(sqlite_read.get_conversation, tenant, conversation_id)

    async def list_conversations(self, tenant: str, *, page_size: int, page_token: str) -> Page[Conversation]:
        """List conversations, the last changed first."""
        return await self._open_parts().readers.run(sqlite_read.list_conversations, tenant, page_size, page_token)

    async def list_messages(
        self, tenant: str, conversation_id: str, *, page_size: int, page_token: str
    ) -> Page[Message]:
        """List messages, the oldest first."""
        readers = self._open_parts().readers
        return await readers.run(sqlite_read.list_messages, tenant, conversation_id, page_size, page_token)

    async def history(self, tenant: str, conversation_id: str, before_run: str) -> Sequence[Message]:
        """Return all messages of a conversation that came before the given run became active."""
        parts = self._open_parts()
        if self._fresh.begins(RunKey(tenant, before_run)):
            return History()
        return await parts.readers.run(sqlite_read.history, tenant, conversation_id, before_run, self._histories)

    async def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation, its messages, runs and request ids."""
        await self._write(partial(sqlite_write.delete_conversation, tenant=tenant, conversation_id=conversation_id))
        while await self._write(sqlite_retention.buried_step):
            pass

    async def get(self, tenant: str, name: str) -> tuple[bytes, int] | None:
        """Return a small setting and its revision."""
        return await self._open_parts().readers.run(sqlite_read.get_setting, tenant, name)

    async def put(self, tenant: str, name: str, value: bytes, revision: int) -> int | None:
        """Store a setting if its revision still is ``revision``."""
        return await self._write(partial(sqlite_write.put, tenant=tenant, name=name, value=value, revision=revision))
