"""Retention: the logs of runs that ended long ago are compacted away, by whichever process comes by.

Messages, records and request ids stay, and a run that waits for people is never touched by age; the store sees to
that (``RunStore.compact``). Several keepers on one store do each other no harm. A batch at a time, with a pause after
it, so that runs at work get their turn in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from dualclaw_server.engine.store import RunStore, StoreError

log = logging.getLogger(__name__)

DAY = 86_400.0
BATCH = 100
"""Runs compacted at once."""
PAUSE = 0.2
"""Seconds between two batches."""
SOONEST, LATEST = 1.0, 3_600.0
"""Bounds of the seconds between two rounds; a round comes every 24th part of the time that logs are kept."""


class Keeper:
    """Compacts old logs now and then.

    Args:
        store: whose runs they are.
        days: how long the log of a run is kept after its end; above 0.
        clock: seconds since the epoch.
    """

    def __init__(self, store: RunStore, days: float, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._kept = days * DAY
        self._clock = clock

    async def serve(self) -> None:
        """Go on until cancelled; a store that fails is tried again in the next round."""
        while True:
            try:
                count = await self.compact()
                if count:
                    log.info("compacted the logs of %d runs that ended long ago", count)
            except StoreError as error:
                log.warning("old logs cannot be compacted now: %r", error)
            await asyncio.sleep(min(max(self._kept / 24, SOONEST), LATEST))

    async def compact(self) -> int:
        """Compact all logs that are old enough by now, and return how many. Raises StoreError."""
        before, count = self._clock() - self._kept, 0
        while done := await self._store.compact(before, BATCH):
            count += done
            if done < BATCH:
                break
            await asyncio.sleep(PAUSE)
        return count
