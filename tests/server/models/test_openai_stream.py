"""Streams of Chat Completions: what comes out, when, and how each bad end is told apart."""

import asyncio
import gzip
import json
import logging
from contextlib import aclosing

import pytest

from dualclaw import Role
from dualclaw_server.engine.model import ModelError, ModelResponse, ReasoningDelta, TextDelta
from dualclaw_server.models.endpoint import ModelTimeouts

KEY = "sk-test-0123456789abcdef"
PATIENCE = 60.0


async def outcome_of(kit, vendor, script, timeouts=None, within=PATIENCE):
    """Play one stream against a script."""
    async with vendor(script) as served, kit.model_at(served, KEY, timeouts=timeouts) as model:
        return await kit.play(model, within=within)


async def test_one_read_is_one_delta_and_the_next_read_another(kit, vendor) -> None:
    """Neighbouring text of one network read is merged; text is shown before the stream goes on."""
    go_on = asyncio.Event()

    async def script(connection, asked) -> None:
        first = [kit.chunk(piece) for piece in "Hello"]
        await connection.send(kit.SSE_HEAD + kit.event_bytes(*first, done=False))
        await go_on.wait()
        await connection.send(kit.event_bytes(kit.chunk(" you"), kit.chunk(finish="stop")))

    async with (
        vendor(script) as served,
        kit.model_at(served) as model,
        asyncio.timeout(PATIENCE),
        aclosing(model.stream(kit.asking())) as stream,
    ):
        assert await anext(stream) == TextDelta("Hello")
        go_on.set()
        assert await anext(stream) == TextDelta(" you")
        last = await anext(stream)
        assert isinstance(last, ModelResponse)
        assert (last.model, last.request_id, last.finish_reason) == ("m-1", "c-1", "stop")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_parts_keep_the_order_in_which_the_model_wrote_them(kit, vendor) -> None:
    """Reasoning, text, a call and text after it stay where they were; the folded deltas are the texts."""
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}
    script = kit.streams(
        kit.chunk(reasoning_content="why"),
        kit.chunk("one "),
        kit.chunk("two"),
        kit.call_chunk(call),
        kit.chunk("three"),
        kit.chunk(finish="tool_calls"),
    )
    outcome = await outcome_of(kit, vendor, script)
    assert outcome.response.message.role == Role.ROLE_ASSISTANT
    kinds = [(part.WhichOneof("part"), part.text or part.reasoning.text) for part in outcome.response.message.parts]
    assert kinds == [("reasoning", "why"), ("text", "one two"), ("tool_call", ""), ("text", "three")]
    assert outcome.deltas == [ReasoningDelta("why"), TextDelta("one twothree")]


