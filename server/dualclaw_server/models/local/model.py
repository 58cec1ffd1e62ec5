"""The local model: SmolLM2-135M-Instruct on this machine, in about 400 MB of memory.

It is small and often wrong; it is there so that everything works before anybody has a key. Rules and their reasons:

- It answers greedily unless told otherwise, in a bounded number of tokens: the most likely words make the best
  tool calls, and a model that begins to repeat itself does not stop by itself.
- It is given the last few questions of a conversation, and fewer when they do not fit. So no conversation becomes
  too long for it, and the tenth question takes no longer than the second. What belongs to the question at hand is
  never left out; if that alone is too long, it is CONTEXT_OVERFLOW, and the caller may shorten it.
- It gives as many answers at once as it has slots; other calls wait for their turn here, where waiting for it is
  not taken for a model that does not answer.
- Nothing is started before the first call, so making it costs nothing.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Final, Self

import httpx
from httpx_aiohttp import AiohttpTransport

from dualclaw import Role
from dualclaw_server.engine.model import (
    ChatModel,
    ModelChunk,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    ToolSpec,
)
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.chat.dialect import DEFAULT_DIALECT
from dualclaw_server.models.endpoint import Endpoint, ModelTimeouts
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.local.form import LocalForm
from dualclaw_server.models.local.process import Served, Weights, WeightsProcess
from dualclaw_server.models.local.weights import SHA256, find_weights
from dualclaw_server.models.written.model import WrittenToolsModel

NAME: Final = "local"
"""What a setting calls it, and what clients are told."""
TITLE: Final = "SmolLM2-135M-Instruct"

SLOTS: Final = 2
"""Answers at once; each further one makes all slower."""
CONTEXT: Final = 4_096
"""Tokens of each, input and output together."""
EXAMPLES: Final = 1_024
"""Of these, what the form adds: examples and the offer of tools."""
ANSWER: Final = 320
"""Tokens of an answer, unless told otherwise; a dozen sentences."""
LONGEST_ANSWER: Final = 1_024
"""Tokens of an answer, whatever is told."""
QUESTIONS: Final = (4, 1)
"""How many of the last questions are given, the one at hand included; fewer when that does not fit."""


class LocalModel:
    """The local model, with tools. Owns its process.

    Args:
        weights: what it runs; None: the weights that are installed.
        timeouts: bounds of the waits; the one for the whole also bounds the wait for a turn.
        context_window: tokens it is to say it takes; never more than it does.

    Raises:
        ValueError: it is not installed.
    """

    def __init__(
        self,
        weights: Weights | None = None,
        *,
        timeouts: ModelTimeouts | None = None,
        context_window: int | None = None,
    ) -> None:
        weights = weights or Weights(find_weights(), SHA256, TITLE, slots=SLOTS, context=CONTEXT)
        traits = ModelTraits(context_window=weights.context - EXAMPLES, images=False, native_tools=False)
        if context_window is not None:
            traits = replace(traits, context_window=min(context_window, traits.context_window))
        self._inner: ChatModel = WrittenToolsModel(
            _PlainModel(weights, timeouts or ModelTimeouts(), traits), LocalForm()
        )

    @property
    def name(self) -> str:
        """What a setting calls it."""
        return NAME

    @property
    def traits(self) -> ModelTraits:
        """What it can do."""
        return self._inner.traits

    def with_tools(self, tools: Sequence[ToolSpec]) -> Self:
        """Return a new model that may call these tools; it shares this one's process."""
        made = copy.copy(self)
        made._inner = self._inner.with_tools(tools)
        return made

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Yield deltas as they arrive, and last the ModelResponse. Raises ModelError."""
        tries = _shortened(request)
        for number, asked in enumerate(tries, 1):
            try:
                async with aclosing(self._inner.stream(asked)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except ModelError as error:  # too long is known before anything is said
                if error.reason != "CONTEXT_OVERFLOW" or number == len(tries):
                    raise

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Return the whole answer. Raises ModelError."""
        *longer, shortest = _shortened(request)
        for asked in longer:
            try:
                return await self._inner.generate(asked)
            except ModelError as error:
                if error.reason != "CONTEXT_OVERFLOW":
                    raise
        return await self._inner.generate(shortest)

    async def aclose(self) -> None:
        """End its process."""
        await self._inner.aclose()


class _PlainModel:
    """The model without tools: it writes what it is asked to write. Owns the process."""

    def __init__(self, weights: Weights, timeouts: ModelTimeouts, traits: ModelTraits) -> None:
        self._process = WeightsProcess(weights)
        self._timeouts = timeouts
        self._traits = traits
        self._turns = asyncio.Semaphore(weights.slots)
        self._served: Served | None = None
        self._model: HttpChatModel | None = None

    @property
    def name(self) -> str:
        return NAME

    @property
    def traits(self) -> ModelTraits:
        return self._traits

    def with_tools(self, tools: Sequence[ToolSpec]) -> "_PlainModel":
        """Return this model: it is told of no tools."""
        return self

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        async with self._turn() as model, aclosing(model.stream(_bounded(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate(self, request: ModelRequest) -> ModelResponse:
        async with self._turn() as model:
            return await model.generate(_bounded(request))

    async def aclose(self) -> None:
        await self._process.aclose()
        if self._model is not None:
            await self._model.aclose()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[HttpChatModel]:
        """Wait for a slot and for the process; the slot is held while the context lasts."""
        try:
            async with asyncio.timeout(self._timeouts.whole):
                await self._turns.acquire()
        except TimeoutError:
            raise ModelError(
                "MODEL_OVERLOADED",
                f"The local model had no time for this call within {self._timeouts.whole:g} s.",
                retryable=True,
                hint="It gives few answers at once; a vendor's model gives more: set DUALCLAW_MODEL.",
            ) from None
        try:
            yield await self._at(await self._process.ready())
        finally:
            self._turns.release()

    async def _at(self, served: Served) -> HttpChatModel:
        """Return the model at the process's address; a process that was started anew has another one."""
        if self._model is None or served is not self._served:
            old, self._served = self._model, served
            # The environment's proxies are for the way out; this is another process of the same machine.
            transport = AiohttpTransport(trust_env=False, limits=httpx.Limits(max_connections=0))
            api = ChatApi(DEFAULT_DIALECT)
            endpoint = Endpoint(
                f"{served.address}/v1",
                api.path,
                served.key,
                timeouts=self._timeouts,
                auth=api.headers,
                # A connection costs nothing here; one that its server is about to drop would cost a call.
                headers={"connection": "close"},
                transport=transport,
            )
            self._model = HttpChatModel(TITLE, endpoint, api, traits=self._traits)
            if old is not None:
                await old.aclose()
        return self._model


def _bounded(request: ModelRequest) -> ModelRequest:
    """Return the request with its answer bounded, and greedy unless it says otherwise."""
    options = request.options
    most = min(options.max_output_tokens or ANSWER, LONGEST_ANSWER)
    temperature = 0.0 if options.temperature is None else options.temperature
    return replace(request, options=replace(options, max_output_tokens=most, temperature=temperature))


def _shortened(request: ModelRequest) -> list[ModelRequest]:
    """Return the request with as many of the last questions as may fit, then with fewer; at least one request."""
    asked = [at for at, message in enumerate(request.messages) if message.role == Role.ROLE_USER]
    starts = dict.fromkeys(asked[-count] if count < len(asked) else 0 for count in QUESTIONS)
    return [replace(request, messages=request.messages[start:], settled=0) for start in starts]
