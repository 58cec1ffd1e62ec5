"""Around hooks: one interceptor standing around what is further in.

Rules

- What ``call_next`` raised is never held against the interceptor it passed through.
- One that fails open is left out, with what it had already got from further in: an answer or an observation that
  is complete is taken, a failure from further in stays one, and only what has not come to an end is asked for anew.
- An outcome from further in (a tool that asks people, say) cannot be swallowed: whoever catches it and goes on as
  if nothing was wanted is overruled, unless a later ``call_next`` went well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from dualclaw_server.engine.hooks import InterceptorFailed, forgive, stopped
from dualclaw_server.engine.interceptor import (
    AnswerNext,
    Interceptor,
    ModelCall,
    ModelNext,
    Observation,
    ToolNext,
    ToolRequest,
    outcome_problem,
)
from dualclaw_server.engine.model import ModelChunk, ModelError, ModelResponse, ReasoningDelta, Restart, TextDelta
from dualclaw_server.engine.outcome import Outcome, Replace
from dualclaw_server.engine.store import StoreError
from dualclaw_server.engine.tool import contained

_INNER = "what is further in"
_CHUNKS = (TextDelta, ReasoningDelta, Restart, ModelResponse)


def around_stream(item: Interceptor, call_next: ModelNext) -> ModelNext:
    """Return a model that streams with an interceptor around it."""
    hook = "intercept_stream"

    async def layer(call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
        passed: BaseException | None = None
        answer: ModelResponse | None = None
        unanswered = given = False

        async def inner(inner_call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
            nonlocal passed, answer, unanswered
            passed, answer, unanswered = None, None, False
            try:
                with contained(_INNER):
                    async with aclosing(call_next(inner_call)) as chunks:
                        async for chunk in chunks:
                            if isinstance(chunk, ModelResponse):
                                answer = chunk
                            yield chunk
                unanswered = answer is None
            except Exception as error:
                passed = error
                raise

        try:
            with contained(item.name):
                async with aclosing(item.intercept_stream(call, inner)) as chunks:
                    async for chunk in chunks:
                        if not isinstance(chunk, _CHUNKS):
                            raise TypeError(f"{hook} must yield chunks of a model, not {type(chunk).__name__}")
                        last = isinstance(chunk, ModelResponse)
                        if last and isinstance(passed, Outcome):
                            raise passed
                        given = True
                        yield chunk
                        if last:
                            return
            if unanswered:  # by what is further in
                return
            raise TypeError(f"{hook} must yield a ModelResponse at the end")
        except (Exception, asyncio.CancelledError) as error:
            replacement = _sift(item, hook, error, passed)
        whole = replacement if isinstance(replacement, ModelResponse) else answer
        if whole is not None:
            yield whole
            return
        if given:
            why = f"Interceptor {item.name} failed in {hook}."
            yield Restart(call.model, ModelError("MODEL_STREAM_BROKEN", why, retryable=True))
        async with aclosing(call_next(call)) as chunks:
            async for chunk in chunks:
                yield chunk

    return layer


def around_call(item: Interceptor, call_next: AnswerNext) -> AnswerNext:
    """Return a model that answers in one piece with an interceptor around it."""
    hook = "intercept_call"

    async def layer(call: ModelCall) -> ModelResponse:
        passed: BaseException | None = None
        answer: ModelResponse | None = None

        async def inner(inner_call: ModelCall) -> ModelResponse:
            nonlocal passed, answer
            passed = answer = None
            try:
                with contained(_INNER):
                    answer = await call_next(inner_call)
            except Exception as error:
                passed = error
                raise
            return answer

        try:
            with contained(item.name):
                response = await item.intercept_call(call, inner)
            if not isinstance(response, ModelResponse):
                raise TypeError(f"{hook} must return a ModelResponse, not {type(response).__name__}")
            if isinstance(passed, Outcome):
                raise passed
            return response
        except (Exception, asyncio.CancelledError) as error:
            replacement = _sift(item, hook, error, passed)
        if isinstance(replacement, ModelResponse):
            return replacement
        return answer if answer is not None else await call_next(call)

    return layer


def around_tool(
    item: Interceptor, call_next: ToolNext, withheld: Callable[[InterceptorFailed], Observation]
) -> ToolNext:
    """Return a tool with an interceptor around it; ``withheld`` makes an observation of a guard's failure."""
    hook = "intercept_tool"

    async def layer(request: ToolRequest) -> Observation:
        passed: BaseException | None = None
        last: Observation | None = None

        async def inner(inner_request: ToolRequest) -> Observation:
            nonlocal passed, last
            passed = last = None
            try:
                with contained(_INNER):
                    last = await call_next(inner_request)
            except Exception as error:
                passed = error
                raise
            return last

        try:
            with contained(item.name):
                observation = await item.intercept_tool(request, inner)
            if not isinstance(observation, Observation):
                raise TypeError(f"{hook} must return an Observation, not {type(observation).__name__}")
            if isinstance(passed, Outcome):
                raise passed
            return observation
        except (Exception, asyncio.CancelledError) as error:
            try:
                replacement = _sift(item, hook, error, passed)
            except InterceptorFailed as failure:
                return withheld(failure)
        if isinstance(replacement, Observation):
            return replacement
        return last if last is not None else await call_next(request)

    return layer


def _sift(item: Interceptor, hook: str, error: BaseException, passed: BaseException | None) -> object:
    """Sort what came out of an around hook; returns the value of a Replace, or None when the hook is left out.

    Raises ``error`` where it is not the interceptor's own failure, InterceptorFailed, or ``passed``.
    """
    if error is passed or stopped(error) or isinstance(error, StoreError):
        raise error
    if isinstance(error, ModelError) and hook != "intercept_tool":  # how one says that this attempt is no good
        raise error
    if isinstance(error, Outcome):
        if problem := outcome_problem(hook, error):
            error = TypeError(problem)
        elif isinstance(error, Replace):
            return error.value
        else:
            error.origin = error.origin or item.name
            raise error
    forgive(item, hook, error)
    if isinstance(passed, Exception):
        raise passed
    return None
