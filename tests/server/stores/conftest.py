"""Stores under test, and the values they are fed with."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualclaw import BusyPolicy, Delta, EngineEvent, InterruptItem, Message, Role, Run, RunResponse, RunState
from dualclaw_server.engine.store import Answers, Claim, Frame, NewRun, RunKey, RunMessage, RunStore
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.stores.nats import NatsStore, parse_address
from dualclaw_server.stores.sqlite import SqliteStore
from dualclaw_server.stores.sqlite_transaction import Transaction
from tests.nats_servers import NatsServers, nats_r1, nats_r3

__all__ = ["nats_r1", "nats_r3"]

PATIENCE = 100.0
"""Seconds for what takes a moment on an idle machine."""

QUEUED = RunState.RUN_STATE_QUEUED
RUNNING = RunState.RUN_STATE_RUNNING
INTERRUPTED = RunState.RUN_STATE_INTERRUPTED
SUCCEEDED = RunState.RUN_STATE_SUCCEEDED
CANCELLED = RunState.RUN_STATE_CANCELLED


class Make:
    """Builds the values a store takes, with as little as a test must say."""

    def key(self, name: str, tenant: str = "acme") -> RunKey:
        return RunKey(tenant, name)

    def new(
        self,
        name: str,
        conversation: str = "",
        *,
        tenant: str = "acme",
        request_id: str = "",
        on_busy: BusyPolicy.ValueType = BusyPolicy.BUSY_POLICY_REJECT,
        **changes: Any,
    ) -> NewRun:
        conversation = conversation or f"c-{name}"
        new = NewRun(
            key=RunKey(tenant, name),
            conversation_id=conversation,
            new_conversation=True,
            title=f"title of {conversation}",
            request_id=request_id,
            fingerprint="print",
            record=b"record of " + name.encode(),
            run=Run(id=name, conversation_id=conversation, agent="helper"),
            message=self.message(f"{name}-0", Role.ROLE_USER),
            on_busy=on_busy,
            replace_signal=b"replaced",
        )
        return replace(new, **changes)

    def answers(self, key: RunKey, *interrupt_ids: str, signal_id: str = "", request_id: str = "") -> Answers:
        """Answers with a signal id of their own: that of the questions, unless it is given."""
        name = signal_id or f"answer:{','.join(interrupt_ids)}"
        return Answers(key, interrupt_ids, name, name.encode(), request_id, "print")

    def run(self, name: str, *interrupt_ids: str) -> Run:
        return Run(id=name, agent="helper", interrupts=[InterruptItem(id=one) for one in interrupt_ids])

    def message(self, message_id: str, role: Role.ValueType = Role.ROLE_ASSISTANT) -> Message:
        return Message(id=message_id, role=role)

    def events(self, first: int, count: int, text: str = "x") -> bytes:
        events = [EngineEvent(seq=seq, delta=Delta(content=f"{text}{seq}")) for seq in range(first, first + count)]
        return RunResponse(events=events).SerializeToString()

    def frame(self, first: int, count: int = 1, *, text: str = "x", **changes: Any) -> Frame:
        state = changes.pop("state", RUNNING)
        return replace(Frame(1, first, count, self.events(first, count, text), state), **changes)


class LogWriter:
    """Appends to one run and remembers where its log stands."""

    def __init__(self, store: RunStore, key: RunKey, make: Make) -> None:
        self.store = store
        self.key = key
        self.make = make
        self.version = 0
        self.last_seq = 0

    def send(self, count: int = 1, **changes: Any) -> Awaitable[int]:
        frame = self.make.frame(self.last_seq + 1, count, **changes)
        appended = self.store.append(self.key, frame, self.version)
        self.version += 1
        self.last_seq = frame.last_seq
        return appended

    async def add(self, count: int = 1, **changes: Any) -> int:
        return await asyncio.wait_for(self.send(count, **changes), PATIENCE)

    async def park(self, *ids: str, asks: Sequence[str] = (), **changes: Any) -> None:
        changes.setdefault("messages", self.messages(*ids))
        run = self.make.run(self.key.run_id, *asks)
        await self.add(state=INTERRUPTED, run=run, ends_segment=True, **changes)

    async def go_on(self, epoch: int, **changes: Any) -> None:
        """Claim a parked run as a worker does: a frame without events, with the next epoch."""
        await self.add(0, epoch=epoch, run=self.make.run(self.key.run_id), durable=True, **changes)

    async def end(self, *ids: str, state: RunState.ValueType = SUCCEEDED, **changes: Any) -> None:
        await self.add(state=state, messages=self.messages(*ids), ends_segment=True, **changes)

    def messages(self, *ids: str) -> tuple[RunMessage, ...]:
        return tuple(RunMessage(1 + at, self.make.message(name)) for at, name in enumerate(ids))


@pytest.fixture
def make() -> Make:
    return Make()


Place = Callable[[], RunStore]
"""Makes a store object, not yet open. Each call gives another one on the same runs, as a second process would have it;
for what lives in one process only it is the same object."""


def memory_place(request: pytest.FixtureRequest, folder: Path) -> Place:
    store = MemoryStore(max_pending=4096)
    return lambda: store


def sqlite_place(request: pytest.FixtureRequest, folder: Path) -> Place:
    return lambda: SqliteStore(folder / "runs.db", max_pending=4096)


def nats_place(servers: str) -> Callable[[pytest.FixtureRequest, Path], Place]:
    def place(request: pytest.FixtureRequest, folder: Path) -> Place:
        cluster: NatsServers = request.getfixturevalue(servers)
        address = parse_address(cluster.url())
        request.addfinalizer(lambda: cluster.remove(address.name))
        return lambda: NatsStore(address, accept_loss=True, max_pending=4096)

    return place


STORES: dict[str, Callable[[pytest.FixtureRequest, Path], Place]] = {
    "memory": memory_place,
    "sqlite": sqlite_place,
    "nats-r1": nats_place("nats_r1"),
    "nats-r3": nats_place("nats_r3"),
}
"""Every store there is: the whole suite runs over each. A place is fresh for every test; what is dear, such as a
server, is a session fixture that the place asks for by ``request.getfixturevalue``. To reopen is to ``close`` and
``open`` the same object. A follower may keep 4096 bytes waiting, so that tests can make it lag."""


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a test's runs lie, in each kind of store in turn."""
    name: str = request.param
    return STORES[name](request, tmp_path)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[RunStore]:
    """Each store in turn, open."""
    made = place()
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """A SQLite store alone, open."""
    made = SqliteStore(tmp_path / "runs.db")
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def held_writer() -> Callable[[SqliteStore], AbstractAsyncContextManager[None]]:
    """Keeps a SQLite store's writer in a transaction while the context lasts: what is asked for meanwhile waits, and is
    its next one.
    """

    @asynccontextmanager
    async def hold(store: SqliteStore) -> AsyncIterator[None]:
        begun, over = threading.Event(), threading.Event()

        def stay(tx: Transaction) -> None:
            begun.set()
            over.wait(PATIENCE)

        staying = asyncio.create_task(store._write(stay))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        try:
            yield
        finally:
            over.set()
            await staying

    return hold


