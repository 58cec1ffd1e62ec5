"""Streams of the Anthropic API: what comes out of each shape that the API, clouds and gateways send."""

import asyncio
import json

import pytest

from dualclaw_server.engine.model import ReasoningDelta, TextDelta
from dualclaw_server.models.endpoint import ModelTimeouts


async def test_text_comes_as_it_arrives_and_the_answer_is_whole(claude, outcome_of) -> None:
    """Deltas, finish reason, usage, model and request id of a plain answer."""
    outcome = await outcome_of(
        claude.begin(),
        {"type": "ping"},
        *claude.text(0, "Hel", "lo"),
        {"type": "ping"},
        claude.finish("end_turn"),
        claude.END,
    )
    assert outcome.deltas == [TextDelta("Hello")]
    response = outcome.response
    assert (response.finish_reason, response.model, response.request_id) == ("stop", "claude-x", "msg_1")
    assert claude.usage_of(response.usage) == {"input_tokens": 9, "output_tokens": 7}


async def test_thinking_signatures_and_redacted_blocks_are_kept_in_order(claude, outcome_of) -> None:
    """Each block stays a part of its own where it stood, with its signature; a signature needs no text (PS38)."""
    outcome = await outcome_of(
        claude.begin(),
        claude.block(0, "thinking", thinking="", signature=""),
        claude.delta(0, "thinking_delta", thinking="because"),
        claude.delta(0, "signature_delta", signature="SIG"),
        claude.delta(0, "signature_delta", signature="NED"),
        claude.stop(0),
        claude.block(1, "redacted_thinking", data="SEALED=="),
        claude.stop(1),
        claude.block(2, "thinking", thinking="", signature=""),
        claude.delta(2, "thinking_delta", thinking=""),
        claude.delta(2, "signature_delta", signature="ALONE"),
        claude.stop(2),
        *claude.call(3, "toolu_1", "look", ""),
        claude.finish("tool_use"),
        claude.END,
    )
    assert outcome.deltas == [ReasoningDelta("because")]
    assert claude.kinds_of(outcome.response) == [
        ("reasoning", "because", "anthropic:SIGNED", b""),
        ("reasoning", "", "anthropic:", b"SEALED=="),
        ("reasoning", "", "anthropic:ALONE", b""),
        ("tool_call", "toolu_1", "", b""),
    ]


async def test_unknown_events_blocks_and_deltas_are_skipped(claude, outcome_of) -> None:
    """Server tools, citations and whatever comes next leave text and calls as they are."""
    outcome = await outcome_of(
        claude.begin(),
        {"type": "something_new", "index": 0, "data": {"text": "no"}},
        claude.block(0, "server_tool_use", id="srv", name="web_search", input={}),
        claude.delta(0, "input_json_delta", partial_json='{"query": "x"}'),
        claude.stop(0),
        claude.block(
            1, "web_search_tool_result", tool_use_id="srv", content=[{"type": "web_search_result", "url": "u"}]
        ),
        claude.stop(1),
        claude.block(2, "text", text=""),
        claude.delta(2, "citations_delta", citation={"cited_text": "no"}),
        claude.delta(2, "text_delta", text="yes"),
        claude.delta(2, "new_delta", text="no"),
        claude.stop(2),
        claude.finish(),
        claude.END,
    )
    assert outcome.text == "yes"
    assert claude.kinds_of(outcome.response) == [("text", "yes", "", b"")]


STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "length",
    "refusal": "content_filter",
    "something_new": "stop",
}


@pytest.mark.parametrize("reason", STOPS)
async def test_stop_reasons_are_normalised(claude, outcome_of, reason: str) -> None:
    """Each stop reason of an answer without calls has its finish reason; "tool_use" without a call is a stop."""
    outcome = await outcome_of(claude.begin(), *claude.text(0, "t"), claude.finish(reason), claude.END)
    assert outcome.response.finish_reason == STOPS[reason]


