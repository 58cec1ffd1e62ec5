"""What a newcomer types: the demo, and serving until Ctrl-C."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import httpx

from dualclaw_clients.engine_client import EngineClient

from .conftest import ROOT, Launcher, run_command


async def test_the_demo_shows_a_tool_and_an_answer(tmp_path: Path) -> None:
    """One command asks a question that needs a tool, prints the step with its result and the answer, exits 0."""
    local = str(ROOT / "deploy/local.py")
    code, out, err = await run_command(sys.executable, local, "--ask", "What is 17 * 23?", cwd=tmp_path)
    assert code == 0, err
    assert "17 * 23 = 391" in out
    assert re.search(r"calculate.*391", out + err)
    assert os.listdir(tmp_path) == []


async def test_serving_ends_in_order_with_ctrl_c(tmp_path: Path) -> None:
    """Engine and page answer at the printed addresses; one Ctrl-C ends both, quietly."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "deploy/local.py"),
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "DUALCLAW_LISTEN": "127.0.0.1:0", "DUALCLAW_WEB_LISTEN": "127.0.0.1:0"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        text = ""
        async with asyncio.timeout(30):
            while "Ctrl-C" not in text:
                text += (await child.stdout.readline()).decode()
        engine = re.search(r"engine\s+(\S+)", text)
        page = re.search(r"page\s+(\S+)", text)
        assert engine
        assert page
        async with EngineClient(engine[1]) as client, httpx.AsyncClient() as http:
            assert await client.check()
            assert (await http.get(page[1])).status_code == 200
        child.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(child.communicate(), 30)
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode == 0
    assert "Traceback" not in err.decode()
    assert (tmp_path / "var/dualclaw.db").exists()


async def test_health_tells_a_serving_engine_from_none(launch: Launcher) -> None:
    """What a container asks: exit code 0 while the engine serves, 4 when nobody answers."""
    engine = launch("dualclaw_server", DUALCLAW_LISTEN="127.0.0.1:0", DUALCLAW_STORE="memory:")
    health = [sys.executable, "-m", "dualclaw_clients.cli", "--engine", engine.address, "health"]
    code, out, _ = await run_command(*health)
    assert (code, out) == (0, f"{engine.address}: serving\n")
    engine.stop()
    code, out, _ = await run_command(*health)
    assert (code, out) == (4, f"{engine.address}: not serving\n")
