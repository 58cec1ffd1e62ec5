"""What other processes do: their frames for followers here, their signals and releases for runs in hand here.

Rules:
- The server republishes every committed frame; a process listens to the runs that are followed in it, once for all
  its followers, and to no other. Its own frames it tells itself, the moment they are committed.
- Such messages can be lost, so they only make things fast. A gap in the frames is seen by the next one; and every
  few seconds the ends of all followed logs are compared with what was seen, and soon after a subscription that of its
  own: a process in which runs begin all the time must not look at all of them each time.
- A subscription needs no flush: the read of the log that follows goes out behind it on the same connection. And the
  client must never be flushed by somebody who may leave: the answer to a flush that nobody waits for any more ends
  its read loop, and the connection stands still until its pings are missed.
- Notes are the same for signals and releases. What gets lost is found by the heart at its next beat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dualclaw_server.engine.store import RunKey, StoreError, Unavailable
from dualclaw_server.stores.live import Live
from dualclaw_server.stores.nats.layout import LogEntry, unpack
from dualclaw_server.stores.nats.link import Again, Link

log = logging.getLogger(__name__)

CHECK = 2.0
"""Seconds between two looks at the ends of followed logs."""
_FIRST_CHECK = 0.25
_AT_ONCE = 500


class Note(msgspec.Struct):
    """What one process tells the others."""

    origin: str
    tenant: str = ""
    run_id: str = ""
    token: str = ""


class _Followed:
    """A run that is followed in this process."""

    def __init__(self, ready: asyncio.Task[Subscription]) -> None:
        self.followers = 0
        self.ready = ready
        self.seen = 0
        """Sequence of the newest frame followers were told of, or made to read up to."""


class Watch:
    """Listens to other processes.

    Args:
        link: of this store.
        live: the followers in this process.
        origin: id of this process.
        signalled: called for a run whose inbox another process has put a signal into.
        released: called with a token that is void now.
    """

    def __init__(
        self,
        link: Link,
        live: Live,
        origin: str,
        signalled: Callable[[RunKey], None],
        released: Callable[[str], None],
    ) -> None:
        self._link = link
        self._live = live
        self._origin = origin
        self._signalled = signalled
        self._released = released
        self._runs: dict[RunKey, _Followed] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._checking: asyncio.Task[None] | None = None
        self._new: set[RunKey] = set()
        """Runs that are followed since the last look."""
        self._soon = asyncio.Event()

    async def open(self) -> None:
        """Begin to listen."""
        await self._link.client.subscribe(self._link.subjects.notes, cb=self._on_note)
        self._checking = asyncio.create_task(self._check(), name="followed logs")

    async def close(self) -> None:
        """Stop."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        tasks = [*(run.ready for run in self._runs.values()), *self._endings]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def told(self, key: RunKey, seq: int) -> None:
        """Note that the followers were told of a frame."""
        run = self._runs.get(key)
        if run is not None:
            run.seen = max(run.seen, seq)

    @asynccontextmanager
    async def following(self, key: RunKey) -> AsyncGenerator[None, None]:
        """Listen to a run while it is inside."""
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _Followed(asyncio.create_task(self._subscribe(key)))
        run.followers += 1
        try:
            await asyncio.shield(run.ready)
            yield
        finally:
            run.followers -= 1
            if not run.followers:
                del self._runs[key]
                ending = asyncio.create_task(self._unsubscribe(run.ready))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)

    async def _subscribe(self, key: RunKey) -> Subscription:
        async def receive(message: Msg) -> None:
            self._on_frame(key, message)

        try:
            subscription = await self._link.client.subscribe(self._link.subjects.live(key), cb=receive)
        except nats.errors.Error as error:
            raise Unavailable(f"a run cannot be followed: {str(error) or type(error).__name__}") from error
        self._new.add(key)
        self._soon.set()
        return subscription

    async def _unsubscribe(self, ready: asyncio.Task[Subscription]) -> None:
        """End a subscription, once it is there."""
        try:
            subscription = await ready
            if not self._link.client.is_closed:
                await subscription.unsubscribe()
        except (StoreError, nats.errors.Error) as error:
            log.debug("a subscription could not be ended: %s", str(error) or type(error).__name__)

    def _on_frame(self, key: RunKey, message: Msg) -> None:
        run = self._runs.get(key)
        try:
            entry, body = unpack(message.data, LogEntry)
            seq = int((message.headers or {})["Nats-Sequence"])
        except (msgspec.DecodeError, ValueError, KeyError):
            log.warning("a message on %s is none of ours", message.subject)
            return
        if run is None or (entry.writer == self._origin and not entry.gone):
            return
        run.seen = max(run.seen, seq)
        if entry.gone or entry.blob is not None:
            self._live.reread(key)
        elif entry.count:
            self._live.publish(key, entry.frame(body))

    # Looks at the ends of logs

    async def _check(self) -> None:
        loop = asyncio.get_running_loop()
        next_look = loop.time() + CHECK
        while True:
            some: set[RunKey] = set()
            try:
                async with asyncio.timeout_at(next_look):
                    await self._soon.wait()
                self._soon.clear()
                some, self._new = self._new, set()
                await asyncio.sleep(_FIRST_CHECK)
            except TimeoutError:
                pass
            if loop.time() >= next_look:
                some, next_look = set(self._runs), loop.time() + CHECK
            try:
                await self._look([key for key in some if key in self._runs])
            except (Again, StoreError) as error:
                log.warning("followed logs cannot be looked at: %s", error)

    async def _look(self, keys: Sequence[RunKey]) -> None:
        logs = {self._link.subjects.run(key, "log"): key for key in keys}
        names = list(logs)
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            found = {one.subject: one for one in await self._link.newest(some)}
            for name in some:
                run, one = self._runs.get(logs[name]), found.get(name)
                if run is not None and one is not None and one.seq > run.seen:
                    run.seen = one.seq
                    self._live.reread(logs[name])

    # Notes

    async def tell_signal(self, key: RunKey) -> None:
        """Tell other processes of a signal."""
        note = Note(self._origin, key.tenant, key.run_id)
        await self._link.tell(self._link.subjects.note("signal"), msgspec.json.encode(note))

    async def tell_release(self, token: str) -> None:
        """Tell other processes that a token is void."""
        note = Note(self._origin, token=token)
        await self._link.tell(self._link.subjects.note("release"), msgspec.json.encode(note))

    async def _on_note(self, message: Msg) -> None:
        try:
            note = msgspec.json.decode(message.data, type=Note)
        except msgspec.DecodeError:
            log.warning("a note is none of ours")
            return
        if note.origin == self._origin:
            return
        if message.subject.endswith(".signal"):
            self._signalled(RunKey(note.tenant, note.run_id))
        else:
            self._released(note.token)
