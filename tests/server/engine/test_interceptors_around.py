"""What stands around models and tools: called again, left out when it fails, and no place where things get lost."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from dualclaw import ContentPart, Message, Role, Usage
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.chain import Chain
from dualclaw_server.engine.checkpoint import Checkpoint, RunRecord
from dualclaw_server.engine.interceptor import (
    AnswerNext,
    Interceptor,
    ModelCall,
    ModelNext,
    Observation,
    Prompt,
    ToolNext,
    ToolRequest,
)
from dualclaw_server.engine.model import (
    ModelChunk,
    ModelError,
    ModelOptions,
    ModelRequest,
    ModelResponse,
    TextDelta,
)
from dualclaw_server.engine.outcome import Ask, Outcome, Replace, Suspend
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.engine.store import RunKey
from dualclaw_server.engine.tool import ToolContext, tool
from dualclaw_server.engine.trace import Trace

from .conftest import Asked, Opener, turn
from .probes import Log, probe, resume

ONE_CALL = (turn(0, {"call": "echo", "id": "c", "args": {"text": "hi"}}), turn(1, {"text": "Done."}))
HELLO = turn(0, {"text": "Hello, world", "chunk": 3})
AT_ONCE = RetryPolicy(first_delay=0.001, max_delay=0.001)


def payloads(asked: Asked) -> list[str]:
    return [str(event.WhichOneof("payload")) for event in asked.events]


class Twice(Interceptor):
    """Runs everything further in a second time."""

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        await call_next(replace(request, attempt=1))
        return await call_next(replace(request, attempt=2))


class Cleans(Interceptor):
    """The innermost: what it lets through is in capitals."""

    attempts: list[int]

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        self.attempts = [*getattr(self, "attempts", []), request.attempt]
        return Observation([ContentPart(text=(await call_next(request)).text.upper())])


async def test_calling_next_again_runs_the_inner_layers_again(open_engine: Opener) -> None:
    """A retry around a sanitizer gets clean text each time, and the tool has run as often."""
    runs: list[int] = []

    @tool(name="echo", effect="read")
    async def counting(text: str) -> str:
        runs.append(1)
        return text

    cleans = Cleans(order=1)
    engine = await open_engine(Agent("a", tools=[counting], interceptors=[Twice(), cleans]), *ONE_CALL)
    asked = await engine.ask("go")
    assert (len(runs), cleans.attempts) == (2, [1, 2])
    assert asked.last.done.process_steps[0].result == "HI"


class Breaks(Interceptor):
    """Fails around a tool, before or after it has run."""

    after = False

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        if self.after:
            await call_next(request)
        raise LookupError("oh")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("closed", [False, True])
async def test_a_failure_around_a_tool(open_engine: Opener, after: bool, closed: bool) -> None:
    """Failing open costs nothing and the tool runs once; failing closed lets no result pass, whenever it fails."""
    runs: list[int] = []

    @tool(name="echo", effect="once")
    async def counting(text: str) -> str:
        runs.append(1)
        return text

    item = Breaks(fail_closed=closed)
    item.after = after
    engine = await open_engine(Agent("a", tools=[counting], interceptors=[item]), *ONE_CALL)
    step = (await engine.ask("go")).last.done.process_steps[0]
    assert len(runs) == (0 if closed and not after else 1)
    assert step.diagnosis.code == ("tool.failed" if closed else "")
    assert (step.result == "hi") is not closed


async def test_failures_further_in_are_not_held_against_others(
    open_engine: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """A model's error and an inner guard's failure pass through an outer guard without being called its own."""

    class Around(Interceptor):
        guard = True

        async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
            async for chunk in call_next(call):
                yield chunk

    class Inner(Around):
        async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
            raise LookupError("oh")
            yield TextDelta("")

    engine = await open_engine(Agent("a", interceptors=[Around(), Inner(order=1)]), HELLO)
    assert "Interceptor inner failed" in (await engine.ask("go")).last.error.message
    engine = await open_engine(Agent("a", interceptors=[Around()]), turn(0, {"fail": "MODEL_AUTH"}))
    assert (await engine.ask("go")).last.error.diagnosis.code == "model.auth"
    assert not [record for record in caplog.records if "interceptor around failed" in record.getMessage()]


class Swallows(Interceptor):
    """Makes an observation of whatever is raised."""

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        try:
            return await call_next(request)
        except Exception as error:
            return Observation([ContentPart(text=f"swallowed {error}")])


async def test_a_question_of_a_tool_cannot_be_swallowed(open_engine: Opener) -> None:
    """Code that catches everything around a tool that asks people does not keep them from being asked."""

    @tool(name="echo", effect="once")
    async def asking(text: str, context: ToolContext) -> str:
        if not context.trace.questions:
            raise Suspend(Ask("Really?"))
        return text

    engine = await open_engine(Agent("a", tools=[asking], interceptors=[Swallows()]), *ONE_CALL)
    asked = await engine.ask("go")
    assert [item.prompt for item in asked.events[-2].interrupt.items] == ["Really?"]
    assert (await resume(engine, asked)).last.done.process_steps[-1].result == "hi"


async def test_a_tool_may_raise_what_replaces_its_result(open_engine: Opener) -> None:
    """Replace raised in a tool is its result, as data or as a whole observation; what is neither fails the call."""
    values: list[object] = [{"a": 1}, Observation([ContentPart(text="whole")]), object()]

    @tool(name="echo", effect="read")
    async def replacing(text: str) -> str:
        raise Replace(values.pop(0))

    engine = await open_engine(Agent("a", tools=[replacing]), *ONE_CALL)
    steps = [(await engine.ask("go")).last.done.process_steps[0] for _ in range(3)]
    assert [step.result for step in steps[:2]] == ['{"a": 1}', "whole"]
    assert steps[2].diagnosis.code == "tool.failed"


class Stumbles(Interceptor):
    """Fails in the middle of an answer, or once it is through."""

    at = 2

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        number = 0
        async for chunk in call_next(call):
            if number == self.at:
                raise LookupError("oh")
            number += 1
            if not isinstance(chunk, ModelResponse):
                yield chunk
        raise LookupError("late")


@pytest.mark.parametrize("at", [0, 1, 2, 99])
async def test_a_stream_goes_on_without_what_failed_around_it(open_engine: Opener, at: int) -> None:
    """Failing open costs no text and shows none twice; the model is asked anew only when its answer was not whole."""
    log = Log()
    item = Stumbles()
    item.at = at
    engine = await open_engine(Agent("a", interceptors=[item, probe("intercept_stream")(log, order=1)]), HELLO)
    asked = await engine.ask("go")
    assert len(log.entries) == (1 if at == 99 else 2)
    assert asked.last.done.content == "Hello, world"
    assert "rewind" not in payloads(asked)
    assert "".join(event.delta.content for event in asked.events) == "Hello, world"


class Cached(Interceptor):
    """Answers instead of the model, without a delta."""

    def __init__(self, text: str, first: str = "") -> None:
        super().__init__()
        self.text = text
        self.first = first

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        if self.first:
            yield TextDelta(self.first)
        yield ModelResponse(Message(parts=[ContentPart(text=self.text)]), "stop", Usage())


@pytest.mark.parametrize(("first", "rewinds"), [("", 0), ("Kept", 0), ("Kept answer.", 0), ("Something else", 1)])
async def test_the_response_is_the_answer(open_engine: Opener, first: str, rewinds: int) -> None:
    """What the deltas lacked is added, what they had wrong is withdrawn once; shown and saved are the same."""
    engine = await open_engine(Agent("a", interceptors=[Cached("Kept answer.", first)]), HELLO)
    asked = await engine.ask("go")
    assert asked.last.done.content == "Kept answer."
    assert payloads(asked).count("rewind") == rewinds
    assert (await engine.messages(asked.conversation_id))[-1].parts[0].text == "Kept answer."


class NoChunks(Interceptor):
    """Yields what is no part of an answer, or nothing at all."""

    bad: object = None

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        if self.bad is not None:
            yield self.bad  # type: ignore[misc]


@pytest.mark.parametrize("bad", [None, "text"])
@pytest.mark.parametrize("closed", [False, True])
async def test_what_is_no_stream_is_a_failure(open_engine: Opener, bad: object, closed: bool) -> None:
    """An answer without its end, or made of something else, is the interceptor's fault and is called so."""
    item = NoChunks(fail_closed=closed)
    item.bad = bad
    engine = await open_engine(Agent("a", interceptors=[item]), HELLO)
    last = (await engine.ask("go")).last
    if closed:
        assert last.error.message == "Interceptor no_chunks failed in intercept_stream: TypeError."
    else:
        assert last.done.content == "Hello, world"


