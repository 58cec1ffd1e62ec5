"""Real servers that die on purpose: a nursery of processes, a folder for each case, and the table of outcomes.

``pytest tests/chaos`` runs the quick sweep: every point once. ``--whole`` adds what is marked slow: every point with
every effect class and count, and the chaos runs; ``--long`` makes those long, ``--seed N`` repeats one.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.nats_servers import nats_r1, nats_r3

from .processes import Nursery
from .stage import Stage

__all__ = ["nats_r1", "nats_r3"]

HERE = Path(__file__).parent
ROWS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known only when this folder is what is tested; elsewhere the defaults hold."""
    group = parser.getgroup("chaos")
    group.addoption("--whole", action="store_true", help="the whole sweep and the chaos runs (minutes)")
    group.addoption("--long", action="store_true", help="chaos runs of ten minutes, with 200 runs and 400 clients")
    group.addoption("--seed", type=int, default=None, help="seed of the chaos runs, as an earlier one has printed it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes, unless it is asked for."""
    if config.getoption("--whole", False):
        return
    slow = [item for item in items if HERE in item.path.parents and item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what came of each case."""
    rows = config.stash.get(ROWS, [])
    if rows and config.getoption("--whole", False):
        terminalreporter.section("outcomes of the kill sweep and the chaos runs")
        for row in rows:
            terminalreporter.write_line(row)


@pytest.fixture
def report(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are printed at the end."""
    return pytestconfig.stash.setdefault(ROWS, [])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nursery() -> AsyncIterator[Nursery]:
    """Where servers come from."""
    async with Nursery() as nursery:
        yield nursery


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder whose name is short enough for the sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="claw-", dir="/tmp"))  # pytest's own are too deep for a socket
    yield path
    shutil.rmtree(path)


@pytest_asyncio.fixture(loop_scope="session")
async def stage(nursery: Nursery, folder: Path) -> AsyncIterator[Stage]:
    """Servers of one test on one store; none is left afterwards."""
    stage = Stage(nursery, folder)
    yield stage
    async with asyncio.timeout(60):
        await stage.close()
