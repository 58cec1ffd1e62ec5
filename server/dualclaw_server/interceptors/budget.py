"""Limits on what a run, its tools and a tenant may spend.

Algorithm

- Counted: tokens and cost of every attempt at a model call, also of failed ones and of calls beside the
  conversation (summaries), and every tool call that was let through, once, however often a crash or a suspension
  makes it start again. A call whose tokens the vendor does not report is estimated (``tokens``).
- Looked at before each model call, each attempt at it and each tool call. A limit that is reached ends the run with
  BUDGET_EXCEEDED and a text that says which; a batch of calls that does not fit is not begun. The one call that
  crosses a limit of tokens or cost is paid for: what it costs is known afterwards.
- A limit of one tool does not end the run: its next call is an error the model is told of.
- Once ``warn_at`` of any limit is spent, each agent of the run is told so, once, in its instructions.

The limits are of the whole run, sub-agents included where this interceptor is theirs too (their tokens count in any
case). What was spent is kept at the root of the run. The time is what the run's wall time counts: without the time
it waited for people.

A tenant's spending per day (UTC) is read and written back around each model call. Runs at work at the same moment
may overwrite one another's figures, so it is approximate: a brake, not a bill.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

import msgspec

from dualclaw import Usage
from dualclaw.errors import EngineError
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, ModelCall, ModelNext, Prompt, RunConfig
from dualclaw_server.engine.model import ModelChunk, ModelError, ModelResponse, Restart
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import End, Replace
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.tokens import message_tokens, text_tokens

_REMEMBERED_CALLS = 200


@dataclass(frozen=True, slots=True)
class BudgetTexts:
    """What people and models are told; ``{what}`` is one of the names below."""

    over: str
    warning: str
    per_tool: str
    per_tool_hint: str
    tokens: str
    cost: str
    tool_calls: str
    seconds: str
    tenant: str


BUDGET_TEXTS: Mapping[Locale, BudgetTexts] = MappingProxyType(
    {
        "en": BudgetTexts(
            over="The {what} is used up, so this ends here.",
            warning="{percent} % of the {what} is used. Come to an end: no new line of work, few calls, then "
            "the answer.",
            per_tool="{name} may be called {count} times in a run, and has been.",
            per_tool_hint="Do not call it again. Go on with what you have.",
            tokens="token budget of this run",
            cost="cost budget of this run",
            tool_calls="budget of tool calls of this run",
            seconds="time budget of this run",
            tenant="budget of this organisation for today",
        ),
        "zh": BudgetTexts(
            over="{what}已用完，到此结束。",
            warning="{what}已使用 {percent} %。请尽快收尾：不要展开新的工作，少量调用后给出答案。",
            per_tool="{name} 在一次运行中最多可调用 {count} 次，已达上限。",
            per_tool_hint="请勿再次调用，请根据已有信息继续。",
            tokens="本次运行的令牌预算",
            cost="本次运行的费用预算",
            tool_calls="本次运行的工具调用预算",
            seconds="本次运行的时间预算",
            tenant="本组织今日的预算",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens of a model cost, in the unit of the limits."""

    input: float
    output: float
    cached: float | None = None
    """Of input that came from the vendor's cache; None: as other input."""

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} of a price must not be below 0, not {value}")

    def of(self, usage: Usage) -> float:
        """Return the cost of a call."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        cached_price = self.input if self.cached is None else self.cached
        fresh = usage.input_tokens - cached
        return (fresh * self.input + cached * cached_price + usage.output_tokens * self.output) / 1e6


@dataclass(slots=True)
class _Spent:
    """What a run has spent; kept at its root."""

    tokens: int = 0
    cost: float = 0.0
    calls: int = 0
    per_tool: dict[str, int] = field(default_factory=dict)
    counted: list[str] = field(default_factory=list)
    """Ids of the last calls that were counted."""
    kept_tokens: int = 0
    kept_cost: float = 0.0
    """What of it is in the tenant's figures."""


@dataclass(slots=True)
class _Day:
    """What a tenant has spent on a day."""

    day: str = ""
    tokens: int = 0
    cost: float = 0.0


