"""What becomes of what hooks want: answers and results put in place of others, questions, masks, values that stay."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from dualclaw import ContentPart, DecisionAction, Message, ToolCall
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import load_checkpoint
from dualclaw_server.engine.interceptor import Interceptor, Observation, Prompt, ToolNext, ToolRequest
from dualclaw_server.engine.model import ModelResponse
from dualclaw_server.engine.outcome import Ask, End, Outcome, Replace, Suspend
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import Tool, ToolContext, tool
from dualclaw_server.engine.trace import Trace

from .conftest import ANSWER, Asked, Engine, Opener, echo, results, turn
from .probes import resume

ONE_CALL = (turn(0, {"text": "So:"}, {"call": "echo", "id": "c", "args": {"text": "hi"}}), turn(1, {"text": "Done."}))
APPROVE = DecisionAction.DECISION_ACTION_APPROVE
REJECT = DecisionAction.DECISION_ACTION_REJECT

Review = Callable[[Trace, Message], Outcome | None]


class Reviews(Interceptor):
    """Looks at every answer."""

    def __init__(self, review: Review) -> None:
        super().__init__()
        self.review = review

    async def on_reason_end(
        self, trace: Trace, response: ModelResponse, message: Message, duration: float
    ) -> Outcome | None:
        return self.review(trace, message)


def said(text: str) -> Message:
    return Message(parts=[ContentPart(text=text)])


def in_place(trace: Trace, message: Message) -> None:
    message.parts[0].text = "Hello, moon"
    message.id = "mine"


def rewinds(asked: Asked) -> list[str]:
    return [event.rewind.content for event in asked.events if event.WhichOneof("payload") == "rewind"]


@pytest.mark.parametrize("review", [lambda trace, message: Replace(said("Hello, moon")), in_place])
async def test_a_replaced_answer_is_what_people_have(open_engine: Opener, review: Review) -> None:
    """Shown text is put right by one rewind, and the same is saved under the engine's own id."""
    engine = await open_engine(Agent("a", interceptors=[Reviews(review)]), ANSWER)
    asked = await engine.ask("go")
    assert rewinds(asked) == ["Hello, moon"]
    saved = (await engine.messages(asked.conversation_id))[-1]
    assert (saved.parts[0].text, asked.last.done.content) == ("Hello, moon", "Hello, moon")
    assert (saved.id, saved.author) == (asked.last.done.message_id, "a")
    assert saved.id != "mine"


async def test_a_replaced_answer_may_ask_for_other_calls(open_engine: Opener) -> None:
    """Calls of an interceptor run like the model's: ids made unique, arguments canonical, nonsense refused."""

    def review(trace: Trace, message: Message) -> Outcome | None:
        if trace.model_calls > 1:
            return None
        texts = ['{"text":"a"}', '{ "text" : "b" }', "nonsense", ""]
        calls = [ToolCall(id="c" if n < 2 else "", name="echo", args_json=text) for n, text in enumerate(texts)]
        return Replace(Message(parts=[ContentPart(tool_call=call) for call in calls]))

    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Reviews(review)]), *ONE_CALL)
    asked = await engine.ask("go")
    steps = asked.last.done.process_steps
    assert [step.args_json for step in steps] == ['{"text": "a"}', '{"text": "b"}', "", ""]
    assert len({step.call_id for step in steps}) == 4
    saved = (await engine.messages(asked.conversation_id))[1]
    assert [part.tool_call.args_json for part in saved.parts] == ['{"text": "a"}', '{"text": "b"}', "", ""]
    assert [step.diagnosis.code for step in steps] == ["", "", "tool.bad_arguments", "tool.bad_arguments"]
    assert asked.last.done.content == "Done."


@pytest.mark.parametrize(("text", "shown"), [("", "Hello, world"), ("Released.", "Released.")])
async def test_an_answer_can_wait_for_its_release(open_engine: Opener, text: str, shown: str) -> None:
    """Asked about, it is reviewed again with the answer; the last segment shows what the run has come to."""

    def review(trace: Trace, message: Message) -> Outcome | None:
        if trace.answer_to("reviews") is None:
            return Suspend(Ask("Release it?"))
        return Replace(said(text)) if text else None

    engine = await open_engine(Agent("a", interceptors=[Reviews(review)]), ANSWER)
    asked = await engine.ask("go")
    assert asked.last.done.content == "Hello, world"
    asked = await resume(engine, asked)
    assert asked.last.done.content == shown
    messages = await engine.messages(asked.conversation_id)
    assert [part.text for message in messages for part in message.parts] == ["go", shown]
    assert asked.last.done.message_id == messages[-1].id


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_reviewed_answer_keeps_or_loses_its_calls(open_engine: Opener, replaced: bool) -> None:
    """After the review its calls run as they are, or not at all when the answer is replaced by one without."""

    def review(trace: Trace, message: Message) -> Outcome | None:
        if trace.answer_to("reviews") is None:
            return Suspend(Ask("Really?"))
        return Replace(said("Rather not.")) if replaced else None

    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Reviews(review)]), *ONE_CALL)
    asked = await resume(engine, await engine.ask("go"))
    assert [step.result for step in asked.last.done.process_steps] == ([] if replaced else ["<hi>"])
    assert asked.last.done.content == ("Rather not." if replaced else "Done.")


