"""The circuit breaker: which calls it lets in, what it counts, and that nobody is held up for ever."""

import asyncio
import json
from contextlib import aclosing, suppress
from dataclasses import dataclass

import pytest

from dualclaw_server.engine.model import ModelError, ReasoningDelta, Restart, TextDelta, ToolSpec
from dualclaw_server.models.breaker import (
    TRANSITIONS,
    Breaker,
    BreakerPolicy,
    CircuitOpenError,
    GuardedModel,
    IllegalMoveError,
)
from dualclaw_server.models.scripted import ScriptedModel

TURNS = [
    {"when": {"user": "down"}, "say": [{"fail": "MODEL_UNAVAILABLE", "message": "nobody is there"}]},
    {"when": {"user": "busy"}, "say": [{"fail": "MODEL_OVERLOADED", "retry_after": 70}]},
    {"when": {"user": "breaks"}, "say": [{"text": "part"}, {"fail": "MODEL_STREAM_BROKEN"}]},
    {"when": {"user": "key"}, "say": [{"fail": "MODEL_AUTH"}]},
    {"when": {"user": "request"}, "say": [{"fail": "MODEL_BAD_RESPONSE", "retryable": False}]},
    {"when": {"user": "long"}, "say": [{"fail": "CONTEXT_OVERFLOW"}]},
    {"when": {"user": "slow"}, "say": [{"text": "first"}, {"hang": True}]},
    {"when": {"user": "silent"}, "say": [{"hang": True}]},
    {"say": [{"reasoning": "hm"}, {"text": "hello"}]},
]
POLICY = BreakerPolicy(failures=3, cooldown=10, longest_cooldown=60, least_calls=10, window=60, rate=0.5)


