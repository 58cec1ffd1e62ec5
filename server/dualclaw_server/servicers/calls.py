"""What every rpc has in common: who calls, which trace, and what becomes of whatever goes wrong.

Rules:

- Every call ends with a status. A CancelledError that comes from inside, with nobody having cancelled the
  call, would otherwise leave its client waiting for ever: it is INTERNAL.
- Rich errors go out by ``abort`` with trailing metadata, the one way that the tracing interceptor sees too.
- What nobody foresaw goes to the log with its traceback; the client learns the trace id to ask about.
- Calls at work are counted here, because ``server.stop`` does not wait for handlers and their cleanup.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc

from dualclaw.errors import EngineError, FieldError
from dualclaw.status import DETAILS_KEY, code_of, status_of
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.store import Full, StoreError
from dualclaw_server.servicers.access import Access
from dualclaw_server.servicers.logs import Redactor
from dualclaw_server.servicers.telemetry import trace_parent

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

STORE_RETRY: Final = 1.0
"""Seconds after which a store that failed may be asked again."""

_GONE: Final = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose caller is known."""

    caller: Caller
    trace: TraceParent


class Calls:
    """Answers calls, turns what goes wrong into a status, and counts the calls at work."""

    def __init__(self, access: Access, redactor: Redactor) -> None:
        self._access = access
        self._redactor = redactor
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open(self) -> int:
        """Number of calls at work, their cleanup included."""
        return self._open

    async def idle(self, timeout: float) -> bool:
        """Wait until no call is at work; False when some still were after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def answer(self, context: Context, handle: Callable[[Call], Awaitable[T]]) -> T:
        """Run a handler for its caller; whatever it raises becomes the call's status."""
        self._open += 1
        self._idle.clear()
        try:
            metadata = tuple(context.invocation_metadata() or ())
            trace = trace_parent(metadata)
            try:
                return await handle(Call(self._access.caller(metadata), trace))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    context.set_code(_why_cancelled(context))  # for the span; the client has its own code already
                    raise
                where = {"trace_id": trace.trace_id}
                _log.error("a cancellation from inside reached the rpc", extra=where, exc_info=True)
                refusal = _internal(trace)
            except grpc.aio.BaseError:  # the transport takes no more: the client is gone
                context.set_code(grpc.StatusCode.CANCELLED)
                await asyncio.sleep(_GONE)  # its cancellation is on the way; raising before would be logged as a fault
                raise
            except Exception as error:
                refusal = self._refusal(error, trace)
            status = status_of(self._redacted(refusal))  # its text is cut to what trailers can carry
            trailing = ((DETAILS_KEY, status.SerializeToString()),)
            return await context.abort(code_of(refusal.reason), status.message, trailing)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def _refusal(self, error: Exception, trace: TraceParent) -> EngineError:
        """Return an error as the client is told it; what nobody foresaw goes to the log."""
        if isinstance(error, EngineError):
            return error
        if isinstance(error, StoreError):
            return self._store_failed(error, trace)
        _log.error("an rpc failed unforeseen", extra={"trace_id": trace.trace_id}, exc_info=error)
        return _internal(trace)

    def _store_failed(self, error: StoreError, trace: TraceParent) -> EngineError:
        _log.error("the store failed: %r", error, extra={"trace_id": trace.trace_id})
        metadata = {"trace_id": trace.trace_id}
        if isinstance(error, Full):
            return EngineError("OVERLOADED", "the store has no room", metadata, retry_after=STORE_RETRY)
        return EngineError("STORE_UNAVAILABLE", "the store does not answer", metadata, retry_after=STORE_RETRY)

    def _redacted(self, error: EngineError) -> EngineError:
        clean = self._redactor.text
        if isinstance(error, FieldError):
            return FieldError({field: clean(problem) for field, problem in error.fields.items()})
        metadata = {key: clean(value) for key, value in error.metadata.items()}
        return EngineError(error.reason, clean(error.message), metadata, retry_after=error.retry_after)


def _internal(trace: TraceParent) -> EngineError:
    return EngineError(
        "INTERNAL", "the engine failed; its log has the cause under this trace_id", {"trace_id": trace.trace_id}
    )


def _why_cancelled(context: Context) -> grpc.StatusCode:
    remaining: float | None = context.time_remaining()
    if remaining is not None and remaining <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED
