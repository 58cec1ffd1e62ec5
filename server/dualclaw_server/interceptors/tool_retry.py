"""Transient failures of tools are tried again, where nothing can happen twice.

Two questions decide, and both must be answered yes:

1. May it go away by itself? The failure is tool.failed or tool.timeout, and it says so itself (``retryable``), or
   it is certain that nothing happened (``not_done``), or a broken connection or a timeout is behind it. Bad
   arguments, refusals and a tool's own "no" go to the model at once: it can do better than repeat. So do
   exceptions that the same arguments would raise again, such as ValueError and LookupError.
2. Can it do no harm?

   | effect | tried again |
   | --- | --- |
   | read, idempotent | yes; the idempotency key is the same for every attempt |
   | reconcile | the tool's lookup is asked first: an earlier result is the result, None means go on, and when it fails nobody knows, so no |
   | once | only when it is certain that nothing happened |

   Nothing happened also makes a lookup needless.

Waits grow by two up to a cap, each drawn between half of that and all of it. No attempt begins after the deadline,
nor after the run was cancelled. What is an error in the end stays one, as the last attempt gave it.

Attempts and lookups go through ``call_next``, so everything further in, the sanitizer above all, sees each.
"""  # noqa: E501  # a table row

from __future__ import annotations

import asyncio
import errno
import logging
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from dualclaw import Diagnosis
from dualclaw.events import make_diagnosis
from dualclaw_server.engine.interceptor import Interceptor, Observation, ToolNext, ToolRequest
from dualclaw_server.engine.tool import Lookup, Tool

CODES = frozenset({"tool.failed", "tool.timeout"})
"""Codes of failures that can be transient."""
_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ETIMEDOUT,
    }
)
_LASTING = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    FileNotFoundError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    PermissionError,
    TypeError,
    ValueError,
)
_CHAIN = 10
_MOST = 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolRetryPolicy:
    """How patient to be with one tool. Raises ValueError naming what is wrong."""

    attempts: int = 3
    """Attempts in all, from 1 (never again) to 20."""
    delay: float = 1.0
    """Seconds before the second attempt; twice as many before each further one."""
    max_delay: float = 20.0
    """Seconds that a wait never exceeds."""
    deadline: float = 120.0
    """Seconds after the start of the first attempt from which on none begins."""

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= _MOST:
            raise ValueError(f"attempts must be from 1 to {_MOST}, not {self.attempts}")
        for name in ("delay", "max_delay", "deadline"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of seconds from 0 on, not {value}")


class ToolRetryInterceptor(Interceptor):
    """Tries transient failures of tools again.

    Args:
        attempts: in all, the first included. Default 3.
        delay: seconds before the second attempt. Default 1.
        max_delay: longest wait in seconds. Default 20.
        deadline: seconds from the start after which no attempt begins. Default 120.
        per_tool: policies of single tools, by name; they stand in place of the four above.
        chance: where jitter comes from; give a seeded one to tests.

    Raises ValueError for numbers out of range.
    """

    def __init__(
        self,
        attempts: int = 3,
        delay: float = 1.0,
        *,
        max_delay: float = 20.0,
        deadline: float = 120.0,
        per_tool: Mapping[str, ToolRetryPolicy] = MappingProxyType({}),
        chance: random.Random | None = None,
        name: str = "",
        order: int = 0,
        enabled: bool = True,
        switchable: bool = False,
        fail_closed: bool = False,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled, switchable=switchable, fail_closed=fail_closed)
        self._policy = ToolRetryPolicy(attempts, delay, max_delay, deadline)
        self._per_tool = dict(per_tool)
        self._chance = chance or random.Random()

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        """Run the tool, and again as long as that helps and does no harm."""
        policy = self._per_tool.get(request.tool.name, self._policy)
        clock = asyncio.get_running_loop().time
        end = clock() + policy.deadline
        observation = await call_next(request)
        for done in range(1, policy.attempts):
            if not is_transient(observation) or not may_repeat(request.tool, observation) or _cancelling():
                return observation
            wait = self.next_wait(policy, done)
            if clock() + wait >= end:
                return observation
            log.info("tool %s is tried again: attempt %d in %.1f s", request.tool.name, done + 1, wait)
            await asyncio.sleep(wait)
            if request.tool.lookup is not None and request.tool.effect == "reconcile" and not observation.not_done:
                earlier = await _ask(request, request.tool.lookup, call_next)
                if earlier is not None:
                    return observation if earlier.is_error else earlier
            observation = await call_next(replace(request, attempt=request.attempt + done))
            if not observation.is_error and observation.diagnosis is None:
                observation = replace(observation, diagnosis=_retried(done + 1))
        return observation

    def next_wait(self, policy: ToolRetryPolicy, done: int) -> float:
        """Return the seconds to wait after this many attempts, drawn anew each time."""
        longest = min(policy.max_delay, policy.delay * 2.0 ** (done - 1))
        return longest * self._chance.uniform(0.5, 1.0)


def is_transient(observation: Observation) -> bool:
    """Tell whether a failure may go away by itself."""
    diagnosis = observation.diagnosis
    if not observation.is_error or diagnosis is None or diagnosis.code not in CODES:
        return False
    if observation.not_done or _is_network(observation.error):
        return True
    return diagnosis.retryable and not isinstance(observation.error, _LASTING)


def may_repeat(tool: Tool, observation: Observation) -> bool:
    """Tell whether a failed call may be made again; of a reconcile tool: once its lookup found nothing."""
    can_ask = tool.effect == "reconcile" and tool.lookup is not None
    return observation.not_done or can_ask or tool.effect in ("read", "idempotent")


def _is_network(error: BaseException | None) -> bool:
    """Tell whether a broken connection or a timeout is behind an exception, however it is wrapped."""
    for _ in range(_CHAIN):
        if error is None:
            return False
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        error = error.__cause__ or error.__context__
    return False


def _cancelling() -> bool:
    """Tell whether the run asked this call to stop, though something further in has swallowed it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _ask(request: ToolRequest, lookup: Lookup, call_next: ToolNext) -> Observation | None:
    """Ask a tool's lookup, on the tool's own way; None: nothing has happened. An error: nobody knows."""
    found: list[object | None] = []

    async def look(**_: object) -> object | None:
        found.append(await lookup(request.context.idempotency_key))
        return found[-1]

    asking = replace(request.tool, function=look, types={}, context_parameter="")
    observation = await call_next(replace(request, tool=asking))
    return None if not observation.is_error and found and found[-1] is None else observation


def _retried(attempts: int) -> Diagnosis:
    return make_diagnosis(code="tool.retried", severity="info", summary=f"It took {attempts} attempts.")