class BudgetInterceptor(Interceptor):
    """Ends a run that has spent its budget. A guard: fail-closed, never switched by callers.

    Args:
        max_tokens: input and output tokens of a run.
        max_cost: cost of a run, in the unit of ``prices``.
        prices: prices by glob of model names, the first that fits; needed for limits of cost. Where a run's model
            answers under a name that none fits, the dearest counts.
        max_tool_calls: tool calls of a run.
        per_tool: calls of each tool in a run, by its name.
        max_seconds: time of a run, without waiting for people.
        tenant_tokens: tokens of all runs of a tenant on a day (UTC), approximately.
        tenant_cost: the same of cost.
        warn_at: part of a limit at which agents are told; 1: never.
        locale: language of what people and models are told.
        clock: seconds since the epoch.

    Raises ValueError when there is no limit, or one that makes no sense, saying which.
    """

    guard = True

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        prices: Mapping[str, Price] = MappingProxyType({}),
        max_tool_calls: int | None = None,
        per_tool: Mapping[str, int] = MappingProxyType({}),
        max_seconds: float | None = None,
        tenant_tokens: int | None = None,
        tenant_cost: float | None = None,
        warn_at: float = 0.8,
        locale: Locale = "en",
        clock: Callable[[], float] = time.time,
        name: str = "",
        order: int = -400,
        enabled: bool = True,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled)
        limits = {
            "max_tokens": max_tokens,
            "max_cost": max_cost,
            "max_tool_calls": max_tool_calls,
            "max_seconds": max_seconds,
            "tenant_tokens": tenant_tokens,
            "tenant_cost": tenant_cost,
            **{f"per_tool {tool}": count for tool, count in per_tool.items()},
        }
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if not given:
            raise ValueError("a budget needs at least one limit")
        for limit_name, limit in given.items():
            if limit < 0 or (limit == 0 and not limit_name.startswith("per_tool")):
                raise ValueError(f"{limit_name} must be above 0, not {limit}")
        if (max_cost is not None or tenant_cost is not None) and not prices:
            raise ValueError("max_cost and tenant_cost need prices")
        if not 0 < warn_at <= 1:
            raise ValueError(f"warn_at must be above 0 and at most 1, not {warn_at}")
        self._max_tokens = max_tokens
        self._max_cost = max_cost
        self._prices = dict(prices)
        self._priced = max_cost is not None or tenant_cost is not None
        self._max_tool_calls = max_tool_calls
        self._per_tool = dict(per_tool)
        self._max_seconds = max_seconds
        self._tenant_tokens = tenant_tokens
        self._tenant_cost = tenant_cost
        self._warn_at = warn_at
        self._texts = BUDGET_TEXTS[locale]
        self._clock = clock

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        """Refuse a model that has no price. Raises EngineError."""
        if self._priced and self._price(config.model.name) is None:
            globs = ", ".join(self._prices)
            text = f"Interceptor {self.name} has no price for model {config.model.name}, only for {globs}."
            raise EngineError("INTERNAL", text)
        return config

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> End | None:
        """End the run when a limit is reached; tell the model when one is near."""
        day = await self._settle(trace)
        over = self._over(trace) or self._tenant_over(day)
        if over is not None:
            return over
        extras = trace.extras(self.name)
        what, share = max(self._shares(trace), key=lambda item: item[1], default=("", 0.0))
        if self._warn_at < 1 and share >= self._warn_at and not extras.get("warned"):
            extras.set("warned", True)
            warning = self._texts.warning.format(percent=int(share * 100), what=what)
            prompt.instructions = "\n\n".join(filter(None, (prompt.instructions, warning)))
        return None

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        """Count an attempt; the other attempts and the calls beside the conversation are checked here too."""
        over = self._over(call.trace)
        if over is not None:
            raise over
        try:
            async with aclosing(call_next(call)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, ModelResponse):
                        self._count(call, self._usage(call, chunk), chunk.model)
                    elif isinstance(chunk, Restart) and chunk.error.usage is not None:
                        self._count(call, chunk.error.usage, "")
                    yield chunk
        except ModelError as error:
            if error.usage is not None:
                self._count(call, error.usage, "")
            raise

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> End | None:
        """End the run before a batch of calls when a limit is reached, or the batch does not fit."""
        over = self._over(trace)
        if over is not None or self._max_tool_calls is None:
            return over
        spent = self._spent(trace)
        new = sum(call.open and call.id not in spent.counted for call in calls)
        if spent.calls + new > self._max_tool_calls:
            return self._end(self._texts.tool_calls)
        return None

    async def on_tool_call_start(self, trace: Trace, call: Call) -> End | Replace | None:
        """Count a call, unless a limit is reached."""
        spent = self._spent(trace)
        if call.id in spent.counted:
            return None
        over = self._over(trace)
        if over is not None:
            return over
        if self._max_tool_calls is not None and spent.calls >= self._max_tool_calls:  # siblings in sub-agents
            return self._end(self._texts.tool_calls)
        limit = self._per_tool.get(call.name)
        used = spent.per_tool.get(call.name, 0)
        if limit is not None and used >= limit:
            summary = self._texts.per_tool.format(name=call.name, count=limit)
            return Replace(failure("QUOTA_EXCEEDED", summary, hint=self._texts.per_tool_hint, not_done=True))
        spent.calls += 1
        if limit is not None:
            spent.per_tool[call.name] = used + 1
        spent.counted = [*spent.counted, call.id][-_REMEMBERED_CALLS:]
        self._save(trace, spent)
        return None

    async def on_agent_end(self, trace: Trace) -> None:
        """Bring the tenant's figures up to date."""
        await self._settle(trace)

    # What was spent

    def _spent(self, trace: Trace) -> _Spent:
        return trace.root.extras(self.name).get_as("spent", _Spent, _Spent())

    def _save(self, trace: Trace, spent: _Spent) -> None:
        trace.root.extras(self.name).set("spent", spent)

    def _count(self, call: ModelCall, usage: Usage, answered_as: str) -> None:
        spent = self._spent(call.trace)
        spent.tokens += usage.input_tokens + usage.output_tokens
        if self._priced:
            price = self._price(answered_as) or self._price(call.model)
            spent.cost += max(p.of(usage) for p in ([price] if price else self._prices.values()))
        self._save(call.trace, spent)

    def _price(self, model: str) -> Price | None:
        return next((price for glob, price in self._prices.items() if fnmatchcase(model, glob)), None)

    def _usage(self, call: ModelCall, response: ModelResponse) -> Usage:
        """Return a call's usage, with estimates for what the vendor did not report."""
        usage = Usage()
        usage.CopyFrom(response.usage)
        if not usage.HasField("input_tokens"):
            request = call.request
            usage.input_tokens = text_tokens(request.instructions) + sum(map(message_tokens, request.messages))
        if not usage.HasField("output_tokens"):
            usage.output_tokens = message_tokens(response.message)
        return usage

    # What is left

    def _shares(self, trace: Trace) -> list[tuple[str, float]]:
        """Return how much of each limit of the run is spent, with its name for people."""
        spent, texts = self._spent(trace), self._texts
        started = trace.root.checkpoint.start_time
        seconds = self._clock() - started.ToMilliseconds() / 1000 if started.ByteSize() else 0.0
        figures = (
            (texts.tokens, max(spent.tokens, trace.root.tokens), self._max_tokens),
            (texts.cost, spent.cost, self._max_cost),
            (texts.seconds, seconds, self._max_seconds),
            (texts.tool_calls, spent.calls, self._max_tool_calls),
        )
        return [(what, used / limit) for what, used, limit in figures if limit is not None]

    def _over(self, trace: Trace) -> End | None:
        """Return the end of a run that may make no further call; more answers are fine when tool calls are used up."""
        for what, share in self._shares(trace):
            if share >= 1 and what != self._texts.tool_calls:
                return self._end(what)
        return None

    def _end(self, what: str) -> End:
        return End(self._texts.over.format(what=what), "budget_exceeded")

    # The tenant

    async def _settle(self, trace: Trace) -> _Day | None:
        """Add what the run has spent since the last time to the tenant's day; returns the day, None: no such limit."""
        if self._tenant_tokens is None and self._tenant_cost is None:
            return None
        today = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        kept = await trace.recall(f"{self.name}/day")
        day = msgspec.json.decode(kept, type=_Day) if kept else _Day()
        if day.day != today:
            day = _Day(today)
        spent = self._spent(trace)
        tokens, cost = spent.tokens - spent.kept_tokens, spent.cost - spent.kept_cost
        if tokens or cost:
            day.tokens += tokens
            day.cost += cost
            spent.kept_tokens, spent.kept_cost = spent.tokens, spent.cost
            self._save(trace, spent)
            await trace.keep(f"{self.name}/day", msgspec.json.encode(day))
        return day

    def _tenant_over(self, day: _Day | None) -> End | None:
        if day is None:
            return None
        over_tokens = self._tenant_tokens is not None and day.tokens >= self._tenant_tokens
        over_cost = self._tenant_cost is not None and day.cost >= self._tenant_cost
        return self._end(self._texts.tenant) if over_tokens or over_cost else None
