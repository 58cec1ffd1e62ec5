"""Recording a live endpoint: byte for byte, replayable, and without a secret whatever the endpoint does."""

import asyncio
import base64
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dualclaw_server import record
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.record import Mask
from tests.server.models import conftest as kit
from tests.server.test_main import command, outcome

KEY = "sk-live/0123+abc=XYZ"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: req-7\r\nconnection: close\r\n"


async def run(url: str, out: Path, *options: str, environ: Mapping[str, str] | None = None) -> int:
    """Record from an endpoint that wants the key; returns the exit code."""
    arguments = ["--model", "openai:m", "--ask", "What time is it?", "--out", str(out), *options]
    settings = {"DUALCLAW_MODEL_BASE_URL": url, "DUALCLAW_MODEL_API_KEY": KEY, **(environ or {})}
    return await asyncio.wait_for(asyncio.to_thread(record.main, arguments, settings), 60)


def note_of(out: Path) -> dict[str, object]:
    note = json.loads(out.with_name(f"{out.name}.json").read_text())
    assert isinstance(note, dict)
    return note


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def playing(out: Path, **item: object) -> ScriptedModel:
    return ScriptedModel.parse(json.dumps({"turns": [{"say": [{"replay": str(out), **item}]}]}))


async def test_an_answer_is_recorded_as_it_came_and_replays(tmp_path: Path, capsys) -> None:
    """The file has the bytes of the body, the note what was asked and how it came; the script item replays it."""
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "clock", "description": "Tells the time."}, {"function": {"name": "now"}}]))
    call = kit.call_chunk({"index": 0, "id": "c1", "function": {"name": "clock", "arguments": "{}"}})
    usage = {"choices": [], "usage": {"prompt_tokens": 3}}
    pieces = [kit.event_bytes(kit.chunk("Hé😀"), done=False), kit.event_bytes(call, kit.chunk(finish="stop"), usage)]
    first = pieces[0][:20]

    async def script(connection: kit.Connection, asked: kit.Asked) -> None:
        await connection.send(HEAD + b"\r\n" + first)
        await asyncio.sleep(0.2)
        await connection.send(pieces[0][20:])
        await asyncio.sleep(0.2)
        await connection.send(pieces[1])

    out = tmp_path / "a.sse"
    async with kit.vendor_of(script) as vendor:
        code = await run(vendor.url, out, "--tools", str(tools), "--instructions", "Be brief.")
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    assert out.read_bytes() == b"".join(pieces)
    note = note_of(out)
    assert {key: note[key] for key in ("api", "vendor", "model", "status")} == {
        "api": "chat",
        "vendor": "openai",
        "model": "m",
        "status": 200,
    }
    assert note["headers"] == {"content-type": "text/event-stream", "x-request-id": "req-7"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", str(note["time"]))
    chunks = note["chunks"]
    assert isinstance(chunks, list)
    assert sum(chunks) == len(out.read_bytes())
    assert chunks[0] == 20
    assert note["request"] == vendor.asked[0].json
    assert vendor.asked[0].headers["authorization"] == f"Bearer {KEY}"
    request = json.dumps(note["request"])
    for said in ("What time is it?", "Be brief.", '"clock"', '"now"'):
        assert said in request
    item = json.loads(printed.out[printed.out.index("{") :])
    replayed = await kit.play(playing(out, **{**item, "replay": str(out)}))
    assert replayed.text == "Hé😀"
    assert replayed.calls == [("c1", "clock", "{}")]
    assert replayed.response is not None
    assert replayed.response.usage.input_tokens == 3
    assert replayed.response.request_id == "req-7"


THINKING = {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}
CALL = {"type": "tool_use", "id": "c1", "name": "clock", "input": {}}
MESSAGES: list[object] = [
    {"type": "message_start", "message": {"id": "m1", "model": "m", "usage": {"input_tokens": 3}}},
    THINKING,
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "S"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hé😀"}},
    {"type": "content_block_start", "index": 2, "content_block": CALL},
    {"type": "content_block_stop", "index": 2},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]
RESPONSES: list[object] = [
    {"type": "response.created", "response": {"id": "r1", "status": "in_progress"}},
    kit.item_delta("output_text", "Hé😀", 0, "i0", content_index=0),
    *kit.item_call(1, "i1", "c1"),
    kit.item_done(1, "function_call", "i1", call_id="c1", name="clock", arguments="{}"),
    kit.response_over(usage={"input_tokens": 3}),
]
OTHERS = {
    "anthropic": (MESSAGES, "/v1/messages", "x-api-key", KEY, "clock"),
    "openai-responses": (RESPONSES, "/v1/responses", "authorization", f"Bearer {KEY}", "f"),
}


@pytest.mark.parametrize("vendor_name", OTHERS)
async def test_every_api_is_recorded_and_replays_as_its_own(tmp_path: Path, capsys, vendor_name: str) -> None:
    """The note says whose it is, so a script need not; the key goes the vendor's way and into no file."""
    events, path, header, value, called = OTHERS[vendor_name]
    out = tmp_path / "a.sse"
    async with kit.vendor_of(kit.streams(*events, done=False)) as vendor:
        code = await run(vendor.url, out, "--model", f"{vendor_name}:m")
    assert (code, capsys.readouterr().err) == (0, "")
    assert vendor.asked[0].line == f"POST {path} HTTP/1.1"
    assert vendor.asked[0].headers[header] == value
    assert out.read_bytes() == kit.event_bytes(*events, done=False)
    assert (note_of(out)["api"], note_of(out)["vendor"]) == (vendor_name.removeprefix("openai-"), vendor_name)
    for splits in ("recorded", "bytes", 0):
        replayed = await kit.play(playing(out, splits=splits))
        assert (replayed.text, replayed.calls) == ("Hé😀", [("c1", called, "{}")])
        assert replayed.response is not None
        assert replayed.response.usage.input_tokens == 3
    assert not any(KEY in file.read_text() for file in files_in(tmp_path))


async def test_no_secret_is_written_though_the_endpoint_repeats_it(tmp_path: Path, capsys) -> None:
    """A key in body, headers, request and error, in any usual form, is masked; the recording still replays."""
    forms = [KEY, KEY.replace("/", "\\/"), "sk-live\\u002f0123\\u002babc\\u003dXYZ", "sk-live%2F0123%2Babc%3DXYZ"]
    forms.append(base64.b64encode(KEY.encode()).decode())
    other = "team-secret-1"

    async def script(connection: kit.Connection, asked: kit.Asked) -> None:
        head = HEAD.replace(b"req-7", f"req-{KEY}".encode()) + f"x-echo: {KEY}\r\n\r\n".encode()
        said = "".join(
            f'data: {{"choices":[{{"index":0,"delta":{{"content":"<{form}>"}}}}]}}\n\n' for form in [*forms, other]
        )
        comment = f": authorization: {asked.headers['authorization']}\n\n"
        for piece in (
            head.decode(),
            comment,
            said,
            'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}',
        ):
            for at in range(0, len(piece), 7):
                await connection.send(piece[at : at + 7].encode())

    out = tmp_path / "a.sse"
    environ = {"OPENAI_API_KEY": other, "DUALCLAW_MODEL_HEADERS": '{"x-team": "team-header-9"}'}
    async with kit.vendor_of(script) as vendor:
        code = await run(vendor.url, out, "--instructions", f"The key is {KEY}.", environ=environ)
    assert code == 0
    assert KEY in str(vendor.asked[0].json)
    written = out.read_bytes() + out.with_name("a.sse.json").read_bytes()
    printed = capsys.readouterr()
    for secret in (*forms, other, "team-header-9", "0123"):
        assert secret.encode() not in written
        assert secret not in printed.out + printed.err
    note = note_of(out)
    assert "***" in str(note["request"])
    assert note["headers"] == {"content-type": "text/event-stream", "x-request-id": "req-***"}
    chunks = note["chunks"]
    assert isinstance(chunks, list)
    assert sum(chunks) == len(out.read_bytes())
    assert (await kit.play(playing(out, splits="recorded"))).text == "<***>" * 6


async def test_a_key_that_is_spelt_out_over_events_is_not_written(tmp_path: Path, capsys) -> None:
    """What no mask can take out of the bytes is found in the answer they make, and nothing is kept."""
    answers = (
        [kit.chunk(KEY[:9]), kit.chunk(KEY[9:])],
        [kit.chunk(reasoning_content=KEY[:9]), kit.chunk(reasoning_content=KEY[9:])],
        [
            kit.call_chunk({"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"k": "' + KEY[:9]}}),
            kit.call_chunk({"index": 0, "function": {"arguments": KEY[9:] + '"}'}}),
        ],
    )
    for number, events in enumerate(answers):
        out = tmp_path / f"{number}.sse"
        async with kit.vendor_of(kit.streams(*events, kit.chunk(finish="stop"))) as vendor:
            assert await run(vendor.url, out) == 1
        assert "spells out a key" in capsys.readouterr().err
        assert files_in(tmp_path) == []


async def test_a_stream_that_fails_is_recorded_with_a_warning(tmp_path: Path, capsys) -> None:
    """A broken end or an error in the stream is what people want to test with; it replays as the same failure."""
    said = kit.event_bytes(kit.chunk("par"), done=False)
    error = kit.event_bytes({"error": {"message": "overloaded", "code": 529}}, done=False)
    for name, body, reason in (("cut", b"", "MODEL_STREAM_BROKEN"), ("error", error, "MODEL_OVERLOADED")):
        out = tmp_path / name
        async with kit.vendor_of(kit.says(HEAD + b"\r\n" + said + body)) as vendor:
            assert await run(vendor.url, out) == 0
        assert "warning: the answer is recorded, but it failed" in capsys.readouterr().err
        replayed = await kit.play(playing(out))
        assert replayed.text == "par"
        assert replayed.error is not None
        assert replayed.error.reason == reason


async def test_a_connection_that_stays_open_after_the_end_does_not_keep_the_command(tmp_path: Path) -> None:
    """Once the stream's end mark is there, a silent connection is left."""
    left = asyncio.get_running_loop().create_future()

    async def script(connection: kit.Connection, asked: kit.Asked) -> None:
        await connection.send(HEAD + b"\r\n" + kit.event_bytes(kit.chunk("hi"), kit.chunk(finish="stop")))
        left.set_result(await connection.closed_by_peer(50))

    async with kit.vendor_of(script) as vendor:
        assert await run(vendor.url, tmp_path / "a") == 0
        assert await asyncio.wait_for(left, 60)
    assert (await kit.play(playing(tmp_path / "a"))).text == "hi"


async def test_what_is_no_answer_is_not_recorded(tmp_path: Path, capsys) -> None:
    """A refusal, silence, no connection: exit code 1, the reason without the key, and no file."""
    refused = kit.answers(401, json.dumps({"error": {"message": f"bad key {KEY}"}}).encode())
    silent = kit.says(HEAD + b"\r\n" + kit.event_bytes(kit.chunk("x"), done=False))

    async def falls_silent(connection: kit.Connection, asked: kit.Asked) -> None:
        await silent(connection, asked)
        await connection.closed_by_peer(50)

    environ = {"DUALCLAW_MODEL_TIMEOUT_IDLE": "2"}
    for script, reason in (
        (refused, "bad key ***"),
        (falls_silent, "fell silent"),
        (kit.says(HEAD + b"\r\n"), "empty"),
    ):
        async with kit.vendor_of(script) as vendor:
            assert await run(vendor.url, tmp_path / "a", environ=environ) == 1
        printed = capsys.readouterr()
        assert reason in printed.err
        assert KEY not in printed.err
    assert await run(vendor.url, tmp_path / "a") == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert files_in(tmp_path) == []


async def test_nothing_is_overwritten_unless_asked(tmp_path: Path, capsys) -> None:
    """A file, or a note, that is there stops the command before it asks anything; --force replaces both."""
    out = tmp_path / "a"
    async with kit.vendor_of(kit.streams(kit.chunk("new"), kit.chunk(finish="stop"))) as vendor:
        for path in (out, tmp_path / "a.json"):
            path.write_text("old")
            assert await run(vendor.url, out) == 2
            assert f"{path} would be overwritten; --force does it" in capsys.readouterr().err
            assert path.read_text() == "old"
            assert vendor.asked == []
            path.unlink()
        out.write_text("old")
        assert await run(vendor.url, out, "--force") == 0
    assert b"new" in out.read_bytes()
    assert note_of(out)["api"] == "chat"


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "no live model": (["--model", "scripted"], "--model must be VENDOR:NAME"),
    "a script": (["--model", "scripted:x.json"], "vendor 'scripted' is not known"),
    "several models": (["--model", "a,openai:x"], "--model must be VENDOR:NAME"),
    "a wrapped model": (["--model", "ollama+text:x"], "--model must be VENDOR:NAME"),
    "an unknown vendor": (["--model", "opnai:x"], "did you mean openai?"),
    "a vendor without its key": (["--model", "groq:x"], "GROQ_API_KEY"),
    "no folder": (["--out", "/nowhere/at/all"], "there is no folder /nowhere/at"),
    "no tools file": (["--tools", "/nowhere/tools.json"], "--tools /nowhere/tools.json cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(tmp_path: Path, capsys, name: str) -> None:
    """Exit code 2, and a line that says what is wrong or what would be right."""
    options, expected = WRONG[name]
    arguments = ["--model", "openai:m", "--ask", "x", "--out", str(tmp_path / "a"), *options]
    environ = {} if name == "a vendor without its key" else {"DUALCLAW_MODEL_API_KEY": KEY}
    assert record.main(arguments, environ) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]", '[{"description": "x"}]', '[{"name": "t", "parameters": []}]'])
def test_wrong_tools_are_named(tmp_path: Path, capsys, text: str) -> None:
    """A file that is no list of tools is refused before anything is asked."""
    (tmp_path / "tools.json").write_text(text)
    options = [
        "--model",
        "openai:m",
        "--ask",
        "x",
        "--out",
        str(tmp_path / "a"),
        "--tools",
        str(tmp_path / "tools.json"),
    ]
    assert record.main(options, {"DUALCLAW_MODEL_API_KEY": KEY}) == 2
    assert "tool" in capsys.readouterr().err


def test_masking_keeps_where_every_other_byte_was_cut() -> None:
    """However the bytes arrived, the masked pieces join to the masked whole, and untouched lines keep their cuts."""
    body = f"data: é{KEY}!\n\ndata: plain\xff\r\n\ndata: {KEY}{KEY}\n\ndata: end".encode()
    mask = Mask([KEY])
    whole, sizes = mask.pieces([body])
    assert whole == body.replace(KEY.encode(), b"***")
    assert sizes == (len(whole),)
    rng = random.Random(7)
    for _ in range(300):
        cuts = sorted(rng.randrange(len(body) + 1) for _ in range(rng.choice((1, 3, 40))))
        pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        clean, sizes = mask.pieces(pieces)
        assert clean == whole
        assert sum(sizes) == len(clean)
        ends = {sum(sizes[:count]) for count in range(len(sizes) + 1)}
        start, moved = body.index(b"data: plain"), whole.index(b"data: plain")
        assert {moved + cut - start for cut in cuts if start <= cut < start + 12} <= ends


def test_masking_leaves_json_what_it_is() -> None:
    """A header's value is masked where it is sure where it ends; a key is masked in any case."""
    mask = Mask([KEY])
    assert mask.text("data: authorization: Bearer abcdef") == "data: authorization: ***"
    escaped = 'data: {"content": "authorization: a\\" b"}'
    assert mask.text(escaped) == escaped
    assert (
        mask.text(f'data: {{"content": "authorization: {KEY}\\" b"}}') == 'data: {"content": "authorization: ***\\" b"}'
    )


async def test_secrets_of_the_address_are_masked(tmp_path: Path) -> None:
    """A key in the base URL's query counts as a secret; the version of the API does not."""
    said = kit.chunk("query-key 2024-10-21")
    async with kit.vendor_of(kit.streams(said, kit.chunk(finish="stop"))) as vendor:
        assert await run(f"{vendor.url}?api-version=2024-10-21&k=query-key", tmp_path / "a") == 0
    assert (await kit.play(playing(tmp_path / "a"))).text == "*** 2024-10-21"


async def test_the_command_records_and_says_what_it_can(tmp_path: Path) -> None:
    """``dualclaw-server record`` is a command of its own, in a process of its own, and --help tells of it."""
    async with kit.vendor_of(kit.streams(kit.chunk("hi"), kit.chunk(finish="stop"))) as vendor:
        environ = {"DUALCLAW_MODEL_BASE_URL": vendor.url, "DUALCLAW_MODEL_API_KEY": KEY}
        options = ("record", "--model", "openai:m", "--ask", "x", "--out", str(tmp_path / "a"))
        async with command(*options, environ=environ) as process:
            code, out, errors = await outcome(process)
    assert (code, errors) == (0, "")
    assert '"splits": "recorded"' in out
    assert (await kit.play(playing(tmp_path / "a"))).text == "hi"
    async with command("--help") as process:
        _, out, _ = await outcome(process)
    assert "record" in out
