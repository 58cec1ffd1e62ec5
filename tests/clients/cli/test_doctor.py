"""``dualclaw doctor``: what is configured, reachable and missing, from where a client stands."""

import asyncio
import json

import grpc
import pytest
from grpc_health.v1 import health_pb2

from dualclaw import Agent
from dualclaw.errors import EngineError
from tests.clients.cli.conftest import CommandLine


async def findings(line: CommandLine, *args: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Run it; returns the exit code and the findings by what they are about."""
    ended = await line("doctor", "--json", *args)
    assert "Traceback" not in ended.err
    found = [json.loads(text) for text in ended.out.splitlines()]
    return ended.code, {finding["what"]: finding for finding in found}


async def test_all_is_well(fake_engine, dualclaw):
    """Client, engine, key, connection, health, agents and conversations; a missing service is a warning, no fault."""
    fake_engine.agents = {"assistant": Agent(name="assistant"), "other": Agent(name="other")}
    code, found = await findings(dualclaw)
    assert code == 0
    levels = {what: finding["level"] for what, finding in found.items()}
    ok = dict.fromkeys(["client", "engine", "key", "connection", "health", "agents", "conversations"], "ok")
    assert levels == {**ok, "role": "warn"}
    assert found["agents"]["text"] == "assistant by default, other"
    assert "older" in found["role"]["hint"]


async def test_lines_for_people_say_how_it_is_and_what_to_do(fake_engine, dualclaw):
    """A line a finding, an arrow to what helps; no agent at all is a fault."""
    ended = await dualclaw("doctor")
    assert ended.code == 1
    lines = ended.out.splitlines()
    assert f"OK    engine         {fake_engine.target}, without TLS" in lines
    at = lines.index("FAIL  agents         there is none")
    assert lines[at + 1].strip() == "-> Set DUALCLAW_AGENTS where the engine runs."


async def test_no_name_poses_as_a_finding(fake_engine, dualclaw):
    """An agent's name comes from elsewhere; it stays in its line and moves no cursor."""
    name = "a\nOK    everything     is fine\x1b[2J"
    fake_engine.agents = {name: Agent(name=name)}
    ended = await dualclaw("doctor")
    assert "OK    agents         a OK everything is fine\u241b[2J by default" in ended.out.splitlines()


async def test_wrong_settings_are_findings_too(dualclaw):
    """Every wrong variable and every unknown name, and nothing is asked."""
    dualclaw.env |= {"DUALCLAW_ENGINE": "nonsense", "DUALCLAW_ENGINE_TLS": "perhaps", "DUALCLAW_ENGIN": "x"}
    ended = await dualclaw("doctor", "--json")
    found = [json.loads(text) for text in ended.out.splitlines()]
    assert ended.code == 1
    assert [(finding["level"], finding["text"].split(" ")[0]) for finding in found[1:]] == [
        ("warn", "DUALCLAW_ENGIN"),
        ("fail", "DUALCLAW_ENGINE:"),
        ("fail", "DUALCLAW_ENGINE_TLS:"),
    ]


async def test_nobody_listening_is_told_with_the_address(fake_engine, dualclaw):
    """And what starts an engine; nothing further is looked at. --engine stands in for the variable."""
    await fake_engine.stop()
    code, found = await findings(dualclaw, "--engine", fake_engine.target)
    assert code == 1
    assert list(found) == ["client", "engine", "key", "connection"]
    assert fake_engine.target in found["connection"]["text"]
    assert "dualclaw-server" in found["connection"]["hint"]


async def test_a_name_that_does_not_resolve_is_told_as_that(dualclaw):
    """The name is at fault, not the engine."""
    code, found = await findings(dualclaw, "--engine", "no-such-host.invalid:50051")
    assert (code, found["connection"]["level"]) == (1, "fail")
    assert "no-such-host.invalid" in found["connection"]["text"]
    assert "DUALCLAW_ENGINE" in found["connection"]["hint"]


@pytest.mark.parametrize(("key", "said"), [("", "Set DUALCLAW_API_KEY"), ("geheimer-key", "has no such key")])
async def test_a_refused_key_and_a_missing_one_are_told_apart(fake_engine, dualclaw, key, said):
    """What to do differs; the key itself is nowhere."""
    fake_engine.refuse["ListRuns"] = EngineError("UNAUTHENTICATED", "this key is not known here")
    dualclaw.env["DUALCLAW_API_KEY"] = key
    ended = await dualclaw("doctor")
    assert ended.code == 1
    assert "FAIL  access         this key is not known here (UNAUTHENTICATED)" in ended.out
    assert said in ended.out
    assert "geheimer" not in ended.out + ended.err


async def test_an_engine_that_drains_is_no_healthy_one(fake_engine, dualclaw):
    """It answers, and says itself that it takes nothing new."""
    await fake_engine.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    code, found = await findings(dualclaw)
    assert (code, found["connection"]["level"], found["health"]["level"]) == (1, "ok", "fail")


async def test_tls_where_none_is_spoken_is_told(fake_engine, dualclaw):
    """The hint names both ways out."""
    dualclaw.env["DUALCLAW_ENGINE_TLS"] = "1"
    code, found = await findings(dualclaw)
    assert (code, found["tls"]["level"]) == (1, "fail")
    assert "DUALCLAW_ENGINE_TLS" in found["tls"]["hint"]


async def test_certificates_that_are_none_are_told_before_anybody_is_called(fake_engine, dualclaw, tmp_path):
    """The variables that name them are."""
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    dualclaw.env["DUALCLAW_ENGINE_CA_FILE"] = str(file)
    code, found = await findings(dualclaw)
    assert (code, found["tls"]["level"]) == (1, "fail")
    assert "DUALCLAW_ENGINE_CA_FILE" in found["tls"]["hint"]
    assert fake_engine.calls == []


async def test_something_else_at_the_address_is_told(dualclaw):
    """A gRPC server of another kind, and a port where nobody speaks gRPC, are no engine."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    code, found = await findings(dualclaw, "--engine", f"127.0.0.1:{port}")
    await server.stop(None)
    assert (code, found["engine"]["level"]) == (1, "fail")
    assert "no dualclaw engine" in found["engine"]["text"]

    async def slam(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(slam, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        code, found = await findings(dualclaw, "--engine", f"127.0.0.1:{port}")
    assert (code, found["connection"]["level"]) == (1, "fail")
    assert "DUALCLAW_ENGINE_TLS=1" in found["connection"]["hint"]


async def test_a_key_in_clear_to_another_machine_is_a_warning(dualclaw):
    """Whether or not anybody answers there."""
    dualclaw.env["DUALCLAW_API_KEY"] = "k"
    _, found = await findings(dualclaw, "--engine", "no-such-host.invalid:50051")
    assert found["key"]["level"] == "warn"
    assert "DUALCLAW_ENGINE_TLS=1" in found["key"]["hint"]
