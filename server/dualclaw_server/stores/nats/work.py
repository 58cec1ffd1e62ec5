"""Work items: who is to be delivered, to whom, and when.

Rules:
- A run has at most one item. What it is now stands in its WorkDoc, changed by compare-and-set only; the ItemDoc on
  the queue carries it to a worker. JetStream does what it is good at: delivery, lease (``ack_wait``), redelivery,
  delays. An ItemDoc whose generation is not the WorkDoc's is stale and dropped by whoever meets it.
- The queue delivers from whichever replica leads the consumer, and that one may have stored an item, and the WorkDoc
  of its generation before it, earlier than the stream's leader. So an item that is newer than its WorkDoc is not
  stale until the leader has stored as much; then its run is gone.
- While somebody holds the item, another wish for delivery is only noted in ``again`` and turns into a new item when
  the holder acks: so no wake can steal a running run, and none is lost. A note left by a signal is dropped if
  the run has parked meanwhile and has read all its signals.
- JetStream honours the ack of an old delivery. So an ack is sent only after the WorkDoc says that the item is done,
  or that another one counts; whoever lost its token to another holder of the same item sends none. A WorkDoc older
  than the delivery says nothing of it: a server that was frozen takes itself for the leader for a moment.
- Everything is done in this order: WorkDoc, then the queue. Killed in between, a stale delivery is all that is left.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from dualclaw_server.engine.store import FINAL, RunKey
from dualclaw_server.stores.nats.layout import DueDoc, Found, ItemDoc, Mark, RunDoc, SignalDoc, WorkDoc, state_of
from dualclaw_server.stores.nats.link import Again, Link
from dualclaw_server.stores.nats.transaction import Transaction
from dualclaw_server.stores.records import INTERRUPTED

FOR_SIGNAL, FOR_CERTAIN = 1, 2
"""Values of ``WorkDoc.again``: delivered again if the run has not read its signals; in any case."""

_LATEST = 253_402_300_000.0
"""The end of the year 9999, beyond which there are no dates."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A work item that was claimed."""

    key: RunKey
    pool: str
    token: str
    generation: int
    number: int
    """How often this item was delivered by now."""

    @property
    def redelivered(self) -> bool:
        """True when this very item had been claimed before."""
        return self.number > 1


async def item_of(tx: Transaction, key: RunKey) -> WorkDoc:
    """Return a run's WorkDoc; an empty one when it never had an item."""
    found = await tx.get(tx.subjects.run(key, "work"), WorkDoc)
    return WorkDoc() if found is None else found.doc


async def _store(tx: Transaction, key: RunKey, work: WorkDoc, pool: str, *, deliver: bool) -> None:
    await tx.put(tx.subjects.run(key, "work"), work)
    if deliver:
        item = ItemDoc(tenant=key.tenant, run_id=key.run_id, generation=work.generation)
        await tx.put(tx.subjects.item(pool, key), item, blind=True, last=True)


async def make_due(tx: Transaction, key: RunKey, pool: str, again: int, now: float) -> None:
    """See that a run is delivered: now, or after the delivery in hand."""
    work = await item_of(tx, key)
    if work.token:
        # Written even if nothing changes: so the end of the run and this signal cannot both happen unseen.
        work.again = max(work.again, again)
        await _store(tx, key, work, pool, deliver=False)
        return
    deliver = not work.waiting or work.ready > now
    if deliver:
        work.generation += 1
        work.deliveries = work.deliveries if work.waiting else 0
        work.waiting, work.ready, work.again = True, now, 0
    await _store(tx, key, work, pool, deliver=deliver)


async def take(
    tx: Transaction, item: ItemDoc, seq: int, pool: str, worker: str, token: str, until: float
) -> Delivery | None:
    """Claim the item that was delivered, stored at ``seq``; None when it is stale. Raises Again."""
    key = RunKey(item.tenant, item.run_id)
    caught_up = tx.attempt > 0 and await tx.link.reached(seq)  # asked before the read whose answer it vouches for
    work = await item_of(tx, key)
    if work.token == token:
        return Delivery(key, pool, token, work.generation, work.deliveries)
    if work.generation < item.generation and not caught_up:
        raise Again("the stream's leader does not know of a delivered item yet")
    if work.generation != item.generation or not (work.waiting or work.token):
        return None
    work.waiting, work.token, work.worker, work.ready = False, token, worker, until
    work.deliveries += 1
    work.again = 0
    await _store(tx, key, work, pool, deliver=False)
    return Delivery(key, pool, token, work.generation, work.deliveries)


async def ack(tx: Transaction, delivery: Delivery, now: float) -> bool:
    """End a delivery; False when its lease was lost and its item is still to be done, then nothing happens."""
    key = delivery.key
    work = await item_of(tx, key)
    if work.token != delivery.token:
        return is_over(work, delivery)
    again = work.again
    if again == FOR_SIGNAL:
        run = await tx.get(tx.subjects.run(key, "doc"), RunDoc)
        parked = run is not None and run.doc.state == INTERRUPTED
        again = FOR_CERTAIN if not parked or await _has_unread(tx, key) else 0
    work.waiting, work.token, work.worker, work.again, work.deliveries, work.ready = False, "", "", 0, 0, 0.0
    if again:
        work.generation += 1
        work.waiting, work.ready = True, now
    await _store(tx, key, work, delivery.pool, deliver=bool(again))
    return True


