"""A parked run goes on whoever answers, wherever the process died, and whatever has changed meanwhile."""

import asyncio
import time

import pytest

from dualclaw import RunState, StopReason
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import Effect, tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.tools.feedback import feedback_tool

from .conftest import ANSWER, TIMEOUT, Asked, Engine, Opener, echo, results, turn, until
from .people import (
    DONE,
    Ledger,
    answer,
    asks,
    at_work,
    checkpoint_of,
    decide,
    ids,
    next_segment,
    open_items,
    pay,
    refused,
    resume,
    segment_of,
)

FINISHED = StopReason.STOP_REASON_FINISHED


def gated(ledger: Ledger, *policies: Policy, effect: Effect = "once") -> Agent:
    return Agent("a", tools=[ledger.tool(effect=effect)], interceptors=[asks(*policies)])


async def park(store: RunStore, agent: Agent, *script: dict[str, object], text: str = "go") -> Asked:
    """Have a process run until it asks, then let it die."""
    async with at_work(store, agent, *script) as engine:
        return await engine.ask(text)


# Crashes


async def test_a_parked_run_outlives_its_process(store: RunStore) -> None:
    """Another process takes the answer and finishes, and nothing the first one did is done again."""
    ledger = Ledger()
    script = (
        turn(0, {"text": "Look."}, {"call": "echo", "args": {"text": "x"}}),
        turn(1, pay("p1")),
        turn(2, {"text": "ok"}),
    )
    agent = Agent("a", tools=[echo, ledger.tool()], interceptors=[asks()])
    asked = await park(store, agent, *script)
    assert ids(asked) == ["p1"]
    async with at_work(store, agent, *script) as engine:
        ended = await answer(engine, asked, decide("p1"))
    assert ledger.to == ["p1"]
    assert [name for _, name, phase, _ in ended.steps if phase == "ok"] == ["echo", "pay"]


async def test_an_answer_given_while_nobody_works_waits(store: RunStore) -> None:
    """A crash between answer and claim loses nothing: the answers are in the inbox, all of them."""
    ledger = Ledger()
    script = turn(0, pay("p1"), pay("p2"), pay("p3")), DONE
    asked = await park(store, gated(ledger), *script)
    idle = Engine(store, [gated(ledger)], list(script))
    first = await resume(idle, asked.key, decide("p1"), request_id="r1")
    second = await resume(idle, asked.key, decide("p2", "reject"), decide("p3", "skip"))
    assert first.first_seq == second.first_seq == len(asked.events) + 1
    with pytest.raises(EngineError, match="has its answer already"):
        await resume(idle, asked.key, decide("p3"))
    async with at_work(store, gated(ledger), *script) as engine:
        ended = await segment_of(engine, first)
        again = await segment_of(engine, await resume(engine, asked.key, decide("p1"), request_id="r1"))
    assert again.events == ended.events
    assert ledger.to == ["p1"]
    assert refused(ended) == [("pay", "tool.rejected"), ("pay", "tool.skipped")]


