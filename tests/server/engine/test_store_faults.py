"""The store fails, or the process dies, at any append of a run: nothing is lost, nothing done twice, nothing leaks."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta

import pytest

from dualclaw import Decision, InterruptKind, ResumeRequest, RunResponse, RunState, StopReason
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.handoff import exit_tool
from dualclaw_server.engine.interceptor import Interceptor, Observation
from dualclaw_server.engine.outcome import Ask, Suspend
from dualclaw_server.engine.runner import Runner
from dualclaw_server.engine.store import (
    FINAL,
    Ambiguous,
    Fenced,
    Frame,
    Full,
    Head,
    RunKey,
    StoreError,
    Unavailable,
)
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.hitl import Policy
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.tools.feedback import feedback_tool

from .conftest import CALLER, TRACE, Asked, Engine, calls, results, turn
from .people import DONE, Ledger, answer, asks, check, decide, pay

LOST: dict[str, type[StoreError]] = {"full": Full, "fenced": Fenced}
"""Faults of an append that is not stored."""
FAULTS = [*LOST, "ambiguous", "death before", "death after"]


class FaultyStore(MemoryStore):
    """A store whose append number ``at`` goes wrong; after a death it answers nobody until it is ``revived``."""

    def __init__(self, fault: str = "", at: int = 0) -> None:
        super().__init__()
        self._fault, self._at = fault, at
        self._appends = 0
        self.died = asyncio.Event()
        self.timers_fail = False

    @property
    def struck(self) -> bool:
        """True once the fault has happened."""
        return self._appends >= self._at > 0

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        if self.died.is_set():
            return _failed(Unavailable("the process is dead"))
        self._appends += 1
        if self._appends != self._at:
            return super().append(key, frame, expect)
        if self._fault in LOST:
            return _failed(LOST[self._fault]("planned"))
        if self._fault.startswith("death"):
            self.died.set()
        if not self._fault.endswith("before"):
            super().append(key, frame, expect)
        return _failed(Ambiguous("planned"))

    async def wake(self, key: RunKey, at: float) -> None:
        if self.timers_fail:
            self.timers_fail = False
            raise Unavailable("planned")
        await super().wake(key, at)

    async def revive(self) -> None:
        """What the dead process held can be claimed by the next one."""
        await self.close()
        await self.open()
        self.died = asyncio.Event()


def _failed(error: StoreError) -> Awaitable[int]:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


@asynccontextmanager
async def runner_on(
    store: FaultyStore, agents: Sequence[Agent], script: Sequence[dict[str, object]]
) -> AsyncIterator[Engine]:
    """A runner that tries again at once; what it lets go has its one place free for the next attempt."""
    engine = Engine(store, agents, script)
    engine.runner = Runner(store, agents, model=engine.model, capacity=1, retry=0.01)
    serve = asyncio.create_task(engine.runner.serve())
    try:
        yield engine
    finally:
        await engine.runner.drain(0 if store.died.is_set() else 5)  # what is at rest has its work item taken away
        await asyncio.wait({serve}, timeout=5)


def team(ledger: Ledger) -> list[Agent]:
    """Agents with everything that parks, transfers and ends a run."""
    guard = asks(Policy("pay"))
    tools = [ledger.tool(), ledger.tool("free")]
    helper = Agent("helper", tools=tools, interceptors=[guard], output_key="help")
    first = Agent("first", tools=[*tools, feedback_tool()], sub_agents=[helper], transfer_to=["second"])
    return [
        Agent("first", tools=first.tools, sub_agents=first.sub_agents, transfer_to=["second"], interceptors=[guard]),
        Agent("second", tools=[ledger.tool(), exit_tool], interceptors=[guard]),
    ]


SCRIPT = [
    turn(0, pay("c3"), {"call": "free", "id": "c4", "args": {"to": "c4"}}, user="^help$"),
    turn(
        0,
        {"text": "One moment."},
        {"call": "free", "id": "c0", "args": {"to": "c0"}},
        pay("c1"),
        {"call": "ask_user", "id": "q", "args": {"question": "?"}},
        {"call": "helper", "id": "h", "args": {"request": "help"}},
        user="go",
    ),
    turn(1, {"text": "helped"}, user="^help$"),
    turn(1, {"call": "transfer_to_agent", "id": "t", "args": {"agent": "second"}}, user="go"),
    turn(2, pay("c5")),
    turn(3, {"call": "exit", "id": "e", "args": {"answer": "Bye."}}),
]
PAID = {"c0", "c1", "c3", "c4", "c5"}


async def live(store: FaultyStore, engine: Engine, key: RunKey) -> bool:
    """Answer whatever is asked until the run is final (True) or the process is dead (False)."""
    while not store.died.is_set():
        head = await store.head(key)
        if head.state in FINAL:
            return True
        if head.state == RunState.RUN_STATE_INTERRUPTED:
            await give_answers(engine, head)
        await asyncio.sleep(0)
    return False


async def give_answers(engine: Engine, head: Head) -> None:
    decisions = list[Decision]()
    for item in head.run.interrupts:
        question = item.kind == InterruptKind.INTERRUPT_KIND_QUESTION
        decisions.append(decide(item.id, "respond", response_json='"x"') if question else decide(item.id))
    with suppress(EngineError):  # answered already, and not taken up yet
        await engine.runner.resume(CALLER, ResumeRequest(run_id=head.key.run_id, decisions=decisions), TRACE)


async def read_whole(store: FaultyStore, key: RunKey) -> Asked:
    asked = Asked(key, (await store.head(key)).conversation_id)
    for frame in await store.read(key, 0, limit=1 << 30):
        asked.events += RunResponse.FromString(frame.body).events
    await check(store, asked)
    return asked


async def run_with(fault: str, at: int) -> bool:
    """Live through one run; returns whether the fault has happened."""
    store, ledger = FaultyStore(fault, at), Ledger()
    await store.open()
    agents = team(ledger)
    async with asyncio.timeout(20):
        async with runner_on(store, agents, SCRIPT) as engine:
            key = (await engine.start("go")).head.key
            ended = await live(store, engine, key)
        if not ended:
            await store.revive()
            async with runner_on(store, agents, SCRIPT) as engine:
                assert await live(store, engine, key)
    asked = await read_whole(store, key)
    done = asked.last.done
    assert done.stop_reason == StopReason.STOP_REASON_EXITED, (fault, at, asked.last)
    assert done.content.endswith("Bye."), (fault, at)
    unknown = {step.call_id for step in done.process_steps if step.diagnosis.code == "tool.outcome_unknown"}
    counts = Counter(map(str, ledger.to))
    assert all(count == 1 for count in counts.values()), (fault, at, counts)
    assert PAID - counts.keys() <= unknown, (fault, at, counts)
    messages = await engine.messages(asked.conversation_id)
    assert sorted(results(messages)) == sorted(calls(messages)), (fault, at)
    await store.close()
    return store.struck


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_run_survives_a_fault_at_any_append(fault: str) -> None:
    """It comes to the same end, every call runs once or is told to be in doubt, nothing keeps its place."""
    at = 1
    while await run_with(fault, at):
        at += 1
    assert at > 20


class EndHook(Interceptor):
    """Does something after a call, once."""

    def __init__(self, store: FaultyStore) -> None:
        super().__init__()
        self._store = store

    async def on_action_end(self, trace: Trace, calls: Sequence[Call]) -> None:
        if trace.model_calls == 1 and not trace.recovered:
            self._store.died.set()


async def test_what_a_call_has_done_is_saved_before_hooks_run() -> None:
    """A process that dies in a hook after the batch leaves no doubt about a call that had ended."""
    store, ledger = FaultyStore(), Ledger()
    await store.open()
    agents = [Agent("a", tools=[ledger.tool()], interceptors=[EndHook(store)])]
    script = [turn(0, pay("p1")), DONE]
    async with runner_on(store, agents, script) as engine:
        started = await engine.start("go")
        await asyncio.wait_for(store.died.wait(), 10)
    await store.revive()
    async with runner_on(store, agents, script) as engine:
        asked = await engine.read(started)
    assert ledger.to == ["p1"]
    assert [(phase, code) for _, _, phase, code in asked.steps] == [("start", ""), ("ok", "")]
    await store.close()


class AsksAfterwards(Interceptor):
    """Asks about what came of a call, for a while."""

    async def on_tool_call_end(
        self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
    ) -> Suspend | None:
        if call.id != "p2" or not observation.parts or call.decision is not None:
            return None
        return Suspend(Ask("Tell it?", expire_time=datetime.now(UTC) + timedelta(hours=1)))


async def test_a_park_that_fails_costs_no_result() -> None:
    """A timer that cannot be set leaves the results of the batch as they are: it parks on the next attempt."""
    store, ledger = FaultyStore(), Ledger()
    await store.open()
    agents = [Agent("a", tools=[ledger.tool()], interceptors=[AsksAfterwards()])]
    store.timers_fail = True
    async with runner_on(store, agents, [turn(0, pay("p1"), pay("p2")), DONE]) as engine:
        parked = await engine.read(await engine.start("go"))
        assert not store.timers_fail
        assert [item.id for item in parked.events[-2].interrupt.items] == ["p2"]
        asked = await answer(engine, parked, decide("p2"))
    assert sorted(map(str, ledger.to)) == ["p1", "p2"]
    assert {code for _, _, phase, code in asked.steps if phase != "start"} == {""}
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED
    await store.close()
