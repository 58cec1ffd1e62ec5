"""Failpoints: the places where a server of the kill sweep ends itself, and the one table of them.

No line of the product knows of them. The awaits of worker and API are calls of the store, the model, tools and
interceptors, and each of these is an argument of the server; so ``failing_store`` and ``failing_parts`` stand around
them and pass a point before and after each call. A point's name is ``what:when``; the environment says where
to die: ``FAILPOINT=append.tool_started:after:1`` is the first time that point is passed.

Appends are told apart by what the frame carries, see ``failing_store.Kinds``. For points inside the SQLite store the
interpreter has a seam of its own: an audit hook is given every connection, and a connection's trace callback every
statement before it runs.
"""

import contextlib
import os
import signal
import sqlite3
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Scenario = Literal["work", "cancel", "cancel_parked", "drain", "release", "calls"]


@dataclass(frozen=True, slots=True)
class Point:
    """A place where a server may die."""

    name: str
    row: str
    """The row of the crash matrix it belongs to."""
    scenario: Scenario = "work"
    counts: tuple[int, ...] = (1,)
    """Which times of passing it are swept, the first one in the quick sweep."""
    first: str = ""
    """Where a process before it died, for points that only a recovery passes."""
    doubt: bool = False
    """True when a tool may be at work at that moment, so that its effect class decides."""
    unsaved_from: int = 99
    """From how manieth time on results of tools may be on their way to the disk: the agent goes on meanwhile."""
    store: str = ""
    """The only store it is for; empty: every one."""


def _around(what: str, row: str, **more: object) -> tuple[Point, Point]:
    return Point(f"{what}:before", row, **more), Point(f"{what}:after", row, **more)  # type: ignore[arg-type]


CREATE, DELIVERED, STREAMING = "around create or signal", "item delivered, not claimed", "model streaming"
SAVED, STARTED, FINISHED = "model answer saved, tool not started", "tool started, result not saved", "tool finished"
RESTING, ATTACH = "parked or terminal, not acked", "attach replica"
WITHIN = "within a transaction of the store"
RECOVERING, UPKEEP = "recovering from an earlier crash", "old logs are dropped"
ROWS = (CREATE, DELIVERED, STREAMING, SAVED, STARTED, FINISHED, RESTING, ATTACH, WITHIN, RECOVERING, UPKEEP)
"""Those of the crash matrix but "worker frozen, then back", which is no death: ``test_frozen``; and three more."""

POINTS: tuple[Point, ...] = (
    # a run is accepted, answered, cancelled
    *_around("create", CREATE),
    *_around("answer", CREATE),
    *_around("signal", CREATE, scenario="cancel"),
    *_around("wake", CREATE),
    # a worker takes it
    *_around("claim", DELIVERED, counts=(1, 2)),
    *_around("load", DELIVERED, counts=(1, 2), unsaved_from=2),  # a signal is a reason to load, too
    *_around("history", DELIVERED, counts=(1, 2)),
    *_around("append.claim", DELIVERED),
    *_around("append.resume", DELIVERED),
    *_around("append.checkpoint", DELIVERED, counts=(1, 2), unsaved_from=2),
    # hooks that open a segment
    Point("hook.before_agent:at", DELIVERED, counts=(1, 2)),
    Point("hook.on_agent_start:at", DELIVERED, counts=(1, 2)),
    Point("hook.on_reason_start:at", DELIVERED, counts=(1, 2, 3), unsaved_from=2),
    Point("hook.on_prepare:at", DELIVERED, counts=(1, 2, 3), unsaved_from=2),
    Point("hook.intercept_stream:at", DELIVERED, counts=(1, 2, 3), unsaved_from=2),
    # the model speaks
    Point("model:before", STREAMING, counts=(1, 2, 3), unsaved_from=2),
    Point("model:mid", STREAMING, counts=(1, 3), unsaved_from=2),
    Point("model:after", STREAMING, counts=(1, 2, 3), unsaved_from=2),
    *_around("append.text", STREAMING, counts=(2, 1), doubt=True),  # on a busy machine the second is not soon
    Point("append.answer:before", STREAMING, counts=(1, 2), unsaved_from=2),
    Point("append.answer:after", SAVED, counts=(1, 2), doubt=True),  # "started" may be in the same transaction
    Point("hook.on_reason_end:at", SAVED, counts=(1, 2, 3), unsaved_from=2),
    Point("hook.on_action_start:at", SAVED, counts=(1, 2), unsaved_from=2),
    # tools
    Point("append.started:before", SAVED, counts=(1, 2), unsaved_from=2),
    Point("append.started:after", STARTED, counts=(1, 2), doubt=True),
    Point("hook.on_tool_call_start:at", STARTED, counts=(1, 2, 3), doubt=True),
    Point("hook.intercept_tool:before", STARTED, counts=(1, 2, 3), doubt=True),
    Point("tool:before", STARTED, counts=(1, 2, 3), doubt=True),
    Point("tool:after", STARTED, counts=(1, 2, 3), doubt=True),
    Point("hook.intercept_tool:after", STARTED, counts=(1, 2, 3), doubt=True),
    Point("hook.on_tool_call_end:at", STARTED, counts=(1, 2, 3), doubt=True),
    Point("append.finished:before", STARTED, counts=(1, 2), doubt=True),
    Point("append.finished:after", FINISHED, counts=(1, 2)),
    Point("hook.on_action_end:at", FINISHED, counts=(1, 2), unsaved_from=1),
    # it rests
    *_around("append.parked", RESTING),
    Point("append.done:before", RESTING, unsaved_from=1),
    Point("append.done:after", RESTING),
    *_around("append.cancelled", RESTING, scenario="cancel"),
    *_around("append.cancelled_parked", RESTING, scenario="cancel_parked"),
    Point("hook.on_agent_end:at", RESTING, counts=(1, 2), unsaved_from=1),
    *_around("ack", RESTING, counts=(1, 2)),
    *_around("nak", RESTING, scenario="drain"),
    # a second crash, while the first is being mended
    Point("append.recovery:before", RECOVERING, first="append.started:before:1"),
    Point("append.recovery:after", RECOVERING, first="append.started:before:1", doubt=True),
    Point("lookup:before", RECOVERING, first="tool:after:1", doubt=True),
    Point("lookup:after", RECOVERING, first="tool:after:1", doubt=True),
    Point("model:mid", RECOVERING, first="model:mid:1"),
    *_around("read", RECOVERING, first="model:mid:1"),
    # readers
    *_around("head", ATTACH, counts=(1, 2, 3), doubt=True),
    *_around("read", ATTACH, doubt=True),
    Point("follow:before", ATTACH, counts=(1, 2), doubt=True),
    Point("follow:first", ATTACH, counts=(1, 2, 3), doubt=True),
    *_around("get", ATTACH, doubt=True),
    *_around("list_runs", ATTACH, scenario="calls"),
    *_around("list_conversations", ATTACH, scenario="calls"),
    *_around("get_conversation", ATTACH, scenario="calls"),
    *_around("list_messages", ATTACH, scenario="calls"),
    *_around("inspect", ATTACH, scenario="calls"),
    *_around("put", CREATE, scenario="calls"),
    *_around("release", CREATE, scenario="release"),
    *_around("delete", CREATE, scenario="calls"),
    *_around("delete_conversation", CREATE, scenario="calls"),
    *_around("compact", UPKEEP, doubt=True),
    # between BEGIN and COMMIT; what had been written by then must be gone as a whole
    Point("statement.write:before", WITHIN, counts=(9, *range(3, 44, 4)), doubt=True, store="sqlite"),
    Point("statement.commit:before", WITHIN, counts=(5, *range(2, 16, 2)), doubt=True, store="sqlite"),
)  # fmt: skip
"""Every point of the sweep. A test holds it complete: whatever a server passes is in it, and each of it is passed."""


