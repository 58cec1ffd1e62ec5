"""Calls to a Chat Completions endpoint that go wrong before, around and instead of a stream."""

import asyncio
import json
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from dualclaw_server.engine.model import ModelError, TextDelta
from dualclaw_server.models.endpoint import ModelTimeouts

KEY = "sk-test-0123456789abcdef"
PATIENCE = 60.0
QUICK_START = ModelTimeouts(first_token=0.5, whole=1)
QUICK_IDLE = ModelTimeouts(idle=0.4)


async def failure_of(kit, vendor, script, timeouts=None):
    """Return the error of one stream against a script, and the vendor."""
    async with vendor(script) as served, kit.model_at(served, KEY, timeouts=timeouts) as model:
        outcome = await kit.play(model)
        with pytest.raises(ModelError) as generated:
            await model.generate(kit.asking())
    assert outcome.error is not None
    assert generated.value.reason == outcome.error.reason
    assert KEY not in repr(vars(outcome.error)) + str(outcome.error) + repr(vars(generated.value))
    return outcome.error


STATUSES = {
    "401": (401, {"error": {"message": "no"}}, "MODEL_AUTH", False),
    "403": (403, {"error": {"message": "no"}}, "MODEL_AUTH", False),
    "400": (400, {"error": {"message": "no such field"}}, "MODEL_BAD_RESPONSE", False),
    "404": (404, {"error": {"message": "no such model"}}, "MODEL_BAD_RESPONSE", False),
    "422": (422, {"detail": [{"msg": "field required"}]}, "MODEL_BAD_RESPONSE", False),
    "408": (408, {}, "MODEL_TIMEOUT", True),
    "409": (409, {}, "MODEL_UNAVAILABLE", True),
    "429": (429, {"error": {"message": "slow down"}}, "MODEL_OVERLOADED", True),
    "429 that speaks of tokens": (
        429,
        {"error": {"message": "maximum context length of 8192 tokens per minute", "code": "context_length_exceeded"}},
        "MODEL_OVERLOADED",
        True,
    ),
    "429 without quota": (429, {"error": {"code": "insufficient_quota", "message": "pay"}}, "MODEL_OVERLOADED", False),
    "500": (500, {"error": {"message": "oops"}}, "MODEL_UNAVAILABLE", True),
    "502 without JSON": (502, None, "MODEL_UNAVAILABLE", True),
    "503": (503, {"error": {"message": "restarting"}}, "MODEL_UNAVAILABLE", True),
    "503 overloaded": (503, {"error": {"type": "overloaded_error", "message": "busy"}}, "MODEL_OVERLOADED", True),
    "529": (529, {}, "MODEL_OVERLOADED", True),
    "413": (413, {}, "CONTEXT_OVERFLOW", False),
    "413 rate": (
        413,
        {"error": {"message": "Limit 6000 tokens per minute", "code": "rate_limit_exceeded"}},
        "MODEL_OVERLOADED",
        True,
    ),
    "context by code": (400, {"error": {"code": "context_length_exceeded", "message": "x"}}, "CONTEXT_OVERFLOW", False),
    "500 with a context text": (
        500,
        {"error": {"message": "exceeds the available context size"}},
        "CONTEXT_OVERFLOW",
        False,
    ),
    "redirect": (301, {}, "MODEL_BAD_RESPONSE", False),
}


@pytest.mark.parametrize("case", STATUSES)
async def test_every_status_has_its_typed_error(kit, vendor, case: str) -> None:
    """Reason and retryable follow from status, code and text; streaming and not."""
    status, body, reason, retryable = STATUSES[case]
    raw = b"<html>Bad gateway</html>" if body is None else json.dumps(body).encode()
    error = await failure_of(kit, vendor, kit.answers(status, raw))
    assert (error.reason, error.retryable) == (reason, retryable)
    assert str(status) in error.message


OVERFLOWS = [
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
    "This endpoint's maximum context length is 131072 tokens.",
    "prompt is too long: 210000 tokens > 200000 maximum",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
    "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "Please reduce the length of the messages or completion.",
    "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
    "the request exceeds the available context size, try increasing it",
    "prompt too long; exceeded max context length by 4 tokens",
    "the number of tokens to keep is greater than the context length",
    "Your request exceeded model token limit: 262144",
    "Range of input length should be [1, 129024]",
    "Prompt exceeds max length",
    "invalid params, context window exceeds limit (2013)",
    "Input is too long for requested model.",
    "prompt token count of 140000 exceeds the limit of 128000",
]


