"""docs/parity.md, held to what it says: each claim names a test that pytest really collects, and nothing is missing."""

import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from dualclaw_server import interceptors
from dualclaw_server.engine.interceptor import HOOKS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
COLUMNS = ["behaviour", "Solon AI", "Eino", "dualclaw", "test"]
AREAS = (
    "Hooks",
    "Built-in interceptors",
    "Human approval",
    "Planning and strategies",
    "Tools",
    "Events and streaming",
    "Model retry and failover",
    "Checkpoint and resume",
    "Cancel",
    "Composition",
    "Sessions and history",
    "Limits",
)
NOTHING = "–"
DECLINED = re.compile(r"(?:not here|later): (.+)")
"""What a cell of ours says where there is nothing to test."""


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    place: str
    """Area and behaviour, to name it by."""
    cells: tuple[str, ...]

    @property
    def ours(self) -> str:
        return self.cells[3]

    @property
    def tests(self) -> list[str]:
        """Node ids, from the root of the repository."""
        return [f"tests/{name}" for name in re.findall(r"`([^`]+::[^`]+)`", self.cells[4])]


def cells_of(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|"))


def read_rows() -> list[Row]:
    """Return all rows of the page, without heads and rules."""
    area, rows = "", []
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("## "):
            area = line.removeprefix("## ")
        elif line.startswith("|"):
            cells = cells_of(line)
            if list(cells) != COLUMNS and set("".join(cells)) != {"-"}:
                rows.append(Row(f"{area}: {cells[0]}", cells))
    return rows


ROWS = read_rows()


def nodes_in(names: list[str]) -> set[str]:
    """Return every name as it is, and without its parameters."""
    return {name for full in names for name in (full, full.partition("[")[0])}


def collect(files: set[str]) -> tuple[set[str], str]:
    """Have pytest collect some files in a process of its own; returns node ids, and what it printed last."""
    there = sorted(name for name in files if (ROOT / name).is_file())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *there]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    return nodes_in([line for line in done.stdout.splitlines() if "::" in line]), done.stdout[-2000:]


def test_the_page_has_a_table_for_each_area() -> None:
    """Nothing was lost while it was edited: all areas are there, in order, and every table has the five columns."""
    lines = PAGE.read_text("utf-8").splitlines()
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == list(AREAS)
    heads = [line for line, after in pairwise(lines) if after.startswith("| ---")]
    assert [list(cells_of(line)) for line in heads] == [COLUMNS] * len(AREAS)
    assert len(ROWS) > 120


def test_every_row_is_whole() -> None:
    """Five cells, none of them empty, and no behaviour twice in its table."""
    assert [row.place for row in ROWS if len(row.cells) != len(COLUMNS) or not all(row.cells)] == []
    places = [row.place for row in ROWS]
    assert [place for place in places if places.count(place) > 1] == []


def test_a_claim_has_a_test_and_what_is_not_there_says_why() -> None:
    """A cell of ours either names a test or begins with "not here:" or "later:" and a reason, never both or neither."""
    wrong = []
    for row in ROWS:
        declined = DECLINED.fullmatch(row.ours)
        said_why = declined is not None and len(declined[1].split()) >= 4 and row.cells[4] == NOTHING
        if bool(row.tests) == said_why or (declined is not None and not said_why):
            wrong.append(row.place)
    assert wrong == []


@pytest.mark.timeout(400)
def test_every_named_test_is_collected(request: pytest.FixtureRequest) -> None:
    """A test that was renamed, moved or lost, or has other parameters now, is missed here."""
    named = {name: row.place for row in ROWS for name in row.tests}
    missing = set(named) - nodes_in([item.nodeid for item in request.session.items])
    said = ""
    if missing:  # this session has only some of them
        found, said = collect({name.partition("::")[0] for name in missing})
        missing -= found
    assert {name: named[name] for name in sorted(missing)} == {}, said


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_row(hook: str) -> None:
    """A hook that is added to the class is compared with the others' too."""
    assert [row for row in ROWS if row.place.startswith("Hooks: ") and row.ours.startswith(f"`{hook}`")]


@pytest.mark.parametrize("name", interceptors.__all__)
def test_every_built_in_has_a_row(name: str) -> None:
    """Whatever the package exports is named where it is compared."""
    assert [row for row in ROWS if f"`{name}`" in row.ours or f"`{name}`s" in row.ours]