@pytest.fixture
def writer(make: Make) -> Callable[[RunStore, RunKey], LogWriter]:
    """Makes the writer of a run's log."""
    return lambda store, key: LogWriter(store, key, make)


@pytest.fixture
def claim_now() -> Callable[..., Awaitable[Claim]]:
    """Claims an item that must be there."""

    async def claim(store: RunStore) -> Claim:
        claimed = await asyncio.wait_for(store.claim("default", "worker", PATIENCE), PATIENCE + 10)
        assert claimed is not None
        return claimed

    return claim


@pytest.fixture
def collect() -> Callable[..., Awaitable[list[EngineEvent]]]:
    """Follows a run until it has seen a seq, and returns the events."""

    async def run(
        store: RunStore, key: RunKey, after: int, until: int, patience: float = PATIENCE
    ) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        async with asyncio.timeout(patience), aclosing(store.follow(key, after)) as frames:
            if after >= until:
                return events
            async for some in frames:
                events += parse(some)
                if events and events[-1].seq >= until:
                    return events
        raise AssertionError("the follower ended")

    return run


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Waits for something that nobody announces."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110  # nobody announces it
                await asyncio.sleep(0.01)

    return wait


def parse(frames: Sequence[Frame]) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for frame in frames:
        inside = list(RunResponse.FromString(frame.body).events)
        assert [event.seq for event in inside] == list(range(frame.first_seq, frame.last_seq + 1))
        events += inside
    return events


