"""Bounds for strangers who connect and do not ask: how long the head of a request may take, and how long it may be.

uvicorn waits for a head without end, and with httptools takes one of any length; whoever has a few thousand
connections, or one and patience, could use up the files or the memory of a process that serves strangers. Bodies are
bounded by those who read them.

A connection that has not brought a whole head in time is closed without a word; what is left of a body nobody wants
gets the same time.
"""

import asyncio
from typing import Final, Self

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT: Final = 15.0
"""Seconds the head of a request may take."""
HEAD_LIMIT: Final = 64 * 1024
"""Bytes of a head, above which no more is read."""


class TimedHeads(asyncio.Protocol):
    """What limits the time of heads; stands before a protocol of uvicorn's among the bases of a class."""

    head_timeout = HEAD_TIMEOUT
    transport: asyncio.Transport
    _waits: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, seconds: float) -> type[Self]:
        """Return this protocol with another time for heads; uvicorn makes the objects and has no place for it."""
        return type(cls.__name__, (cls,), {"head_timeout": seconds})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait for a head that begins after a response, and no longer for one that is there."""
        before = self._request()
        if self._waits is None and (before is None or getattr(before, "response_complete", False)):
            self._wait()
        super().data_received(data)
        if self._request() is not before:
            self._wait_no_longer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._wait_no_longer()
        super().connection_lost(exc)

    def _request(self) -> object:
        """Return the request at work or the last one; uvicorn's protocols have a type of their own for it each."""
        return getattr(self, "cycle", None)

    def _wait(self) -> None:
        self._waits = asyncio.get_running_loop().call_later(self.head_timeout, self._give_up)

    def _wait_no_longer(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _give_up(self) -> None:
        self._waits = None
        self.transport.abort()


class TimedH11(TimedHeads, H11Protocol):
    """uvicorn's protocol in Python, which has a limit of its own for the length of a head."""
