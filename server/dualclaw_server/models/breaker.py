"""The circuit breaker: an endpoint that keeps failing is left alone for a while, and then tried by one call.

Rules and their reasons:

- A circuit belongs to one model at one endpoint. Vendors overload and limit per model, and the sibling at the
  same address is often the very fallback that helps.
- What counts is a failure that may pass (``retryable``). A refused key, a bad request or a conversation that is
  too long says nothing about the endpoint, except that it answers; a call somebody cancelled says nothing at all.
- It opens after several failures in a row, or when too large a share of the recent calls failed. Then every
  call fails at once, naming when it will be tried again, so that a router goes on and a retry waits.
- After the cooldown one call is the probe; the others keep failing at once until it is over. Its first token, or
  an answer that refuses it for its own sake, closes the circuit: a long answer must not hold up everybody. A
  probe that is cancelled frees its place.
- The cooldown doubles each time it was not enough, is never shorter than the vendor's Retry-After, and varies
  upwards, so that many processes do not come back at the same moment.
- A call is judged by the state it was let in by: what began before the circuit opened changes nothing any more.
"""

import logging
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from dualclaw_server.engine.model import (
    ChatModel,
    ModelChunk,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    ToolSpec,
)

logger = logging.getLogger(__name__)

State = Literal["closed", "open", "half_open"]
Event = Literal["trip", "cool", "recover", "relapse", "free"]

TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = MappingProxyType(
    {
        ("closed", "trip"): "open",  # too many failures
        ("open", "cool"): "half_open",  # the cooldown is over; a call is let in as the probe
        ("half_open", "recover"): "closed",  # the probe was answered
        ("half_open", "relapse"): "open",  # the probe failed
        ("half_open", "free"): "open",  # the probe was cancelled; the next call is the probe
    }
)
"""Every move there is; any other raises and changes nothing."""

_JITTER = 0.25
_BUSY_PROBE_WAIT = 1.0
_REMEMBERED_CALLS = 200


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a circuit opens, and for how long."""

    failures: int = 5
    """Failures in a row that open it."""
    rate: float = 0.5
    """Share of failed calls within ``window`` that opens it."""
    window: float = 60.0
    """Seconds over which the share is looked at."""
    least_calls: int = 20
    """Calls within ``window`` below which the share says nothing."""
    cooldown: float = 5.0
    """Seconds it stays open the first time."""
    longest_cooldown: float = 120.0
    """Bound of the doubling. A vendor's Retry-After may be longer, and holds."""

    def __post_init__(self) -> None:
        if self.failures < 1 or self.least_calls < 1:
            raise ValueError("failures and least_calls must be at least 1")
        if not 0 < self.rate <= 1:
            raise ValueError("rate must be more than 0 and at most 1")
        if not 0 < self.cooldown <= self.longest_cooldown or not self.window > 0:
            raise ValueError("window and cooldown must be more than 0 s, and longest_cooldown no shorter than cooldown")


class IllegalMoveError(RuntimeError):
    """A circuit was asked for a move its table does not have; a defect of its user."""


class CircuitOpenError(ModelError):
    """The call was not made: the circuit is open. ``retry_after`` says when it will be tried again."""

    def __init__(self, name: str, retry_after: float, cause: ModelError | None, *, probed: bool) -> None:
        why = f" after {cause.reason}" if cause is not None else ""
        then = "another call is trying it right now" if probed else f"it will be tried again in {retry_after:.1f} s"
        super().__init__(
            "MODEL_UNAVAILABLE",
            f"Model {name} is not asked{why}: its circuit is open, and {then}.",
            retryable=True,
            detail=cause.detail or cause.message if cause is not None else "",
            hint="It failed several times in a row; the detail has the last failure.",
            retry_after=retry_after,
        )


