"""Retries of tools: what is tried again, what never is, and that nothing happens twice."""

import asyncio
import errno
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import ContentPart
from dualclaw_server.engine.interceptor import Observation, ToolRequest
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import Ask, Suspend
from dualclaw_server.engine.tool import Effect, NotDone, Tool, ToolContext, ToolRaised
from dualclaw_server.interceptors.tool_retry import ToolRetryInterceptor, ToolRetryPolicy

from .traces import call_of, make_trace

OK = Observation([ContentPart(text="done")])
NOT_DONE = failure("TOOL_FAILED", "failed", retryable=True, error=NotDone("no"), not_done=True)
TIMEOUT = failure("TOOL_TIMEOUT", "late", retryable=True)
BROKEN = failure("TOOL_FAILED", "failed", error=ConnectionResetError("reset"))


def a_tool(effect: Effect = "read", lookup: Sequence[object] | None = None) -> Tool:
    """Return a tool whose lookup gives these one after another; an exception is raised."""
    answers = iter(lookup or [])

    async def look(key: str) -> object | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    asks = look if effect == "reconcile" else None
    return Tool("work", "", {"type": "object"}, lambda: None, effect=effect, lookup=asks)


@dataclass
class Inner:
    """What stands further in: gives outcomes one after another, and runs what was put in the tool's place."""

    outcomes: Sequence[Observation]
    tool: Tool
    attempts: list[int] = field(default_factory=list)
    lookups: int = 0

    async def __call__(self, request: ToolRequest) -> Observation:
        if request.tool.function is not self.tool.function:
            self.lookups += 1
            try:
                output = await request.tool.call(request.args, request.context)
            except Exception as error:
                return failure("TOOL_FAILED", "failed", error=error)
            return Observation(output.parts)
        self.attempts.append(request.attempt)
        return self.outcomes[len(self.attempts) - 1]


async def run(
    *outcomes: Observation, tool: Tool | None = None, retry: ToolRetryInterceptor | None = None
) -> tuple[Observation, Inner]:
    tool = tool or a_tool()
    inner = Inner(outcomes, tool)
    retry = retry or ToolRetryInterceptor(delay=0)
    return await retry.intercept_tool(a_request(tool), inner), inner


def a_request(tool: Tool) -> ToolRequest:
    trace = make_trace()
    context = ToolContext("tenant", "anna", "run", "conversation", "c1", "key", {}, trace)
    return ToolRequest(trace, call_of(trace, name="work", tool=tool), tool, {}, context)


async def test_a_transient_failure_is_tried_again() -> None:
    """Attempts are numbered, and the result says how many it took."""
    observation, inner = await run(TIMEOUT, BROKEN, OK)
    assert observation.text == "done"
    assert inner.attempts == [1, 2, 3]
    assert observation.diagnosis is not None
    assert observation.diagnosis.code == "tool.retried"
    assert "3" in observation.diagnosis.summary


async def test_a_first_success_is_left_alone() -> None:
    """Nothing is added to what needed no retry."""
    observation, inner = await run(OK)
    assert observation is OK
    assert inner.attempts == [1]


async def test_what_is_an_error_in_the_end_stays_one() -> None:
    """After the last attempt its failure is the result, as it came."""
    observation, inner = await run(BROKEN, BROKEN, TIMEOUT)
    assert observation is TIMEOUT
    assert len(inner.attempts) == 3


@pytest.mark.parametrize(
    "lasting",
    [
        failure("TOOL_BAD_ARGUMENTS", "bad", retryable=True, not_done=True),
        failure("TOOL_UNKNOWN", "unknown", not_done=True),
        failure("TOOL_REJECTED", "no", not_done=True),
        failure("TOOL_OUTCOME_UNKNOWN", "who knows", retryable=True),
        failure("TOOL_FAILED", "its own no", error=ToolRaised("no such city")),
        failure("TOOL_FAILED", "bad value", retryable=True, error=ValueError("a month has no day 32")),
        failure("TOOL_FAILED", "no file", retryable=True, error=FileNotFoundError(errno.ENOENT, "gone")),
        Observation(is_error=True),
        replace(TIMEOUT, is_error=False),
    ],
)
async def test_what_would_fail_again_goes_to_the_model_at_once(lasting: Observation) -> None:
    """Only what may go away by itself is repeated."""
    observation, inner = await run(lasting)
    assert observation is lasting
    assert inner.attempts == [1]


async def test_a_broken_connection_is_found_behind_other_exceptions() -> None:
    """Libraries wrap the cause; it counts all the same."""
    error = RuntimeError("request failed")
    error.__cause__ = OSError(errno.ECONNREFUSED, "refused")
    _, inner = await run(failure("TOOL_FAILED", "failed", error=error), OK)
    assert inner.attempts == [1, 2]


async def test_a_tool_that_acts_is_repeated_only_when_nothing_happened() -> None:
    """NotDone may always be tried again; a timeout of such a tool never."""
    _, inner = await run(NOT_DONE, TIMEOUT, OK, tool=a_tool("once"))
    assert inner.attempts == [1, 2]


async def test_a_reconcile_tool_is_asked_first() -> None:
    """What the lookup finds is the result, and the tool does not run again."""
    observation, inner = await run(TIMEOUT, tool=a_tool("reconcile", ["booked"]))
    assert observation.text == "booked"
    assert inner.attempts == [1]
    assert inner.lookups == 1


