"""One SSE response and what must happen beside it while it is open.

Rules
- Frames flow through ``Sink.write`` alone: one ASGI send for a batch of frames, no task, lock, timer or log
  line for each. The time of the last write is kept, nothing else.
- Beside it are one task and one timer. The task listens for the client's leaving from the first moment on: a client
  that gives up before the first token must not be noticed only by a failing write. The timer is set for the first
  moment at which something could be due and, when it rings, looks at the time of the last write: it sends a
  heartbeat after a silent interval, gives up on a client that has stopped reading, or is set again.
- Every way out but completion interrupts the work at once by the stream's cancel scope, so the gRPC call below
  is cancelled promptly. What becomes of the run is the engine's business: it goes on.
- The scope is an ``asyncio.timeout`` without a deadline whose deadline is moved to "now": the one structured way
  the standard library has to cancel a block from outside and come out of it with no trace on the task.
- A response that was completed is not interrupted any more, for what its work still does is bounded.
"""

import asyncio
import logging
from types import TracebackType
from typing import Literal, Self

from starlette.types import Receive, Scope, Send

from dualclaw_clients.adapters.frames import HEARTBEAT
from dualclaw_clients.web.replies import BEGUN, EXTRA_HEADERS, Headers

LOG = logging.getLogger(__name__)

Ending = Literal["complete", "left", "stalled", "shutdown"]
"""Why a stream ended: its work was done, the client left, it stopped reading, or the gateway shuts down."""

_SSE_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class Sink:
    """Where the frames of one response go, and what is beside it.

    Use it as an async context manager: the block is left at once, without an error, when the stream is cut;
    ``ending`` tells whether it was.

    Args:
        streams: the open streams it is one of while the block lasts.
        scope, receive, send: of the request.
        heartbeat: seconds of silence after which a heartbeat is sent; None: never.
        stall: seconds a write may wait for a client that has stopped reading.
    """

    __slots__ = (
        "_beating", "_clock", "_heartbeat", "_limit", "_listening", "_receive", "_scope", "_send", "_stall",
        "_streams", "_timer", "_writing", "_written", "ended", "ending", "opened",
    )  # fmt: skip

    def __init__(
        self, streams: set["Sink"], scope: Scope, receive: Receive, send: Send, heartbeat: float | None, stall: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self._streams = streams
        self._scope = scope
        self._receive = receive
        self._send = send
        self._heartbeat = heartbeat
        self._stall = stall
        self._clock = loop.time
        self._written = loop.time()
        """When the last write began."""
        self._writing = False
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._listening: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self.opened = False
        self.ended = False
        """The response is complete."""
        self.ending: Ending = "complete"

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._streams.add(self)
        self._listening = asyncio.create_task(self._listen())
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._streams.discard(self)
        for beside in (self._timer, self._listening, self._beating):
            if beside is not None:
                beside.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            return True
        return False

    def cut(self, ending: Ending) -> None:
        """Interrupt the block, unless its response is complete."""
        if self.ending == "complete" and not self.ended and self in self._streams:
            self.ending = ending
            self._limit.reschedule(self._clock())

    async def open(self, headers: Headers = (), first: bytes = b"") -> None:
        """Send status 200, the headers of an event stream and a first piece at once."""
        self.opened = self._scope[BEGUN] = True
        start = [*_SSE_HEADERS, *headers, *self._scope.get(EXTRA_HEADERS, ())]
        await self._send({"type": "http.response.start", "status": 200, "headers": start})
        if first:
            await self.write(first)

    async def write(self, data: bytes) -> None:
        """Send frames; waits while the client is slower than the stream."""
        self._writing = True
        self._written = self._clock()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._writing = False

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece and complete the response; nothing if it is complete."""
        if self.ended:
            return
        if self._beating is not None:
            self._beating.cancel()  # a heartbeat that waits for the client must not come after the end
        self._writing = True
        self._written = self._clock()
        await self._send({"type": "http.response.body", "body": data})
        self.ended = True
        self._writing = False

    async def _listen(self) -> None:
        """Wait until the client has left."""
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except Exception:
            LOG.exception("nothing can be heard of a client any more")
        self.cut("left")

    def _look(self) -> None:
        """See what is due, and set the timer for the first moment at which something else could be."""
        now = self._clock()
        silent = now - self._written
        if self._writing and silent >= self._stall:
            self.cut("stalled")
            return
        if self.ended:
            return
        tick, heartbeat = self._stall, self._heartbeat
        if heartbeat is not None:
            tick = min(tick, heartbeat)
            beats = self._beating is not None and not self._beating.done()
            if silent >= heartbeat and self.opened and not self._writing and not beats:
                self._beating = asyncio.create_task(self._beat())
        due = self._written + tick
        self._timer = asyncio.get_running_loop().call_at(due if due > now else now + tick, self._look)

    async def _beat(self) -> None:
        try:
            async with asyncio.timeout(self._stall):
                await self._send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
            self._written = self._clock()
        except TimeoutError:
            self.cut("stalled")
        except Exception:
            LOG.exception("a heartbeat could not be sent")
            self.cut("left")


class Streams:
    """The open streams of a gateway.

    Args:
        heartbeat: seconds of silence after which a heartbeat is sent, on routes that have them.
        stall: seconds a write may wait for a client that has stopped reading.
    """

    def __init__(self, *, heartbeat: float = 15.0, stall: float = 60.0) -> None:
        self._heartbeat = heartbeat
        self._stall = stall
        self._open: set[Sink] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """End every open stream at once, and every later one before it begins."""
        self._closed = True
        for stream in self._open:
            stream.cut("shutdown")

    def sink(self, scope: Scope, receive: Receive, send: Send, *, heartbeat: bool) -> Sink:
        """Return where the frames of a response go; one whose ``ending`` is "shutdown" is not to be entered."""
        sink = Sink(self._open, scope, receive, send, self._heartbeat if heartbeat else None, self._stall)
        if self._closed:
            sink.ending = "shutdown"
        return sink
