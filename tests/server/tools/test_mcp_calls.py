"""Calls of MCP tools over both transports and both eras of the protocol: results, failures, cancel, questions."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dualclaw_server.engine.outcome import Suspend
from dualclaw_server.engine.tool import ToolContext, ToolRaised
from dualclaw_server.tools.mcp import McpServer

from .conftest import PATIENCE, Bench, lines, served, until
from .mcp_server import PIXEL, make_server


@pytest.fixture(params=["auto", "legacy"])
async def server(request: pytest.FixtureRequest, log: Path, closing: list[McpServer]) -> AsyncIterator[McpServer]:
    """The test server over HTTP, in the newest revision of the protocol and in the one before."""
    async with served(make_server(log).streamable_http_app()) as url:
        server = McpServer("test", url=url, protocol=request.param, trusted=True, connect_timeout=PATIENCE)
        closing.append(server)
        yield server
        await server.aclose()


async def test_tools_are_called_and_told_once(server: McpServer, bench: Bench, log: Path) -> None:
    """Structured data that the text says too is not told twice; the server ran the tool once."""
    assert await bench.call(server, "add", a=1, b=2) == "3"
    assert lines(log) == ["add 1 2"]


async def test_every_kind_of_content_becomes_a_part(server: McpServer, bench: Bench) -> None:
    """Images and files are parts of their own; links that nobody can open, and text resources, are text."""
    tool = next(tool for tool in await server.tools() if tool.name == "test__media")
    context = ToolContext("t", "s", "r", "c", bench.new_call(tool.name, {}), "key", {}, bench.trace)
    parts = (await tool.call({}, context)).parts
    assert [part.WhichOneof("part") for part in parts] == ["text", "image", "file", "text", "text", "file"]
    assert (parts[1].image.media_type, parts[1].image.data) == ("image/png", PIXEL)
    assert parts[2].file.url == "https://example.com/a.pdf"
    assert [parts[0].text, parts[3].text, parts[4].text] == ["text", "[memo: memo://1]", "[memo://2]\ninside"]
    assert (parts[5].file.data, parts[5].file.media_type) == (b"ABC", "application/x")


async def test_an_error_of_a_tool_is_a_failure_in_its_words(server: McpServer, bench: Bench) -> None:
    """A result that is marked as an error is none."""
    with pytest.raises(ToolRaised, match="the kitchen is closed"):
        await bench.call(server, "fail")


async def test_a_cancelled_call_is_cancelled_at_the_server(server: McpServer, bench: Bench, log: Path) -> None:
    """The tool's own code is stopped, and the connection stays of use."""
    await server.tools()
    call = asyncio.create_task(bench.call(server, "wait", name="gate"))
    await until(lambda: "wait gate" in lines(log))
    call.cancel()
    await until(lambda: "cancelled gate" in lines(log))
    assert call.cancelled() or (await asyncio.wait({call}, timeout=PATIENCE))[0]
    assert await bench.call(server, "add", a=1, b=2) == "3"


async def test_calls_are_answered_side_by_side(server: McpServer, bench: Bench, log: Path) -> None:
    """A call that waits holds up no other one on the same connection."""
    await server.tools()
    waiting = asyncio.create_task(bench.call(server, "wait", name="gate"))
    await until(lambda: "wait gate" in lines(log))
    assert await bench.call(server, "open_gate", name="gate") == "open"
    assert await waiting == "through"


async def test_a_call_goes_on_with_the_answer_to_what_it_asks_first(server: McpServer, bench: Bench, log: Path) -> None:
    """The question carries the form, also for its bare value; nothing is done before, and once after the answer."""
    call_id = bench.new_call("test__book", {"dish": "soup"})
    with pytest.raises(Suspend) as suspended:
        await bench.call(server, "book", call_id, dish="soup")
    ask = suspended.value.asks[0]
    assert (ask.kind, ask.prompt) == ("question", "test: How many seats for soup?")
    assert '"seats": {"title": "Seats", "type": "integer"}' in ask.response_schema
    assert lines(log) == []
    bench.answer(4)
    assert await bench.call(server, "book", call_id, dish="soup") == "4 seats for soup"
    assert lines(log) == ["book soup 4"]
    assert dict(bench.trace.checkpoint.extras) == {}


@pytest.mark.parametrize(("approver", "said"), [("anna", "declin"), ("expired", "cancel")])
async def test_a_question_nobody_answers_is_told_to_the_server(
    server: McpServer, bench: Bench, log: Path, approver: str, said: str
) -> None:
    """Skipped is declined, expired is cancelled, and the tool says itself what follows from that."""
    call_id = bench.new_call("test__book", {"dish": "soup"})
    with pytest.raises(Suspend):
        await bench.call(server, "book", call_id, dish="soup")
    bench.answer(skip=True, approver=approver)
    with pytest.raises(ToolRaised, match=said):
        await bench.call(server, "book", call_id, dish="soup")
    assert lines(log) == []