async def test_a_lookup_that_finds_nothing_lets_it_run_again() -> None:
    """None means nothing happened."""
    observation, inner = await run(TIMEOUT, OK, tool=a_tool("reconcile", [None]))
    assert observation.text == "done"
    assert inner.attempts == [1, 2]


async def test_a_lookup_that_fails_ends_it() -> None:
    """Nobody knows what happened, so the first failure is the result."""
    observation, inner = await run(TIMEOUT, tool=a_tool("reconcile", [RuntimeError("down")]))
    assert observation is TIMEOUT
    assert inner.attempts == [1]


async def test_no_lookup_is_needed_when_nothing_happened() -> None:
    """NotDone is certain."""
    _, inner = await run(NOT_DONE, OK, tool=a_tool("reconcile"))
    assert inner.lookups == 0
    assert inner.attempts == [1, 2]


async def test_a_cancelled_call_is_not_tried_again() -> None:
    """A cancel during the wait ends it, and one that something further in swallowed is noticed."""
    waiting = asyncio.Event()
    attempts = 0

    async def failing(request: ToolRequest) -> Observation:
        nonlocal attempts
        attempts += 1
        waiting.set()
        return TIMEOUT

    retry = ToolRetryInterceptor(delay=60, max_delay=60)
    task = asyncio.create_task(retry.intercept_tool(a_request(a_tool()), failing))
    await asyncio.wait_for(waiting.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert attempts == 1

    async def swallowing(request: ToolRequest) -> Observation:
        nonlocal attempts
        attempts += 1
        waiting.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return TIMEOUT
        return OK

    waiting.clear()
    task = asyncio.create_task(ToolRetryInterceptor(delay=0).intercept_tool(a_request(a_tool()), swallowing))
    await asyncio.wait_for(waiting.wait(), 60)
    task.cancel()
    assert await asyncio.wait_for(task, 60) is TIMEOUT
    assert attempts == 2


async def test_what_asks_people_passes_through() -> None:
    """A suspension is no failure."""

    async def asking(request: ToolRequest) -> Observation:
        raise Suspend(Ask("May I?"))

    with pytest.raises(Suspend):
        await ToolRetryInterceptor().intercept_tool(a_request(a_tool()), asking)


async def test_no_attempt_begins_after_the_deadline() -> None:
    """A wait that would end too late is not begun."""
    retry = ToolRetryInterceptor(delay=60, max_delay=60, deadline=20)
    observation, inner = await asyncio.wait_for(run(TIMEOUT, retry=retry), 50)
    assert observation is TIMEOUT
    assert inner.attempts == [1]


async def test_a_tool_can_have_a_policy_of_its_own() -> None:
    """One attempt means never again."""
    retry = ToolRetryInterceptor(delay=0, per_tool={"work": ToolRetryPolicy(attempts=1)})
    _, inner = await run(TIMEOUT, retry=retry)
    assert inner.attempts == [1]


@given(seed=st.integers(), delay=st.floats(0, 100), cap=st.floats(0, 100), done=st.integers(1, 19))
def test_waits_grow_up_to_the_cap(seed: int, delay: float, cap: float, done: int) -> None:
    """Each lies between half of what it may be and all of it."""
    policy = ToolRetryPolicy(20, delay, cap, 1000)
    longest = min(cap, delay * 2 ** (done - 1))
    wait = ToolRetryInterceptor(chance=random.Random(seed)).next_wait(policy, done)
    assert longest / 2 <= wait <= longest


@pytest.mark.parametrize(
    ("name", "value"),
    [("attempts", 0), ("attempts", 21), ("delay", -1.0), ("max_delay", float("nan")), ("deadline", float("inf"))],
)
def test_numbers_out_of_range_are_refused(name: str, value: float) -> None:
    """The message names the number."""
    with pytest.raises(ValueError, match=name):
        ToolRetryPolicy(**{name: value})  # type: ignore[arg-type]  # attempts is an int


OUTCOMES = st.sampled_from(
    [
        OK,
        NOT_DONE,
        TIMEOUT,
        BROKEN,
        failure("TOOL_FAILED", "failed", retryable=True, error=RuntimeError("x")),
        failure("TOOL_FAILED", "failed", error=ToolRaised("no")),
        failure("TOOL_OUTCOME_UNKNOWN", "who knows", retryable=True),
        failure("TOOL_BAD_ARGUMENTS", "bad", not_done=True),
    ]
)


@settings(deadline=None)
@given(
    outcomes=st.lists(OUTCOMES, min_size=8, max_size=8),
    effect=st.sampled_from(["read", "idempotent", "reconcile", "once"]),
    found=st.lists(st.sampled_from([None, "found", RuntimeError("down")]), min_size=8, max_size=8),
    attempts=st.integers(1, 8),
)
async def test_nothing_happens_twice(
    outcomes: list[Observation], effect: Effect, found: list[object], attempts: int
) -> None:
    """Whatever happens, what may have acted is repeated only if it is harmless, or a lookup says it did not."""
    retry = ToolRetryInterceptor(attempts, 0)
    observation, inner = await run(*outcomes, tool=a_tool(effect, found), retry=retry)
    assert len(inner.attempts) <= attempts
    repeated = outcomes[: len(inner.attempts) - 1]
    assert all(outcome.is_error for outcome in repeated)
    if effect == "once":
        assert all(outcome.not_done for outcome in repeated)
    if effect == "reconcile":
        uncertain = sum(not outcome.not_done for outcome in repeated)
        assert inner.lookups >= uncertain
        assert all(answer is None for answer in found[:uncertain])
    assert observation.is_error is False or observation is outcomes[len(inner.attempts) - 1]
