"""Tool calls that people approve, through a runner: what is asked, what each answer does, how answers add up."""

import asyncio
from dataclasses import replace

import pytest

from dualclaw import DecisionAction, InterruptKind, RunState, StopReason
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.adopt import MAX_ARGUMENTS
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, Observation, ToolNext, ToolRequest
from dualclaw_server.engine.outcome import Ask, Suspend
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.hitl import Opinion, Policy

from .conftest import Opener, calls, echo, results, turn
from .people import (
    ANNA,
    DONE,
    USER,
    Ledger,
    answer,
    asks,
    checkpoint_of,
    decide,
    ids,
    open_items,
    pay,
    refused,
    resume,
    segment_of,
)

REJECTED, FINISHED = StopReason.STOP_REASON_REJECTED, StopReason.STOP_REASON_FINISHED


async def test_a_batch_that_needs_approval_runs_no_tool(open_engine: Opener) -> None:
    """Three of four calls need a yes: one interrupt lists them by their call ids, and not even the fourth has run."""
    ledger = Ledger()
    policy = Policy("pay", prompt='Pay {{args.amount}} to {{args.to}}? {"a": {}} {{args.none}}{{other}}')
    engine = await open_engine(
        Agent("a", tools=[ledger.tool(), echo], interceptors=[asks(policy)]),
        turn(0, {"text": "Let me see."}, pay("p1"), {"call": "echo", "id": "e", "args": {"text": "x"}},
             pay("p2", amount=2), pay("p3", "{{user}}")),
        DONE,
    )  # fmt: skip
    asked = await engine.ask("{args}")
    items = open_items(asked)
    assert [item.id for item in items] == ["p1", "p2", "p3"]
    assert [item.tool_name for item in items] == ["pay"] * 3
    assert items[1].args_json == '{"to": "p2", "amount": 2}'
    assert items[1].prompt == 'Pay 2 to p2? {"a": {}} {{other}}'
    assert items[2].prompt.startswith("Pay  to {args}?")
    assert items[0].kind == InterruptKind.INTERRUPT_KIND_APPROVAL
    assert list(items[0].path) == ["a", "pay"]
    assert [DecisionAction.Name(action) for action in items[0].allowed_actions] == [
        f"DECISION_ACTION_{name}" for name in ("APPROVE", "REJECT", "EDIT", "SKIP", "RESPOND")
    ]
    assert len({item.args_hash for item in items}) == 3
    assert ledger.entries == []
    waiting = [(index, name, phase, code) for index, name, phase, code in asked.steps]
    assert waiting == [(0, "pay", "start", "approval.required"), (2, "pay", "start", "approval.required"),
                       (3, "pay", "start", "approval.required")]  # fmt: skip
    head = await engine.store.head(asked.key)
    assert head.state == RunState.RUN_STATE_INTERRUPTED
    assert list(head.run.interrupts) == items
    assert asked.last.done.content == "Let me see."

    ended = await answer(engine, asked, *(decide(item.id) for item in items))
    assert sorted(map(str, ledger.to)) == ["p1", "p2", "{args}"]
    assert ended.last.done.content == "All done."
    assert list(results(await engine.messages(asked.conversation_id))) == ["p1", "e", "p2", "p3"]
    steps = [(name, phase, code) for index, name, phase, code in ended.steps if index == 0]
    assert steps == [("pay", "start", "approval.required"), ("pay", "start", ""), ("pay", "ok", "")]
    head = await engine.store.head(asked.key)
    assert (head.state, head.run.stop_reason, len(head.run.interrupts)) == (RunState.RUN_STATE_SUCCEEDED, FINISHED, 0)


