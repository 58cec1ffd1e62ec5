"""What leaves the file: purged runs, logs past their retention, and the room they took.

Rules:
- Parked and running runs are never touched by age: only what became final is in the queue (``runs.rested``).
- Compaction first says that the log is gone (``kept_from``), then drops its frames in steps of a bounded number,
  so other runs' frames get their turn in between. Killed in the middle, the run is still in the queue, and
  the next compaction goes on with it; no reader ever sees a log with a hole.
- A conversation may have a million frames: deleting it first hands it to a tenant nobody can be, which makes it and
  its runs unknown in one short transaction, and then takes it away in steps. What a crash leaves goes with the
  next compaction. A finished run is emptied in steps before it is purged.
- Room goes back to the disk in steps too, and only while much of the file is empty: what comes next needs room again.
  Files made before this rule have no page map for it; they use their empty pages again, but never shrink.
"""

from __future__ import annotations

from dualclaw_server.engine.store import FINAL, RunKey
from dualclaw_server.stores import sqlite_work
from dualclaw_server.stores.sqlite_transaction import Transaction

BURIED = "\0buried"
"""The tenant of what is deleted, but not yet gone."""
STEP_FRAMES = 1000
"""Frames one transaction drops."""
STEP_PAGES = 512
"""Pages one transaction gives back."""
KEPT_EMPTY = 5
"""One page in this many may stay empty."""


def resting(tx: Transaction, before: float, limit: int) -> list[int]:
    """Return the runs whose log may go: final since before that time, the oldest first."""
    rows = tx.connection.execute(
        "SELECT id FROM runs WHERE rested < ? ORDER BY rested, id LIMIT ?", (before * 1e6, max(limit, 0))
    )
    return [run for (run,) in rows]


def compact_step(tx: Transaction, run: int) -> bool | None:
    """Drop a part of a run's log; True when that was the last one, None when somebody else did it meanwhile."""
    tx.flush()
    row = tx.connection.execute(
        "SELECT r.tenant, r.run_id, h.last_seq FROM runs r JOIN heads h ON h.run = r.id"
        " WHERE r.id = ? AND r.rested IS NOT NULL",
        (run,),
    ).fetchone()
    if row is None:
        return None
    tenant, run_id, last_seq = row
    tx.forget(RunKey(tenant, run_id))
    tx.connection.execute("UPDATE runs SET kept_from = ? WHERE id = ?", (last_seq + 1, run))
    if _drop_frames(tx, run, STEP_FRAMES) == STEP_FRAMES:
        return False
    drop_checkpoint_blob(tx, run)
    for table in ("checkpoints", "inbox"):
        tx.connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))  # noqa: S608 - names from the line above
    tx.connection.execute("UPDATE runs SET rested = NULL WHERE id = ?", (run,))
    return True


def empty_step(tx: Transaction, key: RunKey) -> bool:
    """Drop a part of the log of a run that is to be purged; False when the purge may take the rest at once."""
    at = tx.position(key)
    return at is not None and at.state in FINAL and compact_step(tx, at.run) is False


def bury(tx: Transaction, conversation: int) -> None:
    """Make a conversation, its runs and their request ids unknown; their names are free."""
    tx.flush()
    runs = tx.connection.execute("SELECT tenant, run_id FROM runs WHERE conversation = ?", (conversation,)).fetchall()
    for tenant, run_id in runs:
        tx.forget(RunKey(tenant, run_id))
        tx.effects.gone.append(RunKey(tenant, run_id))
    tx.connection.execute(
        "DELETE FROM requests WHERE run IN (SELECT id FROM runs WHERE conversation = ?)", (conversation,)
    )
    tx.connection.execute("UPDATE runs SET tenant = ?, run_id = id WHERE conversation = ?", (BURIED, conversation))
    tx.connection.execute(
        "UPDATE conversations SET tenant = ?, conversation_id = id WHERE id = ?", (BURIED, conversation)
    )


def buried_step(tx: Transaction) -> bool:
    """Take a part of what is buried away; False when there is nothing more."""
    tx.flush()
    row = tx.connection.execute("SELECT id FROM conversations WHERE tenant = ? LIMIT 1", (BURIED,)).fetchone()
    if row is None:
        return False
    run = tx.connection.execute("SELECT id, run_id FROM runs WHERE conversation = ? LIMIT 1", row).fetchone()
    if run is None:
        tx.connection.execute("DELETE FROM messages WHERE conversation = ?", row)
        tx.connection.execute("DELETE FROM conversations WHERE id = ?", row)
    elif _drop_frames(tx, run[0], STEP_FRAMES) < STEP_FRAMES:
        purge(tx, run[0], RunKey(BURIED, run[1]))
    return True


def shrink_step(tx: Transaction) -> bool:
    """Give empty pages at the end of the file back to the disk; False when there is nothing more to give."""
    (mapped,) = tx.connection.execute("PRAGMA auto_vacuum").fetchone()
    (pages,) = tx.connection.execute("PRAGMA page_count").fetchone()
    (empty,) = tx.connection.execute("PRAGMA freelist_count").fetchone()
    if not mapped or empty * KEPT_EMPTY <= pages:
        return False
    # The statement gives back one page each time it is stepped, so it must be read to its end.
    tx.connection.execute(f"PRAGMA incremental_vacuum({STEP_PAGES})").fetchall()
    (left,) = tx.connection.execute("PRAGMA freelist_count").fetchone()
    return bool(left < empty)


def purge(tx: Transaction, run: int, key: RunKey) -> None:
    """Drop all of a run but its messages."""
    tx.forget(key)
    sqlite_work.drop(tx, run)
    _drop_frames(tx, run, None)
    drop_checkpoint_blob(tx, run)
    for table in ("checkpoints", "inbox", "answers", "requests", "heads"):
        tx.connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))  # noqa: S608 - names from the line above
    tx.connection.execute("DELETE FROM runs WHERE id = ?", (run,))
    tx.effects.gone.append(key)


def drop_checkpoint_blob(tx: Transaction, run: int) -> None:
    """Give up the blob of a run's checkpoint, if it has one."""
    row = tx.connection.execute("SELECT blob FROM checkpoints WHERE run = ?", (run,)).fetchone()
    if row is not None:
        tx.drop_blob(row[0])


def _drop_frames(tx: Transaction, run: int, limit: int | None) -> int:
    """Drop a run's oldest frames, all of them without a limit; returns how many."""
    rows = tx.connection.execute(
        "DELETE FROM frames WHERE id IN (SELECT id FROM frames WHERE run = ? ORDER BY last_seq LIMIT ?) RETURNING blob",
        (run, -1 if limit is None else limit),
    ).fetchall()
    for (blob,) in rows:
        tx.drop_blob(blob)
    return len(rows)
