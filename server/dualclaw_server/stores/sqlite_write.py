"""What changes runs and conversations, as functions on a transaction; each refuses before it writes."""

from __future__ import annotations

from dualclaw import BusyPolicy, RunState
from dualclaw_server.engine.store import FINAL, MAX_QUEUED, Answers, Created, Frame, Head, NewRun, RunKey, RunMessage
from dualclaw_server.stores import records, sqlite_retention, sqlite_work
from dualclaw_server.stores.records import INTERRUPTED, QUEUED, RUNNING
from dualclaw_server.stores.sqlite_transaction import Position, Transaction

_STANDING = """
    SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'runs'),
           EXISTS (SELECT 1 FROM runs WHERE tenant = ?1 AND run_id = ?2), c.id, c.active, c.activations
    FROM (SELECT 1) LEFT JOIN conversations c ON c.tenant = ?1 AND c.conversation_id = ?3
"""


def create(tx: Transaction, new: NewRun) -> Created:
    """Store a new run with its work item, or return the one its request_id already made."""
    connection, tenant = tx.connection, new.key.tenant
    if known := _known(tx, tenant, new.request_id, new.fingerprint):
        return known
    newest, exists, conversation, active, activations = connection.execute(
        _STANDING, (tenant, new.key.run_id, new.conversation_id)
    ).fetchone()
    if exists:
        raise ValueError("a run with this id exists")
    if conversation is None and not new.new_conversation:
        raise records.unknown_conversation()
    rivals = _rivals(tx, new, conversation, active) if active is not None else []

    # Refused no more; from here on everything is written. The number of the run, as AUTOINCREMENT would give it, is
    # taken beforehand, so that conversation and run are written once, as they are to be.
    run = (newest or 0) + 1
    starts = active is None
    place = (activations or 0) + 1 if starts else 0
    if conversation is None:
        conversation = connection.execute(
            "INSERT INTO conversations (tenant, conversation_id, title, active, activations, created, updated)"
            " VALUES (?, ?, ?, ?, 1, ?, ?)",
            (tenant, new.conversation_id, new.title, run, tx.micros, tx.micros),
        ).lastrowid
        assert conversation is not None  # noqa: S101 - an INSERT has one
    elif starts:
        connection.execute(
            "UPDATE conversations SET active = ?, activations = ?, updated = ? WHERE id = ?",
            (run, place, tx.micros, conversation),
        )
    else:
        connection.execute("UPDATE conversations SET updated = ? WHERE id = ?", (tx.micros, conversation))
    state, info = RUNNING if starts else QUEUED, new.run.SerializeToString()
    connection.execute(
        "INSERT INTO runs (id, tenant, run_id, conversation, state, activation, pool, created, record, info)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (run, tenant, new.key.run_id, conversation, state, place, new.pool, tx.micros, new.record, info),
    )
    at = Position(run, 0, 0, 0, state, conversation, place, tx.micros, None)
    tx.place(new.key, at)
    tx.add_message(at, RunMessage(0, new.message), visible=starts)
    _remember(tx, tenant, new.request_id, run, 1, new.fingerprint)
    public = records.public_run(info, state, 0, tx.micros, tx.micros)
    head = Head(new.key, 0, 0, 0, state, new.conversation_id, public)
    if starts:
        sqlite_work.make_due(tx, run, new.pool, sqlite_work.FOR_CERTAIN)
        tx.effects.created.append((new, head, place == 1))
    for rival, rival_id in rivals:
        signal(tx, RunKey(tenant, rival_id), new.replace_signal, f"replace:{new.key.run_id}", rival)
    return Created(head, 1, existing=False)


def _known(tx: Transaction, tenant: str, request_id: str, fingerprint: str) -> Created | None:
    """Return the segment that a request_id has begun; None when there is none, or no id."""
    if not request_id:
        return None
    row = tx.connection.execute(
        "SELECT run, first_seq, fingerprint FROM requests WHERE tenant = ? AND request_id = ?", (tenant, request_id)
    ).fetchone()
    if row is None:
        return None
    run, first_seq, earlier = row
    head = tx.head(run)
    if earlier != fingerprint:
        raise records.request_id_reused(head.key.run_id)
    return Created(head, first_seq, existing=True)


def _remember(tx: Transaction, tenant: str, request_id: str, run: int, first_seq: int, fingerprint: str) -> None:
    if request_id:
        tx.connection.execute(
            "INSERT INTO requests (tenant, request_id, run, first_seq, fingerprint) VALUES (?, ?, ?, ?, ?)",
            (tenant, request_id, run, first_seq, fingerprint),
        )


