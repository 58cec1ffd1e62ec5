"""Questions of a model to its user: asked by a tool, answered by Resume or by the next message."""

import asyncio
import json

import pytest

from dualclaw import BusyPolicy, InterruptKind, RunState, StopReason
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.outcome import Ask, Suspend
from dualclaw_server.engine.tool import Tool, tool
from dualclaw_server.tools.feedback import feedback_tool

from .conftest import ANSWER, CALLER, Asked, Engine, Opener, calls, kinds, results, turn
from .people import (
    ANNA,
    Ledger,
    answer,
    asks,
    check,
    decide,
    ids,
    next_segment,
    open_items,
    pay,
    refused,
    resume,
    segment_of,
)

QUEUE, REPLACE = BusyPolicy.BUSY_POLICY_QUEUE, BusyPolicy.BUSY_POLICY_REPLACE
TOLD = turn(1, {"text": "You said {{result:ask_user}}."})


def ask_user(call_id: str = "q", question: str = "Which colour?", **args: object) -> dict[str, object]:
    return {"call": "ask_user", "id": call_id, "args": {"question": question, **args}}


async def test_a_question_waits_for_its_answer(open_engine: Opener) -> None:
    """The run parks with a QUESTION; the step says so; a response is the call's result, and the run goes on."""
    engine = await open_engine(Agent("a", tools=[feedback_tool()]), turn(0, {"text": "Hm."}, ask_user()), TOLD)
    asked = await engine.ask("paint it")
    (item,) = open_items(asked)
    assert (item.id, item.kind, item.prompt) == ("q", InterruptKind.INTERRUPT_KIND_QUESTION, "Which colour?")
    assert asked.steps[-1][2:] == ("start", "input.required")
    waiting = asked.last.done.process_steps[0].diagnosis
    assert (waiting.summary, waiting.hint) == ("Which colour?", "Answer it; a message in the conversation does.")
    ended = await answer(engine, asked, decide("q", "respond", response_json='"blue"'))
    assert ended.last.done.content == "You said blue."
    messages = await engine.messages(asked.conversation_id)
    assert kinds(messages) == ["user", "assistant", "tool", "assistant"]
    assert results(messages) == {"q": "blue"}


async def test_a_skipped_question_is_told_to_the_model(open_engine: Opener) -> None:
    """Nobody has to answer; a question can be neither approved nor rejected."""
    engine = await open_engine(Agent("a", tools=[feedback_tool()]), turn(0, ask_user()), turn(1, {"text": "Then red."}))
    asked = await engine.ask("go")
    with pytest.raises(FieldError, match="must be one of RESPOND, SKIP"):
        await resume(engine, asked.key, decide("q"))
    ended = await answer(engine, asked, decide("q", "skip"))
    assert refused(ended) == [("ask_user", "tool.skipped")]
    assert ended.last.done.content == "Then red."


async def message(engine: Engine, asked: Asked, text: str, **options: object) -> Asked:
    created = await engine.start(text, conversation=asked.conversation_id, **options)  # type: ignore[arg-type]
    assert created.head.key == asked.key
    return await segment_of(engine, created)


@pytest.mark.parametrize("policy", [BusyPolicy.BUSY_POLICY_UNSPECIFIED, BusyPolicy.BUSY_POLICY_REJECT, QUEUE])
async def test_the_next_message_answers_the_one_open_question(open_engine: Opener, policy: int) -> None:
    """Run streams the next segment of the old run; the answer is the tool's result and no message of its own."""
    engine = await open_engine(Agent("a", tools=[feedback_tool()]), turn(0, ask_user()), TOLD)
    asked = await engine.ask("go")
    ended = await message(engine, asked, 'sky "blue"', on_busy=policy, request_id="m1", caller=ANNA)
    assert ended.last.done.content == 'You said sky "blue".'
    messages = await engine.messages(asked.conversation_id)
    assert kinds(messages) == ["user", "assistant", "tool", "assistant"]
    again = await message(engine, asked, 'sky "blue"', on_busy=policy, request_id="m1", caller=ANNA)
    assert again.events == ended.events
    with pytest.raises(EngineError) as reused:
        await message(engine, asked, "green", on_busy=policy, request_id="m1", caller=ANNA)
    assert reused.value.reason == "REQUEST_ID_REUSED"