REASONING = {
    "reasoning_content": [{"reasoning_content": "R"}],
    "reasoning": [{"reasoning": "R"}],
    "details": [{"reasoning_details": [{"type": "reasoning.text", "text": "R"}]}],
    "summary": [{"reasoning_details": [{"type": "reasoning.summary", "summary": "R"}]}],
    "all at once": [{"reasoning_content": "R", "reasoning": "R", "reasoning_details": [{"text": "R"}]}],
    "typed parts": [{"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "R"}]}]}],
    "typed part with text": [{"content": [{"type": "reasoning", "text": "R"}]}],
    "PS31 inline": [{"content": "<thi"}, {"content": "nk>R</thi"}, {"content": "nk>"}],
}


@pytest.mark.parametrize("shape", REASONING)
async def test_reasoning_of_every_shape_is_reasoning(kit, vendor, shape: str) -> None:
    """Each way vendors send reasoning gives the same reasoning once, and leaves the text alone."""
    events = [kit.chunk(**delta) for delta in REASONING[shape]]
    outcome = await outcome_of(kit, vendor, kit.streams(*events, kit.chunk("A"), kit.chunk(finish="stop")))
    assert (outcome.reasoning, outcome.text) == ("R", "A")


CALL = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}
FINISHES = {
    "PS25 stop, with calls": ([CALL], "stop", "tool_calls"),
    "PS26 tool_calls, without": ([], "tool_calls", "stop"),
    "length": ([], "length", "length"),
    "max_tokens": ([], "MAX_TOKENS", "length"),
    "content filter": ([], "content_filter", "content_filter"),
    "safety": ([], "SAFETY", "content_filter"),
    "anything else": ([], "eos_token", "stop"),
    "function_call": ([CALL], "function_call", "tool_calls"),
    "none": ([CALL], None, "tool_calls"),
}


@pytest.mark.parametrize("case", FINISHES)
async def test_finish_reasons_are_normalised_and_calls_decide(kit, vendor, case: str) -> None:
    """The finish reason is "tool_calls" exactly when there are calls, whatever the vendor says."""
    calls, said, expected = FINISHES[case]
    events = [kit.chunk("t"), *(kit.call_chunk(call) for call in calls), kit.chunk(finish=said)]
    outcome = await outcome_of(kit, vendor, kit.streams(*events))
    assert outcome.response.finish_reason == expected
    assert len(outcome.calls) == len(calls)


async def test_ps40_cut_arguments_are_bad_whatever_finish_says(kit, vendor) -> None:
    """Half an argument string leaves args_json empty and its raw text in bad_arguments."""
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x": "y'}}
    for finish in ("tool_calls", "length", "stop"):
        outcome = await outcome_of(kit, vendor, kit.streams(kit.call_chunk(call), kit.chunk(finish=finish)))
        assert outcome.calls == [("a", "f", "")]
        assert outcome.response.bad_arguments == {"a": '{"x": "y'}


async def test_ps22_ps23_usage_after_and_beside_the_finish_reason(kit, vendor) -> None:
    """The last token may come with the finish reason, usage after it; the last usage counts."""
    script = kit.streams(
        kit.chunk("a"),
        {**kit.chunk("!", finish="stop"), "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {
            "id": "c",
            "choices": [],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None},
        },
    )
    outcome = await outcome_of(kit, vendor, script)
    assert outcome.text == "a!"
    usage = outcome.response.usage
    assert (usage.input_tokens, usage.output_tokens) == (9, 2)
    assert not usage.HasField("cached_tokens")


