"""The local model itself. What it says is nobody's business here: only that it works as a model must."""

import asyncio
import json
from contextlib import aclosing

import pytest

from dualclaw import ContentPart, Message, Role
from dualclaw_server.engine.model import ModelOptions, ModelRequest, ModelResponse, TextDelta
from dualclaw_server.models import RouterModel, model_from_spec
from dualclaw_server.models.local.model import CONTEXT, EXAMPLES, LocalModel
from dualclaw_server.tools.assistant import calculate, current_time
from tests.server.models.conftest import play

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TOOLS = [calculate.spec, current_time.spec]
SHORT = ModelOptions(max_output_tokens=24)


def says(role: "Role.ValueType", text: str) -> Message:
    return Message(role=role, parts=[ContentPart(text=text)])


def asking(*questions: str, options: ModelOptions = SHORT) -> ModelRequest:
    """A conversation of these questions, each but the last one answered."""
    messages: list[Message] = []
    for question in questions[:-1]:
        messages += [says(Role.ROLE_USER, question), says(Role.ROLE_ASSISTANT, "Yes.")]
    return ModelRequest([*messages, says(Role.ROLE_USER, questions[-1])], "Be brief.", options)


async def test_an_arithmetic_question_gives_a_call_of_the_calculator(local: LocalModel) -> None:
    """The demo's question: one runnable call with arguments that fit, usage, and the name of the model."""
    outcome = await play(local.with_tools(TOOLS), asking("What is 17 * 23?", options=ModelOptions()), within=240)
    assert outcome.error is None
    assert outcome.response is not None
    assert outcome.response.finish_reason == "tool_calls"
    ((_, name, arguments),) = outcome.calls
    assert name == "calculate"
    assert json.loads(arguments).keys() == {"expression"}
    assert outcome.response.usage.input_tokens > 0
    assert outcome.response.usage.output_tokens > 0
    assert outcome.response.model == "SmolLM2-135M-Instruct"


async def test_without_tools_it_streams_text(local: LocalModel) -> None:
    """In several pieces that make up the message, bounded by the tokens it may have."""
    outcome = await play(local, asking("Tell me about the sea."), within=240)
    assert outcome.response is not None, outcome.error
    assert len(outcome.deltas) > 1
    assert outcome.text == outcome.response.message.parts[0].text
    assert outcome.response.usage.output_tokens <= 24


async def test_it_must_call_when_told_so(local: LocalModel) -> None:
    """A tool choice is held to by the grammar, whatever is asked."""
    options = ModelOptions(tool_choice="current_time")
    response = await local.with_tools(TOOLS).generate(asking("Hello!", options=options))
    assert [part.tool_call.name for part in response.message.parts] == ["current_time"]


async def test_a_conversation_never_becomes_too_long(local: LocalModel) -> None:
    """Older questions are left out when they do not fit; the one at hand alone may be too long, and is said to be."""
    long = "far " * CONTEXT
    outcome = await play(local, asking(long, "And now?"), within=240)
    assert outcome.response is not None, outcome.error
    assert outcome.response.usage.input_tokens < CONTEXT
    outcome = await play(local, asking("Hello", long), within=240)
    assert outcome.error is not None
    assert outcome.error.reason == "CONTEXT_OVERFLOW"


async def test_leaving_ends_the_answer_and_frees_the_place(local: LocalModel) -> None:
    """More calls are broken off than it has places, then one is answered; the others' rest is not waited for."""
    endless = asking("Count from 1 to 1000.", options=ModelOptions(max_output_tokens=1_000))
    for _ in range(3):
        async with aclosing(local.stream(endless)) as chunks:
            assert isinstance(await anext(chunks), TextDelta)
    assert (await play(local, asking("Hello!"), within=240)).response is not None


async def test_more_calls_than_places_are_all_answered(local: LocalModel) -> None:
    """They wait for their turn."""
    outcomes = await asyncio.gather(*[play(local, asking(f"Say {number}."), within=280) for number in range(4)])
    assert all(isinstance(outcome.response, ModelResponse) for outcome in outcomes)


async def test_the_loop_is_free_while_it_loads_and_answers(local: LocalModel) -> None:
    """Health checks and other runs go on: a task that only yields runs many times meanwhile."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    model = LocalModel()
    try:
        await asyncio.wait_for(model.generate(asking("Hi", options=ModelOptions(max_output_tokens=4))), 240)
    finally:
        turning.cancel()
        await model.aclose()
    assert turns > 100


async def test_the_setting_local_is_this_model(local: LocalModel) -> None:
    """Guarded and counted like any vendor's, and what it says of itself leaves room for its examples."""
    made = model_from_spec("local", context_window=2_000)
    try:
        assert isinstance(made, RouterModel)
        assert made.name == "local"
        assert made.traits.context_window == 2_000
        assert made.traits.native_tools
        assert not made.traits.images
    finally:
        await made.aclose()
    assert local.traits.context_window == CONTEXT - EXAMPLES
    both = model_from_spec("auto,scripted".replace("auto", "local"))
    assert both.name == "local,scripted-assistant"
    await both.aclose()


@pytest.mark.parametrize("spec", ["local:smol", "local+json:x", "LOCAL:"])
async def test_there_is_one_local_model_and_no_name_for_others(spec: str) -> None:
    """A name behind it is refused at the start, saying what is meant."""
    with pytest.raises(ValueError, match="local"):
        model_from_spec(spec)
