"""Runs that wait for people, over kill -9 and restarts, answered through every channel; real processes, SQLite."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from httpx_sse import aconnect_sse

from dualclaw import Decision, DecisionAction, EngineEvent, ResumeRequest, RunState
from dualclaw.errors import EngineError
from dualclaw.events import from_wire, to_wire
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient, RunStream

from .approvals import BIG, notes, settings_of
from .conftest import ROOT, Launcher, run_command
from .test_one_run_everywhere import request

pytestmark = pytest.mark.timeout(400)

CLI = [sys.executable, "-m", "dualclaw_clients.cli"]
Connect = Callable[[str], EngineClient]


async def events_of(stream: RunStream) -> list[EngineEvent]:
    async with asyncio.timeout(100), stream:
        return [event async for event in stream]


def answer(events: list[EngineEvent], action: str, **more: str) -> ResumeRequest:
    """Answer everything a segment asks with one action."""
    items = events[-2].interrupt.items
    number = DecisionAction.Value(f"DECISION_ACTION_{action}")
    decisions = [
        Decision(interrupt_id=item.id, action=number, args_hash=item.args_hash, **more)  # type: ignore[arg-type]
        for item in items
    ]
    return ResumeRequest(run_id=events[0].run_id, decisions=decisions)


async def test_a_killed_engine_keeps_its_questions_and_each_channel_answers_one(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """Three runs wait while the engine dies: answered by gRPC, the web route and the command line, each runs once."""
    engine = launch("dualclaw_server", **settings_of(tmp_path))
    client = connect(engine.address)
    parked = [await events_of(client.run(request("note"))) for _ in range(3)]
    assert notes(tmp_path) == []
    engine.kill()
    engine = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_LISTEN=engine.address))
    web = launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN="127.0.0.1:0", DUALCLAW_ENGINE=engine.address)
    second = connect(engine.address)
    for events in parked:
        run = await second.get_run(events[0].run_id)
        assert run.state == RunState.RUN_STATE_INTERRUPTED
        assert list(run.interrupts) == list(events[-2].interrupt.items)
        assert await events_of(second.attach(run.id)) == events

    by_grpc, by_web, by_cli = parked
    edited = f'{{"text": "cream", "number": {BIG + 2}}}'
    by_grpc += await events_of(client.resume(answer(by_grpc, "EDIT", args_json=edited)))
    assert notes(tmp_path) == [f"cream {BIG + 2}"]

    body = {"decisions": [{"interruptId": by_web[-2].interrupt.items[0].id, "action": "DECISION_ACTION_APPROVE"}]}
    async with (
        httpx.AsyncClient(base_url=web.address, timeout=60) as http,
        aconnect_sse(http, "POST", f"/v1/runs/{by_web[0].run_id}/resume", json=body) as source,
    ):
        assert source.response.headers["x-run-id"] == by_web[0].run_id
        wires = [json.loads(message.data) async for message in source.aiter_sse() if message.data]
    by_web += [event for wire in wires if (event := from_wire(wire)) is not None]
    assert notes(tmp_path)[1:] == [f"milk {BIG}"]

    resume = [*CLI, "--engine", engine.address, "resume", by_cli[0].run_id, "reject", "--comment", "no more milk"]
    code, out, err = await run_command(*resume)
    assert code == 0, err
    assert "A person rejected note. A person said: no more milk" in out  # what the model was told
    assert "no more milk" in err
    assert len(notes(tmp_path)) == 2

    by_cli += (await events_of(second.attach(by_cli[0].run_id)))[len(by_cli) :]
    for events in parked:
        stored = await events_of(second.attach(events[0].run_id))
        assert check_stream(stored) == []
        assert [to_wire(event) for event in stored] == [to_wire(event) for event in events]
        for after in range(0, len(events), 3):
            assert await events_of(client.attach(events[0].run_id, after_seq=after)) == stored[after:]
        assert (await second.get_run(events[0].run_id)).state == RunState.RUN_STATE_SUCCEEDED


async def test_of_two_answers_at_once_one_wins(launch: Launcher, connect: Connect, tmp_path: Path) -> None:
    """Both read the same question and press at the same moment: one segment, one note, one ALREADY_ANSWERED."""
    engine = launch("dualclaw_server", **settings_of(tmp_path))
    clients = [connect(engine.address) for _ in range(4)]
    parked = await events_of(clients[0].run(request("both")))
    attempts = [events_of(client.resume(answer(parked, "APPROVE"))) for client in clients]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    won = [outcome for outcome in outcomes if isinstance(outcome, list)]
    lost = [outcome.reason for outcome in outcomes if isinstance(outcome, EngineError)]
    assert (len(won), lost) == (1, ["ALREADY_ANSWERED"] * 3)
    assert check_stream([*parked, *won[0]]) == []
    assert sorted(notes(tmp_path)) == ["eggs 0", f"milk {BIG}"]


async def test_a_killed_engine_keeps_answers_that_leave_questions_open(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """One of two is approved, the engine dies, the other is approved after the restart: both run once, then."""
    engine = launch("dualclaw_server", **settings_of(tmp_path))
    client = connect(engine.address)
    events = await events_of(client.run(request("both")))
    milk, eggs = events[-2].interrupt.items
    approve = DecisionAction.DECISION_ACTION_APPROVE
    first = ResumeRequest(run_id=events[0].run_id, decisions=[Decision(interrupt_id=milk.id, action=approve)])
    events += await events_of(client.resume(first))
    assert list(events[-2].interrupt.items) == [eggs]
    engine.kill()
    assert notes(tmp_path) == []
    launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_LISTEN=engine.address))
    with pytest.raises(EngineError, match="has its answer") as refused:
        await events_of(client.resume(first))
    assert refused.value.reason == "ALREADY_ANSWERED"
    events += await events_of(client.resume(answer(events, "APPROVE")))
    assert check_stream(events) == []
    assert sorted(notes(tmp_path)) == ["eggs 0", f"milk {BIG}"]


async def test_a_switched_interceptor_stays_switched_over_a_restart(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """Switched at the command line: listed so, in force for new runs, also after kill -9; guards are refused."""
    engine = launch("dualclaw_server", **settings_of(tmp_path))
    cli = [*CLI, "--engine", engine.address]
    code, out, err = await run_command(*cli, "interceptor", "clerk", "closed", "on")
    assert (code, out) == (0, "interceptor closed of clerk: on\n"), err
    code, _, err = await run_command(*cli, "interceptor", "clerk", "hitl", "off")
    assert code == 3
    assert "NOT_SWITCHABLE" in err
    engine.kill()
    launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_LISTEN=engine.address))
    code, out, _ = await run_command(*cli, "agents")
    assert (code, out.split("\t")[3]) == (0, "closed, hitl")
    assert (await events_of(connect(engine.address).run(request("note"))))[-1].done.content == "Closed today."
    code, out, _ = await run_command(*cli, "interceptor", "clerk", "closed", "off")
    assert (code, out) == (0, "interceptor closed of clerk: off\n")
    code, out, _ = await run_command(*cli, "agents", "clerk")
    assert "closed\toff\tswitchable" in out
    events = await events_of(connect(engine.address).run(request("note")))
    assert events[-1].done.content == "One moment."


async def test_a_client_with_nothing_but_the_protos_answers_an_interrupt(
    launch: Launcher, tmp_path: Path, node: str
) -> None:
    """grpc-js with the .proto files alone edits one call, approves the other, and repeats itself without harm."""
    engine = launch("dualclaw_server", **settings_of(tmp_path))
    edited = f'{{"text": "cream", "number": {BIG + 2}}}'
    code, out, err = await run_command(
        node, "tests/e2e/node/resume.mjs", engine.address, str(ROOT / "proto"), "both", edited
    )
    assert code == 0, err
    result = json.loads(out)
    assert [event["seq"] for event in result["attached"]] == list(range(1, len(result["attached"]) + 1))
    assert result["first"] + result["second"] == result["attached"]
    assert result["again"] == result["second"]
    assert result["late"] == 9  # FAILED_PRECONDITION
    assert sorted(notes(tmp_path)) == [f"cream {BIG + 2}", "eggs 0"]
