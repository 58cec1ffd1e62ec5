"""The native routes: ids, reconnecting, heartbeats, leaving, cancelling, and starts that are refused."""

import asyncio
import json

import grpc
import pytest
from httpx_sse import aconnect_sse

from dualclaw import InterruptItem, InterruptKind, Run, RunRequest, RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw.events import make_delta, make_done, make_interrupt, make_reasoning, make_rewind, make_step


def done(text: str = "", seq: int = 0):
    return make_done(message_id="m", conversation_id="c", content=text, seq=seq)


async def events_of(source) -> list[tuple[str, dict[str, object]]]:
    return [(event.id, json.loads(event.data)) async for event in source.aiter_sse()]


async def test_a_start_streams_all_seven_events_with_their_seq_as_id(web, fake_engine, question):
    """Every event carries its envelope, and its id is the seq a client reconnects with."""
    item = InterruptItem(id="i", kind=InterruptKind.INTERRUPT_KIND_QUESTION, prompt="which?")
    fake_engine.on(
        "Run",
        [
            make_reasoning("r"),
            make_delta("a"),
            make_rewind("b", attempt=1),
            [make_step("skill", name="s", index=0, phase="start"), make_delta("c\u2028d")],
            make_interrupt([item]),
            done("bc\u2028d"),
        ],
    )
    async with aconnect_sse(web.http, "POST", "/v1/runs", json=question()) as source:
        assert source.response.headers["x-run-id"] == fake_engine.run_id
        assert source.response.headers["content-type"] == "text/event-stream"
        assert source.response.headers["cache-control"] == "no-cache, no-transform"
        assert source.response.headers["x-accel-buffering"] == "no"
        found = await events_of(source)
    assert [event["type"] for _, event in found] == [
        "reasoning", "delta", "rewind", "step", "delta", "interrupt", "done",
    ]  # fmt: skip
    assert [id_ for id_, _ in found] == ["1", "2", "3", "4", "5", "6", "7"]
    assert [event["seq"] for _, event in found] == [1, 2, 3, 4, 5, 6, 7]
    assert found[4][1]["content"] == "c\u2028d"
    assert all(event["run_id"] == fake_engine.run_id and event["trace_id"] for _, event in found)


async def test_a_start_takes_both_name_styles_and_is_of_claw_web(web, fake_engine, question):
    """Protobuf JSON has two spellings; the claw is the gateway's word and not the caller's."""
    fake_engine.on("Run", [done()])
    body = question(requestId="r", conversation_id="c", onBusy="BUSY_POLICY_QUEUE", claw="im", metadata={"k": "v"})
    answer = await web.http.post("/v1/runs", json=body)
    assert answer.status_code == 200
    request = fake_engine.calls_of("Run")[0].request
    assert isinstance(request, RunRequest)
    assert (request.request_id, request.conversation_id, request.on_busy, request.claw) == ("r", "c", 2, "web")
    assert dict(request.metadata) == {"k": "v"}


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b'{"mesage": {}, "options": {"modle": "x"}}', {"mesage", "options.modle"}),
        (b'{"message": {"parts": [{"text": "a"}, {"txt": "b"}]}}', {"message.parts[1].txt"}),
        (b"[]", {"body"}),
        (b"{", {"body"}),
        (b"\xff", {"body"}),
        (b'{"on_busy": 1e999}', {"body"}),
        (b'{"message": {"role": -1e999}}', {"body"}),
        (b'{"a\\ud800": 1}', {"a\ufffd"}),
        (b'{"a": "\\ud800", "b": ' + b"[" * 900 + b"]" * 900 + b"}", {"body"}),
    ],
)
async def test_a_malformed_start_is_400_and_names_what_is_wrong(web, fake_engine, body, fields):
    """A typing error never becomes an option that is silently ignored."""
    answer = await web.http.post("/v1/runs", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["reason"] == "INVALID_REQUEST"
    assert set(error["fields"]) == fields
    assert fake_engine.calls == []


async def test_a_value_of_the_wrong_type_is_400(web):
    """What protobuf JSON cannot read is the caller's mistake and not an internal error."""
    answer = await web.http.post("/v1/runs", json={"options": {"max_steps": "many"}})
    assert answer.status_code == 400
    assert "max_steps" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (EngineError("UNAUTHENTICATED", "no key"), 401),
        (EngineError("PERMISSION_DENIED", "not yours"), 403),
        (EngineError("UNKNOWN_AGENT", "no such agent", {"agent": "x"}), 404),
        (FieldError({"message": "is empty"}), 400),
        (EngineError("CONVERSATION_BUSY", "busy", {"run_id": "r"}), 409),
        (EngineError("REQUEST_ID_REUSED", "other body"), 409),
        (EngineError("QUOTA_EXCEEDED", "enough", retry_after=2.2), 429),
        (EngineError("OVERLOADED", "full"), 429),
        (EngineError("STORE_UNAVAILABLE", "no disk"), 503),
        (EngineError("INTERNAL", "oops"), 500),
    ],
)
async def test_a_refused_start_is_json_under_the_status_of_its_code(web, fake_engine, question, refusal, status):
    """One table gives the HTTP status; the reason, message and metadata are the engine's."""
    fake_engine.on("Run", [refusal])
    answer = await web.http.post("/v1/runs", json=question())
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["reason"], error["message"], error["hint"]) == (refusal.reason, refusal.message, refusal.hint)
    assert "hint" not in error["metadata"]
    assert error["metadata"].items() >= dict(refusal.metadata).items()
    assert error.get("fields") == (dict(refusal.fields) if isinstance(refusal, FieldError) else None)
    wanted = {401: ("www-authenticate", "Bearer"), 429: ("retry-after", "3" if refusal.retry_after else "1")}
    if status in wanted:
        name, value = wanted[status]
        assert answer.headers[name] == value


