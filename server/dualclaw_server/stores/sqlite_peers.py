"""Other processes on the same file: a thread that sleeps while there are none, and polls while there are.

A lone process costs nothing here. With company, every 5 ms one ``PRAGMA data_version`` (6 us) says whether
anybody has committed; only then is looked for frames of followed runs, signals for runs in hand, and work
for claimers. Twice a second the others' locks are tried; who is gone gives up its work at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dualclaw_server.engine.store import RunKey
from dualclaw_server.stores.sqlite_owners import OwnerLocks, PipeBell

log = logging.getLogger(__name__)

POLL = 0.005
"""Seconds between two looks at ``data_version``."""

CHECK = 0.5
"""Seconds between two looks at who lives."""

_WITHOUT_PIPE = 5.0


@dataclass(frozen=True, slots=True)
class News:
    """What other processes have done."""

    grown: list[RunKey]
    """Followed runs whose log moved, or that are gone."""
    signalled: list[RunKey]
    """Runs in hand here that got a signal elsewhere."""
    ready: list[tuple[str, float]]
    """Awaited pools and when their next item may be claimed."""
    dead: list[int]
    """Owners whose process is gone."""


@dataclass(frozen=True, slots=True)
class Interests:
    """What this process wants to know; asked from the thread."""

    followed: Callable[[], list[RunKey]]
    held: Callable[[], set[RunKey]]
    awaited: Callable[[], list[str]]


class Peers:
    """The thread that watches other processes.

    Args:
        connection: a read connection for this thread alone.
        owner: this process's own number.
        told: called on the event loop with the news.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        owner: int,
        locks: OwnerLocks,
        bell: PipeBell,
        interests: Interests,
        told: Callable[[News], None],
    ) -> None:
        self._connection = connection
        self._owner = owner
        self._locks = locks
        self._bell = bell
        self._interests = interests
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._positions: dict[RunKey, int | None] = {}
        self._numbers: dict[RunKey, int] = {}
        self._inbox = 0
        self.polls = 0
        """How often ``data_version`` was read."""
        self._thread = threading.Thread(target=self._run, name="dualclaw-peers", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def finish(self) -> None:
        """End the thread."""
        self._stop.set()
        self._bell.wake_own()

    def join(self) -> None:
        """Wait for the thread to end; blocks."""
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._others():
                    self._poll()
                else:
                    self._bell.sleep(_WITHOUT_PIPE)
            except sqlite3.Error as error:
                log.warning("watching other processes failed: %s", error)
                self._stop.wait(CHECK)
        self._connection.close()

    def _others(self) -> list[int]:
        rows = self._connection.execute("SELECT id FROM owners WHERE id != ?", (self._owner,))
        return [owner for (owner,) in rows]

    def _poll(self) -> None:
        """Poll until this process is alone again."""
        # What happened before this moment may have been missed, so everything counts as news once.
        version = -1
        (self._inbox,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM inbox").fetchone()
        self._positions.clear()
        next_check = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= next_check:
                next_check = now + CHECK
                others = self._others()
                if not others:
                    return
                dead = [owner for owner in others if not self._locks.lives(owner)]
                if dead:
                    self._tell(News([], [], [], dead))
            self.polls += 1
            (current,) = self._connection.execute("PRAGMA data_version").fetchone()
            if current != version:
                version = current
                self._tell(self._look())
            self._stop.wait(POLL)

    def _look(self) -> News:
        held = self._interests.held()
        followed = [key for key in self._interests.followed() if key not in held]
        positions = self._last_seqs(followed)
        grown = [key for key in followed if key not in self._positions or self._positions[key] != positions[key]]
        self._positions = positions
        signals = self._connection.execute(
            "SELECT i.id, i.owner, r.tenant, r.run_id FROM inbox i JOIN runs r ON r.id = i.run WHERE i.id > ?"
            " ORDER BY i.id",
            (self._inbox,),
        ).fetchall()
        if signals:
            self._inbox = signals[-1][0]
        keys = [(owner, RunKey(tenant, run_id)) for _, owner, tenant, run_id in signals]
        signalled = [key for owner, key in keys if owner != self._owner and key in held]
        ready = []
        for pool in self._interests.awaited():
            (item,) = self._connection.execute("SELECT min(ready) FROM work WHERE pool = ?", (pool,)).fetchone()
            (timer,) = self._connection.execute("SELECT min(at) FROM timers").fetchone()
            ready += [(pool, due) for due in (item, timer) if due is not None]
        return News(grown, signalled, ready, [])

    def _last_seqs(self, followed: list[RunKey]) -> dict[RunKey, int | None]:
        """Return where each log ends, None for one that is gone; one query, however many are followed."""
        numbers: dict[RunKey, int] = {}
        for key in followed:
            number = self._numbers.get(key)
            if number is None:
                row = self._connection.execute(
                    "SELECT id FROM runs WHERE tenant = ? AND run_id = ?", (key.tenant, key.run_id)
                ).fetchone()
                number = row[0] if row else 0
            numbers[key] = number
        rows = self._connection.execute(
            "SELECT run, last_seq FROM heads WHERE run IN (SELECT value FROM json_each(?))",
            (json.dumps(list(numbers.values())),),
        )
        ends: dict[int, int] = dict(rows.fetchall())
        self._numbers = {key: number for key, number in numbers.items() if number in ends}
        return {key: ends.get(number) for key, number in numbers.items()}

    def _tell(self, news: News) -> None:
        if news.grown or news.signalled or news.ready or news.dead:
            self._loop.call_soon_threadsafe(self._told, news)