async def nak(tx: Transaction, delivery: Delivery, delay: float, now: float, *, long: float) -> float | None:
    """Put an item back. Returns after how many seconds its message is to be delivered again; 0: it is done, for the
    item got a new one; None when the lease was lost.

    Without a delay the item goes to the end of the queue, behind those that wait longer. A delay of more than
    ``long`` is a scheduled message, not one in hand. What is between the two JetStream does best.
    """
    work = await item_of(tx, delivery.key)
    if work.token != delivery.token:
        if tx.attempt and work.op == tx.op and work.waiting and work.generation == delivery.generation:
            return delay  # stored by an earlier attempt
        return 0.0 if is_over(work, delivery) else None
    delay = 0.0 if work.again else max(delay, 0.0)
    work.waiting, work.token, work.worker, work.again, work.ready = True, "", "", 0, now + delay
    key = delivery.key
    anew = not delay or delay > long
    work.generation += anew
    if delay > long:
        due = DueDoc(tenant=key.tenant, run_id=key.run_id, at=work.ready, generation=work.generation)
        await schedule(tx.link, key, due)
    await _store(tx, key, work, delivery.pool, deliver=not delay)
    return 0.0 if anew else delay


def is_over(work: WorkDoc, delivery: Delivery) -> bool:
    """True when nobody needs the item of this delivery any more, whoever saw to it."""
    idle = not (work.waiting or work.token)
    return work.generation > delivery.generation or (idle and work.generation == delivery.generation)


async def release(tx: Transaction, key: RunKey, pool: str, now: float) -> str | None:
    """Take a run from whoever works on it. Returns the token that is void now; None when there is no item."""
    work = await item_of(tx, key)
    if not (work.waiting or work.token):
        return None
    void = work.token
    work.generation += 1
    work.waiting, work.token, work.worker, work.again, work.ready = True, "", "", 0, now
    await _store(tx, key, work, pool, deliver=True)
    return void


async def drop(tx: Transaction, key: RunKey, *, held_too: bool) -> bool:
    """Drop what could still wake a run; its item in hand only with ``held_too``. Returns whether it had timers."""
    work = await item_of(tx, key)
    timers = bool(work.timers)
    work.timers, work.again = [], 0
    if held_too or not work.token:
        work.waiting, work.token, work.worker, work.deliveries, work.ready = False, "", "", 0, 0.0
    await _store(tx, key, work, "", deliver=False)
    return timers


async def schedule(link: Link, key: RunKey, due: DueDoc) -> None:
    """Have a message delivered at a time; before it is noted anywhere, so that nothing noted is ever forgotten."""
    at = datetime.datetime.fromtimestamp(min(due.at, _LATEST), datetime.UTC).isoformat().replace("+00:00", "Z")
    subjects = link.subjects
    headers = {
        "Nats-Schedule": f"@at {at}",
        "Nats-Schedule-Target": subjects.due_at(key, due.at),
        "Nats-Rollup": "sub",
    }
    await link.publish(subjects.timer(key, due.at), due, headers)


async def add_timer(tx: Transaction, key: RunKey, at: float) -> None:
    """Note a timer, whose message is on its way already."""
    work = await item_of(tx, key)
    if at not in work.timers:
        work.timers = sorted([*work.timers, at])
    await _store(tx, key, work, "", deliver=False)


async def fire(tx: Transaction, due: DueDoc, now: float) -> bool:
    """Do what a timer was set for. False: it is not noted, which may still come."""
    key = RunKey(due.tenant, due.run_id)
    run = await tx.get(tx.subjects.run(key, "doc"), RunDoc)
    if run is None or run.doc.deleted or state_of(run.doc.state) in FINAL:
        return True
    work = await item_of(tx, key)
    if due.generation:
        if work.waiting and work.generation == due.generation:
            await _store(tx, key, work, run.doc.pool, deliver=True)
        return work.generation >= due.generation
    if due.at not in work.timers:
        return False
    work.timers = [at for at in work.timers if at != due.at]
    await make_due(tx, key, run.doc.pool, FOR_CERTAIN, now)
    return True


async def _has_unread(tx: Transaction, key: RunKey) -> bool:
    found = await tx.link.snapshot(tx.subjects.run(key, "in", "*"), tx.subjects.run(key, "tk", "*"))
    taken = {subject.rpartition(".")[2] for subject in found if subject.split(".")[-2] == "tk"}
    return any(subject.rpartition(".")[2] not in taken for subject in found if subject.split(".")[-2] == "in")


async def put_signal(
    tx: Transaction, key: RunKey, run: Found[RunDoc], body: bytes, signal_id: str, now: float
) -> bytes | None:
    """Put a signal into a run's inbox and wake it; returns what was stored earlier under that id, if anything."""
    subject = tx.subjects.run(key, "in", tx.subjects.signal(signal_id))
    earlier = await tx.get(subject, SignalDoc)
    if earlier is not None:
        return None if earlier.doc.op == tx.op else earlier.body
    if state_of(run.doc.state) in FINAL:
        return None
    await tx.put(subject, SignalDoc(signal_id=signal_id), body)
    await make_due(tx, key, run.doc.pool, FOR_SIGNAL, now)
    return None


async def take_signals(tx: Transaction, key: RunKey, signals: tuple[str, ...]) -> None:
    """Mark signals as taken; those that never came are none."""
    for name in dict.fromkeys(signals):
        part = tx.subjects.signal(name)
        if await tx.get(tx.subjects.run(key, "in", part), SignalDoc) is not None:
            await tx.put(tx.subjects.run(key, "tk", part), Mark(), blind=True)
