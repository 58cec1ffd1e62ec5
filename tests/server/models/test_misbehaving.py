"""Endpoints that misbehave, on all three wire APIs: each ends in its typed way, and leaves nothing behind.

After every call the server's connections are closed, no task of the call is left, and once the model is closed
no socket is. ``test_openai_stream`` and ``test_openai_calls`` have what is particular to Chat Completions.
"""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualclaw_server.engine.model import ModelError, TextDelta
from dualclaw_server.models import ModelTimeouts, model_from_spec
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.vendors import shipped_vendors

PATIENCE = 60.0
QUICK_START = ModelTimeouts(first_token=0.5)
QUICK_IDLE = ModelTimeouts(idle=0.4, stalled=0.8)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
SSE = HEAD + b"connection: close\r\n\r\n"
TABLE = shipped_vendors()
_TLS = ssl.create_default_context()


def event(value: object, name: str = "") -> bytes:
    """Return one event of a stream."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


@dataclass(frozen=True)
class Wire:
    """How one API says it: the pieces of a stream whose text is "part"."""

    vendor: str
    text: bytes
    finish: bytes
    end: bytes
    overloaded: bytes
    whole: object


def named(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


def chat_chunk(delta: object, finish: str | None = None) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


ITEM = {"type": "message", "id": "i", "role": "assistant", "content": [{"type": "output_text", "text": "part"}]}
RESPONSE = {"id": "r", "object": "response", "status": "completed", "model": "m", "output": [ITEM]}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": {"input_tokens": 1}}

WIRES = {
    "chat": Wire(
        "custom",
        text=chat_chunk({"content": "part"}),
        finish=chat_chunk({}, "stop"),
        end=b"data: [DONE]\n\n",
        overloaded=event({"error": {"type": "overloaded_error", "message": "busy"}}),
        whole={"choices": [{"message": {"content": "part"}, "finish_reason": "stop"}]},
    ),
    "responses": Wire(
        "openai-responses",
        text=named("response.created", response=RESPONSE | {"status": "in_progress", "output": []})
        + named("response.output_item.added", output_index=0, item=ITEM | {"content": []})
        + named("response.output_text.delta", item_id="i", output_index=0, content_index=0, delta="part"),
        finish=named("response.output_item.done", output_index=0, item=ITEM),
        end=named("response.completed", response=RESPONSE),
        overloaded=named("error", code="server_is_overloaded", message="overloaded, try again"),
        whole=RESPONSE,
    ),
    "anthropic": Wire(
        "anthropic",
        text=named("message_start", message=MESSAGE)
        + named("content_block_start", index=0, content_block={"type": "text", "text": ""})
        + named("content_block_delta", index=0, delta={"type": "text_delta", "text": "part"}),
        finish=named("content_block_stop", index=0)
        + named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1}),
        end=named("message_stop"),
        overloaded=named("error", error={"type": "overloaded_error", "message": "Overloaded"}),
        whole=MESSAGE | {"content": [{"type": "text", "text": "part"}], "stop_reason": "end_turn"},
    ),
}
APIS = pytest.mark.parametrize("api", WIRES)


def sockets() -> int | None:
    """Return how many sockets this process has open; None where the system does not say."""
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return None
    count = 0
    for entry in folder.iterdir():
        with suppress(OSError):
            count += os.readlink(entry).startswith("socket:")
    return count


def no_more_sockets_than(before: int | None) -> bool:
    """Tell whether none was left behind; sockets of an earlier test may have been closed meanwhile."""
    now = sockets()
    return now is None or before is None or now <= before


async def settled(wanted: Callable[[], bool], what: Callable[[], object]) -> None:
    """Wait until something holds that closing brings about in a moment."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not wanted():  # noqa: ASYNC110  # sockets and tasks have no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"left behind: {what()}")


@asynccontextmanager
async def leaving_nothing(
    vendor, api: str, script, timeouts: ModelTimeouts | None = None
) -> AsyncIterator[HttpChatModel]:
    """Serve the script to a model, and check at the end that the call has left nothing."""
    async with vendor(script) as served:
        tasks, before = asyncio.all_tasks(), sockets()
        model = TABLE[WIRES[api].vendor].make_model("m", base_url=served.url, timeouts=timeouts, tls=_TLS)
        try:
            yield model
            await settled(lambda: served.open == 0, lambda: f"{served.open} connections")
            await settled(lambda: asyncio.all_tasks() <= tasks, lambda: asyncio.all_tasks() - tasks)
        finally:
            await model.aclose()
        await settled(lambda: no_more_sockets_than(before), lambda: f"{sockets()} sockets instead of {before}")


