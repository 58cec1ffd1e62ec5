"""Adapters of the two SSE routes: the original one of today's front-ends, and the native one.

Rules of the original route, byte for byte what its front-ends always got
- Events are thinned: ``seq``, ``trace_id``, ``tenant_id``, ``claw`` and ``run_id`` stay away (they grow a delta 2.5
  times), but ``done`` and ``error`` keep ``trace_id``, the one handle for support. ``wire_meta=True`` keeps all.
- ``interrupt`` is not sent: the waiting step says so itself. That is no loss, so it does not count as dropped.
- ``rewind`` is not sent: its front-ends only append. ``shown_text`` has the rule and the reason; text and reasoning
  follow it apart from each other. A rewind that adds to both sends the reasoning first.
- Every terminal event starts text and reasoning afresh, for the next segment of a run that was interrupted.
- An event that was lost on the way may have been text, so no text is appended after it until ``done``.

The native route carries all seven events whole; an event newer than this code is skipped and counted.

Two ways to use an adapter, never both on one: as ``on_event`` callback with the queue and ``frames()`` (the producer
and the response are different tasks), or ``encode()``, which turns events into bytes at once (a gateway that
reads the engine's stream in the response's own task needs no queue, and a queue costs more than the frame).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence

from dualclaw import EngineEvent
from dualclaw.events import Meta, make_delta, make_reasoning, to_wire
from dualclaw_clients.adapters.base import BaseClawAdapter, logger
from dualclaw_clients.adapters.frames import (
    DELTA_HEAD,
    REASONING_HEAD,
    TEXT_TAIL,
    Wire,
    done_head,
    native_envelope,
    native_event,
    native_frame,
    native_text,
    native_text_event,
    original_frame,
    original_text,
    quote,
    step_event_head,
)
from dualclaw_clients.adapters.shown_text import ShownText

_ENVELOPE_BUT_TRACE = ("seq", "tenant_id", "claw", "run_id")


class _QueueAdapter(BaseClawAdapter, ABC):
    """The queue between the task that brings events and the task that sends frames.

    Args:
        queue: holds wire dicts, then the sentinel None; own and unbounded when not given. With a bounded queue
            ``emit`` waits for room, which slows the run down to what the reader takes.
        claw, trace_id, tenant_id: see BaseClawAdapter.
    """

    put_timeout = 30.0
    """Seconds an event waits for room in a bounded queue before it counts as failed; its reader is gone."""

    def __init__(
        self,
        queue: asyncio.Queue[Wire | None] | None = None,
        *,
        claw: str = "web",
        trace_id: str = "",
        tenant_id: str = "",
    ) -> None:
        super().__init__(claw=claw, trace_id=trace_id, tenant_id=tenant_id)
        self._queue = queue
        self._closed = False

    @property
    def queue(self) -> asyncio.Queue[Wire | None]:
        """The queue; an own one is made when it is first used, for ``encode`` needs none."""
        if self._queue is None:
            self._queue = asyncio.Queue()
        return self._queue

    @staticmethod
    @abstractmethod
    def frame(wire: Mapping[str, object]) -> str:
        """Return the frame of a wire dict, whole and as it is."""

    @abstractmethod
    def wires(self, event: EngineEvent) -> Sequence[Wire] | None:
        """Return what goes out for an event, in order; None when the event has no wire form."""

    def encode(self, events: Iterable[EngineEvent | Wire]) -> bytes:
        """Return the frames of some events in order, b"" when nothing is to be sent.

        Counts like ``emit`` and raises as little; what cannot be encoded is left out.
        """
        encoded = []
        for event in events:
            self.received += 1
            try:
                encoded.append(self._encode_one(event))
            except Exception as error:
                self._fail(error)
        return b"".join(encoded)

    @abstractmethod
    def _encode_one(self, event: EngineEvent | Wire) -> bytes:
        """Return the frames of one event; b"" when nothing is to be sent."""

    async def deliver(self, event: EngineEvent) -> bool:
        """Put what goes out for an event into the queue; after ``close`` it is dropped."""
        if self._closed:
            return False
        wires = self.wires(event)
        if wires is None:
            return False
        for wire in wires:
            await self._put(wire)
        return True

    async def _put(self, wire: Wire | None) -> None:
        try:
            self.queue.put_nowait(wire)
        except asyncio.QueueFull:
            async with asyncio.timeout(self.put_timeout):
                await self.queue.put(wire)

    async def frames(self) -> AsyncGenerator[str, None]:
        """Yield the frames of the queue until the sentinel; close the generator when you leave early."""
        while not (self._closed and self.queue.empty()):
            wire = await self.queue.get()
            if wire is None:
                return
            try:
                frame = self.frame(wire)
            except Exception as error:
                self._fail(error)
                continue
            yield frame

    async def close(self) -> None:
        """End ``frames()`` after what is queued; later calls do nothing, later events are dropped."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._put(None)
        except Exception as error:
            # A reader that comes back still ends: the queue runs empty and the adapter is closed.
            logger.warning("%s: closed without a sentinel: %r", type(self).__name__, error)