async def test_a_resume_no_engine_of_this_version_knows_is_501(web, fake_engine):
    """UNIMPLEMENTED is told as such, whatever reason it was mapped to."""
    fake_engine.on("Resume", [grpc.StatusCode.UNIMPLEMENTED])
    answer = await web.http.post("/v1/runs/r/resume", json={"decisions": []})
    assert answer.status_code == 501
    assert "does not serve Resume" in answer.json()["error"]["message"]
    assert answer.json()["error"]["metadata"]["rpc"] == "Resume"


async def test_a_resume_streams_the_next_segment(web, fake_engine):
    """The path names the run; the body is protobuf JSON of ResumeRequest."""
    fake_engine.on("Resume", [make_delta("x"), done("x")])
    body = {"decisions": [{"interrupt_id": "i", "action": "DECISION_ACTION_APPROVE"}]}
    async with aconnect_sse(web.http, "POST", f"/v1/runs/{fake_engine.run_id}/resume", json=body) as source:
        found = await events_of(source)
    assert [event["type"] for _, event in found] == ["delta", "done"]
    request = fake_engine.calls_of("Resume")[0].request
    assert (request.run_id, request.decisions[0].interrupt_id) == (fake_engine.run_id, "i")


async def test_decisions_may_be_named_as_the_frames_name_them(web, fake_engine):
    """What ``allowed_actions`` lists can be sent back; full names, numbers and any case of the short ones work too."""
    fake_engine.on("Resume", [done("x")])
    decisions = [
        {"interruptId": "i", "action": name, "remember": "conversation"}
        for name in ("approve", "Reject", "DECISION_ACTION_EDIT", 4)
    ]
    answer = await web.http.post(f"/v1/runs/{fake_engine.run_id}/resume", json={"decisions": decisions})
    assert answer.status_code == 200
    request = fake_engine.calls_of("Resume")[0].request
    assert [decision.action for decision in request.decisions] == [1, 2, 3, 4]
    assert {decision.remember for decision in request.decisions} == {2}