def sends(*pieces: bytes):
    """Return a script that sends and closes."""

    async def script(connection, asked) -> None:
        await connection.send(*pieces)

    return script


def sends_and_stays(*pieces: bytes, then: bytes = b""):
    """Return a script that sends and leaves it to the other side to close, repeating something meanwhile."""

    async def script(connection, asked) -> None:
        await connection.send(*pieces)
        while not await connection.closed_by_peer(0.05):
            if then:
                await connection.send(then)

    return script


def sends_and_resets(*pieces: bytes):
    """Return a script that sends and then drops the connection in the middle of the HTTP message."""

    async def script(connection, asked) -> None:
        body = b"".join(pieces)
        await connection.send(HEAD + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n" % (len(body), body))
        await asyncio.sleep(0.05)
        connection.writer.transport.abort()

    return script


def redirects(status: int):
    """Return a script that sends somewhere else."""
    return sends(f"HTTP/1.1 {status} X\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n".encode())


STREAMS: dict[str, tuple[Callable[[Wire], object], str, bool, str]] = {
    "EOF in the middle": (lambda w: sends(SSE, w.text), "MODEL_STREAM_BROKEN", True, "part"),
    "EOF in half an event": (lambda w: sends(SSE, w.text, w.end[:-9]), "MODEL_STREAM_BROKEN", True, "part"),
    "reset in the middle": (lambda w: sends_and_resets(w.text), "MODEL_STREAM_BROKEN", True, "part"),
    "PS46 no byte": (lambda w: sends(SSE), "MODEL_STREAM_BROKEN", True, ""),
    "PS46 comments only": (lambda w: sends(SSE, b": ping\n\n" * 3), "MODEL_STREAM_BROKEN", True, ""),
    "PS19 an error after text": (
        lambda w: sends_and_stays(SSE, w.text, w.overloaded),
        "MODEL_OVERLOADED",
        True,
        "part",
    ),
    "PS34 overload first": (lambda w: sends_and_stays(SSE, w.overloaded), "MODEL_OVERLOADED", True, ""),
    "garbage": (lambda w: sends_and_stays(SSE, w.text, b"data: <oops>\n\n"), "MODEL_BAD_RESPONSE", True, "part"),
    "silence after text": (lambda w: sends_and_stays(SSE, w.text), "MODEL_TIMEOUT", True, "part"),
    "only keepalives": (lambda w: sends_and_stays(SSE, then=b": ping\n\n"), "MODEL_TIMEOUT", True, ""),
    "keepalives for ever": (lambda w: sends_and_stays(SSE, w.text, then=b": ping\n\n"), "MODEL_TIMEOUT", True, "part"),
    "no answer at all": (lambda w: sends_and_stays(), "MODEL_TIMEOUT", True, ""),
    "closed before the answer": (lambda w: sends(), "MODEL_UNAVAILABLE", True, ""),
    "half a header": (lambda w: sends(b"HTTP/1.1 200 OK\r\ncontent-"), "MODEL_UNAVAILABLE", True, ""),
    "no HTTP": (lambda w: sends(b"220 mail ready\r\n\r\n"), "MODEL_BAD_RESPONSE", False, ""),
    "redirect": (lambda w: redirects(307), "MODEL_BAD_RESPONSE", False, ""),
    "moved for good": (lambda w: redirects(301), "MODEL_BAD_RESPONSE", False, ""),
}


@APIS
@pytest.mark.parametrize("case", STREAMS)
async def test_each_bad_end_of_a_stream_is_typed_and_keeps_what_was_shown(kit, vendor, api: str, case: str) -> None:
    """Reason and retryable follow from how it ended, the same for every API; text before it was shown."""
    script, reason, retryable, text = STREAMS[case]
    timeouts = (QUICK_IDLE if text else QUICK_START) if reason == "MODEL_TIMEOUT" else None
    async with leaving_nothing(vendor, api, script(WIRES[api]), timeouts) as model:
        outcome = await kit.play(model)
    assert outcome.response is None
    assert outcome.error is not None
    assert (outcome.error.reason, outcome.error.retryable, outcome.text) == (reason, retryable, text), outcome.error


BODIES = {
    "PS44 a page": ((200, b"<!doctype html><p>hi", "text/html; charset=utf-8"), "MODEL_BAD_RESPONSE", False),
    "an error object": (
        (200, b'{"error":{"type":"overloaded_error","message":"busy"}}', "application/json"),
        "MODEL_OVERLOADED",
        True,
    ),
    "a page with 502": ((502, b"<html>Bad gateway</html>", "text/html"), "MODEL_UNAVAILABLE", True),
    "429": ((429, b'{"error":{"message":"slow down"}}', "application/json"), "MODEL_OVERLOADED", True),
    "401": ((401, b'{"error":{"message":"no"}}', "application/json"), "MODEL_AUTH", False),
    "529": (
        (529, b'{"type":"error","error":{"type":"overloaded_error"}}', "application/json"),
        "MODEL_OVERLOADED",
        True,
    ),
    "other JSON": ((200, b'{"hello":"world"}', "application/json"), "MODEL_BAD_RESPONSE", False),
}


@APIS
@pytest.mark.parametrize("case", BODIES)
async def test_a_body_instead_of_a_stream_is_typed(kit, vendor, api: str, case: str) -> None:
    """Pages, error objects and statuses mean the same for every API, streaming and not."""
    (status, body, kind), reason, retryable = BODIES[case]
    async with leaving_nothing(vendor, api, kit.answers(status, body, kind)) as model:
        outcome = await kit.play(model)
        with pytest.raises(ModelError) as generated:
            await model.generate(kit.asking())
    for error in (outcome.error, generated.value):
        assert (error.reason, error.retryable) == (reason, retryable), error


@APIS
@pytest.mark.parametrize("case", [case for case, ((status, *_), *_) in BODIES.items() if status == 200])
@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain", "application/octet-stream"])
async def test_a_body_that_calls_itself_something_else_is_read_for_what_it_is(
    kit, vendor, api: str, case: str, kind: str
) -> None:
    """Gateways send pages and error objects under any content type; "empty stream" would hide what they say."""
    (status, body, _), reason, retryable = BODIES[case]
    async with leaving_nothing(vendor, api, kit.answers(status, b"\n " + body, kind)) as model:
        outcome = await kit.play(model)
    assert (outcome.error.reason, outcome.error.retryable) == (reason, retryable), outcome.error


@APIS
@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
async def test_a_whole_answer_that_calls_itself_a_stream_is_the_answer(kit, vendor, api: str, kind: str) -> None:
    """Streaming or not was ignored, and the content type is wrong as well."""
    body = json.dumps(WIRES[api].whole).encode()
    async with leaving_nothing(vendor, api, kit.answers(200, body, kind)) as model:
        outcome = await kit.play(model)
        generated = await model.generate(kit.asking())
    assert outcome.text == "part"
    assert [part.text for part in generated.message.parts] == ["part"]


@APIS
async def test_a_body_that_never_ends_is_a_timeout_for_generate(kit, vendor, api: str) -> None:
    """Half a JSON body and then silence: the bound of the whole answer ends it."""
    half = json.dumps(WIRES[api].whole).encode()[:30]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
    async with leaving_nothing(vendor, api, sends_and_stays(head, half), ModelTimeouts(whole=0.5)) as model:
        with pytest.raises(ModelError) as raised:
            await model.generate(kit.asking())
    assert (raised.value.reason, raised.value.retryable) == ("MODEL_TIMEOUT", True)


@APIS
@pytest.mark.parametrize("how", ["closed", "left open", "left open with keepalives"])
async def test_a_whole_answer_is_whole_however_the_connection_ends(kit, vendor, api: str, how: str) -> None:
    """PS29: after the end mark the call is over at once, and the connection is closed from this side."""
    wire = WIRES[api]
    pieces = (SSE, wire.text, wire.finish, wire.end)
    script = (
        sends(*pieces) if how == "closed" else sends_and_stays(*pieces, then=b": ping\n\n" if "with" in how else b"")
    )
    patient = ModelTimeouts(after_finish=10 * PATIENCE)  # so that only the end mark can have ended it in time
    async with leaving_nothing(vendor, api, script, patient) as model:
        outcome = await kit.play(model, within=PATIENCE)
    assert (outcome.text, outcome.error) == ("part", None)
    assert outcome.response.finish_reason == "stop"


@APIS
async def test_every_split_of_a_whole_answer_into_reads_gives_it(kit, vendor, api: str) -> None:
    """One byte per write changes nothing."""
    wire = WIRES[api]
    body = wire.text + wire.finish + wire.end
    async with leaving_nothing(vendor, api, sends(SSE, *(body[i : i + 1] for i in range(len(body))))) as model:
        outcome = await kit.play(model)
    assert (outcome.text, outcome.error) == ("part", None)


@APIS
async def test_an_event_past_the_bound_is_refused_and_the_rest_is_not_read(kit, vendor, api: str) -> None:
    """A peer that sends without end is cut off at the bound."""
    flood = b"data: " + b"x" * 100_000

    async def script(connection, asked) -> None:
        await connection.send(SSE, WIRES[api].text)
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    await connection.send(flood)

    async with leaving_nothing(vendor, api, script) as model:
        small = HttpChatModel("m", model._endpoint, model._api, max_event_bytes=250_000)
        outcome = await kit.play(small)
    assert (outcome.error.reason, outcome.error.retryable, outcome.text) == ("MODEL_BAD_RESPONSE", False, "part")


@APIS
@pytest.mark.parametrize("leave", ["cancel", "close"])
async def test_leaving_in_the_middle_leaves_nothing(kit, vendor, api: str, leave: str) -> None:
    """A cancelled task and a closed generator both end the connection at once."""
    async with leaving_nothing(vendor, api, sends_and_stays(SSE, WIRES[api].text)) as model:
        if leave == "close":
            async with asyncio.timeout(PATIENCE), aclosing(model.stream(kit.asking())) as stream:
                assert await anext(stream) == TextDelta("part")
            return
        shown = asyncio.Event()

        async def consume() -> None:
            async with aclosing(model.stream(kit.asking())) as stream:
                async for _ in stream:
                    shown.set()

        task = asyncio.create_task(consume())
        await asyncio.wait_for(shown.wait(), PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@APIS
async def test_fifty_calls_that_all_fail_leave_nothing(kit, vendor, api: str) -> None:
    """At once and in every bad way: nothing adds up."""
    wire = WIRES[api]
    scripts = [make(wire) for make, *_ in list(STREAMS.values())[:8]]
    turn = iter(range(10_000))

    async def script(connection, asked) -> None:
        await scripts[next(turn) % len(scripts)](connection, asked)

    async with leaving_nothing(vendor, api, script) as model:
        outcomes = await asyncio.gather(*(kit.play(model) for _ in range(50)))
    assert all(outcome.error is not None for outcome in outcomes)


@APIS
async def test_nobody_listens(kit, api: str) -> None:
    """A refused connection is MODEL_UNAVAILABLE, retryable, for streams and whole answers."""
    with kit.port_of_nobody() as nobody:
        before = sockets()
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        model = TABLE[WIRES[api].vendor].make_model("m", base_url=address, tls=_TLS)
        outcome = await kit.play(model)
        with pytest.raises(ModelError) as generated:
            await model.generate(kit.asking())
        await model.aclose()
    for error in (outcome.error, generated.value):
        assert (error.reason, error.retryable) == ("MODEL_UNAVAILABLE", True)
    await settled(lambda: no_more_sockets_than(before), lambda: f"{sockets()} sockets instead of {before}")


async def test_a_router_over_bad_endpoints_leaves_nothing(kit, vendor) -> None:
    """One breaks in mid-stream, one never answers, the third is whole: the answer is there, and nothing else is."""
    chat = WIRES["chat"]
    async with (
        vendor(sends(SSE, chat.text)) as broken,
        vendor(sends_and_stays()) as silent,
        vendor(sends_and_stays(SSE, chat.text, chat.finish, chat.end)) as good,
    ):
        tasks, before = asyncio.all_tasks(), sockets()
        spec = ",".join(f"custom:m{number}@{each.url}" for number, each in enumerate((broken, silent, good)))
        model = model_from_spec(spec, timeouts=ModelTimeouts(first_token=4))
        try:
            outcome = await kit.play(model)
            await settled(lambda: not broken.open + silent.open + good.open, lambda: "connections")
            await settled(lambda: asyncio.all_tasks() <= tasks, lambda: asyncio.all_tasks() - tasks)
        finally:
            await model.aclose()
        await settled(lambda: no_more_sockets_than(before), lambda: f"{sockets()} sockets instead of {before}")
    assert outcome.error is None
    assert outcome.response.message.parts[0].text == "part"
    assert [len(each.asked) for each in (broken, silent, good)] == [1, 1, 1]
