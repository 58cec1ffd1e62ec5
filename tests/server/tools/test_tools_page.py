"""The page on tools says what is so: its snippets run, one after the other."""

import re
from pathlib import Path

from dualclaw_server.engine.agent import Agent

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tools.md"


def test_every_snippet_of_the_page_runs(tmp_path: Path) -> None:
    """In a folder with a skill and a document, all names the page uses exist and make agents."""
    (tmp_path / "skills/cooking").mkdir(parents=True)
    (tmp_path / "skills/cooking/SKILL.md").write_text("---\nname: cooking\ndescription: Cooks.\n---\nCook.", "utf-8")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/wine.md").write_text("# Wine\n\nRed or white.", "utf-8")
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, object] = {"__name__": "page"}
    for given in snippets:
        snippet = given.replace('Path("', f'Path("{tmp_path}/')
        exec(compile(snippet, str(PAGE), "exec", dont_inherit=True), names)  # noqa: S102  # our own page
    agents = [made for made in names.values() if isinstance(made, Agent)]
    assert len(agents) == 7
    assert [tool.name for tool in agents[0].tools] == ["book"]
