"""SqliteStore and what befalls its file: no room, failing writes, failing commits, wrong places and permissions."""

import asyncio
import ctypes
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from dualclaw_server.engine.store import Ambiguous, Fenced, Full, StoreError, Unavailable
from dualclaw_server.stores import SqliteStore
from dualclaw_server.stores.sqlite_file import connect, prepare, prepare_writer
from dualclaw_server.stores.sqlite_operations import Append, Call
from dualclaw_server.stores.sqlite_schema import APPLICATION_ID, MIGRATIONS
from dualclaw_server.stores.sqlite_transaction import Transaction
from dualclaw_server.stores.sqlite_writer import Writer

FILES = Path("/proc/self/fd")


async def outcome(call):
    """What a call gives, or the type of its fault."""
    try:
        return await asyncio.wait_for(call, 100)
    except StoreError as fault:
        return type(fault)


def rows(path, query):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def fill(path):
    """Leave no room on the disk of a file."""
    with path.open("ab", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"x" * 4096)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"no small disk can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(os.fsencode(folder), 2)


async def test_a_full_disk_refuses_writes_and_the_store_goes_on_when_there_is_room(small_disk, make, writer):
    """Full from append, create and signal alike, nothing half stored, reads work on; then everything again."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 300_000)
    store = SqliteStore(small_disk / "runs.db")
    await store.open()
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    while await outcome(log.send(text="x" * 20_000, checkpoint=b"c" * 20_000, messages=log.messages("m"))) is not Full:
        assert log.version < 60
    stored = log.version - 1
    fill(ballast)
    assert await outcome(store.create(make.new("r2", title="t" * 100_000))) is Full
    assert await outcome(store.signal(log.key, b"x" * 100_000, "s")) is Full
    head = await store.head(log.key)
    assert (head.version, head.last_seq) == (stored, stored)
    assert len(await store.read(log.key, 0, limit=10_000_000)) == stored
    assert (await store.load(log.key)).unread == ()
    ballast.unlink()
    assert await store.append(log.key, make.frame(stored + 1, text="y" * 20_000), stored) == stored + 1
    await store.create(make.new("r2"))
    assert await store.signal(log.key, b"x", "s") is None
    await store.close()
    assert rows(small_disk / "runs.db", "PRAGMA integrity_check") == [("ok",)]


async def test_a_store_opens_on_a_full_disk_or_says_why_not(small_disk, make):
    """A restart at the worst moment: typed either way, and afterwards the file is as good as new."""
    store = SqliteStore(small_disk / "runs.db")
    await store.open()
    await store.create(make.new("r1"))
    await store.close()
    fill(small_disk / "ballast")
    assert await outcome(store.open()) in (None, Full, Unavailable)
    await store.close()
    (small_disk / "ballast").unlink()
    await store.open()
    assert (await store.head(make.key("r1"))).version == 0
    await store.close()


async def test_what_builds_on_a_frame_that_did_not_fit_does_not_fit_either(tmp_path, make, writer):
    """A writer with frames in flight learns the cause, not that another writer had been faster."""
    store = SqliteStore(tmp_path / "runs.db", max_bytes=400_000)
    await store.open()
    await store.create(make.new("r1"))
    log = writer(store, make.key("r1"))
    await log.add()
    sent = [log.send(text="x" * 250_000), log.send(text="y" * 250_000), log.send(), log.send()]
    assert [await outcome(one) for one in sent] == [2, Full, Full, Full]
    assert await outcome(log.send()) is Full
    assert await store.append(log.key, make.frame(3), 2) == 3
    with pytest.raises(Fenced):
        await store.append(log.key, make.frame(3), 2)
    await store.close()


SHORT_FILES = """
import asyncio, resource, sys
from dualclaw import BusyPolicy, Delta, EngineEvent, Message, Run, RunResponse, RunState
from dualclaw_server.engine.store import Frame, NewRun, RunKey, StoreError
from dualclaw_server.stores import SqliteStore

def frame(seq, text):
    body = RunResponse(events=[EngineEvent(seq=seq, delta=Delta(content=text))]).SerializeToString()
    return Frame(1, seq, 1, body, RunState.RUN_STATE_RUNNING)

async def main(path):
    store = SqliteStore(path)
    await store.open()
    key = RunKey("acme", "r1")
    await store.create(NewRun(key, "c", True, "", "", "", b"", Run(id="r1"), Message(id="m"),
                              BusyPolicy.BUSY_POLICY_REJECT, b""))
    await store.append(key, frame(1, "x"), 0)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    other = store.append(key, frame(2, "y" * 250_000), 1)
    try:
        await other
        print("stored")
    except StoreError as fault:
        print(type(fault).__name__)
    print((await store.head(key)).version)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(await store.append(key, frame(2, "z" * 250_000), 1))
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