async def test_a_decision_nobody_knows_is_400_and_lists_those_there_are(web, fake_engine):
    """The wrong value is named with its place, beside everything else that is wrong."""
    body = {"decisions": [{"action": "aprove", "why": 1}], "requestId": "r"}
    answer = await web.http.post("/v1/runs/r/resume", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["fields"] == {
        "decisions[0].action": "'aprove' is not known; known are approve, reject, edit, skip, respond",
        "decisions[0].why": "is not a field of Decision",
    }
    assert fake_engine.calls == []


async def test_the_first_byte_comes_before_the_first_event(web, fake_engine, question):
    """A comment goes out with the headers, so that proxies see the stream begin."""
    release = asyncio.Event()
    fake_engine.on("Run", ["headers", release, done()])
    async with web.http.stream("POST", "/v1/runs", json=question()) as answer:
        chunks = answer.aiter_bytes()
        assert await asyncio.wait_for(anext(chunks), 60) == b": ok\n\n"
        release.set()
        assert b'"type": "done"' in b"".join([chunk async for chunk in chunks])


async def test_heartbeats_come_while_the_model_is_silent(gateways, fake_engine, question):
    """A silent stream carries comments from the start, and none of them disturbs a reader of SSE."""
    web = await gateways.start(heartbeat=0.05)
    release = asyncio.Event()
    fake_engine.on("Run", ["headers", release, make_delta("a"), done("a")])
    async with web.http.stream("POST", "/v1/runs", json=question()) as answer:
        text = b""
        async for chunk in answer.aiter_bytes():
            text += chunk
            if text.count(b": heartbeat\n\n") >= 3:
                release.set()
    assert text.startswith(b": ok\n\n: heartbeat\n\n")
    assert text.count(b"id: ") == 2


async def test_a_busy_stream_has_no_heartbeats(gateways, fake_engine, question):
    """Heartbeats are for silence; a stream that flows needs none."""
    web = await gateways.start(heartbeat=3)
    script: list[object] = []
    for _ in range(36):
        script += [make_delta("a"), 0.1]
    fake_engine.on("Run", [*script, done("a" * 36)])
    answer = await web.http.post("/v1/runs", json=question())
    assert answer.content.count(b"heartbeat") == 0


async def test_events_after_the_last_event_id_and_nothing_else(web, fake_engine):
    """Last-Event-ID wins over ?after; the engine is asked with wait, to stay over parked phases."""
    fake_engine.runs["r"] = Run(id="r", state=RunState.RUN_STATE_RUNNING, last_seq=4)
    fake_engine.on("Attach", [make_delta("c", seq=3), make_delta("d", seq=4), done("cd", seq=5)])
    headers = {"Last-Event-ID": "2"}
    async with aconnect_sse(web.http, "GET", "/v1/runs/r/events?after=1", headers=headers) as source:
        found = await events_of(source)
    assert [id_ for id_, _ in found] == ["3", "4", "5"]
    request = fake_engine.calls_of("Attach")[0].request
    assert (request.run_id, request.after_seq, request.wait) == ("r", 2, True)


async def test_after_stands_in_for_the_first_last_event_id(web, fake_engine):
    """A browser's EventSource cannot send the header with its first request."""
    fake_engine.runs["r"] = Run(id="r", state=RunState.RUN_STATE_RUNNING, last_seq=4)
    fake_engine.on("Attach", [done("", seq=4)])
    async with aconnect_sse(web.http, "GET", "/v1/runs/r/events?after=3") as source:
        assert [id_ for id_, _ in await events_of(source)] == ["4"]
    assert fake_engine.calls_of("Attach")[0].request.after_seq == 3


async def test_the_same_last_event_id_may_be_sent_again(web, fake_engine):
    """A reconnect that was cut before a new event repeats its id and gets the same events."""
    fake_engine.runs["r"] = Run(id="r", state=RunState.RUN_STATE_RUNNING, last_seq=2)
    fake_engine.on("Attach", [make_delta("b", seq=2), done("b", seq=3)])  # fmt: skip
    answers = [
        (await web.http.get("/v1/runs/r/events", headers={"Last-Event-ID": "1"})).content for _ in range(2)
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert b"id: 2\n" in answers[0]


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELLED"])
async def test_a_final_run_with_nothing_left_is_204(web, fake_engine, state):
    """204 is what stops an EventSource; no attach is made for it."""
    fake_engine.runs["r"] = Run(id="r", state=RunState.Value(f"RUN_STATE_{state}"), last_seq=9)
    answer = await web.http.get("/v1/runs/r/events", headers={"Last-Event-ID": "9"})
    assert (answer.status_code, answer.content) == (204, b"")
    assert fake_engine.calls_of("Attach") == []


async def test_a_parked_run_with_nothing_new_is_followed_and_not_204(web, fake_engine):
    """A parked run may go on, so its follower stays."""
    fake_engine.runs["r"] = Run(id="r", state=RunState.RUN_STATE_INTERRUPTED, last_seq=9)
    fake_engine.on("Attach", ["headers", 0.05, make_delta("x", seq=10), done("x", seq=11)])  # fmt: skip
    async with aconnect_sse(web.http, "GET", "/v1/runs/r/events?after=9") as source:
        assert [id_ for id_, _ in await events_of(source)] == ["10", "11"]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (EngineError("LOG_COMPACTED", "the log was compacted; read the messages"), 410),
        (EngineError("AFTER_SEQ_OUT_OF_RANGE", "beyond the end"), 416),
    ],
)
async def test_a_position_that_cannot_be_served_is_an_explicit_error(web, fake_engine, refusal, status):
    """A compacted log and a position beyond the end are told apart from an end."""
    fake_engine.runs["r"] = Run(id="r", state=RunState.RUN_STATE_SUCCEEDED, last_seq=9)
    fake_engine.on("Attach", [refusal])
    answer = await web.http.get("/v1/runs/r/events", headers={"Last-Event-ID": "3"})
    assert answer.status_code == status
    assert answer.json()["error"]["reason"] == refusal.reason


