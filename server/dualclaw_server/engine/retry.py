"""Retries of a model call: whether a failed attempt is followed by another one, and after how long.

Rules

- Only what may go away by itself is tried again: ``ModelError.retryable``. A key that is refused and a context
  that is too long never are, whatever the error says: the same call would fail the same way. Throttling texts
  that speak of too many tokens are no overflow; the reason decides, never the text.
- Waits grow by a factor up to a cap, and each is drawn between nothing and that ("full jitter"), so that the runs
  that failed together do not come back together. Retry-After is a floor and the draw is added to it, for the same
  reason; the cap does not shorten it.
- No attempt begins later than the deadline. One that could not begin in time is given up at once, so that nobody
  waits in vain. An attempt under way is not cut: an answer that streams well for longer than that is a good one,
  and the time-outs of the model and the wall time of the run bound it.
"""

import math
import random
from dataclasses import dataclass

from dualclaw_server.engine.model import ModelError

NEVER = frozenset({"MODEL_AUTH", "CONTEXT_OVERFLOW"})
"""Reasons that trying again cannot help with."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a model call is tried again. Raises ValueError naming every field that is wrong."""

    attempts: int = 3
    """Attempts in all, the first included; 1 to 10."""
    first_delay: float = 1.0
    """Longest wait after the first attempt, in seconds; above 0."""
    factor: float = 2.0
    """By how much the longest wait grows with each attempt; 1 to 10."""
    max_delay: float = 30.0
    """Seconds at which the longest wait stops growing; at least ``first_delay``. Retry-After may be longer."""
    deadline: float = 120.0
    """Seconds since the first attempt began after which none begins; above 0."""

    def __post_init__(self) -> None:
        wrong = []
        if not 1 <= self.attempts <= 10 or self.attempts != int(self.attempts):
            wrong.append(f"attempts must be a whole number from 1 to 10, not {self.attempts}")
        if not 0 < self.first_delay < math.inf:
            wrong.append(f"first_delay must be a number of seconds above 0, not {self.first_delay}")
        if not 1 <= self.factor <= 10:
            wrong.append(f"factor must be from 1 to 10, not {self.factor}")
        if not self.first_delay <= self.max_delay < math.inf:
            wrong.append(f"max_delay must be a number of seconds from first_delay on, not {self.max_delay}")
        if not 0 < self.deadline < math.inf:
            wrong.append(f"deadline must be a number of seconds above 0, not {self.deadline}")
        if wrong:
            raise ValueError("retry policy: " + "; ".join(wrong))


class Retries:
    """Decides about the attempts at one model call; it keeps no count of them and does not sleep itself.

    Args:
        policy: how patient it is.
        chance: where the jitter comes from.
        start: when the first attempt began, in seconds of any clock that never goes back.
    """

    def __init__(self, policy: RetryPolicy, chance: random.Random, start: float) -> None:
        self._policy = policy
        self._chance = chance
        self._end = start + policy.deadline

    def next_delay(self, error: ModelError, attempt: int, now: float) -> float | None:
        """Return the seconds to wait before the next attempt; None: give up with this error.

        Args:
            error: how the last attempt ended.
            attempt: its number, from 1; ValueError below that.
            now: by the clock of ``start``.
        """
        if attempt < 1:
            raise ValueError(f"attempts count from 1, so there is no attempt {attempt}")
        policy = self._policy
        if not error.retryable or error.reason in NEVER or attempt >= policy.attempts:
            return None
        left = self._end - now
        floor = max(0.0, error.retry_after or 0.0)
        if floor >= left:
            return None
        longest = min(policy.max_delay, policy.first_delay * policy.factor ** (attempt - 1))
        return min(floor + self._chance.uniform(0.0, longest), left)
