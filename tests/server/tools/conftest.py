"""MCP servers at work: over HTTP in this process, over pipes as one, and ways to call their tools without a run."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette

from dualclaw import Decision, DecisionAction
from dualclaw_server.engine import questions
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import Checkpoint, RunRecord
from dualclaw_server.engine.interceptor import Observation
from dualclaw_server.engine.outcome import Replace, Suspend
from dualclaw_server.engine.store import RunKey
from dualclaw_server.engine.tool import ToolContext
from dualclaw_server.engine.trace import Trace
from dualclaw_server.tools.mcp import McpServer
from dualclaw_server.tools.mcp_questions import let_answers_through

SCRIPT = Path(__file__).with_name("mcp_server.py")
PATIENCE = 60.0
"""Seconds a server's process may take to start, and a test to wait for anything."""

Stdio = Callable[..., McpServer]
Http = Callable[..., Awaitable[McpServer]]


class Bench:
    """A run's state with calls in it, so that tools can be called as the engine calls them."""

    def __init__(self) -> None:
        self.trace = Trace(RunKey("t", "r"), RunRecord(), Checkpoint(), (), ())
        self._numbers = itertools.count(1)

    def new_call(self, name: str, args: dict[str, object], call_id: str = "") -> str:
        """Put a call into the state and return its id."""
        call_id = call_id or f"call-{next(self._numbers)}"
        state = self.trace.checkpoint.calls.add()
        state.call.id, state.call.name, state.call.args_json = call_id, name, json.dumps(args)
        return call_id

    async def call(self, server: McpServer, name: str, call_id: str = "", /, **args: object) -> str:
        """Call a tool and return the text of its result. Raises what the tool raises; a failure as text."""
        tools = {tool.name: tool for tool in await server.tools()}
        tool = tools[f"{server.spec.name}__{name}"]
        call_id = call_id or self.new_call(tool.name, args)
        context = ToolContext("t", "s", "r", "c", call_id, f"key of {call_id}", {}, self.trace)
        async with asyncio.timeout(PATIENCE):
            try:
                output = await tool.call(args, context)
            except Replace as replaced:
                return _told(replaced)
            except Suspend as wanted:
                self._record(wanted, call_id)
                raise
        return "\n".join(part.text for part in output.parts)

    def _record(self, wanted: Suspend, call_id: str) -> None:
        state = next(state for state in self.trace.checkpoint.calls if state.call.id == call_id)
        for ask in wanted.asks:
            questions.record(self.trace, ask, state.call.name, Call(self.trace, state, None))

    def answer(self, response: object = None, *, skip: bool = False, approver: str = "anna") -> None:
        """Answer every open question, the way the engine does."""
        made = []
        for item in questions.open_items(self.trace.checkpoint):
            action = DecisionAction.DECISION_ACTION_SKIP if skip else DecisionAction.DECISION_ACTION_RESPOND
            text = "" if skip else json.dumps(response)
            made.append(Decision(interrupt_id=item.id, action=action, response_json=text, approver=approver))
        assert made
        questions.answer(self.trace, made)
        let_answers_through(self.trace)


def _told(replaced: Replace) -> str:
    """Return the diagnosis of the observation that takes a result's place."""
    assert isinstance(replaced.value, Observation)
    told = replaced.value.diagnosis
    assert told is not None
    return f"{told.code}{' retryable' if told.retryable else ''}: {told.detail}"


@pytest.fixture
def bench() -> Bench:
    """A run's state to call tools in."""
    return Bench()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the tools of the test server write what they do."""
    path = tmp_path / "log"
    path.touch()
    return path


@pytest.fixture
async def closing() -> AsyncIterator[list[McpServer]]:
    """Servers that are closed at the end."""
    servers: list[McpServer] = []
    yield servers
    for server in servers:
        await server.aclose()


@pytest.fixture
def stdio(log: Path, closing: list[McpServer]) -> Stdio:
    """Give a function that makes the test server, or another script, as a process; it is closed at the end."""

    def make(script: Path | None = None, *, args: Sequence[str] = (), **options: object) -> McpServer:
        options = {"name": "test", "connect_timeout": PATIENCE, **options}
        given = [str(script), *args] if script is not None else [str(SCRIPT), str(log)]
        server = McpServer(command=sys.executable, args=given, **options)  # type: ignore[arg-type]
        closing.append(server)
        return server

    return make


@asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """Serve an app on a port of this machine while the context lasts."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=PATIENCE)


def lines(log: Path) -> list[str]:
    """Return what the tools of the test server wrote."""
    return log.read_text("utf-8").splitlines()


async def until(found: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not found():  # noqa: ASYNC110  # it happens in another process
            await asyncio.sleep(0.01)
