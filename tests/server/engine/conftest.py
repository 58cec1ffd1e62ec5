"""An engine in this process: memory store, scripted model, real runner; tests ask it and read its log."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dualclaw import BusyPolicy, ContentPart, EngineEvent, Message, Role, Run, RunOptions, RunRequest, RunResponse
from dualclaw.fold import RunView
from dualclaw.rules import check_stream
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.runner import Runner
from dualclaw_server.engine.store import Created, RunKey, RunStore
from dualclaw_server.engine.tool import tool
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.stores.sqlite import SqliteStore

CALLER = Caller("tenant", "subject", frozenset({"user", "operator"}))
TRACE = TraceParent("a" * 32)
TIMEOUT = 60.0
"""Seconds a test waits for anything; only a test that fails needs so many."""


@dataclass
class Asked:
    """What came of a question: its events in order, checked against the rules of a stream."""

    key: RunKey
    conversation_id: str
    events: list[EngineEvent] = field(default_factory=list)

    @property
    def view(self) -> RunView:
        view = RunView()
        for event in self.events:
            view.apply(event)
        return view

    @property
    def last(self) -> EngineEvent:
        return self.events[-1]

    @property
    def steps(self) -> list[tuple[int, str, str, str]]:
        """Index, name, phase and diagnosis code of every step event."""
        return [
            (e.step.index, e.step.step.name or "thinking", _phase(e), e.step.step.diagnosis.code)
            for e in self.events
            if e.WhichOneof("payload") == "step"
        ]


def _phase(event: EngineEvent) -> str:
    return ["", "start", "ok", "fail"][event.step.step.phase]


class Engine:
    """A runner at work, and short ways to use it."""

    def __init__(self, store: RunStore, agents: Sequence[Agent], script: Sequence[dict[str, object]]) -> None:
        self.store = store
        self.model = ScriptedModel.parse(json.dumps({"name": "test", "turns": list(script) or [ANSWER]}))
        self.runner = Runner(store, agents, model=self.model, patience=0.2)

    async def start(
        self,
        text: str,
        *,
        conversation: str = "",
        request_id: str = "",
        on_busy: BusyPolicy.ValueType = BusyPolicy.BUSY_POLICY_UNSPECIFIED,
        options: RunOptions | None = None,
        caller: Caller = CALLER,
        agent: str = "",
    ) -> Created:
        message = Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])
        request = RunRequest(
            agent=agent,
            conversation_id=conversation,
            request_id=request_id,
            message=message,
            claw="test",
            on_busy=on_busy,
            options=options,
        )
        return await self.runner.start(caller, request, TRACE)

    async def read(self, created: Created) -> Asked:
        """Follow a started run to the end of its segment and check the rules of a stream."""
        asked = Asked(created.head.key, created.head.conversation_id)
        async with asyncio.timeout(TIMEOUT), aclosing(self.store.follow(created.head.key, 0)) as batches:
            async for frames in batches:
                for frame in frames:
                    asked.events += RunResponse.FromString(frame.body).events
                    if frame.ends_segment:
                        assert check_stream(asked.events) == []
                        return asked
        raise AssertionError("the stream ended without a terminal event")

    async def ask(self, text: str, **options: object) -> Asked:
        return await self.read(await self.start(text, **options))  # type: ignore[arg-type]

    async def cancel(self, key: RunKey) -> Run:
        return await self.runner.cancel(CALLER, key.run_id, "test", TRACE)

    async def wait_for(self, key: RunKey, found: Callable[[list[EngineEvent]], bool]) -> list[EngineEvent]:
        """Follow a run until its events so far satisfy ``found``."""
        events: list[EngineEvent] = []
        async with asyncio.timeout(TIMEOUT), aclosing(self.store.follow(key, 0)) as batches:
            async for frames in batches:
                for frame in frames:
                    events += RunResponse.FromString(frame.body).events
                if found(events):
                    return events
        raise AssertionError("the stream ended early")

    async def messages(self, conversation_id: str) -> list[Message]:
        page = await self.store.list_messages(CALLER.tenant, conversation_id, page_size=500, page_token="")
        return list(page.items)


async def until(found: Callable[[], bool]) -> None:
    """Wait until something is so that has no event to wait for."""
    async with asyncio.timeout(TIMEOUT):
        while not found():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


ANSWER: dict[str, object] = {"say": [{"text": "Hello, world", "chunk": 2}]}


def kinds(messages: Sequence[Message]) -> list[str]:
    names = {Role.ROLE_USER: "user", Role.ROLE_ASSISTANT: "assistant", Role.ROLE_TOOL: "tool"}
    return [names[message.role] for message in messages]


def texts(message: Message) -> str:
    return "".join(part.text for part in message.parts)


def results(messages: Sequence[Message]) -> dict[str, str]:
    """Text of each tool result by call id; fails when a call has several."""
    found: dict[str, str] = {}
    for message in messages:
        for part in message.parts:
            if part.WhichOneof("part") == "tool_result":
                assert part.tool_result.call_id not in found
                found[part.tool_result.call_id] = "".join(p.text for p in part.tool_result.parts)
    return found


def calls(messages: Sequence[Message]) -> list[str]:
    return [p.tool_call.id for m in messages for p in m.parts if p.WhichOneof("part") == "tool_call"]


def turn(step: int, *say: dict[str, object], **when: object) -> dict[str, object]:
    return {"when": {"step": step, **when}, "say": list(say)}


@tool(effect="read")
async def echo(text: str) -> str:
    """Say it back."""
    return f"<{text}>"


def scripted(*script: dict[str, object], name: str = "test", continues: bool = False) -> ScriptedModel:
    """Return a model that plays these turns; ``continues``: it can go on from a prefix."""
    traits = {"traits": {"continues": True}} if continues else {}
    return ScriptedModel.parse(json.dumps({"name": name, **traits, "turns": list(script)}))


@asynccontextmanager
async def at_work_with(store: RunStore, agents: Sequence[Agent], *script: dict[str, object]) -> AsyncIterator[Engine]:
    """Run an engine with these agents while the context lasts."""
    engine = Engine(store, agents, script)
    serve = asyncio.create_task(engine.runner.serve())
    try:
        yield engine
    finally:
        await engine.runner.drain(0)
        serve.cancel()
        await asyncio.wait({serve}, timeout=5)


Opener = Callable[..., Awaitable[Engine]]


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RunStore]:
    """An open store; every test of the engine runs on each."""
    store: RunStore = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "runs.db")
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def open_engine(store: RunStore) -> AsyncIterator[Opener]:
    """Give a function that opens an engine for an agent and the turns of its model, in place of the one before."""
    opened: list[tuple[Engine, asyncio.Task[None]]] = []

    async def close() -> None:
        while opened:
            engine, serve = opened.pop()
            await engine.runner.drain(0)
            serve.cancel()
            await asyncio.wait({serve}, timeout=5)

    async def opener(agent: Agent, *script: dict[str, object]) -> Engine:
        await close()  # on one store, either would take the other's runs
        engine = Engine(store, [agent], script)
        opened.append((engine, asyncio.create_task(engine.runner.serve())))
        return engine

    yield opener
    await close()
