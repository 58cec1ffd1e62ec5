"""Work items in a transaction: who is to be delivered, to whom, and when.

A run has at most one item. While somebody holds it, another wish for delivery (a signal, a timer, its turn
in the queue) is only noted in ``again`` and turns into a new item when the holder acks: so no wake can
steal a running run, and none is lost. A note left by a signal is dropped if the run has parked meanwhile and
has read all its signals.

Clocks jump, and a lease must end by the clock of the wall, the only one processes share:
- Forward (also when the machine slept), every lease looks over at once. So a lease that is over is first prolonged
  by half its length, once: a holder that lives beats every third, and keeps its run. A process that is gone is known
  by its lock and gets no such time.
- Backward, what is due now would have to wait until the clock is there again. So whoever sees the clock go back, or
  opens a file whose times are implausible, brings them up to date.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

from dualclaw_server.engine.store import FINAL, RunKey
from dualclaw_server.stores.records import INTERRUPTED, unknown_run
from dualclaw_server.stores.sqlite_owners import OwnerLocks
from dualclaw_server.stores.sqlite_transaction import Transaction

FOR_SIGNAL, FOR_CERTAIN = 1, 2
"""Values of ``work.again``: delivered again if the run has not read its signals; in any case."""


FARTHEST = 3600.0
"""Seconds an item may be put back for at most; one that is due later was made by a clock that was wrong."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A work item that was claimed."""

    run: int
    key: RunKey
    token: int
    redelivered: bool


def register(tx: Transaction, locks: OwnerLocks) -> None:
    """Enter this process among the owners, and release what those hold whose process is gone.

    The lock is taken before the row can be seen, so no living process ever looks dead.
    """
    owner = tx.connection.execute("INSERT INTO owners (opened) VALUES (?)", (tx.micros,)).lastrowid
    assert owner is not None  # noqa: S101 - an INSERT has one
    locks.take(owner)
    tx.owner = owner
    clock_went_back(tx, FARTHEST)
    for (other,) in tx.connection.execute("SELECT id FROM owners WHERE id != ?", (owner,)).fetchall():
        if not locks.lives(other):
            release(tx, other)


def clock_went_back(tx: Transaction, plausible: float = 0.0) -> None:
    """Make due what would be waited for in vain: items due in more than ``plausible`` seconds, leases over-long."""
    tx.connection.execute("UPDATE work SET ready = ? WHERE token IS NULL AND ready > ?", (tx.now, tx.now + plausible))
    tx.connection.execute(
        "UPDATE work SET ready = ?1 + lease WHERE token IS NOT NULL AND ready > ?1 + lease", (tx.now,)
    )


def make_due(tx: Transaction, run: int, pool: str, again: int) -> None:
    """See that a run is delivered: now, or after the delivery in hand."""
    tx.connection.execute(
        "INSERT INTO work (run, pool, ready) VALUES (?, ?, ?) ON CONFLICT (run) DO UPDATE SET"
        " ready = CASE WHEN token IS NULL THEN min(ready, excluded.ready) ELSE ready END,"
        " again = CASE WHEN token IS NULL THEN again ELSE max(again, ?) END",
        (run, pool, tx.now, again),
    )
    tx.effects.ready.append((pool, tx.now))


def wake(tx: Transaction, key: RunKey, at: float) -> None:
    """Store a timer; a final run needs none."""
    row = tx.connection.execute(
        "SELECT id, state, pool FROM runs WHERE tenant = ? AND run_id = ?", (key.tenant, key.run_id)
    ).fetchone()
    if row is None:
        raise unknown_run()
    run, state, pool = row
    if state not in FINAL:
        tx.connection.execute("INSERT OR IGNORE INTO timers (at, run) VALUES (?, ?)", (at, run))
        tx.timers_changed()
        tx.effects.ready.append((pool, at))


def claim(tx: Transaction, pool: str, worker: str, lease: float) -> Delivery | None:
    """Take the item that has been ready the longest; None when nothing is ready."""
    _fire_timers(tx)
    while True:
        first, later = _first_two(tx, pool)
        if first is None or first.ready > tx.now:
            _note_due(tx, pool, first.ready if first is not None else None)
            return None
        if not first.beats:
            break
        tx.connection.execute("UPDATE work SET ready = ? + lease / 2, warned = 1 WHERE run = ?", (tx.now, first.run))
    delivery = Delivery(first.run, RunKey(first.tenant, first.run_id), secrets.randbits(62), first.deliveries > 0)
    until = tx.now + lease
    tx.connection.execute(
        "UPDATE work SET token = ?, owner = ?, worker = ?, ready = ?, lease = ?, warned = 0,"
        " deliveries = deliveries + 1, again = 0 WHERE run = ?",
        (delivery.token, tx.owner, worker, until, lease, first.run),
    )
    _note_due(tx, pool, min(later.ready, until) if later is not None else until)
    return delivery


class _Item(NamedTuple):
    run: int
    tenant: str
    run_id: str
    deliveries: int
    ready: float
    beats: int
    """1 if its holder is to have time for another beat."""