async def test_an_answer_without_content_is_an_answer(claude, outcome_of) -> None:
    """The API gives empty answers when the model has nothing to add; but a full window is an overflow."""
    outcome = await outcome_of(claude.begin(), claude.finish("end_turn"), claude.END)
    assert (outcome.response.finish_reason, len(outcome.response.message.parts)) == ("stop", 0)
    outcome = await outcome_of(claude.begin(), claude.finish("model_context_window_exceeded"), claude.END)
    assert (outcome.error.reason, outcome.error.retryable) == ("CONTEXT_OVERFLOW", False)


USAGES = {
    "cumulative": (
        lambda claude: [claude.begin(), claude.finish(output_tokens=3), claude.finish(output_tokens=8)],
        {"input_tokens": 9, "output_tokens": 8},
    ),
    "zeros first": (
        lambda claude: [claude.begin(input_tokens=0), claude.finish(input_tokens=40)],
        {"input_tokens": 40, "output_tokens": 7},
    ),
    "zeros last": (
        lambda claude: [claude.begin(), claude.finish(input_tokens=0)],
        {"input_tokens": 9, "output_tokens": 7},
    ),
    "caches are part of the prompt": (
        lambda claude: [claude.begin(cache_read_input_tokens=100, cache_creation_input_tokens=20), claude.finish()],
        {"input_tokens": 129, "output_tokens": 7, "cached_tokens": 100},
    ),
    "thinking": (
        lambda claude: [claude.begin(), claude.finish(output_tokens_details={"thinking_tokens": 5})],
        {"input_tokens": 9, "output_tokens": 7, "reasoning_tokens": 5},
    ),
    "nonsense": (
        lambda claude: [
            claude.begin(input_tokens=None, output_tokens="3"),
            claude.finish(output_tokens=-1, cache_read_input_tokens=True),
        ],
        {},
    ),
}


@pytest.mark.parametrize("case", USAGES)
async def test_usage_is_cumulative_and_counts_caches(claude, outcome_of, case: str) -> None:
    """Of each number the largest report counts; what is cached is part of our prompt tokens."""
    events, expected = USAGES[case]
    outcome = await outcome_of(*events(claude), claude.END)
    assert claude.usage_of(outcome.response.usage) == expected


ERRORS = {
    "overloaded_error": ("MODEL_OVERLOADED", True),
    "rate_limit_error": ("MODEL_OVERLOADED", True),
    "api_error": ("MODEL_UNAVAILABLE", True),
    "timeout_error": ("MODEL_TIMEOUT", True),
    "authentication_error": ("MODEL_AUTH", False),
    "permission_error": ("MODEL_AUTH", False),
    "request_too_large": ("CONTEXT_OVERFLOW", False),
    "invalid_request_error": ("MODEL_BAD_RESPONSE", False),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("at", ["first", "after text"])
async def test_an_error_in_the_stream_is_typed_and_keeps_text_and_usage(claude, outcome_of, kind: str, at: str) -> None:
    """The error's type decides, not the status 200 (PS34); what was there before is not lost."""
    error = {"type": "error", "error": {"type": kind, "message": "Sorry"}, "request_id": "req_1"}
    before = [claude.begin(), *claude.text(0, "half")[:2]] if at == "after text" else []
    outcome = await outcome_of(*before, error)
    assert (outcome.error.reason, outcome.error.retryable) == ERRORS[kind]
    assert outcome.error.detail == "Sorry"
    assert outcome.response is None
    if before:
        assert outcome.text == "half"
        assert claude.usage_of(outcome.error.usage) == {"input_tokens": 9, "output_tokens": 1}
    else:
        assert outcome.error.usage is None


async def test_an_error_object_inside_an_open_event_is_found(claude, outcome_of) -> None:
    """A gateway that forgot the blank line before its error still reports an error (PS47)."""
    error = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})
    outcome = await outcome_of(claude.begin(), '{"type":"content_block_del\ndata: ' + error)
    assert (outcome.error.reason, outcome.error.detail) == ("MODEL_OVERLOADED", "busy")