@pytest.mark.parametrize("text", OVERFLOWS)
async def test_overflow_is_known_by_the_vendors_texts(kit, vendor, text: str) -> None:
    """A 400 with the vendor's words for a conversation that is too long is CONTEXT_OVERFLOW."""
    error = await failure_of(kit, vendor, kit.answers(400, json.dumps({"error": {"message": text}}).encode()))
    assert (error.reason, error.retryable) == ("CONTEXT_OVERFLOW", False)


@pytest.mark.parametrize("text", ["max_tokens must be less than 4096", "Token limit reached", "invalid temperature"])
async def test_other_texts_about_tokens_are_no_overflow(kit, vendor, text: str) -> None:
    """A 400 about an option is a bad request: shortening the conversation would not help."""
    error = await failure_of(kit, vendor, kit.answers(400, json.dumps({"error": {"message": text}}).encode()))
    assert error.reason == "MODEL_BAD_RESPONSE"


async def test_retry_after_is_read_in_every_form(kit, vendor) -> None:
    """Seconds, milliseconds and dates become seconds; nonsense becomes None."""
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    cases = {"retry-after: 7": 7.0, "retry-after-ms: 1500": 1.5, "retry-after: nan": None, "retry-after: soon": None}
    for header, expected in cases.items():
        name, _, value = header.partition(": ")
        error = await failure_of(kit, vendor, kit.answers(429, b"{}", **{name.replace("-", "_"): value}))
        assert error.retry_after == expected
    error = await failure_of(kit, vendor, kit.answers(503, b"{}", retry_after=soon))
    assert 50 < error.retry_after <= 60


async def test_a_refused_key_is_never_repeated(kit, vendor) -> None:
    """Bodies that repeat the key or the header lose them; the rest of the text stays."""
    said = f"Incorrect API key: {KEY}. Sent header Authorization: Bearer {KEY}"
    for body in (json.dumps({"error": {"message": said}}), json.dumps({"error": said}), said):
        error = await failure_of(kit, vendor, kit.answers(401, body.encode()))
        assert error.reason == "MODEL_AUTH"
        assert "Incorrect API key: ***" in error.message


async def test_a_header_of_any_scheme_that_a_vendor_repeats_is_masked(kit, vendor) -> None:
    """The value goes, not the word in front of it, also when the key is not one of ours."""
    for scheme in ("Token ", "ApiKey ", "Bearer ", ""):
        said = json.dumps({"error": {"message": f"no good: authorization: {scheme}sk-other-key, sorry"}})
        error = await failure_of(kit, vendor, kit.answers(401, said.encode()))
        assert "sk-other-key" not in error.message + error.detail
        assert error.message.endswith("no good: authorization: ***, sorry")


async def test_a_key_in_the_stream_is_never_repeated(kit, vendor) -> None:
    """Error objects and unreadable data inside a stream are redacted too."""
    for event in ({"error": {"message": f"bad key {KEY}"}}, f"garbage {KEY}", [KEY]):
        async with vendor(kit.streams(event)) as served, kit.model_at(served, KEY) as model:
            outcome = await kit.play(model)
        assert KEY not in str(outcome.error) + outcome.error.detail
        assert "***" in outcome.error.message


NO_STREAMS = {
    "PS44 a page": ("text/html; charset=utf-8", b"<!doctype html><p>hi"),
    "JSON that is no completion": ("application/json", b'{"hello": "world"}'),
    "JSON that is no object": ("application/json", b'["hello"]'),
    "JSON without choices": ("application/json", b'{"id": "x", "choices": []}'),
    "nothing": ("application/json", b""),
    "a message": ("application/json; charset=utf-8", b'{"detail": "Not Found"}'),
}


@pytest.mark.parametrize("case", NO_STREAMS)
async def test_a_body_that_is_no_stream_names_the_path(kit, vendor, case: str) -> None:
    """A page or other JSON under a wrong base URL is MODEL_BAD_RESPONSE whose hint names the path and /v1."""
    content_type, body = NO_STREAMS[case]
    error = await failure_of(kit, vendor, kit.answers(200, body, content_type))
    assert (error.reason, error.retryable) == ("MODEL_BAD_RESPONSE", False)
    assert "/v1/chat/completions" in error.hint
    assert "end in /v1" in error.hint


