"""Claims in hand and their heartbeat: a thread of its own, with a connection of its own.

Rules:
- A tool that blocks the event loop must not cost the run its lease: the heartbeat needs no event loop. But
  when the loop has not ticked for ``max_stall`` seconds the process counts as hung, and its heart stops.
- A lease is judged by the time of its last confirmed beat. A process that was frozen finds its claims lost
  the moment it looks, before any beat could tell it.
- A lost claim stays lost and is beaten no more, even if nobody has taken the run yet.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

from dualclaw_server.engine.store import RunKey
from dualclaw_server.stores.records import Clock
from dualclaw_server.stores.sqlite_work import Delivery

log = logging.getLogger(__name__)

MAX_STALL = 360.0
"""Seconds without a tick of the event loop after which the process counts as hung."""


class SqliteClaim:
    """A run in hand."""

    def __init__(
        self,
        delivery: Delivery,
        until: float,
        acked: Callable[[SqliteClaim], Awaitable[None]],
        naked: Callable[[SqliteClaim, float], Awaitable[None]],
    ) -> None:
        self.delivery = delivery
        self.until = until
        """Time of the monotonic clock until which the lease surely holds."""
        self._lost = False
        self._acked = acked
        self._naked = naked

    @property
    def key(self) -> RunKey:
        """The run to work on."""
        return self.delivery.key

    @property
    def redelivered(self) -> bool:
        """True when this very item had been claimed before."""
        return self.delivery.redelivered

    @property
    def lost(self) -> bool:
        """True once the lease could not be kept."""
        if not self._lost and time.monotonic() > self.until:
            self._lost = True
        return self._lost

    def lose(self) -> None:
        """Count the claim as lost."""
        self._lost = True

    async def ack(self) -> None:
        """The work is done; the item goes away."""
        await self._acked(self)

    async def nak(self, delay: float) -> None:
        """Put the item back for ``delay`` seconds."""
        await self._naked(self, delay)


class Heart:
    """Keeps the leases of the claims in hand.

    Args:
        connection: for this thread alone.
        clock: seconds since the epoch.
        lease: length of a lease in seconds; a beat comes every third of it.
        max_stall: seconds without a tick of the event loop after which it stops.
    """

    def __init__(self, connection: sqlite3.Connection, clock: Clock, lease: float, max_stall: float) -> None:
        self._connection = connection
        self._clock = clock
        self._lease = lease
        self._max_stall = max_stall
        self._loop = asyncio.get_running_loop()
        self._ticked = time.monotonic()
        self._held: dict[int, SqliteClaim] = {}
        self._runs: dict[RunKey, int] = {}
        """How many claims of a run are held: it may have been lost and claimed anew."""
        self._changed = threading.Condition()
        self._idle = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dualclaw-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def hold(self, claim: SqliteClaim) -> None:
        """Keep a claim's lease from now on; called on the event loop."""
        self._ticked = time.monotonic()
        with self._changed:
            self._held[claim.delivery.token] = claim
            self._runs[claim.key] = self._runs.get(claim.key, 0) + 1
            if self._idle:
                self._changed.notify()

    def drop(self, claim: SqliteClaim) -> bool:
        """Keep it no longer; False when it had been given up already."""
        with self._changed:
            return self._pop(claim.delivery.token) is not None

    def end(self, tokens: Sequence[int]) -> None:
        """Keep claims no longer that have ended with their run; they are not lost."""
        with self._changed:
            for token in tokens:
                self._pop(token)

    def lose(self, tokens: Sequence[int]) -> None:
        """Count claims as lost whose items were taken back; those of other processes are none of ours."""
        with self._changed:
            for token in tokens:
                if claim := self._pop(token):
                    claim.lose()

    def holds(self, key: RunKey) -> bool:
        """Return whether a run is in hand; may be called from any thread."""
        return key in self._runs

    def _pop(self, token: int) -> SqliteClaim | None:
        claim = self._held.pop(token, None)
        if claim is not None:
            self._runs[claim.key] -= 1
            if not self._runs[claim.key]:
                del self._runs[claim.key]
        return claim

    def finish(self) -> None:
        """End the thread; every claim still in hand is lost."""
        with self._changed:
            self._closing = True
            for claim in self._held.values():
                claim.lose()
            self._held.clear()
            self._runs.clear()
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread to end; blocks."""
        self._thread.join()

    def _run(self) -> None:
        stalled = False
        while True:
            with self._changed:
                while not self._held and not self._closing:
                    self._idle = True
                    self._changed.wait()
                self._idle = False
                if not self._closing:
                    self._changed.wait(self._lease / 3)
                if self._closing:
                    break
                claims = [claim for claim in self._held.values() if not claim.lost]
            if time.monotonic() - self._ticked > self._max_stall:
                if not stalled:
                    log.error("the event loop has not ticked for %.0f s; giving up the leases", self._max_stall)
                stalled = True
                continue
            stalled = False
            try:
                self._loop.call_soon_threadsafe(self._tick)
            except RuntimeError:  # the loop was closed under us: nobody works on these runs any more
                break
            if claims:
                self._beat(claims)
        self._connection.close()

    def _tick(self) -> None:
        self._ticked = time.monotonic()

    def _beat(self, claims: list[SqliteClaim]) -> None:
        began = time.monotonic()
        tokens = json.dumps([claim.delivery.token for claim in claims])
        try:
            kept = self._connection.execute(
                "UPDATE work SET ready = ?, warned = 0 WHERE token IN (SELECT value FROM json_each(?)) RETURNING token",
                (self._clock() + self._lease, tokens),
            ).fetchall()
        except sqlite3.Error as error:
            log.warning("a heartbeat failed: %s", error)
            return
        alive = {token for (token,) in kept}
        for claim in claims:
            if claim.delivery.token in alive:
                claim.until = began + self._lease
            else:
                claim.lose()
