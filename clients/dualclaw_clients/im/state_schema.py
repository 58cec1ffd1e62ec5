"""The tables of a relay's state file, and how older files are brought to them.

- ``messages``: each message once; ``state.RelayState`` has the rules. ``started`` is the highest part whose sending
  has begun (``send_started``), ``sent`` the highest the platform has taken, ``unsure`` how many were sent without
  anybody knowing whether they had arrived before (``unknown_after_send``).
- ``chats``: the conversation a chat is in.
- ``items``: the questions a chat was shown under a number; ``state_items.AskedItems``.
- ``watches``: the runs a chat is still to hear of; ``state_watches.Watches``.
"""

import sqlite3
from types import TracebackType
from typing import Final

VERSION: Final = 2
_FIRST = """
CREATE TABLE messages (
    arrival INTEGER PRIMARY KEY AUTOINCREMENT,
    platform TEXT NOT NULL, bot TEXT NOT NULL, chat_id TEXT NOT NULL, message_id TEXT NOT NULL,
    user_id TEXT NOT NULL, text TEXT NOT NULL,
    route TEXT NOT NULL CHECK (route IN ('engine', 'legacy')),
    state TEXT NOT NULL CHECK (state IN ('claimed', 'done', 'failed')),
    owner TEXT NOT NULL,
    request BLOB NOT NULL DEFAULT x'',
    answer TEXT, -- NULL: not known yet
    sent INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '',
    update_time REAL NOT NULL,
    UNIQUE (platform, bot, chat_id, message_id)
);
CREATE INDEX messages_by_state ON messages (state, update_time);
CREATE TABLE chats (
    platform TEXT NOT NULL, bot TEXT NOT NULL, chat_id TEXT NOT NULL, conversation_id TEXT NOT NULL,
    PRIMARY KEY (platform, bot, chat_id)
) WITHOUT ROWID;
"""
_SECOND = """
ALTER TABLE messages ADD COLUMN resumes BLOB NOT NULL DEFAULT x'';
ALTER TABLE messages ADD COLUMN started INTEGER NOT NULL DEFAULT 0;
ALTER TABLE messages ADD COLUMN unsure INTEGER NOT NULL DEFAULT 0;
UPDATE messages SET answer = '{"numbers": [], "pieces": ' || answer || '}', started = sent WHERE answer IS NOT NULL;
CREATE TABLE items (
    platform TEXT NOT NULL, bot TEXT NOT NULL, chat_id TEXT NOT NULL, number INTEGER NOT NULL,
    run_id TEXT NOT NULL, interrupt_id TEXT NOT NULL, args_hash TEXT NOT NULL,
    item BLOB NOT NULL,
    listed INTEGER NOT NULL,
    open INTEGER NOT NULL DEFAULT 1,
    shown_at INTEGER, -- the newest arrival when it had been sent; NULL: not sent yet
    update_time REAL NOT NULL,
    PRIMARY KEY (platform, bot, chat_id, number),
    UNIQUE (platform, bot, chat_id, run_id, interrupt_id, args_hash)
) WITHOUT ROWID;
CREATE TABLE watches (
    platform TEXT NOT NULL, bot TEXT NOT NULL, chat_id TEXT NOT NULL, run_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    told INTEGER NOT NULL, -- position of the last event the chat knows of
    over INTEGER NOT NULL,
    owner TEXT NOT NULL,
    update_time REAL NOT NULL,
    PRIMARY KEY (platform, bot, chat_id, run_id)
) WITHOUT ROWID;
CREATE INDEX watches_by_state ON watches (over, update_time);
"""
_STEPS = (_FIRST, _SECOND)


class Transaction:
    """``with`` block that commits as one, or changes nothing; takes the write lock at its start."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.execute("COMMIT" if error is None else "ROLLBACK")


def bring_up_to_date(database: sqlite3.Connection) -> int:
    """Make the tables, or bring those of an older version up to date; inside a transaction of the caller's.

    Returns the version the file has then: higher than VERSION if a newer program wrote it.
    """
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    for step in _STEPS[version:]:
        for statement in step.split(";\n"):
            database.execute(statement)
    if version < VERSION:
        database.execute(f"PRAGMA user_version = {VERSION}")
    return max(version, VERSION)
