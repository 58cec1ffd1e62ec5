"""Tools and models that misbehave: each fails its own call or run, typed, and nothing beside it."""

import asyncio
import datetime
import gc
import logging
import sys
from collections.abc import AsyncGenerator, Sequence

import pytest

from dualclaw import ContentPart, Media, Message, Role, RunState, StopReason, Usage
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.model import ModelChunk, ModelRequest, ModelResponse, ModelTraits, TextDelta, ToolSpec
from dualclaw_server.engine.observations import MAX_DETAIL
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import Tool, ToolOutput, ToolRaised, tool

from .conftest import TIMEOUT, Asked, Engine, Opener

END: dict[str, object] = {"when": {"step": 1}, "say": [{"text": "end"}]}


class Unspeakable(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


@tool
async def exits() -> str:
    """Do what a command line program does."""
    sys.exit(3)


@tool
def exits_in_a_thread() -> str:
    """Do the same in a thread."""
    sys.exit(3)


@tool
async def unspeakable() -> str:
    """Raise an error without text."""
    raise Unspeakable


@tool
async def no_parts() -> ToolOutput:
    """Return parts that are none."""
    return ToolOutput(["text"])  # type: ignore[list-item]


@tool
async def a_call_as_part() -> ToolOutput:
    """Return a part that belongs into a model's answer."""
    part = ContentPart()
    part.tool_call.id = "c"
    return ToolOutput([part])


@tool
async def on_day(day: datetime.date) -> str:
    """Need a date, which a schema calls text."""
    return day.isoformat()


@tool(effect="read")
async def sibling() -> str:
    """Do well."""
    return "fine"


async def ask_for(open_engine: Opener, target: Tool, **args: object) -> Asked:
    """Have the model call a tool beside a good one, then end."""
    first: list[dict[str, object]] = [{"call": target.name, "args": args}, {"call": "sibling", "args": {}}]
    engine = await open_engine(Agent("a", tools=[target, sibling]), {"when": {"step": 0}, "say": first}, END)
    return await engine.ask("go")


@pytest.mark.parametrize("target", [exits, exits_in_a_thread, unspeakable, no_parts, a_call_as_part])
async def test_whatever_a_tool_does_fails_its_call_alone(open_engine: Opener, target: Tool) -> None:
    """Exits, errors without text and results that are none: a failed step, a good sibling, a run that goes on."""
    asked = await ask_for(open_engine, target)
    ends = {name: code for _, name, phase, code in asked.steps if phase in ("ok", "fail")}
    assert ends == {target.name: "tool.failed", "sibling": ""}
    assert asked.last.done.content == "end"


async def test_arguments_that_only_the_types_refuse_are_bad_arguments(open_engine: Opener) -> None:
    """A date that is none is told as bad arguments with the schema, and the tool counts as not used."""
    asked = await ask_for(open_engine, on_day, day="someday")
    assert asked.view.process_steps[0].diagnosis.code == "tool.bad_arguments"
    assert "on_day" in asked.view.process_steps[0].diagnosis.hint
    assert list(asked.last.done.used_skills) == ["sibling"]


async def test_no_result_is_too_large_for_a_stream(open_engine: Opener) -> None:
    """Long error texts, many long parts and data in an address: every event stays small."""

    @tool(effect="read")
    async def talks() -> str:
        raise ToolRaised("x" * 1_000_000)

    @tool(effect="read")
    async def many() -> ToolOutput:
        return ToolOutput([ContentPart(text="y" * Limits().max_result)] * 50)

    @tool(effect="read")
    async def data() -> ToolOutput:
        url = "data:image/png;base64," + "A" * 1_000_000
        return ToolOutput([ContentPart(image=Media(media_type="image/png", url=url))])

    names = [talks, many, data]
    calls: list[dict[str, object]] = [{"call": each.name, "args": {}} for each in names]
    engine = await open_engine(Agent("a", tools=names), {"when": {"step": 0}, "say": calls}, END)
    asked = await engine.ask("go")
    failed, cut, image = asked.view.process_steps
    assert len(failed.diagnosis.detail) == MAX_DETAIL
    assert Limits().max_result <= len(cut.result) <= Limits().max_result + 100
    assert cut.diagnosis.code == "result.truncated"
    assert image.result == "[image/png]"


async def test_a_tool_left_behind_that_fails_later_leaves_no_noise(
    open_engine: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """A tool that outlives its timeout and then raises: its error is nobody's, and asyncio does not complain."""
    over = asyncio.Event()

    @tool(effect="read", timeout=0.05)
    async def lingers() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(1.2)
            over.set()
        raise ValueError("too late")

    asked = await ask_for(open_engine, lingers)
    assert asked.view.process_steps[0].diagnosis.code == "tool.timeout"
    with caplog.at_level(logging.ERROR, "asyncio"):
        await asyncio.wait_for(over.wait(), TIMEOUT)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


# Models


class OddModel:
    """A model whose stream the test writes."""

    name = "odd"
    traits = ModelTraits()

    def __init__(self, *chunks: ModelChunk | BaseException) -> None:
        self._chunks = chunks

    def with_tools(self, tools: Sequence[ToolSpec]) -> "OddModel":
        raise ValueError("this model takes no tools")

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        for chunk in self._chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    async def generate(self, request: ModelRequest) -> ModelResponse:
        raise NotImplementedError

    async def aclose(self) -> None:
        return None


def response(*parts: ContentPart) -> ModelResponse:
    return ModelResponse(Message(role=Role.ROLE_ASSISTANT, parts=parts), "stop", Usage())


async def ask_model(store: RunStore, agent: Agent) -> tuple[Asked, list[Message]]:
    engine = Engine(store, [agent], [END])
    serve = asyncio.create_task(engine.runner.serve())
    try:
        asked = await engine.ask("go")
        return asked, await engine.messages(asked.conversation_id)
    finally:
        await engine.runner.drain(0)
        await asyncio.wait({serve}, timeout=5)


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ([], "model.bad_response"),
        ([TextDelta("half")], "model.bad_response"),
        ([response()], "model.bad_response"),
        ([TextDelta("half"), ValueError("a bug")], "internal"),
        ([TextDelta("half"), asyncio.CancelledError()], "internal"),
    ],
    ids=["nothing", "no end", "empty answer", "a bug", "a cancellation of its own"],
)
async def test_whatever_a_model_does_ends_the_run(
    store: RunStore, chunks: Sequence[ModelChunk | BaseException], code: str
) -> None:
    """A run ends FAILED with a typed error, never as a blank success, and its turn is closed by the agent."""
    asked, messages = await ask_model(store, Agent("a", models=[OddModel(*chunks)]))
    assert asked.last.error.diagnosis.code == code
    assert (await store.head(asked.key)).state == RunState.RUN_STATE_FAILED
    assert [message.role for message in messages] == [Role.ROLE_USER, Role.ROLE_ASSISTANT]


async def test_a_model_that_refuses_the_tools_fails_the_run(store: RunStore) -> None:
    """The run ends with an error instead of being put back and taken up again for ever."""
    asked, _ = await ask_model(store, Agent("a", models=[OddModel()], tools=[sibling]))
    assert asked.last.error.diagnosis.code == "internal"


async def test_an_answer_given_before_the_tools_is_an_answer(open_engine: Opener) -> None:
    """A model that adds nothing after its tools has answered before them; the turn is closed all the same."""
    engine = await open_engine(
        Agent("a", tools=[sibling]),
        {"when": {"step": 0}, "say": [{"text": "All is well."}, {"call": "sibling", "args": {}}]},
        {"when": {"step": 1}, "say": [{"usage": {"input_tokens": 1}}]},
    )
    asked = await engine.ask("go")
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED
    assert asked.last.done.content == "All is well."
    assert (await engine.messages(asked.conversation_id))[-1].role == Role.ROLE_ASSISTANT