class Gate(Interceptor):
    """Lets nobody past the start of a segment while it is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()
        self.shut = True

    async def on_agent_start(self, trace: Trace) -> None:
        self.reached.set()
        if self.shut and trace.segment > 1:
            await asyncio.Event().wait()


async def test_a_crash_between_claim_and_save_asks_nothing_again(store: RunStore) -> None:
    """The answers were read and not saved yet; the next process reads them again and goes on in the same segment."""
    ledger, gate = Ledger(), Gate()
    agent = Agent("a", tools=[ledger.tool()], interceptors=[asks(), gate])
    script = turn(0, pay("p1"), pay("p2")), DONE
    asked = await park(store, agent, *script)
    gate.reached.clear()
    async with at_work(store, agent, *script) as engine:
        created = await resume(
            engine, asked.key, decide("p1"), decide("p2", "edit", args_json='{"to": "p2", "amount": 7}')
        )
        await asyncio.wait_for(gate.reached.wait(), TIMEOUT)
    assert (await store.head(asked.key)).state == RunState.RUN_STATE_RUNNING
    assert ledger.entries == []
    gate.shut = False
    async with at_work(store, agent, *script) as engine:
        ended = await segment_of(engine, created)
    paid = sorted(ledger.entries, key=str)
    assert paid == [("pay", {"to": "p1", "amount": 1}), ("pay", {"to": "p2", "amount": 7})]
    assert ended.last.done.stop_reason == FINISHED
    assert not (await store.load(asked.key)).unread


@pytest.mark.parametrize("effect", ["once", "read"])
async def test_a_crash_in_the_middle_of_an_approved_call(store: RunStore, effect: Effect) -> None:
    """Its effect class decides: once stays unknown, read runs again; nobody is asked anew."""
    ledger = Ledger()
    ledger.hanging = True
    script = turn(0, pay("p1")), DONE
    asked = await park(store, gated(ledger, effect=effect), *script)
    async with at_work(store, gated(ledger, effect=effect), *script) as engine:
        created = await resume(engine, asked.key, decide("p1"))
        await ledger.begun("p1")
    ledger.hanging = False
    async with at_work(store, gated(ledger, effect=effect), *script) as engine:
        ended = await segment_of(engine, created)
    assert ended.last.done.stop_reason == FINISHED
    assert (ledger.to, refused(ended)) == (
        (["p1"], [("pay", "tool.outcome_unknown")]) if effect == "once" else (["p1", "p1"], [])
    )


async def test_the_same_call_after_an_unknown_outcome_needs_a_person(store: RunStore) -> None:
    """Without any policy the engine itself asks before it repeats what may have happened."""
    ledger = Ledger()
    ledger.hanging = True
    agent = Agent("a", tools=[ledger.tool()])
    script = turn(0, pay("p1", "x")), turn(1, pay("p2", "x"), pay("p3", "y")), turn(2, {"text": "ok"})
    async with at_work(store, agent, *script) as engine:
        created = await engine.start("go")
        await ledger.begun("x")
    ledger.hanging = False
    async with at_work(store, agent, *script) as engine:
        asked = await segment_of(engine, created)
        assert ids(asked) == ["p2"]
        ended = await answer(engine, asked, decide("p2", "reject"))
    assert ledger.to == ["x", "y"]
    assert refused(ended) == [("pay", "tool.outcome_unknown"), ("pay", "tool.rejected")]


async def test_a_tool_that_asks_keeps_what_its_siblings_did(store: RunStore) -> None:
    """A question in the middle of a batch parks once the others are through; with the answer nothing runs twice."""
    ledger = Ledger()

    @tool(effect="read")
    async def broken() -> str:
        raise LookupError("gone")

    agent = Agent("a", tools=[ledger.tool(), feedback_tool(), broken])
    script = turn(0, pay("p1"), {"call": "ask_user", "id": "q", "args": {"question": "?"}},
                  {"call": "broken", "id": "b"}, pay("p2")), DONE  # fmt: skip
    asked = await park(store, agent, *script)
    assert ids(asked) == ["q"]
    assert sorted(map(str, ledger.to)) == ["p1", "p2"]
    async with at_work(store, agent, *script) as engine:
        ended = await answer(engine, asked, decide("q", "respond", response_json='"yes"'))
        messages = await engine.messages(asked.conversation_id)
    assert sorted(map(str, ledger.to)) == ["p1", "p2"]
    assert refused(ended) == [("broken", "tool.failed")]
    assert list(results(messages)) == ["p1", "q", "b", "p2"]


async def test_a_crash_beside_an_open_question_settles_what_was_begun(store: RunStore) -> None:
    """A sibling of a call that has asked was at work when the process died: it is settled before the run parks."""
    ledger = Ledger()
    ledger.hanging = True
    agent = Agent("a", tools=[ledger.tool(), feedback_tool()])
    script = turn(0, pay("p1"), {"call": "ask_user", "id": "q", "args": {"question": "?"}}, pay("p2")), DONE
    async with at_work(store, agent, *script) as engine:
        created = await engine.start("go")
        await engine.wait_for(created.head.key, lambda events: any(event.step.step.diagnosis.code for event in events))
        await ledger.begun("p1", "p2")
    ledger.hanging = False
    async with at_work(store, agent, *script) as engine:
        asked = await segment_of(engine, created)
        assert ids(asked) == ["q"]
        assert refused(asked) == [("pay", "tool.outcome_unknown")] * 2
        ended = await answer(engine, asked, decide("q", "skip"))
    assert ended.last.done.stop_reason == FINISHED
    assert sorted(map(str, ledger.to)) == ["p1", "p2"]


# Time


async def test_a_question_nobody_answers_expires(open_engine: Opener) -> None:
    """It counts as rejected, in a segment that nobody asked for, with a trace of its own; a late answer learns it."""
    ledger = Ledger()
    policy = Policy("pay", expires_in=0.3)
    engine = await open_engine(gated(ledger, policy), turn(0, pay("p1")), DONE)
    asked = await engine.ask("go")
    expiry = open_items(asked)[0].expire_time.ToMicroseconds() / 1e6
    ended = await next_segment(engine, asked)
    assert time.time() >= expiry
    assert ledger.entries == []
    assert refused(ended) == [("pay", "tool.rejected")]
    assert ended.last.done.process_steps[0].diagnosis.detail == "Nobody answered in time."
    assert ended.last.trace_id != asked.last.trace_id
    assert (await checkpoint_of(engine.store, asked.key)).questions[0].decision.approver == "expired"
    with pytest.raises(EngineError) as late:
        await resume(engine, asked.key, decide("p1"))
    assert late.value.reason == "ALREADY_ANSWERED"


async def test_a_question_that_expired_while_no_process_ran(store: RunStore) -> None:
    """The timer is in the store; the next process finds it due at once. What cannot be rejected is skipped."""
    ledger = Ledger()
    agent = gated(ledger, Policy("pay", expires_in=0.05, allowed=("approve", "skip")))
    script = turn(0, pay("p1")), DONE
    asked = await park(store, agent, *script)
    await asyncio.sleep(0.1)
    async with at_work(store, agent, *script) as engine:
        ended = await next_segment(engine, asked)
    assert refused(ended) == [("pay", "tool.skipped")]
    assert ended.last.done.process_steps[0].diagnosis.detail == "Nobody answered in time."


async def test_a_timer_that_comes_early_is_set_again() -> None:
    """The store's clock is ahead of the engine's: the question expires when its time has come, not never."""
    ledger, store = Ledger(), MemoryStore(clock=lambda: time.time() + 0.4)
    await store.open()
    async with at_work(store, gated(ledger, Policy("pay", expires_in=0.6)), turn(0, pay("p1")), DONE) as engine:
        asked = await engine.ask("go")
        ended = await next_segment(engine, asked)
    assert refused(ended) == [("pay", "tool.rejected")]
    assert (await store.head(asked.key)).last_seq == len(ended.events)
    await store.close()


async def test_the_others_are_asked_on_when_one_expires(open_engine: Opener) -> None:
    """An expiry gives a segment that asks the rest; answering the expired one is refused, answering the rest is not."""
    ledger = Ledger()

    def first_only(call: object, _: Trace) -> bool | None:
        return True if getattr(call, "id", "") == "p1" else None

    engine = await open_engine(
        gated(ledger, Policy("pay", ask=first_only, expires_in=0.3, reject_ends_run=False), Policy("pay")),
        turn(0, pay("p1"), pay("p2")),
        DONE,
    )
    asked = await engine.ask("go")
    assert ids(asked) == ["p1", "p2"]
    asked = await next_segment(engine, asked)
    assert ids(asked) == ["p2"]
    with pytest.raises(EngineError) as late:
        await resume(engine, asked.key, decide("p1"), decide("p2"))
    assert (late.value.reason, late.value.metadata) == ("ALREADY_ANSWERED", {"interrupt_id": "p1"})
    ended = await answer(engine, asked, decide("p2"))
    assert ledger.to == ["p2"]
    assert refused(ended) == [("pay", "tool.rejected")]


async def test_an_answer_in_time_beats_the_timer(store: RunStore) -> None:
    """An answer that was taken before anybody worked on the run holds, though its time is over by then."""
    ledger = Ledger()
    agent = gated(ledger, Policy("pay", expires_in=3))
    script = turn(0, pay("p1")), DONE
    asked = await park(store, agent, *script)
    expiry = open_items(asked)[0].expire_time.ToMicroseconds() / 1e6
    created = await resume(Engine(store, [agent], list(script)), asked.key, decide("p1"))
    await until(lambda: time.time() > expiry)
    async with at_work(store, agent, *script) as engine:
        await segment_of(engine, created)
    assert ledger.to == ["p1"]


# Changes meanwhile


@pytest.mark.parametrize("after", ["no policy", "no interceptor", "another policy", "interceptor is off"])
@pytest.mark.parametrize("action", ["approve", "reject"])
async def test_a_decision_holds_whatever_the_policy_has_become(store: RunStore, after: str, action: str) -> None:
    """A rejection is obeyed though nobody would ask any more, an approval is not asked about a second time."""
    ledger = Ledger()
    script = turn(0, pay("p1")), DONE
    asked = await park(store, gated(ledger), *script)
    guards = {
        "no policy": [HitlInterceptor()],
        "no interceptor": [],
        "another policy": [asks(Policy("*", prompt="Sure?", reject_ends_run=True))],
        "interceptor is off": [HitlInterceptor([Policy("pay")], enabled=False)],
    }[after]
    async with at_work(store, Agent("a", tools=[ledger.tool()], interceptors=guards), *script) as engine:
        ended = await answer(engine, asked, decide("p1", action))
    assert ledger.to == (["p1"] if action == "approve" else [])
    assert ended.last.done.content == "All done."


async def test_an_approved_call_whose_tool_is_gone_is_an_observation(store: RunStore) -> None:
    """The model is told and the run does not crash; an edit may be given, though no schema is there to check it."""
    ledger = Ledger()
    script = turn(0, pay("p1"), pay("p2")), DONE
    asked = await park(store, gated(ledger), *script)
    async with at_work(store, Agent("a", tools=[echo]), *script) as engine:
        ended = await answer(engine, asked, decide("p1"), decide("p2", "edit", args_json='{"x": 1}'))
    assert refused(ended) == [("pay", "tool.unknown"), ("pay", "tool.unknown")]
    assert ended.last.done.content == "All done."


async def test_an_approved_call_that_fits_its_tool_no_more_is_an_observation(store: RunStore) -> None:
    """A new schema is held against the arguments before anything runs, and against an edit where it is given."""
    ledger = Ledger()
    script = turn(0, pay("p1"), pay("p2")), DONE
    asked = await park(store, gated(ledger), *script)
    ran: list[int] = []

    @tool(name="pay", effect="once")
    async def new_pay(count: int) -> str:
        ran.append(count)
        return "ok"

    async with at_work(store, Agent("a", tools=[new_pay], interceptors=[asks()]), *script) as engine:
        with pytest.raises(FieldError, match="count"):
            await resume(engine, asked.key, decide("p1", "edit", args_json='{"to": "x"}'))
        ended = await answer(engine, asked, decide("p1"), decide("p2", "edit", args_json='{"count": 3}'))
    assert refused(ended) == [("pay", "tool.bad_arguments")]
    assert ran == [3]


async def test_a_process_without_the_agent_leaves_the_run_alone(
    store: RunStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is taken and waits for a process that has the agent."""
    ledger = Ledger()
    script = turn(0, pay("p1")), DONE
    asked = await park(store, gated(ledger), *script)
    async with at_work(store, Agent("b"), ANSWER) as engine:
        created = await resume(engine, asked.key, decide("p1"))
        await until(lambda: "agent a is not here" in caplog.text)
        assert (await store.head(asked.key)).state == RunState.RUN_STATE_INTERRUPTED
    await store.wake(asked.key, 0)
    async with at_work(store, gated(ledger), *script) as engine:
        await segment_of(engine, created)
    assert ledger.to == ["p1"]