async def test_the_request_that_began_the_run_is_still_known_while_it_asks(open_engine: Opener) -> None:
    """The very Run that led to the question, sent again with QUEUE, is no answer to it."""
    engine = await open_engine(
        Agent("a", tools=[feedback_tool()]), turn(0, ask_user(choices=["red"], only_choices=True)), TOLD
    )
    before = await engine.ask("hello", request_id="first")
    conversation = before.conversation_id
    await answer(engine, before, decide("q", "skip"))
    again = await engine.start("hello", conversation=conversation, request_id="second", on_busy=QUEUE)
    asked = await segment_of(engine, again)
    assert len(ids(asked)) == 1
    replayed = await engine.start("hello", conversation=conversation, request_id="second", on_busy=QUEUE)
    assert (replayed.existing, replayed.first_seq, replayed.head.key) == (True, 1, again.head.key)
    assert (await engine.store.head(again.head.key)).state == RunState.RUN_STATE_INTERRUPTED


async def test_a_message_never_approves(open_engine: Opener) -> None:
    """With an approval open the conversation is busy; the refusal names the run and what it asks."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[asks()]), turn(0, pay("p1"), pay('p"2')), ANSWER
    )
    asked = await engine.ask("go")
    with pytest.raises(EngineError) as busy:
        await engine.start("yes", conversation=asked.conversation_id)
    assert busy.value.reason == "CONVERSATION_BUSY"
    assert busy.value.metadata["run_id"] == asked.key.run_id
    assert json.loads(busy.value.metadata["interrupts"]) == ["p1", 'p"2']
    assert ledger.entries == []


async def test_a_message_answers_the_question_beside_an_approval(open_engine: Opener) -> None:
    """Exactly one QUESTION is open, so it is the one that is meant; the approval stays open."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool(), feedback_tool()], interceptors=[asks()]), turn(0, pay("p1"), ask_user()), TOLD
    )
    asked = await engine.ask("go")
    assert ids(asked) == ["p1"]
    asked = await answer(engine, asked, decide("p1"))
    assert ids(asked) == ["q"]
    assert ledger.to == ["p1"]
    ended = await message(engine, asked, "blue")
    assert ended.last.done.content == "You said blue."
    assert ledger.to == ["p1"]


async def test_two_open_questions_make_a_conversation_busy(open_engine: Opener) -> None:
    """Nobody can tell which one a message means; it is refused, or queued, and both go on waiting."""
    engine = await open_engine(
        Agent("a", tools=[feedback_tool()]), turn(0, ask_user("q1"), ask_user("q2", "How large?")), TOLD
    )
    asked = await engine.ask("go")
    with pytest.raises(EngineError) as busy:
        await engine.start("blue", conversation=asked.conversation_id)
    assert sorted(json.loads(busy.value.metadata["interrupts"])) == ["q1", "q2"]
    queued = await engine.start("later", conversation=asked.conversation_id, on_busy=QUEUE)
    assert queued.head.state == RunState.RUN_STATE_QUEUED
    asked = await answer(engine, asked, decide("q1", "respond", response_json='"blue"'))
    ended = await message(engine, asked, "large")
    assert ended.last.done.content == "You said large."
    assert results((await engine.messages(asked.conversation_id))[:4]) == {"q1": "blue", "q2": "large"}
    assert open_items(await segment_of(engine, queued))