def test_a_write_that_fails_at_commit_is_unavailable_and_works_when_the_disk_does(tmp_path):
    """The limit on the length of files makes the system refuse the write, as a broken disk would."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT_FILES, tmp_path / "runs.db"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.split() == ["Unavailable", "1", "2"]
    assert "a commit failed" in done.stderr
    assert rows(tmp_path / "runs.db", "SELECT version, last_seq FROM heads") == [(2, 2)]
    assert rows(tmp_path / "runs.db", "PRAGMA integrity_check") == [("ok",)]


class BrokenDisk(sqlite3.Connection):
    """A connection whose next commits end in an I/O error: after they were stored, or without."""

    stores: tuple[bool, ...] = ()
    blind = False

    def execute(self, sql, *args):
        if self.blind and sql.startswith("SELECT run, version"):
            raise self.fault("disk I/O error")
        if sql != "COMMIT" or not self.stores:
            return super().execute(sql, *args)
        stored, *self.stores = self.stores
        super().execute("COMMIT" if stored else "ROLLBACK")
        raise self.fault("disk I/O error")

    def fault(self, text):
        error = sqlite3.OperationalError(text)
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        return error


class Broken:
    """A writer on a broken disk, and what it told."""

    def __init__(self, path, make):
        prepare(path)
        self.disk = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=BrokenDisk)
        prepare_writer(self.disk, None)
        self.told = []
        self.writer = Writer(Transaction(self.disk, time.time, 1), self.told.append)
        self.writer.start()
        self.make = make

    def append(self, name, seq, expect):
        future = asyncio.get_running_loop().create_future()
        self.writer.submit(Append(self.make.key(name), self.make.frame(seq), expect, True, future))
        return future

    async def do(self, function):
        call = Call(function, full=True, unwanted=None)
        self.writer.submit(call)
        return await call.wait()


@pytest.fixture
async def broken(tmp_path, make):
    """Runs r1 and r2 behind a writer on a disk that breaks when told to."""
    store = SqliteStore(tmp_path / "runs.db")
    await store.open()
    for name in ("r1", "r2"):
        await store.create(make.new(name))
    await store.close()
    made = Broken(tmp_path / "runs.db", make)
    yield made
    made.writer.finish()
    await asyncio.to_thread(made.writer.join)


async def test_a_commit_that_was_stored_though_it_failed_counts_as_stored(broken):
    """Reading the tail finds one's own frame: success, and the followers are told."""
    broken.disk.stores = (True,)
    assert await outcome(broken.append("r1", 1, 0)) == 1
    assert [frame.first_seq for effects in broken.told for _, frame in effects.frames] == [1]
    assert await outcome(broken.append("r1", 2, 1)) == 2


async def test_a_commit_that_failed_and_was_not_stored_is_tried_once_more(broken):
    """The same version means another try, of the whole batch in its order."""
    broken.disk.stores = (False,)
    sent = [broken.append("r1", 1, 0), broken.append("r1", 2, 1), broken.append("r2", 1, 0)]
    assert [await outcome(one) for one in sent] == [1, 2, 1]
    seqs = [frame.first_seq for effects in broken.told for _, frame in effects.frames]
    assert sorted(seqs) == [1, 1, 2]


async def test_a_commit_that_fails_twice_stores_nothing_and_says_so(broken):
    """Unavailable, the log is as it was, and when the disk works again the same append does too."""
    broken.disk.stores = (False, False)
    assert await outcome(broken.append("r1", 1, 0)) is Unavailable
    assert broken.told[-1].frames == []
    assert await outcome(broken.append("r1", 1, 0)) == 1


async def test_a_commit_of_which_nothing_can_be_learned_is_ambiguous(broken):
    """The tail cannot be read either, or the batch moved no log: its callers must find out themselves."""
    broken.disk.stores = (True,)
    broken.disk.blind = True
    assert await outcome(broken.append("r1", 1, 0)) is Ambiguous
    broken.disk.blind = False
    broken.disk.stores = (True,)
    put = broken.do(lambda tx: tx.connection.execute("INSERT INTO settings VALUES ('t', 'n', x'', 1)"))
    assert await outcome(put) is Ambiguous
    assert await outcome(broken.append("r1", 2, 1)) == 2


