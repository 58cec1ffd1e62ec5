"""The guards that ship, working together in a real run."""

from dualclaw import Role, StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.tool import NotDone, tool
from dualclaw_server.interceptors import (
    StopLoopInterceptor,
    ToolRetryInterceptor,
    ToolSanitizerInterceptor,
    ToolSelectionInterceptor,
)

from .conftest import Opener, turn


async def test_a_loop_ends_with_the_models_own_words_when_it_gives_in(open_engine: Opener) -> None:
    """The same useless call again and again leads to one tool-less answer, and to LOOP_DETECTED."""
    runs: list[str] = []

    @tool(effect="read")
    async def look(place: str) -> str:
        runs.append(place)
        return "nothing"

    script = [turn(step, {"call": "look", "args": {"place": "/"}}) for step in range(10)]
    guards = [StopLoopInterceptor(), ToolSanitizerInterceptor()]
    engine = await open_engine(Agent("a", tools=[look], interceptors=guards), *script, turn(10, {"text": "I give up."}))
    done = (await engine.ask("go")).last.done
    assert done.stop_reason == StopReason.STOP_REASON_LOOP_DETECTED
    assert done.content == "I give up."
    assert len(runs) < 10


async def test_a_loop_ends_also_when_the_model_never_gives_in(open_engine: Opener) -> None:
    """A model that calls on without its tools is stopped, with something to read."""

    @tool(effect="read")
    async def look(place: str) -> str:
        return "nothing"

    script = [turn(step, {"call": "look", "args": {"place": "/"}}) for step in range(20)]
    guards = [StopLoopInterceptor(), ToolSanitizerInterceptor()]
    done = (await (await open_engine(Agent("a", tools=[look], interceptors=guards), *script)).ask("go")).last.done
    assert done.stop_reason == StopReason.STOP_REASON_LOOP_DETECTED
    assert done.content


async def test_retry_lookup_masking_and_paging_work_together(open_engine: Opener) -> None:
    """No credential is in any event or result, nothing that may have acted is repeated, long results are paged."""
    booked: list[str] = []
    sent: list[str] = []

    async def lookup(_: str) -> str:
        return "password=hunter2 found"

    @tool(effect="reconcile", lookup=lookup)
    async def book(password: str) -> str:
        booked.append(password)
        raise ConnectionError("password=hunter2")

    @tool
    async def send() -> str:
        sent.append("")
        if len(sent) < 3:
            raise NotDone("token=abc123abc123")
        return "AKIA" + "ABCDEFGHIJKLMNOP"

    @tool(effect="read")
    async def long() -> str:
        return "x" * 50_000

    calls = [
        {"call": "book", "args": {"password": "hunter2"}},
        {"call": "send"},
        {"call": "long"},
        {"call": "unknown", "args": {"x": "password=hunter2"}},
    ]
    guards = [ToolRetryInterceptor(delay=0), ToolSanitizerInterceptor(), ToolSelectionInterceptor()]
    agent = Agent("a", tools=[book, send, long], interceptors=guards)
    engine = await open_engine(agent, turn(0, *calls), turn(1, {"text": "ok"}))
    asked = await engine.ask("go")
    assert "hunter2" not in "".join(str(event) for event in asked.events)
    assert (len(booked), len(sent)) == (1, 3)
    messages = await engine.messages(asked.conversation_id)
    told = "".join(str(message) for message in messages if message.role == Role.ROLE_TOOL)
    assert "hunter2" not in told
    assert all(text in told for text in ("[masked:password] found", "read_more", "[masked:aws-key-id]"))
