"""The original route: exact bytes, failures as one error frame, no ids, comments or heartbeats."""

import asyncio
import json
from typing import cast

import httpx
import pytest

from dualclaw import InterruptItem, InterruptKind, Run, RunRequest, RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw.events import (
    make_delta,
    make_diagnosis,
    make_done,
    make_error,
    make_interrupt,
    make_reasoning,
    make_rewind,
    make_step,
)
from dualclaw_clients.engine_client import EngineClient
from dualclaw_clients.web.app import WebApp


def done(text: str = ""):
    return make_done(message_id="m", conversation_id="c", content=text)


def frame(wire: dict[str, object]) -> bytes:
    return f"data: {json.dumps(wire, ensure_ascii=False)}\n\n".encode()


def frames_of(content: bytes) -> list[dict[str, object]]:
    return [json.loads(one.removeprefix(b"data: ")) for one in content.split(b"\n\n") if one]


async def test_the_stream_is_byte_for_byte_the_five_original_events(web, fake_engine):
    """Frames are thinned, keep json.dumps' separators, and done keeps the trace id; nothing else is on the wire."""
    fake_engine.on(
        "Run",
        [
            "headers",
            make_reasoning("hm"),
            make_step("mcp", server="s", name="t", args={"q": "a\u2028b"}, phase="start", index=0),
            [make_delta("你好"), make_delta("a\n\nb\r\nc")],
            make_done(message_id="m", conversation_id="c", content="你好a\n\nb\r\nc"),
        ],
    )
    answer = await web.http.post("/messages/stream", json={"content": "hi"})
    step = {"type": "mcp", "server": "s", "name": "t", "args": {"q": "a\u2028b"}, "result": "", "phase": "start"}
    done_wire = {
        "type": "done",
        "message_id": "m",
        "conversation_id": "c",
        "content": "你好a\n\nb\r\nc",
        "process_steps": [],
        "used_skills": [],
        "used_mcp": [],
        "generating": False,
        "trace_id": fake_engine.trace_id,
    }
    assert answer.status_code == 200
    assert answer.content == b"".join(
        [
            frame({"type": "reasoning", "content": "hm"}),
            frame({"type": "step", "step": step, "index": 0}),
            frame({"type": "delta", "content": "你好"}),
            frame({"type": "delta", "content": "a\n\nb\r\nc"}),
            frame(done_wire),
        ]
    )
    assert len(frame({"type": "delta", "content": "你好"})) == 46
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in answer.headers


async def test_interrupts_and_rewinds_stay_away_from_original_front_ends(web, fake_engine):
    """After a rewind only text beyond what was sent goes out; an interrupt is not sent."""
    fake_engine.on(
        "Run",
        [
            make_delta("Hel"),
            make_rewind(""),
            make_delta("Hello"),
            make_interrupt([{"id": "i", "kind": "question", "prompt": "?"}]),
            make_done(message_id="m", conversation_id="c", content="Hello"),
        ],
    )
    answer = await web.http.post("/messages/stream", json={"content": "hi"})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert [event["type"] for event in events] == ["delta", "delta", "done"]
    assert [event["content"] for event in events] == ["Hel", "lo", "Hello"]


async def test_the_body_becomes_a_run_request_of_claw_web(web, fake_engine):
    """Old integer conversation ids become strings; unknown keys of old front-ends are ignored."""
    fake_engine.on("Run", [make_done(message_id="m", conversation_id="7", content="")])
    body = {"content": "hi \ud83c\udf78", "conversation_id": 7, "agent": "a", "request_id": "r", "theme": "dark"}
    await web.http.post("/messages/stream", content=json.dumps(body).encode())
    request = fake_engine.calls_of("Run")[0].request
    assert isinstance(request, RunRequest)
    assert (request.conversation_id, request.agent, request.request_id, request.claw) == ("7", "a", "r", "web")
    assert request.message.parts[0].text == "hi 🍸"
    assert request.message.role == 2


