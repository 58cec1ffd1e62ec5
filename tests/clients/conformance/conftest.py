"""A good engine of its own process, with two tenants and a control that kills it, and what tests hold against it."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nats_servers import free_port

ROOT = Path(__file__).resolve().parents[3]
KEY, OTHER_KEY = "key-a", "key-b"


class GoodEngine:
    """Our engine with the kit's agent, at a fixed loopback port, its store on disk."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        keys = [
            {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": key, "subject": key, "roles": ["user"]}
            for key in (KEY, OTHER_KEY)
        ]
        (folder / "keys.json").write_text(json.dumps(keys))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "OTEL_"))}
        self.environment = clean | {
            "DUALCLAW_AGENTS": "examples.conformance:AGENTS",
            "DUALCLAW_MODEL": "scripted",
            "DUALCLAW_LISTEN": self.address,
            "DUALCLAW_STORE": f"sqlite:{folder / 'runs.db'}",
            "DUALCLAW_KEYS_FILE": str(folder / "keys.json"),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def restart_command(self) -> str:
        """Shell command that kills the engine and starts it again; the new one is known by its own file."""
        pid, log = self._folder / "pid", self._folder / "engine.log"
        start = f"{sys.executable} -m dualclaw_server >{log}.2 2>&1 & echo $! >{pid}"
        return f"kill -9 $(cat {pid}); {start}"

    def start(self) -> None:
        """Start it and wait until it listens."""
        with (self._folder / "engine.log").open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "dualclaw_server"], env=self.environment, stdout=log, stderr=log
            )
        (self._folder / "pid").write_text(str(self._child.pid))
        host, port = self.address.split(":")
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((host, int(port)), 1).close()
            except OSError:
                text = (self._folder / "engine.log").read_text()
                assert self._child.poll() is None, f"the engine did not start: {text}"
                assert time.monotonic() < until, text
                time.sleep(0.05)
            else:
                return

    def close(self) -> None:
        """End it, and the one a restart has made."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(60)
        pid = int((self._folder / "pid").read_text())
        if self._child is not None and pid != self._child.pid:
            subprocess.run(["kill", "-9", str(pid)], check=False)


@pytest.fixture(scope="session")
def good_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoodEngine]:
    """A started engine for all tests of the kit; each starts runs of its own and leaves them behind."""
    engine = GoodEngine(tmp_path_factory.mktemp("good"))
    engine.start()
    yield engine
    engine.close()
