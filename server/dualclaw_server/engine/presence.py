"""Who is reading a run: what on_disconnect CANCEL needs to know.

A run started with CANCEL is cancelled once its starter has left and nobody has been attached for PATIENCE
seconds. Presence counts the readers of this process; whoever comes back in time saves the run. The worker
reports such a run when it takes it up, because its starter may have left before it ever was a reader: while
the run was being stored, or with the process before this one.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dualclaw_server.engine.store import RunKey

PATIENCE = 10.0
"""Seconds without a reader."""


class Presence:
    """Counts readers; calls ``abandoned`` on the event loop for a run nobody reads any more."""

    def __init__(self, abandoned: Callable[[RunKey], None], patience: float = PATIENCE) -> None:
        self._abandoned = abandoned
        self._patience = patience
        self._readers: dict[RunKey, int] = {}
        self._starter_left: set[RunKey] = set()
        self._timers: dict[RunKey, asyncio.TimerHandle] = {}

    @contextmanager
    def attached(self, key: RunKey, *, cancel_when_alone: bool = False) -> Iterator[None]:
        """Count a reader while it is inside. ``cancel_when_alone``: it is the starter of a run with CANCEL."""
        self._readers[key] = self._readers.get(key, 0) + 1
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        try:
            yield
        finally:
            if cancel_when_alone:
                self._starter_left.add(key)
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
                if key in self._starter_left:
                    self._wait(key)

    def begun(self, key: RunKey) -> None:
        """A run with CANCEL is at work, whether or not anybody reads it yet."""
        self._starter_left.add(key)
        if key not in self._readers and key not in self._timers:
            self._wait(key)

    def forget(self, key: RunKey) -> None:
        """The run is final: nothing is left to cancel."""
        self._starter_left.discard(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Drop every timer."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _wait(self, key: RunKey) -> None:
        self._timers[key] = asyncio.get_running_loop().call_later(self._patience, self._give_up, key)

    def _give_up(self, key: RunKey) -> None:
        self._timers.pop(key, None)
        self._starter_left.discard(key)
        self._abandoned(key)