async def test_no_key_is_in_an_error(claude, outcome_of) -> None:
    """A gateway that repeats the key in its error does not put it into ours."""
    outcome = await outcome_of({"type": "error", "error": {"type": "api_error", "message": f"bad key {claude.KEY}"}})
    assert claude.KEY not in str(outcome.error) + outcome.error.detail


async def test_a_repeated_start_is_ignored_and_a_second_message_is_a_break(claude, outcome_of) -> None:
    """The same id is a gateway's repeat; another id while the first is open is never merged (PS41)."""
    outcome = await outcome_of(
        claude.begin(), claude.begin(), *claude.text(0, "once"), claude.begin(), claude.finish(), claude.END
    )
    assert (outcome.text, outcome.response.finish_reason) == ("once", "stop")
    half = claude.call(0, "a", "rm", '{"path": "/')[:-1]
    outcome = await outcome_of(
        claude.begin("m1"),
        *half,
        claude.begin("m2"),
        *claude.call(0, "b", "ls", "{}"),
        claude.finish("tool_use"),
        claude.END,
    )
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_STREAM_BROKEN", True)
    assert outcome.response is None
    outcome = await outcome_of(
        claude.begin(""),
        *claude.text(0, "half")[:2],
        claude.begin(""),
        *claude.text(0, "whole"),
        claude.finish(),
        claude.END,
    )
    assert outcome.error.reason == "MODEL_STREAM_BROKEN"


async def test_the_end_of_the_body_is_the_end_only_after_a_stop_reason(claude, outcome_of) -> None:
    """Only the end mark is missing after a stop reason; before it the answer broke off, and its text is kept."""
    outcome = await outcome_of(claude.begin(), *claude.call(0, "a", "f", "{}"), claude.finish("tool_use"))
    assert (outcome.calls, outcome.response.finish_reason) == ([("a", "f", "{}")], "tool_calls")
    outcome = await outcome_of(claude.begin(), *claude.text(0, "half"), *claude.call(1, "a", "f", "{}"))
    assert (outcome.error.reason, outcome.error.retryable, outcome.text) == ("MODEL_STREAM_BROKEN", True, "half")
    assert claude.usage_of(outcome.error.usage) == {"input_tokens": 9, "output_tokens": 1}


ENDS = {
    "nothing": (lambda claude: [], "MODEL_STREAM_BROKEN"),
    "PS46 only the gateway's end mark": (lambda claude: ["[DONE]"], "MODEL_STREAM_BROKEN"),
    "start and stop only": (lambda claude: [claude.begin(), claude.END], "MODEL_STREAM_BROKEN"),
    "message_stop without a reason": (lambda claude: [claude.begin(), *claude.text(0, "t"), claude.END], None),
    "the gateway's end mark": (lambda claude: [claude.begin(), *claude.text(0, "t"), claude.finish(), "[DONE]"], None),
    "the gateway's end mark alone": (lambda claude: [claude.begin(), *claude.text(0, "t"), "[DONE]"], None),
    "PS14 a keepalive sent as data": (
        lambda claude: [": keepalive", claude.begin(), *claude.text(0, "t"), claude.finish(), claude.END],
        None,
    ),
    "another API's stream": (lambda claude: [{"choices": [{"delta": {"content": "t"}}]}], "MODEL_BAD_RESPONSE"),
    "no JSON": (lambda claude: ["<html>"], "MODEL_BAD_RESPONSE"),
}


@pytest.mark.parametrize("case", ENDS)
async def test_ends_are_told_apart(claude, outcome_of, case: str) -> None:
    """Each way of ending gives an answer, or a typed failure that may be tried again."""
    events, reason = ENDS[case]
    outcome = await outcome_of(*events(claude))
    if reason is None:
        assert (outcome.text, outcome.response.finish_reason) == ("t", "stop")
    else:
        assert (outcome.error.reason, outcome.error.retryable) == (reason, True)


