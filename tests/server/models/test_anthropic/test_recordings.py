"""Real streams of the Anthropic API, served by a real server, give what was recorded beside them."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw_server.engine.model import TextDelta
from dualclaw_server.models.anthropic.answer import AnthropicAnswer
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.sse import SSEReader

SEED = 20240229


@pytest.fixture(scope="module")
def recordings():
    """Return (file, bytes, expected) of each recording."""
    folder = Path(__file__).resolve().parents[5] / "shared" / "recorded_streams"
    if not (folder / "index.json").exists():
        pytest.skip("the recorded streams are not beside this checkout: real streams were NOT tested")
    entries = json.loads((folder / "index.json").read_text("utf-8"))["streams"]
    chosen = [entry for entry in entries if entry["api"] == "anthropic_messages"]
    assert len(chosen) >= 4
    return [(entry["file"], (folder / entry["file"]).read_bytes(), entry["expected"]) for entry in chosen]


def expected_of(expected):
    """Return text, reasoning, calls, finish reason and usage as recorded."""
    assert expected["error"] is None
    usage = expected["usage"]
    cached = usage["cached_input_tokens"]
    prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
    calls = [(call["id"], call["name"], call["arguments"]) for call in expected["tool_calls"]]
    return (
        expected["text"],
        expected["reasoning"],
        calls,
        expected["finish_reason"],
        {"input_tokens": prompt, "output_tokens": usage["output_tokens"], "cached_tokens": cached},
    )


def result_of(text, reasoning, response):
    """Return the same of what came out."""
    calls = [part.tool_call for part in response.message.parts if part.WhichOneof("part") == "tool_call"]
    return (
        text,
        reasoning,
        [(call.id, call.name, json.loads(call.args_json)) for call in calls],
        response.finish_reason,
        MessageToDict(response.usage, preserving_proto_field_name=True),
    )


async def test_recordings_from_a_server_that_writes_small_pieces(recordings, vendor, kit, claude) -> None:
    """Every recording, in pieces of a few bytes, gives the recorded result, its sealed parts included."""
    rng = random.Random(SEED)
    for name, body, expected in recordings:

        async def script(connection, asked, body=body) -> None:
            await connection.send(kit.SSE_HEAD)
            at = 0
            while at < len(body):
                size = rng.randrange(1, 60)
                await connection.send(body[at : at + size])
                await asyncio.sleep(0)
                at += size

        async with vendor(script) as served, claude.model_at(served) as model:
            outcome = await kit.play(model)
        assert outcome.response is not None, (name, outcome.error)
        assert result_of(outcome.text, outcome.reasoning, outcome.response) == expected_of(expected), name
        sealed = [part.reasoning for part in outcome.response.message.parts if part.WhichOneof("part") == "reasoning"]
        assert len(sealed) == body.count(b'"type":"thinking"') + body.count(b'"type":"redacted_thinking"')
        for part in sealed:
            assert part.redacted in body
            assert part.signature.removeprefix("anthropic:").encode() in body
            assert part.redacted or part.signature != "anthropic:"


def test_a_recording_that_breaks_off_anywhere_is_never_taken_for_whole(recordings) -> None:
    """Cut after any event before the stop reason, the answer is broken, and its text so far is kept."""
    for name, body, expected in recordings:
        events = SSEReader().feed(body)
        for kept in range(len(events)):
            fold = AnthropicAnswer(Redactor([]))
            for event in events[:kept]:
                fold.feed(event)
            fold.end()
            text = "".join(delta.text for delta in fold.take() if isinstance(delta, TextDelta))
            assert expected["text"].startswith(text), name
            if kept >= len(events) - 1:
                assert fold.response().finish_reason == expected["finish_reason"], name
            else:
                with pytest.raises(Exception, match="stream") as raised:
                    fold.response()
                assert (raised.value.reason, raised.value.retryable) == ("MODEL_STREAM_BROKEN", True), name
