"""docs/durability.md, held to the table of failpoints and to the engine."""

import asyncio
import re
from pathlib import Path

from dualclaw_server.engine.tool import Tool

from .failing_parts import KINDS
from .failpoints import ROWS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "durability.md").read_text("utf-8")


def first_cells(heading: str) -> list[str]:
    """Return the first column of the first table under a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_crash_matrix_is_the_one_that_is_swept() -> None:
    """Every row of the page has failpoints, or is the frozen server, and every failpoint has a row."""
    assert set(first_cells("The crash matrix")) == {*ROWS, "worker frozen, then back"}


def test_the_page_explains_each_effect_class() -> None:
    """The table for tool authors has the classes that the engine knows."""
    assert [cell.split("`")[1] for cell in first_cells("What a tool author must decide")] == list(KINDS)


async def test_the_pages_tool_can_be_asked_what_it_did() -> None:
    """The block of the page makes a tool with a lookup, which knows nothing of a key that was never used."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {"__name__": "durability_page"}
    exec(compile(source, "durability.md", "exec", dont_inherit=True), names)  # noqa: S102
    made = names["send_mail"]
    assert isinstance(made, Tool)
    assert made.effect == "reconcile"
    assert made.lookup is not None
    async with asyncio.timeout(5):
        assert await made.lookup("never") is None
