"""What repeated measurements say: the median of paired ratios, how sure that is, and whether a goal is met.

Ours and theirs are measured in turns, and each pair gives one ratio: what slows the machine for a while slows both. The
interval is a bootstrap of the median, with a fixed seed, so the same measurements always give the same verdict.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SEED = 20_240_806
RESAMPLES = 2_000
CONFIDENCE = 0.95

Verdict = Literal["met", "not met", "too noisy"]


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios with its 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Goal:
    """What a ratio shall be: at most ``bound``, or at least."""

    bound: float
    at_least: bool = False

    def verdict(self, ratio: Ratio) -> Verdict:
        """Judge by the whole interval: one that spans the goal decides nothing."""
        low, high, bound = ratio.low, ratio.high, self.bound
        met, missed = (low >= bound, high < bound) if self.at_least else (high <= bound, low > bound)
        return "met" if met else "not met" if missed else "too noisy"

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}x"


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return ours divided by theirs, pair by pair.

    Raises:
        ValueError: there are no pairs, as many of one as of the other, or one of theirs is not above 0.
    """
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"pairs are needed, not {len(ours)} and {len(theirs)} measurements")
    if min(theirs) <= 0:
        raise ValueError(f"nothing can be compared with {min(theirs)}")
    return spread([one / other for one, other in zip(ours, theirs, strict=True)])


def spread(ratios: Sequence[float]) -> Ratio:
    """Return the median of ratios with its interval."""
    chance = random.Random(SEED)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    outside = (1 - CONFIDENCE) / 2
    low, high = (medians[round(share * (RESAMPLES - 1))] for share in (outside, 1 - outside))
    return Ratio(statistics.median(ratios), low, high, len(ratios))