async def test_each_answer_does_what_it_says(open_engine: Opener) -> None:
    """Approve, edit, reject, skip and respond in one request: two run, with the arguments agreed on, three do not."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks()]),
        turn(0, *(pay(name, amount=5) for name in ("yes", "less", "no", "later", "told"))),
        DONE,
    )
    asked = await engine.ask("go")
    ended = await answer(
        engine,
        asked,
        decide("yes", comment="fine by me"),
        decide("less", "edit", args_json='{"amount":3, "to":"less"}'),
        decide("no", "reject", comment="too much"),
        decide("later", "skip"),
        decide("told", "respond", response_json='"it is paid already"'),
        caller=ANNA,
    )
    done = sorted(ledger.entries, key=str)  # they run side by side
    assert done == [("pay", {"to": "less", "amount": 3}), ("pay", {"to": "yes", "amount": 5})]
    told = results(await engine.messages(asked.conversation_id))
    assert told["yes"] == "pay 5 to yesA person said: fine by me"
    assert told["less"] == (
        'pay 3 to lessA person changed the arguments before it was run, to: {"amount": 3, "to": "less"}'
    )
    assert '"code": "tool.rejected"' in told["no"]
    assert "too much" in told["no"]
    assert '"code": "tool.skipped"' in told["later"]
    assert told["told"] == "it is paid already"
    assert refused(ended) == [("pay", "tool.rejected"), ("pay", "tool.skipped")]
    assert ended.last.done.process_steps[1].args_json == '{"amount": 3, "to": "less"}'
    assert ended.last.done.content == "All done."
    decisions = [question.decision for question in (await checkpoint_of(engine.store, asked.key)).questions]
    assert [decision.approver for decision in decisions] == ["anna"] * 5
    assert decisions[0].comment == "fine by me"


@pytest.mark.parametrize("count", [1, 3])
async def test_a_rejection_is_told_to_the_model_however_large_the_batch(open_engine: Opener, count: int) -> None:
    """Whether the run goes on never depends on how many calls were asked about."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks()]), turn(0, *(pay(f"p{n}") for n in range(count))), DONE
    )
    asked = await engine.ask("go")
    ended = await answer(engine, asked, *(decide(name, "reject") for name in ids(asked)))
    assert ledger.entries == []
    assert (ended.last.done.stop_reason, ended.last.done.content) == (FINISHED, "All done.")


@pytest.mark.parametrize("count", [1, 3])
async def test_a_rejection_ends_the_run_where_the_policy_says_so(open_engine: Opener, count: int) -> None:
    """REJECTED, nothing of the batch runs, and every call has a result; a skip does not end it."""
    ledger = Ledger()
    policy = Policy("pay", reject_ends_run=True)
    engine = await open_engine(
        Agent("a", tools=[ledger.tool(), echo], interceptors=[asks(policy)]),
        turn(0, {"call": "echo", "id": "e", "args": {"text": "x"}}, *(pay(f"p{n}") for n in range(count))),
        DONE,
    )
    asked = await engine.ask("go")
    ended = await answer(engine, asked, *(decide(f"p{n}", "approve" if n else "reject") for n in range(count)))
    assert ledger.entries == []
    assert (ended.last.done.stop_reason, ended.last.done.content) == (REJECTED, "It was not done: pay was rejected.")
    messages = await engine.messages(asked.conversation_id)
    assert sorted(results(messages)) == sorted(calls(messages))
    assert (await engine.store.head(asked.key)).state == RunState.RUN_STATE_SUCCEEDED


