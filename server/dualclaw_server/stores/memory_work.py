"""Work items in memory: who is to be delivered, and when; the rules are those of ``sqlite_work``."""

from __future__ import annotations

from collections.abc import Iterable

from dualclaw_server.stores.bell import Bell
from dualclaw_server.stores.memory_state import Item, MemoryClaim, StoredRun
from dualclaw_server.stores.records import INTERRUPTED, Clock


class Work:
    """The work items of all runs.

    Args:
        clock: seconds since the epoch.
        bell: rung when a run may have become ready.
    """

    def __init__(self, clock: Clock, bell: Bell) -> None:
        self._clock = clock
        self._bell = bell
        self._tokens = 0
        self._awake: dict[StoredRun, None] = {}  # whatever a claim may find: an item in nobody's hand, or timers

    def make_due(self, run: StoredRun, *, for_signal: bool) -> None:
        """See that the run is delivered, now or after the delivery in hand."""
        now = self._clock()
        if run.item is None:
            run.item = Item(ready=now)
            self._awake[run] = None
        elif not run.item.token:
            run.item.ready = min(run.item.ready, now)
        elif for_signal:
            run.item.again_for_signal = True
        else:
            run.item.again = True
        self._bell.ring(run.pool)

    def wake(self, run: StoredRun, at: float) -> None:
        """Set a timer."""
        run.timers.add(at)
        self._awake[run] = None
        self._bell.ring_at(run.pool, at)

    def claim(self, pool: str, worker: str) -> MemoryClaim | None:
        """Take the item that has been ready the longest; None when nothing is ready."""
        now = self._clock()
        runs = [run for run in self._awake if run.pool == pool]
        for run in runs:
            fired = {at for at in run.timers if at <= now}
            run.timers -= fired
            if fired:
                self.make_due(run, for_signal=False)
        items = sorted((run.item.ready, run.number, run) for run in runs if run.item is not None and not run.item.token)
        ready = [run for due, _, run in items if due <= now]
        times = [due for due, _, _ in items if due > now] + [at for run in runs for at in run.timers]
        if times:
            self._bell.ring_at(pool, min(times))
        if not ready:
            return None
        if len(ready) > 1:
            self._bell.ring(pool)
        run = ready[0]
        assert run.item is not None  # noqa: S101 - chosen for having one
        self._tokens += 1
        run.item.token = self._tokens
        run.item.worker = worker
        run.item.deliveries += 1
        run.item.again = run.item.again_for_signal = False
        if not run.timers:
            del self._awake[run]
        return MemoryClaim(run, run.item, self._ack, self._nak)

    def _ack(self, run: StoredRun) -> None:
        item = run.item
        run.item = None
        if item is not None and (item.again or (item.again_for_signal and (run.state != INTERRUPTED or run.unread()))):
            self.make_due(run, for_signal=False)

    def _nak(self, run: StoredRun, delay: float) -> None:
        item = run.item
        assert item is not None  # noqa: S101 - the claim is in hand
        item.token = 0
        item.ready = self._clock() + (0 if item.again or item.again_for_signal else delay)
        item.again = item.again_for_signal = False
        self._awake[run] = None
        self._bell.ring_at(run.pool, item.ready)

    def release(self, runs: Iterable[StoredRun]) -> None:
        """Make what is in hand claimable at once."""
        for run in runs:
            if run.item is not None and run.item.token:
                run.item.token = 0
                run.item.ready = self._clock()
                self._awake[run] = None

    def take_back(self, run: StoredRun) -> bool:
        """Make one run's item claimable at once, whoever holds it; False when it has none."""
        if run.item is None:
            return False
        run.item.token = 0
        run.item.ready = self._clock()
        run.item.again = run.item.again_for_signal = False
        self._awake[run] = None
        self._bell.ring(run.pool)
        return True

    def drop(self, run: StoredRun, *, held_too: bool) -> None:
        """Drop what could still wake a run; its item in hand only with ``held_too``, else that goes with the ack."""
        run.timers.clear()
        self._awake.pop(run, None)
        if run.item is not None:
            run.item.again = run.item.again_for_signal = False
            if held_too or not run.item.token:
                run.item = None
