"""MCP servers that are broken or mean: bounded in time, size and number, and told apart in words."""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from dualclaw_server.engine.tool import Tool, ToolContext, ToolRaised
from dualclaw_server.tools.mcp import McpServer
from dualclaw_server.tools.mcp_life import MAX_PAGES, MAX_TOOLS
from dualclaw_server.tools.mcp_schema import tool_name
from dualclaw_server.tools.mcp_spec import Unreachable

from .conftest import PATIENCE, Bench, Stdio, served

Plain = Callable[..., McpServer]


@pytest.fixture
def plain(stdio: Stdio) -> Plain:
    """Give a function that makes a hand-written server in some mode."""

    def make(mode: str, **options: object) -> McpServer:
        return stdio(Path(__file__).with_name("plain_server.py"), args=[mode], **options)

    return make


async def tools_of(server: McpServer) -> dict[str, Tool]:
    return {tool.name.removeprefix("test__"): tool for tool in await server.tools()}


async def test_a_server_that_never_answers_is_given_up(plain: Plain) -> None:
    """The handshake has its time; then the process is gone, and the reason is told."""
    server = plain("hang", connect_timeout=1.0)
    with pytest.raises(Unreachable, match="no answer within 1 s"):
        await server.tools()


async def test_a_server_that_ends_at_once_is_told_with_its_last_words(plain: Plain) -> None:
    """What it wrote to stderr explains it, without its secrets; the next use waits for the delay to pass."""
    server = plain("crash", env={"TOKEN": "very-secret-2"})
    with pytest.raises(Unreachable, match=r"no licence for \*\*\*"):
        await server.tools()
    told = ""
    async with asyncio.timeout(PATIENCE):
        while "and is tried again in" not in told:  # the delay grows until it is not waited for any more
            with pytest.raises(Unreachable) as raised:
                await server.tools()
            told = str(raised.value)
    assert told.startswith("it is down (")


async def test_a_command_that_is_none_is_told() -> None:
    """A program that is not there is a reason like any other."""
    with pytest.raises(Unreachable, match="No such file"):
        await McpServer("test", command="/no/such/program").tools()


@pytest.mark.parametrize(("mode", "count"), [("pages", MAX_PAGES), ("cursor", 1), ("many", MAX_TOOLS)])
async def test_lists_without_an_end_are_cut(plain: Plain, mode: str, count: int) -> None:
    """Pages are bounded, and one that comes again ends the list."""
    assert len(await plain(mode).tools()) == count


async def test_a_list_that_is_none_is_told(plain: Plain) -> None:
    """Wrong types fail the list, and nothing else."""
    with pytest.raises(Unreachable, match="its tools cannot be listed"):
        await plain("wrong").tools()


async def test_noise_between_messages_is_passed_over(plain: Plain, bench: Bench) -> None:
    """Greetings, broken JSON and answers to nothing harm nobody."""
    assert int(await bench.call(plain("junk"), "pid")) > 0


async def test_a_huge_answer_fails_its_call_alone(plain: Plain, bench: Bench) -> None:
    """It is read past and not kept; the connection goes on."""
    server = plain("plain", max_message=100_000)
    pid = await bench.call(server, "pid")
    with pytest.raises(ToolRaised, match="larger than 100000 bytes"):
        await bench.call(server, "huge", size=5_000_000)
    assert await bench.call(server, "huge", size=50_000) == "x" * 50_000
    assert await bench.call(server, "pid") == pid


async def test_an_answer_of_the_wrong_shape_is_told(plain: Plain, bench: Bench) -> None:
    """What is no result of a tool call fails the call in plain words."""
    with pytest.raises(ToolRaised, match="no result of a tool call"):
        await bench.call(plain("plain"), "shape")


async def test_structured_data_without_text_becomes_text(plain: Plain, bench: Bench) -> None:
    """A result that has only structuredContent is told as JSON."""
    assert await bench.call(plain("plain"), "both") == '{"b": 1, "a": [1.5]}'


async def test_arguments_may_have_any_name(plain: Plain, bench: Bench) -> None:
    """No argument of a server's tool collides with a name of this engine's own."""
    args: dict[str, object] = {"context": 1, "self": 2, "name": 3, "calls": [4], "": 5}
    server = plain("plain")
    tool = (await tools_of(server))["context"]
    context = ToolContext("t", "s", "r", "c", bench.new_call(tool.name, args), "key", {}, bench.trace)
    assert json.loads((await tool.call(args, context)).parts[0].text) == args


async def test_a_stubborn_process_is_killed(plain: Plain, bench: Bench) -> None:
    """A server that ignores the end of its input and SIGTERM does not outlive the engine."""
    server = plain("stubborn")
    pid = int(await bench.call(server, "pid"))
    async with asyncio.timeout(PATIENCE):
        await server.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_question_over_pipes_that_may_be_anybodys_is_put_to_nobody(plain: Plain, bench: Bench) -> None:
    """With two calls open nobody knows whose question it is; it must not reach the people of another run."""
    server = plain("asks")
    await server.tools()
    told = await asyncio.gather(*(bench.call(server, "pid") for _ in range(2)))
    assert all("nobody was asked" in each for each in told)