@dataclass
class Clock:
    """Time that the test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def guarded(clock: Clock, policy: BreakerPolicy = POLICY, jitter: float = 0.0) -> GuardedModel:
    inner = ScriptedModel.parse(json.dumps({"name": "m", "turns": TURNS}))
    return GuardedModel(inner, Breaker("m", policy, clock=clock, jitter=lambda: jitter))


async def call(kit, model: GuardedModel, *texts: str) -> list[str]:
    """Call once per text, one after the other; return the reason of each, or its text."""
    found = []
    for text in texts:
        outcome = await kit.play(model, kit.asking(text))
        refused = isinstance(outcome.error, CircuitOpenError)
        found.append("open" if refused else outcome.error.reason if outcome.error else outcome.text)
    return found


@pytest.mark.parametrize("state", ["closed", "open", "half_open"])
@pytest.mark.parametrize("event", ["trip", "cool", "recover", "relapse", "free"])
def test_only_the_moves_of_the_table_exist(state: str, event: str) -> None:
    """A move of the table leads where it says; any other raises and changes nothing."""
    breaker = Breaker("m")
    for step in {"closed": [], "open": ["trip"], "half_open": ["trip", "cool"]}[state]:
        breaker._move(step)
    if (state, event) in TRANSITIONS:
        breaker._move(event)
        assert breaker.state == TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalMoveError, match=state):
            breaker._move(event)
        assert breaker.state == state


async def test_failures_in_a_row_open_it_and_a_success_between_starts_anew(kit) -> None:
    """Two failures, an answer and two failures leave it closed; the third in a row opens it, and nobody is asked."""
    model = guarded(Clock())
    assert await call(kit, model, "down", "busy", "hi", "down", "breaks") == [
        "MODEL_UNAVAILABLE",
        "MODEL_OVERLOADED",
        "hello",
        "MODEL_UNAVAILABLE",
        "MODEL_STREAM_BROKEN",
    ]
    assert model.breaker.state == "closed"
    assert await call(kit, model, "down", "hi") == ["MODEL_UNAVAILABLE", "open"]


async def test_an_open_circuit_names_when_it_will_be_tried_again(kit) -> None:
    """The error is MODEL_UNAVAILABLE, retryable then, with the last failure in its detail; generate gets it too."""
    clock = Clock()
    model = guarded(clock)
    await call(kit, model, *["down"] * 3)
    clock.now += 4
    error = (await kit.play(model, kit.asking("hi"))).error
    assert (error.reason, error.retryable, error.retry_after) == ("MODEL_UNAVAILABLE", True, 6)
    assert "Model m is not asked after MODEL_UNAVAILABLE" in error.message
    assert "tried again in 6.0 s" in error.message
    assert error.detail == "nobody is there"
    with pytest.raises(CircuitOpenError):
        await model.generate(kit.asking("hi"))


@pytest.mark.parametrize("text", ["key", "request", "long"])
async def test_refusals_for_their_own_sake_do_not_count(kit, text: str) -> None:
    """A refused key, a bad request and a conversation that is too long never open a circuit, nor reset its count."""
    model = guarded(Clock())
    await call(kit, model, *[text] * 20)
    assert model.breaker.state == "closed"
    await call(kit, model, "down", "down", text, "down")
    assert model.breaker.state == "open"


async def test_a_large_share_of_failures_within_the_window_opens_it(kit) -> None:
    """Every second call failing opens it once there are calls enough; what is older than the window is forgotten."""
    clock = Clock()
    model = guarded(clock)
    await call(kit, model, *["down", "hi"] * 4)
    clock.now += 61
    await call(kit, model, *["down", "hi"] * 4)
    assert model.breaker.state == "closed"
    await call(kit, model, "hi", "down")
    assert model.breaker.state == "open"


async def until_half_open(model) -> None:
    """Wait until a call is the probe."""
    async with asyncio.timeout(60):
        while model.breaker.state != "half_open":  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0.01)


async def test_after_the_cooldown_one_call_is_the_probe_and_closes_it(kit) -> None:
    """Until the cooldown is over every call is refused; the first one after it is let in, and its answer closes."""
    clock = Clock()
    model = guarded(clock)
    await call(kit, model, *["down"] * 3)
    clock.now += 9.9
    assert await call(kit, model, "hi") == ["open"]
    clock.now += 0.2
    answers = await call(kit, model, "hi", "down", "down", "hi")
    assert answers == ["hello", "MODEL_UNAVAILABLE", "MODEL_UNAVAILABLE", "hello"]


async def test_only_one_probe_at_a_time_and_its_first_token_closes_the_circuit(kit) -> None:
    """While the probe waits others are refused at once; as soon as it has begun to answer they are let in."""
    clock = Clock()
    model = guarded(clock)
    await call(kit, model, *["down"] * 3)
    clock.now += 11
    waiting = asyncio.create_task(kit.play(model, kit.asking("silent")))
    await until_half_open(model)
    error = (await kit.play(model, kit.asking("hi"))).error
    assert isinstance(error, CircuitOpenError)
    assert "another call is trying it right now" in error.message
    assert error.retry_after == 1
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(60), aclosing(model.stream(kit.asking("slow"))) as stream:
        assert await anext(stream) == TextDelta("first")
        assert model.breaker.state == "closed"
        assert await call(kit, model, "hi") == ["hello"]


async def test_a_cancelled_probe_frees_its_place_and_counts_for_nothing(kit) -> None:
    """After it was cancelled, or its consumer left before a token, the very next call is the probe."""
    clock = Clock()
    model = guarded(clock)
    await call(kit, model, *["down"] * 3)
    clock.now += 11
    task = asyncio.create_task(kit.play(model, kit.asking("silent")))
    await until_half_open(model)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert model.breaker.state == "open"
    generating = asyncio.create_task(model.generate(kit.asking("silent")))
    await until_half_open(model)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    assert await call(kit, model, "hi") == ["hello"]


async def test_cancelled_calls_count_for_nothing_in_a_closed_circuit(kit) -> None:
    """Any number of consumers that leave opens nothing."""
    model = guarded(Clock())
    for _ in range(20):
        async with asyncio.timeout(60), aclosing(model.stream(kit.asking("slow"))) as stream:
            await anext(stream)
    await call(kit, model, "down", "down")
    assert model.breaker.state == "closed"


async def test_a_failed_probe_doubles_the_cooldown_up_to_its_bound(kit) -> None:
    """10, 20, 40, then 60 s; an answer starts it over."""
    clock = Clock()
    model = guarded(clock)
    await call(kit, model, *["down"] * 3)
    for cooldown in (10, 20, 40, 60, 60):
        error = (await kit.play(model, kit.asking("hi"))).error
        assert error.retry_after == cooldown
        clock.now += cooldown
        assert await call(kit, model, "down") == ["MODEL_UNAVAILABLE"]
    clock.now += 60
    assert await call(kit, model, "hi", "down", "down", "down") == ["hello", *["MODEL_UNAVAILABLE"] * 3]
    assert (await kit.play(model, kit.asking("hi"))).error.retry_after == 10


async def test_the_vendors_retry_after_is_respected(kit) -> None:
    """A cooldown is never shorter than what the vendor asked for, also past the bound."""
    model = guarded(Clock())
    await call(kit, model, "down", "down", "busy")
    assert (await kit.play(model, kit.asking("hi"))).error.retry_after == 70


async def test_the_cooldown_varies_upwards_only() -> None:
    """With the largest jitter it is a quarter longer, with the smallest as long as it says."""
    failure = ModelError("MODEL_UNAVAILABLE", "x", retryable=True)
    for jitter, expected in ((0.0, 10.0), (1.0, 12.5)):
        breaker = Breaker("m", BreakerPolicy(failures=1, cooldown=10), clock=Clock(), jitter=lambda each=jitter: each)
        breaker.admit().failed(failure)
        with pytest.raises(CircuitOpenError) as refused:
            breaker.admit()
        assert refused.value.retry_after == expected


async def test_a_probe_that_is_refused_for_its_own_sake_closes_it(kit) -> None:
    """Whoever answers 401 is there: the next caller learns of the key, not of a circuit."""
    clock = Clock()
    model = guarded(clock)
    await call(kit, model, *["down"] * 3)
    clock.now += 11
    assert await call(kit, model, "key", "key", "hi") == ["MODEL_AUTH", "MODEL_AUTH", "hello"]


async def test_a_probe_that_breaks_after_its_first_token_is_a_failure_like_any_other(kit) -> None:
    """It closed the circuit; three of them in a row open it again, for longer, since nothing was ever whole."""
    clock = Clock()
    model = guarded(clock)
    await call(kit, model, *["down"] * 3)
    clock.now += 11
    await call(kit, model, "breaks", "breaks")
    assert model.breaker.state == "closed"
    await call(kit, model, "breaks")
    assert (await kit.play(model, kit.asking("hi"))).error.retry_after == 20


async def test_calls_from_before_it_opened_change_nothing() -> None:
    """A call that was let in while it was closed and ends later neither closes nor extends anything."""
    clock = Clock()
    breaker = Breaker("m", POLICY, clock=clock, jitter=lambda: 0.0)
    failure = ModelError("MODEL_UNAVAILABLE", "x", retryable=True)
    early = [breaker.admit() for _ in range(6)]
    for admission in early[:3]:
        admission.failed(failure)
    early[3].failed(failure)
    early[4].succeeded()
    assert breaker.state == "open"
    clock.now += 11
    breaker.admit()
    early[5].dropped()
    assert breaker.state == "half_open"


async def test_models_made_by_with_tools_share_the_circuit(kit) -> None:
    """Failures of one are failures of the others: it is the endpoint that is down."""
    model = guarded(Clock())
    await call(kit, model.with_tools([ToolSpec("f", "", "{}")]), *["down"] * 3)
    assert await call(kit, model, "hi") == ["open"]


async def test_a_guarded_model_is_the_model(kit) -> None:
    """Name, traits, every chunk and the response come through unchanged."""
    inner = ScriptedModel.parse(json.dumps({"name": "m", "turns": TURNS, "traits": {"context_window": 5000}}))
    model = GuardedModel(inner)
    assert (model.name, model.traits.context_window) == ("m", 5000)
    outcome = await kit.play(model)
    assert outcome.deltas == [ReasoningDelta("hm"), TextDelta("hello")]
    assert outcome.response == await model.generate(kit.asking())
    assert not any(isinstance(delta, Restart) for delta in outcome.deltas)
    await model.aclose()


@pytest.mark.parametrize(
    "wrong", [{"failures": 0}, {"rate": 0.0}, {"rate": 1.5}, {"cooldown": 0.0}, {"cooldown": 500.0}, {"window": 0.0}]
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    """Numbers that would open it never or always are a ValueError."""
    with pytest.raises(ValueError, match=r"must be|no shorter"):
        BreakerPolicy(**wrong)
