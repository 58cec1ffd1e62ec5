"""One run over five channels: asked on the page, approved in the console, and the same for whoever watches."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from httpx_sse import aconnect_sse
from playwright.async_api import expect

from dualclaw import EngineEvent
from dualclaw.events import from_wire, to_wire
from dualclaw.fold import RunView
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient
from tests.toolchains import require

from .approvals import BIG, notes, settings_of
from .conftest import Open
from .process import Process
from .test_im import console

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

FIRST, SECOND = "One moment.", "Result: noted milk"


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[Process, Process, dict[str, str]]]:
    """An engine whose clerk asks before it notes, and a gateway."""
    require("chromium")
    settings = settings_of(tmp_path)
    engine = Process("dualclaw_server", settings, tmp_path).start()
    web = Process(
        "dualclaw_clients.web", {"DUALCLAW_WEB_LISTEN": "127.0.0.1:0", "DUALCLAW_ENGINE": engine.address}, tmp_path
    ).start()
    yield engine, web, settings
    web.stop()
    engine.stop()


async def by_grpc(client: EngineClient, run_id: str) -> list[EngineEvent]:
    async with client.attach(run_id, wait=True) as stream:
        return [event async for event in stream]


async def by_native_sse(http: httpx.AsyncClient, run_id: str) -> list[EngineEvent]:
    async with aconnect_sse(http, "GET", f"/v1/runs/{run_id}/events") as source:
        found = [from_wire(json.loads(message.data)) async for message in source.aiter_sse() if message.data]
    return [event for event in found if event is not None]


async def by_original_sse(http: httpx.AsyncClient, **body: str) -> list[dict[str, object]]:
    answer = await http.post("/messages/stream", json=body)
    frames = answer.content.removesuffix(b"\n\n").split(b"\n\n")
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def segments(events: list[EngineEvent]) -> list[RunView]:
    """What each segment says when it ends."""
    views, view = [], RunView()
    for number, event in enumerate(events):
        view.apply(event)
        if view.terminal is not None:
            views.append(view)
            view = RunView()
            for earlier in events[: number + 1]:
                view.apply(earlier)
    return views


async def test_asked_on_the_page_approved_in_the_console(
    services: tuple[Process, Process, dict[str, str]], open_chat: Open, tmp_path: Path
) -> None:
    """gRPC, native SSE, original SSE, the page and the IM console show one run: text, steps, approval and end."""
    engine, web, settings = services
    chat = await open_chat(engine, web, settings, tmp_path)
    await chat.ask("note")
    await expect(chat.page.locator(".card")).to_contain_text("May this be noted?")
    (run,) = await chat.runs()
    run_id = str(run["id"])

    async with EngineClient(engine.address) as client, httpx.AsyncClient(base_url=web.address, timeout=60) as http:
        grpc = asyncio.create_task(by_grpc(client, run_id))
        native = asyncio.create_task(by_native_sse(http, run_id))
        async with console(engine.address) as person:
            listed = await person.ask(f"/approvals {run_id}", "1 回答 内容”\n")
            assert "May this be noted?" in listed
            assert f'{{"text": "milk", "number": {BIG}}}' in listed
            said = await person.ask("1 同意", "noted milk\n")
        async with asyncio.timeout(100):
            events = await grpc
            assert [to_wire(event) for event in await native] == [to_wire(event) for event in events]
        original = await by_original_sse(http, content="note")

    assert check_stream(events) == []
    asked, answered = segments(events)
    assert (asked.text, answered.text) == (FIRST, SECOND)
    assert [item.tool_name for item in asked.interrupts] == ["note"]
    assert said.strip() == SECOND

    await chat.over()
    await expect(chat.page.locator(".card")).to_have_count(0)
    await expect(chat.step("note")).to_have_class("ok")
    await expect(chat.turn.locator(".answer")).to_have_text([FIRST, SECOND])

    # The original route, whose front-ends know no approval, shows the same first half of a run of its own.
    assert asked.terminal is not None
    first = to_wire(asked.terminal)
    assert first is not None
    assert {**original[-1], "process_steps": 0} == {
        **{key: first[key] for key in original[-1] if key in first},
        "message_id": original[-1]["message_id"],
        "conversation_id": original[-1]["conversation_id"],
        "trace_id": original[-1]["trace_id"],
        "process_steps": 0,
    }
    assert original[-1]["content"] == "".join(str(w["content"]) for w in original if w["type"] == "delta") == FIRST
    assert len(original[-1]["process_steps"]) == len(first["process_steps"])  # type: ignore[arg-type]
    (waiting,) = [w["step"] for w in original if w["type"] == "step" and "diagnosis" in w["step"]]  # type: ignore[operator]
    assert waiting["diagnosis"]["code"] == "approval.required"  # type: ignore[index]
    assert notes(tmp_path) == [f"milk {BIG}"]
