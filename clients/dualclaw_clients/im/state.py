"""What the relay must not forget: which messages it has taken, what it has answered, who talks where.

- A message is ``claimed`` by one owner (a process), then ``done`` or ``failed``. Claiming is one atomic
  statement: of two processes on one file, one gets the message. ``failed`` may be claimed again.
- A claim never expires by time, since a slow answer is not a lost one. It is free again when its owner is dead.
- The request to the engine is stored before it is made, byte for byte. Whoever takes the message over sends
  the same request, so the engine streams the same segment and starts no second run.
- The answer is stored before it is sent. Of each part it is noted when its sending begins (``send_started``) and
  when the platform has taken it. After a crash sending goes on where it stopped, so that at most one part is in
  doubt; it is marked ``unknown_after_send`` whatever is done about it.
- What is stored with an answer is stored in its transaction: how far the chat then knows the run.
- Texts are wiped when a message is done; the keys stay for a month, so late repeats are known.

SQLite runs in one thread of its own: a commit waits for the disk, and the event loop must not.
StateError
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

from dualclaw import InterruptItem
from dualclaw_clients.im.connector import ChatKey, IncomingMessage, MessageKey
from dualclaw_clients.im.decisions import Asked
from dualclaw_clients.im.outgoing import Outgoing, dump_outgoing, load_outgoing
from dualclaw_clients.im.owner import Owner
from dualclaw_clients.im.state_items import AskedItems
from dualclaw_clients.im.state_schema import VERSION, Transaction, bring_up_to_date
from dualclaw_clients.im.state_watches import Watch, Watches

T = TypeVar("T")
Route = Literal["engine", "legacy"]

KEEP_SECONDS = 30 * 24 * 3600.0
_COLUMNS = (
    "platform, bot, chat_id, message_id, user_id, text, route, request, answer, sent, arrival, resumes, started, unsure"
)
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
    answer: Outgoing | None = None
    """What is to be sent; None: not known yet."""
    sent: int = 0
    """How many parts of the answer the platform has taken."""
    arrival: int = 0
    """Its place among all messages."""
    resumes: bytes = b""
    """The ``ResumeRequest``s that were or are about to be sent; empty: none yet."""
    started: int = 0
    """The highest part whose sending has begun: one more than ``sent`` if nobody knows whether it arrived."""
    unsure: int = 0
    """How many parts were in doubt so far (``unknown_after_send``)."""


class RelayState:
    """The state file of a relay; ``await RelayState.open(path)`` makes one. Use it as an async context manager."""

    def __init__(self, database: sqlite3.Connection, worker: ThreadPoolExecutor, owner: Owner) -> None:
        self._database = database
        self._worker = worker
        self._owner = owner
        self._items = AskedItems(database)
        self._watches = Watches(database, owner.name)

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

    async def save_resumes(self, key: MessageKey, resumes: bytes) -> None:
        """Store which answers to questions will be given to the engine."""
        await self._do(self._set, key, "resumes = ?", (resumes,))

    async def save_answer(self, key: MessageKey, user_id: str, answer: Outgoing) -> Outgoing:
        """Store what will be sent, and how far the chat then knows the runs it tells of.

        Returns what is left to send: nothing if the chat has heard all of it already.
        """
        return await self._do(self._save_answer, key, user_id, answer)

    async def claim_told(self, key: MessageKey, user_id: str, answer: Outgoing) -> Claim | None:
        """Claim, as a message, what a chat is told of a run without having asked; None if it knows already."""
        return await self._do(self._claim_told, key, user_id, answer)

    async def start_part(self, key: MessageKey, part: int, *, unsure: bool = False) -> None:
        """Store that the sending of a part begins; ``unsure``: it may have been sent before."""
        await self._do(self._set, key, "started = ?, unsure = unsure + ?", (part, int(unsure)))

    async def mark_unknown(self, key: MessageKey) -> None:
        """Store that nobody knows whether the part whose sending has begun arrived."""
        await self._do(self._set, key, "unsure = unsure + 1", ())

    async def save_sent(self, key: MessageKey, sent: int) -> None:
        """Store how many parts of the answer the platform has taken, or will never be given."""
        await self._do(self._set, key, "sent = ?, started = ?", (sent, sent))

    async def newest_arrival(self) -> int:
        """Return the arrival of the newest message of all chats; what is shown from now on is read by later ones."""
        return await self._do(self._items.newest_arrival)

    async def show(self, chat: ChatKey, numbers: Sequence[int], shown_at: int) -> None:
        """Store that questions have been sent to their chat, and the newest arrival when that began."""
        await self._do(self._items.show, chat, numbers, shown_at)

    async def number(
        self, chat: ChatKey, run_id: str, items: Sequence[InterruptItem], *, listed: bool = False
    ) -> list[int]:
        """Return the numbers under which a chat is shown a run's questions."""
        return await self._do(self._items.number, chat, run_id, items, listed)

    async def asked(self, chat: ChatKey, arrival: int) -> list[Asked]:
        """Return the questions a chat was shown, as a message with that arrival found them."""
        return await self._do(self._items.of_chat, chat, arrival)

    async def close_others(self, chat: ChatKey, run_id: str, items: Sequence[InterruptItem]) -> None:
        """Store that a run asks only these questions now."""
        await self._do(self._items.close_others, chat, run_id, items)

    async def watch(self, watch: Watch) -> None:
        """Store that a chat is to hear how a run goes on."""
        await self._do(self._watches.add, watch)

    async def watched(self, chat: ChatKey, run_id: str) -> Watch | None:
        """Return what a chat is still to hear of a run; None: nothing."""
        return await self._do(self._watches.find, chat, run_id)

    async def end_watch(self, chat: ChatKey, run_id: str) -> None:
        """Store that there is no more to hear of a run."""
        await self._do(self._watches.end, chat, run_id)

    async def adopt_watches(self, platforms: Collection[str]) -> list[Watch]:
        """Take over the runs of these platforms whose follower is dead."""
        return await self._do(self._adopt_watches, tuple(platforms))

    async def finish(self, key: MessageKey) -> None:
        """Mark a message done: a repeat of it is a duplicate from now on."""
        wiped = "state = 'done', owner = '', text = '', request = x'', resumes = x'', answer = NULL, error = ''"
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
        with Transaction(self._database):
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
        with Transaction(self._database):
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

    def _save_answer(self, key: MessageKey, user_id: str, answer: Outgoing) -> Outgoing:
        with Transaction(self._database):
            new = [self._watches.tell(key.chat, user_id, told) for told in answer.told]
            if new and not any(new):
                answer = Outgoing(())
            self._set(key, "answer = ?, sent = 0, started = 0", (dump_outgoing(answer),))
        return answer

    def _claim_told(self, key: MessageKey, user_id: str, answer: Outgoing) -> Claim | None:
        with Transaction(self._database):
            new = [self._watches.tell(key.chat, user_id, told) for told in answer.told]
            if not any(new):
                return None
            self._database.execute(
                "INSERT INTO messages (platform, bot, chat_id, message_id, user_id, text, route, state, owner, answer,"
                " update_time) VALUES (?, ?, ?, ?, ?, '', 'engine', 'claimed', ?, ?, ?) ON CONFLICT DO NOTHING",
                (*_place(key), user_id, self._owner.name, dump_outgoing(answer), time.time()),
            )
            return _claim_of(self._database.execute(_FIND, _place(key)).fetchone())

    def _adopt_watches(self, platforms: tuple[str, ...]) -> list[Watch]:
        with Transaction(self._database):
            dead = [name for name in self._watches.owners() if not self._owner.lives(name)]
            return self._watches.take_over(platforms, dead) if dead else []

    def _prune(self, keep: float) -> None:
        self._items.prune(time.time() - keep)
        self._watches.prune(time.time() - keep)
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


