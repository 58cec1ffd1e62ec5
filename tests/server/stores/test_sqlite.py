"""SqliteStore: what only a file has. Group commit, sync levels, a full disk, foreign files, its addresses."""

import asyncio
import contextlib
import sqlite3
import stat
import time
from contextlib import closing

import pytest

from dualclaw import RunState
from dualclaw_server.engine.store import Full, StoreError, Sync, Unavailable
from dualclaw_server.stores import MemoryStore, SqliteStore, store_from_url
from dualclaw_server.stores.sqlite_file import filesystem_of


async def test_appends_of_many_runs_share_one_transaction(sqlite, make, writer, held_writer):
    """What 64 runs write while the thread is at work costs one commit."""
    logs = []
    for n in range(64):
        await sqlite.create(make.new(f"r{n}"))
        logs.append(writer(sqlite, make.key(f"r{n}")))
    async with held_writer(sqlite):
        before = sqlite.commits
        sent = [log.send() for log in logs]
    await asyncio.gather(*sent)
    assert sqlite.commits - before == 2  # the one they waited for, and theirs


async def test_text_frames_gather_but_the_first_after_a_quiet_time_goes_at_once(tmp_path, make, writer):
    """Streams share commits; a lone frame does not wait for others, and nothing that is durable does."""
    for gather in (0.5, 60.0):
        store = SqliteStore(tmp_path / f"{gather}.db", gather=gather)
        await store.open()
        await store.create(make.new("r1"))
        await store.close()
        await store.open()  # it has been quiet ever since
        log = writer(store, make.key("r1"))
        began, before = time.monotonic(), store.commits
        await asyncio.wait_for(log.send(), 50)
        sent = []
        for _ in range(10):
            sent.append(log.send())
            await asyncio.sleep(0.005)
        if gather == 60.0:
            assert store.commits - before == 1
            assert not any(one.done() for one in sent)
            await asyncio.wait_for(log.send(durable=True), 50)
            assert store.commits - before == 2
            assert all(one.done() for one in sent)
        else:
            await asyncio.wait_for(asyncio.gather(*sent), 50)
            assert time.monotonic() - began > 0.4
        await store.close()


async def test_the_sync_level_is_set_before_begin_to_the_strongest_need(sqlite, make, writer, held_writer):
    """FULL for create, signals, answers and frames that ask for it; NORMAL for all else; never inside a transaction."""
    statements = []
    connection = sqlite._parts.writer._tx.connection
    await sqlite.create(make.new("r1"))
    log = writer(sqlite, make.key("r1"))
    await log.add()
    connection.set_trace_callback(statements.append)

    def levels():
        seen = [text for text in statements if text.startswith(("PRAGMA synchronous", "BEGIN", "COMMIT"))]
        statements.clear()
        return [text.removeprefix("PRAGMA synchronous = ") for text in seen]

    await log.add()
    assert levels() == ["BEGIN IMMEDIATE", "COMMIT"]
    async with held_writer(sqlite):
        assert levels() == ["BEGIN IMMEDIATE"]
        sent = [log.send(), log.send(sync=Sync.FULL), log.send()]
    await asyncio.gather(*sent)
    assert levels() == ["COMMIT", "FULL", "BEGIN IMMEDIATE", "COMMIT"]
    await sqlite.signal(log.key, b"x", "s")
    await sqlite.create(make.new("r2"))
    assert levels() == ["BEGIN IMMEDIATE", "COMMIT"] * 2
    await log.add()
    assert levels() == ["NORMAL", "BEGIN IMMEDIATE", "COMMIT"]
    await log.park(asks=["i1"])
    levels()
    await sqlite.answer(make.answers(log.key, "i1"))
    assert levels() == ["FULL", "BEGIN IMMEDIATE", "COMMIT"]
    claim = await sqlite.claim("default", "w", 0)
    await sqlite.wake(log.key, 4e9)
    await sqlite.release(log.key)
    await sqlite.put("acme", "x", b"", 0)
    await sqlite.compact(4e9)
    await sqlite.delete(log.key)
    await sqlite.delete_conversation("acme", "c-r1")
    await claim.ack()
    seen = levels()
    assert [level for level in seen if level not in ("BEGIN IMMEDIATE", "COMMIT")] == ["NORMAL"]
    assert seen.index("NORMAL") == 0
    connection.set_trace_callback(None)