async def test_an_error_body_with_status_200_is_its_error(kit, vendor) -> None:
    """Some gateways answer 200 and an error object as JSON; a list around it does not hide it."""
    body = {"error": {"code": 429, "message": "slow down"}}
    for value in (body, [body]):
        error = await failure_of(kit, vendor, kit.answers(200, json.dumps(value).encode()))
        assert (error.reason, error.retryable) == ("MODEL_OVERLOADED", True)


COMPLETION = {
    "id": "c-9",
    "model": "m-9",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "<think>why</think>Hello",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":2}'}},
                    {"function": {"name": "g", "arguments": ""}},
                ],
            },
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 2}},
}


async def test_a_whole_completion_is_read_streaming_and_not(kit, vendor) -> None:
    """``generate`` reads it, and so does ``stream`` from a server that ignores the wish to stream."""
    script = kit.answers(200, json.dumps(COMPLETION).encode(), x_request_id="r-1")
    async with vendor(script) as served, kit.model_at(served) as model:
        outcome = await kit.play(model)
        generated = await model.generate(kit.asking())
    assert (outcome.text, outcome.reasoning) == ("Hello", "why")
    for response in (outcome.response, generated):
        assert (response.finish_reason, response.model, response.request_id) == ("tool_calls", "m-9", "r-1")
        assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.reasoning_tokens) == (3, 4, 2)
        calls = [part.tool_call for part in response.message.parts if part.WhichOneof("part") == "tool_call"]
        assert [(call.name, call.args_json) for call in calls] == [("f", '{"x": 1}'), ("f", '{"x": 2}'), ("g", "{}")]
        assert len({call.id for call in calls}) == 3
    assert [asked.json["stream"] for asked in served.asked] == [True, False]


async def test_calls_of_a_whole_message_are_told_apart_by_their_place(kit, vendor) -> None:
    """Without ids and with one name, two entries are two calls, also when the first has no arguments."""
    calls = [{"function": {"name": "f", "arguments": text}} for text in ("", '{"x":1}', '{"x":1}')]
    body = {"choices": [{"message": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}
    async with vendor(kit.answers(200, json.dumps(body).encode())) as served, kit.model_at(served) as model:
        outcome = await kit.play(model)
    assert [args for _, _, args in outcome.calls] == ["{}", '{"x": 1}', '{"x": 1}']


async def test_generate_reads_a_stream_that_nobody_asked_for(kit, vendor) -> None:
    """A gateway that always streams gives ``generate`` the same outcome."""
    script = kit.streams(kit.chunk("Hel"), kit.chunk("lo"), kit.chunk(finish="stop"))
    async with vendor(script) as served, kit.model_at(served) as model:
        response = await model.generate(kit.asking())
    assert [part.text for part in response.message.parts] == ["Hello"]


async def test_a_connection_closed_before_the_answer_is_unavailable(kit, vendor) -> None:
    """No header at all: MODEL_UNAVAILABLE, and not a timeout, whatever the transport calls it."""
    error = await failure_of(kit, vendor, kit.says())
    assert (error.reason, error.retryable) == ("MODEL_UNAVAILABLE", True)


async def test_a_server_that_speaks_no_http(kit, vendor) -> None:
    """Bytes that are no HTTP are MODEL_BAD_RESPONSE."""
    error = await failure_of(kit, vendor, kit.says(b"SSH-2.0-OpenSSH_9\r\n\r\n"))
    assert (error.reason, error.retryable) == ("MODEL_BAD_RESPONSE", False)


async def silent(connection, asked) -> None:
    """Never answer."""
    await connection.closed_by_peer()


async def test_no_headers_in_time_is_a_timeout(kit, vendor) -> None:
    """The first-token wait includes the headers; ``generate`` has its own, longer bound."""
    start = asyncio.get_running_loop().time()
    error = await failure_of(kit, vendor, silent, QUICK_START)
    assert (error.reason, error.retryable) == ("MODEL_TIMEOUT", True)
    assert 1.4 < asyncio.get_running_loop().time() - start < PATIENCE


async def test_keepalives_are_no_first_token(kit, vendor) -> None:
    """Headers, a role and pings do not stretch the wait for the first token."""

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk(role="assistant", content=""), done=False))
        while not connection.reader.at_eof():
            await connection.send(b": ping\n\n")
            await asyncio.sleep(0.05)

    async with vendor(script) as served, kit.model_at(served, timeouts=ModelTimeouts(first_token=3)) as model:
        outcome = await kit.play(model)
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_TIMEOUT", True)
    assert "first token" in outcome.error.message


