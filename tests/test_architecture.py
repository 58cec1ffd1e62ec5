"""The structure of the repository, held by tests: layers, sizes, and what must not be committed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 450
"""Lines of a module; a sitting can read about 400."""


def committed() -> list[Path]:
    """Files git knows of; outside a checkout, every file but what tools have made."""
    git = shutil.which("git")
    if git is not None:
        listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git is not None and listed.returncode == 0 and listed.stdout:
        return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()]
    skipped = {".venv", "node_modules", ".git", "__pycache__"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.parts)]


def test_layers_are_kept() -> None:
    """Every import contract of pyproject.toml holds."""
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_modules_stay_readable() -> None:
    """No hand-written module of the product has grown past what one sitting can read."""
    places = ("server/", "clients/dualclaw_clients/", "proto/python/dualclaw/")
    long = {}
    for path in committed():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and name.startswith(places) and "/v1/" not in name:
            lines = len(path.read_text("utf-8").splitlines())
            if lines > LONGEST:
                long[name] = lines
    assert long == {}


def test_no_module_is_a_drawer() -> None:
    """Names that say nothing do not exist."""
    forbidden = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [p for p in committed() if p.name in forbidden or re.search(r"_v\d+\.py$", p.name)] == []


def test_nothing_committed_names_a_registry() -> None:
    """Lock files carry hashes and no addresses, so they serve any index."""
    pattern = re.compile(r"https?://[^\s\"']*(?:pypi|pythonhosted|npmjs|proxy\.golang|repo1?\.maven|deb\.debian)")
    found = []
    for path in committed():
        if path.suffix in {".png", ".binpb"} or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert found == []


def test_only_the_settings_read_the_environment() -> None:
    """Services learn their settings in one place each; nothing deeper looks at the environment."""
    readers = set()
    for path in committed():
        name = path.relative_to(ROOT).as_posix()
        product = name.startswith(("server/dualclaw_server/", "clients/dualclaw_clients/", "proto/python/dualclaw/"))
        if product and path.suffix == ".py" and re.search(r"\bos\.(environ|getenv)\b", path.read_text("utf-8")):
            readers.add(name)
    allowed = {
        "server/dualclaw_server/settings.py",
        "server/dualclaw_server/__main__.py",  # hands it to settings
        "clients/dualclaw_clients/settings.py",
    }
    assert readers <= allowed


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "Makefile", "Dockerfile", ".ci/run"])
def test_what_a_newcomer_looks_for_is_there(name: str) -> None:
    """The files every reader expects exist and are not empty."""
    assert (ROOT / name).stat().st_size > 100