class AsksAfter(Interceptor):
    """Asks people about every result before the model has it."""

    async def on_tool_call_end(
        self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
    ) -> Outcome | None:
        return Suspend(Ask("Show the model this?")) if call.decision is None and observation.parts else None


@pytest.mark.parametrize(("action", "told"), [(APPROVE, "<hi>"), (REJECT, "tool.rejected")])
async def test_a_result_can_wait_for_its_release(
    store: RunStore, open_engine: Opener, action: DecisionAction.ValueType, told: str
) -> None:
    """The tool has run once, whatever people say; until then nobody sees its result, and refused nobody ever does."""
    runs: list[str] = []

    @tool(name="echo", effect="once")
    async def counting(text: str) -> str:
        runs.append(text)
        return f"<{text}>"

    engine = await open_engine(Agent("a", tools=[counting], interceptors=[AsksAfter()]), *ONE_CALL)
    asked = await engine.ask("go")
    assert results(await engine.messages(asked.conversation_id)) == {}
    asked = await resume(engine, asked, action)
    assert told in results(await engine.messages(asked.conversation_id))["c"]
    assert runs == ["hi"]
    assert not load_checkpoint((await store.load(asked.key)).checkpoint).extras


async def test_what_ran_is_not_called_skipped_when_its_release_is_cancelled(open_engine: Opener) -> None:
    """A call that waits for the release of its result has run; a cancel must not tell the model otherwise."""
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[AsksAfter()]), *ONE_CALL)
    asked = await engine.ask("go")
    await engine.cancel(asked.key)
    await engine.wait_for(asked.key, lambda events: events[-1].done.stop_reason > asked.last.done.stop_reason)
    assert "tool.outcome_unknown" in results(await engine.messages(asked.conversation_id))["c"]


class Gate(Interceptor):
    """Asks about every call, once."""

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        asks = [Ask("May it?", call_id=call.id) for call in calls if call.decision is None]
        return Suspend(*asks) if asks else None


class Rewrites(Interceptor):
    """Gives the tool other arguments, behind everybody's back."""

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        return await call_next(replace(request, args={"text": "other"}))


async def test_arguments_changed_after_an_approval_are_asked_about(open_engine: Opener) -> None:
    """What people approved is what runs: changed around the tool it asks anew, showing what would run now."""
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Gate(), Rewrites(order=1)]), *ONE_CALL)
    asked = await resume(engine, await engine.ask("go"))
    (item,) = asked.events[-2].interrupt.items
    assert (item.id, item.args_json) == ("c#2", '{"text": "other"}')
    asked = await resume(engine, asked)
    assert asked.last.done.process_steps[0].result == "<other>"


class Masks(Interceptor):
    """Hides a word; ``breaks`` says how it fails to."""

    def __init__(self, breaks: str = "") -> None:
        super().__init__()
        self.breaks = breaks

    def mask(self, value: object) -> object:
        if self.breaks == "raises":
            raise LookupError
        if self.breaks == "another type":
            return None
        if isinstance(value, str):
            return value.replace("secret", "***")
        return {key: self.mask(item) for key, item in value.items()} if isinstance(value, Mapping) else value


class AsksAboutSecrets(Gate):
    """Repeats in its question what nobody must read."""

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        asks = [Ask(f"With {call.args['text']}?", call_id=call.id) for call in calls if call.decision is None]
        return Suspend(*asks) if asks else None


SECRET = (turn(0, {"call": "echo", "id": "c", "args": {"text": "secret"}}), turn(1, {"text": "Done."}))


def real_tool(seen: list[str]) -> Tool:
    @tool(name="echo", effect="read")
    async def reads(text: str) -> str:
        seen.append(text)
        raise LookupError("no secret here")

    return reads


@pytest.mark.parametrize("breaks", ["", "raises", "another type"])
async def test_masks_hide_everything_but_the_work(open_engine: Opener, breaks: str) -> None:
    """Steps, diagnoses and questions show masked text, or none when masking fails; tool and hash have the real one."""
    seen: list[str] = []
    agent = Agent("a", tools=[real_tool(seen)], interceptors=[AsksAboutSecrets(), Masks(breaks)])
    engine = await open_engine(agent, *SECRET)
    asked = await resume(engine, await engine.ask("go"))
    assert seen == ["secret"]
    assert not [event for event in asked.events if "secret" in str(event)]
    item = next(event.interrupt.items[0] for event in asked.events if event.WhichOneof("payload") == "interrupt")
    assert item.args_json == ("" if breaks else '{"text": "***"}')
    assert item.prompt == ("(withheld)" if breaks else "With ***?")
    assert item.args_hash == hashlib.sha256(b'echo\x00{"text": "secret"}').hexdigest()


