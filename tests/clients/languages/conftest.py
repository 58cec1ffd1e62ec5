"""A real engine for the clients of other languages, which can be killed and started again by whoever tests with it.

Their test programs are told by environment: ``DUALCLAW_ENGINE`` is the engine's address, and a POST to
``DUALCLAW_CONTROL``/kill ends the engine as a crash does and starts it anew at the same address; it answers 204 once
the new one listens. The agent is ``conformance`` of ``examples/conformance.py``. Without these variables the live
tests of a language skip, so that its own tool runs the rest anywhere.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.nats_servers import free_port

ROOT = Path(__file__).resolve().parents[3]


class LiveEngine:
    """An engine on a fixed loopback port with a SQLite store, and the HTTP control that kills it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._log = folder / "engine.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "OTEL_"))}
        self._environment = clean | {
            "DUALCLAW_AGENTS": "examples.conformance:AGENTS",
            "DUALCLAW_MODEL": "scripted",
            "DUALCLAW_LISTEN": self.address,
            "DUALCLAW_STORE": f"sqlite:{folder / 'runs.db'}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        self._child: subprocess.Popen[str] | None = None
        self._control = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._serving = threading.Thread(target=self._control.serve_forever, daemon=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """What test programs are told."""
        host, port = self._control.server_address[:2]
        return {"DUALCLAW_ENGINE": self.address, "DUALCLAW_CONTROL": f"http://{host!s}:{port}"}

    def open(self) -> None:
        """Start engine and control."""
        self._start()
        self._serving.start()

    def close(self) -> None:
        """End both."""
        self._control.shutdown()
        self._control.server_close()
        self._kill()

    def _start(self) -> None:
        with self._log.open("a") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "dualclaw_server"],
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert "listening on" in line, f"the engine did not start: {line!r}\n{self._log.read_text()}"

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait(60)
            assert self._child.stdout is not None
            self._child.stdout.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the library's name
                if self.path != "/kill":
                    self.send_error(404)
                    return
                engine._kill()
                engine._start()
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the library's name
                pass

        return Handler


@pytest.fixture(scope="module")
def live_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    """A started engine of the module's own."""
    engine = LiveEngine(tmp_path_factory.mktemp("live"))
    engine.open()
    yield engine
    engine.close()