def _first_two(tx: Transaction, pool: str) -> tuple[_Item | None, _Item | None]:
    """Return the items that are, or will be, ready first."""
    rows = tx.connection.execute(
        "SELECT w.run, r.tenant, r.run_id, w.deliveries, w.ready, w.token IS NOT NULL AND NOT w.warned"
        " FROM work w JOIN runs r ON r.id = w.run WHERE w.pool = ? ORDER BY w.ready, w.run LIMIT 2",
        (pool,),
    ).fetchall()
    items = [_Item(*row) for row in rows]
    return items[0] if items else None, items[1] if len(items) > 1 else None


def _note_due(tx: Transaction, pool: str, item: float | None) -> None:
    """Have claimers told when the next item may be claimed. A timer counts for all pools."""
    times = [time for time in (item, tx.soonest_timer()) if time is not None]
    if times:
        tx.effects.ready.append((pool, min(times)))


def _fire_timers(tx: Transaction) -> None:
    soonest = tx.soonest_timer()
    if soonest is None or soonest > tx.now:
        return
    fired = tx.connection.execute("DELETE FROM timers WHERE at <= ? RETURNING run", (tx.now,)).fetchall()
    tx.timers_changed()
    for run in sorted({run for (run,) in fired}):
        (pool,) = tx.connection.execute("SELECT pool FROM runs WHERE id = ?", (run,)).fetchone()
        make_due(tx, run, pool, FOR_CERTAIN)


def ack(tx: Transaction, delivery: Delivery) -> None:
    """End a delivery; nothing happens when its lease was lost."""
    row = tx.connection.execute(
        "DELETE FROM work WHERE run = ? AND token = ? RETURNING again, pool", (delivery.run, delivery.token)
    ).fetchone()
    if row is not None and row[0]:
        again, pool = row
        (state,) = tx.connection.execute("SELECT state FROM runs WHERE id = ?", (delivery.run,)).fetchone()
        if again == FOR_CERTAIN or state != INTERRUPTED or _has_unread(tx, delivery.run):
            make_due(tx, delivery.run, pool, FOR_CERTAIN)


def nak(tx: Transaction, delivery: Delivery, delay: float) -> None:
    """Put an item back, for ``FARTHEST`` seconds at most; nothing happens when its lease was lost."""
    row = tx.connection.execute(
        "UPDATE work SET token = NULL, owner = NULL, ready = CASE WHEN again THEN ? ELSE ? END, again = 0"
        " WHERE run = ? AND token = ? RETURNING pool, ready",
        (tx.now, tx.now + min(delay, FARTHEST), delivery.run, delivery.token),
    ).fetchone()
    if row is not None:
        tx.effects.ready.append(row)


def release(tx: Transaction, owner: int) -> None:
    """Make everything a process holds claimable at once, and forget the process: it is gone, or about to go."""
    pools = tx.connection.execute("SELECT DISTINCT pool FROM work WHERE owner = ?", (owner,)).fetchall()
    tx.connection.execute("UPDATE work SET token = NULL, owner = NULL, ready = ? WHERE owner = ?", (tx.now, owner))
    tx.connection.execute("DELETE FROM owners WHERE id = ?", (owner,))
    tx.effects.ready.extend((pool, tx.now) for (pool,) in pools)


def take_back(tx: Transaction, key: RunKey) -> bool:
    """Make one run's item claimable at once, whoever holds it; False when it has none."""
    row = tx.connection.execute(
        "SELECT id, pool FROM runs WHERE tenant = ? AND run_id = ?", (key.tenant, key.run_id)
    ).fetchone()
    if row is None:
        raise unknown_run()
    run, pool = row
    _note_taken(tx, run)
    done = tx.connection.execute(
        "UPDATE work SET token = NULL, owner = NULL, ready = ?, again = 0 WHERE run = ?", (tx.now, run)
    )
    tx.effects.ready.append((pool, tx.now))
    return done.rowcount == 1


def _note_taken(tx: Transaction, run: int) -> None:
    held = tx.connection.execute("SELECT token FROM work WHERE run = ? AND token IS NOT NULL", (run,))
    tx.effects.taken += [token for (token,) in held]


def end(tx: Transaction, run: int) -> None:
    """Drop what could still wake a run that is final.

    Its item in this process's hands goes too, and needs no ack any more; one in another's goes with the ack.
    """
    _drop_timers(tx, run)
    row = tx.connection.execute(
        "DELETE FROM work WHERE run = ? AND (token IS NULL OR owner = ?) RETURNING token", (run, tx.owner)
    ).fetchone()
    if row is None:
        tx.connection.execute("UPDATE work SET again = 0 WHERE run = ?", (run,))
    elif row[0] is not None:
        tx.effects.ended.append(row[0])


def drop(tx: Transaction, run: int) -> None:
    """Drop what could still wake a run that is to be purged, in whose hands ever its item is."""
    _drop_timers(tx, run)
    _note_taken(tx, run)
    tx.connection.execute("DELETE FROM work WHERE run = ?", (run,))


def _drop_timers(tx: Transaction, run: int) -> None:
    if tx.soonest_timer() is not None:
        tx.connection.execute("DELETE FROM timers WHERE run = ?", (run,))
        tx.timers_changed()


def _has_unread(tx: Transaction, run: int) -> bool:
    return (
        tx.connection.execute("SELECT 1 FROM inbox WHERE run = ? AND NOT taken LIMIT 1", (run,)).fetchone() is not None
    )
