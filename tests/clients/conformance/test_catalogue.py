"""The table of checks, held together: with its judges, with the protos it points to, with the page and the agent."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, ServiceDescriptor

import dualclaw
from dualclaw.json_text import canonical_json
from dualclaw.rpc import ENGINE_SERVICE
from dualclaw_clients.conformance.catalogue import BY_ID, CHECKS, checks_of
from dualclaw_clients.conformance.check import Check, Target
from dualclaw_clients.conformance.plays import ARGS, PLAYS
from dualclaw_clients.conformance.report import as_markdown
from dualclaw_clients.conformance.verdict import JUDGES
from examples import conformance as example

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "conformance.md").read_text("utf-8")
TARGETS: tuple[Target, ...] = ("engine", "native", "original")


def test_ids_are_unique() -> None:
    """A report, --only and the implied checks name a check by its id alone."""
    assert len(BY_ID) == len(CHECKS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_check_has_a_judge_and_every_judge_a_check(target: Target) -> None:
    """What the table promises of a target is judged, and nothing is judged that the table does not say."""
    assert set(JUDGES[target]) == {check.id for check in checks_of(target)}


def test_implied_checks_exist() -> None:
    """A check that is implied is one of the table, and never the check itself."""
    wrong = {check.id: other for check in CHECKS for other in check.implies if other not in BY_ID or other == check.id}
    assert wrong == {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_a_check_points_to_what_the_protos_have(check: Check) -> None:
    """The place a check points to is a message, field, enum value or rpc of the contract."""
    owner, _, name = check.place.partition(".")
    pool = dualclaw.EngineEvent.DESCRIPTOR.file.pool
    if owner == "EngineService":
        service: ServiceDescriptor = pool.FindServiceByName(ENGINE_SERVICE)
        assert name in service.methods_by_name
        return
    found = getattr(dualclaw, owner).DESCRIPTOR
    assert isinstance(found, Descriptor | EnumDescriptor)
    names = found.fields_by_name if isinstance(found, Descriptor) else found.values_by_name
    assert not name or name in names


def test_the_page_has_the_table_of_checks() -> None:
    """docs/conformance.md lists every check as the catalogue says it; paste what this shows when it fails."""
    assert as_markdown(CHECKS) in PAGE, as_markdown(CHECKS)


def test_the_page_has_the_table_of_scenarios() -> None:
    """docs/conformance.md tells authors of agents what each scenario has to do."""
    rows = "".join(f"| `{name}` | {play.text} |\n" for name, play in PLAYS.items())
    assert rows in PAGE, rows


def test_the_example_plays_the_scenarios_of_the_kit() -> None:
    """examples/conformance.py documents the same scenarios, and calls ``look`` with the arguments the kit expects."""
    assert example.__doc__ is not None
    assert set(re.findall(r"^\| ``(\w+)`` \|", example.__doc__, re.MULTILINE)) == set(PLAYS)
    assert canonical_json(example.ARGS) == ARGS
