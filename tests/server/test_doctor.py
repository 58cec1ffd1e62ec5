"""``dualclaw-server doctor``, and DUALCLAW_AGENTS with several references."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dualclaw_server.app import load_agents
from dualclaw_server.settings import SettingsError, read_settings

AGENTS = """
from dualclaw_server.engine.agent import Agent
ONE, TWO, MANY = Agent("one"), Agent("two"), [Agent("three"), Agent("four")]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a module of agents, from which imports work."""
    (tmp_path / "doctors_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


async def doctor(folder: Path, *arguments: str, **environ: str) -> tuple[int | None, list[dict[str, str]], str]:
    """Run it in a folder; returns exit code, findings and the whole output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "OTEL_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dualclaw_server",
        "doctor",
        *arguments,
        cwd=folder,
        env=inherited | {"DUALCLAW_LISTEN": "127.0.0.1:0", "DUALCLAW_MODEL": "scripted"} | environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert b"Traceback" not in errors, errors.decode()
    text = out.decode()
    findings = [json.loads(line) for line in text.splitlines()] if "--json" in arguments else []
    return process.returncode, findings, text + errors.decode()


def of(findings: list[dict[str, str]], what: str) -> dict[str, str]:
    (found,) = [finding for finding in findings if finding["what"] == what]
    return found


async def test_a_sound_configuration_is_ok_line_by_line(folder: Path) -> None:
    """Access, address, agents, disk, store and model are looked at; exit code 0."""
    code, findings, text = await doctor(folder, "--json", DUALCLAW_AGENTS="doctors_agents:ONE, doctors_agents:MANY")
    assert code == 0, text
    assert [finding["what"] for finding in findings] == ["access", "address", "agents", "disk", "store", "model"]
    assert {finding["level"] for finding in findings} <= {"ok", "warn"}
    assert of(findings, "agents")["text"] == "one (0 tools), three (0 tools), four (0 tools)"
    assert (folder / "dualclaw.db").exists()


async def test_every_wrong_setting_is_a_line_and_nothing_is_opened(folder: Path) -> None:
    """All faults at once, with what to do; no store was made, and exit code 1."""
    code, findings, text = await doctor(
        folder, "--json", DUALCLAW_GRACE="soon", DUALCLAW_AGENTS="doctors_agents:NONE", DUALCLAW_STOR="x"
    )
    assert code == 1, text
    assert [(finding["level"], finding["text"].split(":")[0]) for finding in findings] == [
        ("warn", "DUALCLAW_STOR"),
        ("fail", "DUALCLAW_GRACE"),
        ("fail", "DUALCLAW_AGENTS"),
    ]
    assert all(finding["hint"] for finding in findings)
    assert not (folder / "dualclaw.db").exists()


async def test_a_model_nobody_answers_for_is_a_fault_and_its_key_is_not_shown(folder: Path) -> None:
    """The address and the reason are told, the secret is nowhere; --no-model leaves it out."""
    environ = {
        "DUALCLAW_MODEL": "openai:gpt",
        "OPENAI_API_KEY": "sk-thesecretofthis1234",
        "DUALCLAW_MODEL_BASE_URL": "http://127.0.0.1:9/v1",
    }
    code, findings, text = await doctor(folder, "--json", **environ)
    assert (code, of(findings, "model")["level"]) == (1, "fail")
    assert "MODEL_UNAVAILABLE" in of(findings, "model")["text"]
    assert "thesecretofthis" not in text
    code, findings, _ = await doctor(folder, "--json", "--no-model", **environ)
    assert (code, "model" in {finding["what"] for finding in findings}) == (0, False)


async def test_a_store_that_is_none_is_a_fault(folder: Path) -> None:
    """A file that is no database is named, and stays as it was; people get lines with an arrow to what to do."""
    (folder / "dualclaw.db").write_bytes(b"no database at all" * 100)
    code, _, text = await doctor(folder)
    assert code == 1
    (line, hint) = text.splitlines()[-3:-1]
    assert line.startswith("FAIL  store      sqlite:dualclaw.db cannot be opened: ")
    assert hint.startswith("                 -> ")
    assert (folder / "dualclaw.db").read_bytes() == b"no database at all" * 100


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[str]:
    """Somebody else at an address."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield "127.0.0.1:{1}".format(*server.sockets[0].getsockname())


async def test_an_address_in_use_is_a_warning_and_open_access_too(folder: Path) -> None:
    """An engine may be running there; what other machines reach without keys or encryption is said."""
    async with listening() as address:
        code, findings, _ = await doctor(folder, "--json", "--listen", address)
    assert (code, of(findings, "address")["level"]) == (0, "warn")
    assert "cannot listen" in of(findings, "address")["text"]
    code, findings, _ = await doctor(folder, "--json", "--listen", "0.0.0.0:0", DUALCLAW_ALLOW_ANONYMOUS="1")
    assert code == 0
    assert [finding["what"] for finding in findings if finding["level"] == "warn"] == ["access", "tls"]


async def test_a_key_that_does_not_fit_its_certificate_is_a_fault(folder: Path) -> None:
    """Both exist and are no pair, or nothing at all: found before clients are turned away."""
    (folder / "cert.pem").write_text("no certificate")
    (folder / "key.pem").write_text("no key")
    code, findings, _ = await doctor(
        folder, "--json", DUALCLAW_TLS_CERT=str(folder / "cert.pem"), DUALCLAW_TLS_KEY=str(folder / "key.pem")
    )
    assert (code, of(findings, "tls")["level"]) == (1, "fail")


def test_agents_of_several_modules_are_one_list(folder: Path) -> None:
    """In the order given, the first is the default; a name that comes twice is told before anything starts."""
    found = load_agents("doctors_agents:TWO, doctors_agents:MANY,doctors_agents:ONE")
    assert [agent.name for agent in found] == ["two", "three", "four", "one"]
    with pytest.raises(ValueError, match="repeated: two"):
        load_agents("doctors_agents:TWO,doctors_agents:TWO")


@pytest.mark.parametrize("value", ["doctors_agents", "doctors_agents:ONE,", "doctors_agents:ONE,two", ","])
def test_a_list_of_agents_with_a_wrong_entry_is_refused(value: str) -> None:
    """The settings say which form each entry has."""
    with pytest.raises(SettingsError, match="must be MODULE:ATTRIBUTE"):
        read_settings({"DUALCLAW_AGENTS": value})