async def test_answers_add_up(open_engine: Opener) -> None:
    """Each answer gives a segment that asks the rest under the same ids; nothing runs before the last one."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks()]), turn(0, *map(pay, ("p1", "p2", "p3"))), DONE
    )
    asked = await engine.ask("go")
    first = {item.id: item for item in open_items(asked)}
    for answered, left in (("p2", ["p1", "p3"]), ("p3", ["p1"])):
        asked = await answer(engine, asked, decide(answered, "skip" if answered == "p3" else "approve"))
        assert ids(asked) == left
        assert all(item == first[item.id] for item in open_items(asked))
        assert ledger.entries == []
        with pytest.raises(EngineError) as second:
            await resume(engine, asked.key, decide(answered))
        assert (second.value.reason, second.value.metadata) == ("ALREADY_ANSWERED", {"interrupt_id": answered})
    ended = await answer(engine, asked, decide("p1"))
    assert sorted(map(str, ledger.to)) == ["p1", "p2"]
    assert next(event.trace_id for event in ended.events) == "a" * 32
    assert ended.last.trace_id == "b" * 32


async def test_what_cannot_be_an_answer_is_refused_and_changes_nothing(open_engine: Opener) -> None:
    """Every fault is named by its field; one bad decision refuses them all, and the run waits as before."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks(Policy("pay", allowed=("approve", "edit", "respond")))]),
        turn(0, *map(pay, ("p1", "p2"))),
        DONE,
    )
    asked = await engine.ask("go")
    for decision, field, problem in (
        (decide("p1", "reject"), "action", "must be one of APPROVE, EDIT, RESPOND"),
        (decide("p1", args_hash="00"), "args_hash", "other arguments"),
        (decide("p1", args_json="{}"), "args_json", "is for EDIT only"),
        (decide("p1", response_json='"x"'), "response_json", "is for RESPOND only"),
        (decide("p1", "respond"), "response_json", "is missing"),
        (decide("p1", "respond", response_json="yes"), "response_json", "must be JSON text"),
        (decide("p1", "edit", args_json="[1]"), "args_json", "one object"),
        (decide("p1", "edit", args_json='{"to": 1}'), "args_json", "to: 1 is not of type 'string'"),
        (
            decide("p1", "edit", args_json=f'{{"to": "{"x" * MAX_ARGUMENTS}"}}'),
            "args_json",
            f"more than {MAX_ARGUMENTS}",
        ),
        (decide("p1", "edit", args_json='{"to": "x", "by": "y"}'), "args_json", "Additional properties"),
        (decide("p1", "edit", args_json='{"to": "x"}', remember=2), "remember", "is for APPROVE of a tool's call only"),
    ):
        with pytest.raises(FieldError) as wrong:
            await resume(engine, asked.key, decide("p2"), decision)
        assert set(wrong.value.fields) == {f"decisions[1].{field}"}
        assert problem in wrong.value.fields[f"decisions[1].{field}"]
    with pytest.raises(FieldError, match="answered twice"):
        await resume(engine, asked.key, decide("p1"), decide("p1"))
    with pytest.raises(EngineError) as unknown:
        await resume(engine, asked.key, decide("p1"), decide("p9", "skip"))
    assert (unknown.value.reason, unknown.value.metadata) == ("UNKNOWN_INTERRUPT", {"interrupt_id": "p9"})
    with pytest.raises(EngineError) as forbidden:
        await resume(engine, asked.key, decide("p1", remember=3), caller=USER)
    assert forbidden.value.reason == "PERMISSION_DENIED"
    assert (await engine.store.head(asked.key)).last_seq == len(asked.events)
    await answer(engine, asked, decide("p1", args_hash=open_items(asked)[0].args_hash), decide("p2"))
    assert sorted(map(str, ledger.to)) == ["p1", "p2"]


async def test_of_two_that_answer_at_once_one_is_second(open_engine: Opener) -> None:
    """Ten people press the button: one answer is taken, the tool runs once, the others learn that they were late."""
    ledger = Ledger()
    engine = await open_engine(Agent("a", tools=[ledger.tool()], interceptors=[asks()]), turn(0, pay("p1")), DONE)
    asked = await engine.ask("go")
    answers = [resume(engine, asked.key, decide("p1")) for _ in range(10)]
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    taken = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    late = [outcome.reason for outcome in outcomes if isinstance(outcome, EngineError)]
    assert (len(taken), late) == (1, ["ALREADY_ANSWERED"] * 9)
    await segment_of(engine, taken[0])
    assert ledger.to == ["p1"]
    with pytest.raises(EngineError) as late_for_good:
        await resume(engine, asked.key, decide("p1"))
    assert late_for_good.value.reason == "ALREADY_ANSWERED"
    with pytest.raises(EngineError) as unknown:
        await resume(engine, asked.key, decide("p2"))
    assert unknown.value.reason == "RUN_NOT_INTERRUPTED"


async def test_answers_to_different_questions_do_not_get_in_each_others_way(open_engine: Opener) -> None:
    """Eight people answer one question each at the same moment; all answers are taken, though each wakes the run."""
    ledger = Ledger()
    names = [f"p{number}" for number in range(8)]
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks()]), turn(0, *map(pay, names)), DONE
    )
    asked = await engine.ask("go")
    created = await asyncio.gather(*(resume(engine, asked.key, decide(name)) for name in names))
    ended = await segment_of(engine, max(created, key=lambda one: one.first_seq))
    assert ended.last.done.stop_reason == FINISHED
    assert sorted(map(str, ledger.to)) == names