@pytest.fixture
async def handshake(log: Path, closing: list[McpServer]) -> AsyncIterator[McpServer]:
    """The test server over HTTP in a revision in which it asks in the middle of a call."""
    async with served(make_server(log).streamable_http_app()) as url:
        server = McpServer("test", url=url, protocol="legacy", trusted=True, connect_timeout=PATIENCE)
        closing.append(server)
        yield server
        await server.aclose()


async def test_a_call_that_asks_in_the_middle_is_held_open(handshake: McpServer, bench: Bench, log: Path) -> None:
    """The answers, one after the other, go into the very call that asked; its beginning is not run again."""
    call_id = bench.new_call("test__invite_once", {})
    for answer in ({"name": "Ann"}, {"name": "Bob", "vegetarian": True}):
        with pytest.raises(Suspend) as suspended:
            await bench.call(handshake, "invite_once", call_id)
        assert "- name" in suspended.value.asks[0].prompt
        bench.answer(answer)
    assert await bench.call(handshake, "invite_once", call_id) == "invited Ann and Bob"
    assert lines(log) == ["invite", "invite accept", "invited Ann Bob"]


async def test_questions_of_calls_side_by_side_reach_their_own_runs(handshake: McpServer, log: Path) -> None:
    """Over HTTP each question belongs to the call on whose stream it came, and so does its answer."""
    benches = [Bench(), Bench()]
    ids = [bench.new_call("test__book", {}, f"c{number}") for number, bench in enumerate(benches)]
    dishes = ["soup", "fish"]
    await handshake.tools()
    results = await asyncio.gather(
        *(bench.call(handshake, "book", i, dish=d) for bench, i, d in zip(benches, ids, dishes, strict=True)),
        return_exceptions=True,
    )
    prompts = [result.asks[0].prompt for result in results if isinstance(result, Suspend)]
    assert prompts == ["test: How many seats for soup?", "test: How many seats for fish?"]
    for seats, bench in enumerate(benches, 2):
        bench.answer(seats)
    assert await benches[1].call(handshake, "book", ids[1], dish="fish") == "3 seats for fish"
    assert await benches[0].call(handshake, "book", ids[0], dish="soup") == "2 seats for soup"


@pytest.mark.parametrize("tool", ["invite", "invite_once"])
async def test_a_held_call_that_is_gone_is_repeated_only_if_it_may_be(
    log: Path, bench: Bench, tool: str, closing: list[McpServer]
) -> None:
    """Another process, which has the answer and not the call, gives it to a call made anew, or tells of the doubt."""
    async with served(make_server(log).streamable_http_app()) as url:
        first, second = (
            McpServer("test", url=url, protocol="legacy", trusted=True, connect_timeout=PATIENCE) for _ in range(2)
        )
        call_id = bench.new_call(f"test__{tool}", {})
        with pytest.raises(Suspend):
            await bench.call(first, tool, call_id)
        await first.aclose()
        bench.answer({"name": "Ann"})
        if tool == "invite_once":
            assert (await bench.call(second, tool, call_id)).startswith("tool.outcome_unknown")
            assert lines(log) == ["invite"]
        else:
            with pytest.raises(Suspend):  # the second question; the first was answered without asking
                await bench.call(second, tool, call_id)
            assert lines(log) == ["invite", "invite", "invite accept"]
        await second.aclose()


async def test_a_held_call_is_given_up_in_time(log: Path, bench: Bench, closing: list[McpServer]) -> None:
    """After hold_time the server is told that the call is over, whoever answers later."""
    async with served(make_server(log).streamable_http_app()) as url:
        server = McpServer("test", url=url, protocol="legacy", hold_time=0.2, connect_timeout=PATIENCE)
        call_id = bench.new_call("test__invite_once", {})
        with pytest.raises(Suspend):
            await bench.call(server, "invite_once", call_id)
        await asyncio.sleep(3)
        bench.answer({"name": "Ann"})
        assert (await bench.call(server, "invite_once", call_id)).startswith("tool.outcome_unknown")
        assert lines(log) == ["invite"]
        await server.aclose()


async def test_silence_ends_a_call_and_progress_does_not(log: Path, bench: Bench, closing: list[McpServer]) -> None:
    """A silent call ends after ``timeout`` and is cancelled at the server; one that reports goes on beyond it."""
    async with served(make_server(log).streamable_http_app()) as url:
        server = McpServer("test", url=url, timeout=3.0, connect_timeout=PATIENCE)
        silent = asyncio.create_task(bench.call(server, "wait", name="silent"))
        assert (await silent).startswith("tool.timeout")
        await until(lambda: "cancelled silent" in lines(log))
        busy = asyncio.create_task(bench.call(server, "wait", name="busy", progress=True))
        await until(lambda: "wait busy" in lines(log))
        await asyncio.sleep(3.5)
        assert not busy.done()
        await bench.call(server, "open_gate", name="busy")
        assert await busy == "through"
        await server.aclose()
