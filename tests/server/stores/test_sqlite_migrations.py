"""SqliteStore opens files of every older version, and leaves nothing behind of what was deleted."""

import hashlib
import sqlite3
from contextlib import closing

import pytest

from dualclaw_server.engine.store import RunMessage
from dualclaw_server.stores import SqliteStore
from dualclaw_server.stores.sqlite_schema import APPLICATION_ID, MIGRATIONS, VERSION

STEPS = ("5c6097e814b76238", "39f5d006522e3f20", "5136cbe55641e425")
"""Hashes of the steps, in order: a step never changes, because files have been made by it."""


def make_file(path, version):
    """Make an empty file as the release of that version made it."""
    with closing(sqlite3.connect(path)) as connection:
        for step in MIGRATIONS[:version]:
            connection.executescript(step)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {version}")


def schema(path):
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name")
        return rows.fetchall(), connection.execute("PRAGMA user_version").fetchone()


def test_a_step_never_changes():
    """A file that went through the old text of a step would lack what its new text makes."""
    assert tuple(hashlib.sha256(step.encode()).hexdigest()[:16] for step in MIGRATIONS) == STEPS


@pytest.mark.parametrize("version", range(1, VERSION))
async def test_a_file_of_an_older_version_ends_in_the_schema_of_a_new_one(tmp_path, version):
    """However a file got here, everything after it is the same."""
    make_file(tmp_path / "old.db", version)
    for name in ("old.db", "new.db"):
        store = SqliteStore(tmp_path / name)
        await store.open()
        await store.close()
    assert schema(tmp_path / "old.db") == schema(tmp_path / "new.db")
    assert schema(tmp_path / "old.db")[1] == (VERSION,)


async def test_a_parked_run_in_a_file_of_version_1_is_answered_and_goes_on(tmp_path, make, claim_now):
    """Its messages have no scope, its questions no answer, and all that is new works on it."""
    path = tmp_path / "runs.db"
    make_file(path, 1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "INSERT INTO conversations (id, tenant, conversation_id, title, active, activations, created, updated)"
            " VALUES (1, 'acme', 'c', 'title', 1, 1, 5, 5)"
        )
        connection.execute(
            "INSERT INTO runs (id, tenant, run_id, conversation, state, activation, pool, created, record, info)"
            " VALUES (1, 'acme', 'r1', 1, 3, 1, 'default', 5, ?, ?)",
            (b"record", make.run("r1", "i1").SerializeToString()),
        )
        connection.execute("INSERT INTO heads (run, version, last_seq, epoch, updated) VALUES (1, 1, 0, 1, 5)")
        for position, name in enumerate(("ask", "call")):
            connection.execute(
                "INSERT INTO messages (run, position, conversation, activation, visible, body)"
                " VALUES (1, ?, 1, 1, 1, ?)",
                (position, make.message(name).SerializeToString()),
            )
        connection.commit()
    store = SqliteStore(path)
    await store.open()
    key = make.key("r1")
    assert [(message.position, message.scope) for message in (await store.load(key)).messages] == [(0, ""), (1, "")]
    assert (await store.answer(make.answers(key, "i1", request_id="q"))).first_seq == 1
    assert (await claim_now(store)).key == key
    messages = (RunMessage(2, make.message("inner"), "call_1"), RunMessage(3, make.message("result")))
    await store.append(key, make.frame(1, epoch=2, state=4, messages=messages), 1)
    page = await store.list_messages("acme", "c", page_size=0, page_token="")
    assert [message.id for message in page.items] == ["ask", "call", "result"]
    await store.close()


async def test_the_finished_runs_of_a_file_of_version_2_come_under_retention(tmp_path, make):
    """Their rest counts from their last event; the parked run beside them stays, and is worked on."""
    path = tmp_path / "runs.db"
    make_file(path, 2)
    with closing(sqlite3.connect(path)) as connection:
        for run, state in ((1, 4), (2, 3), (3, 5), (4, 6)):
            connection.execute(
                "INSERT INTO conversations (id, tenant, conversation_id, title, active, activations, created, updated)"
                " VALUES (?1, 'acme', ?2, 'title', CASE WHEN ?3 = 3 THEN ?1 END, 1, 5, 5)",
                (run, f"c{run}", state),
            )
            connection.execute(
                "INSERT INTO runs (id, tenant, run_id, conversation, state, activation, pool, created, record, info)"
                " VALUES (?1, 'acme', ?2, ?1, ?3, 1, 'default', 5, x'', x'')",
                (run, f"r{run}", state),
            )
            connection.execute(
                "INSERT INTO heads (run, version, last_seq, epoch, updated) VALUES (?, 1, 1, 1, ?)", (run, run * 10**6)
            )
            connection.execute(
                "INSERT INTO frames (run, first_seq, last_seq, epoch, state, flags, body) VALUES (?, 1, 1, 1, ?, 3, ?)",
                (run, state, make.events(1, 1)),
            )
        connection.execute("INSERT INTO work (run, pool, ready, token, deliveries) VALUES (2, 'default', 5.0, 7, 1)")
        connection.commit()
    store = SqliteStore(path)
    await store.open()
    assert await store.compact(3.0) == 1
    assert [(await store.head(make.key(f"r{n}"))).kept_from for n in (1, 2, 3, 4)] == [2, 1, 1, 1]
    assert await store.compact(4e9) == 2
    assert len(await store.read(make.key("r2"), 0)) == 1
    assert await store.release(make.key("r2"))
    claim = await store.claim("default", "w", 0)
    assert (claim.key, claim.redelivered) == (make.key("r2"), True)
    await store.close()


async def test_a_purged_run_leaves_only_the_messages_people_see(sqlite, tmp_path, make, writer, claim_now):
    """No answer, private message, signal, timer or request id stays behind in any table."""
    await sqlite.create(make.new("r1", "c", request_id="q"))
    log = writer(sqlite, make.key("r1"))
    await log.park(asks=["i1"], messages=(RunMessage(1, make.message("a")), RunMessage(2, make.message("b"), "call_1")))
    await sqlite.answer(make.answers(log.key, "i1", request_id="q2"))
    await sqlite.wake(log.key, 4e9)

    def rows():
        with closing(sqlite3.connect(tmp_path / "runs.db")) as connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            queries = {name: f"SELECT count(*) FROM {name}" for name in tables}  # noqa: S608 - names of our own
            counts = {name: connection.execute(query).fetchone()[0] for name, query in queries.items()}
        return {name: count for name, count in counts.items() if count and name not in ("owners", "sqlite_sequence")}

    assert {"answers", "inbox", "requests", "timers", "work"} <= set(rows())
    await sqlite.delete(log.key)
    assert rows() == {"conversations": 1, "messages": 2}
    await sqlite.delete_conversation("acme", "c")
    assert rows() == {}
