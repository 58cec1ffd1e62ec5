"""MCP servers as processes: they die and are started again, they are closed, they keep their secrets."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dualclaw_server.engine.tool import NotDone, ToolContext, ToolRaised
from dualclaw_server.tools.mcp import McpServer
from dualclaw_server.tools.mcp_spec import Unreachable

from .conftest import Bench, Stdio

Plain = Callable[..., McpServer]
LOST = "The connection to MCP server test was lost while it was at work."


@pytest.fixture
def plain(stdio: Stdio) -> Plain:
    """Give a function that makes the hand-written server."""

    def make(**options: object) -> McpServer:
        return stdio(Path(__file__).with_name("plain_server.py"), args=["plain"], **options)

    return make


async def test_a_server_that_dies_in_a_call_is_started_again(plain: Plain, bench: Bench) -> None:
    """The call's outcome is unknown, which is not retried; the next call meets a new process."""
    server = plain()
    first = await bench.call(server, "pid")
    assert await bench.call(server, "die") == f"tool.outcome_unknown: {LOST}"
    assert await bench.call(server, "pid") != first
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


async def test_a_read_only_call_that_is_lost_may_be_made_again(plain: Plain, bench: Bench) -> None:
    """What a trusted server says is read-only has done nothing: a failure that is retryable, and no doubt."""
    assert await bench.call(plain(trusted=True), "die_reading") == f"tool.failed retryable: {LOST}"
    assert (await bench.call(plain(), "die_reading")).startswith("tool.outcome_unknown")


async def test_a_closed_server_is_not_opened_again(plain: Plain, bench: Bench) -> None:
    """After aclose nothing is sent and nothing started; its process is gone."""
    server = plain()
    pid = int(await bench.call(server, "pid"))
    tools = await server.tools()
    await server.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(Unreachable, match="shuts down"):
        await server.tools()
    tool = next(tool for tool in tools if tool.name == "test__pid")
    context = ToolContext("t", "s", "r", "c", "late", "late", {}, bench.trace)
    with pytest.raises(NotDone, match="cannot be reached"):
        await tool.call({}, context)


async def test_secrets_stay_out_of_errors(plain: Plain, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The server gets its environment; what it says of it in errors and on stderr is masked, and no repr shows it."""
    caplog.set_level("DEBUG", logger="dualclaw_server")
    server = plain(env={"TOKEN": "very-secret-1"})
    assert await bench.call(server, "variable", name="TOKEN") == "very-secret-1"
    with pytest.raises(ToolRaised) as raised:
        await bench.call(server, "leak")
    assert str(raised.value) == "no ***"
    await server.aclose()
    assert "token ***" in caplog.text
    assert "very-secret-1" not in f"{server!r}{server.spec!r}{caplog.text}"


async def test_only_what_is_harmless_is_inherited(plain: Plain, bench: Bench) -> None:
    """The engine's own keys are in its environment; a server's process does not get them."""
    os.environ["DUALCLAW_TEST_KEY"] = "engine-key"
    try:
        server = plain()
        assert await bench.call(server, "variable", name="DUALCLAW_TEST_KEY") == ""
        assert await bench.call(server, "variable", name="PATH") != ""
    finally:
        del os.environ["DUALCLAW_TEST_KEY"]