async def test_a_message_that_does_not_fit_the_question_is_refused(open_engine: Opener) -> None:
    """The answer must be one of the choices, by its text or its number; another one is named as a mistake."""
    engine = await open_engine(
        Agent("a", tools=[feedback_tool()]), turn(0, ask_user(choices=["red", "dark blue"], only_choices=True)), TOLD
    )
    asked = await engine.ask("go")
    assert open_items(asked)[0].prompt == "Which colour?\n1. red\n2. dark blue"
    for wrong in ("green", "3", "0", "-1"):
        with pytest.raises(FieldError, match="does not answer the open question q"):
            await engine.start(wrong, conversation=asked.conversation_id)
    with pytest.raises(FieldError, match="has no text"):
        await engine.start(" ", conversation=asked.conversation_id)
    with pytest.raises(FieldError, match="is not one of"):
        await resume(engine, asked.key, decide("q", "respond", response_json='"green"'))
    ended = await message(engine, asked, " 2 ")
    assert ended.last.done.content == "You said dark blue."


@pytest.mark.parametrize(("said", "meant"), [("RED", "red"), ("1", "red"), ("rather green", "rather green")])
async def test_choices_are_offers_unless_they_are_all(open_engine: Opener, said: str, meant: str) -> None:
    """Any other text is an answer too; pages find the offers in the response schema."""
    engine = await open_engine(
        Agent("a", tools=[feedback_tool()]), turn(0, ask_user(choices=["red", "blue", " red "])), TOLD
    )
    asked = await engine.ask("go")
    schema = json.loads(open_items(asked)[0].response_schema_json)
    assert schema["anyOf"][0]["enum"] == ["red", "blue"]
    assert (await message(engine, asked, said)).last.done.content == f"You said {meant}."


async def test_a_response_is_checked_against_the_schema_of_its_question(open_engine: Opener) -> None:
    """A question of any tool may want data; a message is taken as JSON where text would not fit."""
    schema = '{"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}'

    @tool(effect="read")
    async def measure() -> str:
        raise Suspend(Ask("Size?", kind="question", response_schema=schema))

    engine = await open_engine(
        Agent("a", tools=[measure]),
        turn(0, {"call": "measure", "id": "m"}),
        turn(1, {"text": "{{result}}"}),
    )
    asked = await engine.ask("go")
    for wrong in ('{"size": "x"}', "{", "null"):
        with pytest.raises(FieldError):
            await resume(engine, asked.key, decide("m", "respond", response_json=wrong))
    ended = await message(engine, asked, '{"size": 3}')
    assert ended.last.done.content == '{"size": 3}'


@pytest.mark.parametrize(
    ("args", "problem"),
    [({"question": "  "}, "the question is empty"), ({"question": "x" * 5000}, "more than 4000")],
)
async def test_a_question_nobody_could_answer_is_not_asked(
    open_engine: Opener, args: dict[str, object], problem: str
) -> None:
    """The model is told what is wrong with it; the run does not park."""
    engine = await open_engine(
        Agent("a", tools=[feedback_tool()]),
        turn(0, {"call": "ask_user", "id": "q", "args": args}),
        turn(1, {"text": "{{result}}"}),
    )
    assert problem in (await engine.ask("go")).last.done.content


def test_the_tool_speaks_the_language_of_its_agent() -> None:
    """Description and parameters are in Chinese where that is asked for; name and schema stay."""
    chinese: Tool = feedback_tool("zh")
    assert chinese.name == "ask_user"
    assert "用户" in chinese.description
    assert "用户" in chinese.parameters_json
    assert feedback_tool("en", name="ask").name == "ask"


async def test_runs_that_wait_behind_a_question_start_when_it_is_answered(open_engine: Opener) -> None:
    """They stay queued while the run is parked, and an approval open with them; then they go on in order."""
    engine = await open_engine(
        Agent("a", tools=[feedback_tool()]),
        {"when": {"user": "later"}, "say": [{"text": "Later it is."}]},
        turn(0, ask_user("q1"), ask_user("q2")),
        TOLD,
    )
    asked = await engine.ask("go")
    queued = [await engine.start("later", conversation=asked.conversation_id, on_busy=QUEUE) for _ in range(2)]
    assert [(await engine.store.head(one.head.key)).state for one in queued] == [RunState.RUN_STATE_QUEUED] * 2
    await answer(
        engine,
        asked,
        decide("q1", "respond", response_json='"x"'),
        decide("q2", "respond", response_json='"y"'),
    )
    for one in queued:
        assert (await segment_of(engine, one)).last.done.content == "Later it is."


