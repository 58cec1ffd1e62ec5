"""When the frames of mere text begin: each by itself while the process has little to do, together when it is busy.

A frame costs a commit, a wake of the store's thread and one of the loop, and a message to each reader, whatever is in
it. Many runs whose tokens come one by one would pay that for every token. So while more than BUSY frames a second begin
in a process, those that are due begin together at the next tick: no text waits for it longer than TICK seconds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

TICK = 0.020
"""Seconds between two moments at which frames begin in a busy process."""
BUSY = 200.0
"""Frames a second beyond which a process is busy: four a tick."""
_WINDOW = 0.1
"""Seconds over which frames are counted."""


class Cancellable(Protocol):
    """What is to come and can still be prevented."""

    def cancel(self) -> None:
        """Have it not happen."""


class _Place:
    """A frame's place in a tick."""

    __slots__ = ("begin",)

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin: Callable[[], None] | None = begin

    def cancel(self) -> None:
        """Leave it."""
        self.begin = None


class Pace:
    """Says when frames begin; one for all runs of a process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticks: dict[int, list[_Place]] = {}
        self._since = self._loop.time()
        self._count = 0
        self._rate = 0.0

    def begin_at(self, due: float, begin: Callable[[], None]) -> Cancellable:
        """Have a frame begin when the loop's clock says ``due``, or up to TICK later in company."""
        now = self._loop.time()
        if not self._is_busy(now):
            return self._loop.call_at(due, begin) if due > now else self._loop.call_soon(begin)
        place = _Place(begin)
        tick = math.ceil(max(due, now) / TICK)
        places = self._ticks.get(tick)
        if places is not None:
            places.append(place)
        else:
            self._ticks[tick] = [place]
            self._loop.call_at(tick * TICK, self._begin, tick)
        return place

    def count(self) -> None:
        """Count a frame that begins."""
        self._count += 1

    def _is_busy(self, now: float) -> bool:
        if (past := now - self._since) >= _WINDOW:
            self._rate, self._count, self._since = self._count / past, 0, now
        return self._rate > BUSY

    def _begin(self, tick: int) -> None:
        for place in self._ticks.pop(tick):
            if place.begin is not None:
                self._loop.call_soon(place.begin)  # so that none has to do with another's failure
