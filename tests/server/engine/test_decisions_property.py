"""Whatever people decide, in whatever order, however often the process dies: nothing runs that nobody allowed."""

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualclaw import Decision, DecisionAction, InterruptItem, InterruptKind, StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.store import RunStore
from dualclaw_server.interceptors.hitl import Policy
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.stores.sqlite import SqliteStore
from dualclaw_server.tools.feedback import feedback_tool

from .conftest import Asked, calls, results, turn
from .people import Ledger, asks, at_work, decide, open_items, pay, resume, segment_of

SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
KINDS = ("free", "gated", "question", "below")


@dataclass(frozen=True)
class Plan:
    """A batch of calls, by kind, and whether a rejection ends the run."""

    kinds: tuple[str, ...]
    reject_ends_run: bool

    def agent(self, ledger: Ledger) -> Agent:
        guard = asks(Policy("pay", reject_ends_run=self.reject_ends_run))
        tools = [ledger.tool(), ledger.tool("free")]
        helper = Agent("helper", tools=tools, interceptors=[guard])
        return Agent("a", tools=[*tools, feedback_tool()], sub_agents=[helper], interceptors=[guard])

    @property
    def script(self) -> list[dict[str, object]]:
        made = {
            "free": lambda n: {"call": "free", "id": f"c{n}", "args": {"to": f"c{n}"}},
            "gated": lambda n: pay(f"c{n}"),
            "question": lambda n: {"call": "ask_user", "id": f"c{n}", "args": {"question": "?"}},
            "below": lambda n: {"call": "helper", "id": f"c{n}", "args": {"request": f"in {n}"}},
        }
        batch = [made[kind](number) for number, kind in enumerate(self.kinds)]
        below = [turn(0, pay(f"in{n}"), user=f"^in {n}$") for n, kind in enumerate(self.kinds) if kind == "below"]
        return [*below, turn(0, *batch, user="go"), {"when": {}, "say": [{"text": "done"}]}]

    def may_run(self, decisions: dict[str, str]) -> set[str]:
        """Whom something may be done to."""
        free = {f"c{number}" for number, kind in enumerate(self.kinds) if kind == "free"}
        return free | {name for name, action in decisions.items() if action == "approve"}


PLANS = st.builds(Plan, st.lists(st.sampled_from(KINDS), min_size=1, max_size=4).map(tuple), st.booleans())
ACTIONS = ["approve", "approve", "reject", "skip", "respond"]


@dataclass(frozen=True)
class People:
    """Who answers what, in which order, and when the process dies meanwhile."""

    actions: tuple[str, ...]
    """Of the questions, in the order of their ids."""
    rounds: tuple[tuple[int, bool, int | None], ...]
    """How many are answered at once, from which end, and after how many turns of the loop the process dies."""


PEOPLE = st.builds(
    People,
    st.lists(st.sampled_from(ACTIONS), min_size=8, max_size=8).map(tuple),
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.none() | st.integers(0, 40)), min_size=16, max_size=16).map(
        tuple
    ),
)


def decision_on(item: InterruptItem, action: str) -> Decision:
    if item.kind == InterruptKind.INTERRUPT_KIND_QUESTION:
        action = "respond"
    return decide(item.id, action, **({"response_json": '"x"'} if action == "respond" else {}))


async def live_through(store: RunStore, plan: Plan, people: People) -> None:
    ledger, decisions = Ledger(), dict[str, str]()
    agent, script = plan.agent(ledger), plan.script
    async with at_work(store, agent, *script) as engine:
        asked: Asked = await segment_of(engine, await engine.start("go"))
    for count, from_the_end, dies_after in people.rounds:
        if asked.last.done.stop_reason != StopReason.STOP_REASON_INTERRUPTED:
            break
        items = sorted(open_items(asked), key=lambda item: item.id, reverse=from_the_end)[:count]
        given_now = [decision_on(item, people.actions[int(item.id[-1])]) for item in items]
        for decision in given_now:
            approves = decision.action == DecisionAction.DECISION_ACTION_APPROVE
            decisions[decision.interrupt_id] = "approve" if approves else "no"
        async with at_work(store, agent, *script) as engine:
            created = await resume(engine, asked.key, *given_now)
            if dies_after is None:
                await segment_of(engine, created)
            for _ in range(dies_after or 0):
                await asyncio.sleep(0)
        async with at_work(store, agent, *script) as engine:
            asked = await segment_of(engine, created)
    messages = await engine.messages(asked.conversation_id)
    counts = Counter(map(str, ledger.to))
    allowed = plan.may_run(decisions)
    assert set(counts) <= allowed
    assert all(count == 1 for count in counts.values())
    steps = asked.last.done.process_steps  # fails for a run that has not ended
    assert asked.last.done.stop_reason != StopReason.STOP_REASON_INTERRUPTED
    unknown = {step.call_id for step in steps if step.diagnosis.code == "tool.outcome_unknown"}
    if asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED:
        assert allowed - set(counts) <= unknown
    assert sorted(results(messages)) == sorted(calls(messages))


@settings(SPEED, max_examples=60)
@given(PLANS, PEOPLE)
def test_only_what_was_allowed_runs_and_it_runs_once(plan: Plan, people: People) -> None:
    """Approved calls run once, others never; the run ends, every call has a result, and streams keep their rules."""

    async def scenario() -> None:
        store = MemoryStore()
        await store.open()
        try:
            await live_through(store, plan, people)
        finally:
            await store.close()

    asyncio.run(scenario())


@settings(SPEED, max_examples=10)
@given(PLANS, PEOPLE)
def test_the_same_holds_for_a_store_on_disk(plan: Plan, people: People) -> None:
    """As above, with a file that each process opens anew."""

    async def scenario(path: Path) -> None:
        store = SqliteStore(path)
        await store.open()
        try:
            await live_through(store, plan, people)
        finally:
            await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder) / "runs.db"))
