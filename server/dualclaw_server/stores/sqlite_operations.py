"""What can be asked of the writer: an operation is applied in a transaction and settled on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from dualclaw_server.engine.store import Frame, RunKey
from dualclaw_server.stores import sqlite_write
from dualclaw_server.stores.sqlite_transaction import Transaction

T = TypeVar("T")


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


class Call(Generic[T]):
    """An operation that is a function. ``unwanted`` gets the result when its caller has left meanwhile."""

    __slots__ = ("_do", "_unwanted", "full", "future", "urgent")

    def __init__(self, do: Callable[[Transaction], T], *, full: bool, unwanted: Callable[[T], None] | None) -> None:
        self._do = do
        self._unwanted = unwanted
        self.full = full
        self.urgent = True
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def apply(self, tx: Transaction) -> T:
        """Call the function."""
        return self._do(tx)

    def settle(self, outcome: object) -> None:
        """Keep the promise, or have the result undone."""
        if isinstance(outcome, BaseException):
            if not self.future.done():
                self.future.set_exception(outcome)
        elif not self.future.done():
            self.future.set_result(cast("T", outcome))
        elif self._unwanted is not None:
            self._unwanted(cast("T", outcome))

    async def wait(self) -> T:
        """Wait for the result."""
        try:
            return await self.future
        except asyncio.CancelledError:
            # The result may be here already, only not handed over.
            done = self.future.done() and not self.future.cancelled() and self.future.exception() is None
            if done and self._unwanted is not None:
                self._unwanted(self.future.result())
            raise
