r"""The peers: frameworks we compare with, each in an environment of its own under ``var/bench``.

What is installed is pinned with hashes in ``peers/*.txt``. They were made, and are renewed, by::

    printf '%s\n' WANTS fastapi uvicorn httptools uvloop | uv pip compile - -o tests/bench/peers/NAME.txt
        --universal --generate-hashes --no-header --no-emit-index-url --no-annotate --python-version 3.11

A peer that cannot be installed or started is named in every row that lacks it, with the reason.
"""

import asyncio
import hashlib
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.children import ROOT, BenchError, Child, environment

PINS = Path(__file__).resolve().parent / "peers"
HOMES = ROOT / "var" / "bench"
INSTALL_TIMEOUT = 600.0
START_TIMEOUT = 180.0


@dataclass(frozen=True)
class Peer:
    """A framework: its name, the module of its application, and what its pins were made from."""

    name: str
    module: str
    wants: str
    shown: tuple[str, ...]
    """Distributions whose versions are reported."""


PEERS = (
    Peer("agno", "agno_app", "agno openai", ("agno",)),
    Peer("openai-agents", "openai_agents_app", "openai-agents", ("openai-agents",)),
    Peer("langgraph", "langgraph_app", "langgraph langchain langchain-openai", ("langgraph", "langchain")),
    Peer("pydantic-ai", "pydantic_ai_app", "pydantic-ai-slim[openai]", ("pydantic-ai-slim",)),
)


def versions(peer: Peer) -> dict[str, str]:
    """Return the pinned versions that say what was compared with."""
    pins = [line.split()[0] for line in _pins(peer).read_text("utf-8").splitlines() if "==" in line[:80]]
    found: Mapping[str, str] = dict(pin.split("==", 1) for pin in pins if pin[0] not in "#-")
    return {name: found[name] for name in (*peer.shown, "fastapi", "uvicorn")}


async def install(peer: Peer) -> Path:
    """Return the Python of the peer's environment, made on first use. Raises BenchError with the installer's words."""
    home = HOMES / peer.name
    python, mark = home / "bin" / "python", home / "installed"
    wanted = hashlib.sha256(_pins(peer).read_bytes()).hexdigest()
    if mark.is_file() and mark.read_text("ascii") == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    await _call(sys.executable, "-m", "venv", str(home))
    pinned = ("install", "--quiet", "--require-hashes", "-r", str(_pins(peer)))
    try:
        await _call(sys.executable, "-m", "uv", "pip", *pinned, "--python", str(python))
    except BenchError:  # pip reads settings that uv does not know
        await _call(str(python), "-m", "pip", *pinned)
    mark.write_text(wanted, "ascii")
    return python


async def start(peer: Peer, python: Path, provider: str, folder: Path) -> Child:
    """Start the peer's application under uvicorn. Raises BenchError."""
    command = [str(python), "-m", "uvicorn", f"{peer.module}:app", "--app-dir", str(PINS), "--port", "0"]
    return await Child.start(
        peer.name, [*command, "--no-access-log"], folder, environment(PROVIDER=provider), START_TIMEOUT
    )


def _pins(peer: Peer) -> Path:
    return PINS / f"{peer.name}.txt"


async def _call(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment(UV_SYSTEM_CERTS="1"), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(INSTALL_TIMEOUT):
            said, _ = await process.communicate()
    except TimeoutError:
        raise BenchError(f"installing took longer than {INSTALL_TIMEOUT:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode("utf-8", "replace").strip().splitlines()
        raise BenchError(f"cannot be installed: {' | '.join(lines[-2:])}")
