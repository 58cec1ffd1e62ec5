"""Fan-out of committed frames to the followers of a run, inside one process; used by every store.

Rules:
- The log is the buffer. A follower keeps at most ``MAX_PENDING`` bytes of live frames; beyond that they are
  dropped and it reads the log again, so a slow client costs bounded memory and loses nothing.
- Subscribe first, read second: whatever is committed after the subscription reaches the live list, so a
  read that found the end has left no hole. Repeats are dropped by seq; a gap means: read the log.
- Followers that need the log from the same place at the same time share one read and its frames: a thousand clients
  that attach at once, or whose run grows by another process's hand, cost what one costs. Nobody joins a read that has
  begun: it may not have seen what was committed before the joiner subscribed.
- Handing a frame over is one list append, and one future when the follower waits: a queue or a task per
  frame costs several times as much (a run may have a thousand followers).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from dualclaw_server.engine.store import Frame, RunKey, Unavailable

MAX_PENDING = 1 << 20
"""Bytes of live frames one follower may keep waiting."""

ReadFrames = Callable[[RunKey, int], Awaitable[tuple[Sequence[Frame], bool]]]
"""Reads stored frames after a seq; True: there are no more."""


class Subscriber:
    """One follower's live frames. ``behind``: the log must be read before they make sense."""

    __slots__ = ("_limit", "_waiter", "behind", "closed", "frames", "size")

    def __init__(self, limit: int) -> None:
        self.frames: list[Frame] = []
        self.size = 0
        self.behind = True
        self.closed = False
        self._limit = limit
        self._waiter: asyncio.Future[None] | None = None

    def push(self, frame: Frame) -> None:
        """Hand over a committed frame."""
        if not self.behind:
            self.frames.append(frame)
            self.size += len(frame.body)
            if self.size > self._limit:
                self.fall_behind()
        self._wake()

    def fall_behind(self) -> None:
        """Drop what waits; the log has it."""
        self.behind = True
        self.frames = []
        self.size = 0
        self._wake()

    def close(self) -> None:
        """Tell the follower that the store is gone."""
        self.closed = True
        self._wake()

    def take(self) -> list[Frame]:
        """Return the live frames and forget them."""
        frames, self.frames, self.size = self.frames, [], 0
        return frames

    async def wait(self) -> None:
        """Wait for something to happen; returns at once when it already has."""
        if self.frames or self.behind or self.closed:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SharedReads:
    """Reads of the log that are asked for by many at once. Everything here happens on the event loop."""

    def __init__(self) -> None:
        self._next: dict[tuple[RunKey, int], asyncio.Task[tuple[Sequence[Frame], bool]]] = {}
        self._begun: dict[tuple[RunKey, int], asyncio.Task[tuple[Sequence[Frame], bool]]] = {}

    async def get(self, key: RunKey, after: int, read: ReadFrames) -> tuple[Sequence[Frame], bool]:
        """Return what a read gives that begins after this call."""
        place = (key, after)
        task = self._next.get(place)
        if task is None or task.done():
            task = self._next[place] = asyncio.create_task(self._read(place, read))
            task.add_done_callback(_look_at)
        # Whoever leaves must not end it for the others; it ends by itself, even if all have left.
        return await asyncio.shield(task)

    async def _read(self, place: tuple[RunKey, int], read: ReadFrames) -> tuple[Sequence[Frame], bool]:
        me = self._next[place]
        if (earlier := self._begun.get(place)) is not None:
            await asyncio.wait((earlier,))
        del self._next[place]
        self._begun[place] = me
        try:
            return await read(*place)
        finally:
            del self._begun[place]


def _look_at(task: asyncio.Task[tuple[Sequence[Frame], bool]]) -> None:
    if not task.cancelled():
        task.exception()  # nobody may be left to do so


class Live:
    """The followers of all runs in this process. Everything here happens on the event loop."""

    def __init__(self, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        self._subscribers: dict[RunKey, dict[Subscriber, None]] = {}
        self._reads = SharedReads()

    def publish(self, key: RunKey, frame: Frame) -> None:
        """Hand a committed frame (with events, as readers see it) to the run's followers."""
        for subscriber in self._subscribers.get(key, ()):
            subscriber.push(frame)

    def reread(self, key: RunKey) -> None:
        """Have the run's followers read the log: it grew, or went away, by another process."""
        for subscriber in self._subscribers.get(key, ()):
            subscriber.fall_behind()

    def close(self) -> None:
        """End every follower with Unavailable."""
        for subscribers in self._subscribers.values():
            for subscriber in subscribers:
                subscriber.close()

    def followed(self) -> list[RunKey]:
        """Return the runs that have followers; may be called from any thread."""
        return list(self._subscribers)

    def follows(self, key: RunKey) -> bool:
        """Return whether a run has followers; may be called from any thread."""
        return key in self._subscribers

    def followers(self, key: RunKey) -> int:
        """Return how many follow a run."""
        return len(self._subscribers.get(key, ()))

    async def follow(
        self, key: RunKey, after: int, read: ReadFrames, at_end: Callable[[], bool] | None = None
    ) -> AsyncGenerator[Sequence[Frame], None]:
        """Yield frames with events after seq ``after``, stored ones, then live ones, without gap or repeat.

        ``at_end`` may tell, when the first frames are asked for, that the log is known to end at ``after``.

        Raises:
            Unavailable: the store was closed.
        """
        subscriber = Subscriber(self._max_pending)
        self._subscribers.setdefault(key, {})[subscriber] = None
        if at_end is not None and at_end():
            subscriber.behind = False
        try:
            while True:
                if subscriber.closed:
                    raise Unavailable("the store is closed")
                if subscriber.behind:
                    # From here on live frames gather; a frame that is in both is dropped by its seq.
                    subscriber.behind = False
                    frames, complete = await self._reads.get(key, after, read)
                    if not complete:
                        subscriber.fall_behind()
                else:
                    frames = _later(subscriber.take(), after)
                    if frames and frames[-1].last_seq - after != sum(frame.count for frame in frames):
                        subscriber.fall_behind()
                        continue
                if frames:
                    after = frames[-1].last_seq
                    yield frames
                else:
                    await subscriber.wait()
        finally:
            subscribers = self._subscribers[key]
            del subscribers[subscriber]
            if not subscribers:
                del self._subscribers[key]


def _later(frames: list[Frame], after: int) -> Sequence[Frame]:
    """Return the frames with events after ``after``, the first one trimmed."""
    if not frames or frames[0].first_seq > after:
        return frames
    later = [frame for frame in frames if frame.last_seq > after]
    if later:
        later[0] = later[0].after(after)
    return later