async def test_calls_that_do_not_stream_pass_the_stream_hook_too(open_engine: Opener) -> None:
    """Without intercept_call of its own an interceptor sees them through intercept_stream, and may change them."""

    class Shouts(Interceptor):
        async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
            async for chunk in call_next(call):
                if isinstance(chunk, ModelResponse) and chunk.message.parts[0].text:
                    chunk.message.parts[0].text = chunk.message.parts[0].text.upper()
                yield chunk

    class Own(Interceptor):
        async def intercept_call(self, call: ModelCall, call_next: AnswerNext) -> ModelResponse:
            response = await call_next(call)
            response.message.parts[0].text += "!"
            return response

    @tool(name="echo", effect="read")
    async def aside(text: str, context: ToolContext) -> str:
        question = Message(role=Role.ROLE_USER, parts=[ContentPart(text="aside")])
        return (await context.trace.ask(ModelRequest([question]))).message.parts[0].text

    script = ({"when": {"user": "^aside$"}, "say": [{"text": "psst"}]}, *ONE_CALL)
    engine = await open_engine(Agent("a", tools=[aside], interceptors=[Shouts(), Own(order=1)]), *script)
    asked = await engine.ask("go")
    assert asked.last.done.process_steps[0].result == "PSST!"
    assert asked.last.done.content == "DONE."


async def test_what_prepare_adds_holds_for_one_attempt(open_engine: Opener) -> None:
    """System text added while an attempt is built is there once in each, not piled up over attempts and calls."""
    seen: list[str] = []

    class Adds(Interceptor):
        async def on_prepare(self, trace: Trace, options: ModelOptions, prompt: Prompt) -> Outcome | None:
            prompt.instructions += " Be brief."
            return None

        async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
            seen.append(call.request.instructions)
            if len(seen) < 3:
                raise ModelError("MODEL_OVERLOADED", "Busy.", retryable=True)
            async for chunk in call_next(call):
                yield chunk

    agent = Agent("a", instructions="Help.", interceptors=[Adds()], retry=AT_ONCE)
    engine = await open_engine(agent, HELLO)
    await engine.ask("go")
    assert seen == ["Help. Be brief."] * 3


async def test_a_retry_hook_may_change_the_prompt(open_engine: Opener) -> None:
    """True means assemble again, also after an error that is not transient; False leaves it as final as it was."""
    errors: list[tuple[str, int]] = []

    class Shortens(Interceptor):
        async def on_reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
            errors.append((error.reason, attempt))
            if trace.user_text == "give up":
                return False
            prompt.instructions = "short"
            return True

    script = ({"when": {"system": "short"}, "say": [{"text": "It fits."}]}, turn(0, {"fail": "CONTEXT_OVERFLOW"}))
    engine = await open_engine(Agent("a", instructions="long", interceptors=[Shortens()], retry=AT_ONCE), *script)
    assert (await engine.ask("go")).last.done.content == "It fits."
    assert errors == [("CONTEXT_OVERFLOW", 1)]
    assert (await engine.ask("give up")).last.error.diagnosis.code == "context.overflow"


class Hangs(Interceptor):
    """Never comes to the end of its end hooks, even when it is cancelled."""

    def __init__(self, release: asyncio.Event, *, fail_closed: bool = False) -> None:
        super().__init__(fail_closed=fail_closed)
        self.release = release

    async def on_agent_end(self, trace: Trace) -> None:
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                continue


@pytest.mark.parametrize("closed", [False, True])
async def test_an_end_hook_that_hangs_is_left_behind(closed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Past its grace it has failed, whatever it does about its cancellation, and the others still have their turn."""
    ended: list[str] = []
    release = asyncio.Event()

    class Ends(Interceptor):
        async def on_agent_end(self, trace: Trace) -> None:
            ended.append(self.name)

    items = [Ends(name="outer"), Hangs(release, fail_closed=closed), Ends(name="inner")]
    chain = Chain(items, grace=0.02)
    trace = Trace(RunKey("t", "r"), RunRecord(), Checkpoint(), (), ())
    await chain.agent_start(trace)
    with caplog.at_level(logging.ERROR):
        wanted = await asyncio.wait_for(chain.agent_end(trace), 10)
    assert ended == ["inner", "outer"]
    assert (wanted is not None) is closed
    assert "is left behind" in caplog.text
    release.set()
    await asyncio.sleep(0)
