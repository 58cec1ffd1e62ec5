"""Who holds a claim in a state file, and whether they still live.

Whether an owner lives is asked of the operating system: each holds a lock on a file of its own beside the state
file, and the lock goes with the process, however that ends. (A process id would say nothing to another container, and
a heartbeat would expire in a process that is merely slow.)
"""

import fcntl
import os
import uuid
from pathlib import Path


class Owner:
    """One opener of the state file, alive as long as it holds the lock on its own file."""

    def __init__(self, path: str) -> None:
        self.name = uuid.uuid4().hex
        self._path = "" if path == ":memory:" else path
        self._lock = -1
        if self._path:
            self._lock = os.open(self._file_of(self.name), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def lives(self, name: str) -> bool:
        """Return whether the owner of that name still runs."""
        if name == self.name:
            return True
        try:
            lock = os.open(self._file_of(name), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def bury(self, name: str) -> None:
        """Remove the file a dead owner has left."""
        Path(self._file_of(name)).unlink(missing_ok=True)

    def bury_others(self) -> None:
        """Remove the files of all dead owners; whoever misses their file knows the same."""
        if not self._path:
            return
        start, end = Path(self._path).name + ".", ".lock"
        for file in Path(self._path).parent.iterdir():
            if file.name.startswith(start) and file.name.endswith(end):
                name = file.name[len(start) : -len(end)]
                if not self.lives(name):
                    self.bury(name)

    def end(self) -> None:
        """Give up the lock: this owner is dead for all others."""
        if self._lock >= 0:
            self.bury(self.name)
            os.close(self._lock)
            self._lock = -1

    def _file_of(self, name: str) -> str:
        return f"{self._path}.{name}.lock"
