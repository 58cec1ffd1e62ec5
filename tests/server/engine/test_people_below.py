"""Questions from wherever they can come: sub-agents, several at once, and every hook that can suspend."""

import asyncio

import pytest

from dualclaw import Message, RunState, StopReason
from dualclaw.errors import FieldError
from dualclaw_server.engine.agent import Agent, agent_tool
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, Observation, Prompt, ToolNext, ToolRequest
from dualclaw_server.engine.model import ModelOptions, ModelResponse
from dualclaw_server.engine.outcome import Ask, Outcome, Suspend
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.hitl import Policy
from dualclaw_server.tools.feedback import feedback_tool

from .conftest import TIMEOUT, Opener, calls, results, turn, until
from .people import (
    Ledger,
    SlowInbox,
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


def helper(call_id: str, request: str) -> dict[str, object]:
    return {"call": "helper", "id": call_id, "args": {"request": request}}


def pays(who: str) -> dict[str, object]:
    note = {"call": "note", "id": f"n {who}", "args": {"to": who}}
    return turn(0, {"text": "On it."}, note, pay(f"p {who}", who), user=f"^pay {who}")


PAYS = pays("anna"), pays("bert"), turn(1, {"text": "Paid: {{result:pay}}."}, user="^pay")


def team(ledger: Ledger, *policies: Policy) -> Agent:
    """A boss with a helper that may pay once somebody agrees, and takes notes freely."""
    below = Agent(
        "helper", tools=[ledger.tool("note"), ledger.tool("pay"), feedback_tool()], interceptors=[asks(*policies)]
    )
    return Agent("boss", tools=[ledger.tool("top")], sub_agents=[below])


async def test_a_sub_agent_asks_through_its_boss(open_engine: Opener) -> None:
    """The question names its path; its step stands under the boss's call; the answer reaches it, nothing runs twice."""
    ledger = Ledger()
    engine = await open_engine(
        team(ledger), *PAYS, turn(0, helper("h", "pay anna"), {"call": "top", "id": "t", "args": {"to": "top"}}),
        turn(1, {"text": "{{result:helper}}"}),
    )  # fmt: skip
    asked = await engine.ask("go")
    (item,) = open_items(asked)
    assert (item.id, list(item.path), item.tool_name) == ("p anna", ["boss", "helper", "pay"], "pay")
    assert ledger.to == ["top"]  # the helper's batch waits as a whole
    steps = {step.call_id: step for step in asked.last.done.process_steps}
    assert steps["p anna"].parent_call_id == "h"
    assert steps["p anna"].diagnosis.code == "approval.required"
    with pytest.raises(FieldError, match="'to' is a required property"):
        await resume(engine, asked.key, decide("p anna", "edit", args_json="{}"))
    ended = await answer(engine, asked, decide("p anna", "edit", args_json='{"to": "bert"}'))
    assert (ledger.to[0], sorted(map(str, ledger.to[1:]))) == ("top", ["anna", "bert"])
    assert ended.last.done.content.startswith("On it.\n\nPaid: pay 1 to bert")
    assert len(ended.last.done.process_steps) == 4
    messages = await engine.messages(asked.conversation_id)
    assert sorted(results(messages)) == sorted(calls(messages)) == ["h", "t"]


async def test_two_sub_agents_ask_at_once(open_engine: Opener) -> None:
    """Two calls of one helper ask side by side, in one interrupt; each gets its own answer, in any order."""
    ledger = Ledger()
    engine = await open_engine(
        team(ledger), *PAYS, turn(0, helper("h1", "pay anna"), helper("h2", "pay bert")),
        turn(1, {"text": "{{result}}"}),
    )  # fmt: skip
    asked = await engine.ask("go")
    assert sorted(ids(asked)) == ["p anna", "p bert"]
    asked = await answer(engine, asked, decide("p bert"))
    assert ids(asked) == ["p anna"]
    assert ledger.to == []
    ended = await answer(engine, asked, decide("p anna", "reject"))
    assert sorted(map(str, ledger.to)) == ["anna", "bert", "bert"]
    assert refused(ended) == [("pay", "tool.rejected")]


async def test_a_sub_agents_question_survives_its_process(store: RunStore) -> None:
    """Parked below, answered by another process, crashed in the middle and finished by a third; all done once."""
    ledger = Ledger()
    script = *PAYS, turn(0, helper("h", "pay anna")), turn(1, {"text": "{{result}}"})
    policy = Policy("note", ask=False)
    async with at_work(store, team(ledger, policy, Policy("pay")), *script) as engine:
        asked = await engine.ask("go")
    assert ids(asked) == ["p anna"]
    ledger.hanging = True
    async with at_work(store, team(ledger), *script) as engine:
        await resume(engine, asked.key, decide("p anna"))
        await until(lambda: len(ledger.to) == 2)
        await engine.wait_for(asked.key, lambda events: len(events) > len(asked.events))
    ledger.hanging = False
    async with at_work(store, team(ledger), *script) as engine:
        ended = await next_segment(engine, asked)
    assert ended.last.done.stop_reason == FINISHED
    assert sorted(map(str, ledger.to)) == ["anna", "anna"]
    assert sorted(refused(ended)) == [("note", "tool.outcome_unknown"), ("pay", "tool.outcome_unknown")]


async def test_a_model_below_asks_the_user(open_engine: Opener) -> None:
    """The next message answers a question of a sub-agent too; its answer goes to it and not to the boss."""
    ledger = Ledger()
    engine = await open_engine(
        team(ledger),
        turn(0, {"call": "ask_user", "id": "q", "args": {"question": "Colour?"}}, user="^paint"),
        {"when": {"user": "^paint", "step": 1}, "say": [{"text": "Painted {{result}}."}]},
        turn(0, helper("h", "paint it")),
        turn(1, {"text": "{{result}}"}),
    )  # fmt: skip
    asked = await engine.ask("go")
    assert list(open_items(asked)[0].path) == ["boss", "helper", "ask_user"]
    created = await engine.start("blue", conversation=asked.conversation_id)
    assert created.head.key == asked.key
    assert (await next_segment(engine, asked)).last.done.content == "Painted blue."


async def test_a_parked_team_can_be_cancelled(open_engine: Opener) -> None:
    """No step stays open on any level, and nothing that waited runs."""
    ledger = Ledger()
    engine = await open_engine(team(ledger), *PAYS, turn(0, helper("h", "pay anna")))
    asked = await engine.ask("go")
    await engine.cancel(asked.key)
    ended = await next_segment(engine, asked)
    assert ended.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert len(refused(ended)) == 2
    assert ledger.entries == []


async def test_each_run_of_a_sub_agent_asks_for_itself(open_engine: Opener) -> None:
    """Two calls of one helper whose interceptor asks about the run get two questions and two answers."""

    class Admits(Interceptor):
        async def on_agent_start(self, trace: Trace) -> Suspend | None:
            answered = trace.answer_to(self.name)
            if answered is None:
                return Suspend(Ask(f"{trace.user_text}?", kind="question"))
            trace.session.set(trace.user_text, answered.decision.response_json)
            return None

    below = Agent("helper", interceptors=[Admits()])
    engine = await open_engine(
        Agent("boss", tools=[agent_tool(below, name="first"), agent_tool(below, name="second")]),
        {"when": {"user": "one|two"}, "say": [{"text": "ok"}]},
        turn(0, {"call": "first", "id": "f", "args": {"request": "one"}},
             {"call": "second", "id": "s", "args": {"request": "two"}}),
        turn(1, {"text": "done"}),
    )  # fmt: skip
    asked = await engine.ask("go")
    items = {item.prompt: item.id for item in open_items(asked)}
    assert set(items) == {"one?", "two?"}
    assert len(set(items.values())) == 2
    asked = await answer(engine, asked, decide(items["two?"], "respond", response_json="2"))
    assert ids(asked) == [items["one?"]]
    ended = await answer(engine, asked, decide(items["one?"], "respond", response_json="1"))
    assert ended.last.done.content == "done"
    assert dict((await checkpoint_of(engine.store, asked.key)).session) == {"one": '"1"', "two": '"2"'}


async def test_a_crash_after_a_partial_answer_lets_nothing_run() -> None:
    """One of two questions is answered and the process dies on it: the next one takes it in and asks the other."""
    ledger, slow = Ledger(), SlowInbox()
    await slow.open()
    script = *PAYS, turn(0, helper("h1", "pay anna"), helper("h2", "pay bert")), turn(1, {"text": "done"})
    async with at_work(slow, team(ledger), *script) as engine:
        asked = await engine.ask("go")
        slow.waits = True
        created = await resume(engine, asked.key, decide("p bert"))
        await asyncio.wait_for(slow.waiting.wait(), TIMEOUT)
    assert (await slow.head(asked.key)).state == RunState.RUN_STATE_RUNNING
    async with at_work(slow, team(ledger), *script) as engine:
        asked = await segment_of(engine, created)
        assert ids(asked) == ["p anna"]
        assert ledger.entries == []
        await answer(engine, asked, decide("p anna", "skip"))
    assert [entry for entry in ledger.entries if entry[0] == "pay"] == [("pay", {"to": "bert", "amount": 1})]
    await slow.close()


class Suspends(Interceptor):
    """Asks once in the hook it is named for, and notes what it was told."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def _ask(self, trace: Trace, hook: str, call: Call | None = None) -> Suspend | None:
        if hook != self.hook or trace.answer_to(self.name, "k") or (call is not None and call.decision):
            return None
        return Suspend(Ask(f"{hook}?", key="k", call_id=call.id if call is not None else ""))

    async def on_agent_start(self, trace: Trace) -> Outcome | None:
        return self._ask(trace, "on_agent_start")

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        return self._ask(trace, "on_reason_start")

    async def on_prepare(self, trace: Trace, options: ModelOptions, prompt: Prompt) -> Outcome | None:
        return self._ask(trace, "on_prepare")

    async def on_reason_end(
        self, trace: Trace, response: ModelResponse, message: Message, duration: float
    ) -> Outcome | None:
        return self._ask(trace, "on_reason_end")

    async def on_action_start(self, trace: Trace, calls: list[Call]) -> Outcome | None:  # type: ignore[override]
        return self._ask(trace, "on_action_start")

    async def on_tool_call_start(self, trace: Trace, call: Call) -> Outcome | None:
        return self._ask(trace, "on_tool_call_start", call)

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        suspend = self._ask(request.trace, "intercept_tool", request.call)
        if suspend is not None:
            raise suspend
        return await call_next(request)


HOOKS = ["on_agent_start", "on_reason_start", "on_prepare", "on_reason_end", "on_action_start", "on_tool_call_start",
         "intercept_tool"]  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("below", [False, True])
async def test_every_hook_can_ask_and_be_answered(store: RunStore, hook: str, below: bool) -> None:
    """The run parks where the hook asks, another process goes on from there, and the tool runs once."""
    ledger = Ledger()
    worker = Agent("worker", tools=[ledger.tool()], interceptors=[Suspends(hook)])
    agent = Agent("boss", sub_agents=[worker]) if below else worker
    inner = [
        {"when": {"user": "^do", "step": 0}, "say": [{"text": "Now."}, pay("p")]},
        {"when": {"user": "^do", "step": 1}, "say": [{"text": "Finished."}]},
    ]
    outer = turn(0, {"call": "worker", "id": "w", "args": {"request": "do it"}}), turn(1, {"text": "{{result}}"})
    script = [*inner, *(outer if below else ())]
    question = "go" if below else "do it"
    async with at_work(store, agent, *script) as engine:
        asked = await engine.ask(question)
    (item,) = open_items(asked)
    assert item.prompt == f"{hook}?"
    assert ledger.entries == []
    async with at_work(store, agent, *script) as engine:
        ended = await answer(engine, asked, decide(item.id))
    assert ended.last.done.stop_reason == FINISHED
    assert ended.last.done.content.endswith("Finished.")
    assert ledger.to == ["p"]