async def test_a_lone_surrogate_becomes_a_replacement_character(web, fake_engine):
    """A half emoji has no UTF-8 form, so it is replaced at the border instead of failing later."""
    fake_engine.on("Run", [make_done(message_id="m", conversation_id="7", content="")])
    await web.http.post("/messages/stream", content=b'{"content": "x\\ud83cy"}')
    assert fake_engine.calls_of("Run")[0].request.message.parts[0].text == "x\ufffdy"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[1]", "one JSON object"),
        (b"{}", "content: must be a non-empty string"),
        (b'{"content": ""}', "content: must be a non-empty string"),
        (b'{"content": 5}', "content: must be a non-empty string"),
        (b'{"content": "x", "conversation_id": true}', "conversation_id: must be a string or an integer"),
        (b'{"content": "x", "conversation_id": 1.5}', "conversation_id: must be a string or an integer"),
        (b'{"content": "x", "agent": 1}', "agent: must be a string"),
        (b'{"content": "x", "content": "y"}', "given twice"),
        (b'{"content": NaN}', "NaN is no JSON number"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"content": "\\ud800", "x": ' + b"[" * 900 + b"]" * 900 + b"}", "nested too deeply"),
        (b'{"content": "x", "conversation_id": 1e999}', "too large a number"),
    ],
)
async def test_a_malformed_body_is_one_error_frame_that_says_what_is_wrong(web, fake_engine, body, says):
    """Original front-ends read errors in the stream only, so the status is 200."""
    answer = await web.http.post("/messages/stream", content=body)
    assert answer.status_code == 200
    assert answer.content.count(b"data: ") == 1
    event = json.loads(answer.text.removeprefix("data: "))
    assert event["type"] == "error"
    assert says in event["message"]
    assert event["diagnosis"]["code"] == "invalid.request"
    assert fake_engine.calls == []


@pytest.mark.parametrize(
    ("refusal", "code", "retryable"),
    [
        (EngineError("UNKNOWN_AGENT", "no agent x"), "unknown.agent", False),
        (EngineError("CONVERSATION_BUSY", "busy"), "conversation.busy", True),
        (EngineError("OVERLOADED", "full", retry_after=3), "overloaded", True),
        (FieldError({"agent": "too long"}), "invalid.request", False),
    ],
)
async def test_a_refused_start_is_one_error_frame_with_the_reasons_code(web, fake_engine, refusal, code, retryable):
    """The reason of a refusal reaches a front-end as the code of the diagnosis."""
    fake_engine.on("Run", [refusal])
    answer = await web.http.post("/messages/stream", json={"content": "hi"})
    assert answer.status_code == 200
    (line,) = [line for line in answer.text.split("\n\n") if line]
    event = json.loads(line.removeprefix("data: "))
    assert list(event) == ["type", "message", "diagnosis"]
    assert event["message"] == refusal.message
    assert event["diagnosis"]["code"] == code
    assert event["diagnosis"]["severity"] == "error"
    assert event["diagnosis"]["retryable"] is retryable
    assert event["diagnosis"]["hint"] == refusal.hint != ""


async def test_a_message_to_a_conversation_that_waits_for_people_is_told_what_and_where(web, fake_engine):
    """These front-ends show the message alone: it names what is asked, the page and the route; no retry would help."""
    items = [
        InterruptItem(id="a", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="rm", prompt="Delete it?"),
        InterruptItem(id="b", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="mv"),
    ]
    run = Run(id="r 1", conversation_id="c/1", state=RunState.RUN_STATE_INTERRUPTED, interrupts=items)
    fake_engine.runs["r-1"] = run
    fake_engine.on("Run", [EngineError("CONVERSATION_BUSY", "busy", {"run_id": "r-1"})])
    headers = {"Authorization": "Bearer k"}
    answer = await web.http.post("/messages/stream", json={"content": "hi"}, headers=headers)
    assert answer.status_code == 200
    (frame,) = frames_of(answer.content)
    assert frame["message"].startswith("the conversation waits for a decision first: Delete it?; mv. ")
    for told in ("/#c%2F1", "/v1/runs/r%201/resume"):
        assert told in frame["message"]
        assert told in frame["diagnosis"]["hint"]
    assert (frame["diagnosis"]["code"], frame["diagnosis"]["retryable"]) == ("conversation.busy", False)
    assert fake_engine.calls_of("GetRun")[0].metadata["authorization"] == "Bearer k"


@pytest.mark.parametrize("known", [True, False])
async def test_a_conversation_busy_with_work_is_told_in_the_engines_words(web, fake_engine, known):
    """A run that goes on by itself needs nobody: the same question may work later."""
    if known:
        fake_engine.runs["r-1"] = Run(id="r-1", state=RunState.RUN_STATE_RUNNING)
    fake_engine.on("Run", [EngineError("CONVERSATION_BUSY", "busy", {"run_id": "r-1"})])
    (frame,) = frames_of((await web.http.post("/messages/stream", json={"content": "hi"})).content)
    assert (frame["message"], frame["diagnosis"]["retryable"]) == ("busy", True)


