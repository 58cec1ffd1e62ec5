"""The interceptors of one agent in one segment: who is called, in which order, and what becomes of their outcomes.

``interceptor`` has the rules as users read them. How they are kept:

- ``Chain.of`` freezes order and switches. Hooks that a class does not override are not called at all, so an
  interceptor costs nothing where it does nothing.
- Start hooks report how far they came (the number of interceptors reached, counted over the whole chain), and the
  matching end hooks are called for exactly those, in reverse. Every one of them is called: there, an outcome does
  not stop the others, a Replace changes what the others see, and the first other outcome counts.
- A cancel that arrives while end hooks run takes effect after them; each has HOOK_GRACE seconds.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeVar

from dualclaw import Message
from dualclaw.errors import EngineError
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import (
    AnswerNext,
    Interceptor,
    ModelNext,
    Observation,
    Prompt,
    RunConfig,
    ToolNext,
)
from dualclaw_server.engine.layers import InterceptorFailed, around_call, around_stream, around_tool
from dualclaw_server.engine.model import ModelError, ModelOptions, ModelResponse
from dualclaw_server.engine.outcome import Outcome, Replace
from dualclaw_server.engine.store import StoreError
from dualclaw_server.engine.trace import Trace

log = logging.getLogger(__name__)

T = TypeVar("T")

HOOK_GRACE = 5.0
"""Seconds an end hook may take."""

DEPRECATED: Mapping[str, str] = {
    "on_thought": "on_reason_end",
    "on_action": "on_tool_call_start",
    "on_observation": "on_tool_call_end",
}


class Chain:
    """The enabled interceptors of an agent, in order. Made once per segment."""

    def __init__(self, interceptors: Sequence[Interceptor]) -> None:
        """``interceptors`` are those that are on, the outermost first."""
        self.all = tuple(interceptors)
        self._having = {hook: self._those_with(hook) for hook in _HOOKS}
        self._masking = [item for item in self.all if type(item).mask is not Interceptor.mask]
        self._agent_started = 0

    @classmethod
    def of(cls, interceptors: Iterable[Interceptor], switches: Mapping[str, bool]) -> Chain:
        """Freeze interceptors; ``switches`` by name override what they say themselves."""
        on = [item for item in interceptors if switches.get(item.name, item.enabled)]
        return cls(sorted(on, key=lambda item: item.order))

    def _those_with(self, hook: str) -> tuple[tuple[int, Interceptor], ...]:
        return tuple(
            (place, item)
            for place, item in enumerate(self.all)
            if getattr(type(item), hook) is not getattr(Interceptor, hook)
        )

    def __bool__(self) -> bool:
        return bool(self.all)

    # The agent

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        """Return the shape of the run. A failure fails the run, whatever the interceptor declares."""
        for _, item in self._having["before_agent"]:
            try:
                changed = await item.before_agent(trace, config)
                if type(changed) is not RunConfig:
                    raise TypeError(f"before_agent must return a RunConfig, not {type(changed).__name__}")
            except (Outcome, EngineError, StoreError):
                raise
            except Exception as error:
                log.exception("interceptor %s failed in before_agent", item.name)
                raise InterceptorFailed(item.name, "before_agent", error) from error
            config = changed
        return config

    async def agent_start(self, trace: Trace) -> Outcome | None:
        """Call on_agent_start."""
        self._agent_started = len(self.all)

        def reached(count: int) -> None:
            self._agent_started = count

        return await self._start("on_agent_start", lambda item: item.on_agent_start(trace), reached)

    async def agent_end(self, trace: Trace) -> None:
        """Call on_agent_end for whoever was called at the start, once."""
        started, self._agent_started = self._agent_started, 0

        async def end() -> None:
            for place, item in reversed(self._having["on_agent_end"]):
                if place < started:
                    await self._end(item, "on_agent_end", item.on_agent_end(trace))

        if started and self._having["on_agent_end"]:
            await _to_the_end(end())

    # The model

    async def reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        """Call on_reason_start."""
        return await self._start("on_reason_start", lambda item: item.on_reason_start(trace, prompt))

    async def prepare(self, trace: Trace, options: ModelOptions, prompt: Prompt) -> Outcome | None:
        """Call on_prepare."""
        return await self._start("on_prepare", lambda item: item.on_prepare(trace, options, prompt))

    async def reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
        """Call on_reason_retry of everyone; True when one has changed something."""
        changed = False
        for _, item in self._having["on_reason_retry"]:
            try:
                changed = bool(await item.on_reason_retry(trace, error, attempt, prompt)) or changed
            except (Outcome, EngineError, StoreError):
                raise
            except Exception as failure:
                self._forgive(item, "on_reason_retry", failure)
        return changed

    async def reason_end(
        self, trace: Trace, response: ModelResponse, message: Message, duration: float
    ) -> Outcome | None:
        """Call on_reason_end in reverse, then the deprecated on_thought."""
        for _, item in reversed(self._having["on_reason_end"]):
            outcome = await self._one(item, "on_reason_end", item.on_reason_end(trace, response, message, duration))
            if outcome is not None:
                return outcome
        if self._having["on_thought"]:
            thought = "".join(part.text for part in message.parts if part.WhichOneof("part") == "text")
            for _, item in reversed(self._having["on_thought"]):
                await self._one(item, "on_thought", item.on_thought(trace, thought))
        return None

    def stream(self, innermost: ModelNext) -> ModelNext:
        """Return the model with every intercept_stream around it."""
        call_next = innermost
        for _, item in reversed(self._having["intercept_stream"]):
            call_next = around_stream(item, call_next)
        return call_next

    def call(self, innermost: AnswerNext) -> AnswerNext:
        """Return the model, not streaming, with every intercept_call around it."""
        call_next = innermost
        either = dict([*self._having["intercept_stream"], *self._having["intercept_call"]])
        for place in sorted(either, reverse=True):
            call_next = around_call(either[place], call_next)
        return call_next

    # Tools

    async def action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        """Call on_action_start."""
        return await self._start("on_action_start", lambda item: item.on_action_start(trace, calls))

    async def action_end(self, trace: Trace, calls: Sequence[Call]) -> None:
        """Call on_action_end in reverse."""

        async def end() -> None:
            for _, item in reversed(self._having["on_action_end"]):
                await self._end(item, "on_action_end", item.on_action_end(trace, calls))

        if self._having["on_action_end"]:
            await _to_the_end(end())

    async def plan(self, trace: Trace, steps: Sequence[str]) -> Outcome | None:
        """Call on_plan."""
        return await self._start("on_plan", lambda item: item.on_plan(trace, steps))

    async def tool_call_start(self, trace: Trace, call: Call, reached: Callable[[int], None]) -> Outcome | None:
        """Call on_tool_call_start and the deprecated on_action; ``reached`` is told how far it came.

        Raises InterceptorFailed.
        """
        deprecated = dict(self._having["on_action"])
        having = dict([*self._having["on_tool_call_start"], *self._having["on_action"]])
        for place in sorted(having):
            item = having[place]
            reached(place + 1)
            outcome = await self._one(item, "on_tool_call_start", item.on_tool_call_start(trace, call))
            if place in deprecated:
                await self._one(item, "on_action", item.on_action(trace, call.name, call.args))
            if outcome is not None:
                return outcome
        reached(len(self.all))
        return None

    async def tool_call_end(
        self,
        trace: Trace,
        call: Call,
        observation: Observation,
        duration: float,
        started: int,
        withheld: Callable[[InterceptorFailed], Observation],
    ) -> tuple[Observation, Outcome | None]:
        """Call on_tool_call_end, and the deprecated on_observation, of the first ``started`` interceptors in reverse.

        Returns the observation as it came out, and the first outcome that is more than a Replace. What a failed
        guard lets not pass becomes what ``withheld`` makes of it.
        """
        if not self._having["on_tool_call_end"] and not self._having["on_observation"]:
            return observation, None
        return await _to_the_end(self._tool_call_end(trace, call, observation, duration, started, withheld))

    async def _tool_call_end(
        self,
        trace: Trace,
        call: Call,
        observation: Observation,
        duration: float,
        started: int,
        withheld: Callable[[InterceptorFailed], Observation],
    ) -> tuple[Observation, Outcome | None]:
        deprecated = dict(self._having["on_observation"])
        having = dict([*self._having["on_tool_call_end"], *self._having["on_observation"]])
        wanted: Outcome | None = None
        for place in sorted(having, reverse=True):
            if place >= started:
                continue
            item = having[place]
            hook = item.on_tool_call_end(trace, call, observation, observation.error, duration)
            try:
                outcome = await self._end(item, "on_tool_call_end", hook, closed=True)
            except InterceptorFailed as failure:
                observation, outcome = withheld(failure), None
            if isinstance(outcome, Replace):
                if isinstance(outcome.value, Observation):
                    observation = outcome.value
                else:
                    log.error("interceptor %s: on_tool_call_end must replace by an Observation", item.name)
            elif outcome is not None and wanted is None:
                wanted = outcome
            if place in deprecated:
                said = item.on_observation(trace, call.name, observation.text)
                await self._end(item, "on_observation", said)
        return observation, wanted

    def tool(self, innermost: ToolNext, withheld: Callable[[InterceptorFailed], Observation]) -> ToolNext:
        """Return the tool with every intercept_tool around it."""
        call_next = innermost
        for _, item in reversed(self._having["intercept_tool"]):
            call_next = around_tool(item, call_next, withheld)
        return call_next

    def mask(self, value: T) -> T:
        """Return JSON data as events, spans and logs may show it."""
        masked: object = value
        for item in self._masking:
            masked = item.mask(masked)
        return masked  # type: ignore[return-value]  # a mask keeps the shape of what it is given

    # How it works

    async def _start(
        self,
        hook: str,
        make: Callable[[Interceptor], Awaitable[Outcome | None]],
        reached: Callable[[int], None] = lambda _: None,
    ) -> Outcome | None:
        for place, item in self._having[hook]:
            reached(place + 1)
            outcome = await self._one(item, hook, make(item))
            if outcome is not None:
                return outcome
        reached(len(self.all))
        return None

    async def _one(self, item: Interceptor, hook: str, calling: Awaitable[object]) -> Outcome | None:
        """Await one hook. Raises InterceptorFailed for a guard's own failure."""
        try:
            outcome = await calling
            if outcome is not None and not isinstance(outcome, Outcome):
                raise TypeError(f"{hook} must return an Outcome or None, not {type(outcome).__name__}")
        except Outcome as raised:
            outcome = raised
        except (EngineError, StoreError):
            raise
        except Exception as error:
            self._forgive(item, hook, error)
            return None
        if outcome is not None:
            outcome.origin = item.name
        return outcome

    async def _end(
        self, item: Interceptor, hook: str, calling: Awaitable[object], *, closed: bool = False
    ) -> Outcome | None:
        """Await one end hook; ``closed``: a guard's failure is raised instead of logged."""
        failure: EngineError
        try:
            async with asyncio.timeout(HOOK_GRACE):
                return await self._one(item, hook, calling)
        except TimeoutError as error:
            log.error("interceptor %s takes more than %g s in %s and is left behind", item.name, HOOK_GRACE, hook)
            failure = InterceptorFailed(item.name, hook, error)
            closed = closed and item.fail_closed
        except InterceptorFailed as error:
            failure = error
        except EngineError as error:
            log.error("interceptor %s raised in %s: %s", item.name, hook, error.message)
            return None
        if closed:
            raise failure
        return None

    def _forgive(self, item: Interceptor, hook: str, error: Exception) -> None:
        log.error("interceptor %s failed in %s", item.name, hook, exc_info=error)
        if item.fail_closed:
            raise InterceptorFailed(item.name, hook, error) from error


async def _to_the_end(ending: Coroutine[object, object, T]) -> T:
    """Await end hooks; a cancel that arrives meanwhile takes effect once they are through."""
    running = asyncio.ensure_future(ending)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})  # bounded: every hook in it is
        raise


_HOOKS = (
    "before_agent",
    "on_agent_start",
    "on_agent_end",
    "on_reason_start",
    "on_prepare",
    "intercept_stream",
    "intercept_call",
    "on_reason_retry",
    "on_reason_end",
    "on_action_start",
    "on_plan",
    "on_tool_call_start",
    "intercept_tool",
    "on_tool_call_end",
    "on_action_end",
    "on_thought",
    "on_action",
    "on_observation",
)


def warn_of_deprecated(item: Interceptor) -> None:
    """Warn of every deprecated hook an interceptor overrides."""
    for old, new in DEPRECATED.items():
        if getattr(type(item), old) is not getattr(Interceptor, old):
            text = f"interceptor {item.name}: {old} is deprecated, override {new}"
            warnings.warn(text, DeprecationWarning, stacklevel=4)
