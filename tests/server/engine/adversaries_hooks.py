"""Adversaries that are interceptors: hooks that raise, hang, lie, or never have enough."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from dualclaw import ContentPart, Message, ToolCall
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import (
    HOOKS,
    Interceptor,
    ModelCall,
    ModelNext,
    Observation,
    Prompt,
    RunConfig,
    ToolNext,
    ToolRequest,
)
from dualclaw_server.engine.model import ModelChunk, ModelError, ModelResponse, Restart, TextDelta
from dualclaw_server.engine.outcome import Ask, End, Outcome, Replace, Suspend
from dualclaw_server.engine.tool import tool
from dualclaw_server.engine.trace import Trace

from .adversaries import CALM, END, LEAK, MOMENT, Adversary, Entry, Traps, agent, calls, says
from .adversaries_tools import Odd
from .conftest import echo

ONE_CALL: Sequence[Mapping[str, object]] = (calls("echo", when={"step": 0}, text="a"), END)
NEW_HOOKS = [hook for hook in HOOKS if hook not in ("on_thought", "on_action", "on_observation", "before_agent")]


def everywhere(error: BaseException, hooks: Sequence[str], *, fail_closed: bool = False) -> Interceptor:
    """Return an interceptor that raises in these hooks."""

    async def raises(*_: object) -> None:
        raise error

    async def raises_streaming(*_: object) -> AsyncGenerator[ModelChunk, None]:
        for chunk in list[ModelChunk]():
            yield chunk
        raise error

    made = {hook: raises_streaming if hook == "intercept_stream" else raises for hook in hooks}
    return type("Raises", (Interceptor,), made)(fail_closed=fail_closed)  # type: ignore[no-any-return]


def hanging(hook: str) -> Entry:
    """Return an entry whose interceptor hangs in a hook until the wall time ends it."""

    async def hangs(*_: object) -> None:
        await asyncio.sleep(600)

    async def hangs_streaming(*_: object) -> AsyncGenerator[ModelChunk, None]:
        await asyncio.sleep(600)
        yield TextDelta("")

    def entry(_: Traps) -> Adversary:
        item = type("Hangs", (Interceptor,), {hook: hangs_streaming if hook == "intercept_stream" else hangs})()
        made = [agent(echo, guards=[item], limits=MOMENT), CALM]
        return Adversary(made, ONE_CALL, "budget_exceeded", next_to="calm")

    entry.__name__ = f"hanging_in_{hook}"
    return entry


def raising_in_every_hook(_: Traps) -> Adversary:
    return Adversary([agent(echo, guards=[everywhere(ValueError("no"), NEW_HOOKS)])], ONE_CALL, "finished", says="end")


def exiting_in_every_hook(_: Traps) -> Adversary:
    return Adversary([agent(echo, guards=[everywhere(SystemExit(3), NEW_HOOKS)])], ONE_CALL, "finished", says="end")


def cancelling_in_every_hook(_: Traps) -> Adversary:
    item = everywhere(asyncio.CancelledError(), NEW_HOOKS)
    return Adversary([agent(echo, guards=[item])], ONE_CALL, "finished", says="end")


def exiting_before_the_agent(_: Traps) -> Adversary:
    item = everywhere(SystemExit(3), ["before_agent"])
    return Adversary([agent(echo, guards=[item])], ONE_CALL, "internal", after="internal")


def raising_oddly_around_the_tool(_: Traps) -> Adversary:
    item = everywhere(Odd("odd"), ["intercept_tool", "on_tool_call_start", "on_tool_call_end"])
    return Adversary([agent(echo, guards=[item])], ONE_CALL, "finished")


def a_guard_that_raises_around_the_tool(_: Traps) -> Adversary:
    item = everywhere(ValueError("no"), ["intercept_tool"], fail_closed=True)
    return Adversary([agent(echo, guards=[item])], ONE_CALL, "finished", codes=["tool.failed"])


def a_guard_that_exits_around_the_model(_: Traps) -> Adversary:
    item = everywhere(SystemExit(3), ["intercept_stream"], fail_closed=True)
    return Adversary([agent(echo, guards=[item])], ONE_CALL, "internal", after="internal")


def wanting_nonsense_everywhere(_: Traps) -> Adversary:
    async def nonsense(*_: object) -> object:
        return Replace(object())

    async def nonsense_streaming(*_: object) -> AsyncGenerator[object, None]:
        yield "nonsense"

    hooks = {hook: nonsense_streaming if hook == "intercept_stream" else nonsense for hook in NEW_HOOKS}
    del hooks["on_reason_retry"]  # anything is an answer there
    item = type("Nonsense", (Interceptor,), hooks)()
    return Adversary([agent(echo, guards=[item])], ONE_CALL, "finished", says="end")


def ending_at_every_moment(_: Traps) -> Adversary:
    async def ends(*_: object) -> Outcome:
        return End("enough", "budget_exceeded")

    item = type("Ends", (Interceptor,), dict.fromkeys(["on_reason_end", "on_action_end", "on_tool_call_end"], ends))()
    return Adversary([agent(echo, guards=[item])], ONE_CALL, "budget_exceeded", after="budget_exceeded")


class Masks(Interceptor):
    """Fails to mask, one way or another."""

    def mask(self, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(value)
        return [value]


def a_mask_that_fails(_: Traps) -> Adversary:
    script = [calls("echo", when={"step": 0}, txet=LEAK), END]

    class Hides(Masks):
        async def on_tool_call_end(
            self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
        ) -> Outcome | None:
            return Replace(Observation([ContentPart(text="hidden")]))

    return Adversary([agent(echo, guards=[Hides()])], script, "finished")


class Calls(Interceptor):
    """Makes a call of every answer."""

    async def on_reason_end(self, trace: Trace, response: ModelResponse, message: Message, duration: float) -> Outcome:
        call = ToolCall(id="again", name="echo", args_json='{"text": "a"}')
        return Replace(Message(parts=[ContentPart(text="More."), ContentPart(tool_call=call)]))


def calls_out_of_every_answer(_: Traps) -> Adversary:
    return Adversary([agent(echo, guards=[Calls()])], [END], "step_limit", after="step_limit")


class Retries(Interceptor):
    """Always thinks that another attempt will do."""

    async def on_reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
        return True


def always_another_attempt(_: Traps) -> Adversary:
    return Adversary([agent(guards=[Retries()])], [says({"fail": "MODEL_AUTH"})], "model.auth")


def always_shorter(_: Traps) -> Adversary:
    return Adversary([agent(guards=[Retries()])], [says({"fail": "CONTEXT_OVERFLOW"})], "context.overflow")


class Restarts(Interceptor):
    """Begins every answer anew, again and again."""

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        for _ in range(50):
            async for chunk in call_next(call):
                if not isinstance(chunk, ModelResponse):
                    yield chunk
            yield Restart(call.model, ModelError("MODEL_BAD_RESPONSE", "not good enough", retryable=True))
        async for chunk in call_next(call):
            yield chunk


def an_answer_begun_again_and_again(_: Traps) -> Adversary:
    return Adversary([agent(echo, guards=[Restarts()])], ONE_CALL, "finished", says="end")


class Hoards(Interceptor):
    """Keeps all it sees, many times over."""

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> None:
        for number in range(100):
            trace.extras(self.name).set(f"{trace.model_calls}/{number}", "h" * 100_000)


def extras_without_end(_: Traps) -> Adversary:
    return Adversary([agent(echo, guards=[Hoards()])], ONE_CALL, "finished", says="end", size=20_000_000)


class Shapes(Interceptor):
    """Shapes the run into something that cannot be."""

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        return RunConfig("", (echo, echo), config.model, config.limits, config.strategy)


def a_shape_that_cannot_be(_: Traps) -> Adversary:
    return Adversary([agent(guards=[Shapes()])], [END], "internal", after="internal")


class SwallowsQuestions(Interceptor):
    """Catches what a tool asks of people and goes on as if nothing was."""

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        try:
            return await call_next(request)
        except Outcome:
            return Observation([ContentPart(text="never mind")])


def a_question_that_is_swallowed(_: Traps) -> Adversary:
    @tool(effect="read")
    async def asks() -> str:
        """Ask people."""
        raise Suspend(Ask("May I?", kind="question"))

    script = [calls("asks", when={"step": 0}), END]
    return Adversary([agent(asks, guards=[SwallowsQuestions()])], script, "interrupted")


class Asks(Interceptor):
    """Asks people about the run before anything else, again and again."""

    async def on_agent_start(self, trace: Trace) -> Outcome | None:
        return Suspend(Ask("May I begin?", key=str(trace.segment)))


def a_question_before_anything(_: Traps) -> Adversary:
    return Adversary([agent(guards=[Asks()]), CALM], [END], "interrupted", next_to="calm")


HOOKED: Sequence[Entry] = (
    raising_in_every_hook,
    exiting_in_every_hook,
    cancelling_in_every_hook,
    exiting_before_the_agent,
    raising_oddly_around_the_tool,
    a_guard_that_raises_around_the_tool,
    a_guard_that_exits_around_the_model,
    wanting_nonsense_everywhere,
    ending_at_every_moment,
    a_mask_that_fails,
    calls_out_of_every_answer,
    always_another_attempt,
    always_shorter,
    an_answer_begun_again_and_again,
    extras_without_end,
    a_shape_that_cannot_be,
    a_question_that_is_swallowed,
    a_question_before_anything,
    *map(
        hanging,
        (
            "before_agent",
            "on_agent_start",
            "on_reason_start",
            "on_prepare",
            "intercept_stream",
            "on_reason_end",
            "on_action_start",
            "on_tool_call_start",
            "intercept_tool",
        ),
    ),
)
