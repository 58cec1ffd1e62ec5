"""The TypeScript client: its own tests against the vectors and a live engine."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.toolchains import require

from .conftest import ROOT, LiveEngine

FOLDER = ROOT / "clients/typescript"


@pytest.fixture(scope="module")
def built() -> str:
    """Install the locked packages and compile; returns node."""
    node, npm = require("node"), require("npm")
    if not (FOLDER / "node_modules/.package-lock.json").exists():
        command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, timeout=300)
    done = subprocess.run([npm, "run", "build"], cwd=FOLDER, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return node


@pytest.mark.timeout(1500)
def test_typescript_client(live_engine: LiveEngine, built: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Node's test runner passes, with every golden vector and every live test among what it ran, and none skipped."""
    tests = sorted((FOLDER / "dist/test").glob("*.test.js"))
    done = subprocess.run(
        [built, "--test", "--test-reporter=tap", "--test-concurrency=1", *map(str, tests)],
        cwd=FOLDER,
        env={**os.environ, **live_engine.environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    failed = "\n".join(re.findall(r"^ *not ok .*(?:\n(?! *(?:not )?ok ).*)*", done.stdout, re.MULTILINE))
    assert done.returncode == 0, failed[-8000:] + done.stderr[-4000:]
    passed = re.findall(r"^ *ok \d+ - (.*)$", done.stdout, re.MULTILINE)
    vectors = sum(len(json.loads(path.read_text())) for path in (ROOT / "proto/vectors").glob("*.json"))
    live = sum(name.startswith(("live ", "live:")) for name in passed)
    assert "# SKIP" not in done.stdout
    assert sum(name.startswith("golden ") for name in passed) == vectors + 1  # and the test around them
    assert live >= 12
    with capsys.disabled():
        sys.stdout.write(f"\ntypescript: {len(passed)} tests, {vectors} of them golden vectors, {live} live\n")


@pytest.mark.timeout(1500)
def test_generated_typescript_is_that_of_the_protos(built: str, tmp_path: os.PathLike[str]) -> None:
    """The committed stubs are what the generator makes of the protos."""
    buf = ROOT / ".venv/bin/buf"
    template = json.dumps(
        {
            "version": "v2",
            "plugins": [
                {
                    "local": str(FOLDER / "node_modules/.bin/protoc-gen-es"),
                    "out": os.fspath(tmp_path),
                    "opt": ["target=ts", "import_extension=js"],
                }
            ],
        }
    )
    command = [buf if buf.exists() else require("buf"), "generate", "proto", "--path", "proto/dualclaw/v1"]
    subprocess.run([*command, "--template", template], cwd=ROOT, check=True, capture_output=True, timeout=300)
    done = subprocess.run(
        ["diff", "-r", os.fspath(tmp_path), FOLDER / "src/gen"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
