"""What is missing is told: loudly on a developer's machine, as a failure in CI."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, environment: Mapping[str, str]) -> str:
    """Run a test for which a program is missing; returns what pytest says of it."""
    test = "from tests.toolchains import require\n\n\ndef test_it():\n    require('no-such-program')\n"
    (folder / "test_it.py").write_text(test)
    clean = {name: value for name, value in os.environ.items() if name != "REQUIRE_TOOLCHAINS"}
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    environment = {**clean, **environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


@pytest.mark.parametrize(
    ("environment", "outcome"), [({}, "1 skipped"), ({"REQUIRE_TOOLCHAINS": "1"}, "1 failed")], ids=["here", "CI"]
)
def test_a_missing_program_is_a_skip_here_and_a_failure_in_ci(
    tmp_path: Path, environment: Mapping[str, str], outcome: str
) -> None:
    """With its name, and with what that means."""
    told = run(tmp_path, environment)
    assert outcome in told
    assert "no-such-program is not installed, so what this test proves was NOT checked" in told


def test_ci_requires_all_toolchains() -> None:
    """Nothing that .ci/run runs is left out for want of a program."""
    assert "\nexport REQUIRE_TOOLCHAINS=1\n" in (ROOT / ".ci/run").read_text()
