"""Reads, each as a function on a read connection; a pool of a few connections, each with its thread.

A connection is in autocommit mode: every statement sees all that was committed before it began, so a
follower that was told of a frame finds it. Where several statements must agree they share a transaction.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from dualclaw import Conversation, Message, Run, RunState
from dualclaw_server.engine.history import History
from dualclaw_server.engine.store import (
    MAX_FRAME_INFOS,
    Frame,
    FrameInfo,
    Head,
    InboxSignal,
    Inspection,
    Loaded,
    Page,
    RunKey,
    RunMessage,
    Unavailable,
)
from dualclaw_server.stores import records
from dualclaw_server.stores.histories import Histories
from dualclaw_server.stores.pages import make_token, page_key, page_length
from dualclaw_server.stores.sqlite_file import connect, store_error
from dualclaw_server.stores.sqlite_transaction import DURABLE, ENDS_SEGMENT, HEAD_QUERY, head_of

P = ParamSpec("P")
T = TypeVar("T")

_LARGEST = 2**63 - 1

READERS = 2
"""Read connections of a process; more would only wait for Python's interpreter lock."""


class Readers:
    """The pool of read connections."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: deque[sqlite3.Connection] = deque()
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="dualclaw-reader")
        self._closed = False

    async def run(self, read: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a read in a thread of the pool."""
        if self._closed:
            raise Unavailable("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._with_connection(read, *args, **kwargs)
        )

    def _with_connection(
        self, read: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            connection = self._idle.pop() if self._idle else connect(self._path, read_only=True)
            try:
                return read(connection, *args, **kwargs)
            finally:
                self._idle.append(connection)
        except sqlite3.Error as error:
            raise store_error(error) from error

    def close(self) -> None:
        """Finish the reads under way and close the connections; blocks."""
        self._closed = True
        self._threads.shutdown()
        while self._idle:
            self._idle.pop().close()


@contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


def head(connection: sqlite3.Connection, key: RunKey) -> Head:
    """Return where a run stands."""
    row = connection.execute(f"{HEAD_QUERY} WHERE r.tenant = ? AND r.run_id = ?", (key.tenant, key.run_id)).fetchone()
    if row is None:
        raise records.unknown_run()
    return head_of(row)


def load(connection: sqlite3.Connection, key: RunKey) -> Loaded:
    """Return what a worker needs to go on."""
    with _snapshot(connection):
        at = head(connection, key)
        run, record = connection.execute(
            "SELECT id, record FROM runs WHERE tenant = ? AND run_id = ?", (key.tenant, key.run_id)
        ).fetchone()
        checkpoint, seq = _checkpoint(connection, run)
        messages = connection.execute(
            "SELECT position, body, scope FROM messages WHERE run = ? ORDER BY position", (run,)
        )
        own = tuple(RunMessage(position, Message.FromString(text), scope) for position, text, scope in messages)
        unread = _unread(connection, run)
    return Loaded(at, record, checkpoint, seq, own, unread)


def _checkpoint(connection: sqlite3.Connection, run: int) -> tuple[bytes, int]:
    row = connection.execute("SELECT body, blob, seq FROM checkpoints WHERE run = ?", (run,)).fetchone()
    return (_payload(connection, row[0], row[1]), row[2]) if row else (b"", 0)


def _unread(connection: sqlite3.Connection, run: int) -> tuple[InboxSignal, ...]:
    inbox = connection.execute("SELECT signal_id, body FROM inbox WHERE run = ? AND NOT taken ORDER BY id", (run,))
    return tuple(InboxSignal(*signal) for signal in inbox)


def inspect(connection: sqlite3.Connection, key: RunKey) -> Inspection:
    """Return what an operator wants to know of a run."""
    with _snapshot(connection):
        at = head(connection, key)
        run, record = connection.execute(
            "SELECT id, record FROM runs WHERE tenant = ? AND run_id = ?", (key.tenant, key.run_id)
        ).fetchone()
        newest = connection.execute(
            "SELECT f.first_seq, f.last_seq, f.epoch, f.state, f.flags, coalesce(length(f.body), length(b.body), 0)"
            " FROM frames f LEFT JOIN blobs b ON b.hash = f.blob"
            " WHERE f.run = ? ORDER BY f.last_seq DESC LIMIT ?",
            (run, MAX_FRAME_INFOS),
        ).fetchall()
        checkpoint, _ = _checkpoint(connection, run)
        unread = _unread(connection, run)
        item = connection.execute("SELECT token, worker, deliveries, ready FROM work WHERE run = ?", (run,)).fetchone()
        timers = connection.execute("SELECT at FROM timers WHERE run = ? ORDER BY at", (run,)).fetchall()
    frames = tuple(
        FrameInfo(first, last - first + 1, epoch, RunState.ValueType(state), bool(flags & DURABLE), size)
        for first, last, epoch, state, flags, size in reversed(newest)
    )
    token, worker, deliveries, ready = item or (None, "", 0, 0.0)
    return Inspection(
        at,
        record,
        checkpoint,
        frames,
        unread,
        item is not None,
        worker if token is not None else "",
        deliveries,
        ready,
        tuple(due for (due,) in timers),
    )


def frames(connection: sqlite3.Connection, key: RunKey, after: int, limit: int) -> tuple[Sequence[Frame], bool]:
    """Return stored frames with events after ``after``, and whether there are no more."""
    with _snapshot(connection):
        row = connection.execute(
            "SELECT id, kept_from FROM runs WHERE tenant = ? AND run_id = ?", (key.tenant, key.run_id)
        ).fetchone()
        if row is None:
            raise records.unknown_run()
        run, kept_from = row
        if after + 1 < kept_from:
            raise records.log_compacted(kept_from)
        found: list[Frame] = []
        size = 0
        rows = connection.execute(
            "SELECT first_seq, last_seq, epoch, state, flags, body, blob FROM frames"
            " WHERE run = ? AND last_seq > ? ORDER BY last_seq",
            (run, after),
        )
        for first_seq, last_seq, epoch, state, flags, inline, blob in rows:
            body = inline if blob is None else _payload(connection, inline, blob)
            if found and size + len(body) > limit:
                rows.close()
                return found, False
            size += len(body)
            frame = Frame(
                epoch,
                first_seq,
                last_seq - first_seq + 1,
                body,
                state,
                durable=bool(flags & DURABLE),
                ends_segment=bool(flags & ENDS_SEGMENT),
            )
            found.append(frame if found else frame.after(after))
    return found, True


def _payload(connection: sqlite3.Connection, inline: bytes | None, blob: bytes | None) -> bytes:
    if inline is not None:
        return inline
    row = connection.execute("SELECT body FROM blobs WHERE hash = ?", (blob,)).fetchone()
    if row is None:
        raise Unavailable("a stored payload is missing: the database is damaged")
    return bytes(row[0])


def list_runs(
    connection: sqlite3.Connection,
    tenant: str,
    states: Collection[RunState.ValueType],
    conversation_id: str,
    size: int,
    token: str,
) -> Page[Run]:
    """List runs, newest first.

    Each state is asked for by itself and the answers are merged: one query for several states would either sort all
    runs that have them, or walk through all that have not, and there may be a hundred thousand of both.
    """
    length = page_length(size)
    (before,) = page_key(token, 1) or (_LARGEST,)
    with _snapshot(connection):
        wanted = [
            run
            for narrow, values in _run_filters(connection, tenant, states, conversation_id)
            for (run,) in connection.execute(
                f"SELECT id FROM runs WHERE {narrow} AND id < ? ORDER BY id DESC LIMIT ?",  # noqa: S608 - our own
                (*values, before, length + 1),
            )
        ]
        page = sorted(wanted, reverse=True)[: length + 1]
        rows = connection.execute(
            f"{HEAD_QUERY} WHERE r.id IN (SELECT value FROM json_each(?)) ORDER BY r.id DESC",  # noqa: S608 - our own
            (json.dumps(page[:length]),),
        ).fetchall()
    token = make_token(page[length - 1]) if len(page) > length else ""
    return Page([head_of(row).run for row in rows], token)


def _run_filters(
    connection: sqlite3.Connection, tenant: str, states: Collection[RunState.ValueType], conversation_id: str
) -> list[tuple[str, tuple[object, ...]]]:
    """Return conditions that together let through the wanted runs, each once; an index leads through each in order."""
    if not conversation_id:
        if not states:
            return [("tenant = ?", (tenant,))]
        return [("tenant = ? AND state = ?", (tenant, state)) for state in set(states)]
    row = connection.execute(
        "SELECT id FROM conversations WHERE tenant = ? AND conversation_id = ?", (tenant, conversation_id)
    ).fetchone()
    if row is None:
        return []
    return [("conversation = ? AND state = ?", (row[0], state)) for state in set(states) or RunState.values()]


_CONVERSATION_QUERY = """
    SELECT c.conversation_id, c.title, c.created, c.updated, coalesce(r.run_id, ''), c.id
    FROM conversations c LEFT JOIN runs r ON r.id = c.active
"""


def get_conversation(connection: sqlite3.Connection, tenant: str, conversation_id: str) -> Conversation:
    """Return a conversation."""
    row = connection.execute(
        f"{_CONVERSATION_QUERY} WHERE c.tenant = ? AND c.conversation_id = ?", (tenant, conversation_id)
    ).fetchone()
    if row is None:
        raise records.unknown_conversation()
    return records.public_conversation(*row[:5])


def list_conversations(connection: sqlite3.Connection, tenant: str, size: int, token: str) -> Page[Conversation]:
    """List conversations, the last changed first."""
    length = page_length(size)
    before = page_key(token, 2) or (_LARGEST, _LARGEST)
    rows = connection.execute(
        f"{_CONVERSATION_QUERY} WHERE c.tenant = ? AND (c.updated, c.id) < (?, ?)"
        " ORDER BY c.updated DESC, c.id DESC LIMIT ?",
        (tenant, *before, length + 1),
    ).fetchall()
    token = make_token(rows[length - 1][3], rows[length - 1][5]) if len(rows) > length else ""
    return Page([records.public_conversation(*row[:5]) for row in rows[:length]], token)


def _conversation_number(connection: sqlite3.Connection, tenant: str, conversation_id: str) -> int:
    row = connection.execute(
        "SELECT id FROM conversations WHERE tenant = ? AND conversation_id = ?", (tenant, conversation_id)
    ).fetchone()
    if row is None:
        raise records.unknown_conversation()
    return int(row[0])


def list_messages(
    connection: sqlite3.Connection, tenant: str, conversation_id: str, size: int, token: str
) -> Page[Message]:
    """List messages, the oldest first."""
    length = page_length(size)
    after = page_key(token, 2) or (-1, -1)
    with _snapshot(connection):
        conversation = _conversation_number(connection, tenant, conversation_id)
        rows = connection.execute(
            "SELECT activation, position, body FROM messages WHERE conversation = ? AND visible"
            " AND (activation, position) > (?, ?) ORDER BY activation, position LIMIT ?",
            (conversation, *after, length + 1),
        ).fetchall()
    token = make_token(rows[length - 1][0], rows[length - 1][1]) if len(rows) > length else ""
    return Page([Message.FromString(row[2]) for row in rows[:length]], token)


def history(
    connection: sqlite3.Connection, tenant: str, conversation_id: str, before_run: str, kept: Histories | None = None
) -> History:
    """Return the messages that came before a run became active; all of them while it waits."""
    kept = kept or Histories()
    with _snapshot(connection):
        conversation = _conversation_number(connection, tenant, conversation_id)
        row = connection.execute(
            "SELECT r.activation, c.active IS r.id FROM runs r, conversations c"
            " WHERE r.tenant = ? AND r.run_id = ? AND c.id = ?",
            (tenant, before_run, conversation),
        ).fetchone()
        if row is None:
            raise records.unknown_run()
        place, active = row[0] or _LARGEST, row[0] and row[1]
        known = kept.find(conversation, place) if active else None
        if known is not None and _count(connection, conversation, 1, known.place) != known.count:
            known = None
        first = known.place if known is not None else 0
        bodies = [
            body
            for (body,) in connection.execute(
                "SELECT body FROM messages WHERE conversation = ? AND visible AND activation >= ? AND activation < ?"
                " ORDER BY activation, position",
                (conversation, first, place),
            )
        ]
        count = _count(connection, conversation, max(first, 1), place) if active else 0
    added = History(map(Message.FromString, bodies))
    if not active:
        return added
    if known is not None:
        count += known.count
    return kept.keep(conversation, known, place, count, added, sum(map(len, bodies)))


def _count(connection: sqlite3.Connection, conversation: int, first: int, before: int) -> int:
    """Return how many messages stand in some places of a conversation; an index alone knows it."""
    (count,) = connection.execute(
        "SELECT count(*) FROM messages WHERE conversation = ? AND activation >= ? AND activation < ?",
        (conversation, first, before),
    ).fetchone()
    return int(count)


def get_setting(connection: sqlite3.Connection, tenant: str, name: str) -> tuple[bytes, int] | None:
    """Return a small setting and its revision."""
    row = connection.execute(
        "SELECT value, revision FROM settings WHERE tenant = ? AND name = ?", (tenant, name)
    ).fetchone()
    return None if row is None else (row[0], row[1])
