"""The interceptors of one agent in one segment: who is called, in which order, and what becomes of their outcomes.

``interceptor`` has the rules as users read them. How they are kept:

- ``Chain.of`` freezes order and switches. Hooks that a class does not override are not called at all, so an
  interceptor costs nothing where it does nothing.
- Start hooks report how far they came (the number of interceptors reached, counted over the whole chain), and the
  matching end hooks are called for exactly those, in reverse. Every one of them is called: there, an outcome does
  not stop the others, a Replace changes what the others see, and the first other outcome counts.
- A deprecated hook is called right after the one that took its place, and its outcomes mean the same.
- An outcome that a hook cannot have is its interceptor's own failure, like any exception.
- A cancel that arrives while end hooks run takes effect after them. Each has ``grace`` seconds, in a task of its own,
  so one that ignores everything is left behind.
- Masks of the agents above apply to what a sub-agent shows: it is the same stream.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeVar, cast

from dualclaw import Message
from dualclaw.json_text import canonical_args
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.hooks import (
    InterceptorFailed,
    call_end_hook,
    call_hook,
    forgive,
    stopped,
    to_the_end,
)
from dualclaw_server.engine.interceptor import (
    DEPRECATED,
    HOOKS,
    AnswerNext,
    Interceptor,
    ModelNext,
    Observation,
    Prompt,
    RunConfig,
    ToolNext,
    outcome_problem,
)
from dualclaw_server.engine.layers import around_call, around_stream, around_tool
from dualclaw_server.engine.model import ModelError, ModelOptions, ModelResponse
from dualclaw_server.engine.outcome import Fail, Outcome, Replace
from dualclaw_server.engine.store import StoreError
from dualclaw_server.engine.tool import contained
from dualclaw_server.engine.trace import Trace

log = logging.getLogger(__name__)

T = TypeVar("T")

HOOK_GRACE = 5.0
"""Seconds an end hook may take."""

WITHHELD = "(withheld)"
"""What is shown where a mask has failed."""


_NONE: Mapping[str, tuple[tuple[int, Interceptor], ...]] = MappingProxyType(dict.fromkeys(HOOKS, ()))
"""Who has which hook where there are no interceptors."""

_Step = tuple[int, Interceptor, str]
"""An interceptor by its place in the chain, and a hook it has."""


class Chain:
    """The enabled interceptors of an agent, in order. Made once per segment."""

    def __init__(
        self, interceptors: Sequence[Interceptor], *, above: Chain | None = None, grace: float = HOOK_GRACE
    ) -> None:
        """``interceptors`` are those that are on, the outermost first; ``above`` is the chain of the agent above."""
        self.all = tuple(interceptors)
        self._having = {hook: self._those_with(hook) for hook in HOOKS} if self.all else _NONE
        self._masking = [item for item in self.all if type(item).mask is not Interceptor.mask]
        self._above = above
        self._grace = grace
        self._agent_started = 0

    @classmethod
    def of(
        cls,
        interceptors: Iterable[Interceptor],
        switches: Mapping[str, bool],
        *,
        above: Chain | None = None,
        grace: float = HOOK_GRACE,
    ) -> Chain:
        """Freeze interceptors; ``switches`` by name override what those that may be switched say themselves.

        The names in ``switches`` may be meant for another agent of the run, so it is looked at here who may be.
        """
        on = [
            item
            for item in interceptors
            if (switches.get(item.name, item.enabled) if item.switchable else item.enabled)
        ]
        return cls(sorted(on, key=lambda item: item.order), above=above, grace=grace)

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
        """Return the shape of the run. A failure fails the run, whatever the interceptor declares. Raises Outcome."""
        for _, item in self._having["before_agent"]:
            try:
                with contained(item.name):
                    changed = await item.before_agent(trace, config)
                if type(changed) is not RunConfig:
                    raise TypeError(f"before_agent must return a RunConfig, not {type(changed).__name__}")
            except (StoreError, InterceptorFailed):
                raise
            except (Exception, asyncio.CancelledError) as error:
                if stopped(error):
                    raise
                if isinstance(error, Outcome) and not outcome_problem("before_agent", error):
                    error.origin = error.origin or item.name
                    raise
                log.error("interceptor %s failed in before_agent", item.name, exc_info=error)
                raise InterceptorFailed(item.name, "before_agent", error) from error
            config = changed
        return config

    async def agent_start(self, trace: Trace) -> Outcome | None:
        """Call on_agent_start."""
        self._agent_started = 0

        def reached(count: int) -> None:
            self._agent_started = count

        return await self._start(["on_agent_start"], lambda item, _: item.on_agent_start(trace), reached=reached)

    async def agent_end(self, trace: Trace) -> Outcome | None:
        """Call on_agent_end for whoever was called at the start, once; returns the first Fail that is wanted."""
        started, self._agent_started = self._agent_started, 0
        return await self._ends("on_agent_end", lambda item: item.on_agent_end(trace), started)

    # The model

    async def reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        """Call on_reason_start."""

        def take(value: object) -> None:
            nonlocal prompt
            prompt = cast("Prompt", value)

        return await self._start(["on_reason_start"], lambda item, _: item.on_reason_start(trace, prompt), take)

    async def prepare(self, trace: Trace, options: ModelOptions, prompt: Prompt) -> Outcome | None:
        """Call on_prepare."""

        def take(value: object) -> None:
            nonlocal options
            options = cast("ModelOptions", value)

        return await self._start(["on_prepare"], lambda item, _: item.on_prepare(trace, options, prompt), take)

    async def reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
        """Call on_reason_retry of everyone; True when one has changed something. Raises Outcome."""
        changed = False

        async def ask(item: Interceptor) -> None:
            nonlocal changed
            changed = bool(await item.on_reason_retry(trace, error, attempt, prompt)) or changed

        for _, item in self._having["on_reason_retry"]:
            wanted = await call_hook(item, "on_reason_retry", partial(ask, item))
            if wanted is not None:
                raise wanted
        return changed

    async def reason_end(
        self, trace: Trace, response: ModelResponse, message: Message, duration: float
    ) -> Outcome | None:
        """Call on_reason_end and the deprecated on_thought, in reverse."""

        def take(value: object) -> None:
            nonlocal message
            message = cast("Message", value)

        def make(item: Interceptor, hook: str) -> Awaitable[object]:
            if hook == "on_thought":
                thought = "".join(part.text for part in message.parts if part.WhichOneof("part") == "text")
                return item.on_thought(trace, thought)
            return item.on_reason_end(trace, response, message, duration)

        return await self._start(["on_reason_end", "on_thought"], make, take, reverse=True)

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
        """Call on_action_start. Arguments it wants replaced are replaced when this returns."""
        by_id = {call.id: call for call in calls}

        def take(value: object) -> None:
            changes = cast("Mapping[str, Mapping[str, object]]", value)
            if unknown := [str(call_id) for call_id in changes if call_id not in by_id]:
                raise TypeError(f"on_action_start replaces arguments of unknown calls: {', '.join(unknown)}")
            for args in changes.values():
                if not isinstance(args, Mapping):
                    raise TypeError(f"arguments of a call are an object, not {type(args).__name__}")
                canonical_args(args)
            for call_id, args in changes.items():
                by_id[call_id].change(args)

        outcome = await self._start(["on_action_start"], lambda item, _: item.on_action_start(trace, calls), take)
        return None if isinstance(outcome, Replace) else outcome

    async def action_end(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        """Call on_action_end in reverse; returns the first outcome."""
        return await self._ends("on_action_end", lambda item: item.on_action_end(trace, calls), len(self.all))

    async def plan(self, trace: Trace, steps: Sequence[str]) -> Outcome | None:
        """Call on_plan."""

        def take(value: object) -> None:
            nonlocal steps
            new = cast("Sequence[object]", value)
            if isinstance(new, str) or not all(isinstance(step, str) for step in new):
                raise TypeError("on_plan is replaced by a list of texts")
            steps = [str(step) for step in new]

        return await self._start(["on_plan"], lambda item, _: item.on_plan(trace, steps), take)

    async def tool_call_start(self, trace: Trace, call: Call, reached: Callable[[int], None]) -> Outcome | None:
        """Call on_tool_call_start and the deprecated on_action; ``reached`` is told how far it came.

        Raises InterceptorFailed.
        """

        def make(item: Interceptor, hook: str) -> Awaitable[object]:
            if hook == "on_action":
                return item.on_action(trace, call.name, call.args)
            return item.on_tool_call_start(trace, call)

        return await self._start(["on_tool_call_start", "on_action"], make, reached=reached)

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

        def make(item: Interceptor, hook: str) -> Awaitable[object]:
            if hook == "on_observation":
                return item.on_observation(trace, call.name, observation.text)
            return item.on_tool_call_end(trace, call, observation, observation.error, duration)

        def take(outcome: Outcome | InterceptorFailed) -> Outcome | None:
            nonlocal observation
            if isinstance(outcome, InterceptorFailed):
                observation = withheld(outcome)
            elif isinstance(outcome, Replace):
                observation = cast("Observation", outcome.value)
            else:
                return outcome
            return None

        steps = self._steps(["on_tool_call_end", "on_observation"], reverse=True)
        steps = [(place, item, hook) for place, item, hook in steps if place < started]
        wanted = await to_the_end(self._all(steps, make, take)) if steps else None
        return observation, wanted

    def tool(self, innermost: ToolNext, withheld: Callable[[InterceptorFailed], Observation]) -> ToolNext:
        """Return the tool with every intercept_tool around it."""
        call_next = innermost
        for _, item in reversed(self._having["intercept_tool"]):
            call_next = around_tool(item, call_next, withheld)
        return call_next

    @property
    def masks(self) -> bool:
        """True when anything is masked, here or above."""
        return bool(self._masking) or (self._above is not None and self._above.masks)

    def mask(self, value: T) -> T:
        """Return JSON data as events, spans and logs may show it. What cannot be masked is not shown at all."""
        masked: object = value
        for item in self._masking:
            try:
                masked = item.mask(masked)
                if type(masked) is not type(value):
                    raise TypeError(f"mask made {type(masked).__name__} of {type(value).__name__}")
            except Exception:
                log.exception("interceptor %s failed in mask", item.name)
                masked = {} if isinstance(value, dict) else WITHHELD
                break
        if self._above is not None:
            masked = self._above.mask(masked)
        return cast("T", masked)  # a mask keeps the type of what it is given

    # How it works

    def _steps(self, hooks: Sequence[str], *, reverse: bool = False) -> list[_Step]:
        """Return who has which of these hooks, in order; of one interceptor in the order of ``hooks``."""
        steps = [(place, item, hook) for hook in hooks for place, item in self._having[hook]]
        if len(steps) < 2:
            return steps
        return sorted(steps, key=lambda step: -step[0] if reverse else step[0])

    async def _start(
        self,
        hooks: Sequence[str],
        make: Callable[[Interceptor, str], Awaitable[object]],
        take: Callable[[object], None] | None = None,
        *,
        reached: Callable[[int], None] = lambda _: None,
        reverse: bool = False,
    ) -> Outcome | None:
        """Call hooks until one wants more than to go on.

        Where the value of a Replace is used (``take`` is given it), guards further on are called all the same, for
        nobody has checked it yet.
        """
        if not self.all:
            reached(0)
            return None
        replaced: Replace | None = None
        for place, item, hook in self._steps(hooks, reverse=reverse):
            if replaced is not None and not item.guard:
                continue
            reached(place + 1)
            outcome = await call_hook(item, hook, partial(make, item, hook))
            if isinstance(outcome, Replace) and take is not None:
                try:
                    take(outcome.value)
                except (TypeError, ValueError) as error:
                    forgive(item, hook, error)
                    continue
                replaced = outcome
            elif outcome is not None:
                return outcome
        if replaced is None:
            reached(len(self.all))
        return replaced

    async def _ends(self, hook: str, make: Callable[[Interceptor], Awaitable[object]], started: int) -> Outcome | None:
        """Call an end hook of the first ``started`` interceptors; the failure of a guard is a Fail."""

        def take(outcome: Outcome | InterceptorFailed) -> Outcome | None:
            return Fail(outcome) if isinstance(outcome, InterceptorFailed) else outcome

        steps = [step for step in self._steps([hook], reverse=True) if step[0] < started]
        return await to_the_end(self._all(steps, lambda item, _: make(item), take)) if steps else None

    async def _all(
        self,
        steps: Sequence[_Step],
        make: Callable[[Interceptor, str], Awaitable[object]],
        take: Callable[[Outcome | InterceptorFailed], Outcome | None],
    ) -> Outcome | None:
        """Call all end hooks, whatever they want or raise. Returns the first outcome that ``take`` leaves.

        Raises StoreError at last, if one of them did.
        """
        wanted: Outcome | None = None
        lost: StoreError | None = None
        for _, item, hook in steps:
            outcome: Outcome | InterceptorFailed | None
            try:
                outcome = await call_end_hook(item, hook, partial(make, item, hook), self._grace)
            except InterceptorFailed as failure:
                outcome = failure
            except StoreError as error:
                lost, outcome = lost or error, None
            left = take(outcome) if outcome is not None else None
            wanted = wanted or left
        if lost is not None:
            raise lost
        return wanted


def warn_of_deprecated(item: Interceptor) -> None:
    """Warn of every deprecated hook an interceptor overrides."""
    for old, new in DEPRECATED.items():
        if getattr(type(item), old) is not getattr(Interceptor, old):
            text = f"interceptor {item.name}: {old} is deprecated, override {new}"
            warnings.warn(text, DeprecationWarning, stacklevel=4)
