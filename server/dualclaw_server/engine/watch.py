"""What can end a run at work from outside: a wish in its inbox, and its time.

While nothing happens this costs one timer: no task waits for a wish, the inbox is read when its bell rings.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from dualclaw_server.engine.inbox import find_cancel
from dualclaw_server.engine.segment import Segment
from dualclaw_server.engine.store import RunStore, StoreError

log = logging.getLogger(__name__)

_RETRY = 1.0
"""Seconds after which an inbox that could not be read is read again."""

End = Literal["ended", "cancelled", "budget_exceeded"]
"""The agent came to its end, the run is asked to end, or its time is over."""


class Watch:
    """Watches over one run at work. Made where its agent begins; ``close`` it whatever comes."""

    def __init__(self, store: RunStore, segment: Segment) -> None:
        self.signals: list[str] = []
        """Ids of the signals by which the run is asked to end."""
        self._store = store
        self._segment = segment
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[End] = self._loop.create_future()
        self._signalled = False
        self._reading: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.set_clock()

    async def end(self) -> End:
        """Return what ends the work; whatever came first. Raises EngineError when the run is gone."""
        return await self._end

    def set_clock(self) -> None:
        """Count the time anew: another agent is in control, or another limit holds."""
        due = self._loop.time() + max(0.0, self._segment.seconds_left())
        if self._timer is not None:
            if self._timer.when() <= due:  # it finds out that there is time left
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._time)

    def signal(self) -> None:
        """Something has reached the run's inbox."""
        self._signalled = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="inbox")

    def ended(self, _: asyncio.Task[object]) -> None:
        """The agent has come to its end."""
        self._settle("ended")

    def close(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            self._reading.cancel()

    def _time(self) -> None:
        self._timer = None
        if self._segment.seconds_left() > 0:
            self.set_clock()
        else:
            self._settle("budget_exceeded")

    async def _read(self) -> None:
        try:
            while self._signalled:
                self._signalled = False
                try:
                    loaded = await self._store.load(self._segment.trace.key)
                except StoreError as error:  # a read that failed is no reason to give up a run at work
                    log.warning("the inbox of run %s cannot be read: %r", self._segment.trace.key.run_id, error)
                    await asyncio.sleep(_RETRY)
                    self._signalled = True
                    continue
                if find_cancel(loaded.unread) is not None:
                    self.signals = [signal.signal_id for signal in loaded.unread]
                    self._settle("cancelled")
                    return
        except Exception as error:
            if not self._end.done():
                self._end.set_exception(error)
            else:
                run = self._segment.trace.key.run_id
                log.warning("the inbox of run %s cannot be read, and its work is over: %r", run, error)

    def _settle(self, end: End) -> None:
        if not self._end.done():
            self._end.set_result(end)
