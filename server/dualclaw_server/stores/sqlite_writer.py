"""The one thread that writes: it commits the waiting operations of all runs in one transaction.

Rules:
- An operation is queued by one append to a deque (atomic in Python, no lock), results come back in one
  ``call_soon_threadsafe`` per batch: promises are kept, then everything else learns what happened.
- Text frames can wait: a batch of nothing else begins at the earliest ``gather`` seconds after the last
  one, so frames of many runs share a commit. Any other operation, and the first frame after a quiet time,
  goes at once.
- A refused operation fails alone. If the database refuses (no room), every operation of the batch is tried
  once more by itself, so that a big frame does not take the others' acks with it.
- An error of the commit itself leaves open what is on disk: Ambiguous. An error before it stores nothing.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from dualclaw.errors import EngineError
from dualclaw_server.engine.store import Ambiguous, Fenced, Frame, RunKey, Unavailable
from dualclaw_server.stores import sqlite_write
from dualclaw_server.stores.sqlite_file import store_error
from dualclaw_server.stores.sqlite_transaction import Effects, Transaction

log = logging.getLogger(__name__)

GATHER = 0.004
"""Seconds between two commits of nothing but text."""

_REFUSALS = (EngineError, Fenced, ValueError)


class Operation(Protocol):
    """Something to do in a transaction."""

    full: bool
    """True: its commit must survive a power loss."""
    urgent: bool
    """False: it may wait for others."""

    def apply(self, tx: Transaction) -> object:
        """Do it; raises EngineError, Fenced or ValueError before anything is written."""

    def settle(self, outcome: object) -> None:
        """Learn, on the event loop, what became of it: the result, or the exception."""


class Append:
    """The operation there is most of: a frame for a log."""

    __slots__ = ("expect", "frame", "full", "future", "key", "urgent")

    def __init__(self, key: RunKey, frame: Frame, expect: int, full: bool, future: asyncio.Future[int]) -> None:
        self.key = key
        self.frame = frame
        self.expect = expect
        self.full = full
        self.urgent = full or frame.durable
        self.future = future

    def apply(self, tx: Transaction) -> int:
        """Append the frame; gives the new version."""
        return sqlite_write.append(tx, self.key, self.frame, self.expect)

    def settle(self, outcome: object) -> None:
        """Keep the promise."""
        if self.future.done():
            return
        if isinstance(outcome, int):
            self.future.set_result(outcome)
        elif isinstance(outcome, BaseException):
            self.future.set_exception(outcome)


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
        effects = self._tx.take_effects()
        self._loop.call_soon_threadsafe(self._tell, batch, outcomes, effects)

    def _attempt(self, batch: Sequence[Operation]) -> list[object]:
        """Return each operation's outcome: its result, or the exception that says why there is none."""
        tx = self._tx
        outcomes: list[object] = []
        committing = False
        try:
            tx.begin(full=any(operation.full for operation in batch))
            for operation in batch:
                try:
                    outcomes.append(operation.apply(tx))
                except _REFUSALS as refused:
                    outcomes.append(refused)
            tx.flush()
            committing = True
            tx.commit()
        except sqlite3.Error as error:
            return self._recover(batch, error, committing=committing)
        except Exception as error:
            tx.rollback()
            return [error] if len(batch) == 1 else self._one_by_one(batch)
        return outcomes

    def _recover(self, batch: Sequence[Operation], error: sqlite3.Error, *, committing: bool) -> list[object]:
        try:
            self._tx.rollback()
        except sqlite3.Error:
            log.exception("rollback failed")
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if committing and code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY):
            log.error("a commit failed: %s", error)
            return [Ambiguous(f"it is unknown whether the commit was stored: {error}")] * len(batch)
        if len(batch) > 1 and code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_IOERR):
            return self._one_by_one(batch)
        log.warning("a transaction failed: %s", error)
        return [store_error(error)] * len(batch)

    def _one_by_one(self, batch: Sequence[Operation]) -> list[object]:
        outcomes: list[object] = []
        told = Effects([], [], [], [])
        for operation in batch:
            outcomes += self._attempt([operation])
            told.add(self._tx.take_effects())
        self._tx.effects = told
        return outcomes

    def _tell(self, batch: Sequence[Operation], outcomes: Sequence[object], effects: Effects) -> None:
        for operation, outcome in zip(batch, outcomes, strict=True):
            operation.settle(outcome)
        self._told(effects)