@pytest.fixture
def events_of() -> Callable[[Sequence[Frame]], list[EngineEvent]]:
    """Parses frames, and checks that each holds the events it says."""
    return parse


WRONG = {
    "a log with a hole": """
        SELECT run FROM (SELECT run, first_seq, lag(last_seq) OVER (PARTITION BY run ORDER BY last_seq) AS before
        FROM frames) JOIN runs ON runs.id = run AND kept_from = 1 WHERE first_seq != coalesce(before, 0) + 1""",
    "a head that is not where its log ends": """
        SELECT r.id FROM runs r JOIN heads h ON h.run = r.id LEFT JOIN frames f ON f.run = r.id
        GROUP BY r.id HAVING coalesce(max(f.last_seq), r.kept_from - 1) != h.last_seq""",
    "a blob miscounted": """
        SELECT hash FROM blobs b WHERE uses != (SELECT count(*) FROM frames f WHERE f.blob = b.hash)
        + (SELECT count(*) FROM checkpoints c WHERE c.blob = b.hash)""",
    "a payload without its blob": """
        SELECT blob FROM (SELECT blob FROM frames UNION SELECT blob FROM checkpoints)
        WHERE blob IS NOT NULL AND blob NOT IN (SELECT hash FROM blobs)""",
    "a conversation whose active run is not active": """
        SELECT c.id FROM conversations c LEFT JOIN runs r ON r.id = c.active
        WHERE c.active IS NOT NULL AND (r.id IS NULL OR r.state NOT IN (2, 3) OR r.conversation != c.id)""",
    "an active run its conversation does not know": """
        SELECT r.id FROM runs r JOIN conversations c ON c.id = r.conversation
        WHERE r.state IN (2, 3) AND c.active IS NOT r.id""",
    "a run that waits behind nobody": """
        SELECT r.id FROM runs r JOIN conversations c ON c.id = r.conversation WHERE r.state = 1 AND c.active IS NULL""",
    "a run whose rest is not noted": "SELECT id FROM runs WHERE state < 4 AND rested IS NOT NULL",
    "a final run that will never be compacted": """
        SELECT r.id FROM runs r JOIN frames f ON f.run = r.id WHERE r.state >= 4 AND r.rested IS NULL""",
    "a final run that would be delivered": """
        SELECT r.id FROM runs r JOIN work w ON w.run = r.id WHERE r.state >= 4 AND (w.token IS NULL OR w.again)""",
    "something of a run that is gone": " UNION ".join(
        f"SELECT run FROM {table} WHERE run NOT IN (SELECT id FROM runs)"  # noqa: S608 - names from the next line
        for table in ("heads", "frames", "checkpoints", "inbox", "answers", "requests", "work", "timers")
    ),
    "a run without a head": "SELECT id FROM runs WHERE id NOT IN (SELECT run FROM heads)",
    "a message of no conversation": """
        SELECT run FROM messages WHERE conversation NOT IN (SELECT id FROM conversations)""",
    "a private message that people see": "SELECT run FROM messages WHERE visible AND scope != ''",
}
"""What must never be found in the file of a SQLite store, whatever happened to it."""


def check_file(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found = {what: rows for what, query in WRONG.items() if (rows := connection.execute(query).fetchall())}
    assert found == {}


@pytest.fixture
def sound() -> Callable[[Path], None]:
    """Fails when a SQLite file is damaged or contradicts itself."""
    return check_file
