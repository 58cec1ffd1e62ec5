"""The write transaction: what all operations of one group commit share. Used by the writer thread alone.

Rules:
- ``PRAGMA synchronous`` is set before BEGIN, to the strongest need in the batch: inside a transaction it
  cannot change.
- Where each log stands is remembered from one transaction to the next, so an append needs no query. That
  memory holds as long as ``PRAGMA data_version``, read inside the transaction, says that no other
  connection has written; any rollback forgets it.
- Frames, heads, checkpoints and messages are gathered and written many rows to a statement, of a checkpoint only the
  newest: a statement or two of each kind for a batch of 64 appends. Besides the time, each statement gives up Python's
  interpreter lock and has to get it back from a busy event loop. Whoever reads or changes these tables inside the
  transaction calls ``flush`` first.
- An operation refuses before it writes. So a refused one leaves nothing behind, without a savepoint each.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from dualclaw import RunState
from dualclaw_server.engine.store import Frame, Head, NewRun, RunKey, RunMessage
from dualclaw_server.stores.records import Clock, public_run

log = logging.getLogger(__name__)

DURABLE, ENDS_SEGMENT = 1, 2
"""Bits of ``frames.flags``."""

INLINE = 256 * 1024
"""Payloads above this many bytes go to ``blobs``."""

_REMEMBERED = 8192
_JITTER = 1.0


_MOST_ROWS = 32
"""Rows a statement writes at most."""


def _by_rows(statement: str, columns: int) -> tuple[str, ...]:
    """Return the statement for 1, 2, ... rows, whose texts SQLite then finds prepared."""
    row = f"({', '.join('?' * columns)})"
    return tuple(statement.format(", ".join([row] * rows)) for rows in range(1, _MOST_ROWS + 1))


_INSERT_FRAMES = _by_rows("INSERT INTO frames (run, first_seq, last_seq, epoch, state, flags, body, blob) VALUES {}", 8)
_MOVE_HEADS = _by_rows(
    "INSERT INTO heads (run, version, last_seq, epoch, updated) VALUES {} ON CONFLICT (run) DO UPDATE SET"
    " version = excluded.version, last_seq = excluded.last_seq, epoch = excluded.epoch, updated = excluded.updated",
    5,
)
_SAVE_CHECKPOINTS = _by_rows(
    "INSERT INTO checkpoints (run, seq, body, blob) VALUES {} ON CONFLICT (run) DO UPDATE SET"
    " seq = excluded.seq, body = excluded.body, blob = excluded.blob",
    4,
)
_SAVE_MESSAGES = _by_rows(
    "INSERT INTO messages (run, position, conversation, activation, visible, body, scope) VALUES {}"
    " ON CONFLICT (run, position) DO UPDATE SET"
    " visible = visible AND excluded.scope = '', body = excluded.body, scope = excluded.scope",
    7,
)
_SHOW_MESSAGES = tuple(
    f"UPDATE messages SET visible = 1 WHERE run IN ({', '.join('?' * runs)}) AND scope = ''"  # noqa: S608 - our own
    for runs in range(1, _MOST_ROWS + 1)
)

HEAD_QUERY = """
    SELECT r.id, r.tenant, r.run_id, h.version, h.last_seq, h.epoch, r.state, c.conversation_id,
           r.info, r.created, h.updated, r.kept_from
    FROM runs r JOIN heads h ON h.run = r.id JOIN conversations c ON c.id = r.conversation
"""
HeadRow = tuple[int, str, str, int, int, int, int, str, bytes, int, int, int]


def head_of(row: HeadRow) -> Head:
    """Return the head in a row of ``HEAD_QUERY``."""
    _, tenant, run_id, version, last_seq, epoch, state, conversation_id, info, created, updated, kept_from = row
    run = public_run(info, state, last_seq, created, updated)
    return Head(RunKey(tenant, run_id), version, last_seq, epoch, run.state, conversation_id, run, kept_from)


@dataclass(slots=True)
class Position:
    """Where a log stands, as the next append must find it."""

    run: int
    version: int
    last_seq: int
    epoch: int
    state: RunState.ValueType
    conversation: int
    activation: int
    updated: int
    blob: bytes | None
    """Hash of its checkpoint, if that is among the blobs."""


@dataclass(slots=True)
class Effects:
    """What must be told on the event loop once the transaction is committed."""

    frames: list[tuple[RunKey, Frame]]
    signals: list[RunKey]
    ready: list[tuple[str, float]]
    """Pools and the time from which there may be work."""
    gone: list[RunKey]
    taken: list[int]
    """Tokens of deliveries that were taken from their holder."""
    ended: list[int]
    """Tokens of this process's deliveries that went with the end of their run."""
    created: list[tuple[NewRun, Head, bool]]
    """New runs that are to start at once; True: their conversation begins with them."""

    @classmethod
    def none(cls) -> Effects:
        """Return what a transaction begins with."""
        return cls([], [], [], [], [], [], [])

    def add(self, later: Effects) -> None:
        """Take in what a later transaction has to tell."""
        self.frames += later.frames
        self.signals += later.signals
        self.ready += later.ready
        self.gone += later.gone
        self.taken += later.taken
        self.ended += later.ended
        self.created += later.created


