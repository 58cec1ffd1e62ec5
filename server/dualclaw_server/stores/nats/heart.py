"""The heartbeat of claims in hand: a thread of its own, with a connection and an event loop of its own.

Rules:
- A tool that blocks the event loop must not cost the run its lease: the heartbeat needs none of it. But when that
  loop has not ticked for ``max_stall`` seconds the process counts as hung, and its heart stops.
- A beat is confirmed by the server; a lease is judged by the last confirmed one. A process that was frozen finds its
  claims lost the moment it looks.
- JetStream confirms the beat of a delivery that is not the last one just as well. So each beat also looks whether the
  item is still ours, and tells of signals whose note was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from dualclaw_server.engine.store import RunKey, StoreError
from dualclaw_server.stores.nats.cancellation import heed
from dualclaw_server.stores.nats.layout import Stored, Subjects, WorkDoc, unpack
from dualclaw_server.stores.nats.link import Again, Link
from dualclaw_server.stores.nats.work import Delivery, is_over

log = logging.getLogger(__name__)

MAX_STALL = 360.0
"""Seconds without a tick of the event loop after which the process counts as hung."""
_START = 10.0


class Held(Protocol):
    """What the heart wants of a claim."""

    delivery: Delivery
    message: Msg
    until: float

    @property
    def lost(self) -> bool:
        """True once the lease could not be kept."""

    def lose(self) -> None:
        """Count the claim as lost."""

    async def nak(self, delay: float) -> None:
        """Put the item back."""


class Heart:
    """Keeps the leases of the claims in hand.

    Args:
        connect: opens a connection, on the event loop that asks.
        subjects: where things lie.
        lease: length of a lease in seconds; a beat comes every third of it.
        max_stall: seconds without a tick of the event loop after which it stops.
        signalled: called on the store's event loop for a run in hand that has a signal.
    """

    def __init__(
        self,
        connect: Callable[[str], Awaitable[Client]],
        subjects: Subjects,
        lease: float,
        max_stall: float,
        signalled: Callable[[RunKey], None],
    ) -> None:
        self._connect = connect
        self._subjects = subjects
        self._lease = lease
        self._max_stall = max_stall
        self._signalled = signalled
        self._loop = asyncio.get_running_loop()
        self._ticked = time.monotonic()
        self._held: dict[str, Held] = {}
        self._told: dict[str, int] = {}
        """By token, the sequence of the WorkDoc whose signal was told of: each signal writes a new one."""
        self._lock = threading.Lock()
        self._inner: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dualclaw-nats-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def hold(self, claim: Held) -> None:
        """Keep a claim's lease from now on; called on the event loop."""
        self._ticked = time.monotonic()
        with self._lock:
            self._held[claim.delivery.token] = claim

    def drop(self, claim: Held) -> None:
        """Keep it no longer."""
        with self._lock:
            self._held.pop(claim.delivery.token, None)
            self._told.pop(claim.delivery.token, None)

    def lose(self, token: str) -> None:
        """Count a claim as lost, if it is ours: its item was taken back."""
        with self._lock:
            claim = self._held.pop(token, None)
            self._told.pop(token, None)
        if claim is not None:
            claim.lose()

    def claims(self) -> list[Held]:
        """Return the claims in hand."""
        with self._lock:
            return list(self._held.values())

    async def close(self) -> None:
        """End the thread."""
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        if not self._begun.wait(_START):
            return
        inner, stop = self._inner, self._stop
        if inner is not None and stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                inner.call_soon_threadsafe(stop.set)
        self._thread.join(_START)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_on())
        except Exception:
            log.exception("the heart failed; claims of this process will be lost")
        finally:
            self._begun.set()

    async def _beat_on(self) -> None:
        self._inner = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._begun.set()
        client: Client | None = None
        stalled = False
        try:
            while not self._stop.is_set():
                if client is None:
                    client = await self._open()
                try:
                    async with asyncio.timeout(self._lease / 3):
                        await self._stop.wait()
                except TimeoutError:
                    pass
                if self._stop.is_set():
                    return
                if time.monotonic() - self._ticked > self._max_stall:
                    if not stalled:
                        log.error("the event loop has not ticked for %.0f s; giving up the leases", self._max_stall)
                    stalled = True
                    continue
                stalled = False
                try:
                    self._loop.call_soon_threadsafe(self._tick)
                except RuntimeError:  # the loop was closed under us: nobody works on these runs any more
                    return
                held = [claim for claim in self.claims() if not claim.lost]
                if held and client is not None:
                    await self._beat(client, held)
        finally:
            if client is not None:
                await client.close()

    async def _open(self) -> Client | None:
        try:
            return await self._connect("heart")
        except (StoreError, nats.errors.Error, OSError) as error:
            log.warning("the heart has no connection: %s", str(error) or type(error).__name__)
            return None

    def _tick(self) -> None:
        self._ticked = time.monotonic()

    async def _beat(self, client: Client, held: list[Held]) -> None:
        await asyncio.gather(*(self._prolong(client, claim) for claim in held), self._look(client, held))

    async def _prolong(self, client: Client, claim: Held) -> None:
        began = time.monotonic()
        try:
            await heed(client.request(claim.message.reply, b"+WPI", timeout=self._lease / 3))
        except (nats.errors.Error, OSError) as error:
            log.warning("a heartbeat failed: %s", str(error) or type(error).__name__)
        else:
            claim.until = max(claim.until, began + self._lease)

    async def _look(self, client: Client, held: list[Held]) -> None:
        """See whether the items are still ours."""
        link = Link(client, self._subjects, patience=0.0, timeout=self._lease / 3)
        subjects = {self._subjects.run(claim.delivery.key, "work"): claim for claim in held}
        names = list(subjects)
        for start in range(0, len(names), 500):
            try:
                found = await link.newest(names[start : start + 500])
            except (StoreError, Again) as error:
                log.warning("the state of %d claims is unknown: %s", len(names), error)
                return
            for stored in found:
                self._judge(subjects[stored.subject], stored)

    def _judge(self, claim: Held, stored: Stored) -> None:
        work, mine = unpack(stored.data, WorkDoc)[0], claim.delivery
        if work.token != mine.token:
            # A follower may not know of the claim, or of its item, yet; what it says is then older.
            overtaken = work.generation == mine.generation and work.deliveries > mine.number
            if overtaken or is_over(work, mine):
                log.info("the lease of run %s is gone", mine.key.run_id)
                self.lose(mine.token)
        elif work.again and stored.seq > self._told.get(mine.token, 0):
            with self._lock:
                if mine.token not in self._held:
                    return
                self._told[mine.token] = stored.seq
            self._loop.call_soon_threadsafe(self._signalled, mine.key)
