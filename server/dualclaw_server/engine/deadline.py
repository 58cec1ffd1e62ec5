"""A deadline that is set anew for every read or write of a stream and costs next to nothing when they are quick.

``asyncio.timeout`` arms and disarms a timer per use. Here one timer runs per stream: when it fires too early,
because the deadline moved on meanwhile, it arms itself again. While nobody waits it fires into the void.
"""

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """Bounds one await at a time. Use it from one task at a time, and ``close`` it when the call is over."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._due = 0.0
        self._expired = False

    def now(self) -> float:
        """Return the clock that ``due`` refers to."""
        return self._loop.time()

    async def wait(self, awaitable: Awaitable[T], due: float = math.inf) -> T:
        """Return what the awaitable gives.

        Args:
            awaitable: what is waited for.
            due: until when; without it, until ``expire``.

        Raises:
            TimeoutError: it did not come until ``due``, or ``expire`` was called; the awaitable was cancelled.
        """
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a deadline bounds what a task waits for")
        self._task = task
        self._due = due
        self._expired = False
        cancelling = task.cancelling()
        if due < math.inf and (self._timer is None or self._timer.when() > due):
            self._arm(due)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._expired:
                self._expired = False
                if task.uncancel() <= cancelling:
                    raise TimeoutError from None
            raise
        finally:
            self._task = None
            if self._expired:
                task.uncancel()

    def expire(self) -> None:
        """End the wait there is, if any, as if it were due."""
        if self._task is not None and not self._expired:
            self._expired = True
            self._task.cancel()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, due: float) -> None:
        self.close()
        self._timer = self._loop.call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._loop.time() >= self._due:
            self.expire()
        elif self._due < math.inf:
            self._arm(self._due)