async def test_silence_after_the_first_token_is_a_timeout(kit, vendor) -> None:
    """No byte for the idle time ends the call; the text so far was shown."""

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("part"), done=False))
        await connection.closed_by_peer()

    async with vendor(script) as served, kit.model_at(served, timeouts=QUICK_IDLE) as model:
        outcome = await kit.play(model)
    assert (outcome.error.reason, outcome.text) == ("MODEL_TIMEOUT", "part")


async def test_keepalives_bridge_silence_but_not_for_ever(kit, vendor) -> None:
    """Pings keep a call open past the idle time, and no longer than the stalled time."""

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("one"), done=False))
        for _ in range(50):
            await asyncio.sleep(0.05)
            await connection.send(b": ping\n\n")
        await connection.send(kit.event_bytes(kit.chunk("two"), done=False))
        while not connection.reader.at_eof():
            await asyncio.sleep(0.05)
            await connection.send(b": ping\n\n")

    timeouts = ModelTimeouts(idle=2, stalled=6)
    async with vendor(script) as served, kit.model_at(served, timeouts=timeouts) as model:
        outcome = await kit.play(model)
    assert (outcome.error.reason, outcome.text) == ("MODEL_TIMEOUT", "onetwo")


async def test_a_slow_consumer_is_no_silent_model(kit, vendor) -> None:
    """Time the consumer takes is not counted against the model."""

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("a"), done=False))
        await asyncio.sleep(0.1)
        await connection.send(kit.event_bytes(kit.chunk("b"), kit.chunk(finish="stop")))

    async with vendor(script) as served, kit.model_at(served, timeouts=ModelTimeouts(idle=2)) as model:
        text = ""
        async with asyncio.timeout(PATIENCE), aclosing(model.stream(kit.asking())) as stream:
            async for item in stream:
                if isinstance(item, TextDelta):
                    text += item.text
                    await asyncio.sleep(2.2)
    assert text == "ab"


@pytest.mark.parametrize("when", ["before the headers", "in the stream"])
async def test_cancelling_closes_the_connection_at_once(kit, vendor, when: str) -> None:
    """A cancelled call leaves no socket and no task, wherever it was."""
    reached, closed = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def script(connection, asked) -> None:
        if when == "in the stream":
            await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("part"), done=False))
        reached.set()
        closed.set_result(await connection.closed_by_peer())

    async with vendor(script) as served, kit.model_at(served) as model:
        before = asyncio.all_tasks()
        task = asyncio.create_task(kit.play(model))
        await asyncio.wait_for(reached.wait(), PATIENCE)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.wait_for(closed, PATIENCE)
        assert task.cancelled()
        async with asyncio.timeout(PATIENCE):
            while not {left for left in asyncio.all_tasks() if "serve" not in repr(left)} <= before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_closing_the_generator_closes_the_connection_at_once(kit, vendor) -> None:
    """A consumer that leaves after the first delta ends the call at the vendor."""
    closed = asyncio.get_running_loop().create_future()

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("part"), done=False))
        closed.set_result(await connection.closed_by_peer())

    async with vendor(script) as served, kit.model_at(served) as model:
        async with asyncio.timeout(PATIENCE), aclosing(model.stream(kit.asking())) as stream:
            assert await anext(stream) == TextDelta("part")
        assert await asyncio.wait_for(closed, PATIENCE)


async def test_a_hundred_and_fifty_calls_at_once_do_not_wait_for_each_other(kit, vendor) -> None:
    """No pool limit: every call has its connection while all the others are open."""
    everyone = asyncio.Event()

    async def script(connection, asked) -> None:
        if served.open == 150:
            everyone.set()
        await everyone.wait()
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("hi"), kit.chunk(finish="stop")))

    async with vendor(script) as served, kit.model_at(served) as model:
        outcomes = await asyncio.gather(*(kit.play(model) for _ in range(150)))
    assert {outcome.text for outcome in outcomes} == {"hi"}