async def test_calls_of_one_id_are_asked_about_apart(open_engine: Opener) -> None:
    """A provider that repeats a call id gets another one: an approval of the first allows nothing of the second."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks()]),
        turn(0, pay("p1", "anna"), pay("p1", "mallory"), pay("p1#2", "eve")),
        DONE,
    )
    asked = await engine.ask("go")
    items = open_items(asked)
    assert len({item.id for item in items}) == 3
    assert len({item.args_hash for item in items}) == 3
    yes = next(item.id for item in items if "anna" in item.args_json)
    await answer(engine, asked, *(decide(item.id, "approve" if item.id == yes else "reject") for item in items))
    assert ledger.to == ["anna"]


class Changes(Interceptor):
    """Changes the arguments of every call, before the batch or around the tool."""

    def __init__(self, where: str, order: int) -> None:
        super().__init__(order=order)
        self.where = where

    async def on_action_start(self, trace: Trace, calls: list[Call]) -> None:  # type: ignore[override]
        for call in calls if self.where == "batch" else ():
            call.change({**call.args, "amount": 99})

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        if self.where == "tool":
            request = replace(request, args={**request.args, "amount": 99})
        return await call_next(request)


@pytest.mark.parametrize("where", ["batch", "tool"])
async def test_arguments_changed_after_the_approval_are_asked_about_again(open_engine: Opener, where: str) -> None:
    """Whoever changes them, what runs is what somebody approved; the second question has an id of its own."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks(), Changes(where, order=1000)]), turn(0, pay("p1")), DONE
    )
    asked = await answer(engine, await engine.ask("go"), decide("p1"))
    assert ledger.entries == []
    (item,) = open_items(asked)
    assert (item.id, item.args_json) == ("p1#2", '{"to": "p1", "amount": 99}')
    await answer(engine, asked, decide("p1#2"))
    assert ledger.entries == [("pay", {"to": "p1", "amount": 99})]


async def test_arguments_made_harmful_after_the_look_at_the_batch_are_still_seen(open_engine: Opener) -> None:
    """A policy that looks at amounts asks about what another interceptor made of a small one."""
    ledger = Ledger()

    def large(call: Call, _: Trace) -> Opinion:
        return f"Really {call.args['amount']}?" if call.args["amount"] == 99 else False

    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks(Policy("pay", ask=large)), Changes("batch", 1000)]),
        turn(0, pay("p1", amount=1)),
        DONE,
    )
    asked = await engine.ask("go")
    assert open_items(asked)[0].prompt == "Really 99?"
    assert ledger.entries == []
    await answer(engine, asked, decide("p1", "reject"))
    assert ledger.entries == []


async def test_one_refusal_stands_whatever_others_say(open_engine: Opener) -> None:
    """Two interceptors ask about one call; a rejection to the first is not undone by an approval of the second."""

    class Second(Interceptor):
        async def on_action_start(self, trace: Trace, calls: list[Call]) -> Suspend | None:  # type: ignore[override]
            if trace.questions:
                return None
            return Suspend(Ask("first?", call_id=calls[0].id, key="one"), Ask("again?", call_id=calls[0].id, key="two"))

    ledger = Ledger()
    engine = await open_engine(Agent("a", tools=[ledger.tool()], interceptors=[Second()]), turn(0, pay("p1")), DONE)
    asked = await engine.ask("go")
    assert ids(asked) == ["p1/one", "p1/two"]
    asked = await answer(engine, asked, decide("p1/one", "reject"))
    assert ids(asked) == ["p1/two"]
    ended = await answer(engine, asked, decide("p1/two", "approve"))
    assert ledger.entries == []
    assert refused(ended) == [("pay", "tool.rejected")]


async def test_an_interceptor_that_asks_about_no_call_of_the_batch_fails_the_run(open_engine: Opener) -> None:
    """A question about a call that is not there is a defect that nothing may slip through."""

    class Confused(Interceptor):
        async def on_action_start(self, trace: Trace, calls: list[Call]) -> Suspend:  # type: ignore[override]
            return Suspend(Ask("?", call_id="elsewhere"))

    ledger = Ledger()
    engine = await open_engine(Agent("a", tools=[ledger.tool()], interceptors=[Confused()]), turn(0, pay("p1")), DONE)
    asked = await engine.ask("go")
    assert "asks about the call 'elsewhere'" in asked.last.error.message
    assert ledger.entries == []
