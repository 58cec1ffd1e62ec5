"""Around hooks: one interceptor standing around what is further in.

An exception of the interceptor's own is told apart from one that only passed through: what ``call_next`` raised is
never held against it. One that fails open is left out, with what it had already got from further in.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from dualclaw.errors import EngineError
from dualclaw_server.engine.interceptor import (
    AnswerNext,
    Interceptor,
    ModelCall,
    ModelNext,
    Observation,
    ToolNext,
    ToolRequest,
)
from dualclaw_server.engine.model import ModelChunk, ModelResponse
from dualclaw_server.engine.outcome import Outcome
from dualclaw_server.engine.store import StoreError

log = logging.getLogger(__name__)


class InterceptorFailed(EngineError):
    """An interceptor that lets nothing pass unchecked has failed."""

    def __init__(self, name: str, hook: str, error: BaseException) -> None:
        super().__init__("INTERNAL", f"Interceptor {name} failed in {hook}: {type(error).__name__}.")


def around_stream(item: Interceptor, call_next: ModelNext) -> ModelNext:
    """Return a model that streams with an interceptor around it."""

    async def layer(call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
        begun = False
        passed: BaseException | None = None

        async def inner(inner_call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
            nonlocal begun, passed
            begun = True
            try:
                async with aclosing(call_next(inner_call)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except Exception as error:
                passed = error
                raise

        try:
            async with aclosing(item.intercept_stream(call, inner)) as chunks:
                async for chunk in chunks:
                    begun = True
                    yield chunk
            return
        except (Outcome, EngineError, StoreError):
            raise
        except Exception as error:
            if error is passed:
                raise
            log.exception("interceptor %s failed in intercept_stream", item.name)
            if item.fail_closed or begun:  # half an answer cannot be taken over by another
                raise InterceptorFailed(item.name, "intercept_stream", error) from error
        async with aclosing(call_next(call)) as chunks:
            async for chunk in chunks:
                yield chunk

    return layer


def around_call(item: Interceptor, call_next: AnswerNext) -> AnswerNext:
    """Return a model that answers in one piece with an interceptor around it."""

    async def layer(call: ModelCall) -> ModelResponse:
        answer: ModelResponse | None = None
        passed: BaseException | None = None

        async def inner(inner_call: ModelCall) -> ModelResponse:
            nonlocal answer, passed
            try:
                answer = await call_next(inner_call)
            except Exception as error:
                passed = error
                raise
            return answer

        try:
            return await item.intercept_call(call, inner)
        except (Outcome, EngineError, StoreError):
            raise
        except Exception as error:
            if error is passed:
                raise
            log.exception("interceptor %s failed in intercept_call", item.name)
            if item.fail_closed:
                raise InterceptorFailed(item.name, "intercept_call", error) from error
            return answer if answer is not None else await call_next(call)

    return layer


def around_tool(
    item: Interceptor, call_next: ToolNext, withheld: Callable[[InterceptorFailed], Observation]
) -> ToolNext:
    """Return a tool with an interceptor around it; ``withheld`` makes an observation of a guard's failure."""

    async def layer(request: ToolRequest) -> Observation:
        last: Observation | None = None
        passed: BaseException | None = None

        async def inner(inner_request: ToolRequest) -> Observation:
            nonlocal last, passed
            try:
                last = await call_next(inner_request)
            except Exception as error:
                passed = error
                raise
            return last

        try:
            observation = await item.intercept_tool(request, inner)
            if not isinstance(observation, Observation):
                raise TypeError(f"intercept_tool must return an Observation, not {type(observation).__name__}")
            return observation
        except (Outcome, StoreError):
            raise
        except Exception as error:
            if error is passed:
                raise
            log.exception("interceptor %s failed in intercept_tool", item.name)
            if item.fail_closed:
                return withheld(InterceptorFailed(item.name, "intercept_tool", error))
            return last if last is not None else await call_next(request)

    return layer
