"""Which processes use the file, and which of them live: an OS lock each, and a bell for newcomers.

A process is a row in ``owners`` and a lock on the byte of that number in the file ``...-owners``. The
kernel gives the lock back when the process dies, however it dies, and it knows nothing of process ids, so
this holds across containers too: it is the kind of lock SQLite itself rests on.

Where the system has them (Linux) these are open-file-description locks. Elsewhere they are POSIX locks,
which a process loses when it closes *any* descriptor of the file: there only one store per process and
file is safe.

A lone process does not poll for others. It sleeps on the named pipe ``...-bell``, which every newcomer
rings after its row is committed. Only a lone process reads the pipe, so nobody else can take its ring.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import struct
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_FLOCK = struct.Struct("hhqqi4x")
_OFD_GET: int | None = getattr(fcntl, "F_OFD_GETLK", None)
_OFD_SET: int | None = getattr(fcntl, "F_OFD_SETLK", None)


class OwnerLocks:
    """The locks of one process on the owners file; it keeps a single descriptor."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(f"{path}-owners", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mine: set[int] = set()

    def take(self, owner: int) -> None:
        """Lock one's own number; nobody else uses it."""
        if _OFD_SET is not None:
            fcntl.fcntl(self._file, _OFD_SET, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, owner, 1, 0))
        else:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, owner)
        self._mine.add(owner)

    def lives(self, owner: int) -> bool:
        """Return whether the process with this number still holds its lock."""
        if owner in self._mine:
            return True
        if _OFD_GET is not None:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, owner, 1, 0)
            kind: int = _FLOCK.unpack(fcntl.fcntl(self._file, _OFD_GET, asked))[0]
            return kind != fcntl.F_UNLCK
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, owner)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return True
            raise
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, owner)
        return False

    def close(self) -> None:
        """Give all locks back."""
        os.close(self._file)


class PipeBell:
    """The named pipe on which a lone process sleeps, and a wire to wake one's own sleeper."""

    def __init__(self, path: Path) -> None:
        self._own, self._own_end = os.pipe()
        self._pipe = _open_pipe(f"{path}-bell")

    @property
    def is_sure(self) -> bool:
        """Whether a newcomer's ring is heard at once; without a pipe one is noticed late."""
        return self._pipe is not None

    def ring(self) -> None:
        """Wake the lone process, if there is one."""
        if self._pipe is not None:
            with suppress(BlockingIOError):  # full of rings already
                os.write(self._pipe, b"!")

    def wake_own(self) -> None:
        """Wake this process's own sleeper, for good."""
        os.write(self._own_end, b"!")

    def sleep(self, without_pipe: float) -> None:
        """Sleep until a newcomer rings or ``wake_own``; without a pipe that many seconds."""
        wires = select.poll()
        wires.register(self._own, select.POLLIN)
        if self._pipe is None:
            wires.poll(without_pipe * 1000)
            return
        wires.register(self._pipe, select.POLLIN)
        wires.poll()
        with suppress(BlockingIOError):  # woken by the other wire, or another lone process took the ring
            os.read(self._pipe, 4096)

    def close(self) -> None:
        """Close the descriptors."""
        for file in (self._own, self._own_end, self._pipe):
            if file is not None:
                os.close(file)


def _open_pipe(path: str) -> int | None:
    try:
        with suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Read and write at once: opening does not block, and the pipe has always a reader.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        log.warning("no named pipe beside the database (%s): other processes are noticed a few seconds late", error)
        return None
