"""What retention does to the file: it shrinks again, and a compaction cut short is finished later."""

import asyncio
import sqlite3
from contextlib import closing

import pytest

from dualclaw.errors import EngineError
from dualclaw_server.stores import SqliteStore, sqlite_retention, sqlite_write
from dualclaw_server.stores.sqlite_retention import STEP_FRAMES
from dualclaw_server.stores.sqlite_schema import APPLICATION_ID, MIGRATIONS

FUTURE = 4e9


def value(path, query):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchone()[0]


async def test_the_room_of_compacted_logs_goes_back_to_the_disk(tmp_path, make, writer):
    """Most of it: a fifth of the file may stay empty for what comes next, and the log beside it is bounded too."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    for n in range(20):
        await store.create(make.new(f"r{n}"))
        log = writer(store, make.key(f"r{n}"))
        await log.add(text="z" * 300_000 + str(n), checkpoint=b"c" * 300_000 + str(n).encode())
        await log.end()
    pages = value(path, "PRAGMA page_count")
    assert pages > 2500
    assert await store.compact(FUTURE, limit=7) == 7
    assert await store.compact(FUTURE) == 13
    assert value(path, "PRAGMA page_count") < pages / 10
    assert value(path, "PRAGMA freelist_count") <= value(path, "PRAGMA page_count") / 5
    assert value(path, "PRAGMA integrity_check") == "ok"
    assert (await store.head(make.key("r3"))).kept_from == 3
    await store.close()
    assert path.stat().st_size < pages * 4096 / 10


async def test_a_file_with_retention_does_not_grow_for_ever(tmp_path, make, writer):
    """Week after week the same load: after the first, the file stays as large as it is."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    sizes = []
    for week in range(4):
        for n in range(5):
            await store.create(make.new(f"r{week}-{n}"))
            log = writer(store, make.key(f"r{week}-{n}"))
            for _ in range(20):
                await log.add(text="z" * 5000)
            await log.end()
        await store.compact(FUTURE)
        sizes.append(value(path, "PRAGMA page_count"))
    assert max(sizes) < sizes[0] + 60
    await store.close()


async def test_a_file_made_before_room_was_given_back_is_compacted_all_the_same(tmp_path, make, writer):
    """It has no map of its pages: they are used again, though the file does not shrink."""
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path)) as connection:
        for step in MIGRATIONS[:2]:
            connection.executescript(step)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 2")
    store = SqliteStore(path)
    await store.open()
    sizes = []
    for n in range(4):
        await store.create(make.new(f"r{n}"))
        log = writer(store, make.key(f"r{n}"))
        await log.add(text="z" * 500_000)
        await log.end()
        assert await store.compact(FUTURE) == 1
        sizes.append(value(path, "PRAGMA page_count"))
    assert sizes[-1] == sizes[0]
    await store.close()


async def test_payloads_in_blobs_are_counted_down(sqlite, tmp_path, make, writer):
    """An equal payload of a run that is kept stays; the last user's compaction drops it."""
    for name in ("r1", "r2"):
        await sqlite.create(make.new(name))
        log = writer(sqlite, make.key(name))
        await log.add(text="z" * 300_000, checkpoint=b"k" * 300_000)
        if name == "r1":
            await log.end()
            assert await sqlite.compact(FUTURE) == 1
            assert value(tmp_path / "runs.db", "SELECT count(*) FROM blobs") == 0
    assert value(tmp_path / "runs.db", "SELECT count(*) FROM blobs") == 2
    await sqlite.create(make.new("r3"))
    log3 = writer(sqlite, make.key("r3"))
    await log3.add(text="z" * 300_000, checkpoint=b"k" * 300_000)
    await log.end()
    assert await sqlite.compact(FUTURE) == 1
    assert value(tmp_path / "runs.db", "SELECT group_concat(uses) FROM blobs") == "1,1"
    assert len((await sqlite.load(log3.key)).checkpoint) == 300_000
    await log3.end()
    assert await sqlite.compact(FUTURE) == 1
    assert value(tmp_path / "runs.db", "SELECT count(*) FROM blobs") == 0


async def test_a_compaction_cut_short_shows_no_hole_and_is_finished_by_the_next(tmp_path, make, writer):
    """Killed between two steps of a long log: it is gone for readers, and the rest of its frames goes later."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    for _ in range(STEP_FRAMES + 500):
        log.send()
    await log.end()
    run = value(path, "SELECT id FROM runs")
    assert await store._write(lambda tx: sqlite_retention.compact_step(tx, run), full=False) is False
    assert value(path, "SELECT count(*) FROM frames") == 501
    with pytest.raises(EngineError, match="gone") as refused:
        await store.read(log.key, STEP_FRAMES + 10)
    assert refused.value.reason == "LOG_COMPACTED"
    await store.close()
    await store.open()
    assert await store.compact(FUTURE) == 1
    assert value(path, "SELECT count(*) FROM frames") == 0
    await store.close()


async def test_two_processes_that_compact_at_once_do_it_once(tmp_path, sqlite, make, writer):
    """Each run is counted by one of them."""
    other = SqliteStore(tmp_path / "runs.db")
    await other.open()
    for n in range(30):
        await sqlite.create(make.new(f"r{n}"))
        await writer(sqlite, make.key(f"r{n}")).end()
    assert sum(await asyncio.gather(sqlite.compact(FUTURE), other.compact(FUTURE))) == 30
    await other.close()


async def test_a_deleted_conversation_is_unknown_at_once_and_taken_away_in_steps(tmp_path, make, writer, sound):
    """No single transaction drops a long log, and other runs' frames get their turn in between."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    for name in ("r1", "r2"):
        await store.create(make.new(name, "c", request_id=name))
        log = writer(store, make.key(name))
        for _ in range(2 * STEP_FRAMES):
            log.send()
        await log.end("answer")
    await store.create(make.new("other"))
    before = store.commits
    deleting = asyncio.create_task(store.delete_conversation("acme", "c"))
    await asyncio.sleep(0)
    assert await writer(store, make.key("other")).add() == 1
    assert not deleting.done()
    with pytest.raises(EngineError, match="no such run"):
        await store.head(make.key("r1"))
    await deleting
    assert store.commits - before > 6
    sound(path)
    assert value(path, "SELECT count(*) FROM messages") == 1
    await store.close()


async def test_a_deletion_cut_short_frees_the_names_and_is_finished_by_the_next_compaction(
    tmp_path, make, writer, sound
):
    """Killed right after the conversation became unknown: nothing of it can be seen, and later nothing is there."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    await store.create(make.new("r1", "c", request_id="q"))
    log = writer(store, make.key("r1"))
    await log.add(text="z" * 300_000, checkpoint=b"k" * 300_000)
    await log.end("answer")
    await store._write(lambda tx: sqlite_write.delete_conversation(tx, "acme", "c"))
    await store.close()
    await store.open()
    sound(path)
    assert (await store.list_conversations("acme", page_size=0, page_token="")).items == []
    assert (await store.list_runs("acme", states=(), conversation_id="", page_size=0, page_token="")).items == []
    assert not (await store.create(make.new("r1", "c", request_id="q"))).existing
    page = await store.list_messages("acme", "c", page_size=0, page_token="")
    assert [message.id for message in page.items] == ["r1-0"]
    assert await store.compact(0.0) == 0
    sound(path)
    for table, count in (("conversations", 1), ("runs", 1), ("messages", 1), ("frames", 0), ("blobs", 0)):
        assert value(path, f"SELECT count(*) FROM {table}") == count  # noqa: S608 - names from the line above
    await store.close()


async def test_a_long_finished_run_is_purged_in_steps(tmp_path, make, writer, sound):
    """Emptied before it goes; its messages stay."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    await store.create(make.new("r1", "c"))
    log = writer(store, make.key("r1"))
    for _ in range(3 * STEP_FRAMES):
        log.send()
    await log.end("answer")
    before = store.commits
    await store.delete(log.key)
    assert store.commits - before >= 4
    sound(path)
    page = await store.list_messages("acme", "c", page_size=0, page_token="")
    assert [message.id for message in page.items] == ["r1-0", "answer"]
    await store.close()
