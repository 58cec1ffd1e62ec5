"""A real vendor's stream, served byte by byte on loopback, gives the expected answer through the whole path."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest

from dualclaw import ContentPart, Message, Role, RunRequest
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient

from .conftest import ROOT, Launcher

RECORDED = ROOT.parent / "shared" / "recorded_streams"
TEXT = [
    "openai-chat-text-after-tools.sse",
    "deepseek-chat-reasoning.sse",
    "perplexity-crlf-cumulative-usage.sse",
    "snowflake-text-no-finish-reason.sse",
]


@pytest.fixture
async def vendor() -> AsyncIterator[Callable[[bytes], str]]:
    """Serve one body, a few bytes at a time, to whoever asks; returns the base URL."""
    body = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # With the body: a connection that is closed with unread bytes is reset, and the answer may be lost.
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.partition("content-length: ")[2].split("\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for start in range(0, len(body), 7):
            writer.write(body[start : start + 7])
            await writer.drain()
        writer.close()

    def serve(content: bytes) -> str:
        nonlocal body
        body = content
        return f"http://127.0.0.1:{port}/v1"

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield serve
    server.close()


async def ask(client: EngineClient) -> tuple[str, str, object]:
    message = Message(role=Role.ROLE_USER, parts=[ContentPart(text="go")])
    async with client.run(RunRequest(message=message), timeout=100) as stream:
        events = [event async for event in stream]
    assert check_stream(events) == []
    done = events[-1].done
    reasoning = "".join(e.reasoning.content for e in events if e.WhichOneof("payload") == "reasoning")
    return done.content, reasoning, done.usage


@pytest.mark.parametrize("name", TEXT)
async def test_a_recorded_answer_comes_through_whole(
    name: str, vendor: Callable[[bytes], str], launch: Launcher, connect: Callable[[str], EngineClient]
) -> None:
    """Text, reasoning and usage of a vendor's real stream arrive at a gRPC client as recorded."""
    if not RECORDED.is_dir():
        pytest.skip(f"{RECORDED.name} is not beside the checkout: no real recording was replayed")
    index = json.loads((RECORDED / "index.json").read_text())
    expected = next(entry["expected"] for entry in index["streams"] if entry["file"] == name)
    base_url = vendor((RECORDED / name).read_bytes())
    engine = launch(
        "dualclaw_server",
        DUALCLAW_LISTEN="127.0.0.1:0",
        DUALCLAW_STORE="memory:",
        DUALCLAW_MODEL="openai:recorded",
        DUALCLAW_MODEL_BASE_URL=base_url,
        DUALCLAW_MODEL_API_KEY="test-key",
    )
    content, reasoning, usage = await ask(connect(engine.address))
    assert content == expected["text"]
    assert reasoning == expected["reasoning"]
    assert usage.input_tokens == expected["usage"]["input_tokens"]  # type: ignore[attr-defined]
    assert usage.output_tokens == expected["usage"]["output_tokens"]  # type: ignore[attr-defined]


OWN = (
    'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Guten "},"finish_reason":null}]}\r\n\r\n'
    ": keep-alive\r\n\r\n"
    'data: {"choices":[{"index":0,"delta":{"content":"Tag, 世界\u2028🙂"},"finish_reason":"stop"}],'
    '"usage":{"prompt_tokens":3,"completion_tokens":5}}\r\n\r\n'
    "data: [DONE]\r\n\r\n"
)


async def test_an_openai_style_endpoint_answers_through_the_whole_path(
    vendor: Callable[[bytes], str], launch: Launcher, connect: Callable[[str], EngineClient]
) -> None:
    """The same with a stream of our own, so that it is proven where no recordings are."""
    engine = launch(
        "dualclaw_server",
        DUALCLAW_LISTEN="127.0.0.1:0",
        DUALCLAW_STORE="memory:",
        DUALCLAW_MODEL="openai:own",
        DUALCLAW_MODEL_BASE_URL=vendor(OWN.encode()),
        DUALCLAW_MODEL_API_KEY="test-key",
    )
    content, _, usage = await ask(connect(engine.address))
    assert content == "Guten Tag, 世界\u2028🙂"
    assert (usage.input_tokens, usage.output_tokens) == (3, 5)  # type: ignore[attr-defined]
    assert "test-key" not in engine.logged()
