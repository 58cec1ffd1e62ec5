"""One scripted run, seen by every client: the same text, the same steps, the same end."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from httpx_sse import aconnect_sse

from dualclaw import ContentPart, EngineEvent, Message, Role, RunRequest
from dualclaw.events import from_wire, to_wire
from dualclaw.fold import RunView
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient
from tests.toolchains import require

from .conftest import ROOT, Launcher, Process, run_command

pytestmark = pytest.mark.timeout(400)

QUESTION = "What is 17 * 23? 请回答"
ANSWER = 'One moment.\n\n结果是 391 🙂\u2028and "quoted".'
TURNS: list[dict[str, object]] = [
    {
        "when": {"step": 0},
        "say": [
            {"reasoning": "A product; the calculator is exact.", "chunk": 5},
            {"text": "One moment.", "chunk": 3},
            {"call": "calculate", "args": {"expression": "17 * 23"}},
            {"call": "calculate", "args": {"expression": "1 / 0"}},
        ],
    },
    {"when": {"step": 1}, "say": [{"text": '结果是 391 🙂\u2028and "quoted".', "chunk": 2, "delay": 0.005}]},
]


def request(text: str = QUESTION) -> RunRequest:
    return RunRequest(message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)]), claw="test")


async def by_grpc(client: EngineClient) -> list[EngineEvent]:
    async with client.run(request()) as stream:
        return [event async for event in stream]


def seen(events: list[EngineEvent]) -> dict[str, object]:
    """What a client has in the end: text, steps as the wire shows them, kind and reason of the end."""
    view = RunView()
    for event in events:
        view.apply(event)
    assert view.terminal is not None
    end = to_wire(view.terminal)
    assert end is not None
    steps = [
        {k: v for k, v in step.items() if k != "node"}
        for step in end["process_steps"]  # type: ignore[attr-defined]
    ]
    return {"text": view.text, "content": end["content"], "steps": steps, "type": end["type"]}


async def start(launch: Launcher, write_script: Callable[..., str]) -> tuple[Process, Process]:
    engine = launch("dualclaw_server", DUALCLAW_LISTEN="127.0.0.1:0", DUALCLAW_MODEL=write_script(*TURNS))
    web = launch("dualclaw_clients.web", DUALCLAW_WEB_LISTEN="127.0.0.1:0", DUALCLAW_ENGINE=engine.address)
    return engine, web


async def test_every_channel_shows_the_same_run(
    launch: Launcher, write_script: Callable[..., str], connect: Callable[[str], EngineClient]
) -> None:
    """gRPC, native SSE, original SSE, the command line and the IM console agree on text, steps and end."""
    engine, web = await start(launch, write_script)
    events = await by_grpc(connect(engine.address))
    assert check_stream(events) == []
    expected = seen(events)
    assert expected["text"] == expected["content"] == ANSWER
    assert [(s["name"], s["phase"]) for s in expected["steps"] if s["type"] == "skill"] == [  # type: ignore[attr-defined]
        ("calculate", "ok"),
        ("calculate", "fail"),
    ]

    async with httpx.AsyncClient(base_url=web.address, timeout=60) as http:
        native: list[EngineEvent] = []
        body = {"message": {"role": "ROLE_USER", "parts": [{"text": QUESTION}]}}
        async with aconnect_sse(http, "POST", "/v1/runs", json=body) as source:
            assert source.response.headers["x-run-id"]
            async for message in source.aiter_sse():
                if not message.data:
                    continue
                event = from_wire(json.loads(message.data))
                assert event is not None
                assert message.id == str(event.seq)
                native.append(event)
        assert seen(native) == expected
        assert check_stream(native) == []

        response = await http.post("/messages/stream", json={"content": QUESTION})
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = response.content.split(b"\n\n")
        assert frames.pop() == b""
        assert all(frame.startswith(b"data: ") for frame in frames)
        wires = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
        for frame, wire in zip(frames, wires, strict=True):
            assert frame == b"data: " + json.dumps(wire, ensure_ascii=False).encode()
            assert not wire.keys() & {"seq", "tenant_id", "claw", "run_id"}
        original = [from_wire(wire) for wire in wires]
        assert seen([event for event in original if event is not None]) == expected

    code, out, err = await run_command(
        sys.executable, "-m", "dualclaw_clients.cli", "--engine", engine.address, "ask", QUESTION
    )
    assert code == 0, err
    # A terminal line separator in an answer is data; the command line prints it as it is.
    assert out.strip() == ANSWER

    code, out, err = await run_command(
        sys.executable,
        "-m",
        "dualclaw_clients.im",
        "console",
        "--engine",
        engine.address,
        stdin=QUESTION.encode() + b"\n",
    )
    assert code == 0, err
    assert out.strip().startswith(ANSWER)
    assert "calculate failed." in out


async def test_a_client_with_nothing_but_the_protos_runs_and_attaches(
    launch: Launcher, write_script: Callable[..., str], node: str
) -> None:
    """grpc-js with the .proto files alone runs an agent and attaches anywhere: exactly the events after it."""
    engine, _ = await start(launch, write_script)
    code, out, err = await run_command(
        node, "tests/e2e/node/run_and_attach.mjs", engine.address, str(ROOT / "proto"), QUESTION
    )
    assert code == 0, err
    result = json.loads(out)
    events = result["events"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["done"]["content"] == ANSWER
    assert len(result["attached"]) == 5
    for after, attached in result["attached"].items():
        assert attached == events[int(after) :]
    assert result["refused"] == 11  # OUT_OF_RANGE


async def test_a_browsers_event_source_follows_a_run(
    launch: Launcher, write_script: Callable[..., str], connect: Callable[[str], EngineClient], node: str
) -> None:
    """The EventSource of npm gets every event after ?after=N once, with its seq as id, and stops at 204."""
    engine, web = await start(launch, write_script)
    events = await by_grpc(connect(engine.address))
    url = f"{web.address}/v1/runs/{events[0].run_id}/events?after=3"
    code, out, err = await run_command(node, "tests/e2e/node/event_source.mjs", url)
    assert code == 0, err
    assert [(int(e["id"]), e["data"]) for e in json.loads(out)] == [(e.seq, to_wire(e)) for e in events[3:]]


async def test_reflection_is_enough_to_start_a_run(launch: Launcher, write_script: Callable[..., str]) -> None:
    """Knowing the service from reflection alone, buf curl starts a run and prints its events."""
    engine, _ = await start(launch, write_script)
    buf = Path(sys.executable).parent / "buf"
    code, out, err = await run_command(
        str(buf if buf.exists() else require("buf")),
        "curl",
        "--http2-prior-knowledge",
        "--protocol",
        "grpc",
        "--data",
        json.dumps({"message": {"role": "ROLE_USER", "parts": [{"text": QUESTION}]}}),
        f"http://{engine.address}/dualclaw.v1.EngineService/Run",
    )
    assert code == 0, err
    decoder, position, events = json.JSONDecoder(), 0, []
    while position < len(out.rstrip()):
        message, position = decoder.raw_decode(out, position)
        events += message["events"]
        while position < len(out) and out[position].isspace():
            position += 1
    assert events[-1]["done"]["content"] == ANSWER


async def test_a_place_beyond_the_end_is_refused_before_the_stream_begins(
    launch: Launcher, write_script: Callable[..., str], connect: Callable[[str], EngineClient]
) -> None:
    """An EventSource that asks for events after the end gets 416 and stops, not an empty stream again and again."""
    engine, web = await start(launch, write_script)
    run_id = (await by_grpc(connect(engine.address)))[0].run_id
    async with httpx.AsyncClient(base_url=web.address, timeout=60) as http:
        response = await http.get(f"/v1/runs/{run_id}/events?after=999")
    assert response.status_code == 416
    assert response.json()["error"]["reason"] == "AFTER_SEQ_OUT_OF_RANGE"