async def test_a_read_only_file_is_unavailable(tmp_path, make):
    """Neither opened for reading only in secret, nor a crash later: the text names the file."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    await store.close()
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "ro"
    folder.mkdir()
    bound = libc.mount(os.fsencode(tmp_path), os.fsencode(folder), None, 4096, None) == 0
    if not bound or libc.mount(None, os.fsencode(folder), None, 4096 | 32 | 1, None) != 0:
        pytest.skip("nothing can be mounted read-only here, and permissions do not bind this user")
    try:
        with pytest.raises(StoreError, match=r"runs\.db"):
            await SqliteStore(folder / "runs.db").open()
    finally:
        libc.umount2(os.fsencode(folder), 2)
    await store.open()
    await store.close()


@pytest.mark.parametrize("version", [None, 1, 2])
async def test_many_processes_may_make_or_migrate_the_file_at_once(tmp_path, version):
    """Each finds it new, empty, older, or ready; one makes it, in one step, and nobody fails."""
    for n in range(4):
        path = tmp_path / f"{n}" / "runs.db"
        if version is not None:
            path.parent.mkdir()
            with closing(sqlite3.connect(path)) as connection:
                for step in MIGRATIONS[:version]:
                    connection.executescript(step)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {version}")
        stores = [SqliteStore(path) for _ in range(6)]
        await asyncio.wait_for(asyncio.gather(*(store.open() for store in stores)), 100)
        assert rows(path, "SELECT count(*) FROM owners") == [(6,)]
        await asyncio.gather(*(store.close() for store in stores))


async def test_a_file_that_another_process_is_about_to_change_is_waited_for(tmp_path):
    """Changing its mode meets that process's lock at once; the opening goes on when the lock is gone."""
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        other.execute("BEGIN IMMEDIATE")
        store = SqliteStore(path)
        opening = asyncio.create_task(store.open())
        await asyncio.sleep(0.3)
        assert not opening.done()
        other.execute("ROLLBACK")
        await asyncio.wait_for(opening, 100)
    await store.close()


async def test_damage_met_while_reading_is_told_and_other_runs_go_on(tmp_path, make, writer):
    """Start-up reads a large file not to its end: a run whose pages are broken is Unavailable, the process lives."""
    path = tmp_path / "runs.db"
    store = SqliteStore(path)
    await store.open()
    logs = {}
    for name, text in (("broken", "DAMAGED "), ("whole", "kept ")):
        await store.create(make.new(name))
        logs[name] = writer(store, make.key(name))
        for _ in range(40):
            await logs[name].add(text=text * 1500)
    await store.close()
    await store.open()
    with path.open("r+b") as file:
        content = file.read()
        for page in range(0, len(content), 4096):
            if b"DAMAGED DAMAGED" in content[page : page + 4096]:
                file.seek(page)
                file.write(b"\xff" * 4096)
    with pytest.raises(Unavailable):
        await store.read(logs["broken"].key, 0, limit=10_000_000)
    with pytest.raises(Unavailable):
        await anext(store.follow(logs["broken"].key, 0))
    assert len(await store.read(logs["whole"].key, 0, limit=10_000_000)) == 40
    await store.create(make.new("next"))
    await store.close()


async def test_an_opening_that_is_given_up_leaves_the_file_to_others(tmp_path, until):
    """Its locks and connections are given back, whenever its caller leaves."""
    if sys.platform != "linux":
        pytest.skip("this system does not list a process's open files")
    store = SqliteStore(tmp_path / "runs.db")

    def still_open():
        return [link for link in open_files() if link.startswith(str(tmp_path))]

    for wait in (0.0, 0.001, 0.005, 0.02):
        opening = asyncio.create_task(store.open())
        await asyncio.sleep(wait)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        if not opening.cancelled():
            await store.close()
        await until(lambda: not still_open())
    await store.open()
    await store.close()


def open_files():
    links = []
    for link in FILES.iterdir():
        with suppress(OSError):
            links.append(str(link.readlink()))
    return links


async def test_a_network_filesystem_is_warned_of(tmp_path, caplog):
    """Locks and shared memory do not hold there; a local disk and a local layer say nothing."""
    mounts = tmp_path / "mounts"
    for kind, warned in (("nfs4", True), ("fuse.sshfs", True), ("9p", True), ("ext4", False), ("fuse.mergerfs", False)):
        mounts.write_text(f"server:/x {tmp_path} {kind} rw 0 0\n")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            prepare(tmp_path / f"{kind}.db", mounts)
        assert (f"network filesystem ({kind})" in caplog.text) is warned


async def test_a_link_is_judged_by_where_it_leads(tmp_path, caplog):
    """A path on the local disk may lead to a share."""
    share = tmp_path / "share"
    share.mkdir()
    (tmp_path / "link").symlink_to(share)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {share} cifs rw 0 0\n")
    with caplog.at_level(logging.WARNING):
        prepare(tmp_path / "link" / "runs.db", mounts)
    assert "network filesystem (cifs)" in caplog.text


async def test_a_connection_left_in_a_transaction_starts_anew(tmp_path, make):
    """A rollback that failed must not stop the writer for good."""
    path = tmp_path / "runs.db"
    prepare(path)
    with closing(connect(path)) as connection:
        tx = Transaction(connection, time.time, 1)
        tx.begin(full=False)
        tx.begin(full=False)
        tx.commit()