ODD = {
    "PS10 function null": (
        [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}],
        [{"index": 0, "function": None}, None],
        [{"index": 0, "function": {"arguments": ": 1}"}}],
    ),
    "PS01 no index": (
        [{"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        [{"function": {"arguments": ""}}],
    ),
    "null arguments": (
        [{"index": 0, "id": "a", "function": {"name": "f", "arguments": None}}],
        [{"index": 0, "id": None, "function": {"name": None, "arguments": '{"x": 1}'}}],
    ),
    "arguments as an object": ([{"index": 0, "id": "a", "function": {"name": "f", "arguments": {"x": 1}}}],),
    "index as text": ([{"index": "0", "id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}],),
}


@pytest.mark.parametrize("case", ODD)
async def test_odd_fragments_of_calls_are_read(kit, vendor, case: str) -> None:
    """Each odd form gives the same one call."""
    events = [kit.call_chunk(*fragments) for fragments in ODD[case]]
    outcome = await outcome_of(kit, vendor, kit.streams(*events, kit.chunk(finish="tool_calls")))
    assert outcome.calls == [("a", "f", '{"x": 1}')]


async def test_ps11_a_call_without_name_is_an_error(kit, vendor) -> None:
    """Arguments whose name never comes end as MODEL_BAD_RESPONSE."""
    call = {"index": 0, "id": "a", "function": {"arguments": "{}"}}
    outcome = await outcome_of(kit, vendor, kit.streams(kit.call_chunk(call), kit.chunk(finish="tool_calls")))
    assert outcome.error.reason == "MODEL_BAD_RESPONSE"


async def test_the_old_function_call_field_is_a_call(kit, vendor) -> None:
    """Old servers stream ``function_call``; it becomes a call with a made id."""
    script = kit.streams(
        kit.chunk(function_call={"name": "f", "arguments": ""}),
        kit.chunk(function_call={"arguments": '{"x": 1}'}),
        kit.chunk(finish="function_call"),
    )
    outcome = await outcome_of(kit, vendor, script)
    ((call_id, name, args),) = outcome.calls
    assert (name, args) == ("f", '{"x": 1}')
    assert call_id.startswith("call_")


async def test_characters_in_two_halves_meet_again(kit, vendor) -> None:
    """A surrogate pair sent as two escapes in two events is one character; a lone half becomes U+FFFD."""
    half = json.dumps(kit.chunk("HALF"))
    script = kit.streams(
        half.replace("HALF", "a\\ud83d"),
        half.replace("HALF", "\\ude00b"),
        half.replace("HALF", "c\\ud83d"),
        kit.chunk(finish="stop"),
    )
    outcome = await outcome_of(kit, vendor, script)
    assert outcome.text == "a😀bc\ufffd"
    assert outcome.response.message.parts[0].text == outcome.text


ENDS = {
    "PS28 [DONE] without finish reason": (["T"], True, "stop"),
    "no [DONE], with finish reason": (["T", "F"], False, "stop"),
}


@pytest.mark.parametrize("case", ENDS)
async def test_clean_ends(kit, vendor, case: str) -> None:
    """Either end mark alone ends an answer well."""
    events, done, finish = ENDS[case]
    made = {"T": kit.chunk("Hello"), "F": kit.chunk(finish="stop")}
    outcome = await outcome_of(kit, vendor, kit.streams(*(made[event] for event in events), done=done))
    assert outcome.error is None
    assert (outcome.text, outcome.response.finish_reason) == ("Hello", finish)


async def test_ps29_done_ends_at_once_and_closes_the_connection(kit, vendor) -> None:
    """After [DONE] a server that keeps its socket open, pinging, is left without delay."""
    closed = asyncio.get_running_loop().create_future()

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("hi"), kit.chunk(finish="stop")) + b": ping\n\n")
        closed.set_result(await connection.closed_by_peer())

    patient = ModelTimeouts(after_finish=10 * PATIENCE)  # so that only the end mark can have ended it in time
    async with vendor(script) as served, kit.model_at(served, timeouts=patient) as model:
        outcome = await kit.play(model)
        assert outcome.text == "hi"
        assert await asyncio.wait_for(closed, PATIENCE)


async def test_an_open_connection_after_the_finish_reason_ends_the_answer_as_it_is(kit, vendor) -> None:
    """Without [DONE] the answer ends well a moment after its finish reason, keepalives or not."""

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("hi"), kit.chunk(finish="stop"), done=False))
        while not connection.reader.at_eof():
            await connection.send(b": ping\n\n")
            await asyncio.sleep(0.05)

    outcome = await outcome_of(kit, vendor, script, ModelTimeouts(after_finish=0.2))
    assert (outcome.text, outcome.error) == ("hi", None)


async def test_connections_are_used_again_after_a_whole_answer(kit, vendor) -> None:
    """Answers in a row go over one connection, though each is left at [DONE].

    One whose end does not follow soon is not waited for: a machine that stands still at that moment costs a connection.
    """

    async def script(connection, asked) -> None:
        body = kit.event_bytes(kit.chunk("hi"), kit.chunk(finish="stop"))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await connection.send(head, b"%x\r\n%b\r\n" % (len(body), body))
        await asyncio.sleep(0.002)
        await connection.send(b"0\r\n\r\n")

    async with kit.vendor_of(script, keep_alive=True) as served, kit.model_at(served) as model:
        for _ in range(12):
            assert (await kit.play(model.with_tools([]))).text == "hi"
        assert len(served.asked) == 12
        assert served.connections <= 4


