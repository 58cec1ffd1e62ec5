"""What this process knows of runs it has just created, so that their first readers need not ask the file.

A run is created, claimed, loaded and followed within milliseconds, mostly by one process. Each of these readers would
cost a hop to a reader's thread to be told what ``create`` has just written.

Rules:
- What is remembered is what the file holds: whatever changes a run's record here ends its entry the moment it is asked
  for or told of, on the event loop, so before anyone who knows of the change can read.
- Other processes' changes are not told here. So an entry counts only while this process has been alone on the file
  without a break since the run was created (``Peers.period``). Who reads or follows just before company is noticed
  learns of what it did like every reader of that moment: the first look at others tells all followers and all inboxes.
- A run that waits in a queue is not remembered: others decide when it starts.
- Bounded: the oldest entries go first, and big records are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dualclaw import Message, Run
from dualclaw_server.engine.store import Frame, Head, Loaded, NewRun, RunKey, RunMessage

MOST = 256
"""Runs remembered at most."""
BIGGEST = 64 * 1024
"""Bytes of a record beyond which a run is not remembered."""


@dataclass(slots=True)
class _Fresh:
    period: int
    head: Head
    record: bytes
    message: bytes
    begins: bool
    """True: its conversation began with it."""
    untouched: bool = True
    """False once anything but its events has changed."""


class FreshRuns:
    """The runs created here that have no events yet. Everything here happens on the event loop.

    Args:
        period: since when this process is alone on the file, as a number that is never used again; None: it is not.
    """

    def __init__(self, period: Callable[[], int | None]) -> None:
        self._period = period
        self._runs: dict[RunKey, _Fresh] = {}

    def add(self, new: NewRun, head: Head, *, begins: bool) -> None:
        """Remember a run that was created and is to start at once; ``begins``: it is the first of its conversation."""
        period = self._period()
        if period is None or len(new.record) > BIGGEST:
            return
        if len(self._runs) >= MOST:
            del self._runs[next(iter(self._runs))]
        message = new.message.SerializeToString()
        self._runs[new.key] = _Fresh(period, head, new.record, message, begins)

    def appending(self, key: RunKey, frame: Frame) -> None:
        """A frame is on its way to a run's log."""
        fresh = self._runs.get(key)
        if fresh is not None:
            fresh.untouched = False
            if frame.count:
                del self._runs[key]

    def forget(self, key: RunKey) -> None:
        """A run has changed in another way."""
        self._runs.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._runs.clear()

    def loaded(self, key: RunKey) -> Loaded | None:
        """Return what a worker needs to begin with a run; None when the file must be asked."""
        fresh = self._known(key)
        if fresh is None or not fresh.untouched:
            return None
        run = Run()
        run.CopyFrom(fresh.head.run)
        message = RunMessage(0, Message.FromString(fresh.message))
        return Loaded(replace(fresh.head, run=run), fresh.record, b"", 0, (message,), ())

    def begins(self, key: RunKey) -> bool:
        """Return whether it is certain that nothing came before a run in its conversation."""
        fresh = self._known(key)
        return fresh is not None and fresh.begins

    def silent(self, key: RunKey) -> bool:
        """Return whether it is certain that a run has no events yet."""
        return self._known(key) is not None

    def _known(self, key: RunKey) -> _Fresh | None:
        fresh = self._runs.get(key)
        return fresh if fresh is not None and fresh.period == self._period() else None
