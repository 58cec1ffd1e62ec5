"""Loops: what counts as one, what is done about it step by step, and that nothing that gets further is stopped."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import ContentPart, Decision, Message, Role, StopReason, ToolCall, ToolResult
from dualclaw_server.engine.interceptor import Observation
from dualclaw_server.engine.outcome import End, Replace
from dualclaw_server.engine.tool import Effect, Tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.stop_loop import CODE, TEXTS, StopLoopInterceptor

from .traces import call_of, make_trace, prompt_of, response

Step = tuple[str, dict[str, object], str]
"""Name, arguments, and the result of a call that is really made."""
EN = TEXTS["en"]


def a_tool(name: str, effect: Effect = "read") -> Tool:
    return Tool(name, "", {"type": "object"}, lambda: None, effect=effect)


@dataclass
class Played:
    """What came of a script."""

    trace: Trace
    model_calls: int = 0
    ran: list[str] = field(default_factory=list)
    """Names of calls that were really made."""
    told: list[bool] = field(default_factory=list)
    """Whether each model call was told of a repetition."""
    replaced: list[Observation] = field(default_factory=list)
    end: End | None = None

    @property
    def looped(self) -> bool:
        return self.end is not None and self.end.stop_reason == StopReason.STOP_REASON_LOOP_DETECTED


async def play(
    loop: StopLoopInterceptor,
    script: Iterator[Sequence[Step]],
    *,
    effect: Effect = "read",
    obeys: bool = True,
    errors: bool = False,
) -> Played:
    """Do what the engine does with a model that makes these calls; it answers without tools only if it obeys."""
    played = Played(make_trace())
    trace, ids = played.trace, itertools.count()
    for batch in itertools.islice(script, 200):  # a loop that is not ended ends the test
        prompt = prompt_of(trace, tools=[a_tool(name, effect) for name, _, _ in batch])
        assert await loop.on_reason_start(trace, prompt) is None
        played.model_calls += 1
        played.told.append("repeating" in prompt.instructions)
        final = not prompt.tools
        if final and obeys:
            assert prompt.options.tool_choice == "none"
            assert prompt.instructions == EN.last
            answer = response("This is all I know.")
            outcome = await loop.on_reason_end(trace, answer, answer.message, 0.1)
            assert isinstance(outcome, End)
            played.end = outcome
            return played
        asked = [ToolCall(id=f"c{next(ids)}", name=name, args_json=json.dumps(args)) for name, args, _ in batch]
        message = Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(tool_call=call) for call in asked])
        trace.put(trace.reserve(), message)
        assert await loop.on_reason_end(trace, response(), message, 0.1) is None
        del trace.checkpoint.calls[:]
        calls = [call_of(trace, c.id, c.name, c.args_json, a_tool(c.name, effect)) for c in asked]
        ended = await loop.on_action_start(trace, calls)
        if ended is not None:
            assert isinstance(ended, End)
            played.end = ended
            return played
        for call, (name, _, text) in zip(calls, batch, strict=True):
            outcome = await loop.on_tool_call_start(trace, call)
            observation = Observation([ContentPart(text=text)], is_error=errors)
            if outcome is None:
                played.ran.append(name)
            else:
                assert isinstance(outcome, Replace)
                assert isinstance(outcome.value, Observation)
                observation = outcome.value
                played.replaced.append(observation)
            result = ToolResult(call_id=call.id, parts=observation.parts, is_error=observation.is_error)
            part = ContentPart(tool_result=result)
            trace.put(trace.reserve(), Message(role=Role.ROLE_TOOL, parts=[part]))
    return played


def same(name: str = "look", result: str = "nothing") -> Iterator[Sequence[Step]]:
    return itertools.repeat([(name, {"p": "/"}, result)])


async def test_a_repeated_call_is_told_answered_from_before_and_ended() -> None:
    """The steps come in their order: a hint, the result from before, a call without tools, LOOP_DETECTED."""
    played = await play(StopLoopInterceptor(), same())
    assert played.told.index(True) == 3  # after three times
    assert len(played.ran) == 9
    assert len(played.replaced) == 1
    assert played.looped
    assert played.model_calls == 11
    assert played.end is not None
    assert played.end.text == ""  # the model's own answer stays


async def test_a_model_that_calls_tools_without_having_any_is_stopped() -> None:
    """Calls made in the last call run no tool: the run ends with a text that says why."""
    played = await play(StopLoopInterceptor(), same(), obeys=False)
    assert played.looped
    assert played.end is not None
    assert played.end.text == EN.ended
    assert played.model_calls == 11


async def test_a_last_answer_without_words_is_ended_with_some() -> None:
    """A reader always sees something."""
    loop = StopLoopInterceptor(2, 2)
    played = await play(loop, itertools.islice(same(), 4))
    assert await loop.on_reason_start(played.trace, prompt_of(played.trace)) is None
    outcome = await loop.on_reason_end(played.trace, response(), response("  ").message, 0.1)
    assert isinstance(outcome, End)
    assert outcome.text == EN.ended


async def test_what_only_reads_is_answered_from_before_and_says_so() -> None:
    """The model gets the result again with a note, and people a warning beside it."""
    played = await play(StopLoopInterceptor(2, 2), same())
    (observation,) = played.replaced
    assert [part.text for part in observation.parts] == ["nothing", EN.again.format(name="look")]
    assert not observation.is_error
    assert observation.diagnosis is not None
    assert observation.diagnosis.code == CODE


@pytest.mark.parametrize("effect", ["once", "idempotent"])
async def test_what_acts_is_refused_and_never_claimed(effect: Effect) -> None:
    """A second "sent" would be a lie: the call is an error that says it was not run."""
    played = await play(StopLoopInterceptor(2, 2), same(result="sent"), effect=effect)
    (observation,) = played.replaced
    assert observation.is_error
    assert observation.not_done
    assert "sent" not in observation.text
    assert json.loads(observation.text)["error"]["code"] == CODE


async def test_a_call_that_failed_is_made_again_but_counts() -> None:
    """A failure may go away, so it is never answered from before; the run ends all the same."""
    played = await play(StopLoopInterceptor(2, 2), same(), errors=True)
    assert played.replaced == []
    assert played.looped


async def test_what_a_person_decided_is_done() -> None:
    """A call that people have looked at is not taken back."""
    loop = StopLoopInterceptor(2, 2)
    trace = (await play(loop, itertools.islice(same(), 3))).trace
    assert await loop.on_reason_start(trace, prompt_of(trace)) is None
    call = call_of(trace, "approved", "look", '{"p": "/"}', a_tool("look"))
    assert await loop.on_tool_call_start(trace, call) is not None
    trace.checkpoint.questions.add(call_id="approved", index=0, decision=Decision())
    assert await loop.on_tool_call_start(trace, call) is None


async def test_the_same_call_with_other_results_is_progress() -> None:
    """Polling something that moves is no loop."""
    script: Iterator[Sequence[Step]] = ([("check", {}, f"{i} %")] for i in range(100))
    played = await play(StopLoopInterceptor(), script)
    assert played.end is None
    assert played.told.count(True) == 0
    assert len(played.ran) == 100


async def test_keys_in_another_order_are_the_same_call() -> None:
    """What a model writes in another order is still the same."""
    args: list[dict[str, object]] = [{"a": 1, "b": {"x": 1, "y": 2}}, {"b": {"y": 2, "x": 1}, "a": 1}]
    played = await play(StopLoopInterceptor(), ([("look", args[i % 2], "x")] for i in itertools.count()))
    assert played.model_calls == 11


async def test_a_batch_that_grows_by_the_same_call_is_a_loop() -> None:
    """A, AA, AAA: more of the same is nothing new."""
    played = await play(StopLoopInterceptor(), ([("look", {}, "x")] * (i + 1) for i in itertools.count()))
    assert played.looped
    assert played.model_calls == 11


async def test_a_batch_that_grows_by_new_calls_is_progress() -> None:
    """A, AB, ABC: each brings something."""
    script: Iterator[Sequence[Step]] = ([("look", {"n": n}, "x") for n in range(i + 1)] for i in range(30))
    assert (await play(StopLoopInterceptor(), script)).end is None


async def test_a_tool_that_polls_is_allowed_its_number() -> None:
    """Only what goes beyond the allowance counts, and it ends as well."""
    loop = StopLoopInterceptor(2, 2, allow={"check": 20})
    within = await play(loop, itertools.islice(same("check"), 20))
    assert within.end is None
    assert within.told.count(True) == 0
    beyond = await play(loop, same("check"))
    assert beyond.looped
    assert beyond.model_calls == 20 + 2 + 2


async def test_progress_after_a_hint_starts_over() -> None:
    """Something new makes everything before it forgotten."""
    some: Sequence[Step] = [("look", {}, "x")]
    script: list[Sequence[Step]] = [some, some, some, some, [("other", {}, "y")], *[some] * 3]
    played = await play(StopLoopInterceptor(3, 8), iter(script))
    assert played.told == [False, False, False, True, True, False, True, True]
    assert played.end is None


@pytest.mark.parametrize(("repeats", "window"), [(1, 8), (3, 2), (3, 51), (0, 0)])
def test_numbers_out_of_range_are_refused(repeats: int, window: int) -> None:
    """The message says what must hold."""
    with pytest.raises(ValueError, match="repeats <= window"):
        StopLoopInterceptor(repeats, window)


def test_an_allowance_of_nothing_is_refused() -> None:
    """It would make every call a repetition."""
    with pytest.raises(ValueError, match="check"):
        StopLoopInterceptor(allow={"check": 0})


ARGS: st.SearchStrategy[dict[str, object]] = st.fixed_dictionaries({"n": st.integers(0, 3)})
CALLS: st.SearchStrategy[Step] = st.tuples(st.sampled_from("abc"), ARGS, st.sampled_from("xyz"))
ROUNDS = st.lists(CALLS, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    window=st.integers(2, 8),
    prefix=st.lists(ROUNDS, max_size=5),
    effect=st.sampled_from(["read", "once"]),
    obeys=st.booleans(),
)
async def test_every_cycle_is_ended_within_the_bound(
    data: st.DataObject, window: int, prefix: list[list[Step]], effect: Effect, obeys: bool
) -> None:
    """Any cycle of up to ``window`` rounds after any start ends within p + k + window + 2 model calls."""
    cycle = data.draw(st.lists(ROUNDS, min_size=1, max_size=window))
    loop = StopLoopInterceptor(data.draw(st.integers(2, window)), window)
    script: Iterator[Sequence[Step]] = itertools.chain(prefix, itertools.cycle(cycle))
    played = await play(loop, itertools.islice(script, 100), effect=effect, obeys=obeys)
    assert played.looped
    assert played.model_calls <= len(prefix) + len(cycle) + window + 2


@settings(max_examples=60, deadline=None)
@given(data=st.data(), window=st.integers(2, 8), effect=st.sampled_from(["read", "once"]))
async def test_nothing_that_gets_further_is_stopped(data: st.DataObject, window: int, effect: Effect) -> None:
    """With one new call or result in every window, every call is made and the run goes on."""

    def news(number: int) -> Step:
        brings: list[Step] = [("a", {"n": number}, "x"), ("b", {}, f"result {number}")]
        return data.draw(st.sampled_from(brings))

    script: list[list[Step]] = []
    known: list[Step] = []
    for i in range(data.draw(st.integers(1, 8))):
        known.append(news(i))
        script.append([*data.draw(st.lists(st.sampled_from(known), max_size=3)), known[-1]])
        old = st.lists(st.sampled_from(known), min_size=1, max_size=3)
        script += data.draw(st.lists(old, max_size=window - 1))
    played = await play(StopLoopInterceptor(2, window), iter(script), effect=effect)
    assert played.end is None
    assert played.replaced == []
    assert len(played.ran) == sum(map(len, script))
