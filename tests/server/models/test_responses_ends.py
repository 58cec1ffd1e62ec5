"""Ends of answers of the Responses API, streamed and whole: each is told apart."""

import json

import pytest

from dualclaw_server.models.endpoint import ModelTimeouts
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.responses.api import ResponsesApi
from dualclaw_server.models.sse import ServerEvent
from tests.server.models.conftest import item_added as added
from tests.server.models.conftest import item_call as called
from tests.server.models.conftest import item_delta as delta
from tests.server.models.conftest import response_over as over
from tests.server.models.conftest import responses_outcome as played

ENDS = {
    "completed": (over(), "stop"),
    "max_output_tokens": (over("incomplete", incomplete_details={"reason": "max_output_tokens"}), "length"),
    "content_filter": (over("incomplete", incomplete_details={"reason": "content_filter"}), "content_filter"),
    "incomplete without reason": (over("incomplete"), "length"),
    "end without response": ({"type": "response.completed"}, "stop"),
}


@pytest.mark.parametrize("case", ENDS)
async def test_the_status_gives_the_finish_reason(case: str) -> None:
    """Of an answer that was cut off too; its text is kept."""
    event, expected = ENDS[case]
    outcome = await played(delta("output_text", "A"), event)
    assert (outcome.text, outcome.response.finish_reason) == ("A", expected)


async def test_arguments_that_were_cut_off_are_never_run() -> None:
    """Neither half of them nor none: the raw text is kept as bad."""
    head, _ = called(0, "fc_1", "a")
    cut = over("incomplete", incomplete_details={"reason": "max_output_tokens"})
    for pieces, raw in ((["{", '"x"'], '{"x"'), ([], "")):
        events = [delta("function_call_arguments", piece, 0, "fc_1") for piece in pieces]
        outcome = await played(head, *events, cut)
        assert outcome.calls == [("a", "f", "")]
        assert outcome.response.bad_arguments == {"a": raw}
        assert outcome.response.finish_reason == "tool_calls"


ERROR = {"code": "server_error", "message": "The server had an error"}
LIMIT = {"code": "rate_limit_exceeded", "message": "Rate limit reached"}
LONG = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model"}
FAILURES = {
    "PS20 top level": ([{"type": "error", **ERROR}], "MODEL_UNAVAILABLE", True),
    "under error": ([{"type": "error", "error": LIMIT}], "MODEL_OVERLOADED", True),
    "failed": ([over("failed", error=ERROR)], "MODEL_UNAVAILABLE", True),
    "failed without error": ([over("failed")], "MODEL_UNAVAILABLE", True),
    "cancelled": ([over("cancelled")], "MODEL_UNAVAILABLE", True),
    "overflow": ([over("failed", error=LONG)], "CONTEXT_OVERFLOW", False),
    "quota": (
        [{"type": "error", "error": {"code": "insufficient_quota", "message": "pay"}}],
        "MODEL_OVERLOADED",
        False,
    ),
    "without type": ([{"error": LIMIT}], "MODEL_OVERLOADED", True),
    "PS47 in an open event": (
        [f'{{"type":"x"\ndata: {json.dumps({"type": "error", **ERROR})}'],
        "MODEL_UNAVAILABLE",
        True,
    ),
    "garbage": (["<html>"], "MODEL_BAD_RESPONSE", True),
    "no event": ([{"hello": 1}], "MODEL_BAD_RESPONSE", True),
    "end of the body": ([], "MODEL_STREAM_BROKEN", True),
    "[DONE] is no end": (["[DONE]"], "MODEL_STREAM_BROKEN", True),
    "half an event in the middle": (['{"type":"response.comp'], "MODEL_BAD_RESPONSE", True),
    "call without name": ([added(0, "function_call", "fc", call_id="a"), over()], "MODEL_BAD_RESPONSE", True),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_each_bad_end_is_told_apart(case: str) -> None:
    """Reason and retryable are the failure's, and what was shown before stays shown."""
    events, reason, retryable = FAILURES[case]
    outcome = await played(delta("output_text", "A"), *events)
    assert outcome.text == "A"
    assert outcome.response is None
    assert outcome.error is not None
    assert (outcome.error.reason, outcome.error.retryable) == (reason, retryable)


async def test_an_empty_stream_is_no_answer() -> None:
    """Nothing, or nothing but keepalives and an end mark of another API."""
    for events in ([], [": ping"], ["[DONE]"]):
        outcome = await played(*events)
        assert outcome.error is not None
        assert (outcome.error.reason, outcome.error.message) == (
            "MODEL_STREAM_BROKEN",
            "The model's stream was empty.",
        )


async def test_a_failed_call_says_what_it_has_cost(vendor) -> None:
    """The vendor reports usage with the failure."""
    outcome = await played(over("failed", error=ERROR, usage={"input_tokens": 7}))
    assert outcome.error is not None
    assert outcome.error.usage is not None
    assert outcome.error.usage.input_tokens == 7


async def test_the_end_event_is_the_end_though_the_connection_stays_open(kit, vendor) -> None:
    """Nothing is waited for after it."""

    async def script(connection, asked) -> None:
        head = kit.SSE_HEAD.replace(b"connection: close", b"transfer-encoding: chunked")
        body = kit.event_bytes(delta("output_text", "A"), over(), done=False)
        await connection.send(head + b"%x\r\n%b\r\n" % (len(body), body))
        await connection.closed_by_peer(within=30)

    async with vendor(script) as served, kit.api_at(served, ResponsesApi()) as model:
        outcome = await kit.play(model, within=10)
    assert outcome.text == "A"
    assert outcome.response is not None


def test_hidden_reasoning_is_a_sign_of_life() -> None:
    """A model that thinks for minutes without a word is not given up, once it said that it began."""
    fold = ResponsesApi().answer(Redactor([]), frozenset(), "")
    fold.feed(ServerEvent(json.dumps({"type": "response.created", "response": {"status": "in_progress"}})))
    assert not fold.started
    fold.feed(ServerEvent(json.dumps(added(0, "reasoning", "rs"))))
    assert fold.started


async def test_keepalives_alone_do_not_keep_a_call_open(kit, vendor) -> None:
    """Once it has begun, a stream of nothing but keepalives ends as a timeout."""
    quick = ModelTimeouts(idle=60, stalled=0.4)

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(delta("output_text", "A"), done=False))
        while not await connection.closed_by_peer(within=0.05):
            await connection.send(kit.event_bytes({"type": "keepalive"}, done=False))

    async with vendor(script) as served, kit.api_at(served, ResponsesApi(), timeouts=quick) as model:
        outcome = await kit.play(model)
    assert outcome.text == "A"
    assert outcome.error is not None
    assert outcome.error.reason == "MODEL_TIMEOUT"


