"""The frame writer: the one place that coalesces, numbers, serialises and commits the events of a run.

Rules

- Unsent text waits as text. Sealing merges it into one event, gives it its seq and its bytes, once: the log,
  every stream and every subscriber share them. The event is folded into ``view`` at the same moment, so the
  engine reads the very text that clients will read.
- The first text after a quiet time commits at once: at the end of the loop's turn, with all that came in one read of
  the model. While a commit is in flight, or the last one of mere text began less than FRAME_TIME ago, text
  accumulates; at MAX_TEXT it is sealed, and any other event seals what waits. In a busy process frames begin together
  (``pace``), but for those after a time so quiet that somebody is waiting.
- ``commit`` makes a durable frame of all that waits, plus a checkpoint, messages, signals. Frames take effect
  in call order, so when a frame is committed every earlier one is.
- Nothing follows the first frame of an epoch before that is committed. Until then the log may still be another
  writer's: a frame behind a refused one could fit version and seq by accident, and be stored with a hole before it.
- Text, and a rewind of it, may go out between two checkpoints, for recovery withdraws it by a rewind. A step
  cannot be withdrawn, so every other event waits for the frame that carries the state it belongs to.
- At most one frame of mere text is in flight. No task and no lock per token: appends report back through
  their futures, and one timer per run is pending at most. What a store commits at once has landed at once.
- Beyond MAX_WAITING bytes not yet committed, ``congested`` turns true and the reader of the model waits in
  ``room``. That is the only back-pressure; a slow client never causes it, for clients read the log.
- The first failed append breaks the writer: ``failure`` is set, ``on_failure`` called once, everything later
  raises. What was not committed has been shown to nobody. Likewise nothing can follow a terminal frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypedDict, Unpack

from dualclaw import EngineEvent, Run, RunState
from dualclaw.events import make_rewind
from dualclaw.fold import RunView
from dualclaw_server.engine.pace import Cancellable, Pace
from dualclaw_server.engine.store import Frame, RunKey, RunMessage, RunStore, StoreError, Sync

FRAME_TIME = 0.020
"""Seconds between the starts of two frames of mere text."""
QUIET = 0.250
"""Seconds without text after which the next one keeps nobody waiting."""
MAX_TEXT = 16 * 1024
"""Bytes of text merged into one event at most."""
MAX_WAITING = 256 * 1024
"""Bytes not yet committed beyond which the model is not read on."""
_WIDEST = 4
"""Bytes of the widest code point."""
_RUNNING = RunState.RUN_STATE_RUNNING


class _Durable(TypedDict, total=False):
    """What a durable frame has beside events; see ``Frame``."""

    durable: bool
    ends_segment: bool
    checkpoint: bytes
    messages: tuple[RunMessage, ...]
    signals: tuple[str, ...]
    run: Run | None
    sync: Sync


class FrameWriter:
    """Writes one segment of one run; made by whoever claimed it.

    Args:
        store, key: where the log is.
        view: the fold of every event so far; kept up to date.
        epoch: epoch of this claim, one above the last.
        version: the log's version.
        envelope: an event without seq and payload, whose other fields (trace, tenant, claw, run) go on every event.
        pace: the process's.

    ``on_failure`` may be set: it is called once, on the event loop, when an append fails.
    """

    def __init__(
        self,
        store: RunStore,
        key: RunKey,
        view: RunView,
        *,
        epoch: int,
        version: int,
        envelope: EngineEvent,
        pace: Pace,
    ) -> None:
        self._store = store
        self._key = key
        self.view = view
        self._epoch = epoch
        self._version = version
        self._envelope = envelope.trace_id, envelope.tenant_id, envelope.claw, envelope.run_id
        self._piece = EngineEvent()
        self._piece.CopyFrom(envelope)
        self.on_failure: Callable[[BaseException], None] = _ignore
        self._loop = asyncio.get_running_loop()
        self._pace = pace
        self._next_seq = view.last_seq + 1
        self._text: list[str] = []
        self._text_is_reasoning = False
        self._text_size = 0
        self._sealed: list[bytes] = []
        self._sealed_size = 0
        self._needs_checkpoint = False
        self._flying = 0
        self._flying_size = 0
        self._owned = False
        """True once a frame of this epoch is in the log."""
        self._held: list[tuple[Frame, int, asyncio.Future[int]]] = []
        """Frames that wait for the first one, with the version they expect."""
        self._last_text = 0.0
        self._timer: Cancellable | None = None
        self._room: asyncio.Future[None] | None = None
        self.failure: BaseException | None = None

    # What is written

    def shown(self) -> str:
        """Seal what waits and return the text of this segment as clients will have it; empty before its first event."""
        self.seal()
        return "" if self.view.terminal is not None else self.view.text

    def shown_reasoning(self) -> str:
        """Seal what waits and return the reasoning of this segment as clients will have it."""
        self.seal()
        return "" if self.view.terminal is not None else self.view.reasoning

    def text(self, text: str) -> None:
        """Add text of the answer."""
        self._add(text, reasoning=False)

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._add(text, reasoning=True)

    def event(self, event: EngineEvent) -> None:
        """Add any other event, made by a ``make_*`` factory without envelope; it waits for a durable frame."""
        self._add_event(event)
        self._needs_checkpoint = True

    def rewind(self, text: str, reasoning: str, *, reason: str, attempt: int) -> None:
        """Say that text and reasoning of the segment are now exactly these. Like text it goes out at once."""
        self._add_event(make_rewind(text, reasoning=reasoning, reason=reason, attempt=attempt))
        if not self._flying and self._timer is None:
            self._flush_when_due()

    def _add_event(self, event: EngineEvent) -> None:
        self._check()
        self.seal()
        event.trace_id, event.tenant_id, event.claw, event.run_id = self._envelope
        self._seal_event(event)

    def commit(
        self,
        *,
        checkpoint: bytes,
        messages: Sequence[RunMessage] = (),
        signals: Sequence[str] = (),
        run: Run | None = None,
        state: RunState.ValueType = _RUNNING,
        ends_segment: bool = False,
        sync: Sync = Sync.NORMAL,
    ) -> asyncio.Future[int]:
        """Make a durable frame of all that waits. The future ends once it is committed, or with a StoreError;
        shield it where the waiting task may be cancelled, for the frame is on its way all the same.
        """
        self._check()
        self.seal()
        self._needs_checkpoint = False
        committed = self._append(
            state,
            durable=True,
            ends_segment=ends_segment,
            checkpoint=checkpoint,
            messages=tuple(messages),
            signals=tuple(signals),
            run=run,
            sync=sync,
        )
        if ends_segment:
            self.close()
        return committed

    # Back-pressure and the end

    @property
    def congested(self) -> bool:
        """True while more than MAX_WAITING bytes wait to be committed."""
        return self._text_size + self._sealed_size + self._flying_size > MAX_WAITING

    async def room(self) -> None:
        """Wait until the writer is no longer congested. Raises StoreError when it breaks meanwhile."""
        while self.congested:
            self._check()
            self._room = self._loop.create_future()
            await self._room
        self._check()

    def give_up(self, error: BaseException) -> None:
        """Write nothing more for this reason, as if an append had failed with it."""
        self._fail(error)

    def close(self) -> None:
        """Write nothing more; what waits is dropped. For a run that is handed over or lost."""
        self._fail(StoreError("the writer is closed"), tell=False)
        self.on_failure = _ignore

    # How it works

    def _add(self, text: str, *, reasoning: bool) -> None:
        self._check()
        if self._text and self._text_is_reasoning is not reasoning:
            self.seal()
        self._text_is_reasoning = reasoning
        self._text.append(text)
        self._text_size += len(text) if text.isascii() else _WIDEST * len(text)
        if self._text_size >= MAX_TEXT:
            self.seal()
        if not self._flying and self._timer is None:
            self._flush_when_due()

    def seal(self) -> None:
        """Turn the text that waits into an event, so that ``view`` has it."""
        if not self._text:
            return
        text = "".join(self._text)
        self._text.clear()
        self._text_size = 0
        step = MAX_TEXT if text.isascii() else MAX_TEXT // _WIDEST
        for start in range(0, len(text), step):
            piece = text[start : start + step]
            # One message serves every piece: it is serialised and folded before the next one needs it.
            if self._text_is_reasoning:
                self._piece.reasoning.content = piece
            else:
                self._piece.delta.content = piece
            self._seal_event(self._piece)

    def _seal_event(self, event: EngineEvent) -> None:
        event.seq = self._next_seq
        self._next_seq += 1
        self.view.apply(event)
        data = _as_field(event.SerializeToString())
        self._sealed.append(data)
        self._sealed_size += len(data)

    def _flush_when_due(self) -> None:
        if self._loop.time() - self._last_text > QUIET:
            self._timer = self._loop.call_soon(self._on_timer)
        else:
            self._timer = self._pace.begin_at(self._last_text + FRAME_TIME, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._flying and self.failure is None:
            self._flush()

    def _flush(self) -> None:
        if self._needs_checkpoint:
            return
        self.seal()
        if self._sealed:
            self._last_text = self._loop.time()
            self._pace.count()
            self._append(_RUNNING)

    def _append(self, state: RunState.ValueType, **durable: Unpack[_Durable]) -> asyncio.Future[int]:
        """Send all sealed events to the log as one frame."""
        first_seq = self._next_seq - len(self._sealed)
        frame = Frame(self._epoch, first_seq, len(self._sealed), b"".join(self._sealed), state, **durable)
        size = self._sealed_size
        self._sealed.clear()
        self._sealed_size = 0
        self._flying += 1
        self._flying_size += size
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flying > 1 and not self._owned:
            future = self._loop.create_future()
            self._held.append((frame, self._version, future))
        else:
            future = asyncio.ensure_future(self._store.append(self._key, frame, self._version))
        self._version += 1
        if future.done() and not future.cancelled() and future.exception() is None:
            self._landed(size, future)
        else:
            future.add_done_callback(partial(self._landed, size))
        return future

    def _landed(self, size: int, future: asyncio.Future[int]) -> None:
        self._flying -= 1
        self._flying_size -= size
        error = StoreError("an append was cancelled") if future.cancelled() else future.exception()
        if error is not None:
            self._fail(error)
            self._drop_held(error)  # also when the writer was closed meanwhile
            return
        self._owned = True
        self._release_held()
        if self._room is not None and not self.congested:
            self._wake_room()
        if (self._text or self._sealed) and not self._flying and self._timer is None and self.failure is None:
            self._flush_when_due()

    def _release_held(self) -> None:
        """Send what has waited for the first frame, in order."""
        held, self._held = self._held, []
        for frame, version, future in held:
            sent = asyncio.ensure_future(self._store.append(self._key, frame, version))
            sent.add_done_callback(partial(_hand_on, future))

    def _drop_held(self, error: BaseException) -> None:
        held, self._held = self._held, []
        for _, _, future in held:
            if not future.done():
                future.set_exception(error)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _fail(self, error: BaseException, *, tell: bool = True) -> None:
        if self.failure is not None:
            return
        self.failure = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_room()
        if tell:
            self._drop_held(error)
            self.on_failure(error)

    def _wake_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None


def _ignore(_: BaseException) -> None:
    """Nobody wants to know yet; ``failure`` tells later."""


def _hand_on(waiting: asyncio.Future[int], sent: asyncio.Future[int]) -> None:
    """Give the outcome of an append to who has waited for it since before it could be sent."""
    error = None if sent.cancelled() else sent.exception()  # looked at, even if nobody waits any more
    if waiting.done():
        return
    if sent.cancelled():
        waiting.cancel()
    elif error is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(sent.result())


def _as_field(data: bytes) -> bytes:
    """Return an event as field 1 of a response: tag, length as a varint, payload."""
    length = len(data)
    if length <= 0x7F:
        return b"\x0a%c%b" % (length, data)
    if length <= 0x3FFF:
        return b"\x0a%c%c%b" % (length & 0x7F | 0x80, length >> 7, data)
    head = bytearray(b"\x0a")
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + data
