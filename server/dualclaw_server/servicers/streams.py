"""Streams a run's log to a client: stored frames first, then live ones, as the bytes they were stored as.

Rules:

- The log is the buffer. One message is on its way at a time, ``write`` waits for flow control, and a client
  that takes nothing for a while is let go (SLOW_CLIENT); it attaches again where it stopped. So memory per
  stream is bounded however slow the client is.
- Frames that wait together go out as one message, up to a limit: joined bodies of ``RunResponse`` are one
  ``RunResponse``. One frame is never split.
- Handlers yield nothing and write here, so a client that leaves is noticed inside the handler, also while
  the run is silent, and the follower is closed on every way out.
- ``end`` (the server stops) only interrupts a stream that waits for events: first it sends what is committed
  by then, then says that this server goes away.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import aclosing, closing
from typing import Literal

from dualclaw import RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.deadline import Deadline
from dualclaw_server.engine.store import FINAL, Frame, Head, RunKey, RunStore
from dualclaw_server.servicers.calls import Context

PATIENCE = 60.0
"""Seconds a client may take for one message."""
MESSAGE_BYTES = 262_144
"""Frames are joined up to this size."""

Until = Literal["segment", "parked", "final"]
"""Where a stream ends: at the first terminal event, at one that has no later segment, when the run is final."""


class Streams:
    """The streams of a server.

    Args:
        store: where the logs are.
        patience: seconds a client may take for one message.
        message_bytes: frames are joined up to this size.
    """

    def __init__(self, store: RunStore, *, patience: float = PATIENCE, message_bytes: int = MESSAGE_BYTES) -> None:
        self._store = store
        self._patience = patience
        self._message_bytes = message_bytes
        self._waiting: set[Deadline] = set()
        self._over = asyncio.Event()

    def end(self) -> None:
        """Have every stream end once it has sent what is committed by now."""
        self._over.set()
        for limit in self._waiting:
            limit.expire()

    def segment(self, context: Context, head: Head, first_seq: int) -> Awaitable[None]:
        """Send the segment that begins at ``first_seq``, up to its terminal event.

        Raises:
            EngineError: SLOW_CLIENT, STORE_UNAVAILABLE when the server stops.
        """
        return self._send(context, head.key, first_seq - 1, "segment")

    async def log(self, context: Context, head: Head, after: int, *, wait: bool) -> None:
        """Send every event after ``after``: over all segments there are, and with ``wait`` until the run is final.

        Raises:
            EngineError: SLOW_CLIENT, STORE_UNAVAILABLE when the server stops.
        """
        until: Until = "final" if wait else "parked"
        if not _nothing_follows(head, after, until):
            await self._send(context, head.key, after, until)

    async def _send(self, context: Context, key: RunKey, after: int, until: Until) -> None:
        with closing(Deadline()) as limit:
            async with aclosing(self._store.follow(key, after)) as batches:
                while not self._over.is_set():
                    self._waiting.add(limit)
                    try:
                        frames = await limit.wait(anext(batches))
                    except StopAsyncIteration:  # the store was closed
                        break
                    except TimeoutError:
                        if not self._over.is_set():
                            raise
                        break
                    finally:
                        self._waiting.discard(limit)
                    if await self._deliver(context, key, frames, until, limit):
                        return
                    after = frames[-1].last_seq
            while frames := await self._store.read(key, after):
                if await self._deliver(context, key, frames, until, limit):
                    return
                after = frames[-1].last_seq
        raise EngineError("STORE_UNAVAILABLE", "this server is shutting down; attach again", retry_after=1.0)

    async def _deliver(
        self, context: Context, key: RunKey, frames: Sequence[Frame], until: Until, limit: Deadline
    ) -> bool:
        """Send frames; True when the stream is over with them."""
        if until == "segment":
            frames = _one_segment(frames)
        try:
            for message in self._messages(frames):
                await limit.wait(context.write(message), limit.now() + self._patience)
        except TimeoutError:
            raise EngineError(
                "SLOW_CLIENT", f"the client read nothing for {self._patience:g} s; attach again", retry_after=0
            ) from None
        newest = frames[-1]
        if until == "segment":
            return newest.ends_segment
        if not (newest.ends_segment or newest.state in FINAL):
            return False
        return _nothing_follows(await self._store.head(key), newest.last_seq, until)

    def _messages(self, frames: Sequence[Frame]) -> Sequence[bytes]:
        """Return the frames' bodies, joined as far as a message may be long."""
        if len(frames) == 1:
            return (frames[0].body,)
        messages: list[bytes] = []
        bodies: list[bytes] = []
        size = 0
        for frame in frames:
            if bodies and size + len(frame.body) > self._message_bytes:
                messages.append(b"".join(bodies))
                bodies, size = [], 0
            bodies.append(frame.body)
            size += len(frame.body)
        return [*messages, b"".join(bodies)]


def _one_segment(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames up to the first one that ends a segment."""
    for number, frame in enumerate(frames, 1):
        if frame.ends_segment:
            return frames[:number]
    return frames


def check_position(head: Head, after: int) -> None:
    """Refuse a position that cannot be read on from; to be asked before the call's headers go out, because a
    client that has headers takes every later refusal for a lost stream.

    Raises:
        EngineError: AFTER_SEQ_OUT_OF_RANGE, LOG_COMPACTED.
    """
    if after > head.last_seq:
        raise EngineError(
            "AFTER_SEQ_OUT_OF_RANGE",
            f"after_seq {after} lies beyond the newest event, {head.last_seq}",
            {"last_seq": str(head.last_seq)},
        )
    if after + 1 < head.kept_from:
        raise EngineError(
            "LOG_COMPACTED",
            "these events are no longer kept; the conversation has the messages",
            {"kept_from": str(head.kept_from), "conversation_id": head.conversation_id},
        )


def _nothing_follows(head: Head, sent: int, until: Until) -> bool:
    parked = head.state == RunState.RUN_STATE_INTERRUPTED and until == "parked"
    return sent >= head.last_seq and (parked or head.state in FINAL)