async def test_an_unknown_run_is_404(web):
    """The reason of the engine is in the body."""
    answer = await web.http.get("/v1/runs/none/events")
    assert answer.status_code == 404
    assert answer.json()["error"]["reason"] == "UNKNOWN_RUN"


async def test_a_position_that_is_no_number_is_400(web, fake_engine):
    """A position from another server's ids is refused instead of read as the start."""
    for position in ("x", "-1", "2147483648", "1.5", "٣"):
        answer = await web.http.get("/v1/runs/r/events", headers={"Last-Event-ID": position.encode()})
        assert answer.status_code == 400, position
        assert "Last-Event-ID" in answer.json()["error"]["fields"]
        answer = await web.http.get("/v1/runs/r/events", params={"after": position})
        assert "after" in answer.json()["error"]["fields"]
    assert fake_engine.calls == []


@pytest.mark.parametrize("headers_first", [True, False])
async def test_leaving_is_noticed_while_the_stream_is_idle(web, fake_engine, question, headers_first):
    """The engine sees its call end at once, before the first event and even before it accepted the run."""
    fake_engine.on("Run", ["headers" if headers_first else "no-headers", "hang"])
    asking = asyncio.create_task(web.http.post("/v1/runs", json=question()))
    call = await fake_engine.wait_for_call("Run")
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.wait({asking})
    await asyncio.wait_for(call.over.wait(), 60)
    assert call.left
    assert fake_engine.calls_of("Cancel") == []
    async with asyncio.timeout(60):
        while len(web.app.streams):  # noqa: ASYNC110  # the gateway tells nobody of it
            await asyncio.sleep(0.01)


async def test_leaving_in_the_middle_of_the_text_ends_the_call(web, fake_engine, question):
    """A client that has read some text is noticed the same way."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    async with aconnect_sse(web.http, "POST", "/v1/runs", json=question()) as source:
        async for _ in source.aiter_sse():
            break
    call = await fake_engine.wait_for_call("Run")
    await asyncio.wait_for(call.over.wait(), 60)
    assert call.left


async def test_a_client_that_stops_reading_is_given_up(gateways, fake_engine, question):
    """A write that nobody takes ends the stream after the stall time, so it holds nothing for ever."""
    web = await gateways.start(stall=0.2)
    big = "x" * 1_000_000
    fake_engine.on("Run", ["headers", *[make_delta(big) for _ in range(30)], "hang"])
    host, port = web.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(question()).encode()
    writer.write(b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()
    try:
        call = await fake_engine.wait_for_call("Run")
        await asyncio.wait_for(call.over.wait(), 60)
        assert call.left
    finally:
        writer.transport.abort()
    assert reader.exception() is None


async def test_a_shutdown_ends_open_streams_at_once(web, fake_engine, question):
    """On SIGTERM readers see a clean end and follow the run again from their last id; the run goes on."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    async with web.http.stream("POST", "/v1/runs", json=question()) as answer:
        chunks = answer.aiter_bytes()
        text = await anext(chunks)
        web.gateway.should_exit = True
        async with asyncio.timeout(60):
            text += b"".join([chunk async for chunk in chunks])
    assert text.endswith(b"}\n\n")
    assert fake_engine.calls_of("Cancel") == []


async def test_a_stream_the_engine_has_lost_ends_without_a_terminal_event(gateways, fake_engine, question):
    """The gateway makes up no event of the run: the response ends, and the client follows the run."""
    web = await gateways.start(reconnect=0)
    read = asyncio.Event()
    fake_engine.on("Run", [make_delta("a"), read, "cut"])
    found = []
    async with aconnect_sse(web.http, "POST", "/v1/runs", json=question()) as source:
        async for event in source.aiter_sse():
            found.append(json.loads(event.data)["type"])
            read.set()
    assert found == ["delta"]


async def test_cancel_names_the_run_and_the_reason(web, fake_engine):
    """The answer is the run as it is once the wish is stored."""
    fake_engine.runs["r"] = Run(id="r", state=RunState.RUN_STATE_RUNNING)
    answer = await web.http.post("/v1/runs/r/cancel", json={"reason": "enough"})
    assert answer.json()["run"]["state"] == "RUN_STATE_RUNNING"
    request = fake_engine.calls_of("Cancel")[0].request
    assert (request.run_id, request.reason) == ("r", "enough")


async def test_cancel_needs_no_body_but_takes_none_about_another_run(web, fake_engine):
    """The path names the run; a body that names another is a mistake."""
    assert (await web.http.post("/v1/runs/r/cancel")).status_code == 200
    answer = await web.http.post("/v1/runs/r/cancel", json={"runId": "q"})
    assert answer.status_code == 400
    assert len(fake_engine.calls_of("Cancel")) == 1
