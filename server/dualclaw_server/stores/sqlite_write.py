"""What changes runs and conversations, as functions on a transaction; each refuses before it writes."""

from __future__ import annotations

from dualclaw import BusyPolicy
from dualclaw_server.engine.store import FINAL, MAX_QUEUED, Answers, Created, Frame, NewRun, RunKey
from dualclaw_server.stores import records, sqlite_retention, sqlite_work
from dualclaw_server.stores.records import INTERRUPTED, QUEUED, RUNNING
from dualclaw_server.stores.sqlite_transaction import Position, Transaction


def create(tx: Transaction, new: NewRun) -> Created:
    """Store a new run with its work item, or return the one its request_id already made."""
    connection, tenant = tx.connection, new.key.tenant
    if known := _known(tx, tenant, new.request_id, new.fingerprint):
        return known
    if tx.position(new.key) is not None:
        raise ValueError("a run with this id exists")
    conversation, active = _conversation(tx, new)
    rivals = _rivals(tx, new, conversation, active) if active is not None else []

    # Refused no more; from here on everything is written.
    if conversation is None:
        conversation = _insert(
            tx,
            "INSERT INTO conversations (tenant, conversation_id, title, created, updated) VALUES (?, ?, ?, ?, ?)",
            (tenant, new.conversation_id, new.title, tx.micros, tx.micros),
        )
    run = _insert(
        tx,
        "INSERT INTO runs (tenant, run_id, conversation, state, pool, created, record, info)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            tenant,
            new.key.run_id,
            conversation,
            QUEUED,
            new.pool,
            tx.micros,
            new.record,
            new.run.SerializeToString(),
        ),
    )
    connection.execute(
        "INSERT INTO heads (run, version, last_seq, epoch, updated) VALUES (?, 0, 0, 0, ?)", (run, tx.micros)
    )
    tx.newest_move = (run, 0, 0, 0, tx.micros)
    connection.execute(
        "INSERT INTO messages (run, position, conversation, activation, visible, body) VALUES (?, 0, ?, 0, 0, ?)",
        (run, conversation, new.message.SerializeToString()),
    )
    _remember(tx, tenant, new.request_id, run, 1, new.fingerprint)
    connection.execute("UPDATE conversations SET updated = ? WHERE id = ?", (tx.micros, conversation))
    if active is None:
        _activate(tx, run, new.key, conversation, new.pool)
    for rival, rival_id in rivals:
        signal(tx, RunKey(tenant, rival_id), new.replace_signal, f"replace:{new.key.run_id}", rival)
    return Created(tx.head(run), 1, existing=False)


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


def _insert(tx: Transaction, statement: str, values: tuple[object, ...]) -> int:
    row_id = tx.connection.execute(statement, values).lastrowid
    assert row_id is not None  # noqa: S101 - an INSERT has one
    return row_id


def _conversation(tx: Transaction, new: NewRun) -> tuple[int | None, int | None]:
    row = tx.connection.execute(
        "SELECT id, active FROM conversations WHERE tenant = ? AND conversation_id = ?",
        (new.key.tenant, new.conversation_id),
    ).fetchone()
    if row is not None:
        return row[0], row[1]
    if not new.new_conversation:
        raise records.unknown_conversation()
    return None, None


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
    """Make a run the active one of its conversation."""
    tx.forget(key)
    tx.connection.execute("UPDATE runs SET state = ? WHERE id = ?", (RUNNING, run))
    tx.connection.execute("UPDATE heads SET updated = ? WHERE run = ?", (tx.micros, run))
    tx.connection.execute("UPDATE conversations SET active = ? WHERE id = ?", (run, conversation))
    _give_place(tx, run, conversation)
    _show(tx, run)
    sqlite_work.make_due(tx, run, pool, sqlite_work.FOR_CERTAIN)


def _show(tx: Transaction, run: int) -> None:
    """Make a run's messages part of the conversation."""
    tx.connection.execute("UPDATE messages SET visible = 1 WHERE run = ? AND scope = ''", (run,))


def _give_place(tx: Transaction, run: int, conversation: int) -> None:
    """Give a run the next place in the order of its conversation."""
    (place,) = tx.connection.execute(
        "UPDATE conversations SET activations = activations + 1 WHERE id = ? RETURNING activations", (conversation,)
    ).fetchone()
    tx.connection.execute("UPDATE runs SET activation = ? WHERE id = ?", (place, run))
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
    if frame.checkpoint or frame.messages or frame.signals or frame.run is not None:
        _store_parts(tx, at, frame)
    if state != before:
        tx.connection.execute("UPDATE runs SET state = ? WHERE id = ?", (state, at.run))
    if state == INTERRUPTED or state in FINAL:
        if not at.activation:
            _give_place(tx, at.run, at.conversation)
        _show(tx, at.run)
        tx.connection.execute("UPDATE conversations SET updated = ? WHERE id = ?", (tx.micros, at.conversation))
    if state in FINAL:
        tx.connection.execute("UPDATE runs SET rested = ? WHERE id = ?", (tx.micros, at.run))
        sqlite_work.drop(tx, at.run, held_too=False)
        _start_next(tx, at)
    return at.version


def _store_parts(tx: Transaction, at: Position, frame: Frame) -> None:
    """Store what a frame carries beside its events."""
    connection = tx.connection
    if frame.checkpoint:
        sqlite_retention.drop_checkpoint_blob(tx, at.run)
        connection.execute(
            "INSERT INTO checkpoints (run, seq, body, blob) VALUES (?, ?, ?, ?) ON CONFLICT (run) DO UPDATE SET"
            " seq = excluded.seq, body = excluded.body, blob = excluded.blob",
            (at.run, frame.last_seq, *tx.store_payload(frame.checkpoint)),
        )
    for message in frame.messages:
        connection.execute(
            "INSERT INTO messages (run, position, conversation, activation, visible, body, scope)"
            " VALUES (?, ?, ?, ?, 0, ?, ?) ON CONFLICT (run, position) DO UPDATE SET"
            " visible = visible AND excluded.scope = '', body = excluded.body, scope = excluded.scope",
            (
                at.run,
                message.position,
                at.conversation,
                at.activation,
                message.message.SerializeToString(),
                message.scope,
            ),
        )
    for signal_id in frame.signals:
        connection.execute("UPDATE inbox SET taken = 1 WHERE run = ? AND signal_id = ?", (at.run, signal_id))
    if frame.run is not None:
        connection.execute("UPDATE runs SET info = ? WHERE id = ?", (frame.run.SerializeToString(), at.run))


def _start_next(tx: Transaction, ended: Position) -> None:
    """If the run that ended was the active one, start the one that has waited longest."""
    (active,) = tx.connection.execute("SELECT active FROM conversations WHERE id = ?", (ended.conversation,)).fetchone()
    if active != ended.run:
        return
    row = tx.connection.execute(
        "SELECT id, tenant, run_id, pool FROM runs WHERE conversation = ? AND state = ? ORDER BY id LIMIT 1",
        (ended.conversation, QUEUED),
    ).fetchone()
    if row is None:
        tx.connection.execute("UPDATE conversations SET active = NULL WHERE id = ?", (ended.conversation,))
    else:
        run, tenant, run_id, pool = row
        _activate(tx, run, RunKey(tenant, run_id), ended.conversation, pool)


def delete(tx: Transaction, key: RunKey) -> None:
    """Purge a run; the messages people may see stay."""
    at = tx.position(key)
    if at is not None:
        tx.connection.execute("DELETE FROM messages WHERE run = ? AND NOT visible", (at.run,))
        sqlite_retention.purge(tx, at.run, key)
        _start_next(tx, at)


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