WHOLE = {
    "id": "resp_1",
    "object": "response",
    "model": "m-1",
    "status": "completed",
    "error": None,
    "output": [
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": "E"},
        {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "id": "fc", "call_id": "a", "name": "f", "arguments": ""},
    ],
    "usage": {"input_tokens": 1, "output_tokens": 2},
}


async def test_an_answer_that_is_not_streamed_is_the_same(kit, vendor) -> None:
    """Asked for in one piece, or given so to someone who asked for a stream."""
    script = kit.answers(200, json.dumps(WHOLE).encode(), x_request_id="req_1")
    async with vendor(script) as served, kit.api_at(served, ResponsesApi()) as model:
        generated = await model.generate(kit.asking())
        outcome = await kit.play(model)
    assert (outcome.reasoning, outcome.text, outcome.calls) == ("S", "A", [("a", "f", "{}")])
    assert outcome.response == generated
    assert (generated.finish_reason, generated.request_id) == ("tool_calls", "req_1")
    assert generated.message.parts[0].reasoning.redacted == b"E"


BODIES = {
    "failed": (200, {**WHOLE, "status": "failed", "error": LIMIT}, "MODEL_OVERLOADED", True),
    "an error": (200, {"error": ERROR}, "MODEL_UNAVAILABLE", True),
    "something else": (200, {"choices": []}, "MODEL_BAD_RESPONSE", False),
    "no JSON": (200, "<html>", "MODEL_BAD_RESPONSE", False),
    "a status": (429, {"error": LIMIT}, "MODEL_OVERLOADED", True),
    "an overflow": (400, {"error": LONG}, "CONTEXT_OVERFLOW", False),
}


@pytest.mark.parametrize("case", BODIES)
async def test_each_bad_body_is_told_apart(kit, vendor, case: str) -> None:
    """In both ways to call."""
    status, body, reason, retryable = BODIES[case]
    encoded = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    script = kit.answers(status, encoded, "text/html" if isinstance(body, str) else "application/json")
    async with vendor(script) as served, kit.api_at(served, ResponsesApi()) as model:
        outcome = await kit.play(model)
        with pytest.raises(type(outcome.error)) as caught:
            await model.generate(kit.asking())
    assert outcome.error is not None
    assert (outcome.error.reason, outcome.error.retryable) == (reason, retryable)
    assert (caught.value.reason, caught.value.retryable) == (reason, retryable)