def _open(path: str) -> tuple[sqlite3.Connection, Owner]:
    try:
        if path != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path, timeout=5.0, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")  # a claim that a power loss takes back answers twice
            with Transaction(database):  # so that nobody buries an owner between its birth and its lock
                version = bring_up_to_date(database)
                if version > VERSION:
                    raise StateError(
                        f"the state file {path} is of version {version}; this program knows version {VERSION}"
                    )
                owner = Owner(path)
                owner.bury_others()
            return database, owner
        except BaseException:
            database.close()
            raise
    except (sqlite3.Error, OSError) as error:
        raise StateError(f"the state file {path} cannot be used: {error}") from error


def _typed(work: Callable[..., T], args: tuple[object, ...]) -> T:
    try:
        return work(*args)
    except (sqlite3.Error, OSError) as error:
        raise StateError(f"the state file cannot be used: {error}") from error


def _place(key: MessageKey) -> tuple[str, str, str, str]:
    return key.chat.platform, key.chat.bot, key.chat.chat_id, key.message_id


def _claim_of(
    row: tuple[str, str, str, str, str, str, Route, bytes, str | None, int, int, bytes, int, int],
) -> Claim:
    platform, bot, chat_id, message_id, user_id, text, route, request, answer = row[:9]
    message = IncomingMessage(bot, chat_id, user_id, message_id, text)
    outgoing = None if answer is None else load_outgoing(answer)
    return Claim(MessageKey(ChatKey(platform, bot, chat_id), message_id), message, route, request, outgoing, *row[9:])