BROKEN = {
    "PS32 EOF in the middle": (["T"], b"", "MODEL_STREAM_BROKEN", True),
    "EOF in the middle of an event": (["T"], b'data: {"choices":[{"del', "MODEL_STREAM_BROKEN", True),
    "PS46 no byte": ([], b"", "MODEL_STREAM_BROKEN", True),
    "PS46 comments only": ([], b": ping\n\n", "MODEL_STREAM_BROKEN", True),
    "PS46 [DONE] only": ([], b"data: [DONE]\n\n", "MODEL_STREAM_BROKEN", True),
    "PS19 error beside empty choices": (
        ["T"],
        b'data: {"id":"g","choices":[],"error":{"code":502,"message":"overloaded"}}\n\ndata: [DONE]\n\n',
        "MODEL_OVERLOADED",
        True,
    ),
    "PS20 error at the top level": (
        ["T"],
        b'event: error\ndata: {"type":"error","code":"x","message":"m"}\n\n',
        "MODEL_BAD_RESPONSE",
        True,
    ),
    "error event with a bare text": (["T"], b"event: error\ndata: upstream went away\n\n", "MODEL_UNAVAILABLE", True),
    "error as text": (["T"], b'data: {"error":"boom"}\n\n', "MODEL_BAD_RESPONSE", True),
    "PS34 overload as first event": (
        [],
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n',
        "MODEL_OVERLOADED",
        True,
    ),
    "rate limit in the stream": (
        [],
        b'data: {"error":{"code":429,"message":"slow down"}}\n\n',
        "MODEL_OVERLOADED",
        True,
    ),
    "key refused in the stream": (
        [],
        b'data: {"error":{"code":"invalid_api_key","message":"no"}}\n\n',
        "MODEL_AUTH",
        False,
    ),
    "context overflow in the stream": (
        [],
        b'data: {"error":{"code":"context_length_exceeded","message":"no"}}\n\n',
        "CONTEXT_OVERFLOW",
        False,
    ),
    "bad request in the stream": (
        ["T"],
        b'data: {"error":{"type":"invalid_request_error","code":400,"message":"no"}}\n\n',
        "MODEL_BAD_RESPONSE",
        False,
    ),
    "PS47 two objects in one event": (
        ["T"],
        b'data: {"type":"x"\ndata: {"type":"error","error":{"type":"api_error","message":"lost"}}\n\n',
        "MODEL_UNAVAILABLE",
        True,
    ),
    "data that is not JSON": (["T"], b"data: Internal Server Error\n\n", "MODEL_BAD_RESPONSE", True),
    "finish reason error": (
        ["T"],
        b'data: {"choices":[{"delta":{},"finish_reason":"error"}]}\n\n',
        "MODEL_UNAVAILABLE",
        True,
    ),
    "choices of a wrong type": (["T"], b'data: {"choices":{"a":1}}\n\n', "MODEL_BAD_RESPONSE", True),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_every_bad_end_is_a_typed_error_and_keeps_what_was_shown(kit, vendor, case: str) -> None:
    """Reason and retryable are right, the text so far was shown, and no response is made up."""
    before, data, reason, retryable = BROKEN[case]
    head = kit.event_bytes(*(kit.chunk("part") for _ in before), done=False)
    outcome = await outcome_of(kit, vendor, kit.says(kit.SSE_HEAD + head + data))
    assert outcome.response is None
    assert (outcome.error.reason, outcome.error.retryable) == (reason, retryable), outcome.error
    assert outcome.text == "part" * len(before)


async def test_ps14_keepalives_sent_as_data_are_skipped(kit, vendor, caplog) -> None:
    """Data that starts with a colon is a keepalive: no error, and a debug line."""
    caplog.set_level(logging.DEBUG, "dualclaw_server.models")
    outcome = await outcome_of(kit, vendor, kit.streams(": keepalive", kit.chunk("a"), kit.chunk(finish="stop")))
    assert (outcome.text, outcome.error) == ("a", None)
    assert "keepalive" in caplog.text


async def test_ps13_ps16_keepalives_and_odd_separators_over_the_wire(kit, vendor) -> None:
    """Comments with ids between events and U+2028 inside the JSON change nothing."""
    first = json.dumps(kit.chunk("a\u2028b"), ensure_ascii=False).encode()
    script = kit.says(
        kit.SSE_HEAD,
        b"id: 7\r\n: ping\r\n\r\ndata: ",
        first,
        b"\r\n\r\n: ping\r\n\r\n",
        kit.event_bytes(kit.chunk(finish="stop")),
    )
    outcome = await outcome_of(kit, vendor, script)
    assert (outcome.text, outcome.error) == ("a\u2028b", None)


async def test_connection_reset_in_the_middle_is_a_broken_stream(kit, vendor) -> None:
    """A chunked body that is cut off is MODEL_STREAM_BROKEN, retryable, its text shown."""
    body = kit.event_bytes(kit.chunk("part"), done=False)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    async def script(connection, asked) -> None:
        await connection.send(head, b"%x\r\n%b\r\n" % (len(body), body))
        await asyncio.sleep(0.05)
        connection.writer.transport.abort()

    outcome = await outcome_of(kit, vendor, script)
    assert (outcome.error.reason, outcome.error.retryable, outcome.text) == ("MODEL_STREAM_BROKEN", True, "part")


async def test_a_stream_compressed_against_our_wish_is_read(kit, vendor) -> None:
    """We ask for identity; a proxy that compresses anyway is still understood."""
    body = gzip.compress(kit.event_bytes(kit.chunk("zip"), kit.chunk(finish="stop")))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\nconnection: close\r\n\r\n"
    outcome = await outcome_of(kit, vendor, kit.says(head + body))
    assert (outcome.text, outcome.error) == ("zip", None)


async def test_an_event_past_the_bound_is_a_typed_error(kit, vendor) -> None:
    """A peer cannot make us keep more than the bound."""
    script = kit.streams(kit.chunk("x" * 5000))
    async with vendor(script) as served, kit.model_at(served, max_event_bytes=1000) as model:
        outcome = await kit.play(model)
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", False)


async def test_ids_of_the_conversation_are_not_given_twice(kit, vendor) -> None:
    """PS08: a vendor that counts its ids from 0 in each answer gets new ones."""
    call = {"index": 0, "id": "f:0", "function": {"name": "f", "arguments": "{}"}}
    script = kit.streams(kit.call_chunk(call), kit.chunk(finish="tool_calls"))
    async with vendor(script) as served, kit.model_at(served) as model:
        first = await kit.play(model)
        again = kit.ModelRequest([*kit.asking().messages, first.response.message])
        second = await kit.play(model, again)
    assert first.calls[0][0] == "f:0"
    assert second.calls[0][0] != "f:0"
    sent = served.asked[1].json["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]


async def test_a_failed_stream_raises_once_and_is_over(kit, vendor) -> None:
    """After its error the generator gives nothing more."""
    async with (
        vendor(kit.says(kit.SSE_HEAD)) as served,
        kit.model_at(served) as model,
        aclosing(model.stream(kit.asking())) as stream,
    ):
        with pytest.raises(ModelError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_stream_nobody_asked_for_ends_at_its_end_mark(kit, vendor) -> None:
    """``generate`` answered by a stream that stays open after [DONE] returns at once with the whole answer."""

    async def script(connection, asked) -> None:
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk("Hel"), kit.chunk("lo", "stop")))
        await connection.closed_by_peer(10 * PATIENCE)

    async with vendor(script) as served, kit.model_at(served, KEY) as model, asyncio.timeout(PATIENCE):
        response = await model.generate(kit.asking())
    assert "".join(part.text for part in response.message.parts) == "Hello"