def _rivals(tx: Transaction, new: NewRun, conversation: int | None, active: int) -> list[tuple[int, str]]:
    """Return the runs REPLACE cancels; none for QUEUE. Refuses what may not wait."""
    waiting = tx.connection.execute(
        "SELECT id, run_id FROM runs WHERE conversation = ? AND state = ? ORDER BY id", (conversation, QUEUED)
    ).fetchall()
    if new.on_busy == BusyPolicy.BUSY_POLICY_QUEUE:
        if len(waiting) >= MAX_QUEUED:
            raise records.overloaded(len(waiting))
        return []
    (active_id,) = tx.connection.execute("SELECT run_id FROM runs WHERE id = ?", (active,)).fetchone()
    if new.on_busy != BusyPolicy.BUSY_POLICY_REPLACE:
        raise records.conversation_busy(active_id)
    return [(active, active_id), *waiting]


def _activate(tx: Transaction, run: int, key: RunKey, conversation: int, pool: str) -> None:
    """Start a run that has become the active one of its conversation: its messages take their place in it."""
    tx.forget(key)
    tx.connection.execute("UPDATE heads SET updated = ? WHERE run = ?", (tx.micros, run))
    _give_place(tx, run, conversation, RUNNING)
    tx.show(run)
    sqlite_work.make_due(tx, run, pool, sqlite_work.FOR_CERTAIN)


def _give_place(tx: Transaction, run: int, conversation: int, state: RunState.ValueType) -> None:
    """Give a run the next place in the order of its conversation."""
    tx.flush()
    (place,) = tx.connection.execute(
        "UPDATE conversations SET activations = activations + 1 WHERE id = ? RETURNING activations", (conversation,)
    ).fetchone()
    tx.connection.execute("UPDATE runs SET state = ?, activation = ? WHERE id = ?", (state, place, run))
    tx.connection.execute("UPDATE messages SET activation = ? WHERE run = ?", (place, run))


def signal(tx: Transaction, key: RunKey, body: bytes, signal_id: str, run: int | None = None) -> bytes | None:
    """Put a wish into a run's inbox and wake it; returns the body stored earlier under that id."""
    row = tx.connection.execute(
        "SELECT id, state, pool FROM runs WHERE id = ?" if run else
        "SELECT id, state, pool FROM runs WHERE tenant = ? AND run_id = ?",
        (run,) if run else (key.tenant, key.run_id),
    ).fetchone()  # fmt: skip
    if row is None:
        raise records.unknown_run()
    run, state, pool = row
    earlier = _signalled(tx, run, signal_id)
    if earlier is not None or state in FINAL:
        return earlier
    tx.connection.execute(
        "INSERT INTO inbox (run, signal_id, body, owner) VALUES (?, ?, ?, ?)", (run, signal_id, body, tx.owner)
    )
    sqlite_work.make_due(tx, run, pool, sqlite_work.FOR_SIGNAL)
    tx.effects.signals.append(key)
    return None


def _signalled(tx: Transaction, run: int, signal_id: str) -> bytes | None:
    row = tx.connection.execute("SELECT body FROM inbox WHERE run = ? AND signal_id = ?", (run, signal_id)).fetchone()
    return None if row is None else bytes(row[0])


def answer(tx: Transaction, answers: Answers) -> Created:
    """Record that questions of a parked run are answered, put the signal into its inbox and wake it."""
    connection, key = tx.connection, answers.key
    at = tx.position(key)
    if at is None:
        raise records.unknown_run()
    if known := _known(tx, key.tenant, answers.request_id, answers.fingerprint):
        return known
    head = tx.head(at.run)
    rows = connection.execute("SELECT interrupt_id FROM answers WHERE run = ?", (at.run,))
    answered = {interrupt_id for (interrupt_id,) in rows}
    signal_known = _signalled(tx, at.run, answers.signal_id) is not None
    records.check_answers(answers, answered, head, signal_known=signal_known)

    # Refused no more; from here on everything is written.
    for interrupt_id in dict.fromkeys(answers.interrupt_ids):
        connection.execute("INSERT INTO answers (run, interrupt_id) VALUES (?, ?)", (at.run, interrupt_id))
    _remember(tx, key.tenant, answers.request_id, at.run, head.last_seq + 1, answers.fingerprint)
    signal(tx, key, answers.signal, answers.signal_id, at.run)
    return Created(head, head.last_seq + 1, existing=False)


