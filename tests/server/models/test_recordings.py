"""Real streams of real vendors, of all three APIs, give what was recorded beside them, however they are cut."""

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw_server.engine.model import ModelError, ModelResponse, TextDelta
from dualclaw_server.models.api import Api
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.sse import SSEReader

BYTEWISE = 1500
SEED = 20240229
APIS = {"chat_completions": "chat", "responses": "responses", "anthropic_messages": "anthropic"}
LEAST = {"chat": 30, "responses": 7, "anthropic": 4}
REASONS = {
    "groq-error-object-mid-stream.sse": "MODEL_BAD_RESPONSE",
    "openrouter-error-object-mid-stream.sse": "MODEL_BAD_RESPONSE",
    "openai-responses-error-quota.sse": "MODEL_OVERLOADED",
}


@dataclass(frozen=True)
class Result:
    """What a stream came to, in the terms of the index."""

    text: object
    reasoning: object
    calls: tuple[tuple[object, object, str], ...] = ()
    finish: object = None
    usage: tuple[tuple[str, object], ...] = ()
    error: object = None


@dataclass(frozen=True)
class Recording:
    """A stream as it was recorded, and what it comes to."""

    name: str
    body: bytes
    expected: Result
    error_text: str


@pytest.fixture(params=LEAST)
def api_name(request: pytest.FixtureRequest) -> str:
    """Return the name of each API in turn."""
    return cast("str", request.param)


@pytest.fixture
def recordings(api_name: str) -> list[Recording]:
    """Return the recordings of the API."""
    folder = Path(__file__).resolve().parents[4] / "shared" / "recorded_streams"
    if not (folder / "index.json").exists():
        pytest.skip("the recorded streams are not beside this checkout: real vendors' streams were NOT tested")
    entries = json.loads((folder / "index.json").read_text("utf-8"))["streams"]
    chosen = [entry for entry in entries if APIS[entry["api"]] == api_name]
    assert len(chosen) >= LEAST[api_name]
    return [recording_of(entry["file"], (folder / entry["file"]).read_bytes(), entry["expected"]) for entry in chosen]


def recording_of(name: str, body: bytes, expected: Mapping[str, object]) -> Recording:
    """Return a recording; where the index says what inline thinking becomes, that counts."""
    told = cast("Mapping[str, object]", expected.get("inline_think", expected))
    error = cast("Mapping[str, object] | None", expected["error"])
    if error is not None:
        result = Result(told["text"], told["reasoning"], error=REASONS[name])
        return Recording(name, body, result, str(error["message"]))
    calls = cast("list[Mapping[str, object]]", expected["tool_calls"])
    usage = cast("Mapping[str, object]", expected["usage"] or {})
    names = {
        "cached_input_tokens": "cached_tokens",
        "input_tokens": "input_tokens",
        "output_tokens": "output_tokens",
        "reasoning_tokens": "reasoning_tokens",
    }
    result = Result(
        told["text"],
        told["reasoning"],
        tuple((call["id"], call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls),
        expected["finish_reason"] or "stop",
        tuple(sorted((ours, usage[theirs]) for theirs, ours in names.items() if theirs in usage)),
    )
    return Recording(name, body, result, "")


def result_of(text: str, reasoning: str, ended: ModelResponse | ModelError) -> Result:
    """Return what a stream came to."""
    if isinstance(ended, ModelError):
        return Result(text, reasoning, error=ended.reason)
    assert ended.model
    assert not ended.bad_arguments
    parts = ended.message.parts
    assert "".join(part.text for part in parts if part.WhichOneof("part") == "text") == text
    assert "".join(part.reasoning.text for part in parts) == reasoning
    calls = [part.tool_call for part in parts if part.WhichOneof("part") == "tool_call"]
    return Result(
        text,
        reasoning,
        tuple((call.id, call.name, call.args_json) for call in calls),
        ended.finish_reason,
        tuple(sorted(MessageToDict(ended.usage, preserving_proto_field_name=True).items())),
    )


def folded(api: Api, pieces: Iterator[bytes]) -> Result:
    """Return what the pieces of a stream come to, read and folded as the driver does it."""
    reader, fold = SSEReader(), api.answer(Redactor([]), frozenset(), "")
    text = reasoning = ""
    ended: ModelResponse | ModelError | None = None
    try:
        for piece in pieces:
            for event in reader.feed(piece):
                if not fold.done:
                    fold.feed(event)
        for event in reader.finish():
            if not fold.done:
                fold.feed(event)
    except ModelError as error:
        ended = error
    fold.end()
    for delta in fold.take():
        if isinstance(delta, TextDelta):
            text += delta.text
        else:
            reasoning += delta.text
    return result_of(text, reasoning, ended or fold.response())


def cut(body: bytes, rng: random.Random) -> Iterator[bytes]:
    """Return the body cut at random places: a few, or many."""
    cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.choice((1, 3, 30, 200))))
    return (body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True))


async def test_recordings_served_byte_by_byte_give_the_expected_result(recordings, api_name, vendor, kit) -> None:
    """Every recording survives a server that writes single bytes (long ones: odd pieces) with pauses between.

    Text, reasoning, calls, finish, usage and errors are compared; the HTTP chunks are cut as the writes are.
    """
    rng = random.Random(SEED)

    async def check(recording: Recording) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

        async def script(connection, asked) -> None:
            await connection.send(head)
            at = 0
            while at < len(recording.body):
                piece = recording.body[at : at + (1 if at < BYTEWISE else rng.randrange(1, 400))]
                await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(0)
                at += len(piece)
            await connection.send(b"0\r\n\r\n")

        async with vendor(script) as served, kit.api_at(served, kit.APIS[api_name]()) as model:
            outcome = await kit.play(model)
        ended = outcome.response or outcome.error
        assert ended is not None, recording.name
        assert result_of(outcome.text, outcome.reasoning, ended) == recording.expected, recording.name
        if outcome.error is not None:
            assert outcome.error.detail.startswith(recording.error_text[:100])

    for batch in range(0, len(recordings), 8):
        await asyncio.gather(*(check(recording) for recording in recordings[batch : batch + 8]))


@pytest.mark.timeout(3600)  # the full run makes a thousand splits of each
def test_recordings_cut_anywhere_give_the_expected_result(
    recordings, api_name, splits, kit, record_property, capsys
) -> None:
    """Every recording, cut at random places many times, gives the same: usage, finish reason and error included."""
    rng = random.Random(SEED)
    api = kit.APIS[api_name]()
    for recording in recordings:
        for number in range(splits):
            assert folded(api, cut(recording.body, rng)) == recording.expected, (recording.name, number)
    count = splits * len(recordings)
    record_property("splits", count)
    with capsys.disabled():
        sys.stdout.write(f"\n{count} random splits of {len(recordings)} {api_name} recordings, seed {SEED}\n")
