"""Runs of an engine with tools of MCP servers: what clients see, what survives, who may be missing."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dualclaw import Decision, DecisionAction, ResumeRequest, RunState, StepKind, StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import tool
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.tools.mcp import McpServer, McpToolsInterceptor
from tests.server.engine.conftest import CALLER, TRACE, Asked, Engine, at_work_with, turn
from tests.server.engine.teams import read_on

from .conftest import PATIENCE, Bench, Stdio, lines, served, until
from .mcp_server import make_server

ANSWER = turn(1, {"text": "It says {{result}}"})


@pytest.fixture
async def store() -> AsyncIterator[RunStore]:
    """An open store."""
    store = MemoryStore()
    await store.open()
    yield store
    await store.close()


@pytest.fixture(params=["auto", "legacy"])
async def server(request: pytest.FixtureRequest, log: Path) -> AsyncIterator[McpServer]:
    """The test server over HTTP, in both eras of the protocol."""
    async with served(make_server(log).streamable_http_app()) as url:
        server = McpServer("test", url=url, protocol=request.param, connect_timeout=PATIENCE)
        yield server
        await server.aclose()


def call(name: str, /, **args: object) -> dict[str, object]:
    return {"call": f"test__{name}", "args": args}


@asynccontextmanager
async def engine_with(store: RunStore, servers: list[McpServer], *script: dict[str, object]) -> AsyncIterator[Engine]:
    agent = Agent("helper", instructions="Help.", interceptors=[McpToolsInterceptor(servers)])
    async with at_work_with(store, [agent], *script) as engine:
        yield engine


async def resume(engine: Engine, asked: Asked, action: str, response: object = None) -> Asked:
    """Answer the one open question and read on to the end of the next segment."""
    (item,) = asked.view.interrupts
    decision = Decision(interrupt_id=item.id, action=DecisionAction.Value(f"DECISION_ACTION_{action.upper()}"))
    if action == "respond":
        decision.response_json = json.dumps(response)
    request = ResumeRequest(run_id=asked.key.run_id, decisions=[decision])
    await engine.runner.resume(CALLER, request, TRACE)
    return await read_on(engine.store, asked)


async def test_a_run_shows_its_mcp_calls_with_their_server(store: RunStore, server: McpServer) -> None:
    """Steps have kind mcp and the server's name, and done lists what was used; the rules of a stream hold."""
    async with engine_with(store, [server], turn(0, call("add", a=2, b=3)), ANSWER) as engine:
        asked = await engine.ask("add")
    steps = [e.step.step for e in asked.events if e.WhichOneof("payload") == "step"]
    assert [(s.kind, s.server, s.name) for s in steps] == [(StepKind.STEP_KIND_MCP, "test", "test__add")] * 2
    assert steps[-1].result == "5"
    assert list(asked.last.done.used_mcp) == ["test__add"]
    assert asked.last.done.content == "It says 5"


async def test_a_failure_of_a_tool_is_a_failed_step(store: RunStore, server: McpServer) -> None:
    """An error reaches the model and the step in the server's words, and the run goes on."""
    async with engine_with(store, [server], turn(0, call("fail")), turn(1, {"text": "sorry"})) as engine:
        asked = await engine.ask("fail")
    assert asked.steps == [(0, "test__fail", "start", ""), (0, "test__fail", "fail", "tool.failed")]
    assert "the kitchen is closed" in asked.view.steps[0].diagnosis.detail
    assert asked.last.done.content == "sorry"


async def test_a_servers_question_parks_the_run_and_its_answer_goes_back(
    store: RunStore, server: McpServer, log: Path
) -> None:
    """The step waits with input.required, Resume answers, and the tool does its work once, with the answer."""
    async with engine_with(store, [server], turn(0, call("book", dish="soup")), ANSWER) as engine:
        asked = await engine.ask("book")
        assert asked.last.done.stop_reason == StopReason.STOP_REASON_INTERRUPTED
        assert asked.steps[-1] == (0, "test__book", "start", "input.required")
        assert lines(log) == []
        done = await resume(engine, asked, "respond", {"seats": 4})
    assert done.last.done.content == "It says 4 seats for soup"
    assert lines(log) == ["book soup 4"]
    assert list(done.last.done.used_mcp) == ["test__book"]


async def test_a_message_answers_a_servers_question(store: RunStore, server: McpServer) -> None:
    """In a chat people just say it: a form of one field takes its bare value."""
    async with engine_with(store, [server], turn(0, call("book", dish="soup")), ANSWER) as engine:
        asked = await engine.ask("book")
        await engine.start("6", conversation=asked.conversation_id)
        done = await read_on(engine.store, asked)
    assert done.last.done.content == "It says 6 seats for soup"


async def test_a_skipped_question_is_declined_at_the_server(store: RunStore, server: McpServer, log: Path) -> None:
    """The server learns of it and decides what follows; nothing was done."""
    async with engine_with(store, [server], turn(0, call("book", dish="soup")), turn(1, {"text": "no"})) as engine:
        asked = await engine.ask("book")
        done = await resume(engine, asked, "skip")
    assert "declin" in done.view.steps[0].diagnosis.detail
    assert lines(log) == []


