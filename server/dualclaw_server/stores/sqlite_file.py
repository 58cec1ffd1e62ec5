"""The database file: whose it is, in which version, where it lies, and how a connection to it is made.

A file is looked at read-only before anything is written: one that is not ours, is damaged or comes from a
newer release is refused with a text that says so, and stays as it was.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from dualclaw_server.engine.store import Full, StoreError, Unavailable
from dualclaw_server.stores.sqlite_schema import APPLICATION_ID, MIGRATIONS, VERSION

log = logging.getLogger(__name__)

BUSY_TIMEOUT = 10.0
"""Seconds to wait for another process's transaction, unless told otherwise."""

NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "davfs", "webdav", "ceph", "glusterfs"}
    | {"lustre", "beegfs", "orangefs", "gpfs", "9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs", "osxfs", "drvfs"}
)
"""Shared with other machines, or with the host of a virtual one; ``fuse.*`` counts as such but for the local ones."""
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.bindfs", "fuse.encfs", "fuse.gocryptfs"})
_CHECKED_WHOLE = 16 << 20
_WAL_PAGES = 4000
_PAUSE = 0.02


def connect(path: Path, *, read_only: bool = False, timeout: float = BUSY_TIMEOUT) -> sqlite3.Connection:
    """Open a connection in autocommit mode that any one thread at a time may use.

    A read-only one sees what is committed but cannot write; a writing one still needs ``prepare_writer``, and
    waits ``timeout`` seconds for another process's transaction.
    """
    mode = "ro" if read_only else "rw"
    return sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?mode={mode}",
        uri=True,
        timeout=timeout,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )


def primary_code(error: sqlite3.Error) -> int:
    """Return the code of an error of SQLite without its details; 0 when it is one of Python's module."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def store_error(error: sqlite3.Error) -> StoreError:
    """Return what an error of SQLite means for a caller; nothing was stored."""
    full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHMSIZE
    if full or primary_code(error) == sqlite3.SQLITE_FULL:
        return Full(f"the database has no room: {error}")
    return Unavailable(f"the database does not answer: {error}")


def prepare(path: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Make the file ready for use: create it, or bring an older one up to date.

    Raises:
        StoreError: it is not ours, damaged, or newer than this code; the file is unchanged.
        Unavailable: it cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            _inspect(path)
        else:
            # Conversations are private: the database, and with it its side files, gets these permissions.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        _warn_of_network(path, mounts)
        deadline = time.monotonic() + BUSY_TIMEOUT
        while not _made_ready(path):
            if time.monotonic() > deadline:
                raise Unavailable(f"{path} cannot be opened: another process keeps it locked")
            time.sleep(_PAUSE)
    except sqlite3.DatabaseError as error:
        if primary_code(error) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise StoreError(f"{path} is not a usable SQLite database: {error}") from error
        raise Unavailable(f"{path} cannot be opened: {error}") from error
    except OSError as error:
        raise Unavailable(f"{path} cannot be opened: {error}") from error


def _made_ready(path: Path) -> bool:
    """Bring the file into the mode and the version of this code; False when another process is in the way.

    SQLite waits for that process by itself, except while one of them changes the mode.
    """
    with closing(connect(path)) as connection:
        try:
            # Only before the first page is written; else a no-op.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            _migrate(connection)
        except sqlite3.OperationalError as error:
            if primary_code(error) != sqlite3.SQLITE_BUSY:
                raise
            return False
    return True


def prepare_writer(connection: sqlite3.Connection, max_bytes: int | None) -> None:
    """Set what a writing connection needs; ``max_bytes`` limits the size of the file."""
    connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * 4096}")
    connection.execute("PRAGMA synchronous = NORMAL")
    if max_bytes is not None:
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_size)}")


def settle(path: Path) -> None:
    """Leave one file behind: SQLite folds the log in when the last connection closes, if that one can write."""
    try:
        with closing(connect(path)) as connection:
            connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:  # the log stays beside the file, which is just as good for the next start
        log.warning("%s keeps its log file: %s", path, error)


def _inspect(path: Path) -> None:
    with closing(connect(path, read_only=True)) as connection:
        (owner,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if owner != APPLICATION_ID and (owner or version or tables):
            raise StoreError(f"{path} is a database of another program; it was left as it is")
        if version > VERSION:
            raise StoreError(
                f"{path} was written by a newer dualclaw (format {version}, this one knows {VERSION}); upgrade this one"
            )
        if path.stat().st_size <= _CHECKED_WHOLE:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise StoreError(f"{path} is damaged ({verdict}); it was left as it is, restore it from a backup")


def _migrate(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        for step in MIGRATIONS[version:]:
            for statement in step.split(";"):
                connection.execute(statement)
        if version < VERSION:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _warn_of_network(path: Path, mounts: Path) -> None:
    kind = filesystem_of(path.resolve(), mounts)
    if kind in NETWORK_FILESYSTEMS or (kind.startswith("fuse.") and kind not in LOCAL_FUSE):
        log.warning("%s lies on a network filesystem (%s): SQLite may lose data there; use a local disk", path, kind)


def filesystem_of(path: Path, mounts: Path) -> str:
    """Return the kind of filesystem a path is on, after the mount table; empty where there is none."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        if (path == Path(mount) or Path(mount) in path.parents) and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind
