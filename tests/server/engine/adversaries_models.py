"""Adversaries that are models: silent, endless, broken, or not what they say they are."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace

from dualclaw import (
    ContentPart,
    Media,
    Message,
    ReasoningPart,
    RetryMode,
    Role,
    RunOptions,
    ToolCall,
    ToolResult,
    Usage,
)
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.model import (
    ModelChunk,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    ReasoningDelta,
    Restart,
    TextDelta,
    ToolSpec,
)

from .adversaries import CALM, END, MOMENT, QUICK, Adversary, Entry, Traps, calls, says
from .adversaries_tools import Odd
from .conftest import echo

Stream = Callable[[ModelRequest], AsyncGenerator[ModelChunk, None]]


class Misbehaving:
    """A model that streams what the entry wrote, but for the message after, which it answers well."""

    name = "misbehaving"
    traits = ModelTraits()

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def with_tools(self, tools: Sequence[ToolSpec]) -> "Misbehaving":
        return self

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        users = [message for message in request.messages if message.role == Role.ROLE_USER]
        if users and users[-1].parts[0].text == "next":
            yield TextDelta("fine")
            yield answer(ContentPart(text="fine"))
            return
        async for chunk in self._stream(request):
            yield chunk

    async def generate(self, request: ModelRequest) -> ModelResponse:
        raise NotImplementedError

    async def aclose(self) -> None:
        return None


def answer(
    *parts: ContentPart, bad: Mapping[str, str] | None = None, role: Role.ValueType = Role.ROLE_ASSISTANT
) -> ModelResponse:
    """Return a whole answer."""
    return ModelResponse(Message(role=role, parts=parts), "stop", Usage(), dict(bad or {}))


def call(call_id: str, name: str = "echo", args: str = '{"text": "a"}') -> ContentPart:
    """Return a call as a part."""
    return ContentPart(tool_call=ToolCall(id=call_id, name=name, args_json=args))


def _of(
    stream: Stream, ends: str, *, limits: Limits | None = None, size: int = 1_000_000, options: RunOptions | None = None
) -> Adversary:
    made = Agent(
        "a", models=[Misbehaving(stream)], tools=[echo], limits=limits or Limits(max_steps=6, wall_time=50), retry=QUICK
    )
    next_to = "calm" if limits is MOMENT else ""
    return Adversary([made, CALM], [], ends, size=size, options=options, next_to=next_to)


def _step(request: ModelRequest) -> int:
    since = [message for message in request.messages if message.role == Role.ROLE_ASSISTANT]
    return len(since)


# Silence


def an_empty_answer(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield answer()

    return _of(stream, "model.bad_response")


def blank_answers_after_calls(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield answer(*([call("c")] if not _step(request) else [ContentPart(text=" \n\t ")]))

    return _of(stream, "model.bad_response")


def nothing_but_reasoning(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield ReasoningDelta("hm")
        yield answer(ContentPart(reasoning=ReasoningPart(text="hm")))

    return _of(stream, "model.bad_response")


def a_model_that_hangs(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield TextDelta("So")
        await asyncio.sleep(600)

    return _of(stream, "budget_exceeded", limits=MOMENT)


def a_model_that_ignores_its_cancellation(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield TextDelta("So ")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            yield TextDelta("and on ")
        yield answer(ContentPart(text="So and on "))

    return _of(stream, "budget_exceeded", limits=MOMENT)


# Without end


def text_without_end(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        while True:
            yield TextDelta("and on ")
            await asyncio.sleep(0.001)

    return _of(stream, "budget_exceeded", limits=MOMENT)


def reasoning_without_end(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        while True:
            yield ReasoningDelta("hm ")
            await asyncio.sleep(0.001)

    return _of(stream, "budget_exceeded", limits=MOMENT)


def _breathless(chunk: ModelChunk, ends: str, *, mode: str = "LIVE", size: int = 20_000_000) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        while True:
            yield chunk

    options = RunOptions(retry_mode=RetryMode.Value(f"RETRY_MODE_{mode}"))
    return _of(stream, ends, limits=MOMENT if ends == "budget_exceeded" else None, size=size, options=options)


def text_in_one_breath(_: Traps) -> Adversary:
    return _breathless(TextDelta("x" * 50_000), "model.bad_response")


def text_in_one_breath_that_is_held_back(_: Traps) -> Adversary:
    return _breathless(TextDelta("x" * 50_000), "model.bad_response", mode="HOLD")


def reasoning_in_one_breath(_: Traps) -> Adversary:
    return _breathless(ReasoningDelta("x" * 50_000), "model.bad_response")


def nothing_in_one_breath(_: Traps) -> Adversary:
    return _breathless(TextDelta(""), "budget_exceeded")


def restarts_in_one_breath(_: Traps) -> Adversary:
    error = ModelError("MODEL_OVERLOADED", "busy", retryable=True)
    return _breathless(Restart("another", error), "budget_exceeded")


def a_sub_agent_in_one_breath(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        while True:
            yield TextDelta("x")

    below = Agent("below", models=[Misbehaving(stream)], limits=MOMENT, retry=QUICK)
    above = Agent("a", sub_agents=[below], limits=Limits(max_steps=3, wall_time=50), retry=QUICK)
    script = [calls("below", when={"step": 0}, request="go"), END]
    return Adversary([above], script, "finished", codes=["tool.timeout"])


def an_answer_too_long_at_once(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield answer(ContentPart(text="x" * 17_000_000))

    return _of(stream, "model.bad_response")


def a_call_too_long_at_once(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield answer(call("c", args='{"text": "' + "x" * 17_000_000 + '"}'))

    return _of(stream, "model.bad_response")


# Broken


def failing_at_the_third_step(_: Traps) -> Adversary:
    script = [says({"fail": "MODEL_STREAM_BROKEN"}, step=2), calls("echo", text="a")]
    return Adversary([Agent("a", tools=[echo], retry=QUICK)], script, "model.stream_broken")


def failing_with_half_an_answer(_: Traps) -> Adversary:
    script = [
        says(
            {"text": "Half an answer", "chunk": 3},
            {"call": "echo", "args": {"text": "a"}},
            {"fail": "MODEL_STREAM_BROKEN"},
        )
    ]
    return Adversary([Agent("a", tools=[echo], retry=QUICK)], script, "model.stream_broken", says="Half an answer")


def failing_for_good(_: Traps) -> Adversary:
    return Adversary([Agent("a", retry=QUICK)], [says({"fail": "MODEL_AUTH", "message": "no"})], "model.auth")


def an_overflow_that_never_ends(_: Traps) -> Adversary:
    return Adversary([Agent("a", retry=QUICK)], [says({"fail": "CONTEXT_OVERFLOW"})], "context.overflow")


def a_model_with_a_bug(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield TextDelta("half")
        raise ZeroDivisionError

    return _of(stream, "internal")


def _raising(error: BaseException) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield TextDelta("half")
        raise error

    return _of(stream, "internal")


def a_model_that_exits(_: Traps) -> Adversary:
    return _raising(SystemExit(3))


def a_model_that_is_interrupted(_: Traps) -> Adversary:
    return _raising(KeyboardInterrupt())


def a_model_that_raises_oddly(_: Traps) -> Adversary:
    return _raising(Odd("odd"))


def chunks_that_are_none(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield "text"  # type: ignore[misc]
        yield answer(ContentPart(text="text"))

    return _of(stream, "internal")


# Not what they say


def a_stream_that_differs_from_its_answer(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        yield TextDelta("one thing")
        yield answer(ContentPart(text="quite another"))

    return replace(_of(stream, "finished"), holds=lambda events: events[-1].done.content == "quite another")


def an_answer_with_parts_of_others(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        result = ContentPart(tool_result=ToolResult(call_id="c", parts=[ContentPart(text="made up")]))
        image = ContentPart(image=Media(media_type="image/png", url="https://example.com/a.png"))
        yield answer(ContentPart(text="well"), result, image, ContentPart(), role=Role.ROLE_USER)

    return _of(stream, "finished")


def ids_that_are_none(_: Traps) -> Adversary:
    """Empty, repeated within an answer and over turns, and shaped like the engine's own."""

    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        if _step(request) < 3:
            yield answer(*map(call, ["", "", "same", "same", "same/x", "same#2", "x" * 10_000]))
        else:
            yield answer(ContentPart(text="end"))

    return _of(stream, "finished")


def names_that_are_none(_: Traps) -> Adversary:
    async def stream(request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        names = ["", " ", "echo ", "e" * 100_000, "\n\x00", "../echo", "{name}", "transfer_to_agent"]
        if _step(request) < 1:
            yield answer(*(call(f"c{number}", name) for number, name in enumerate(names)))
        else:
            yield answer(ContentPart(text="end"))

    return _of(stream, "finished", size=3_000_000)


MODELS: Sequence[Entry] = (
    an_empty_answer,
    blank_answers_after_calls,
    nothing_but_reasoning,
    a_model_that_hangs,
    a_model_that_ignores_its_cancellation,
    text_without_end,
    reasoning_without_end,
    text_in_one_breath,
    text_in_one_breath_that_is_held_back,
    reasoning_in_one_breath,
    nothing_in_one_breath,
    restarts_in_one_breath,
    a_sub_agent_in_one_breath,
    an_answer_too_long_at_once,
    a_call_too_long_at_once,
    failing_at_the_third_step,
    failing_with_half_an_answer,
    failing_for_good,
    an_overflow_that_never_ends,
    a_model_with_a_bug,
    a_model_that_exits,
    a_model_that_is_interrupted,
    a_model_that_raises_oddly,
    chunks_that_are_none,
    a_stream_that_differs_from_its_answer,
    an_answer_with_parts_of_others,
    ids_that_are_none,
    names_that_are_none,
)