async def test_an_engine_that_is_not_there_is_an_error_frame(web, fake_engine):
    """A start nobody answers ends as one error frame too, in words that are true and without the engine's address."""
    await fake_engine.close()
    answer = await web.http.post("/messages/stream", json={"content": "hi"})
    event = json.loads(answer.text.removeprefix("data: "))
    assert (event["diagnosis"]["code"], event["diagnosis"]["retryable"]) == ("store.unavailable", True)
    assert event["message"] == "the gateway cannot reach its engine"
    assert fake_engine.target not in answer.text


async def test_a_failed_run_passes_through_with_its_trace_id(web, fake_engine):
    """An error event of the run is the run's own word; the gateway adds none."""
    diagnosis = make_diagnosis(code="model.timeout", severity="error", summary="slow")
    fake_engine.on("Run", [make_delta("a"), make_error("slow", diagnosis=diagnosis)])
    answer = await web.http.post("/messages/stream", json={"content": "hi"})
    frames = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]
    assert [event["type"] for event in frames] == ["delta", "error"]
    assert frames[1]["trace_id"] == fake_engine.trace_id


async def test_headers_come_at_once_and_nothing_fills_the_silence(gateways, fake_engine):
    """The response starts before the engine has accepted the run, and there are no heartbeats on this route."""
    web = await gateways.start(heartbeat=0.05)
    release = asyncio.Event()
    fake_engine.on("Run", ["no-headers", release, make_done(message_id="m", conversation_id="c", content="x")])
    async with web.http.stream("POST", "/messages/stream", json={"content": "hi"}) as answer:
        assert answer.status_code == 200
        await asyncio.sleep(0.3)
        release.set()
        content = await answer.aread()
    assert content.startswith(b'data: {"type": "done"')


async def test_the_run_goes_on_when_the_client_leaves_before_the_first_token(web, fake_engine):
    """Leaving is noticed while the stream is silent and ends the call; nothing cancels the run."""
    fake_engine.on("Run", ["headers", "hang"])
    async with web.http.stream("POST", "/messages/stream", json={"content": "hi"}):
        call = await fake_engine.wait_for_call("Run")
    await asyncio.wait_for(call.over.wait(), 60)
    assert call.left
    assert fake_engine.calls_of("Cancel") == []


async def test_a_shutdown_ends_the_stream_with_one_error_frame(web, fake_engine):
    """These front-ends cannot attach again, so they are told; the run goes on."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    async with web.http.stream("POST", "/messages/stream", json={"content": "hi"}) as answer:
        chunks = answer.aiter_bytes()
        assert await anext(chunks) == frame({"type": "delta", "content": "a"})
        web.gateway.should_exit = True
        rest = b"".join([chunk async for chunk in chunks])
    event = json.loads(rest.decode().removeprefix("data: "))
    assert event["type"] == "error"
    assert "the run goes on" in event["message"]
    assert fake_engine.calls_of("Cancel") == []


async def test_a_lost_engine_stream_is_taken_up_without_a_doubled_character(web, fake_engine):
    """A cut connection to the engine is healed below the route: the text is whole and once."""
    read = asyncio.Event()
    fake_engine.on(
        "Run",
        [
            make_delta("a"),
            read,
            make_delta("b"),
            "cut",
            make_delta("c"),
            make_done(message_id="m", conversation_id="c", content="abc"),
        ],
    )
    content = b""
    async with web.http.stream("POST", "/messages/stream", json={"content": "hi"}) as answer:
        async for chunk in answer.aiter_bytes():
            content += chunk
            read.set()
    frames = frames_of(content)
    assert "".join(event["content"] for event in frames if event["type"] == "delta") == "abc"
    assert frames[-1]["type"] == "done"


async def test_a_mistake_of_the_gateways_own_is_one_error_frame_too(caplog):
    """These front-ends look nowhere else, so no stream ends without a frame."""
    app = WebApp(cast("EngineClient", None))  # whatever is wrong with it
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        answer = await http.post("/messages/stream", json={"content": "hi"})
    (event,) = frames_of(answer.content)
    assert (answer.status_code, event["type"]) == (200, "error")
    assert event["diagnosis"]["code"] == "internal"
    assert "Traceback" not in answer.text
    assert "AttributeError" in caplog.text