def append(tx: Transaction, key: RunKey, frame: Frame, expect: int) -> int:
    """Store a frame on top of version ``expect``; returns the new version."""
    at = tx.position(key)
    if at is None:
        raise records.gone()
    before = at.state
    state = records.next_state(frame, expect, version=at.version, last_seq=at.last_seq, epoch=at.epoch, state=before)
    at.version += 1
    at.last_seq = frame.last_seq
    at.epoch = frame.epoch
    at.state = state
    at.updated = tx.micros
    tx.move(at)
    if frame.count:
        tx.add_frame(at.run, frame)
        tx.effects.frames.append((key, records.public_frame(frame)))
    if frame.checkpoint:
        tx.add_checkpoint(at, frame.last_seq, frame.checkpoint)
    for message in frame.messages:
        tx.add_message(at, message)
    for signal_id in frame.signals:
        tx.connection.execute("UPDATE inbox SET taken = 1 WHERE run = ? AND signal_id = ?", (at.run, signal_id))
    info = frame.run.SerializeToString() if frame.run is not None else None
    if state != before:
        rested = tx.micros if state in FINAL else None
        tx.connection.execute(
            "UPDATE runs SET state = ?, info = coalesce(?, info), rested = ? WHERE id = ?",
            (state, info, rested, at.run),
        )
    elif info is not None:
        tx.connection.execute("UPDATE runs SET info = ? WHERE id = ?", (info, at.run))
    if state in FINAL:
        _end(tx, key, at)
    elif state == INTERRUPTED:
        tx.show(at.run)
        tx.connection.execute("UPDATE conversations SET updated = ? WHERE id = ?", (tx.micros, at.conversation))
    return at.version


def _end(tx: Transaction, key: RunKey, at: Position) -> None:
    """Do what comes with the end of a run; one that was queued takes the next place among what has happened."""
    if not at.activation:
        _give_place(tx, at.run, at.conversation, at.state)
    tx.show(at.run)
    tx.rest(key)
    sqlite_work.end(tx, at.run)
    if not _start_next(tx, at, tx.micros):
        tx.connection.execute("UPDATE conversations SET updated = ? WHERE id = ?", (tx.micros, at.conversation))


def _start_next(tx: Transaction, ended: Position, updated: int | None) -> bool:
    """If the run that ended was the active one, start the one that has waited longest; False when it was not."""
    row = tx.connection.execute(
        "UPDATE conversations SET updated = coalesce(?1, updated),"
        " active = (SELECT min(id) FROM runs WHERE conversation = ?2 AND state = ?3) WHERE id = ?2 AND active = ?4"
        " RETURNING active",
        (updated, ended.conversation, QUEUED, ended.run),
    ).fetchone()
    if row is None:
        return False
    if row[0] is not None:
        tenant, run_id, pool = tx.connection.execute(
            "SELECT tenant, run_id, pool FROM runs WHERE id = ?", row
        ).fetchone()
        _activate(tx, row[0], RunKey(tenant, run_id), ended.conversation, pool)
    return True


def delete(tx: Transaction, key: RunKey) -> None:
    """Purge a run; the messages people may see stay."""
    at = tx.position(key)
    if at is not None:
        tx.flush()
        tx.connection.execute("DELETE FROM messages WHERE run = ? AND NOT visible", (at.run,))
        sqlite_retention.purge(tx, at.run, key)
        _start_next(tx, at, None)


def delete_conversation(tx: Transaction, tenant: str, conversation_id: str) -> None:
    """Make a conversation and all that belongs to it unknown; ``sqlite_retention.buried_step`` then takes it away."""
    row = tx.connection.execute(
        "SELECT c.id, r.run_id FROM conversations c LEFT JOIN runs r ON r.id = c.active"
        " WHERE c.tenant = ? AND c.conversation_id = ?",
        (tenant, conversation_id),
    ).fetchone()
    if row is None:
        raise records.unknown_conversation()
    conversation, active = row
    if active is not None:
        raise records.conversation_busy(active)
    sqlite_retention.bury(tx, conversation)


def put(tx: Transaction, tenant: str, name: str, value: bytes, revision: int) -> int | None:
    """Store a setting if its revision still is ``revision``; None when it is not."""
    if revision == 0:
        cursor = tx.connection.execute(
            "INSERT OR IGNORE INTO settings (tenant, name, value, revision) VALUES (?, ?, ?, 1)", (tenant, name, value)
        )
    else:
        cursor = tx.connection.execute(
            "UPDATE settings SET value = ?, revision = revision + 1 WHERE tenant = ? AND name = ? AND revision = ?",
            (value, tenant, name, revision),
        )
    return revision + 1 if cursor.rowcount == 1 else None