async def test_odd_schemas_are_told_in_words(plain: Plain) -> None:
    """What cannot be checked here is open to any object, with the schema in the description; no address is fetched."""
    tools = await tools_of(plain("plain"))
    for name in ("remote", "nowhere", "old", "loop"):
        assert tools[name].problem({"a": "anything"}) == "", name
        assert tools[name].parameters == {"type": "object"}, name
        assert '{"type": ' in tools[name].description
    assert "is not of type 'integer'" in tools["local"].problem({"a": "x"})


async def test_patterns_of_strangers_are_told_in_words(plain: Plain) -> None:
    """A regular expression that would keep the engine busy for years is not tried, unless the server is trusted."""
    tool = (await tools_of(plain("plain")))["pattern"]
    assert tool.problem({"a": "x" * 40}) == ""
    assert "Pattern: (x+x+)+y" in tool.parameters_json
    trusted = (await tools_of(plain("plain", trusted=True)))["pattern"]
    assert '"pattern": "(x+x+)+y"' in trusted.parameters_json


async def test_hints_count_for_trusted_servers_only(plain: Plain) -> None:
    """A stranger's read-only tool may still do anything."""
    assert (await tools_of(plain("plain")))["hinted"].effect == "once"
    assert (await tools_of(plain("plain", trusted=True)))["hinted"].effect == "read"


async def test_only_chosen_tools_are_taken(plain: Plain) -> None:
    """``only`` names tools as the server has them; the rest does not exist."""
    assert list(await tools_of(plain("plain", only=["pid", "none"]))) == ["pid"]


def test_a_schema_that_leads_nowhere_lets_no_call_through() -> None:
    """Nothing is fetched for a reference, and what cannot be checked is told instead of raised."""
    schema = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}
    tool = Tool("t", "", schema, print)
    assert tool.problem({}) == ""
    assert "the schema of t cannot be used" in tool.problem({"a": 1})


@pytest.mark.parametrize("name", ["a.b", "日本", "x" * 100, "a b", ""])
def test_names_become_legal_and_stay_apart(name: str) -> None:
    """A changed name is legal, the same every time, and differs from that of any other tool."""
    made = tool_name("server", name)
    assert made == tool_name("server", name)
    Tool(made, "", {"type": "object"}, print)
    assert len({tool_name("server", other) for other in (name, f"{name}!", f"{name}?", f"{name}_")}) == 4


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"name": "a__b", "command": "x"}, "its name must be"),
        ({"name": "a"}, "give a command"),
        ({"name": "a", "command": "x", "url": "http://h"}, "one of them"),
        ({"name": "a", "url": "ftp://h"}, "must begin with http"),
        ({"name": "a", "url": "http://user:pass@h/"}, "no credentials"),
        ({"name": "a", "url": "http://h", "env": {"A": "b"}}, "a url takes headers"),
        ({"name": "a", "command": "x", "headers": {"A": "b"}}, "a command takes env"),
        ({"name": "a", "command": "x", "timeout": 0}, "timeout must be above 0"),
        ({"name": "a", "command": "x", "timeout": 9, "max_time": 1}, "must not be below"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, object], part: str) -> None:
    """Every fault is told when the server is described, before anything is started."""
    with pytest.raises(ValueError, match=part):
        McpServer(**options)  # type: ignore[arg-type]


async def refuse(_: Request) -> Response:
    return PlainTextResponse("who are you?", 401)


async def flood(request: Request) -> Response:
    number = (await request.json()).get("id")
    return JSONResponse({"jsonrpc": "2.0", "id": number, "result": {"text": "x" * 1_000_000}})


async def bomb(_: Request) -> Response:
    return Response(b"\x1f\x8b0000", headers={"content-encoding": "gzip", "content-type": "application/json"})


@pytest.mark.parametrize(
    ("endpoint", "part"), [(refuse, "HTTP status 401"), (flood, "larger than 10000"), (bomb, "compressed")]
)
async def test_http_servers_that_are_none_are_told(endpoint: Callable[[Request], object], part: str) -> None:
    """A refusal shows its status; bodies without an end, and compressed ones, are not read."""
    app = Starlette(routes=[Route("/mcp", endpoint, methods=["GET", "POST", "DELETE"])])
    async with served(app) as url:
        server = McpServer("test", url=url, headers={"authorization": "Bearer very-secret-3"}, max_message=10_000)
        with pytest.raises(Unreachable) as raised:
            await server.tools()
        assert part in str(raised.value)
        assert "very-secret-3" not in str(raised.value)
        await server.aclose()


async def test_an_address_where_nobody_listens_is_told() -> None:
    """A server that is down over HTTP is unreachable like any other."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen, nor does anybody else there meanwhile
        with pytest.raises(Unreachable):
            await McpServer("test", url=f"http://127.0.0.1:{held.getsockname()[1]}/mcp").tools()