class Transaction:
    """The open transaction and what it has gathered. One object serves all, one after the other.

    Args:
        connection: in autocommit mode, for this object alone.
        clock: seconds since the epoch.
        owner: id of this process in ``owners``.
    """

    def __init__(self, connection: sqlite3.Connection, clock: Clock, owner: int) -> None:
        self.connection = connection
        self.clock = clock
        self.owner = owner
        self.now = 0.0
        self.micros = 0
        self.went_back = False
        """True when the clock has gone back since the transaction before."""
        self.effects = Effects.none()
        self.commits = 0
        self.newest_move: tuple[int, int, int, int, int] | None = None
        """The head that was moved last in this transaction: run, version, last_seq, epoch, updated."""
        self._full = False
        self._data_version = -1
        self._positions: dict[RunKey, Position] = {}
        self._timers_known = False
        self._soonest_timer: float | None = None
        self._moved: dict[int, Position] = {}
        self._frames: list[tuple[int, int, int, int, int, int, bytes | None, bytes | None]] = []
        self._checkpoints: dict[int, tuple[int, int, bytes | None, bytes | None]] = {}
        self._messages: list[tuple[int, int, int, int, int, bytes, str]] = []
        self._shown: list[tuple[int]] = []
        self._rested: list[RunKey] = []

    def begin(self, *, full: bool) -> None:
        """Begin; ``full``: the commit must survive a power loss."""
        self.newest_move = None
        if full is not self._full:
            self.connection.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
            self._full = full
        if self.connection.in_transaction:  # a rollback failed
            self.connection.execute("ROLLBACK")
        self.connection.execute("BEGIN IMMEDIATE")
        (version,) = self.connection.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:
            self._positions.clear()
            self._timers_known = False
            self._data_version = version
        elif len(self._positions) > _REMEMBERED:
            self._positions.clear()
        before, self.now = self.now, self.clock()
        self.went_back = self.now < before - _JITTER
        self.micros = int(self.now * 1_000_000)

    def commit(self) -> None:
        """Commit; call ``flush`` before."""
        self.connection.execute("COMMIT")
        self.commits += 1
        for key in self._rested:
            self._positions.pop(key, None)
        self._rested.clear()

    def rollback(self) -> None:
        """Undo everything since ``begin``, as far as SQLite has not done so itself; raises nothing."""
        self._positions.clear()
        self._timers_known = False
        self._moved.clear()
        self._frames.clear()
        self._checkpoints.clear()
        self._messages.clear()
        self._shown.clear()
        self._rested.clear()
        self.effects = Effects.none()
        if self.connection.in_transaction:
            try:
                self.connection.execute("ROLLBACK")
            except sqlite3.Error:
                log.exception("a rollback failed")

    def is_stored(self, move: tuple[int, int, int, int, int]) -> bool | None:
        """Return whether a head stands where a transaction had moved it; None when it went on since."""
        run, version, *_ = move
        row = self.connection.execute(
            "SELECT run, version, last_seq, epoch, updated FROM heads WHERE run = ?", (run,)
        ).fetchone()
        if row is not None and row[1] > version:
            return None
        return bool(row == move)

    def take_effects(self) -> Effects:
        """Return what must be told, and begin anew."""
        effects, self.effects = self.effects, Effects.none()
        return effects

    def position(self, key: RunKey) -> Position | None:
        """Return where a log stands; None when there is no such run."""
        position = self._positions.get(key)
        if position is None:
            row = self.connection.execute(
                "SELECT r.id, h.version, h.last_seq, h.epoch, r.state, r.conversation, r.activation, h.updated, k.blob"
                " FROM runs r JOIN heads h ON h.run = r.id LEFT JOIN checkpoints k ON k.run = r.id"
                " WHERE r.tenant = ? AND r.run_id = ?",
                (key.tenant, key.run_id),
            ).fetchone()
            if row is None:
                return None
            position = self._positions[key] = Position(*row)
        return position

    def place(self, key: RunKey, position: Position) -> None:
        """Have the head of a new run written, and remember it."""
        self._positions[key] = position
        self.move(position)

    def rest(self, key: RunKey) -> None:
        """Remember a run no longer than this transaction: it is final, so nothing can follow."""
        self._rested.append(key)

    def forget(self, key: RunKey) -> None:
        """Have a run's position read anew, because something other than an append has changed it."""
        self.flush()
        self._positions.pop(key, None)

    def move(self, position: Position) -> None:
        """Have a changed position written."""
        self.newest_move = (position.run, position.version, position.last_seq, position.epoch, position.updated)
        self._moved[position.run] = position

    def add_frame(self, run: int, frame: Frame) -> None:
        """Have a frame with events written."""
        body, blob = self.store_payload(frame.body)
        flags = frame.durable * DURABLE | frame.ends_segment * ENDS_SEGMENT
        self._frames.append((run, frame.first_seq, frame.last_seq, frame.epoch, frame.state, flags, body, blob))

    def add_checkpoint(self, at: Position, seq: int, checkpoint: bytes) -> None:
        """Have a run's checkpoint written in the place of the one before."""
        self.drop_blob(at.blob)
        body, at.blob = self.store_payload(checkpoint)
        self._checkpoints[at.run] = (at.run, seq, body, at.blob)

    def add_message(self, at: Position, message: RunMessage, *, visible: bool = False) -> None:
        """Have a message of a run written."""
        body = message.message.SerializeToString()
        self._messages.append((at.run, message.position, at.conversation, at.activation, visible, body, message.scope))

    def show(self, run: int) -> None:
        """Make a run's messages part of the conversation, those gathered too."""
        self._shown.append((run,))

    def flush(self) -> None:
        """Write what was gathered."""
        if self._frames:
            self._write(_INSERT_FRAMES, self._frames)
            self._frames.clear()
        if self._moved:
            moved = self._moved.values()
            self._write(_MOVE_HEADS, [(at.run, at.version, at.last_seq, at.epoch, at.updated) for at in moved])
            self._moved.clear()
        if self._checkpoints:
            self._write(_SAVE_CHECKPOINTS, list(self._checkpoints.values()))
            self._checkpoints.clear()
        if self._messages:
            self._write(_SAVE_MESSAGES, self._messages)
            self._messages.clear()
        if self._shown:
            self._write(_SHOW_MESSAGES, self._shown)
            self._shown.clear()

    def _write(self, statements: Sequence[str], rows: Sequence[tuple[object, ...]]) -> None:
        for start in range(0, len(rows), _MOST_ROWS):
            some = rows[start : start + _MOST_ROWS]
            self.connection.execute(statements[len(some) - 1], list(chain.from_iterable(some)))

    def soonest_timer(self) -> float | None:
        """Return a time before which no timer is due; None when there is none. Needs a query only after a change."""
        if not self._timers_known:
            (self._soonest_timer,) = self.connection.execute("SELECT min(at) FROM timers").fetchone()
            self._timers_known = True
        return self._soonest_timer

    def timers_changed(self) -> None:
        """Have the timers looked at anew."""
        self._timers_known = False

    def store_payload(self, body: bytes) -> tuple[bytes | None, bytes | None]:
        """Return (body, None), or (None, hash) after a large one went to ``blobs``."""
        if len(body) <= INLINE:
            return body, None
        digest = hashlib.sha256(body).digest()
        self.connection.execute(
            "INSERT INTO blobs (hash, uses, body) VALUES (?, 1, ?) ON CONFLICT (hash) DO UPDATE SET uses = uses + 1",
            (digest, body),
        )
        return None, digest

    def drop_blob(self, digest: bytes | None) -> None:
        """Give up one use of a blob."""
        if digest is not None:
            self.connection.execute("UPDATE blobs SET uses = uses - 1 WHERE hash = ?", (digest,))
            self.connection.execute("DELETE FROM blobs WHERE hash = ? AND uses <= 0", (digest,))

    def head(self, run: int) -> Head:
        """Return where a run stands, this transaction included."""
        self.flush()
        return head_of(self.connection.execute(f"{HEAD_QUERY} WHERE r.id = ?", (run,)).fetchone())
