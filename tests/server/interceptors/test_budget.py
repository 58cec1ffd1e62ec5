"""Budgets: what counts, where it is looked at, and how a run that has spent its own ends."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import StopReason, Usage
from dualclaw.errors import EngineError
from dualclaw_server.engine.checkpoint import CallPhase, Checkpoint
from dualclaw_server.engine.interceptor import ModelCall, Observation
from dualclaw_server.engine.model import ModelChunk, ModelError, ModelResponse, Restart, TextDelta
from dualclaw_server.engine.outcome import End, Outcome, Replace
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.budget import BUDGET_TEXTS, BudgetInterceptor, Price

from .traces import MemoryServices, call_of, config_of, make_trace, model_call, prompt_of, response, user

TEXTS = BUDGET_TEXTS["en"]
BILLION = 1e9


async def answer(
    budget: BudgetInterceptor, trace: Trace, *chunks: ModelChunk | ModelError, attempt: int = 1
) -> list[ModelChunk]:
    """Have the budget stand around an attempt that gives these chunks."""

    async def model(call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
        for chunk in chunks:
            if isinstance(chunk, ModelError):
                raise chunk
            yield chunk

    async with aclosing(budget.intercept_stream(model_call(trace, attempt=attempt), model)) as seen:
        return [chunk async for chunk in seen]


def used(input_tokens: int, output_tokens: int, cached: int | None = None, model: str = "") -> ModelResponse:
    usage = Usage(input_tokens=input_tokens, output_tokens=output_tokens, cached_tokens=cached)
    return response("ok", usage=usage, model=model)


async def next_step(budget: BudgetInterceptor, trace: Trace) -> End | None:
    return await budget.on_reason_start(trace, prompt_of(trace))


def over(outcome: Outcome | None, what: str) -> bool:
    """Tell whether this ends the run for a budget, with a text that says which."""
    assert outcome is None or isinstance(outcome, End)
    if outcome is None:
        return False
    assert outcome.stop_reason == StopReason.STOP_REASON_BUDGET_EXCEEDED
    assert outcome.text == TEXTS.over.format(what=what)
    return True


async def test_tokens_end_the_run_before_the_next_call() -> None:
    """Up to the limit the run goes on; the call after it was crossed is not made."""
    budget, trace = BudgetInterceptor(max_tokens=100), make_trace()
    assert await next_step(budget, trace) is None
    await answer(budget, trace, TextDelta("ok"), used(60, 39))
    assert await next_step(budget, trace) is None
    await answer(budget, trace, used(1, 0))
    assert over(await next_step(budget, trace), TEXTS.tokens)
    call = call_of(trace)
    assert over(await budget.on_action_start(trace, [call]), TEXTS.tokens)
    assert over(await budget.on_tool_call_start(trace, call), TEXTS.tokens)


async def test_every_attempt_and_every_side_call_counts() -> None:
    """Failed attempts, fallbacks of a router, and calls that do not stream are counted, each once."""
    budget, trace = BudgetInterceptor(max_tokens=1_100), make_trace()
    failed = ModelError("MODEL_STREAM_BROKEN", "cut", retryable=True, usage=Usage(input_tokens=100))
    with pytest.raises(ModelError):
        await answer(budget, trace, TextDelta("o"), failed)
    await answer(budget, trace, Restart("other", failed), used(300, 100))

    async def model(call: ModelCall) -> ModelResponse:
        return used(400, 0)

    assert (await budget.intercept_call(model_call(trace), model)).usage.input_tokens == 400
    assert await next_step(budget, trace) is None
    await answer(budget, trace, used(100, 0))
    assert over(await next_step(budget, trace), TEXTS.tokens)


async def test_an_attempt_beyond_the_budget_is_not_made() -> None:
    """Retries and side calls are stopped as well, before they reach the model."""
    budget, trace = BudgetInterceptor(max_tokens=10), make_trace()
    await answer(budget, trace, used(10, 0))
    with pytest.raises(End):
        await answer(budget, trace, used(10, 0), attempt=2)


async def test_tokens_nobody_reports_are_estimated() -> None:
    """A model without usage does not spend for nothing."""
    budget, trace = BudgetInterceptor(max_tokens=500), make_trace(own=[user("word " * 500, message_id="q")])
    await answer(budget, trace, response("ok"))
    assert over(await next_step(budget, trace), TEXTS.tokens)


async def test_tokens_of_agents_without_a_budget_count_too() -> None:
    """What the engine has counted for the whole run is spent, whoever spent it."""
    budget, trace = BudgetInterceptor(max_tokens=500), make_trace()
    make_trace(parent=trace, agent="helper").add_usage(Usage(input_tokens=500))
    assert over(await next_step(budget, trace), TEXTS.tokens)


async def test_cost_follows_the_prices_of_the_model_that_answered() -> None:
    """Input, cached input and output have prices of their own; an unknown name costs what the asked model does."""
    prices = {"big-*": Price(10, 50, cached=1), "test-*": Price(1, 2)}
    for call, cost in (
        (used(1_000_000, 0), 1.0),
        (used(0, 1_000_000), 2.0),
        (used(0, 1_000_000, model="big-1"), 50.0),
        (used(1_000_000, 0, 900_000, model="big-1"), 1.9),
        (used(1_000_000, 0, 900_000), 1.0),
        (used(1_000_000, 0, model="elsewhere"), 1.0),
    ):
        for limit, reached in ((cost, True), (cost + 0.01, False)):
            budget, trace = BudgetInterceptor(max_cost=limit, prices=prices), make_trace()
            await answer(budget, trace, call)
            assert over(await next_step(budget, trace), TEXTS.cost) is reached


async def test_a_model_without_a_price_is_refused_at_the_start() -> None:
    """A limit of cost that could not be kept fails the run, naming the model and the prices there are."""
    budget = BudgetInterceptor(max_cost=1, prices={"gpt-*": Price(1, 1)})
    with pytest.raises(EngineError, match=r"no price for model test-model, only for gpt-\*"):
        await budget.before_agent(make_trace(), config_of())
    without_cost = BudgetInterceptor(max_tokens=1, prices={"gpt-*": Price(1, 1)})
    assert (await without_cost.before_agent(make_trace(), config_of())).model.name == "test-model"


async def test_a_batch_that_does_not_fit_is_not_begun() -> None:
    """Three calls are let through, a batch of two after two ends the run with none of it run."""
    budget, trace = BudgetInterceptor(max_tool_calls=3), make_trace()
    first = [call_of(trace, f"a{n}") for n in range(2)]
    assert await budget.on_action_start(trace, first) is None
    assert [await budget.on_tool_call_start(trace, call) for call in first] == [None, None]
    second = [call_of(trace, f"b{n}") for n in range(2)]
    assert over(await budget.on_action_start(trace, second), TEXTS.tool_calls)
    assert await budget.on_action_start(trace, second[:1]) is None
    assert await budget.on_tool_call_start(trace, second[0]) is None
    assert await next_step(budget, trace) is None, "an answer without calls is still fine"
    assert over(await budget.on_tool_call_start(trace, second[1]), TEXTS.tool_calls)


async def test_a_call_that_starts_again_counts_once() -> None:
    """After a crash or a question a call begins again; its first start was counted."""
    budget, trace = BudgetInterceptor(max_tool_calls=1, per_tool={"look": 1}), make_trace()
    call = call_of(trace)
    assert await budget.on_tool_call_start(trace, call) is None
    call.state.phase = CallPhase.CALL_PHASE_SUSPENDED
    resumed = make_trace(checkpoint=Checkpoint.FromString(trace.checkpoint.SerializeToString()))
    assert await budget.on_action_start(resumed, [call]) is None
    assert await budget.on_tool_call_start(resumed, call) is None


async def test_a_tools_own_limit_is_an_error_the_model_is_told_of() -> None:
    """The next call of that tool fails with a code and a hint, other tools run on, the run does not end."""
    budget, trace = BudgetInterceptor(per_tool={"search": 1, "never": 0}), make_trace()
    assert await budget.on_tool_call_start(trace, call_of(trace, "1", "search")) is None
    for call in (call_of(trace, "2", "search"), call_of(trace, "3", "never")):
        outcome = await budget.on_tool_call_start(trace, call)
        assert isinstance(outcome, Replace)
        assert isinstance(outcome.value, Observation)
        error = json.loads(outcome.value.text)["error"]
        assert (error["code"], error["retryable"]) == ("quota.exceeded", False)
        assert outcome.value.is_error
        assert outcome.value.not_done
    assert await budget.on_tool_call_start(trace, call_of(trace, "4", "look")) is None
    assert await next_step(budget, trace) is None


async def test_time_counts_from_the_start_of_work() -> None:
    """The run ends once its seconds are over, before a model call and before a tool call."""
    now = BILLION
    budget, trace = BudgetInterceptor(max_seconds=60, clock=lambda: now), make_trace()
    assert await next_step(budget, trace) is None, "work has not begun"
    trace.checkpoint.start_time.FromSeconds(int(BILLION))
    now += 59
    assert await next_step(budget, trace) is None
    now += 1
    assert over(await next_step(budget, trace), TEXTS.seconds)
    assert over(await budget.on_tool_call_start(trace, call_of(trace)), TEXTS.seconds)


async def test_each_agent_is_warned_once() -> None:
    """At 80 % the instructions of the next call say so, of the limit that is nearest; later calls do not repeat it."""
    budget, trace = BudgetInterceptor(max_tokens=100, max_tool_calls=100), make_trace()
    await answer(budget, trace, used(79, 0))
    prompt = prompt_of(trace, instructions="Be kind.")
    await budget.on_reason_start(trace, prompt)
    assert prompt.instructions == "Be kind."
    await answer(budget, trace, used(6, 0))
    await budget.on_reason_start(trace, prompt)
    assert prompt.instructions == "Be kind.\n\n" + TEXTS.warning.format(percent=85, what=TEXTS.tokens)
    again = prompt_of(trace)
    await budget.on_reason_start(trace, again)
    assert again.instructions == ""
    helper = make_trace(parent=trace, agent="helper")
    below = prompt_of(helper)
    await budget.on_reason_start(helper, below)
    assert "85 %" in below.instructions
    quiet, prompt = BudgetInterceptor(max_tokens=100, warn_at=1), prompt_of(trace)
    await quiet.on_reason_start(trace, prompt)
    assert prompt.instructions == ""


async def test_sub_agents_spend_the_budget_of_the_run() -> None:
    """Cost and calls of an agent below are those of the run."""
    budget, trace = BudgetInterceptor(max_tool_calls=1, max_cost=1, prices={"*": Price(1, 1)}), make_trace()
    helper = make_trace(parent=trace, agent="helper")
    assert await budget.on_tool_call_start(helper, call_of(helper, "below")) is None
    assert over(await budget.on_tool_call_start(trace, call_of(trace, "above")), TEXTS.tool_calls)
    await answer(budget, helper, used(1_000_000, 0))
    assert over(await next_step(budget, trace), TEXTS.cost)


async def test_runs_do_not_see_each_others_spending() -> None:
    """One interceptor serves many runs; each has its own figures."""
    budget, one, other = BudgetInterceptor(max_tokens=10), make_trace(run_id="1"), make_trace(run_id="2")
    await answer(budget, one, used(10, 0))
    assert await next_step(budget, one) is not None
    assert await next_step(budget, other) is None


async def test_a_tenants_day_adds_up_over_runs_and_begins_anew() -> None:
    """Runs of a day share the figure, the last part is added at the end of a run, and the next day begins at 0."""
    now, services = BILLION, MemoryServices()
    budget = BudgetInterceptor(tenant_tokens=100, tenant_cost=50, prices={"*": Price(1e5, 1e5)}, clock=lambda: now)
    first = make_trace(services=services, run_id="1")
    await answer(budget, first, used(60, 0))
    assert await next_step(budget, first) is None
    await answer(budget, first, used(30, 0))
    await budget.on_agent_end(first)
    await budget.on_agent_end(first)
    second = make_trace(services=services, run_id="2")
    assert await next_step(budget, second) is None
    await answer(budget, second, used(10, 0))
    assert over(await next_step(budget, second), TEXTS.tenant)
    assert json.loads(services.kept["budget/day"]) == {"day": "2001-09-09", "tokens": 100, "cost": pytest.approx(10)}
    now += 86_400
    assert await next_step(budget, second) is None


async def test_a_tenants_day_has_a_limit_of_cost_too() -> None:
    """The cost of all runs of a day ends the next one as well."""
    budget = BudgetInterceptor(tenant_cost=5, prices={"*": Price(1e5, 1e5)}, clock=lambda: BILLION)
    trace = make_trace(services=MemoryServices())
    await answer(budget, trace, used(0, 49))
    assert await next_step(budget, trace) is None
    await answer(budget, trace, used(0, 1))
    assert over(await next_step(budget, trace), TEXTS.tenant)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "at least one limit"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_seconds": -1}, "max_seconds"),
        ({"per_tool": {"a": -1}}, "per_tool a"),
        ({"max_cost": 1}, "prices"),
        ({"tenant_cost": 1}, "prices"),
        ({"max_tokens": 1, "warn_at": 0}, "warn_at"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, object], part: str) -> None:
    """The error names the limit."""
    with pytest.raises(ValueError, match=part):
        BudgetInterceptor(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="output"):
        Price(1, -1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["search", "look"]), min_size=1, max_size=4), max_size=8),
    st.integers(1, 8),
    st.integers(0, 3),
)
async def test_no_script_gets_more_calls_than_its_limits(
    batches: Sequence[Sequence[str]], limit: int, searches: int
) -> None:
    """However calls come in batches, no more are let through than the limits say, and none fewer than fit."""
    budget, trace = BudgetInterceptor(max_tool_calls=limit, per_tool={"search": searches}), make_trace()
    ran: list[str] = []
    ended = False
    for number, names in enumerate(batches):
        calls = [call_of(trace, f"{number}-{place}", name) for place, name in enumerate(names)]
        ended = await budget.on_action_start(trace, calls) is not None
        if ended:
            assert len(ran) + len(calls) > limit
            break
        ran += [call.name for call in calls if await budget.on_tool_call_start(trace, call) is None]
    assert len(ran) <= limit
    assert ran.count("search") == min(searches, ran.count("search"))
    if not ended:
        assert ran.count("look") == sum(names.count("look") for names in batches)
