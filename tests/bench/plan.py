"""How much is measured, and what a row reports.

A row has cases: the goal at 16 runs and at 64, say. Each is a ratio of ours to theirs; the row is met when all are.
"""

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tests.bench.children import Disturbed
from tests.bench.machine import Noise
from tests.bench.ratios import Goal, Ratio, Verdict, compare
from tests.bench.stage import Stage

A = TypeVar("A")

Outcome = Verdict | Literal["not measured"]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    ``runs`` and ``tokens`` are the most that a case asks for; 0: as many as the goal says.
    """

    name: str
    pairs: int
    long_pairs: int
    """Pairs of measurements that take seconds each."""
    single_runs: int
    """Pairs of single runs whose first text is timed."""
    flow: float
    """Seconds that a paced answer flows."""
    stored: int
    """Events of the longest run."""
    turns: int
    """Turns of the longest conversation; each is five messages."""
    batch: int
    """Runs that are opened at a time, for their memory."""
    runs: int = 0
    tokens: int = 0

    def at_most(self, runs: int) -> int:
        """Return how many runs to make of so many."""
        return min(runs, self.runs) if self.runs else runs

    def long(self, tokens: int) -> int:
        """Return how many tokens to ask for of so many."""
        return min(tokens, self.tokens) if self.tokens else tokens

    def flowing(self, pace: int) -> int:
        """Return the tokens of an answer that flows long enough, one every ``pace`` milliseconds."""
        return max(8, round(self.flow * 1000 / pace))


FULL = Plan("full", pairs=15, long_pairs=10, single_runs=40, flow=3.0, stored=100_000, turns=200, batch=64)
QUICK = Plan("quick", pairs=5, long_pairs=3, single_runs=30, flow=1.5, stored=100_000, turns=200, batch=32)
SMOKE = Plan(
    "smoke", pairs=2, long_pairs=2, single_runs=3, flow=0.6, stored=1_000, turns=4, batch=8, runs=4, tokens=100
)
"""Shows that the harness works; its figures mean nothing."""


@dataclass(frozen=True)
class Floor:
    """The least that the work of a case costs in this stack (``floor``). It tells what stands in the way of a goal, and
    decides nothing.
    """

    value: float
    """Its median, in the unit of the case."""
    to_theirs: Ratio
    """The floor to the one we are compared with, which is the best that ours could reach."""
    ours: Ratio
    """Ours to the floor."""


@dataclass(frozen=True)
class Case:
    """One ratio of a row, with the medians it was made of."""

    label: str
    ours: float
    theirs: float
    unit: str
    against: str
    """What "theirs" is."""
    ratio: Ratio
    goal: Goal
    floor: Floor | None = None
    """None: it was not measured, or there is none."""

    @property
    def verdict(self) -> Verdict:
        """Whether the goal is met."""
        return self.goal.verdict(self.ratio)


def case(
    label: str,
    goal: Goal,
    against: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    floor: Sequence[float] = (),
) -> Case:
    """Return the case of paired measurements, in the unit that is shown.

    A floor that lacks a measurement, or is not above 0, is left out.

    Raises:
        Disturbed: nothing was found that one could divide by.
    """
    try:
        ratio = compare(ours, theirs)
    except ValueError as error:
        raise Disturbed(f"{label}, vs {against}: {error}") from None
    return Case(
        label, statistics.median(ours), statistics.median(theirs), unit, against, ratio, goal,
        _floor(ours, theirs, floor),
    )  # fmt: skip


def _floor(ours: Sequence[float], theirs: Sequence[float], floor: Sequence[float]) -> Floor | None:
    if len(floor) != len(ours) or not all(value > 0 for value in floor):  # NaN is not
        return None
    return Floor(statistics.median(floor), compare(floor, theirs), compare(ours, floor))


@dataclass
class Report:
    """What a row has measured; filled while it goes on, so that what was measured stays when it fails."""

    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is to be known beside the ratios, such as the figures of the other peers."""
    failure: str = ""
    disturbed: bool = False
    """True when it failed because the machine was too busy."""
    noise: Noise | None = None

    @property
    def verdict(self) -> Outcome:
        """The worst of the cases."""
        found = {each.verdict for each in self.cases}
        if self.disturbed:
            return "too noisy"
        if self.failure or not found:
            return "not measured"
        order: tuple[Verdict, ...] = ("not met", "too noisy", "met")
        return next(verdict for verdict in order if verdict in found)


@dataclass(frozen=True)
class Row:
    """A row of the table of goals."""

    number: int
    title: str
    measure: Callable[[Stage, Plan, Report], Awaitable[None]]


async def in_turns(rounds: int, *measures: Callable[[], Awaitable[A]]) -> list[list[A]]:
    """Measure one after the other, round after round, after a round that does not count; returns a list for each."""
    for measure in measures:
        await measure()
    found: list[list[A]] = [[] for _ in measures]
    for number in range(rounds):
        order = list(zip(measures, found, strict=True))
        # Another begins each round, so that what slowly changes favours nobody. Of three or more none is measured twice
        # in a row, when it would find everything as it left it; of two either is, as often as the other.
        begins = number % len(order)
        for measure, values in (*order[begins:], *order[:begins]):
            values.append(await measure())
    return found
