"""Rows that compare with the fastest peer: 3 to 7.

A peer's server is all there is of it; ours is engine and gateway, for that is what gives a browser the same stream.
Each row first measures every peer once or a few times. The two that need least are measured in turns with ours, and the
better of them is what we are compared with: the first look alone would take the lucky one for the best.

Beside them the floor is measured (``floor``, ``floor_gateway``), the least that two such processes can spend. Where it
fails the row goes on without it.
"""

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tests.bench import machine
from tests.bench.children import BenchError, Disturbed
from tests.bench.measuring import rest, whole
from tests.bench.plan import Case, Plan, Report, case, in_turns
from tests.bench.ratios import Goal
from tests.bench.stage import Stage, Target

ANSWER = 50
"""Tokens of an ordinary answer."""
_MILLI = 1e3
_LOOKS = 5
"""Times the first text of each peer is timed to find the fastest."""
_STAYS = (100, 40_000)
"""Tokens and pace of a run that stays open for longer than its row takes; it is hardly ever at work, and yet no model's
time limit ends it. At one token every two seconds some hundred runs kept some peers from opening more.
"""


async def total(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 3: the CPU of a run with 2 tools and an answer of 50 tokens, all of it."""
    await _whole_runs(stage, plan, report, [Answers(16, ANSWER), Answers(64, ANSWER)], Goal(0.1))


async def fixed(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 4: the CPU of a run with 2 tools and an answer of 1 token."""
    await _whole_runs(stage, plan, report, [Answers(64, 1)], Goal(0.1))


async def paced(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 5: the CPU of a run whose tokens come as a model writes them."""
    await _whole_runs(stage, plan, report, [Answers(64, ANSWER, 10), Answers(64, ANSWER, 30)], Goal(0.25))


@dataclass(frozen=True)
class Answers:
    """So many answers at once."""

    runs: int
    tokens: int
    pace: int = 0

    def __str__(self) -> str:
        pace = f" {self.pace} ms apart" if self.pace else ""
        return f"{self.runs} runs, {self.tokens} token{'s' if self.tokens > 1 else ''}{pace}"


async def _whole_runs(stage: Stage, plan: Plan, report: Report, cases: Sequence[Answers], goal: Goal) -> None:
    web = await stage.web()
    parts: list[Mapping[str, float]] = []

    async def each(target: Target, wanted: Answers) -> float:
        spent = await whole(stage, target, runs=wanted.runs, tokens=wanted.tokens, pace=wanted.pace)
        if target is web:
            parts.append(spent.cpu)
        return spent.total / wanted.runs * _MILLI

    few = replace(cases[0], runs=plan.at_most(16))
    peers = await _contenders(stage, report, lambda target: each(target, few), "ms/run")
    for wanted in (replace(given, runs=plan.at_most(given.runs)) for given in cases):
        parts.clear()
        floor = beside(stage, report, partial(each, wanted=wanted))
        ours, *theirs = (partial(each, target, wanted) for target in (web, *peers))
        sides = await in_turns(plan.long_pairs, ours, floor, *theirs)
        report.cases.append(_against_best(str(wanted), goal, "ms/run", peers, *sides))
        shares = {name: statistics.median(part[name] for part in parts) / wanted.runs * _MILLI for name in parts[0]}
        report.notes.append(f"{wanted}, ours: " + ", ".join(f"{name} {value:.2f} ms" for name, value in shares.items()))


async def first_text(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 6: how long the first text takes when model and tools take no time, for a run alone and for one of 64."""
    web = await stage.web()
    for runs, goal, pairs in ((1, Goal(0.5), plan.single_runs), (plan.at_most(64), Goal(0.125), plan.long_pairs)):

        async def wait(target: Target, runs: int = runs) -> float:
            spent = await whole(stage, target, runs=runs, tokens=plan.long(20), pace=10)
            return statistics.median(spent.firsts) * _MILLI

        async def look(target: Target, runs: int = runs) -> float:
            return statistics.median([await wait(target, runs) for _ in range(_LOOKS if runs == 1 else 1)])

        peers = await _contenders(stage, report, look, "ms")
        ours, *theirs = (partial(wait, target) for target in (web, *peers))
        sides = await in_turns(pairs, ours, beside(stage, report, wait), *theirs)
        label = "1 run" if runs == 1 else f"{runs} runs, their median"
        report.cases.append(_against_best(label, goal, "ms", peers, *sides))


async def memory(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 7: the memory of an open run, as what every further batch of open runs adds to the processes."""
    web, peers = await stage.web(), await stage.peers()
    grown = await _growth(stage, plan, [web, *peers.values()])
    try:  # after the others, whose runs are over by then: what breaks here is not theirs
        floor = await stage.floor()
        least = (await _growth(stage, plan, [floor]))[floor.name]
        if min(least) <= 0:
            raise Disturbed(f"{plan.batch} more runs took no memory")
    except BenchError as error:
        report.notes.append(f"no floor: {error}")
        least = []
    medians = {name: statistics.median(values) for name, values in grown.items() if name != web.name}
    best = min(medians, key=medians.__getitem__)
    _note_all(report, medians, "KB/run")
    label = f"{plan.long_pairs} times {plan.batch} runs more"
    report.cases.append(case(label, Goal(0.4), best, "KB/run", grown[web.name], grown[best], least))


async def _growth(stage: Stage, plan: Plan, targets: Sequence[Target]) -> Mapping[str, list[float]]:
    """Open batch after batch of runs at each target and end them all; returns the KB that a run of each batch took."""
    client = await stage.load()
    grown: dict[str, list[float]] = {target.name: [] for target in targets}
    tokens, pace = _STAYS
    for batch in range(plan.long_pairs + 1):  # all together fewer than our engine takes at once, unless it is told to
        for target in targets:
            before = _memory(target)
            await client.do("hold", {**target.ask, "runs": plan.batch, "tokens": tokens, "pace": pace})
            await rest(target)
            if batch:  # the first one loads code and fills pools
                grown[target.name].append((_memory(target) - before) / plan.batch / 1024)
    await client.do("release", {"provider": await stage.provider()})
    for target in targets:
        await rest(target)
    return grown


def _memory(target: Target) -> int:
    return sum(machine.memory_bytes(server.pid) for server in target.servers)


async def _contenders(
    stage: Stage, report: Report, measure: Callable[[Target], Awaitable[float]], unit: str
) -> Sequence[Target]:
    """Return the two peers for which the least is measured; all are warm since they were started."""
    peers = await stage.peers()
    found = {name: await measure(target) for name, target in peers.items()}
    _note_all(report, found, unit)
    return [peers[name] for name in sorted(found, key=found.__getitem__)[:2]]


def beside(
    stage: Stage, report: Report, measure: Callable[[Target], Awaitable[float]]
) -> Callable[[], Awaitable[float]]:
    """Return what measures the floor; once that fails the report has a note, and it is NaN."""
    broken = False

    async def once() -> float:
        nonlocal broken
        if not broken:
            try:
                return await measure(await stage.floor())
            except BenchError as error:
                broken = True
                report.notes.append(f"no floor: {error}")
        return math.nan

    return once


def _against_best(
    label: str,
    goal: Goal,
    unit: str,
    peers: Sequence[Target],
    ours: Sequence[float],
    floor: Sequence[float],
    *theirs: Sequence[float],
) -> Case:
    medians = [statistics.median(values) for values in theirs]
    best = medians.index(min(medians))
    return case(label, goal, peers[best].name, unit, ours, theirs[best], floor)


def _note_all(report: Report, found: Mapping[str, float], unit: str) -> None:
    ordered = sorted(found.items(), key=lambda item: item[1])
    report.notes.append("peers: " + ", ".join(f"{name} {value:.1f} {unit}" for name, value in ordered))
