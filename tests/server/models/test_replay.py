"""Recordings replayed by the scripted model: the answer is what the live model makes of the same bytes."""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw_server.engine.model import ModelOptions, ModelRequest, TextDelta, ToolSpec
from dualclaw_server.models.anthropic.api import AnthropicApi
from dualclaw_server.models.api import Api
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.endpoint import Endpoint, ModelTimeouts
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.replay import API_NAMES, RecordingError, load_recording
from dualclaw_server.models.responses.api import ResponsesApi
from dualclaw_server.models.scripted import ScriptedModel, ScriptError

TOOL = ToolSpec("clock", "", '{"type": "object"}')
NO_CAS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
APIS: Mapping[str, type[Api]] = {"chat": ChatApi, "responses": ResponsesApi, "anthropic": AnthropicApi}


def named(*events: Mapping[str, object]) -> bytes:
    """Return a stream of events that carry their type as name too."""
    return b"".join(
        f"event: {event['type']}\r\ndata: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode() for event in events
    )


@pytest.fixture
def bodies(kit) -> Mapping[str, bytes]:
    """Return an answer of each API: a text with characters of several bytes, a call, usage."""
    call = {"index": 0, "id": "call_1", "function": {"name": "clock", "arguments": "{}"}}
    chat = kit.event_bytes(
        kit.chunk("Hé"),
        kit.chunk("llo 你好😀"),
        kit.call_chunk(call),
        kit.chunk(finish="tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
    )
    text = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}
    done = {"type": "output_text", "text": "Hello 你好😀", "annotations": []}
    item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "clock"}
    output = [{**text, "content": [done]}, {**item, "arguments": "{}", "status": "completed"}]
    whole = {
        "id": "resp_1",
        "object": "response",
        "model": "m-1",
        "status": "completed",
        "output": output,
        "usage": {"input_tokens": 3, "output_tokens": 4},
    }
    where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    responses = named(
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": [], "usage": None}},
        {"type": "response.output_item.added", "output_index": 0, "item": text},
        {"type": "response.output_text.delta", **where, "delta": "Hello "},
        {"type": "response.output_text.delta", **where, "delta": "你好😀"},
        {"type": "response.output_text.done", **where, "text": "Hello 你好😀"},
        {"type": "response.output_item.done", "output_index": 0, "item": output[0]},
        {"type": "response.output_item.added", "output_index": 1, "item": {**item, "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "output_index": 1, "delta": "{}"},
        {"type": "response.output_item.done", "output_index": 1, "item": output[1]},
        {"type": "response.completed", "response": whole},
    )
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m-1", "content": []}
    anthropic = named(
        {"type": "message_start", "message": {**message, "usage": {"input_tokens": 3, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello "}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "你好😀"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "call_1", "name": "clock", "input": {}},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    )
    return {"chat": chat, "responses": responses, "anthropic": anthropic}


def replaying(folder: Path, body: bytes, note: Mapping[str, object] | None = None, **item: object) -> ScriptedModel:
    """Return a model that replays a body written into the folder."""
    (folder / "answer.sse").write_bytes(body)
    if note is not None:
        (folder / "answer.sse.json").write_text(json.dumps(note))
    script = folder / "script.json"
    script.write_text(json.dumps({"name": "s", "turns": [{"say": [{"replay": "answer.sse", **item}]}]}))
    return ScriptedModel.load(script).with_tools([TOOL])


@pytest.mark.parametrize("api", API_NAMES)
@pytest.mark.parametrize("splits", [0, 1, 7, "bytes", [1, 2, 300, 5]])
async def test_a_replay_gives_what_the_live_model_gives(kit, vendor, bodies, tmp_path, api, splits) -> None:
    """The same bytes, from a file in any pieces and from a real server, make the same deltas' text and response."""
    model = replaying(tmp_path, bodies[api], api=api, splits=splits)
    replayed = await kit.play(model)
    async with vendor(kit.says(kit.SSE_HEAD, bodies[api])) as served:
        wire = APIS[api]()
        endpoint = Endpoint(served.url, wire.path, "", timeouts=ModelTimeouts(), auth=wire.headers, tls=NO_CAS)
        live_model = HttpChatModel("m", endpoint, wire)
        live = await kit.play(live_model.with_tools([TOOL]))
        await live_model.aclose()
    assert live.error is None
    assert replayed.response == live.response
    assert replayed.text == live.text
    assert replayed.text.endswith("你好😀")
    assert replayed.calls == [("call_1", "clock", "{}")]
    assert replayed.response.model == "m-1"
    usage = MessageToDict(replayed.response.usage, preserving_proto_field_name=True)
    assert (usage["input_tokens"], usage["output_tokens"]) == (3, 4)
    assert (await model.generate(kit.asking())).message == live.response.message


async def test_the_note_says_the_api_and_how_the_bytes_came(kit, bodies, tmp_path) -> None:
    """Without ``api`` the note beside the file says it; "recorded" gives each piece as a read of its own."""
    body = bodies["chat"]
    first = body.index(b"data: ", 10) + 3
    chunks = [first, 40, len(body) - first - 40]
    model = replaying(tmp_path, body, {"api": "chat", "chunks": chunks}, splits="recorded")
    assert (await kit.play(model)).deltas == [TextDelta("Hé"), TextDelta("llo 你好😀")]
    assert [len(piece) for piece in load_recording(tmp_path / "answer.sse", splits="recorded").pieces] == chunks


@pytest.mark.parametrize("splits", [(), (1,), (3,), (1, 2, 3), (10_000,)])
def test_splits_cut_the_body_and_lose_nothing(tmp_path: Path, splits: Sequence[int]) -> None:
    """The pieces join to the body; sizes are taken in turn, the last one for all that follow."""
    body = bytes(range(50))
    (tmp_path / "x").write_bytes(body)
    pieces = load_recording(tmp_path / "x", api="chat", splits=splits).pieces
    assert b"".join(pieces) == body
    wanted = [*splits, *([splits[-1]] * 50 if splits else [50])]
    assert all(len(piece) == size for piece, size in zip(pieces[:-1], wanted, strict=False))


async def test_an_answer_that_was_refused_is_refused_again(kit, tmp_path) -> None:
    """A note with a status and headers replays an HTTP error as the typed failure it is, Retry-After included."""
    note = {"api": "chat", "status": 429, "headers": {"content-type": "application/json", "retry-after": "7"}}
    outcome = await kit.play(replaying(tmp_path, b'{"error": {"message": "slow down"}}', note))
    error = outcome.error
    assert (error.reason, error.retryable, error.retry_after) == ("MODEL_OVERLOADED", True, 7)
    assert "slow down" in error.message


@pytest.mark.parametrize("api", API_NAMES)
async def test_a_recording_that_breaks_off_is_a_broken_stream(kit, bodies, tmp_path, api) -> None:
    """Half a stream ends as it did then: what was there is shown, and the end is MODEL_STREAM_BROKEN."""
    body = bodies[api]
    outcome = await kit.play(replaying(tmp_path, body[: body.index(b"clock")], api=api, splits=5))
    assert outcome.text.startswith(("Hé", "Hello "))
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_STREAM_BROKEN", True)


async def test_a_whole_answer_can_be_replayed_too(kit, tmp_path) -> None:
    """An answer that was not streamed is read as such when its note says so."""
    body = json.dumps({"id": "c", "choices": [{"message": {"content": "Hi."}, "finish_reason": "stop"}]}).encode()
    note = {"api": "chat", "headers": {"content-type": "application/json", "content-length": "1"}}
    assert (await kit.play(replaying(tmp_path, body, note, splits=3))).text == "Hi."


async def test_calls_of_a_recording_that_is_played_again_have_ids_of_their_own(kit, bodies, tmp_path) -> None:
    """In a conversation that has the recorded call already, the next one is another call."""
    model = replaying(tmp_path, bodies["chat"], api="chat")
    first = await kit.play(model)
    request = kit.asking()
    again = await kit.play(model, ModelRequest([*request.messages, first.response.message]))
    assert again.calls[0][0] not in ("", first.calls[0][0])


async def test_delay_stands_between_the_pieces_and_can_be_cancelled(kit, bodies, tmp_path) -> None:
    """Pieces come no faster than told; a replay in the middle of its silence ends when cancelled."""
    start = time.monotonic()
    await kit.play(replaying(tmp_path, bodies["chat"], api="chat", splits=len(bodies["chat"]) // 3 - 1, delay=0.02))
    assert time.monotonic() - start >= 0.06
    with pytest.raises(TimeoutError):
        await kit.play(replaying(tmp_path, bodies["chat"], api="chat", splits="bytes", delay=30), within=0.2)


async def test_replays_run_side_by_side(kit, bodies, tmp_path) -> None:
    """Any number of calls may replay one recording at once; sleep may stand before it."""
    (tmp_path / "a").write_bytes(bodies["anthropic"])
    item = {"replay": str(tmp_path / "a"), "api": "anthropic", "splits": "bytes"}
    model = ScriptedModel.parse(json.dumps({"turns": [{"say": [{"sleep": 0.01}, item]}]}))
    outcomes = await asyncio.gather(*(kit.play(model) for _ in range(5)))
    assert {outcome.text for outcome in outcomes} == {"Hello 你好😀"}


@pytest.mark.parametrize("api", API_NAMES)
async def test_a_recording_is_played_from_its_beginning(kit, bodies, tmp_path, api) -> None:
    """What was recorded is a whole answer: a prefix changes neither it nor whether it can be asked for."""
    model = replaying(tmp_path, bodies[api], api=api)
    outcome = await kit.play(model, ModelRequest(kit.asking().messages, prefix="Hel"))
    assert outcome.text == (await kit.play(model)).text
    assert outcome.error is None


async def test_a_request_the_api_cannot_express_is_refused_as_live(kit, bodies, tmp_path) -> None:
    """The request goes through the API's own translation, so a demand it refuses fails offline too."""
    model = replaying(tmp_path, bodies["chat"], api="chat")
    options = ModelOptions(tool_choice="fly")
    outcome = await kit.play(model, ModelRequest(kit.asking().messages, options=options))
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", False)


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "a missing file": ({"replay": "missing.sse", "api": "chat"}, "turns[0].say[0].replay cannot be replayed"),
    "an unknown api": ({"replay": "answer.sse", "api": "gopher"}, "api must be one of chat, responses, anthropic"),
    "no api": ({"replay": "answer.sse"}, "api is missing: answer.sse.json, which would say it, is not there"),
    "splits of no size": ({"replay": "answer.sse", "api": "chat", "splits": [3, 0]}, "turns[0].say[0].splits must be"),
    "splits by name": ({"replay": "answer.sse", "api": "chat", "splits": "lines"}, "turns[0].say[0].splits must be"),
    "negative splits": ({"replay": "answer.sse", "api": "chat", "splits": -1}, "turns[0].say[0].splits must be"),
    "true splits": ({"replay": "answer.sse", "api": "chat", "splits": True}, "turns[0].say[0].splits must be"),
    "nothing recorded": (
        {"replay": "answer.sse", "api": "chat", "splits": "recorded"},
        "answer.sse.json does not say how answer.sse was split",
    ),
    "a wrong delay": ({"replay": "answer.sse", "api": "chat", "delay": -1}, "turns[0].say[0].delay must be seconds"),
    "an unknown key": ({"replay": "answer.sse", "api": "chat", "speed": 1}, "turns[0].say[0].speed is unknown"),
    "a text beside it": ({"replay": "answer.sse", "api": "chat", "text": "x"}, "must be an object with one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_replay_is_refused_with_the_place(tmp_path: Path, name: str) -> None:
    """Each mistake is a ScriptError when the script is read, and names where it is and what would be right."""
    (tmp_path / "answer.sse").write_bytes(b"x")
    item, text = WRONG[name]
    script = tmp_path / "s.json"
    script.write_text(json.dumps({"turns": [{"say": [item]}]}))
    with pytest.raises(ScriptError) as refused:
        ScriptedModel.load(script)
    assert text in str(refused.value)
    assert str(refused.value).startswith(str(script))


def test_a_replay_is_a_whole_answer(tmp_path: Path) -> None:
    """Whatever would add to it, before or after, is a mistake of the script."""
    (tmp_path / "a").write_bytes(b"x")
    item = {"replay": str(tmp_path / "a"), "api": "chat"}
    for say in ([{"text": "x"}, item], [item, {"usage": {}}], [item, item]):
        with pytest.raises(ScriptError, match="replay is a whole answer"):
            ScriptedModel.parse(json.dumps({"turns": [{"say": say}]}))


def test_a_script_without_a_file_cannot_name_a_neighbour() -> None:
    """A relative path needs a script file to be beside."""
    with pytest.raises(ScriptError, match="must be an absolute path"):
        ScriptedModel.parse('{"turns": [{"say": [{"replay": "a.sse", "api": "chat"}]}]}')


NOTES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "is no note of a recording"),
    "another api": ('{"api": "anthropic"}', "api is chat, but a.json says anthropic"),
    "an unknown api": ('{"api": "gopher"}', "is no note of a recording"),
    "a status that is none": ('{"api": "chat", "status": 7}', "status and chunks are out of range"),
    "chunks that are none": ('{"api": "chat", "chunks": [-1, 2]}', "status and chunks are out of range"),
    "chunks of another file": ('{"api": "chat", "chunks": [2]}', "does not say how a was split"),
}


@pytest.mark.parametrize("name", NOTES)
def test_a_note_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    """A note that cannot be read, or contradicts what is asked, is an error that says how."""
    text, expected = NOTES[name]
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RecordingError, match=expected):
        load_recording(tmp_path / "a", api="chat", splits="recorded")


@pytest.fixture(scope="module")
def recordings() -> list[tuple[str, str, Mapping[str, Mapping[str, object]]]]:
    """Return (path, api, expected) of every recording there is."""
    folder = Path(__file__).resolve().parents[4] / "shared" / "recorded_streams"
    if not (folder / "index.json").exists():
        pytest.skip("the recorded streams are not beside this checkout: real vendors' streams were NOT replayed")
    names = {"chat_completions": "chat", "responses": "responses", "anthropic_messages": "anthropic"}
    entries = json.loads((folder / "index.json").read_text("utf-8"))["streams"]
    return [(str(folder / entry["file"]), names[entry["api"]], entry["expected"]) for entry in entries]


async def test_real_recordings_replay_as_expected(kit, recordings) -> None:
    """Streams of real vendors, of all three APIs, replayed in small pieces, give the text and reasoning on record."""
    for path, api, expected in recordings:
        item = {"replay": path, "api": api, "splits": [1, 2, 3, 50, 7]}
        outcome = await kit.play(ScriptedModel.parse(json.dumps({"turns": [{"say": [item]}]})))
        told = expected.get("inline_think", expected)
        assert (outcome.text, outcome.reasoning) == (told["text"], told["reasoning"]), path
        assert (outcome.error is not None) == bool(expected["error"]), path
    assert {api for _, api, _ in recordings} == {*API_NAMES}
