"""The questions a chat was shown, each under a number of its own.

- A number stands for one question with one hash of arguments, for as long as it is remembered. The same question
  keeps its number however often it is shown; another one gets the next. No number is given twice, so an old reply
  cannot meet a new question.
- ``shown_at`` compares with the arrival of messages: a reply that came before its question was sent did not mean it.
  It is the newest arrival when the sending began, since an answer may come before the platform's acknowledgement.
- What an answered question was about is wiped, the number stays.
"""

import sqlite3
import time
from collections.abc import Sequence

from dualclaw import InterruptItem
from dualclaw_clients.im.connector import ChatKey
from dualclaw_clients.im.decisions import Asked
from dualclaw_clients.im.state_schema import Transaction

MAX_REMEMBERED = 200
"""Questions of a chat that a reply is compared with; the newest ones."""
_CHAT = "platform = ? AND bot = ? AND chat_id = ?"


class AskedItems:
    """The table of questions; its methods run in the thread of the state file."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def number(self, chat: ChatKey, run_id: str, items: Sequence[InterruptItem], listed: bool) -> list[int]:
        """Return the number of each question, a new one for those that have none."""
        with Transaction(self._database):
            return [self._number(chat, run_id, item, listed) for item in items]

    def of_chat(self, chat: ChatKey, arrival: int) -> list[Asked]:
        """Return the questions a chat was shown, in order, as a message with that arrival found them."""
        rows = self._database.execute(
            "SELECT number, run_id, item, open, shown_at, listed FROM items"  # noqa: S608  # constants
            f" WHERE {_CHAT} ORDER BY number DESC LIMIT {MAX_REMEMBERED}",
            _place(chat),
        ).fetchall()
        return [
            Asked(
                number, run_id, InterruptItem.FromString(item), bool(is_open),
                shown_at is not None and shown_at < arrival, bool(listed),
            )
            for number, run_id, item, is_open, shown_at, listed in reversed(rows)
        ]  # fmt: skip

    def close(self, chat: ChatKey, numbers: Sequence[int]) -> None:
        """Note that questions have their answer."""
        self._database.executemany(
            f"UPDATE items SET open = 0, item = x'', update_time = ? WHERE {_CHAT} AND number = ?",  # noqa: S608
            [(time.time(), *_place(chat), number) for number in numbers],
        )

    def close_others(self, chat: ChatKey, run_id: str, items: Sequence[InterruptItem]) -> None:
        """Note that a run asks only these questions now."""
        still = {(item.id, item.args_hash) for item in items}
        rows = self._database.execute(
            f"SELECT number, interrupt_id, args_hash FROM items WHERE {_CHAT} AND run_id = ? AND open",  # noqa: S608
            (*_place(chat), run_id),
        ).fetchall()
        self.close(chat, [number for number, *about in rows if tuple(about) not in still])

    def newest_arrival(self) -> int:
        """Return the arrival of the newest message of all chats."""
        newest = self._database.execute("SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'messages'")
        return int(newest.fetchone()[0])

    def show(self, chat: ChatKey, numbers: Sequence[int], shown_at: int) -> None:
        """Note that questions have been sent to the chat, and the newest arrival when that began."""
        self._database.executemany(
            f"UPDATE items SET shown_at = ? WHERE {_CHAT} AND number = ? AND shown_at IS NULL",  # noqa: S608
            [(shown_at, *_place(chat), number) for number in numbers],
        )

    def prune(self, before: float) -> None:
        """Forget questions that nothing has happened to since then, but never the newest number of a chat."""
        self._database.execute(
            "DELETE FROM items WHERE update_time < ? AND number < (SELECT max(number) FROM items AS newer"
            " WHERE newer.platform = items.platform AND newer.bot = items.bot AND newer.chat_id = items.chat_id)",
            (before,),
        )

    def _number(self, chat: ChatKey, run_id: str, item: InterruptItem, listed: bool) -> int:
        place, about = _place(chat), (run_id, item.id, item.args_hash)
        content = item.SerializeToString(deterministic=True)
        row = self._database.execute(
            f"SELECT number FROM items WHERE {_CHAT} AND run_id = ? AND interrupt_id = ? AND args_hash = ?",  # noqa: S608
            (*place, *about),
        ).fetchone()
        if row is not None:
            self._database.execute(
                "UPDATE items SET open = 1, item = ?, listed = listed AND ?, update_time = ?"  # noqa: S608
                f" WHERE {_CHAT} AND number = ?",
                (content, listed, time.time(), *place, row[0]),
            )
            return int(row[0])
        newest = self._database.execute(f"SELECT ifnull(max(number), 0) FROM items WHERE {_CHAT}", place)  # noqa: S608
        number = 1 + int(newest.fetchone()[0])
        self._database.execute(
            "INSERT INTO items (platform, bot, chat_id, number, run_id, interrupt_id, args_hash, item, listed,"
            " update_time) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*place, number, *about, content, listed, time.time()),
        )
        return number


def _place(chat: ChatKey) -> tuple[str, str, str]:
    return chat.platform, chat.bot, chat.chat_id
