"""One model answer: every attempt at it, and what clients see of them.

Rules

- Interceptors see the request being built and stand around every attempt. After one that failed they may change
  the prompt (``on_reason_retry``); then it is assembled again, whatever the error was.
- What is transient is tried again after a wait (``retry``); attempts are told apart from a router's fallback to
  another model, which happens inside one attempt and begins the answer anew.
- Clients never see a token twice without a rewind (``agreement``). Only the agent at the root shows anything.
- A context that was shortened is no retry of the same call: it takes none of the attempts away, and may be
  shortened MAX_SHORTENINGS times.
- What failed attempts cost is counted.
- No attempt, and no fallback, starts once the lease on the run is lost.
- An answer has an end, and a stream leaves room for others; a model that knows neither is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from dualclaw import ContentPart, Message, RetryMode
from dualclaw_server.engine.agreement import Action, Shown
from dualclaw_server.engine.interceptor import ModelCall, Prompt
from dualclaw_server.engine.model import (
    ChatModel,
    ModelChunk,
    ModelError,
    ModelOptions,
    ModelRequest,
    ModelResponse,
    ReasoningDelta,
    Restart,
    TextDelta,
)
from dualclaw_server.engine.outcome import Replace
from dualclaw_server.engine.retry import Retries
from dualclaw_server.engine.tool import contained

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope

log = logging.getLogger(__name__)

MAX_SHORTENINGS = 4
"""Times an overflowing context may be shortened for one answer."""
MAX_ANSWER = 4_000_000
"""Characters of one answer, reasoning and calls included; no model has that much to say, so it would never end."""
BREATH = 0.005
"""Seconds after which a stream that is never idle must let others work, at the latest in twice that time: nothing else
could stop it.
"""
_WIDEST = 4
"""Bytes of the widest code point."""
SEPARATOR = "\n\n"
"""Sets the text of an answer apart from that of the one before in the same segment."""
_CHANCE = random.SystemRandom()
_LIVE, _HOLD, _CONTINUE = RetryMode.RETRY_MODE_LIVE, RetryMode.RETRY_MODE_HOLD, RetryMode.RETRY_MODE_CONTINUE


class Answer:
    """A model call, from its first attempt to its answer."""

    def __init__(self, scope: Scope, prompt: Prompt) -> None:
        self.options = prompt.options
        """Options of the last attempt."""
        self._scope = scope
        self._trace = scope.trace
        self._prompt = prompt
        self._writer = scope.segment.writer
        self._mode = scope.trace.options.retry_mode
        self._attempt = 0
        self._shortenings = 0
        self._why = ""
        if scope.at_root:
            base = self._writer.shown()
            separator = SEPARATOR if base and not base.endswith("\n") else ""
            self._shown = Shown(base, self._writer.shown_reasoning(), separator)
            scope.segment.showing = self._shown
        else:
            self._shown = Shown()

    async def run(self) -> ModelResponse:
        """Return the answer. Raises ModelError, or an Outcome that an interceptor wants."""
        loop = asyncio.get_running_loop()
        retries = Retries(self._scope.agent.retry, _CHANCE, loop.time())
        while True:
            self._attempt += 1
            self._scope.segment.lease.check()
            try:
                model, request = await self._assemble()
                return await self._try(model, request)
            except ModelError as error:
                await self._after(error, retries, loop.time())

    async def _after(self, error: ModelError, retries: Retries, now: float) -> None:
        """Prepare the next attempt, or raise the error when there is to be none."""
        if error.usage is not None:
            self._trace.add_usage(error.usage)
        overflow = error.reason == "CONTEXT_OVERFLOW"
        tried = self._attempt - self._shortenings
        number = self._shortenings + 1 if overflow else tried
        limit = MAX_SHORTENINGS if overflow else self._scope.agent.retry.attempts - 1
        changed = False
        if number <= limit:
            changed = await self._scope.chain.reason_retry(self._trace, error, number, self._prompt)
        delay = retries.next_delay(error, tried, now)
        if delay is None and not changed:
            raise error
        self._shortenings += overflow
        self._why = error.reason
        log.info(
            "attempt %d at a model call failed: %s; trying again",
            self._attempt,
            error.reason,
            extra={"run_id": self._trace.key.run_id, "reason": error.reason, "changed": changed},
        )
        if delay:
            await asyncio.sleep(delay)

    async def _assemble(self) -> tuple[ChatModel, ModelRequest]:
        """Build the request of an attempt; what interceptors add to the prompt meanwhile is of this attempt only."""
        scope, mode = self._scope, self._mode
        if mode == _CONTINUE and (self._attempt == 1 or not scope.model.traits.continues or not scope.at_root):
            mode = _LIVE
        self._shown.begin(mode)
        prompt = replace(self._prompt, messages=list(self._prompt.messages), tools=list(self._prompt.tools))
        outcome = await scope.chain.prepare(self._trace, prompt.options, prompt)
        self.options = prompt.options
        if isinstance(outcome, Replace) and isinstance(outcome.value, ModelOptions):
            self.options = outcome.value
        else:
            scope.obey(outcome)
        settled = 0 if scope.chain else self._trace.settled  # an interceptor may change anything
        request = ModelRequest(prompt.messages, prompt.instructions, self.options, self._shown.prefix, settled)
        return scope.bound(prompt.tools), request

    async def _try(self, model: ChatModel, request: ModelRequest) -> ModelResponse:
        """Make one attempt."""
        shown, writer, visible = self._shown, self._writer, self._scope.at_root
        response: ModelResponse | None = None
        breath, size = Breath(), 0
        with contained(f"model {model.name}"):
            async with aclosing(self._stream(model, request)) as chunks:
                async for chunk in chunks:
                    if breath.due():
                        await asyncio.sleep(0)
                    if isinstance(chunk, ModelResponse):
                        response = chunk
                        break
                    if isinstance(chunk, Restart):
                        size = 0
                        self._scope.segment.lease.check()
                        self._fall_back(chunk)
                        continue
                    size += len(chunk.text)
                    if size > MAX_ANSWER:
                        raise _too_long(model)
                    if visible:
                        self._show(shown.take(chunk))
                        if writer.congested:
                            await writer.room()
        if response is None:
            raise ModelError("MODEL_BAD_RESPONSE", f"Model {model.name} ended without an answer.", retryable=True)
        if response.message.ByteSize() + sum(map(len, response.bad_arguments.values())) > _WIDEST * MAX_ANSWER:
            raise _too_long(model)
        if visible:
            self._show(shown.end())
        return _whole(response, request.prefix)

    def _stream(self, model: ChatModel, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        def call_model(call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
            self._scope.segment.lease.check()
            return model.stream(call.request)

        around = self._scope.chain.stream(call_model)
        return around(ModelCall(self._trace, model.name, request, self._attempt))

    def _fall_back(self, restart: Restart) -> None:
        self._why = restart.error.reason
        log.info(
            "model call falls back to %s: %s",
            restart.model,
            restart.error.reason,
            extra={"run_id": self._trace.key.run_id, "reason": restart.error.reason, "model": restart.model},
        )
        self._shown.begin(_HOLD if self._mode == _HOLD else _LIVE)

    def _show(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, TextDelta):
                self._writer.text(action.text)
            elif isinstance(action, ReasoningDelta):
                self._writer.reasoning(action.text)
            else:
                reason = f"another attempt after {self._why}"
                self._writer.rewind(action.text, action.reasoning, reason=reason, attempt=self._attempt)


class Breath:
    """Tells when a stream has to let others work: those that wait for something by themselves do so all the time."""

    __slots__ = ("_loop", "_others_worked", "_since")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin(self._loop.time())

    def due(self) -> bool:
        """Return True, and begin anew, once nobody else could work for ``BREATH`` seconds."""
        now = self._loop.time()
        if now - self._since <= BREATH:
            return False
        due = not self._others_worked
        self._begin(now)
        return due

    def _begin(self, now: float) -> None:
        self._since = now
        self._others_worked = False
        self._loop.call_soon(self._worked)

    def _worked(self) -> None:
        self._others_worked = True


def _too_long(model: ChatModel) -> ModelError:
    text = f"Model {model.name} gave an answer of more than {MAX_ANSWER} characters."
    return ModelError("MODEL_BAD_RESPONSE", text, retryable=False)


def _whole(response: ModelResponse, prefix: str) -> ModelResponse:
    """Return a response that goes on from a prefix with the prefix in it."""
    if not prefix:
        return response
    message = Message(role=response.message.role)
    joined = False
    for part in response.message.parts:
        if part.WhichOneof("part") == "text" and not joined:
            message.parts.append(ContentPart(text=prefix + part.text))
            joined = True
        else:
            message.parts.append(part)
    if not joined:
        message.parts.insert(0, ContentPart(text=prefix))
    response.message.CopyFrom(message)
    return response
