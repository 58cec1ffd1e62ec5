"""Row 10: what nothing may grow with. A cost is compared with itself at a smaller size, which stands for "theirs"."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from tests.bench.measuring import turns, whole
from tests.bench.plan import Case, Plan, Report, case, in_turns
from tests.bench.ratios import Goal
from tests.bench.stage import Stage, Target

FLAT = Goal(1.3)
_MICRO, _MILLI = 1e6, 1e3
_FEW = 5
"""Repetitions at most, of costs that take long to measure."""
_MESSAGES = 5
"""Messages of a turn: the question, two calls in one message, their two results, the answer."""
_SHORT_TURNS = 2
"""Turns of a conversation that has just begun."""


async def growth(stage: Stage, plan: Plan, report: Report) -> None:
    """Measure all three; each with an engine that no other row has filled."""
    engine = await stage.engine(use="growth")
    plan = replace(plan, pairs=min(plan.long_pairs, _FEW))
    await _events(stage, plan, report, engine)
    await _open_runs(stage, plan, report, engine)
    await _turns(stage, plan, report, engine)


async def _events(stage: Stage, plan: Plan, report: Report, engine: Target) -> None:
    """An event of a long run and of a short one: the slope between two lengths, so a run's fixed cost plays no part."""

    async def cpu(runs: int, tokens: int) -> float:
        return (await whole(stage, engine, runs=runs, tokens=tokens, mixed=True)).total / runs

    middle = max(20, plan.stored // 100)

    async def slope(runs: int, low: int, high: int) -> float:
        return (await cpu(runs, high) - await cpu(runs, low)) / (high - low) * _MICRO

    # As many events in all; one run after the other would add up idle time, so the short ones run side by side.
    many = plan.at_most(32)
    sides = await in_turns(plan.pairs, lambda: slope(1, middle, plan.stored), lambda: slope(many, 10, middle))
    label = f"an event, runs of {middle:,} to {plan.stored:,} events"
    report.cases.append(case(label, FLAT, f"10 to {middle:,}", "us/event", *sides))


async def _open_runs(stage: Stage, plan: Plan, report: Report, engine: Target) -> None:
    """A run when it is alone, one of 64, one of 1,000."""
    alone, some, many = 1, plan.at_most(64), plan.at_most(1_000) * (1 if not plan.runs else 2)

    def each(runs: int, **more: bool) -> Callable[[], Awaitable[float]]:
        async def measure() -> float:
            return (await whole(stage, engine, runs=runs, tokens=20, **more)).total / runs * _MILLI

        return measure

    report.cases.append(
        await _larger(plan, f"a run, {some} open", f"{alone} open", each(some), each(some, one_by_one=True))
    )
    report.cases.append(await _larger(plan, f"a run, {many:,} open", f"{some} open", each(many), each(some)))


async def _turns(stage: Stage, plan: Plan, report: Report, engine: Target) -> None:
    """A turn of a conversation of many messages, and of one that has just begun."""
    count = 10 if not plan.runs else 2
    _, long = await turns(stage, engine, plan.turns)

    async def later() -> float:
        return (await turns(stage, engine, count, long))[0] * _MILLI

    async def early() -> float:
        _, fresh = await turns(stage, engine, _SHORT_TURNS)
        return (await turns(stage, engine, 2, fresh))[0] * _MILLI

    label = f"a turn after {plan.turns * _MESSAGES:,} messages"
    found = await _larger(plan, label, f"{_SHORT_TURNS * _MESSAGES} messages", later, early)
    report.cases.append(found)
    each = (found.ours - found.theirs) / (plan.turns - _SHORT_TURNS) / _MESSAGES * _MILLI
    report.notes.append(f"a turn costs {each:.0f} us more for each message before it")


async def _larger(
    plan: Plan, label: str, against: str, large: Callable[[], Awaitable[float]], small: Callable[[], Awaitable[float]]
) -> Case:
    sides = await in_turns(plan.pairs, large, small)
    return case(label, FLAT, against, "ms", *sides)
