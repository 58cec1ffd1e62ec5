"""The one thread that writes: it commits the waiting operations of all runs in one transaction.

Rules:
- An operation is queued by one append to a deque (atomic in Python, no lock), results come back in one
  ``call_soon_threadsafe`` per batch: promises are kept, then everything else learns what happened.
- Text frames can wait: a batch of nothing else begins at the earliest ``gather`` seconds after the last
  one, so frames of many runs share a commit. Any other operation, and the first frame after a quiet time,
  goes at once.
- An append that builds on one that failed fails the same way: it is not another writer that stands against it.
- A refused operation fails alone. If the database refuses (no room), every operation of the batch is tried
  once more by itself, so that a big frame does not take the others' acks with it.
- An error before the commit stores nothing. An error of the commit itself leaves open what is on disk, so the tail is
  read: the newest head that the transaction has moved is there, or it is not, and then the batch is tried once more.
  Ambiguous is left for when that cannot be read, or nothing was moved.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from dualclaw.errors import EngineError
from dualclaw_server.engine.store import Ambiguous, Fenced, Full, RunKey, StoreError, Unavailable
from dualclaw_server.stores import sqlite_work
from dualclaw_server.stores.sqlite_file import primary_code, store_error
from dualclaw_server.stores.sqlite_operations import Append, Operation
from dualclaw_server.stores.sqlite_transaction import Effects, Transaction

log = logging.getLogger(__name__)

GATHER = 0.004
"""Seconds between two commits of nothing but text."""

_REMEMBERED = 1024
_REFUSALS = (EngineError, Fenced, ValueError)


class Writer:
    """The write connection, its thread, and what waits for it.

    Args:
        connection: for this thread alone from ``start`` on.
        told: called on the event loop with what a committed batch has changed.
        gather: seconds between two commits of nothing but text.
    """

    def __init__(self, transaction: Transaction, told: Callable[[Effects], None], gather: float = GATHER) -> None:
        self._tx = transaction
        self._told = told
        self._gather = gather
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Operation] = deque()
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._closing = False
        self._failed: dict[RunKey, tuple[int, StoreError]] = {}
        self._thread = threading.Thread(target=self._run, name="dualclaw-writer", daemon=True)

    @property
    def commits(self) -> int:
        """How many transactions were committed."""
        return self._tx.commits

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def submit(self, operation: Operation) -> None:
        """Queue an operation, on the event loop. It takes effect in the order of these calls."""
        if self._closing:
            operation.settle(Unavailable("the store is closed"))
            return
        self._waiting.append(operation)
        if operation.urgent and not self._urgent.is_set():
            self._urgent.set()
        if not self._wake.is_set():
            self._wake.set()

    def finish(self) -> None:
        """Take no more operations; the thread ends when it has committed those that wait."""
        self._closing = True
        self._urgent.set()
        self._wake.set()

    def join(self) -> None:
        """Wait for the thread to end; blocks."""
        self._thread.join()

    def _run(self) -> None:
        last = 0.0
        while True:
            self._wake.wait()
            pause = last + self._gather - time.monotonic()
            if pause > 0:
                self._urgent.wait(pause)
            # Cleared before the deque is emptied: an operation that comes in between sets them again.
            self._wake.clear()
            self._urgent.clear()
            closing = self._closing
            batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
            last = time.monotonic()
            if batch:
                self._work(batch)
            if closing and not self._waiting:
                self._tx.connection.close()
                return

    def _work(self, batch: Sequence[Operation]) -> None:
        try:
            outcomes = self._attempt(batch)
        except Exception as error:
            # Nobody else could tell the waiting callers.
            outcomes = [error] * len(batch)
            log.exception("the writer failed")
        self._pass_failures_on(batch, outcomes)
        effects = self._tx.take_effects()
        self._loop.call_soon_threadsafe(self._tell, batch, outcomes, effects)

    def _pass_failures_on(self, batch: Sequence[Operation], outcomes: list[object]) -> None:
        if not self._failed and not any(isinstance(outcome, StoreError) for outcome in outcomes):
            return
        for at, (operation, outcome) in enumerate(zip(batch, outcomes, strict=True)):
            if not isinstance(operation, Append):
                continue
            expected, failure = self._failed.pop(operation.key, (-1, None))
            if isinstance(outcome, Fenced) and failure is not None and operation.expect == expected:
                outcomes[at] = failure
            elif isinstance(outcome, Full | Unavailable | Ambiguous):
                failure = outcome
            else:
                continue
            self._failed[operation.key] = (operation.expect + 1, failure)
        if len(self._failed) > _REMEMBERED:
            self._failed.clear()

    def _attempt(self, batch: Sequence[Operation], *, again: bool = False) -> list[object]:
        """Return each operation's outcome: its result, or the exception that says why there is none."""
        tx = self._tx
        outcomes: list[object] = []
        committing = False
        try:
            tx.begin(full=any(operation.full for operation in batch))
            if tx.went_back:
                sqlite_work.clock_went_back(tx)
            for operation in batch:
                try:
                    outcomes.append(operation.apply(tx))
                except _REFUSALS as refused:
                    outcomes.append(refused)
            tx.flush()
            committing = True
            tx.commit()
        except sqlite3.Error as error:
            if committing and primary_code(error) not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY):
                return self._resolve(batch, outcomes, error, again=again)
            return self._recover(batch, error)
        except Exception as error:
            tx.rollback()
            return [error] if len(batch) == 1 else self._one_by_one(batch)
        return outcomes

    def _recover(self, batch: Sequence[Operation], error: sqlite3.Error) -> list[object]:
        """Return what became of a batch that was not committed."""
        self._tx.rollback()
        if len(batch) > 1 and primary_code(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR):
            return self._one_by_one(batch)
        log.warning("a transaction failed: %s", error)
        return [store_error(error)] * len(batch)

    def _resolve(
        self, batch: Sequence[Operation], outcomes: list[object], error: sqlite3.Error, *, again: bool
    ) -> list[object]:
        """Return what became of a batch whose commit failed."""
        log.error("a commit failed: %s", error)
        moved, effects = self._tx.newest_move, self._tx.take_effects()
        self._tx.rollback()
        try:
            stored = self._tx.is_stored(moved) if moved is not None else None
        except sqlite3.Error as unreadable:
            log.error("the tail cannot be read: %s", unreadable)
            stored = None
        if stored is None:
            return [Ambiguous(f"it is unknown whether the commit was stored: {error}")] * len(batch)
        if stored:
            self._tx.effects = effects
            return outcomes
        return [store_error(error)] * len(batch) if again else self._attempt(batch, again=True)

    def _one_by_one(self, batch: Sequence[Operation]) -> list[object]:
        outcomes: list[object] = []
        told = Effects.none()
        for operation in batch:
            outcomes += self._attempt([operation])
            told.add(self._tx.take_effects())
        self._tx.effects = told
        return outcomes

    def _tell(self, batch: Sequence[Operation], outcomes: Sequence[object], effects: Effects) -> None:
        for operation, outcome in zip(batch, outcomes, strict=True):
            operation.settle(outcome)
        self._told(effects)
