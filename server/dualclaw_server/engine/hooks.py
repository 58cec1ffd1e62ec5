"""Calling one hook: what it returns and raises, sorted into outcomes, failures of its own and what is none of its.

A failure of the interceptor's own is forgiven (logged) when it fails open. It is never what the store says, for no
interceptor can help that, and never a cancel of the task at work; but a hook can raise CancelledError by itself,
because something it waited for was cancelled, and then nobody wants to stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar, cast

from dualclaw.errors import EngineError
from dualclaw_server.engine.interceptor import Interceptor, outcome_problem
from dualclaw_server.engine.outcome import Outcome
from dualclaw_server.engine.store import StoreError
from dualclaw_server.engine.tool import contained

log = logging.getLogger(__name__)

T = TypeVar("T")

Hook = Callable[[], Awaitable[object]]


class InterceptorFailed(EngineError):
    """An interceptor that lets nothing pass unchecked has failed."""

    def __init__(self, name: str, hook: str, error: BaseException) -> None:
        what = error.message if isinstance(error, EngineError) else f"{type(error).__name__}."
        super().__init__("INTERNAL", f"Interceptor {name} failed in {hook}: {what}")


def stopped(error: BaseException) -> bool:
    """Tell whether an error means that this very task is to stop."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def forgive(item: Interceptor, hook: str, error: BaseException) -> None:
    """Log an interceptor's own failure. Raises InterceptorFailed when it fails closed."""
    log.error("interceptor %s failed in %s", item.name, hook, exc_info=error)
    if item.fail_closed:
        raise InterceptorFailed(item.name, hook, error) from error


async def call_hook(item: Interceptor, hook: str, call: Hook) -> Outcome | None:
    """Call a hook and return what it wants. Raises InterceptorFailed and StoreError."""
    try:
        with contained(item.name):
            outcome = await call()
    except Outcome as raised:
        outcome = raised
    except StoreError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        if stopped(error):
            raise
        forgive(item, hook, error)
        return None
    if outcome is None:
        return None
    if problem := outcome_problem(hook, outcome):
        forgive(item, hook, TypeError(problem))
        return None
    wanted = cast("Outcome", outcome)
    wanted.origin = wanted.origin or item.name
    return wanted


async def call_end_hook(item: Interceptor, hook: str, call: Hook, grace: float) -> Outcome | None:
    """Call a hook that has ``grace`` seconds; later it has failed and is left behind. Raises as ``call_hook``."""
    running = asyncio.ensure_future(call_hook(item, hook, call))
    done, _ = await asyncio.wait({running}, timeout=grace)
    if done:
        return running.result()
    running.cancel()
    running.add_done_callback(lambda left: left.cancelled() or left.exception())
    forgive(item, hook, TimeoutError(f"takes more than {grace:g} s and is left behind"))
    return None


async def to_the_end(ending: Coroutine[object, object, T]) -> T:
    """Await end hooks; a cancel that arrives meanwhile takes effect once they are through."""
    running = asyncio.ensure_future(ending)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():  # bounded: every hook in it is
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()
        raise cancelled
    return running.result()