class Breaker:
    """The circuit of one model at one endpoint; shared by everything that calls it. For one event loop.

    Args:
        name: what errors call the model.
        policy: when it opens.
        clock: seconds that only go forward.
        jitter: a number from 0 up to 1 per cooldown.
    """

    def __init__(
        self,
        name: str,
        policy: BreakerPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._name = name
        self._policy = policy or BreakerPolicy()
        self._clock = clock
        self._jitter = jitter
        self._state: State = "closed"
        self._era = 0
        self._in_a_row = 0
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_REMEMBERED_CALLS)
        self._cooldowns = 0
        self._due = 0.0
        self._cause: ModelError | None = None

    @property
    def state(self) -> State:
        """Where it is; an open circuit stays "open" until a call comes after its cooldown."""
        return self._state

    def admit(self) -> "Admission":
        """Let a call in; tell the admission how it went.

        Raises:
            CircuitOpenError: it is not let in.
        """
        if self._state == "half_open":
            raise CircuitOpenError(self._name, _BUSY_PROBE_WAIT, self._cause, probed=True)
        if self._state == "open":
            left = self._due - self._clock()
            if left > 0:
                raise CircuitOpenError(self._name, left, self._cause, probed=False)
            self._move("cool")
            return Admission(self, self._era, probe=True)
        return Admission(self, self._era, probe=False)

    def _move(self, event: Event) -> None:
        after = TRANSITIONS.get((self._state, event))
        if after is None:
            raise IllegalMoveError(f"a circuit that is {self._state} cannot {event}")
        if event != "free":
            log = logger.info if event in ("cool", "recover") else logger.warning
            log("circuit of model %s: %s -> %s", self._name, self._state, after)
        self._state = after
        self._era += 1

    def _count(self, failure: ModelError | None) -> None:
        """Note how a call went that began while the circuit was closed."""
        now = self._clock()
        self._recent.append((now, failure is not None))
        if failure is None:
            self._in_a_row = self._cooldowns = 0
            return
        self._in_a_row += 1
        self._cause = failure
        if self._in_a_row >= self._policy.failures or self._share_is_too_large(now):
            self._move("trip")
            self._cool_down(failure)

    def _share_is_too_large(self, now: float) -> bool:
        while self._recent and self._recent[0][0] < now - self._policy.window:
            self._recent.popleft()
        failed = sum(failure for _, failure in self._recent)
        return len(self._recent) >= self._policy.least_calls and failed >= self._policy.rate * len(self._recent)

    def _cool_down(self, failure: ModelError) -> None:
        plain = self._policy.cooldown * 2.0 ** min(self._cooldowns, 32)
        wait = max(min(plain, self._policy.longest_cooldown), failure.retry_after or 0.0)
        self._due = self._clock() + wait * (1 + _JITTER * self._jitter())
        self._cooldowns += 1
        self._cause = failure

    def _recover(self) -> None:
        self._move("recover")
        self._in_a_row = 0
        self._recent.clear()

    def _relapse(self, failure: ModelError) -> None:
        self._move("relapse")
        self._cool_down(failure)

    def _free(self) -> None:
        self._move("free")
        self._due = self._clock()


class Admission:
    """One call that was let in. Exactly the first of ``succeeded``, ``failed`` and ``dropped`` counts."""

    def __init__(self, breaker: Breaker, era: int, *, probe: bool) -> None:
        self._breaker = breaker
        self._era = era
        self._probe = probe
        self._over = False

    @property
    def _stale(self) -> bool:
        return self._over or self._era != self._breaker._era

    def answered(self) -> None:
        """The model began to answer: a probe closes the circuit, and goes on as a call like any other."""
        if self._probe and not self._stale:
            self._probe = False
            self._breaker._recover()
            self._era = self._breaker._era

    def succeeded(self) -> None:
        """The whole answer is there."""
        self.answered()
        if not self._stale:
            self._breaker._count(None)
        self._over = True

    def failed(self, error: ModelError) -> None:
        """The call failed."""
        if not self._stale:
            if not error.retryable:
                self.answered()
            elif self._probe:
                self._breaker._relapse(error)
            else:
                self._breaker._count(error)
        self._over = True

    def dropped(self) -> None:
        """The call ended without an outcome: it was cancelled, or its consumer left."""
        if self._probe and not self._stale:
            self._breaker._free()
        self._over = True


class GuardedModel:
    """A model behind a circuit breaker.

    Args:
        inner: the model.
        breaker: its circuit; None: one of its own with the usual policy.
    """

    def __init__(self, inner: ChatModel, breaker: Breaker | None = None) -> None:
        self._inner = inner
        self.breaker = breaker or Breaker(inner.name)

    @property
    def name(self) -> str:
        """The model's own name."""
        return self._inner.name

    @property
    def traits(self) -> ModelTraits:
        """What the model can do."""
        return self._inner.traits

    def with_tools(self, tools: Sequence[ToolSpec]) -> "GuardedModel":
        """Return the model with these tools, on the same circuit."""
        return GuardedModel(self._inner.with_tools(tools), self.breaker)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Yield what the model yields. Raises ModelError, CircuitOpenError among them."""
        admission = self.breaker.admit()
        try:
            async with aclosing(self._inner.stream(request)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, ModelResponse):
                        admission.succeeded()
                    else:
                        admission.answered()
                    yield chunk
        except ModelError as error:
            admission.failed(error)
            raise
        finally:
            admission.dropped()

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Return the whole answer. Raises ModelError, CircuitOpenError among them."""
        admission = self.breaker.admit()
        try:
            response = await self._inner.generate(request)
            admission.succeeded()
        except ModelError as error:
            admission.failed(error)
            raise
        finally:
            admission.dropped()
        return response

    async def aclose(self) -> None:
        """Close the model."""
        await self._inner.aclose()