async def test_close_commits_what_waits(tmp_path, make, writer):
    """What was appended before close is stored, awaited or not."""
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    sent = [log.send() for _ in range(200)]
    await store.close()
    assert await asyncio.gather(*sent) == list(range(1, 201))
    await store.open()
    assert (await store.head(log.key)).last_seq == 200
    await store.close()


async def test_an_append_whose_caller_left_is_stored(sqlite, make, writer):
    """Cancelling the wait does not cancel the commit."""
    await sqlite.create(make.new("r1"))
    log = writer(sqlite, make.key("r1"))
    log.send().cancel()
    assert await log.add() == 2


async def test_a_closed_store_is_unavailable(sqlite, make):
    """Every call says so; followers and waiting claimers end."""
    await sqlite.create(make.new("r1"))
    claim = await sqlite.claim("default", "w", 0)
    waiting = asyncio.create_task(sqlite.claim("default", "w", 100))
    following = asyncio.create_task(anext(sqlite.follow(make.key("r1"), 0)))
    await asyncio.sleep(0.05)
    await sqlite.close()
    for call in (
        waiting,
        following,
        sqlite.head(make.key("r1")),
        sqlite.create(make.new("r2")),
        sqlite.answer(make.answers(make.key("r1"), "i1")),
        sqlite.append(make.key("r1"), make.frame(1), 0),
        anext(sqlite.follow(make.key("r1"), 0)),
    ):
        with pytest.raises(Unavailable):
            await asyncio.wait_for(call, 100)
    assert claim.lost


async def _outcome(append):
    try:
        return await append
    except Full as full:
        return full


async def test_a_full_file_refuses_what_does_not_fit_and_goes_on(tmp_path, make, writer):
    """Full, nothing half stored, other operations of the same batch pass, and deleting makes room again."""
    store = SqliteStore(tmp_path / "runs.db", max_bytes=600_000)
    await store.open()
    await store.create(make.new("big"))
    await store.create(make.new("small"))
    big, small = writer(store, make.key("big")), writer(store, make.key("small"))
    while not isinstance(await _outcome(big.send(text="x" * 50_000, checkpoint=b"y" * 1000, durable=True)), Full):
        assert big.version < 100
    head = await store.head(big.key)
    assert (head.version, head.last_seq) == (big.version - 1, big.last_seq - 1)
    assert (await store.load(big.key)).checkpoint_seq == head.last_seq

    refused = store.append(big.key, make.frame(head.last_seq + 1, text="x" * 200_000), head.version)
    signalled = asyncio.create_task(store.signal(small.key, b"x", "s"))
    passed = small.send()
    with pytest.raises(Full):
        await refused
    assert await passed == 1
    assert await signalled is None
    await store.delete(big.key)
    await small.add(text="x" * 50_000)
    assert (await store.head(small.key)).last_seq == 2
    await store.close()


async def test_another_process_that_holds_the_file_too_long_makes_it_unavailable(tmp_path, make, writer):
    """Nothing is stored, and once the file is free the same append works."""
    store = SqliteStore(tmp_path / "runs.db", busy_timeout=0.1)
    await store.open()
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable):
            await log.add()
        other.execute("ROLLBACK")
    assert await store.append(log.key, make.frame(1), 0) == 1
    await store.close()


async def test_the_file_is_private(sqlite, tmp_path, make):
    """Conversations are nobody else's business."""
    await sqlite.create(make.new("r1"))
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


async def test_a_file_of_a_newer_release_is_refused_and_left_alone(tmp_path):
    """An older release must not guess."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 999")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer dualclaw"):
        await store.open()
    assert path.read_bytes() == before


async def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path):
    """A wrong path must not cost anybody their data."""
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        await SqliteStore(path).open()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.db"]


@pytest.mark.parametrize("content", [b"hello", b"not a database " * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path, content):
    """Text, garbage, or only the look of a database."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"notes\.txt"):
        await SqliteStore(path).open()
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


async def test_a_damaged_database_is_refused_and_left_alone(tmp_path, make, writer):
    """Damage is found at start, not in the middle of a run."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    for _ in range(50):
        await log.add(text="x" * 2000)
    await store.close()
    damaged = bytearray(path.read_bytes())
    for page in range(2, len(damaged) // 4096):
        damaged[page * 4096 : page * 4096 + 8] = b"\xde\xad\xbe\xef" * 2
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match=r"damaged|not a usable"):
        await store.open()
    assert path.read_bytes() == bytes(damaged)


async def test_a_path_that_cannot_be_opened_is_unavailable(tmp_path):
    """A folder in the place of the file, a file in the place of the folder."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "folder", tmp_path / "file" / "runs.db"):
        with pytest.raises(StoreError, match=path.name):
            await SqliteStore(path).open()


