"""Real processes on free loopback ports: engine, web gateway, IM console, foreign clients."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

from dualclaw_clients.engine_client import EngineClient
from tests.toolchains import require

from .chat import PATIENCE, RECORDER, Chat
from .process import Launcher, Process

__all__ = ["NODE", "ROOT", "Launcher", "Open", "Process", "run_command"]

ROOT = Path(__file__).resolve().parents[2]
NODE = ROOT / "tests/e2e/node"
BROWSER_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

Open = Callable[..., Awaitable[Chat]]


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One Chromium for all tests of a module."""
    path = require("chromium")
    expect.set_options(timeout=PATIENCE)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def open_chat(browser: Browser, launch: Launcher) -> AsyncIterator[Open]:
    """Open the page in a browser profile of the test's own; in the end no script of it may have failed."""
    faults: list[str] = []

    async def opener(
        engine: Process, web: Process, settings: dict[str, str], folder: Path, *, tenant: str = "default", key: str = ""
    ) -> Chat:
        context = await browser.new_context(
            viewport={"width": 1200, "height": 800},
            reduced_motion="reduce",
            extra_http_headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        context.set_default_timeout(PATIENCE)
        context.on("weberror", lambda error: faults.append(str(error.error)))
        await context.add_init_script(RECORDER)
        chat = Chat(await context.new_page(), engine, web, launch, settings, folder / tenant)
        await chat.page.goto(web.address)
        return chat

    yield opener
    for context in browser.contexts:
        await context.close()
    assert faults == []


async def run_command(*command: str, cwd: Path = ROOT, stdin: bytes = b"", **environment: str) -> tuple[int, str, str]:
    """Run a command to its end; returns exit code, stdout, stderr."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUALCLAW_")}
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**clean, "DUALCLAW_MODEL": "scripted", **environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            out, err = await child.communicate(stdin)
    except TimeoutError:
        child.kill()
        raise
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()