async def test_masks_cover_the_agents_below(open_engine: Opener) -> None:
    """What a sub-agent shows passes the masks of the agent above: it is one stream."""
    seen: list[str] = []
    below = Agent("below", tools=[real_tool(seen)])
    inner = turn(0, {"call": "echo", "args": {"text": "secret"}}, user="^inner$")
    engine = await open_engine(
        Agent("a", interceptors=[Masks()], sub_agents=[below]),
        inner,
        turn(1, {"text": "Inner."}, user="^inner$"),
        turn(0, {"call": "below", "args": {"request": "inner"}}),
        turn(1, {"text": "Done."}),
    )
    asked = await engine.ask("go")
    assert seen == ["secret"]
    assert not [event for event in asked.events if "secret" in str(event)]
    assert [step.args_json for step in asked.last.done.process_steps if step.name == "echo"] == ['{"text": "***"}']


async def test_a_prompt_is_a_copy(open_engine: Opener) -> None:
    """What a hook does to the messages of a prompt is for that call; the conversation has what was said."""

    class Scribbles(Interceptor):
        async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
            if trace.model_calls == 0:
                prompt.messages[-1].parts[0].text = "scribbled"
            return None

    script = (turn(0, {"text": "{{user}}"}, {"call": "echo", "args": {"text": "hi"}}), turn(1, {"text": "{{user}}"}))
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Scribbles()]), *script)
    asked = await engine.ask("go")
    assert asked.last.done.content == "scribbled\n\ngo"


@dataclass
class Count:
    """What an interceptor keeps for itself."""

    segments: int = 0


class Keeps(Interceptor):
    """Counts segments in its extras, and shows whether it was there before a crash."""

    recovered: list[bool]

    async def on_agent_start(self, trace: Trace) -> Outcome | None:
        extras = trace.extras(self.name)
        count = extras.get_as("count", Count, Count())
        extras.set("count", Count(count.segments + 1))
        trace.session.set("seen", count.segments)
        self.recovered = [*getattr(self, "recovered", []), trace.recovered]
        return None


async def test_values_survive_a_resume_and_a_crash(store: RunStore) -> None:
    """Extras of an interceptor and session values are where the run is; after a crash a start says it recovers."""
    hold = asyncio.Event()
    begun = asyncio.Event()
    values: list[object] = []

    @tool(name="echo", effect="read")
    async def slow(text: str, context: ToolContext) -> str:
        if not context.trace.questions:
            raise Suspend(Ask("Really?"))
        begun.set()
        await hold.wait()
        values.extend([context.trace.session.get("seen"), context.trace.extras("keeps").get("count")])
        return text

    keeps = Keeps()
    agent = Agent("a", tools=[slow], interceptors=[keeps])
    first = Engine(store, [agent], list(ONE_CALL))
    serve = asyncio.create_task(first.runner.serve())
    asked = await first.ask("go")
    await first.runner.drain(0)  # nothing is at work
    second = Engine(store, [agent], list(ONE_CALL))
    serving = asyncio.create_task(second.runner.serve())
    resuming = asyncio.create_task(resume(second, asked))
    await asyncio.wait_for(begun.wait(), 60)
    await second.runner.drain(0)  # the call is at work and is handed over
    hold.set()
    third = Engine(store, [agent], list(ONE_CALL))
    last = asyncio.create_task(third.runner.serve())
    assert (await resuming).last.done.content == "Done."
    await third.runner.drain(0)
    await asyncio.wait({serve, serving, last}, timeout=5)
    assert keeps.recovered == [False, False, True]
    assert values == [2, {"segments": 3}]


def test_questions_and_ends_are_checked_where_they_are_made() -> None:
    """What could not be asked, or ended with, is refused with what would be right."""
    wrong: list[tuple[Mapping[str, object], str]] = [
        ({"prompt": " "}, "a question needs a prompt"),
        ({"kind": "poll"}, "kind 'poll': use approval or question"),
        ({"allowed": ["aprove"]}, "allowed: aprove is not among approve, reject, edit, skip, respond"),
        ({"allowed": "approve"}, "allowed: approve is not among"),
        ({"key": "a/b"}, "must be without / and #"),
        ({"response_schema": '{"type": 1}'}, "response_schema is no JSON schema"),
        ({"response_schema": "{"}, "response_schema is no JSON schema"),
    ]
    for fields, problem in wrong:
        with pytest.raises(ValueError, match=problem):
            Ask(**{"prompt": "Really?", **fields})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one question"):
        Suspend()
    with pytest.raises(ValueError, match="STOP_REASON_BORED"):
        End("", "bored")  # type: ignore[arg-type]
