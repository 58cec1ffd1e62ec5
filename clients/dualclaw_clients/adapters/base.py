"""What every adapter shares: it takes events, completes them, counts them, and never fails its caller.

Rules
- An adapter stands in the path of a run's events. Whatever goes wrong in it or in its channel stays here: it is
  counted and logged, and the run goes on. Only cancellation passes through.
- An event is shared by all who watch the run, so it is never changed. What it lacks is filled into a copy; the
  events of an engine are complete, so that the usual path copies nothing.
"""

import logging

from dualclaw import EngineEvent
from dualclaw.events import from_wire
from dualclaw_clients.adapters.frames import Wire

logger = logging.getLogger(__name__)

_MAX_SEQ = 2**31 - 1


class BaseClawAdapter:
    """The ``on_event`` callback of a channel: ``await adapter(event)``.

    Subclasses override ``deliver``. A bare adapter only counts.

    Args:
        claw: kind of channel, such as "web"; for events that name none.
        trace_id: for events that carry none.
        tenant_id: for events that carry none.

    Attributes:
        received: calls of ``emit``.
        dropped: events this code has no form for (unknown, or newer than it), or that came after the end.
        failed: events lost to an exception in the adapter or its channel.
    """

    def __init__(self, *, claw: str = "", trace_id: str = "", tenant_id: str = "") -> None:
        self.claw = claw
        self.trace_id = trace_id
        self.tenant_id = tenant_id
        self.received = 0
        self.dropped = 0
        self.failed = 0
        self._last_seq = 0
        self._warned_of_newer = False

    async def __call__(self, event: EngineEvent | Wire) -> None:
        """Take one event; the same as ``emit``, and as quiet where a subclass has an ``emit`` of its own."""
        try:
            await self.emit(event)
        except Exception as error:
            self._fail(error)

    async def emit(self, event: EngineEvent | Wire) -> None:
        """Take one event, or the dict of an older producer, and hand it on; raises nothing but cancellation."""
        self.received += 1
        try:
            whole = self._complete(event)
            if whole is not None and not await self.deliver(whole):
                self._drop(whole)
        except Exception as error:
            self._fail(error)

    async def deliver(self, event: EngineEvent) -> bool:
        """Carry one event, complete and not to be changed, to the channel.

        Returns False when this channel has no form for it, which counts as dropped. May raise.
        """
        return True

    def _complete(self, event: EngineEvent | Wire) -> EngineEvent | None:
        """Return the event with all envelope fields this adapter knows, or None after dropping it."""
        whole = event if isinstance(event, EngineEvent) else from_wire(event)
        if whole is None:
            self.dropped += 1
            kind = event.get("type") if isinstance(event, dict) else None
            told = kind[:80] if isinstance(kind, str) else type(event).__name__
            logger.warning("%s: dropped an event of unknown type %r", type(self).__name__, told)
            return None
        seq = whole.seq
        if (
            seq > 0
            and (whole.trace_id or not self.trace_id)
            and (whole.tenant_id or not self.tenant_id)
            and (whole.claw or not self.claw)
        ):
            self._last_seq = seq
            return whole
        if whole is event:
            whole = EngineEvent()
            whole.CopyFrom(event)
        whole.seq = self._take_seq(seq)
        whole.trace_id = whole.trace_id or self.trace_id
        whole.tenant_id = whole.tenant_id or self.tenant_id
        whole.claw = whole.claw or self.claw
        return whole

    def _take_seq(self, seq: int) -> int:
        """Return the position of an event that says ``seq``, and note it: the next after the last if it says none."""
        self._last_seq = seq if seq > 0 else min(self._last_seq + 1, _MAX_SEQ)
        return self._last_seq

    def _drop(self, event: EngineEvent) -> None:
        self.dropped += 1
        # Once: with a newer engine this may be every other event of a long run.
        if not self._warned_of_newer:
            self._warned_of_newer = True
            kind = event.WhichOneof("payload")
            logger.warning("%s: dropped a %s event: newer than this code, or after the end", type(self).__name__, kind)

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        # The first with its traceback; a broken channel would repeat it for every token.
        if self.failed == 1:
            logger.error("%s: an event was lost", type(self).__name__, exc_info=error)
        else:
            logger.debug("%s: an event was lost: %r", type(self).__name__, error)
