"""What the relay must not forget: which messages it has taken, what it has answered, who talks where.

- A message is ``claimed`` by one owner (a process), then ``done`` or ``failed``. Claiming is one atomic
  statement: of two processes on one file, one gets the message. ``failed`` may be claimed again.
- A claim never expires by time, since a slow answer is not a lost one. It is free again when its owner is dead.
  Whether an owner lives is asked of the operating system: each holds a lock on a file of its own beside the
  state file, and the lock goes with the process, however that ends. (A process id would say nothing to another
  container, and a heartbeat would expire in a process that is merely slow.)
- The request to the engine is stored before it is made, byte for byte. Whoever takes the message over sends
  the same request, so the engine streams the same segment and starts no second run.
- The answer is stored before it is sent, and each part is counted when the platform has taken it. After a crash
  sending goes on where it stopped; the one part that was on its way may be sent twice.
- Texts are wiped when a message is done; the keys stay for a month, so late repeats are known.

SQLite runs in one thread of its own: a commit waits for the disk, and the event loop must not.
StateError
"""

import asyncio
import fcntl
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

from dualclaw_clients.im.connector import ChatKey, IncomingMessage, MessageKey

T = TypeVar("T")
Route = Literal["engine", "legacy"]

KEEP_SECONDS = 30 * 24 * 3600.0
_VERSION = 1
_SCHEMA = """
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
_COLUMNS = "platform, bot, chat_id, message_id, user_id, text, route, request, answer, sent"
_KEY = "platform = ? AND bot = ? AND chat_id = ? AND message_id = ?"
_FIND = f"SELECT {_COLUMNS} FROM messages WHERE {_KEY}"  # noqa: S608  # constants of this module
_FIND_STATE = f"SELECT state, owner FROM messages WHERE {_KEY}"  # noqa: S608  # constants of this module


class StateError(Exception):
    """The state file cannot be read or written; nothing was changed by the call."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A message this owner has to answer, and how far that has come."""

    key: MessageKey
    message: IncomingMessage
    route: Route
    request: bytes = b""
    """The ``RunRequest`` that was or is about to be sent; empty: none yet."""
    answer: str | None = None
    """What is to be sent, as the relay wrote it down; None: not known yet."""
    sent: int = 0
    """How many parts of the answer the platform has taken."""


class RelayState:
    """The state file of a relay; ``await RelayState.open(path)`` makes one. Use it as an async context manager."""

    def __init__(self, database: sqlite3.Connection, worker: ThreadPoolExecutor, owner: "_Owner") -> None:
        self._database = database
        self._worker = worker
        self._owner = owner

    @classmethod
    async def open(cls, path: str | Path) -> Self:
        """Open or create a state file; ":memory:" lasts as long as the object.

        Raises:
            StateError: not a state file, of a newer version, or not writable.
        """
        worker = ThreadPoolExecutor(1, thread_name_prefix="im-state")
        try:
            database, owner = await asyncio.get_running_loop().run_in_executor(worker, _open, str(path))
        except BaseException:
            worker.shutdown(wait=False)
            raise
        return cls(database, worker, owner)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the file. Messages that are still claimed become free for others."""
        await self._do(self._close)
        self._worker.shutdown(wait=False)

    async def claim(self, key: MessageKey, message: IncomingMessage, route: Route) -> Claim | None:
        """Claim a message; None when it is done, or claimed by an owner that lives.

        A failed message comes back as it was stored, with the request and the answer it may already have.
        """
        return await self._do(self._claim, key, message, route)

    async def adopt(self, platforms: Collection[str]) -> list[Claim]:
        """Claim every message of these platforms whose owner is dead; in the order they arrived."""
        return await self._do(self._adopt, tuple(platforms))

    async def save_request(self, key: MessageKey, request: bytes) -> None:
        """Store what will be asked of the engine; empty: it was refused, nothing has begun."""
        await self._do(self._set, key, "request = ?", (request,))

    async def save_answer(self, key: MessageKey, answer: str) -> None:
        """Store what will be sent."""
        await self._do(self._set, key, "answer = ?, sent = 0", (answer,))

    async def save_sent(self, key: MessageKey, sent: int) -> None:
        """Store how many parts of the answer the platform has taken."""
        await self._do(self._set, key, "sent = ?", (sent,))

    async def finish(self, key: MessageKey) -> None:
        """Mark a message done: a repeat of it is a duplicate from now on."""
        wiped = "state = 'done', owner = '', text = '', request = x'', answer = NULL, error = ''"
        await self._do(self._set, key, wiped, ())

    async def fail(self, key: MessageKey, error: str) -> None:
        """Mark a message failed: a repeat of it is tried again, and goes on where this try stopped."""
        await self._do(self._set, key, "state = 'failed', owner = '', error = ?", (error,))

    async def prune(self, keep: float = KEEP_SECONDS) -> None:
        """Forget the messages that have been done or failed for so many seconds."""
        await self._do(self._prune, keep)

    async def conversation_of(self, chat: ChatKey) -> str:
        """Return the conversation a chat is in; empty: none yet."""
        return await self._do(self._conversation_of, chat)

    async def save_conversation(self, chat: ChatKey, conversation_id: str) -> None:
        """Store the conversation a chat is in; empty: the next message begins a new one."""
        await self._do(self._save_conversation, chat, conversation_id)

    async def _do(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, _typed, work, args)

    def _claim(self, key: MessageKey, message: IncomingMessage, route: Route) -> Claim | None:
        place = _place(key)
        with _Transaction(self._database):
            row = self._database.execute(_FIND_STATE, place).fetchone()
            if row is None:
                self._database.execute(
                    "INSERT INTO messages (platform, bot, chat_id, message_id, user_id, text, route, state, owner,"
                    " update_time) VALUES (?, ?, ?, ?, ?, ?, ?, 'claimed', ?, ?)",
                    (*place, message.user_id, message.text, route, self._owner.name, time.time()),
                )
            elif row[0] == "failed" or (row[0] == "claimed" and not self._owner.lives(row[1])):
                self._set(key, "state = 'claimed', owner = ?", (self._owner.name,))
            else:
                return None
            return _claim_of(self._database.execute(_FIND, place).fetchone())

    def _adopt(self, platforms: tuple[str, ...]) -> list[Claim]:
        marks = ", ".join("?" * len(platforms))
        with _Transaction(self._database):
            claimed = f"FROM messages WHERE state = 'claimed' AND platform IN ({marks})"
            owners = self._database.execute(f"SELECT DISTINCT owner {claimed}", platforms).fetchall()
            dead = [name for (name,) in owners if not self._owner.lives(name)]
            if not dead:
                return []
            orphaned = f"{claimed} AND owner IN ({', '.join('?' * len(dead))})"
            rows = self._database.execute(
                f"SELECT {_COLUMNS} {orphaned} ORDER BY arrival", (*platforms, *dead)
            ).fetchall()
            claims = [_claim_of(row) for row in rows]
            for claim in claims:
                self._set(claim.key, "owner = ?", (self._owner.name,))
            return claims

    def _set(self, key: MessageKey, assignments: str, values: Sequence[str | int | bytes]) -> None:
        # Assignments are texts of this module; what comes from outside is bound.
        update = f"UPDATE messages SET {assignments}, update_time = ? WHERE {_KEY}"  # noqa: S608
        self._database.execute(update, (*values, time.time(), *_place(key)))

    def _prune(self, keep: float) -> None:
        self._database.execute(
            "DELETE FROM messages WHERE state IN ('done', 'failed') AND update_time < ?", (time.time() - keep,)
        )

    def _conversation_of(self, chat: ChatKey) -> str:
        row = self._database.execute(
            "SELECT conversation_id FROM chats WHERE platform = ? AND bot = ? AND chat_id = ?",
            (chat.platform, chat.bot, chat.chat_id),
        ).fetchone()
        return str(row[0]) if row else ""

    def _save_conversation(self, chat: ChatKey, conversation_id: str) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO chats (platform, bot, chat_id, conversation_id) VALUES (?, ?, ?, ?)",
            (chat.platform, chat.bot, chat.chat_id, conversation_id),
        )

    def _close(self) -> None:
        self._database.close()
        self._owner.end()


class _Transaction:
    """``with`` block that commits as one, or changes nothing; takes the write lock at its start."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.execute("COMMIT" if error is None else "ROLLBACK")


