"""The runs that chats are still to hear of: parked ones, and ones that took longer than a chat waits.

A chat hears each segment of a run once, whoever it is that reads it: the job that answered the run, the watcher that
follows it, or another process. ``tell`` decides, in the transaction that stores what will be sent.
"""

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dualclaw_clients.im.connector import ChatKey
from dualclaw_clients.im.outgoing import Told

MAX_PER_CHAT = 8
"""Runs one chat waits for; beyond, it hears no more of the one it has waited for longest."""
_RUN = "platform = ? AND bot = ? AND chat_id = ? AND run_id = ?"


@dataclass(frozen=True, slots=True)
class Watch:
    """A run whose further course a chat is told."""

    chat: ChatKey
    run_id: str
    user_id: str
    """In whose name it is read."""
    told: int
    """Position of the last event the chat knows of."""


class Watches:
    """The table of watched runs; its methods run in the thread of the state file."""

    def __init__(self, database: sqlite3.Connection, owner: str) -> None:
        self._database = database
        self._owner = owner

    def add(self, watch: Watch) -> None:
        """Remember a run; what the chat knows of it already stays."""
        self._put(watch.chat, watch.user_id, Told(watch.run_id, watch.told, over=False), known=None)

    def tell(self, chat: ChatKey, user_id: str, told: Told) -> bool:
        """Note that a chat is told of a run; False if it knows already. Inside a transaction of the caller's."""
        row = self._database.execute(
            f"SELECT told FROM watches WHERE {_RUN}",  # noqa: S608
            _place(chat, told.run_id),
        ).fetchone()
        if row is not None and row[0] >= told.seq:
            return False
        if row is not None or not told.over:
            self._put(chat, user_id, told, known=row)
        return True

    def end(self, chat: ChatKey, run_id: str) -> None:
        """Note that there is no more to hear of a run."""
        self._database.execute(
            f"UPDATE watches SET over = 1, update_time = ? WHERE {_RUN}",  # noqa: S608
            (time.time(), *_place(chat, run_id)),
        )

    def find(self, chat: ChatKey, run_id: str) -> Watch | None:
        """Return what a chat is still to hear of a run; None: nothing."""
        row = self._database.execute(
            f"SELECT user_id, told FROM watches WHERE {_RUN} AND NOT over",  # noqa: S608
            _place(chat, run_id),
        ).fetchone()
        return None if row is None else Watch(chat, run_id, *row)

    def owners(self) -> list[str]:
        """Return who follows runs that go on."""
        return [name for (name,) in self._database.execute("SELECT DISTINCT owner FROM watches WHERE NOT over")]

    def take_over(self, platforms: Sequence[str], owners: Sequence[str]) -> list[Watch]:
        """Take over what these owners followed, the longest waiting first."""
        marks, names = ", ".join("?" * len(platforms)), ", ".join("?" * len(owners))
        where = f"NOT over AND platform IN ({marks}) AND owner IN ({names})"
        rows = self._database.execute(
            "SELECT platform, bot, chat_id, run_id, user_id, told FROM watches"  # noqa: S608
            f" WHERE {where} ORDER BY update_time",
            (*platforms, *owners),
        ).fetchall()
        self._database.execute(f"UPDATE watches SET owner = ? WHERE {where}", (self._owner, *platforms, *owners))  # noqa: S608
        return [Watch(ChatKey(*place), run_id, user_id, told) for *place, run_id, user_id, told in rows]

    def prune(self, before: float) -> None:
        """Forget runs that have been over since then."""
        self._database.execute("DELETE FROM watches WHERE over AND update_time < ?", (before,))

    def _put(self, chat: ChatKey, user_id: str, told: Told, *, known: object) -> None:
        self._database.execute(
            "INSERT INTO watches (platform, bot, chat_id, run_id, user_id, told, over, owner, update_time)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET told = max(told, excluded.told),"
            " over = excluded.over, owner = excluded.owner, update_time = excluded.update_time",
            (*_place(chat, told.run_id), user_id, told.seq, told.over, self._owner, time.time()),
        )
        if known is None:
            self._database.execute(
                "UPDATE watches SET over = 1 WHERE NOT over AND platform = ? AND bot = ? AND chat_id = ? AND run_id NOT"
                " IN (SELECT run_id FROM watches WHERE NOT over AND platform = ? AND bot = ? AND chat_id = ?"
                " ORDER BY update_time DESC LIMIT ?)",
                (*_place(chat, "")[:3], *_place(chat, "")[:3], MAX_PER_CHAT),
            )


def _place(chat: ChatKey, run_id: str) -> tuple[str, str, str, str]:
    return chat.platform, chat.bot, chat.chat_id, run_id
