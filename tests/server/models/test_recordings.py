"""Real streams of real vendors, served by a real server, give what was recorded beside them."""

import asyncio
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw_server.engine.model import ModelError
from dualclaw_server.models.chat_answer import ChatAnswer
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.sse import SSEReader

BYTEWISE = 1500
SPLITS = 40
SEED = 20240229
REASONS = {
    "groq-error-object-mid-stream.sse": "MODEL_BAD_RESPONSE",
    "openrouter-error-object-mid-stream.sse": "MODEL_BAD_RESPONSE",
}


@pytest.fixture(scope="module")
def recordings(request: pytest.FixtureRequest) -> list[tuple[str, bytes, Mapping[str, object]]]:
    """Return (file, bytes, expected) of each chat completions recording."""
    folder = Path(__file__).resolve().parents[4] / "shared" / "recorded_streams"
    if not (folder / "index.json").exists():
        pytest.skip("the recorded streams are not beside this checkout: real vendors' streams were NOT tested")
    entries = json.loads((folder / "index.json").read_text("utf-8"))["streams"]
    chosen = [entry for entry in entries if entry["api"] == "chat_completions"]
    assert len(chosen) >= 30
    return [(entry["file"], (folder / entry["file"]).read_bytes(), entry["expected"]) for entry in chosen]


def expected_text(expected: Mapping[str, object]) -> tuple[object, object]:
    told = cast("Mapping[str, object]", expected.get("inline_think", expected))
    return told["text"], told["reasoning"]


def expected_usage(expected: Mapping[str, object]) -> dict[str, object]:
    usage = cast("Mapping[str, object]", expected["usage"] or {})
    names = {
        "input_tokens": "input_tokens",
        "output_tokens": "output_tokens",
        "reasoning_tokens": "reasoning_tokens",
        "cached_input_tokens": "cached_tokens",
    }
    return {ours: usage[theirs] for theirs, ours in names.items() if theirs in usage}


def expected_calls(expected: Mapping[str, object]) -> list[tuple[object, object, str]]:
    calls = cast("list[Mapping[str, object]]", expected["tool_calls"])
    return [(call["id"], call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]


async def test_recordings_served_byte_by_byte_give_the_expected_result(recordings, vendor, kit) -> None:
    """Every recording survives a server that writes single bytes (long ones: odd pieces) with pauses between.

    Text, reasoning, calls, finish, usage and errors are compared; the HTTP chunks are cut as the writes are.
    """
    rng = random.Random(SEED)

    async def check(name: str, body: bytes, expected: Mapping[str, object]) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

        async def script(connection, asked) -> None:
            await connection.send(head)
            at = 0
            while at < len(body):
                piece = body[at : at + (1 if at < BYTEWISE else rng.randrange(1, 400))]
                await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(0)
                at += len(piece)
            await connection.send(b"0\r\n\r\n")

        async with vendor(script) as served, kit.model_at(served) as model:
            outcome = await kit.play(model)
        assert (outcome.text, outcome.reasoning) == expected_text(expected), name
        error = cast("Mapping[str, object] | None", expected["error"])
        if error is not None:
            assert outcome.error is not None
            assert outcome.error.reason == REASONS[name]
            assert outcome.error.detail.startswith(str(error["message"])[:100])
            return
        assert outcome.response is not None, (name, outcome.error)
        assert outcome.calls == expected_calls(expected), name
        assert outcome.response.finish_reason == (expected["finish_reason"] or "stop"), name
        assert MessageToDict(outcome.response.usage, preserving_proto_field_name=True) == expected_usage(expected), name
        assert outcome.response.model, name
        assert not outcome.response.bad_arguments, name
        parts = outcome.response.message.parts
        assert "".join(part.text for part in parts if part.WhichOneof("part") == "text") == outcome.text
        assert "".join(part.reasoning.text for part in parts) == outcome.reasoning

    for batch in range(0, len(recordings), 8):
        await asyncio.gather(*(check(*recording) for recording in recordings[batch : batch + 8]))


def test_recordings_cut_anywhere_give_the_expected_result(recordings, record_property, capsys) -> None:
    """Every recording, cut at random places many times, gives the same result as whole."""
    rng = random.Random(SEED)
    for name, body, expected in recordings:
        for _ in range(SPLITS):
            cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.choice((1, 3, 30, 200))))
            pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
            reader, fold = SSEReader(), ChatAnswer(Redactor([]))
            text = reasoning = ""
            failed = False
            try:
                for piece in pieces:
                    for event in reader.feed(piece):
                        fold.feed(event)
                for event in reader.finish():
                    fold.feed(event)
            except ModelError:
                failed = True
            fold.end()
            for delta in fold.take():
                if type(delta).__name__ == "TextDelta":
                    text += delta.text
                else:
                    reasoning += delta.text
            assert (text, reasoning) == expected_text(expected), name
            assert failed == bool(expected["error"]), name
            if not failed:
                parts = fold.response().message.parts
                calls = [part.tool_call for part in parts if part.WhichOneof("part") == "tool_call"]
                assert [(call.id, call.name, call.args_json) for call in calls] == expected_calls(expected), name
    count = SPLITS * len(recordings)
    record_property("splits", count)
    with capsys.disabled():
        sys.stdout.write(f"\n{count} random splits of {len(recordings)} recordings, seed {SEED}\n")
