"""What a newcomer types: the demo, and serving until Ctrl-C."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from dualclaw_clients.engine_client import EngineClient
from dualclaw_server.models.local.weights import is_installed
from tests.toolchains import missing

from .conftest import ROOT, Launcher, run_command


async def test_the_demo_shows_a_tool_and_an_answer(tmp_path: Path) -> None:
    """One command asks a question that needs a tool, prints the step with its result and the answer, exits 0."""
    local = str(ROOT / "deploy/local.py")
    code, out, err = await run_command(sys.executable, local, "--ask", "What is 17 * 23?", cwd=tmp_path)
    assert code == 0, err
    assert "17 * 23 = 391" in out
    assert re.search(r"calculate.*391", out + err)
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(1200)
async def test_the_demo_works_with_the_local_model(tmp_path: Path) -> None:
    """With nothing set a model on this machine calls the tool and answers; it is said to be small and often wrong."""
    if not is_installed():
        missing("the local model is not installed (make local)")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DUALCLAW_")}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "deploy/local.py"),
        "--ask",
        "What is 17 * 23?",
        cwd=tmp_path,
        env=clean | {"DUALCLAW_MODEL_TIMEOUT_FIRST_TOKEN": "900", "DUALCLAW_MODEL_TIMEOUT_IDLE": "900"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        raw, errors = await asyncio.wait_for(child.communicate(), 1000)
    finally:
        if child.returncode is None:
            child.terminate()
            await asyncio.wait_for(child.communicate(), 100)
    out, err = raw.decode(), errors.decode()
    assert child.returncode == 0, err
    note, _, answer = out.partition("> What is 17 * 23?")
    assert "often wrong" in note
    assert "DUALCLAW_MODEL=" in note
    assert "loading the local model" in err
    assert "skill calculate" in err
    assert answer.strip()
    assert len([line for line in err.splitlines() if "llama" in line or "fork" in line]) == 0
    assert os.listdir(tmp_path) == []


class Local:
    """``deploy/local.py`` as a person starts it, on free ports, in a folder of its own."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.said = ""

    async def wait_for(self, text: str) -> str:
        """Read on until it has said this; returns all it has said."""
        assert self.child.stdout is not None
        async with asyncio.timeout(100):
            while text not in self.said:
                line = (await self.child.stdout.readline()).decode()
                assert line, f"it ended before it said {text!r}: {self.said}"
                self.said += line
        return self.said

    async def end(self) -> tuple[int | None, str]:
        """Wait until it ends; returns its exit code and stderr."""
        _, err = await asyncio.wait_for(self.child.communicate(), 100)
        return self.child.returncode, err.decode()

    def children(self) -> list[int]:
        """Process ids of its children."""
        pid = self.child.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.asynccontextmanager
async def local(folder: Path, **environment: str) -> AsyncIterator[Local]:
    """Serve while the context lasts."""
    free = {"DUALCLAW_LISTEN": "127.0.0.1:0", "DUALCLAW_WEB_LISTEN": "127.0.0.1:0"}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "deploy/local.py"),
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "DUALCLAW_MODEL": "scripted", **free, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Local(child)
    finally:
        if child.returncode is None:
            child.terminate()
            await asyncio.wait_for(child.communicate(), 100)


def is_alive(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_serving_ends_in_order_with_ctrl_c(tmp_path: Path) -> None:
    """Engine and page answer at the printed addresses; one Ctrl-C ends both, quietly."""
    async with local(tmp_path) as served:
        text = await served.wait_for("Ctrl-C")
        engine = re.search(r"engine\s+(\S+:\d+)", text)
        page = re.search(r"page\s+(http\S+)", text)
        assert engine
        assert page
        async with EngineClient(engine[1]) as client, httpx.AsyncClient() as http:
            assert await client.check()
            assert (await http.get(page[1])).status_code == 200
        served.child.send_signal(signal.SIGINT)
        code, err = await served.end()
    assert code == 0
    assert "Traceback" not in err
    assert (tmp_path / "var/dualclaw.db").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_end_while_it_starts_is_as_quiet_as_any_other(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C before the services are up, or a closed terminal, leaves no traceback and no process behind."""
    async with local(tmp_path) as served:
        await served.wait_for("starting")
        async with asyncio.timeout(100):
            while not (children := served.children()):  # noqa: ASYNC110  # the kernel tells nobody of new processes
                await asyncio.sleep(0.01)
        served.child.send_signal(number)
        code, err = await served.end()
    assert code == 0
    assert "Traceback" not in err
    assert not any(is_alive(pid) for pid in children)


@pytest.mark.parametrize(("victim", "name"), [(0, "dualclaw_server"), (1, "dualclaw_clients.web")])
async def test_a_service_that_dies_is_named_and_ends_the_other(tmp_path: Path, victim: int, name: str) -> None:
    """Nobody is left with half of it running: who ended and how is said, the other one is ended, exit code 1."""
    async with local(tmp_path) as served:
        await served.wait_for("Ctrl-C")
        children = served.children()
        os.kill(children[victim], signal.SIGKILL)
        code, err = await served.end()
    assert code == 1
    assert f"{name} was ended by SIGKILL" in err
    assert "Traceback" not in err
    assert len(children) == 2
    assert not any(is_alive(pid) for pid in children)


async def test_a_service_that_cannot_start_is_named_with_its_exit_code(tmp_path: Path) -> None:
    """The engine's own words say why; the page is not started, nothing hangs."""
    async with local(tmp_path, DUALCLAW_MODEL="nonsense:x") as served:
        code, err = await served.end()
    assert code == 1
    assert re.search(r"dualclaw_server did not start: it ended with exit code \d; its message is above\n$", err)
    assert "dualclaw-server: " in err


async def test_keys_without_a_key_of_ones_own_are_pointed_out(tmp_path: Path) -> None:
    """Serving says where the key belongs; the demo, which could only be refused, refuses before it starts."""
    keys = tmp_path / "keys.json"
    entry = {"key_sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t", "subject": "s", "roles": ["operator"]}
    keys.write_text(json.dumps([entry]))
    local_py = str(ROOT / "deploy/local.py")
    demo = (sys.executable, local_py, "--ask", "What is 17 * 23?")
    code, out, err = await run_command(*demo, cwd=tmp_path, DUALCLAW_KEYS_FILE=str(keys))
    assert (code, out) == (2, "")
    assert "DUALCLAW_API_KEY" in err
    assert len(err.splitlines()) == 1
    code, out, err = await run_command(*demo, cwd=tmp_path, DUALCLAW_KEYS_FILE=str(keys), DUALCLAW_API_KEY="k")
    assert code == 0, err
    assert "17 * 23 = 391" in out
    assert "callers need" not in out
    async with local(tmp_path, DUALCLAW_KEYS_FILE=str(keys)) as served:
        assert "callers need one of its keys" in await served.wait_for("Ctrl-C ends")


async def test_health_tells_a_serving_engine_from_none(launch: Launcher) -> None:
    """What a container asks: exit code 0 while the engine serves, 4 when nobody answers."""
    engine = launch("dualclaw_server", DUALCLAW_LISTEN="127.0.0.1:0", DUALCLAW_STORE="memory:")
    health = [sys.executable, "-m", "dualclaw_clients.cli", "--engine", engine.address, "health"]
    code, out, _ = await run_command(*health)
    assert (code, out) == (0, f"{engine.address}: serving\n")
    engine.stop()
    code, out, _ = await run_command(*health)
    assert (code, out) == (4, f"{engine.address}: not serving\n")
