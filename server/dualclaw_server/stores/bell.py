"""Waiting for work: claimers sleep here until there is something to try, without polling.

Rules:
- A claimer takes a ticket *before* it looks for work, and a ring after that makes its wait return at once:
  work that appears between looking and waiting is not missed.
- One ring wakes one claimer of the pool. Who finds work and sees that more is ready rings for the next, so
  a thousand sleeping claimers do not all run for one item. A wake whose claimer has left is passed on.
- Work that becomes ready by time alone has one timer per pool, at the nearest such time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from dualclaw_server.stores.records import Clock


@dataclass(slots=True)
class _Pool:
    rings: int = 0
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None
    due: float = 0.0


class Bell:
    """Wakes claimers. Everything here happens on the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pools: dict[str, _Pool] = {}

    def ticket(self, pool: str) -> int:
        """Return the number of rings so far; take it before looking for work."""
        return self._pools.setdefault(pool, _Pool()).rings

    def ring(self, pool: str) -> None:
        """Say that work may be ready."""
        here = self._pools.setdefault(pool, _Pool())
        here.rings += 1
        while here.waiters:
            waiter = here.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def ring_at(self, pool: str, due: float) -> None:
        """Ring when the clock says ``due``; at once if it is past."""
        delay = due - self._clock()
        if delay <= 0:
            self.ring(pool)
            return
        here = self._pools.setdefault(pool, _Pool())
        if here.timer is not None:
            if here.due <= due:
                return
            here.timer.cancel()
        here.due = due
        here.timer = asyncio.get_running_loop().call_later(delay, self._time, pool)

    def _time(self, pool: str) -> None:
        self._pools[pool].timer = None
        self.ring(pool)

    async def wait(self, pool: str, ticket: int, timeout: float) -> bool:
        """Wait until there was a ring after the ticket was taken; False when the time is over first."""
        here = self._pools.setdefault(pool, _Pool())
        if here.rings != ticket:
            return True
        if timeout <= 0:
            return False
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        here.waiters.append(waiter)
        try:
            await asyncio.wait((waiter,), timeout=timeout)
        except asyncio.CancelledError:
            if waiter.done():
                self.ring(pool)
            raise
        finally:
            if not waiter.done():
                waiter.cancel()
                here.waiters.remove(waiter)
        return not waiter.cancelled()

    def awaited(self) -> list[str]:
        """Return the pools somebody waits for; may be called from any thread."""
        return [name for name, pool in list(self._pools.items()) if pool.waiters]

    def close(self) -> None:
        """Wake everybody and stop the timers."""
        for name, pool in self._pools.items():
            if pool.timer is not None:
                pool.timer.cancel()
                pool.timer = None
            for _ in range(len(pool.waiters)):
                self.ring(name)
