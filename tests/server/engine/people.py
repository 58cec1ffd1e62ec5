"""People who answer runs: decisions, the segments that follow from them, and tools that remember what they did."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from dualclaw import (
    Decision,
    DecisionAction,
    HistoryEdit,
    InterruptItem,
    ResumeRequest,
    RunResponse,
    RunState,
    StopReason,
)
from dualclaw.rules import check_stream
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.checkpoint import Checkpoint
from dualclaw_server.engine.store import Created, Loaded, RunKey, RunStore
from dualclaw_server.engine.tool import Effect, Tool, ToolContext
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy
from dualclaw_server.stores.memory import MemoryStore

from .conftest import CALLER, TIMEOUT, Asked, Engine, turn, until

USER = Caller("tenant", "subject", frozenset({"user"}))
ANNA = Caller("tenant", "anna", frozenset({"user"}))
RESUMED = TraceParent("b" * 32)
DONE = turn(1, {"text": "All done."})


class Ledger:
    """What tools did: their name and arguments, in order. ``hanging`` tools never end."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, object]]] = []
        self.hanging = False

    def tool(self, name: str = "pay", *, effect: Effect = "once") -> Tool:
        """Return a tool ``name(to, amount)``."""

        async def work(to: str, context: ToolContext, amount: int = 1) -> str:
            self.entries.append((name, {"to": to, "amount": amount}))
            if self.hanging:
                await asyncio.Event().wait()
            return f"{name} {amount} to {to}"

        properties = {"to": {"type": "string"}, "amount": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": ["to"], "additionalProperties": False}
        return Tool(name, "Do it.", schema, work, effect=effect, context_parameter="context")

    @property
    def to(self) -> list[object]:
        """Whom it was done to."""
        return [args["to"] for _, args in self.entries]

    async def begun(self, *to: object) -> None:
        """Wait until calls for all of these are at work; that their start is in the log comes before that."""
        await until(lambda: set(to) <= set(self.to))


class SlowInbox(MemoryStore):
    """A store whose next look into the inbox of a run at work takes for ever, or until it is ``released``."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = False
        self.waiting, self.released = asyncio.Event(), asyncio.Event()

    async def load(self, key: RunKey) -> Loaded:
        loaded = await super().load(key)
        if self.waits and loaded.head.state == RunState.RUN_STATE_RUNNING:
            self.waits = False
            self.waiting.set()
            await self.released.wait()
        return loaded


def pay(call_id: str, to: str = "", **args: object) -> dict[str, object]:
    return {"call": "pay", "id": call_id, "args": {"to": to or call_id, **args}}


def asks(*policies: Policy, **options: bool) -> HitlInterceptor:
    return HitlInterceptor(policies or [Policy("pay")], **options)  # type: ignore[arg-type]


def decide(interrupt_id: str, action: str = "approve", **fields: object) -> Decision:
    number = DecisionAction.Value(f"DECISION_ACTION_{action.upper()}")
    return Decision(interrupt_id=interrupt_id, action=number, **fields)  # type: ignore[arg-type]


def open_items(asked: Asked) -> list[InterruptItem]:
    """What the last segment asks; fails when it asks nothing."""
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_INTERRUPTED, asked.last
    return list(asked.events[-2].interrupt.items)


def ids(asked: Asked) -> list[str]:
    return [item.id for item in open_items(asked)]


def refused(asked: Asked) -> list[tuple[str, str]]:
    """Name and diagnosis code of every step that ended in failure."""
    return [(name, code) for _, name, phase, code in asked.steps if phase == "fail"]


async def resume(
    engine: Engine,
    key: RunKey,
    *decisions: Decision,
    edits: Sequence[HistoryEdit] = (),
    request_id: str = "",
    caller: Caller = CALLER,
) -> Created:
    request = ResumeRequest(run_id=key.run_id, decisions=decisions, history_edits=edits, request_id=request_id)
    return await engine.runner.resume(caller, request, RESUMED)


async def answer(engine: Engine, asked: Asked, *decisions: Decision, **options: object) -> Asked:
    """Answer and read on, to the end of the segment of these answers."""
    return await segment_of(engine, await resume(engine, asked.key, *decisions, **options))  # type: ignore[arg-type]


async def segment_of(engine: Engine, created: Created) -> Asked:
    """Read a run from its beginning to the end of the segment that begins at ``created.first_seq``."""
    key = created.head.key
    asked = Asked(key, created.head.conversation_id)
    async with asyncio.timeout(TIMEOUT), aclosing(engine.store.follow(key, 0)) as batches:
        async for frames in batches:
            for frame in frames:
                asked.events += RunResponse.FromString(frame.body).events
                if frame.ends_segment and frame.last_seq >= created.first_seq:
                    await check(engine.store, asked)
                    return asked
    raise AssertionError("the stream ended without a terminal event")


async def next_segment(engine: Engine, asked: Asked) -> Asked:
    """Read on to the end of the segment that follows without anybody's answer."""
    head = await engine.store.head(asked.key)
    return await segment_of(engine, Created(head, len(asked.events) + 1, existing=False))


async def check(store: RunStore, asked: Asked) -> None:
    """Hold a stream against its rules, and what a client gets who attaches anywhere against it."""
    assert check_stream(asked.events) == []
    for after in range(0, len(asked.events), 1 + len(asked.events) // 12):
        frames = await store.read(asked.key, after, limit=1 << 30)
        later = [event for frame in frames for event in RunResponse.FromString(frame.body).events]
        assert later[: len(asked.events) - after] == asked.events[after:]


async def checkpoint_of(store: RunStore, key: RunKey) -> Checkpoint:
    return Checkpoint.FromString((await store.load(key)).checkpoint)


@asynccontextmanager
async def at_work(
    store: RunStore, agents: Sequence[Agent] | Agent, *script: dict[str, object]
) -> AsyncIterator[Engine]:
    """An engine on a store; at the end what it works on is handed over, as a killed process leaves it."""
    engine = Engine(store, [agents] if isinstance(agents, Agent) else agents, list(script))
    serve = asyncio.create_task(engine.runner.serve())
    try:
        yield engine
    finally:
        await engine.runner.drain(0)
        await asyncio.wait({serve}, timeout=5)
