"""The search over a folder finds passages by their words, in any language, and names their source."""

from pathlib import Path

import pytest

from dualclaw_server.engine.checkpoint import Checkpoint, RunRecord
from dualclaw_server.engine.store import RunKey
from dualclaw_server.engine.tool import ToolContext
from dualclaw_server.engine.trace import Trace
from dualclaw_server.tools.documents import MAX_HITS, search_documents

TRACE = Trace(RunKey("t", "r"), RunRecord(), Checkpoint(), (), ())
CONTEXT = ToolContext("t", "s", "r", "c", "call", "key", {}, TRACE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.md").write_text("# Bread\n\nFlour, water, salt.\n\n# Cake\n\nFlour, butter, sugar.\n", "utf-8")
    (tmp_path / "deep/b.txt").write_text("面包需要面粉、水和盐。", "utf-8")
    (tmp_path / "c.bin").write_bytes(b"flour")
    return tmp_path


async def ask(folder: Path, query: str) -> str:
    return (await search_documents(folder).call({"query": query}, CONTEXT)).parts[0].text


async def test_passages_come_with_their_source_and_heading(folder: Path) -> None:
    """The best passage is first; other files and sections that do not fit are left out."""
    assert await ask(folder, "butter?") == "[a.md] Cake\nFlour, butter, sugar."
    assert (await ask(folder, "bread flour")).startswith("[a.md] Bread")


@pytest.mark.parametrize("query", ["面包需要", "水和"])
async def test_languages_without_spaces_are_found(folder: Path, query: str) -> None:
    """Chinese text is found by any piece of it, however short."""
    assert await ask(folder, query) == "[deep/b.txt] \n面包需要面粉、水和盐。"


@pytest.mark.parametrize("query", ['butter" OR "x', "butter NEAR(", "body:butter*", "'; DROP TABLE passages; --butter"])
async def test_a_query_is_nothing_but_words(folder: Path, query: str) -> None:
    """The search language of the index cannot be reached from outside."""
    assert "butter" in await ask(folder, query)


async def test_finding_nothing_is_an_answer_and_no_words_an_error(folder: Path) -> None:
    """The model is told plainly in both cases."""
    assert await ask(folder, "zeppelin") == "No document mentions zeppelin."
    with pytest.raises(Exception, match="no words"):
        await ask(folder, "?!")


async def test_hits_are_bounded(tmp_path: Path) -> None:
    """However many passages fit, the model gets the best few."""
    (tmp_path / "a.txt").write_text("\n\n".join(f"# n{n}\n\nflour" for n in range(50)), "utf-8")
    assert (await ask(tmp_path, "flour")).count("[a.txt]") == MAX_HITS


def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    """A missing or empty folder is refused when the tool is made."""
    with pytest.raises(ValueError, match="no folder"):
        search_documents(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no document"):
        search_documents(tmp_path)