async def test_a_parked_run_can_be_cancelled(open_engine: Opener) -> None:
    """CANCELLED in a segment of its own; the question gets a result, the conversation is free, answers are refused."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[feedback_tool(), ledger.tool()], interceptors=[asks()]),
        {"when": {"user": "next"}, "say": [{"text": "Next."}]},
        turn(0, {"text": "Hm."}, ask_user(), pay("p1")),
    )
    asked = await answer(engine, await engine.ask("go"), decide("p1"))
    assert ids(asked) == ["q"]
    await engine.cancel(asked.key)
    ended = await next_segment(engine, asked)
    assert ended.last.done.stop_reason == StopReason.STOP_REASON_CANCELLED
    assert refused(ended) == [("ask_user", "tool.skipped")]
    messages = await engine.messages(asked.conversation_id)
    assert sorted(results(messages)) == sorted(calls(messages))
    with pytest.raises(EngineError) as late:
        await resume(engine, asked.key, decide("q", "skip"))
    assert late.value.reason in ("RUN_NOT_INTERRUPTED", "ALREADY_ANSWERED")
    assert (await engine.ask("next", conversation=asked.conversation_id)).last.done.content == "Next."


async def test_another_run_can_take_the_place_of_a_parked_one(open_engine: Opener) -> None:
    """REPLACE never answers the question: it cancels the run, gives its calls a result, and starts."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[feedback_tool(), ledger.tool()], interceptors=[asks()]),
        {"when": {"user": "instead"}, "say": [{"text": "Instead."}]},
        turn(0, ask_user(), pay("p1")),
    )
    asked = await engine.ask("go")
    replacing = await engine.start("instead", conversation=asked.conversation_id, on_busy=REPLACE)
    assert replacing.head.key != asked.key
    assert (await segment_of(engine, replacing)).last.done.content == "Instead."
    assert (await engine.store.head(asked.key)).state == RunState.RUN_STATE_CANCELLED
    messages = await engine.messages(asked.conversation_id)
    assert sorted(results(messages)) == sorted(calls(messages))
    assert ledger.entries == []
    await check(engine.store, await next_segment(engine, asked))


async def test_wall_time_stands_still_while_people_think(open_engine: Opener) -> None:
    """A run with little time left is not out of time when it is answered late."""
    engine = await open_engine(
        Agent("a", tools=[feedback_tool()], limits=Limits(wall_time=4)),
        turn(0, ask_user()),
        turn(1, {"sleep": 0.2}, {"text": "You said {{result:ask_user}}."}),
    )
    asked = await engine.ask("go")
    await asyncio.sleep(4.1)
    ended = await answer(engine, asked, decide("q", "respond", response_json='"blue"'))
    assert ended.last.done.content == "You said blue."


async def test_a_message_of_another_tenant_reaches_no_question(open_engine: Opener) -> None:
    """Neither the conversation nor the run exists for somebody else."""
    engine = await open_engine(Agent("a", tools=[feedback_tool()]), turn(0, ask_user()), TOLD)
    asked = await engine.ask("go")
    stranger = type(CALLER)("other", "eve", CALLER.roles)
    with pytest.raises(EngineError) as unknown:
        await engine.start("blue", conversation=asked.conversation_id, caller=stranger)
    assert unknown.value.reason == "UNKNOWN_CONVERSATION"
    with pytest.raises(EngineError) as hidden:
        await resume(engine, asked.key, decide("q", "skip"), caller=stranger)
    assert hidden.value.reason == "UNKNOWN_RUN"