async def test_large_payloads_are_stored_once_and_go_with_their_runs(sqlite, tmp_path, make, writer):
    """Equal payloads share a blob; it goes when the last run that uses it goes."""

    def blobs():
        with closing(sqlite3.connect(tmp_path / "runs.db")) as connection:
            return [uses for (uses,) in connection.execute("SELECT uses FROM blobs ORDER BY uses")]

    for name in ("r1", "r2"):
        await sqlite.create(make.new(name))
        log = writer(sqlite, make.key(name))
        await log.add(text="z" * 300_000, checkpoint=b"first" * 60_000)
        await log.add(checkpoint=b"second" * 60_000)
        await log.end()
    assert blobs() == [2, 2]
    await sqlite.delete(make.key("r1"))
    assert blobs() == [1, 1]
    await sqlite.delete_conversation("acme", "c-r2")
    assert blobs() == []


async def test_a_failing_signal_callback_does_not_stop_the_others(sqlite, make):
    """One listener's defect is its own."""
    reached = []

    def broken(key):
        raise RuntimeError("broken")

    sqlite.on_signal(broken)
    sqlite.on_signal(reached.append)
    await sqlite.create(make.new("r1"))
    await sqlite.signal(make.key("r1"), b"x", "s")
    assert reached == [make.key("r1")]


def test_the_filesystem_of_a_path_is_that_of_its_nearest_mount(tmp_path):
    """A network filesystem is found below a local one, and names with spaces are read right."""
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nhost:/x /data nfs4 rw 0 0\n/dev/b /data/my\\040disk xfs rw 0 0\nbroken\n")
    for path, kind in (("/data/runs.db", "nfs4"), ("/data/my disk/runs.db", "xfs"), ("/database/x", "ext4")):
        assert filesystem_of(tmp_path / path, mounts) == kind
    assert filesystem_of(tmp_path, tmp_path / "absent") == ""


async def test_an_address_names_a_store(tmp_path):
    """memory: and sqlite:PATH, relative or absolute; its folder is made."""
    assert isinstance(store_from_url("memory:"), MemoryStore)
    path = tmp_path / "new" / "folder" / "my runs?#.db"
    with contextlib.chdir(tmp_path):
        for url in (f"sqlite:{path}", "sqlite:relative/runs.db"):
            store = store_from_url(url, lease=5, max_stall=7)
            await store.open()
            await store.close()
    assert (store._lease, store._max_stall) == (5, 7)
    assert path.exists()
    assert (tmp_path / "relative" / "runs.db").exists()


@pytest.mark.parametrize("url", ["", "memory", "memory:x", "sqlite:", "sqlite", "postgres://x", "sqlite:a\0b"])
def test_an_address_that_names_no_store_is_refused_with_the_forms_there_are(url):
    """The text says what would be right."""
    with pytest.raises(ValueError, match="sqlite:PATH"):
        store_from_url(url)


async def test_a_state_that_was_stored_is_the_enum_value(sqlite, make, writer):
    """Numbers from the file compare equal to the states of the contract."""
    await sqlite.create(make.new("r1"))
    await writer(sqlite, make.key("r1")).end()
    head = await sqlite.head(make.key("r1"))
    assert RunState.Name(head.state) == "RUN_STATE_SUCCEEDED"


async def test_a_store_that_is_closed_leaves_one_database_file(tmp_path, make, writer):
    """Whoever copies the file after a clean stop has everything: no log lies beside it, reads and writes included."""
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    await store.create(make.new("r1"))
    await writer(store, make.key("r1")).add()
    assert (await store.head(make.key("r1"))).last_seq == 1
    await store.close()
    assert not {"runs.db-wal", "runs.db-shm"} & {path.name for path in tmp_path.iterdir()}
    with closing(sqlite3.connect(f"file:{tmp_path / 'runs.db'}?immutable=1", uri=True)) as copy:
        assert copy.execute("SELECT count(*) FROM runs").fetchone() == (1,)
