"""Paths and commands of the contract's tests."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The folder of the golden vectors."""
    return ROOT / "proto" / "vectors"


@pytest.fixture(scope="session")
def python() -> Command:
    """Runs this interpreter afresh: ``python(*arguments, cwd=...)``."""
    return _command(sys.executable)


@pytest.fixture(scope="session")
def buf() -> Command:
    """Runs the buf that lies beside this interpreter: ``buf(*arguments, cwd=...)``."""
    return _command(str(Path(sys.executable).parent / "buf"))


def _command(program: str) -> Command:
    def run(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100, check=False)

    return run
