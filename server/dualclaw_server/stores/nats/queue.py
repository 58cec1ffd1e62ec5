"""The queue: work items as JetStream delivers them, claims, and timers whose time has come.

Rules:
- Each waiting claimer has a pull of its own, for one message, for a short time: what a dead process has asked for
  delays at most one item, by one lease.
- A claimer that leaves keeps its inbox open until its pull is over; what still arrives there is put back at once.
- Whoever was given a message while it left, or while the store closes, puts its item back, too.
- A consumer that is gone (deleted by hand, lost with a server) is made anew. It delivers all items from the start; what
  is stale among them is dropped, and what somebody has in hand goes to another, as when a lease ends.
- A delay of more than a lease is a scheduled message, not a message put back: those count as being in hand, of which
  there is a limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable
from functools import partial

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dualclaw_server.engine.store import RunKey, StoreError, Unavailable
from dualclaw_server.stores.nats import work
from dualclaw_server.stores.nats.heart import Heart
from dualclaw_server.stores.nats.layout import DueDoc, ItemDoc, token, unpack
from dualclaw_server.stores.nats.link import Again, ApiError, Link
from dualclaw_server.stores.nats.transaction import Transaction, Transactor
from dualclaw_server.stores.records import Clock

log = logging.getLogger(__name__)

FLOOR = 0.05
"""Seconds a pull waits at least: a new item reaches the consumer a moment after it was stored."""
SETTLE = 1.0
"""The same for the first claim of a consumer of several replicas, which elect a leader first and refuse until then."""
PULL = 5.0
"""Seconds one pull waits at most."""
_GRACE = 2.0
_REMAKE = 3.0
"""Seconds without an answer after which a consumer is made again; one that is there stays as it is."""
_TICKS = "due"
_TICK_RETRY = 5.0
_TICK_TRIES = 8


class NatsClaim:
    """A run in hand."""

    def __init__(self, queue: Queue, delivery: work.Delivery, message: Msg, until: float) -> None:
        self._queue = queue
        self._lost = False
        self.delivery = delivery
        self.message = message
        self.until = until
        """Time of the monotonic clock until which the lease surely holds."""

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
        if not self.lost:
            await self._queue.ack(self)

    async def nak(self, delay: float) -> None:
        """Put the item back for ``delay`` seconds."""
        if not self.lost:
            await self._queue.nak(self, delay)


class Queue:
    """Hands out work items.

    Args:
        link, transactor: of this store.
        clock: seconds since the epoch.
        lease: seconds a run stays with a process that shows no sign of life.
        max_running: items in hand at once, in the whole cluster, for each pool.
        replicas: copies of the stream.
    """

    def __init__(
        self,
        link: Link,
        transactor: Transactor,
        heart: Heart,
        clock: Clock,
        lease: float,
        max_running: int,
        replicas: int,
    ) -> None:
        self._link = link
        self._transactor = transactor
        self._heart = heart
        self._clock = clock
        self._lease = lease
        self._max_running = max_running
        self._settling = replicas > 1
        self._settled: set[str] = set()
        self._consumers: dict[str, asyncio.Future[None]] = {}
        self._refusing: set[str] = set()
        """Consumers that may be gone."""
        self._remaking: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._closing = False
        self._contact = time.monotonic()

    async def claim(self, pool: str, worker: str, wait: float) -> NatsClaim | None:
        """Return the next work item, waiting up to ``wait`` seconds for one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        stream, consumer = self._link.subjects.stream, f"pool-{token(pool)}"
        self._begin_ticking()
        while not self._closing:
            await self._ensure(stream, consumer, self._link.subjects.items(pool), self._max_running)
            if self._settling and consumer not in self._settled:
                deadline = max(deadline, loop.time() + SETTLE)
            self._settled.add(consumer)
            message = await self._pull(stream, consumer, max(deadline - loop.time(), FLOOR))
            if message is not None:
                claim = await self._take_safely(message, pool, worker)
                if claim is not None:
                    return claim
            elif loop.time() >= deadline:
                return None
        raise Unavailable("the store is closed")

    async def _take_safely(self, message: Msg, pool: str, worker: str) -> NatsClaim | None:
        """Claim an item; when the caller leaves meanwhile, put it back."""
        taking = asyncio.create_task(self._take(message, pool, worker))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            task = self._spawn(self._give_back(taking))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
            raise

    async def _give_back(self, taking: asyncio.Task[NatsClaim | None]) -> None:
        claim = await taking
        if claim is not None:
            await claim.nak(0)

    async def _take(self, message: Msg, pool: str, worker: str) -> NatsClaim | None:
        began = time.monotonic()
        try:
            item = unpack(message.data, ItemDoc)[0]
        except (msgspec.DecodeError, ValueError):
            log.exception("a message on %s is none of ours; it is dropped", message.subject)
            await self._done(message)
            return None
        name = secrets.token_hex(8)
        seq = message.metadata.sequence.stream
        step = partial(_take, item, seq, pool, worker, name, self._clock() + self._lease)
        try:
            delivery, _ = await self._transactor.run(name, step, believing=True)
        except StoreError:
            await self._link.tell(message.reply, b"-NAK")
            raise
        if delivery is None:
            await self._done(message)
            return None
        claim = NatsClaim(self, delivery, message, began + self._lease)
        self._heart.hold(claim)
        return claim

    async def _done(self, message: Msg) -> None:
        """Take a message off the queue."""
        await self._link.tell(message.reply, b"+ACK")
        await self._link.remove(message.metadata.sequence.stream)

    async def ack(self, claim: NatsClaim) -> None:
        """End a delivery."""
        step = partial(_ack, claim.delivery, self._clock())
        try:
            done, _ = await self._transactor.run(claim.delivery.token, step, believing=True)
        finally:
            # Also when it failed: an item that nobody works on must not be kept from others by heartbeats.
            self._let_go(claim)
        if done:
            await self._done(claim.message)

    async def nak(self, claim: NatsClaim, delay: float) -> None:
        """Put an item back."""
        step = partial(_nak, claim.delivery, delay, self._clock(), self._lease)
        try:
            after, _ = await self._transactor.run(claim.delivery.token, step, believing=True)
        finally:
            self._let_go(claim)
        if after:
            await self._link.tell(claim.message.reply, put_back(after))
        elif after is not None:
            await self._done(claim.message)

    def _let_go(self, claim: NatsClaim) -> None:
        self._heart.drop(claim)
        claim.lose()

    async def close(self) -> None:
        """Put back what is in hand."""
        self._closing = True
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if self._returning:
            await asyncio.wait(set(self._returning), timeout=_GRACE)
        held = self._heart.claims()
        results = await asyncio.gather(*(claim.nak(0) for claim in held), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                log.warning("a run could not be put back; it comes again when its lease ends: %s", result)
        for claim in held:
            claim.lose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Pulls

    async def _ensure(self, stream: str, consumer: str, subject: str, max_pending: int) -> None:
        """Make a consumer, once for this process; another's with the same settings is the same one.

        One that refuses is made anew, without a wait: an election looks the same, and must not keep a claim longer.
        """
        made = self._consumers.get(consumer)
        if made is None or (made.done() and (made.cancelled() or made.exception() is not None)):
            made = asyncio.ensure_future(self._make(stream, consumer, subject, max_pending))
            self._consumers[consumer] = made
        if not made.done():
            await asyncio.shield(made)
            self._contact = time.monotonic()
        if consumer in self._refusing:
            self._refusing.discard(consumer)
            again = self._remaking.get(consumer)
            if again is None or again.done():
                self._remaking[consumer] = self._spawn(self._remake(stream, consumer, subject, max_pending))

    async def _remake(self, stream: str, consumer: str, subject: str, max_pending: int) -> None:
        try:
            await self._make(stream, consumer, subject, max_pending)
        except Unavailable as error:
            log.warning("%s", error)
        await asyncio.sleep(_REMAKE)

    async def _make(self, stream: str, consumer: str, subject: str, max_pending: int) -> None:
        config: dict[str, object] = {
            "name": consumer,
            "durable_name": consumer,
            "filter_subject": subject,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self._lease * 1e9),
            "max_deliver": -1,
            "max_ack_pending": max_pending,
            "max_waiting": 4096,
        }
        body: dict[str, object] = {"stream_name": stream, "config": config}
        try:
            await self._link.call(f"CONSUMER.CREATE.{stream}.{consumer}", body)
        except ApiError as error:
            raise Unavailable(f"the consumer {consumer} cannot be made: {error}") from error

    async def _pull(self, stream: str, consumer: str, wait: float, batch: int = 1) -> Msg | None:
        """Return the next message of a consumer; None when the time is over, or the consumer has no leader now."""
        loop = asyncio.get_running_loop()
        expires = min(wait, PULL)
        arrived: asyncio.Future[Msg | None] = loop.create_future()
        inbox = self._link.client.new_inbox()

        async def receive(message: Msg) -> None:
            status = (message.headers or {}).get("Status") if not message.reply else None
            if status is None and not message.reply:
                status = "400"
            if arrived.done():
                if status is None:
                    await self._link.tell(message.reply, b"-NAK")
                return
            arrived.set_result(message if status is None else None)
            if status in ("404", "408"):
                self._contact = time.monotonic()

        body = json.dumps({"batch": batch, "expires": int(expires * 1e9)}).encode()
        subscription: Subscription | None = None
        try:
            subscription = await self._link.client.subscribe(inbox, cb=receive)
            began = loop.time()
            await self._link.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", body, reply=inbox)
            async with asyncio.timeout(expires + _GRACE):
                message = await arrived
            if message is None and loop.time() - began < expires / 2:
                # Refused at once: there is no leader, the server is stopping, or the consumer is gone.
                await asyncio.sleep(min(0.1, wait))
                silent = time.monotonic() - self._contact
                if silent > self._link.patience:
                    raise Unavailable(f"NATS delivers nothing: the consumer {consumer} does not answer")
                if silent > _REMAKE:
                    self._refusing.add(consumer)
            if message is not None:
                self._contact = time.monotonic()
            return message
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await asyncio.sleep(min(0.1, wait))
            if time.monotonic() - self._contact > self._link.patience:
                raise Unavailable(f"NATS delivers nothing: {str(error) or type(error).__name__}") from error
            return None
        except asyncio.CancelledError:
            if arrived.done() and not arrived.cancelled() and (message := arrived.result()) is not None:
                await self._link.tell(message.reply, b"-NAK")
            raise
        finally:
            if subscription is not None:
                over = arrived.done() and not arrived.cancelled()
                if not arrived.done():
                    arrived.cancel()
                if over:
                    await _unsubscribe(subscription)
                else:
                    self._spawn(_unsubscribe(subscription, expires + _GRACE))

    def _spawn(self, duty: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await duty
            except StoreError as error:
                log.warning("a run could not be put back; it comes again when its lease ends: %s", error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Timers

    def _begin_ticking(self) -> None:
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick(), name="timers")

    async def _tick(self) -> None:
        """Fire timers; whichever process gets a timer's message does so for all."""
        subjects = self._link.subjects
        stream = subjects.timers_stream
        while True:
            try:
                await self._ensure(stream, _TICKS, subjects.due, 1000)
                message = await self._pull(stream, _TICKS, PULL)
                if message is not None:
                    await self._fire(message)
            except (StoreError, Again) as error:
                log.warning("timers wait: %s", error)
                await asyncio.sleep(1.0)

    async def _fire(self, message: Msg) -> None:
        try:
            due = unpack(message.data, DueDoc)[0]
        except (msgspec.DecodeError, ValueError):
            log.exception("a message on %s is none of ours; it is dropped", message.subject)
            await self._link.tell(message.reply, b"+TERM")
            return
        fired, _ = await self._transactor.run(secrets.token_hex(8), partial(_fire, due, self._clock()))
        if fired or message.metadata.num_delivered > _TICK_TRIES:
            await self._link.tell(message.reply, b"+ACK")
        else:
            # Whoever set it may be about to note it.
            await self._link.tell(message.reply, put_back(_TICK_RETRY))


async def _take(
    item: ItemDoc, seq: int, pool: str, worker: str, name: str, until: float, tx: Transaction
) -> work.Delivery | None:
    return await work.take(tx, item, seq, pool, worker, name, until)


async def _ack(delivery: work.Delivery, now: float, tx: Transaction) -> bool:
    return await work.ack(tx, delivery, now)


async def _nak(delivery: work.Delivery, delay: float, now: float, lease: float, tx: Transaction) -> float | None:
    return await work.nak(tx, delivery, delay, now, long=lease)


async def _fire(due: DueDoc, now: float, tx: Transaction) -> bool:
    return await work.fire(tx, due, now)


def put_back(delay: float) -> bytes:
    """Return the word for a message that is to come again after some seconds."""
    return b"-NAK " + json.dumps({"delay": int(delay * 1e9)}).encode()


async def _unsubscribe(subscription: Subscription, after: float = 0.0) -> None:
    if after:
        await asyncio.sleep(after)
    try:
        await subscription.unsubscribe()
    except (nats.errors.Error, OSError, ValueError):
        return
