"""docs/operations.md, held to the programs it speaks of: people follow it when they have no time to doubt it."""

import re
import shlex
from pathlib import Path

import pytest

from dualclaw.errors import REASONS
from dualclaw_clients.cli_parser import check_usage, make_parser
from dualclaw_clients.settings import ClientSettings, variables_of
from dualclaw_server.__main__ import _parser as server_parser
from dualclaw_server.engine.worker import MAX_RECOVERIES
from dualclaw_server.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
SOURCES = "\n".join(
    path.read_text("utf-8")
    for folder in ("server/dualclaw_server", "clients/dualclaw_clients")
    for path in sorted((ROOT / folder).rglob("*.py"))
)
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
INLINE = re.findall(r"`(dualclaw(?:-server)? [^`]+)`", PAGE.replace("\n", " "))
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("dualclaw")] + INLINE


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_can_be_typed(line: str) -> None:
    """In blocks and in running text: the programs take them as they stand there."""
    program, *words = shlex.split(line, comments=True)
    if program == "dualclaw":
        parser = make_parser()
        check_usage(parser.parse_args(words), parser, on_terminal=True)
    else:
        doctor = words[:1] == ["doctor"]
        server_parser(doctor=doctor).parse_args(words[1:] if doctor else words)


def test_there_are_commands_to_try() -> None:
    """A page whose blocks are not found would pass everything."""
    assert len(BLOCKS) >= 7
    assert len(COMMANDS) >= 30
    assert {"doctor", "health", "runs", "run", "resume", "cancel", "graph"} <= {line.split()[1] for line in COMMANDS}


def test_every_variable_named_is_a_setting() -> None:
    """Of the engine or of its clients."""
    known = {PREFIX + field.upper() for field in Settings.model_fields} | set(variables_of(ClientSettings))
    assert set(re.findall(r"DUALCLAW_[A-Z_]+", PAGE)) <= known


def test_every_reason_named_exists() -> None:
    """What clients are told in capitals is a reason of the contract."""
    named = set(re.findall(r"`([A-Z]+_[A-Z_]+)`", PAGE)) - set(re.findall(r"DUALCLAW_[A-Z_]+", PAGE))
    assert named <= REASONS
    assert {"STORE_UNAVAILABLE", "RUN_NOT_FINAL", "CONVERSATION_BUSY"} <= named


@pytest.mark.parametrize(
    "words",
    [
        "the store has no room",
        "this key is not known here",
        "send one 'authorization'",
        "no dualclaw engine",
        "no engine answers",
        "is a database of another program",
        "was written by a newer dualclaw",
        "is damaged",
        "lies on a network filesystem",
        "nobody; it can be claimed from",
        "this segment was taken over",
        "Its saved state cannot be read",
        "is not here",
        "is left as it is, to be looked at again",
        "is put back for",
        "is dropped: ",
        "woken at",
    ],
)
def test_what_programs_are_said_to_say_they_say(words: str) -> None:
    """People search for these words; both the page and the source have them."""
    assert words in re.sub(r"\s+", " ", PAGE)
    assert words in SOURCES


def test_numbers_are_those_of_the_engine() -> None:
    """How often a run is taken over before it is given up."""
    assert f"after {MAX_RECOVERIES} times it is failed" in PAGE


def test_every_link_within_the_page_leads_somewhere() -> None:
    """The table of symptoms is the way in."""
    headings = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", PAGE, re.M)
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert links
    assert links <= headings
    pages = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert [page for page in pages if not (ROOT / "docs" / page).is_file()] == []
