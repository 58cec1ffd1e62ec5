"""The right to work on a run, as the work itself sees it.

Rules

- What cannot be taken back, a model or tool call, starts only while the lease is held and the log can be written.
- A lease that was lost once stays lost: nobody keeps it any more, so the run may be another process's at any moment.
  Whoever finds it lost drops the run; the log decides what becomes of frames already on their way.
- A process that was frozen finds out by looking, before any heartbeat could tell it. So every start looks, and a
  watch ends what has been under way since (``worker``).
"""

from __future__ import annotations

from dualclaw_server.engine.frames import FrameWriter
from dualclaw_server.engine.store import Claim, StoreError


class LeaseLost(StoreError):
    """The run may be another process's by now; this one must start nothing more for it."""


class Lease:
    """One claimed run's lease, together with the writer of its log."""

    def __init__(self, claim: Claim, writer: FrameWriter) -> None:
        self._claim = claim
        self._writer = writer

    def check(self) -> None:
        """Make sure that a call may start. Raises StoreError: LeaseLost, or what broke the writer."""
        if self._claim.lost:
            self._writer.give_up(LeaseLost("its lease is lost"))
        if self._writer.failure is not None:
            raise self._writer.failure
