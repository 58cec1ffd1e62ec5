"""One SSE response and what must happen beside it while it is open.

Rules
- Frames flow through ``Sink.write`` alone: one ASGI send for a batch of frames, no task, lock, timer or log
  line for each. The time of the last write is kept, nothing else.
- Beside it runs one companion per stream. It listens for the client's leaving from the first moment on (a
  client that gives up before the first token must not be noticed only by a failing write), sends a heartbeat
  after a silent interval, and gives up on a client that has stopped reading.
- Every way out but completion interrupts the work at once by the stream's cancel scope, so the gRPC call below
  is cancelled promptly. What becomes of the run is the engine's business: it goes on.
- The scope is an ``asyncio.timeout`` without a deadline whose deadline is moved to "now": the one structured way
  the standard library has to cancel a block from outside and come out of it with no trace on the task.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from starlette.types import Message, Receive, Scope, Send

from dualclaw_clients.adapters.frames import HEARTBEAT
from dualclaw_clients.web.replies import BEGUN, EXTRA_HEADERS, Headers

Ending = Literal["complete", "left", "stalled", "shutdown"]
"""Why a stream ended: its work was done, the client left, it stopped reading, or the gateway shuts down."""

_SSE_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class Sink:
    """Where the frames of one response go."""

    __slots__ = ("_clock", "_scope", "_send", "opened", "since", "writing")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._clock = asyncio.get_running_loop().time
        self.opened = False
        self.writing = False
        self.since = self._clock()

    async def open(self, headers: Headers = (), first: bytes = b"") -> None:
        """Send status 200, the headers of an event stream and a first piece at once."""
        self.opened = self._scope[BEGUN] = True
        start = [*_SSE_HEADERS, *headers, *self._scope.get(EXTRA_HEADERS, ())]
        await self._send({"type": "http.response.start", "status": 200, "headers": start})
        if first:
            await self.write(first)

    async def write(self, data: bytes) -> None:
        """Send frames; waits while the client is slower than the stream."""
        self.writing = True
        self.since = self._clock()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self.writing = False

    async def beat(self) -> None:
        """Send a heartbeat comment."""
        await self._send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
        self.since = self._clock()

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece and complete the response."""
        await self._send({"type": "http.response.body", "body": data})


class _Open:
    """An open stream: its cancel scope and how it came to end."""

    __slots__ = ("_limit", "ending")

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self.ending: Ending = "complete"

    def cut(self, ending: Ending) -> None:
        if self.ending == "complete":
            self.ending = ending
            self._limit.reschedule(asyncio.get_running_loop().time())


class Streams:
    """The open streams of a gateway.

    Args:
        heartbeat: seconds of silence after which a heartbeat is sent, on routes that have them.
        stall: seconds a write may wait for a client that has stopped reading.
    """

    def __init__(self, *, heartbeat: float = 15.0, stall: float = 60.0) -> None:
        self._heartbeat = heartbeat
        self._stall = stall
        self._open: set[_Open] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """End every open stream at once, and every later one before it begins."""
        self._closed = True
        for stream in self._open:
            stream.cut("shutdown")

    async def serve(
        self, receive: Receive, sink: Sink, work: Callable[[Sink], Awaitable[None]], *, heartbeat: bool
    ) -> Ending:
        """Run ``work``, which writes to the sink, until it is done or one of the rules above ends it."""
        if self._closed:
            return "shutdown"
        try:
            async with asyncio.timeout(None) as limit:
                stream = _Open(limit)
                self._open.add(stream)
                try:
                    async with asyncio.TaskGroup() as group:
                        companion = group.create_task(self._accompany(group, receive, sink, stream, heartbeat))
                        await work(sink)
                        companion.cancel()
                finally:
                    self._open.discard(stream)
        except TimeoutError:
            if not limit.expired():
                raise
        return stream.ending

    async def _accompany(
        self, group: asyncio.TaskGroup, receive: Receive, sink: Sink, stream: _Open, heartbeat: bool
    ) -> None:
        clock = asyncio.get_running_loop().time
        tick = min(self._heartbeat, self._stall) if heartbeat else self._stall
        listening = group.create_task(_next(receive))
        try:
            while True:
                rest = sink.since + tick - clock()
                await asyncio.wait((listening,), timeout=rest if rest > 0 else tick)
                silent = clock() - sink.since
                if listening.done():
                    if listening.result()["type"] == "http.disconnect":
                        stream.cut("left")
                        return
                    listening = group.create_task(_next(receive))
                elif sink.writing:
                    if silent >= self._stall:
                        stream.cut("stalled")
                        return
                elif heartbeat and sink.opened and silent >= self._heartbeat and not await self._beat(sink):
                    stream.cut("stalled")
                    return
        finally:
            listening.cancel()

    async def _beat(self, sink: Sink) -> bool:
        try:
            async with asyncio.timeout(self._stall):
                await sink.beat()
        except TimeoutError:
            return False
        return True


async def _next(receive: Receive) -> Message:
    return await receive()