async def test_an_answer_survives_the_engine_that_asked(store: RunStore, log: Path) -> None:
    """Another process, with a connection of its own, goes on with the saved state of the server's question."""
    async with served(make_server(log).streamable_http_app()) as url:
        first, second = (McpServer("test", url=url, connect_timeout=PATIENCE) for _ in range(2))
        async with engine_with(store, [first], turn(0, call("book", dish="soup"))) as engine:
            asked = await engine.ask("book")
        await first.aclose()
        async with engine_with(store, [second], turn(0, call("book", dish="soup")), ANSWER) as engine:
            done = await resume(engine, asked, "respond", 5)
        await second.aclose()
    assert done.last.done.content == "It says 5 seats for soup"
    assert lines(log) == ["book soup 5"]


async def test_a_process_killed_in_a_call_fails_it_and_is_started_again(
    store: RunStore, stdio: Stdio, log: Path
) -> None:
    """The call has an outcome nobody knows, the run goes on, and its next call meets a new process."""
    server = stdio()
    script = [turn(0, call("wait", name="x")), turn(1, call("pid")), turn(2, {"text": "It says {{result}}"})]
    async with engine_with(store, [server], *script) as engine:
        created = await engine.start("wait")
        await until(lambda: "wait x" in lines(log))
        first = int(await Bench().call(server, "pid"))
        os.kill(first, 9)
        asked = await engine.read(created)
    assert [step[2:] for step in asked.steps] == [
        ("start", ""),
        ("fail", "tool.outcome_unknown"),
        ("start", ""),
        ("ok", ""),
    ]
    assert asked.last.done.content != f"It says {first}"
    assert asked.last.done.content.removeprefix("It says ").isdigit()


async def test_a_cancelled_run_cancels_its_call_at_the_server(store: RunStore, server: McpServer, log: Path) -> None:
    """The server's own code is stopped."""
    async with engine_with(store, [server], turn(0, call("wait", name="x"))) as engine:
        created = await engine.start("wait")
        await until(lambda: "wait x" in lines(log))
        await engine.cancel(created.head.key)
        asked = await engine.read(created)
        await until(lambda: "cancelled x" in lines(log))
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED


async def test_new_tools_are_there_for_the_next_run(store: RunStore, server: McpServer) -> None:
    """A server that says its list has changed is asked again; a run at work keeps what it began with."""
    script = [turn(0, call("learn", name="sing"), user="^learn"), turn(1, {"text": "ok"}, user="^learn")]
    script += [turn(0, call("sing"), user="^sing"), turn(1, {"text": "It says {{result}}"}, user="^sing")]
    async with engine_with(store, [server], *script) as engine:
        await engine.ask("learn")
        await has_tool(server, "test__sing")
        assert (await engine.ask("sing")).last.done.content == "It says learned sing"


async def test_every_change_is_heard_of(server: McpServer, bench: Bench) -> None:
    """A list that may be kept for an hour is read again after each change, and not only the first."""
    for name in ("sing", "dance"):
        await bench.call(server, "learn", name=name)
        await has_tool(server, f"test__{name}")


async def has_tool(server: McpServer, name: str) -> None:
    """Wait until a server's tools have one of that name."""
    async with asyncio.timeout(PATIENCE):
        while name not in {tool.name for tool in await server.tools()}:  # noqa: ASYNC110  # told by the server
            await asyncio.sleep(0.05)


async def test_a_missing_server_takes_nobody_down(store: RunStore, server: McpServer) -> None:
    """Its tools are left out and the model is told; the tools of the others are there."""
    gone = McpServer("gone", command="/no/such/program")
    script = [turn(0, call("add", a=1, b=1), system="^Help.\n\nThe tools of gone are not available"), ANSWER]
    async with engine_with(store, [gone, server], *script) as engine:
        assert (await engine.ask("add")).last.done.content == "It says 2"


async def test_a_required_server_that_is_missing_fails_the_run(store: RunStore) -> None:
    """The error names the server and why, and the run is not begun without it."""
    gone = McpServer("gone", command="/no/such/program", required=True)
    async with engine_with(store, [gone], turn(0, {"text": "hi"})) as engine:
        asked = await engine.ask("hi")
        head = await store.head(asked.key)
    assert head.state == RunState.RUN_STATE_FAILED
    assert "MCP server gone, which the agent needs, cannot be had: [Errno 2]" in asked.last.error.message


async def test_an_agents_own_tool_comes_first(store: RunStore, server: McpServer) -> None:
    """A server's tool of the same name is left out."""

    @tool(name="test__add", effect="read")
    async def add(a: int, b: int) -> str:
        """Add."""
        return "mine"

    agent = Agent("helper", tools=[add], interceptors=[McpToolsInterceptor([server])])
    async with at_work_with(store, [agent], turn(0, call("add", a=1, b=1)), ANSWER) as engine:
        assert (await engine.ask("add")).last.done.content == "It says mine"


def test_two_servers_of_one_name_are_refused() -> None:
    """Names of tools would be of either."""
    with pytest.raises(ValueError, match="repeated: a"):
        McpToolsInterceptor([McpServer("a", command="x"), McpServer("a", command="y")])
