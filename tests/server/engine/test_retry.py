"""Retries: what is tried again, how long it waits, and when it is given up."""

import math
import random

import pytest

from dualclaw.errors import Reason
from dualclaw_server.engine.model import ModelError
from dualclaw_server.engine.retry import Retries, RetryPolicy

START = 1000.0


class Longest(random.Random):
    """A source whose every draw is the longest."""

    def random(self) -> float:
        return 1.0


def make_retries(policy: RetryPolicy | None = None, chance: random.Random | None = None) -> Retries:
    return Retries(policy or RetryPolicy(), chance or Longest(), START)


def failed(
    reason: Reason = "MODEL_OVERLOADED", *, retryable: bool = True, retry_after: float | None = None, text: str = "busy"
) -> ModelError:
    return ModelError(reason, text, retryable=retryable, retry_after=retry_after)


@pytest.mark.parametrize(
    "reason", ["MODEL_UNAVAILABLE", "MODEL_OVERLOADED", "MODEL_TIMEOUT", "MODEL_STREAM_BROKEN", "MODEL_BAD_RESPONSE"]
)
def test_what_may_go_away_is_tried_again_and_what_may_not_is_not(reason: Reason) -> None:
    """The error says whether the same call may succeed a moment later, for every reason that leaves it open."""
    assert make_retries().next_delay(failed(reason), 1, START) is not None
    assert make_retries().next_delay(failed(reason, retryable=False), 1, START) is None


@pytest.mark.parametrize("reason", ["MODEL_AUTH", "CONTEXT_OVERFLOW"])
@pytest.mark.parametrize("retryable", [True, False])
def test_a_refused_key_and_an_overflow_are_never_tried_again(reason: Reason, retryable: bool) -> None:
    """The same call would fail the same way, even where the error claims otherwise or names a time."""
    assert make_retries().next_delay(failed(reason, retryable=retryable, retry_after=1), 1, START) is None


def test_throttling_that_speaks_of_too_many_tokens_is_tried_again() -> None:
    """The reason decides and not the words."""
    error = failed(text="ThrottlingException: Too many tokens, please wait")
    assert make_retries().next_delay(error, 1, START) == 1.0


def test_attempts_count_from_one_and_are_limited() -> None:
    """Three attempts are two retries."""
    retries = make_retries()
    assert [retries.next_delay(failed(), attempt, START) for attempt in (1, 2, 3, 4)] == [1.0, 2.0, None, None]
    assert make_retries(RetryPolicy(attempts=1)).next_delay(failed(), 1, START) is None
    for attempt in (0, -1):
        with pytest.raises(ValueError, match=f"count from 1, so there is no attempt {attempt}"):
            retries.next_delay(failed(), attempt, START)


def test_the_longest_wait_grows_by_the_factor_up_to_the_cap() -> None:
    """Without jitter in the way the waits are 0.5, 1.5, 4.5 and then the cap."""
    retries = make_retries(RetryPolicy(attempts=10, first_delay=0.5, factor=3, max_delay=5))
    assert [retries.next_delay(failed(), attempt, START) for attempt in range(1, 6)] == [0.5, 1.5, 4.5, 5, 5]


def test_jitter_spreads_waits_over_the_whole_range() -> None:
    """Runs that failed together come back apart, from at once to the longest wait."""
    retries = make_retries(chance=random.Random(1))
    delays = [retries.next_delay(failed(), 2, START) or 0.0 for _ in range(500)]
    assert 0 <= min(delays) < 0.1
    assert 1.9 < max(delays) <= 2
    assert 0.8 < sum(delays) / len(delays) < 1.2


def test_the_same_source_gives_the_same_waits() -> None:
    """Nothing but the source passed in is random."""
    twice = [
        [retries.next_delay(failed(), attempt, START) for attempt in (1, 2)]
        for retries in (make_retries(chance=random.Random(7)), make_retries(chance=random.Random(7)))
    ]
    assert twice[0] == twice[1]


def test_retry_after_is_a_floor_and_jitter_comes_on_top() -> None:
    """Nobody comes back too early, nor all in the same moment; the cap shortens no time that the vendor named."""
    retries = make_retries(chance=random.Random(1))
    delays = [retries.next_delay(failed(retry_after=50), 1, START) or 0.0 for _ in range(100)]
    assert 50 <= min(delays) < max(delays) <= 51
    assert len(set(delays)) > 90


@pytest.mark.parametrize("retry_after", [None, 0.0, -5.0, math.nan])
def test_no_usable_retry_after_leaves_the_wait_alone(retry_after: float | None) -> None:
    """Zero, the past and nonsense ask for no wait of their own."""
    assert make_retries().next_delay(failed(retry_after=retry_after), 1, START) == 1.0


@pytest.mark.parametrize("retry_after", [20.0, 20.5, 3600.0, math.inf])
def test_a_retry_after_beyond_the_deadline_gives_up_at_once(retry_after: float) -> None:
    """A wait that cannot end in time is not begun."""
    retries = make_retries(RetryPolicy(deadline=60))
    assert retries.next_delay(failed(retry_after=retry_after), 1, START + 40) is None


def test_no_attempt_begins_after_the_deadline() -> None:
    """Time spent in attempts and waits counts alike; jitter is cut to what is left, and with nothing left it ends."""
    retries = make_retries(RetryPolicy(first_delay=10, deadline=60))
    assert retries.next_delay(failed(), 1, START + 40) == 10
    assert retries.next_delay(failed(), 1, START + 57) == 3
    assert retries.next_delay(failed(retry_after=2), 1, START + 57) == 3
    assert retries.next_delay(failed(), 1, START + 60) is None
    assert retries.next_delay(failed(), 1, START + 500) is None


def test_the_defaults_are_those_of_the_design() -> None:
    """Three attempts, 1 s doubling to 30 s, 120 s in all."""
    policy = RetryPolicy()
    assert (policy.attempts, policy.first_delay, policy.factor, policy.max_delay, policy.deadline) == (3, 1, 2, 30, 120)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("attempts", [0, -1, 11, 2.5, math.nan, math.inf]),
        ("first_delay", [0.0, -1.0, math.nan, math.inf]),
        ("factor", [0.5, -2.0, 11.0, math.nan, math.inf]),
        ("max_delay", [0.5, -1.0, math.nan, math.inf]),
        ("deadline", [0.0, -1.0, math.nan, math.inf]),
    ],
)
def test_an_unusable_policy_is_refused_by_name(field: str, values: list[float]) -> None:
    """Each field out of its range is named with what would be right and what it is."""
    for value in values:
        arguments = {field: value}
        with pytest.raises(ValueError, match=rf"{field} must be .*, not {value}"):
            RetryPolicy(**arguments)  # type: ignore[arg-type]  # a wrong type is one of the cases


def test_every_wrong_field_is_named_at_once() -> None:
    """Who corrects a policy needs one round."""
    with pytest.raises(ValueError, match=r"attempts .*; first_delay .*; factor .*; max_delay .*; deadline"):
        RetryPolicy(attempts=0, first_delay=-1, factor=0, max_delay=-2, deadline=0)
