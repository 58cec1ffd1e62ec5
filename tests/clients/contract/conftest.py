"""Copies of the protos that tests may break."""

import shutil
from pathlib import Path

import pytest

from dualclaw_clients.contract_check.buf import build, find_buf
from dualclaw_clients.contract_check.schema import Schema

ROOT = Path(__file__).resolve().parents[3]
BASELINE = ROOT / "proto/baseline/v0.1.0.binpb"


class Protos:
    """A copy of the protos and their vectors, with a buf.yaml."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(ROOT / "buf.yaml", folder)
        shutil.copytree(ROOT / "proto/dualclaw", folder / "proto/dualclaw")
        shutil.copytree(ROOT / "proto/vectors", folder / "proto/vectors", ignore=shutil.ignore_patterns("*.py"))

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace a text that occurs in a file; the test is void when it does not."""
        path = self.folder / "proto" / file
        text = path.read_text("utf-8")
        assert old in text, f"{old!r} is not in {file}"
        path.write_text(text.replace(old, new, 1), "utf-8")

    def schema(self) -> Schema:
        """Return what they declare."""
        return build(find_buf(), str(self.folder))


@pytest.fixture
def protos(tmp_path: Path) -> Protos:
    """A copy of today's protos."""
    return Protos(tmp_path)


@pytest.fixture(scope="session")
def baseline() -> Schema:
    """The released contract."""
    return build(find_buf(), str(BASELINE))