async def test_message_stop_ends_the_answer_though_the_connection_stays_open(claude, kit, vendor) -> None:
    """The answer does not wait for the server to close (PS29); what follows is not read."""
    closed = asyncio.Event()

    async def script(connection, asked) -> None:
        late = claude.stream(claude.begin("m2"), *claude.text(0, "late"))
        await connection.send(
            kit.SSE_HEAD + claude.stream(claude.begin(), *claude.text(0, "t"), claude.finish(), claude.END) + late
        )
        assert await connection.closed_by_peer()
        closed.set()

    async with vendor(script) as served, claude.model_at(served) as model:
        outcome = await kit.play(model)
        await asyncio.wait_for(closed.wait(), 60)
    assert (outcome.text, outcome.error) == ("t", None)


async def test_pings_do_not_keep_a_silent_answer_open_for_ever(claude, kit, vendor) -> None:
    """A vendor that only pings in the middle of an answer runs into the wait for something else."""

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + claude.stream(claude.begin(), *claude.text(0, "half")[:2]))
        while not await connection.closed_by_peer(within=0.02):
            await connection.send(claude.stream({"type": "ping"}))

    timeouts = ModelTimeouts(stalled=0.3)
    async with vendor(script) as served, claude.model_at(served, timeouts=timeouts) as model:
        outcome = await kit.play(model)
    assert (outcome.error.reason, outcome.error.retryable, outcome.text) == ("MODEL_TIMEOUT", True, "half")
    assert claude.usage_of(outcome.error.usage) == {"input_tokens": 9, "output_tokens": 1}


async def test_hidden_thinking_counts_as_the_first_token(claude, kit, vendor) -> None:
    """With thinking that is not shown the first text comes late; the block that was begun says the model is at work."""
    go_on = asyncio.Event()

    async def script(connection, asked) -> None:
        await connection.send(
            kit.SSE_HEAD + claude.stream(claude.begin(), claude.block(0, "thinking", thinking="", signature=""))
        )
        await go_on.wait()
        await connection.send(claude.stream(claude.stop(0), *claude.text(1, "t"), claude.finish(), claude.END))

    timeouts = ModelTimeouts(first_token=3, idle=60)
    async with vendor(script) as served, claude.model_at(served, timeouts=timeouts) as model:
        playing = asyncio.create_task(kit.play(model))
        await asyncio.sleep(3.2)
        go_on.set()
        outcome = await asyncio.wait_for(playing, 60)
    assert (outcome.text, outcome.error) == ("t", None)


async def test_halves_of_a_surrogate_pair_meet_again(claude, outcome_of) -> None:
    """Halves in two deltas become one character; one that stays alone becomes U+FFFD, in text and in thinking."""
    events = [
        '{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":""}}',
        '{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"a\\ud83d"}}',
        '{"type":"content_block_stop","index":0}',
        '{"type":"content_block_start","index":1,"content_block":{"type":"text","text":"b\\ud83d"}}',
        '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"\\ude00c"}}',
    ]
    outcome = await outcome_of(claude.begin(), *events, claude.finish(), claude.END)
    assert (outcome.reasoning, outcome.text) == ("a\ufffd", "b\U0001f600c")
    outcome = await outcome_of(claude.begin(), events[3], claude.finish(), claude.END)
    assert (outcome.text, outcome.response.message.parts[0].text) == ("b\ufffd", "b\ufffd")


async def test_a_repeated_start_of_a_block_begins_nothing(claude, outcome_of) -> None:
    """A gateway that sends a block's start twice doubles neither its text nor a call without an id."""
    start = claude.block(0, "text", text="Hel")
    rest = [claude.delta(0, "text_delta", text="lo"), claude.stop(0)]
    call = claude.block(1, "tool_use", name="f", input={})
    outcome = await outcome_of(
        claude.begin(), start, start, *rest, call, call, claude.stop(1), claude.finish(), claude.END
    )
    assert outcome.text == "Hello"
    assert [name for _, name, _ in outcome.calls] == ["f"]
