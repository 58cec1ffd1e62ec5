"""No statement of the SQLite store walks through a table, and none sorts what an index has in order already."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing

import pytest

from dualclaw import RunState
from dualclaw_server.stores import SqliteStore, sqlite_read
from dualclaw_server.stores.sqlite_file import connect

SMALL = ("owners", "json_each", "work")
"""May be walked through: a row per process, the values of a call, the work items when a process ends."""


@pytest.fixture
async def traced(tmp_path):
    """A store whose writer's statements are noted, and a read connection that notes its own."""
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    statements: list[str] = []
    reader = connect(tmp_path / "runs.db", read_only=True)
    reader.set_trace_callback(statements.append)
    store._parts.writer._tx.connection.set_trace_callback(statements.append)
    yield store, reader, statements
    reader.close()
    store._parts.writer._tx.connection.set_trace_callback(None)
    await store.close()


def plans(path, statements: Sequence[str]):
    """The plan of every statement that has one."""
    with closing(sqlite3.connect(path)) as connection:
        for text in dict.fromkeys(statements):
            if text.startswith(("SELECT", "INSERT", "UPDATE", "DELETE")):
                rows = connection.execute(f"EXPLAIN QUERY PLAN {text}").fetchall()
                yield text, [row[3] for row in rows]


async def test_no_write_walks_through_a_table(tmp_path, traced, make, writer, claim_now):
    """The life of a run, its retention and its end: each statement finds its rows by an index."""
    store, _, statements = traced
    await store.create(make.new("r1", "c", request_id="q"))
    await store.create(make.new("r2", "c", on_busy=2))
    await store.create(make.new("r3", "c", on_busy=3))
    log = writer(store, make.key("r1"))
    claim = await claim_now(store)
    await log.add(text="z" * 300_000, checkpoint=b"y" * 300_000)
    await log.park("m", asks=["i1"])
    await claim.ack()
    await store.wake(log.key, 1.0)
    await store.answer(make.answers(log.key, "i1", request_id="q2"))
    claim = await claim_now(store)
    await store.signal(log.key, b"x", "s")
    await claim.nak(0)
    await store.release(log.key)
    claim = await claim_now(store)
    await log.end(epoch=2, signals=("s",))
    await claim.ack()
    await store.compact(4e9)
    await store.put("acme", "x", b"", 0)
    await store.put("acme", "x", b"", 1)
    await store.delete(log.key)
    await store.delete(make.key("r2"))
    await store.delete(make.key("r3"))
    await store.delete_conversation("acme", "c")
    assert len(statements) > 80
    for text, plan in plans(tmp_path / "runs.db", statements):
        assert not [step for step in plan if step.startswith("SCAN") and step.split()[1] not in SMALL], (text, plan)


STATES = [(), (RunState.RUN_STATE_RUNNING,), (RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_FAILED)]


@pytest.mark.parametrize("conversation", ["", "c"])
@pytest.mark.parametrize("states", STATES)
async def test_listing_runs_walks_along_an_index(tmp_path, traced, make, states, conversation):
    """By state, by conversation, by both, on any page: as fast among 100,000 runs as among ten."""
    store, reader, statements = traced
    for n in range(3):
        await store.create(make.new(f"r{n}", "c", on_busy=2))
    statements.clear()
    page = sqlite_read.list_runs(reader, "acme", states, conversation, 1, "")
    sqlite_read.list_runs(reader, "acme", states, conversation, 1, page.next_token)
    narrowed = "conversation=? AND state=?" if conversation else "tenant=? AND state=?" if states else "tenant=?"
    for text, plan in plans(tmp_path / "runs.db", statements):
        if text.startswith("SELECT id FROM runs"):
            assert narrowed in plan[0], (text, plan)
        # The page itself, at most 500 rows picked by their ids, may be put in order.
        picked = "json_each" in text
        bad = [step for step in plan if step.startswith("SCAN") or (step.startswith("USE TEMP") and not picked)]
        assert not [step for step in bad if step.split()[1] not in SMALL], (text, plan)


async def test_other_reads_walk_along_an_index(tmp_path, traced, make, writer):
    """Head, load, frames, inspect, conversations, messages, history, settings."""
    store, reader, statements = traced
    await store.create(make.new("r1", "c"))
    await writer(store, make.key("r1")).park("m", asks=["i1"])
    statements.clear()
    key = make.key("r1")
    for read in (sqlite_read.head, sqlite_read.load, sqlite_read.inspect):
        read(reader, key)
    sqlite_read.frames(reader, key, 0, 1000)
    sqlite_read.get_conversation(reader, "acme", "c")
    sqlite_read.list_conversations(reader, "acme", 1, "")
    sqlite_read.list_messages(reader, "acme", "c", 1, "")
    sqlite_read.history(reader, "acme", "c", "r1")
    sqlite_read.get_setting(reader, "acme", "x")
    assert len(statements) > 15
    for text, plan in plans(tmp_path / "runs.db", statements):
        few = "FROM inbox" in text  # a run's unread signals
        bad = [step for step in plan if step.startswith("SCAN") or (step.startswith("USE TEMP") and not few)]
        assert not bad, (text, plan)


async def test_pages_over_several_states_neither_repeat_nor_skip(store, make, writer):
    """Whatever is asked for, the pages together are the whole list, newest first."""
    for n in range(12):
        await store.create(make.new(f"r{n}", "c" if n % 2 else "", on_busy=2))
        if n % 3 == 0:
            await store.append(make.key(f"r{n}"), make.frame(1, 0, state=RunState.RUN_STATE_FAILED), 0)
    for states in (*STATES, (RunState.RUN_STATE_FAILED, RunState.RUN_STATE_RUNNING, RunState.RUN_STATE_QUEUED)):
        for conversation in ("", "c", "nowhere"):
            whole = await store.list_runs(
                "acme", states=states, conversation_id=conversation, page_size=0, page_token=""
            )
            wanted = [run for run in whole.items if not states or run.state in states]
            token, seen = "", []
            while True:
                page = await store.list_runs(
                    "acme", states=states, conversation_id=conversation, page_size=2, page_token=token
                )
                assert len(page.items) <= 2
                seen += page.items
                token = page.next_token
                if not token:
                    break
            assert seen == wanted
            numbers = [int(run.id[1:]) for run in seen]
            assert numbers == sorted(numbers, reverse=True)
