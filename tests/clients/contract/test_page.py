"""docs/contract-gate.md and docs/a2a.md, held to what they show."""

import re

from dualclaw_clients.a2a.settings import A2aSettings
from dualclaw_clients.contract_check.rules import RULES
from dualclaw_clients.settings import ClientSettings, variables_of

from .conftest import ROOT


def test_the_page_has_every_rule_with_its_words() -> None:
    """The table of the page is the table of the code."""
    page = (ROOT / "docs/contract-gate.md").read_text("utf-8")
    rows = re.findall(r"^\| ([A-Z0-9_]+) \| (.+) \|$", page, re.MULTILINE)
    assert rows == [(rule.id, rule.text) for rule in RULES]
    assert f"{len(RULES)} rules beyond it" in page


def test_the_a2a_page_has_every_setting() -> None:
    """A variable that is not on the page is not found."""
    page = (ROOT / "docs/a2a.md").read_text("utf-8")
    own = set(variables_of(A2aSettings)) - set(variables_of(ClientSettings))
    assert own == set(re.findall(r"`(DUALCLAW_A2A_[A-Z_]+)`", page))
