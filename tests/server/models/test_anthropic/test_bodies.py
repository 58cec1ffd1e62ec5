"""Answers of the Anthropic API that are not streamed, and bodies that are no answers."""

import json

import pytest


async def test_request_id_of_the_headers_comes_before_the_messages_own(claude, kit, vendor) -> None:
    """The header ``request-id`` is what the vendor's support asks for."""
    body = json.dumps({"type": "message", "id": "msg_1", "content": [], "stop_reason": "end_turn"}).encode()
    async with vendor(kit.answers(200, body, request_id="req_7")) as served, claude.model_at(served) as model:
        assert (await model.generate(kit.asking())).request_id == "req_7"


WHOLE = {
    "type": "message",
    "id": "msg_1",
    "model": "claude-x",
    "content": [
        {"type": "thinking", "thinking": "why", "signature": "S"},
        {"type": "redacted_thinking", "data": "SEAL"},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1, 2]}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
    ],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 5, "output_tokens": 6, "cache_read_input_tokens": 2},
}


async def test_a_whole_answer_reads_like_a_streamed_one(claude, kit, vendor) -> None:
    """generate, and a stream that is answered with one JSON body, give the same message."""
    async with vendor(kit.answers(200, json.dumps(WHOLE).encode())) as served, claude.model_at(served) as model:
        response = await model.generate(kit.asking())
        outcome = await kit.play(model)
    assert claude.kinds_of(response) == [
        ("reasoning", "why", "anthropic:S", b""),
        ("reasoning", "", "anthropic:", b"SEAL"),
        ("text", "hi", "", b""),
        ("tool_call", "a", "", b""),
        ("tool_call", "b", "", b""),
    ]
    assert outcome.calls == [("a", "f", '{"x": [1, 2]}'), ("b", "g", "{}")]
    assert outcome.response == response
    assert (outcome.text, outcome.reasoning) == ("hi", "why")
    assert claude.usage_of(response.usage) == {"input_tokens": 7, "output_tokens": 6, "cached_tokens": 2}
    assert [asked.json["stream"] for asked in served.asked] == [False, True]


BODIES = {
    "another API's answer": (200, {"choices": [{"message": {"content": "x"}}]}, "MODEL_BAD_RESPONSE", False),
    "an error in a 200": (200, {"type": "error", "error": {"type": "overloaded_error"}}, "MODEL_OVERLOADED", True),
    "529": (529, {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, "MODEL_OVERLOADED", True),
    "401": (401, {"type": "error", "error": {"type": "authentication_error", "message": "x"}}, "MODEL_AUTH", False),
    "too long": (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8 maximum"}},
        "CONTEXT_OVERFLOW",
        False,
    ),
    "too long with the answer": (
        400,
        {"error": {"message": "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000"}},
        "CONTEXT_OVERFLOW",
        False,
    ),
}


@pytest.mark.parametrize("case", BODIES)
async def test_bodies_that_are_no_answer_are_typed_failures(claude, kit, vendor, case: str) -> None:
    """Each body gives the same typed failure, streamed or not."""
    status, body, reason, retryable = BODIES[case]
    async with vendor(kit.answers(status, json.dumps(body).encode())) as served, claude.model_at(served) as model:
        outcome = await kit.play(model)
        with pytest.raises(type(outcome.error)) as raised:
            await model.generate(kit.asking())
    for error in (outcome.error, raised.value):
        assert (error.reason, error.retryable) == (reason, retryable)


async def test_a_refusal_without_content_is_an_answer(claude, kit, vendor) -> None:
    """A body with null for its content but a stop reason is one, too."""
    body = json.dumps({"type": "message", "content": None, "stop_reason": "refusal"}).encode()
    async with vendor(kit.answers(200, body)) as served, claude.model_at(served) as model:
        assert (await model.generate(kit.asking())).finish_reason == "content_filter"