class SseAdapter(_QueueAdapter):
    """The original SSE route: five event types, thinned, no id lines.

    Args:
        queue: see ``_QueueAdapter``: an asyncio.Queue of wire dicts, own and unbounded when not given.
        wire_meta: keep all envelope keys.
        claw, trace_id, tenant_id: see BaseClawAdapter.
    """

    def __init__(
        self,
        queue: asyncio.Queue[Wire | None] | None = None,
        *,
        wire_meta: bool = False,
        claw: str = "web",
        trace_id: str = "",
        tenant_id: str = "",
    ) -> None:
        super().__init__(queue, claw=claw, trace_id=trace_id, tenant_id=tenant_id)
        self.wire_meta = wire_meta
        self._text = ShownText()
        self._reasoning = ShownText()

    @staticmethod
    def frame(wire: Mapping[str, object]) -> str:
        """Return ``data: {json}`` and a blank line; serialises only, thins nothing."""
        return original_text(wire)

    async def deliver(self, event: EngineEvent) -> bool:
        """Put what goes out for an event into the queue; given up while it waits, it is lost."""
        try:
            return await super().deliver(event)
        except asyncio.CancelledError:
            self._lose_text()
            raise

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._lose_text()

    def _lose_text(self) -> None:
        self._text.lose()
        self._reasoning.lose()

    def _encode_one(self, event: EngineEvent | Wire) -> bytes:
        if isinstance(event, EngineEvent) and not self.wire_meta:
            # Thinned events need next to nothing of the envelope, so the usual ones skip the dict altogether.
            kind = event.WhichOneof("payload")
            if kind == "delta":
                text = self._text.append(event.delta.content)
                return b"" if text is None else DELTA_HEAD + quote(text) + TEXT_TAIL
            if kind == "reasoning":
                text = self._reasoning.append(event.reasoning.content)
                return b"" if text is None else REASONING_HEAD + quote(text) + TEXT_TAIL
            if kind == "step" and (head := step_event_head(event.step)) is not None:
                return b"data: %b}\n\n" % head
            if kind == "done":
                head = done_head(event.done)
                self._start_afresh()
                trace_id = event.trace_id or self.trace_id
                return b"data: %b%b}\n\n" % (head, b', "trace_id": ' + quote(trace_id) if trace_id else b"")
        whole = self._complete(event)
        if whole is None:
            return b""
        wires = self.wires(whole)
        if wires is None:
            self._drop(whole)
            return b""
        return b"".join(map(original_frame, wires))

    def wires(self, event: EngineEvent) -> Sequence[Wire] | None:
        """Return what an original front-end gets for an event, thinned; () for nothing, None for no wire form."""
        kind = event.WhichOneof("payload")
        if kind == "interrupt":
            return ()
        if kind == "rewind":
            return self._rewind(event)
        wire = to_wire(event)
        if wire is None:
            return None
        if kind in ("delta", "reasoning"):
            text = (
                self._text.append(event.delta.content)
                if kind == "delta"
                else self._reasoning.append(event.reasoning.content)
            )
            if text is None:
                return ()
            wire["content"] = text
        elif kind in ("done", "error"):
            self._start_afresh()
        return (self._thin(wire),)

    def _start_afresh(self) -> None:
        self._text = ShownText()
        self._reasoning = ShownText()

    def _rewind(self, event: EngineEvent) -> Sequence[Wire]:
        meta: Meta = {
            "seq": event.seq,
            "trace_id": event.trace_id,
            "tenant_id": event.tenant_id,
            "claw": event.claw,
            "run_id": event.run_id,
        }
        wires: list[Wire] = []
        for make, text in (
            (make_reasoning, self._reasoning.rewind(event.rewind.reasoning)),
            (make_delta, self._text.rewind(event.rewind.content)),
        ):
            wire = None if text is None else to_wire(make(text, **meta))
            if wire is not None:
                wires.append(self._thin(wire))
        return wires

    def _thin(self, wire: Wire) -> Wire:
        if not self.wire_meta:
            for key in _ENVELOPE_BUT_TRACE:
                wire.pop(key, None)
            if wire["type"] not in ("done", "error"):
                wire.pop("trace_id", None)
        return wire


class NativeSseAdapter(_QueueAdapter):
    """The native SSE route: all seven events with every envelope key, ``id:`` = seq."""

    _envelope_of: tuple[str, str, str, str] = ("", "", "", "")
    _envelope: bytes = b""

    @staticmethod
    def frame(wire: Mapping[str, object]) -> str:
        """Return the id line, the data line and a blank line."""
        return native_text(wire)

    def wires(self, event: EngineEvent) -> Sequence[Wire] | None:
        """Return the event's wire dict; None when it has none."""
        wire = to_wire(event)
        return None if wire is None else (wire,)

    def _encode_one(self, event: EngineEvent | Wire) -> bytes:
        if isinstance(event, EngineEvent):
            # The usual events go straight into a frame: no copy to complete them, no dict.
            kind = event.WhichOneof("payload")
            if kind == "delta":
                return native_text_event(kind, event.delta.content, *self._position(event))
            if kind == "reasoning":
                return native_text_event(kind, event.reasoning.content, *self._position(event))
            if kind == "step" and (head := step_event_head(event.step)) is not None:
                return native_event(head, *self._position(event))
            if kind == "done":
                return native_event(done_head(event.done), *self._position(event))
        whole = self._complete(event)
        if whole is None:
            return b""
        wire = to_wire(whole)
        if wire is None:
            self._drop(whole)
            return b""
        return native_frame(wire)

    def _position(self, event: EngineEvent) -> tuple[int, bytes]:
        """Return the seq of an event and its other envelope keys, what it lacks filled in."""
        seq = self._take_seq(event.seq)
        keys = (
            event.trace_id or self.trace_id,
            event.tenant_id or self.tenant_id,
            event.claw or self.claw,
            event.run_id,
        )
        if keys != self._envelope_of:
            # The same for all events of a segment, so it is quoted once.
            self._envelope, self._envelope_of = native_envelope(*keys), keys
        return seq, self._envelope
