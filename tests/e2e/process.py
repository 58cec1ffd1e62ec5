"""A service of ours as a process of its own."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


class Process:
    """A service of ours as a child process; ``address`` is where it says it listens."""

    def __init__(self, module: str, environment: Mapping[str, str], folder: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "OTEL_"))}
        self._module = module
        # What a test does not choose is the script, whatever is installed: its answers are known.
        self._environment = {**clean, "PYTHONUNBUFFERED": "1", "DUALCLAW_MODEL": "scripted", **environment}
        self._folder = folder
        self.log = folder / f"{module}.log"
        self.child: subprocess.Popen[str] | None = None
        self.address = ""
        self._kept: socket.socket | None = None

    def start(self) -> "Process":
        with self.log.open("a") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", self._module],
                env=self._environment,
                cwd=self._folder,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        found = re.search(r"listening on (\S+)", line)
        assert found, f"{self._module} did not start: {line!r}\n{self.log.read_text()}"
        self.address = found[1]
        return self

    def logged(self) -> str:
        """What it has written to stderr."""
        return self.log.read_text()

    def kill(self) -> None:
        """End it as a crash does. Its port is kept for one that is started in its place."""
        assert self.child is not None
        self.child.kill()
        self.child.wait(60)
        # A socket that is bound and does not listen: who connects is refused, a server may listen there beside it, and
        # the system gives the port to no outgoing connection meanwhile.
        host, _, port = self.address.rpartition("/")[2].rpartition(":")
        if self._kept is None and port.isdigit():
            self._kept = socket.socket()
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._kept.bind((host, int(port)))

    def stop(self) -> int:
        """End it as an operator does; returns the exit code."""
        if self._kept is not None:
            self._kept.close()
        if self.child is None:
            return 0
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            raise
        finally:
            if self.child.stdout is not None:
                self.child.stdout.close()


Launcher = Callable[..., Process]