_WRITTEN = 0.2
"""Seconds in which an idle thread has taken what was queued for it."""
_LOCKED = 60.0
"""Seconds a transaction may take on a busy machine."""


class Failpoint:
    """Kills this process where it was told to.

    Args:
        spec: ``what:when:count``; empty: nowhere.
        journal: file that gets a line for the point that fired, or, with ``trace``, for each one passed.
        trace: True: write down every point.
        freeze: True: stop there instead (SIGSTOP), until somebody lets the process go on.
        file: the SQLite file that a process must not hold a lock of when it stops: everybody else would stop, too.
    """

    def __init__(
        self, spec: str, journal: Path, *, trace: bool = False, freeze: bool = False, file: Path | None = None
    ) -> None:
        name, _, count = spec.rpartition(":")
        self._name = name
        self._left = int(count) if spec else 0
        self._journal = journal
        self._trace = trace
        self._freeze = freeze
        self._file = file
        self._passed: set[str] = set()
        self._connections: list[sqlite3.Connection] = []

    def watches(self, what: str) -> bool:
        """Tell whether anything happens at the points of a call."""
        return self._trace or self._name.partition(":")[0] == what

    def at(self, name: str) -> None:
        """Pass a point; does not return if it is the one."""
        if self._trace and name not in self._passed:
            self._passed.add(name)
            self._write(name)
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                if self._freeze:
                    self._let_writer_finish()
                    self._write(name)
                    os.kill(os.getpid(), signal.SIGSTOP)
                    return
                self._write(name)
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()  # not one statement more, whatever thread the signal reaches first

    def _let_writer_finish(self) -> None:
        """Return when the store's thread has written what it was given; whoever calls this gives it nothing more."""
        if self._file is not None:
            time.sleep(_WRITTEN)
            with contextlib.closing(sqlite3.connect(self._file, timeout=_LOCKED)) as connection:
                connection.execute("BEGIN IMMEDIATE")

    def _write(self, name: str) -> None:
        file = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{name}\n".encode())
        os.close(file)

    def collect_connections(self) -> None:
        """Remember every SQLite connection that is made from now on, if a point inside its transactions is wanted."""
        if self._name.startswith("statement."):
            sys.addaudithook(self._on_audit)

    def watch_statements(self) -> None:
        """Pass points in the transactions of the connections made so far; none may be touched while it is made."""
        for connection in self._connections:
            with contextlib.suppress(sqlite3.ProgrammingError):  # closed again
                connection.set_trace_callback(self._on_statement)
        self._connections.clear()

    def _on_audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "sqlite3.connect/handle" and isinstance(arguments[0], sqlite3.Connection):
            self._connections.append(arguments[0])

    def _on_statement(self, statement: str) -> None:
        word = statement.lstrip().partition(" ")[0].upper()
        if word == "COMMIT":
            self.at("statement.commit:before")
        elif word in ("INSERT", "UPDATE", "DELETE"):
            self.at("statement.write:before")
