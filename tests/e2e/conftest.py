"""Real processes on free loopback ports: engine, web gateway, IM console, foreign clients."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest

from dualclaw_clients.engine_client import EngineClient
from tests.toolchains import require

ROOT = Path(__file__).resolve().parents[2]
NODE = ROOT / "tests/e2e/node"
START_TIMEOUT = 30.0


class Process:
    """A service of ours as a child process; ``address`` is where it says it listens."""

    def __init__(self, module: str, environment: Mapping[str, str], folder: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "OTEL_"))}
        self._module = module
        self._environment = {**clean, "PYTHONUNBUFFERED": "1", **environment}
        self._folder = folder
        self.log = folder / f"{module}.log"
        self.child: subprocess.Popen[str] | None = None
        self.address = ""

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
        """End it as a crash does."""
        assert self.child is not None
        self.child.kill()
        self.child.wait(10)

    def stop(self) -> int:
        """End it as an operator does; returns the exit code."""
        if self.child is None:
            return 0
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(15)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            raise
        finally:
            if self.child.stdout is not None:
                self.child.stdout.close()


Launcher = Callable[..., Process]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """Start services: ``launch("dualclaw_server", DUALCLAW_MODEL=...)``; all are ended afterwards."""
    started: list[Process] = []

    def launcher(module: str, **environment: str) -> Process:
        process = Process(module, environment, tmp_path)
        started.append(process)
        return process.start()

    yield launcher
    for process in reversed(started):
        process.stop()


@pytest.fixture
def write_script(tmp_path: Path) -> Callable[..., str]:
    """Write a script of turns; returns the model's setting that plays it."""

    def write(*turns: dict[str, object]) -> str:
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"name": "e2e", "turns": list(turns)}, ensure_ascii=False), "utf-8")
        return f"scripted:{path}"

    return write


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], EngineClient]]:
    """Make clients that are closed afterwards."""
    clients: list[EngineClient] = []

    def connector(target: str) -> EngineClient:
        clients.append(EngineClient(target))
        return clients[-1]

    yield connector
    await asyncio.gather(*[client.close() for client in clients])


@pytest.fixture(scope="session")
def node() -> str:
    """Return node, with the packages of tests/e2e/node installed from its lock file."""
    path, npm = require("node"), require("npm")
    if not (NODE / "node_modules" / ".package-lock.json").exists():
        subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=NODE, check=True, capture_output=True, timeout=300)
    return path


async def run_command(*command: str, cwd: Path = ROOT, stdin: bytes = b"", **environment: str) -> tuple[int, str, str]:
    """Run a command to its end; returns exit code, stdout, stderr."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUALCLAW_")}
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**clean, **environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            out, err = await child.communicate(stdin)
    except TimeoutError:
        child.kill()
        raise
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()
