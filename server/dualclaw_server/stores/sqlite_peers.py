"""Other processes on the same file: a thread that sleeps while there are none, and polls while there are.

A lone process costs nothing here. With company, every 5 ms one ``PRAGMA data_version`` (6 us) says whether
anybody has committed, this process included; only then is looked for frames of followed runs, signals for runs in
hand, and work for claimers. Twice a second the others' locks are tried; who is gone gives up its work at once.

A look costs what was committed since the one before, however many runs are followed or in hand: new frames and new
signals are those with higher numbers. What leaves no new frame (a run that was deleted, and with it the highest
number, which is then used again) is found twice a second, when all followed runs are looked at.
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
    follows: Callable[[RunKey], bool]
    holds: Callable[[RunKey], bool]
    awaited: Callable[[], list[str]]


class Peers:
    """The thread that watches other processes.

    Args:
        connection: a read connection for this thread alone.
        owner: this process's own number.
        inbox: number of the newest signal when the file was opened; later ones of others may be news.
        told: called on the event loop with the news.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        owner: int,
        inbox: int,
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
        self._frame = 0
        self._inbox = inbox
        self._periods = 0
        self.period: int | None = None
        """The time this process has been alone for without a break, by a number of its own; None: it has company."""
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
                    self.period = None
                    self._poll()
                    continue
                if self.period is None and self._bell.is_sure:
                    self._periods += 1
                    self.period = self._periods
                self._bell.sleep(_WITHOUT_PIPE)
            except sqlite3.Error as error:
                self.period = None
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
        self._frame = self._newest_frame()
        self._positions.clear()
        next_check = 0.0
        looked_at_all = -1
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
                version = -1
            self.polls += 1
            (current,) = self._connection.execute("PRAGMA data_version").fetchone()
            if current != version:
                grown = self._grown()
                if version == -1 and current != looked_at_all:
                    grown |= self._all_grown()
                    looked_at_all = current
                version = current
                self._tell(News([*grown], self._signalled(), self._ready(), []))
            self._stop.wait(POLL)

    def _newest_frame(self) -> int:
        (newest,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM frames").fetchone()
        return int(newest)

    def _grown(self) -> set[RunKey]:
        """Return the followed runs of others that got frames since the last look."""
        newest = self._newest_frame()
        rows = self._connection.execute(
            "SELECT tenant, run_id FROM runs WHERE id IN (SELECT run FROM frames WHERE id > ? AND id <= ?)",
            (self._frame, newest),
        )
        self._frame = newest
        keys = (RunKey(*row) for row in rows)
        return {key for key in keys if self._interests.follows(key) and not self._interests.holds(key)}

    def _all_grown(self) -> set[RunKey]:
        """Return the followed runs of others that are not where they were at the last look at all."""
        followed = [key for key in self._interests.followed() if not self._interests.holds(key)]
        positions = self._last_seqs(followed)
        grown = {key for key in followed if key not in self._positions or self._positions[key] != positions[key]}
        self._positions = positions
        return grown

    def _signalled(self) -> list[RunKey]:
        signals = self._connection.execute(
            "SELECT i.id, i.owner, r.tenant, r.run_id FROM inbox i JOIN runs r ON r.id = i.run WHERE i.id > ?"
            " ORDER BY i.id",
            (self._inbox,),
        ).fetchall()
        if signals:
            self._inbox = signals[-1][0]
        keys = [RunKey(tenant, run_id) for _, owner, tenant, run_id in signals if owner != self._owner]
        return [key for key in keys if self._interests.holds(key)]

    def _ready(self) -> list[tuple[str, float]]:
        ready = []
        for pool in self._interests.awaited():
            (item,) = self._connection.execute("SELECT min(ready) FROM work WHERE pool = ?", (pool,)).fetchone()
            (timer,) = self._connection.execute("SELECT min(at) FROM timers").fetchone()
            ready += [(pool, due) for due in (item, timer) if due is not None]
        return ready

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