class _Owner:
    """One opener of the state file, alive as long as it holds the lock on its own file."""

    def __init__(self, path: str) -> None:
        self.name = uuid.uuid4().hex
        self._path = "" if path == ":memory:" else path
        self._lock = -1
        if self._path:
            self._lock = os.open(self._file_of(self.name), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def lives(self, name: str) -> bool:
        """Return whether the owner of that name still runs."""
        if name == self.name:
            return True
        try:
            lock = os.open(self._file_of(name), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def bury(self, name: str) -> None:
        """Remove the file a dead owner has left."""
        Path(self._file_of(name)).unlink(missing_ok=True)

    def bury_others(self) -> None:
        """Remove the files of all dead owners; whoever misses their file knows the same."""
        if not self._path:
            return
        start, end = Path(self._path).name + ".", ".lock"
        for file in Path(self._path).parent.iterdir():
            if file.name.startswith(start) and file.name.endswith(end):
                name = file.name[len(start) : -len(end)]
                if not self.lives(name):
                    self.bury(name)

    def end(self) -> None:
        """Give up the lock: this owner is dead for all others."""
        if self._lock >= 0:
            self.bury(self.name)
            os.close(self._lock)
            self._lock = -1

    def _file_of(self, name: str) -> str:
        return f"{self._path}.{name}.lock"


def _open(path: str) -> tuple[sqlite3.Connection, _Owner]:
    try:
        if path != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path, timeout=5.0, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")  # a claim that a power loss takes back answers twice
            with _Transaction(database):  # so that nobody buries an owner between its birth and its lock
                _prepare(database, path)
                owner = _Owner(path)
                owner.bury_others()
            return database, owner
        except BaseException:
            database.close()
            raise
    except (sqlite3.Error, OSError) as error:
        raise StateError(f"the state file {path} cannot be used: {error}") from error


def _prepare(database: sqlite3.Connection, path: str) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        for statement in _SCHEMA.split(";\n"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {_VERSION}")
    elif version != _VERSION:
        raise StateError(f"the state file {path} is of version {version}; this program knows version {_VERSION}")


def _typed(work: Callable[..., T], args: tuple[object, ...]) -> T:
    try:
        return work(*args)
    except (sqlite3.Error, OSError) as error:
        raise StateError(f"the state file cannot be used: {error}") from error


def _place(key: MessageKey) -> tuple[str, str, str, str]:
    return key.chat.platform, key.chat.bot, key.chat.chat_id, key.message_id


def _claim_of(row: tuple[str, str, str, str, str, str, Route, bytes, str | None, int]) -> Claim:
    platform, bot, chat_id, message_id, user_id, text, route, request, answer, sent = row
    message = IncomingMessage(bot, chat_id, user_id, message_id, text)
    return Claim(MessageKey(ChatKey(platform, bot, chat_id), message_id), message, route, request, answer, sent)
