"""The driver that all wire APIs share: one call over HTTP, its stream read, folded and ended.

Rules and their reasons:

- One network read is one batch: all its events are folded, and neighbouring text becomes one delta (``deltas``), so
  a consumer that lags is not made to pay per token.
- Which wait bounds a read depends on how far the answer is: the first token, silence, or the end mark after the
  answer is whole. An answer that is whole stays whole, whatever the connection does afterwards.
- What came before a failure is shown before it is raised; tokens that were reported by then are in the error.

The API itself (``api``) says how requests read and how answers are folded; the connection is in ``endpoint``.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Self

import msgspec

from dualclaw_server.engine.model import (
    ModelChunk,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    ToolSpec,
)
from dualclaw_server.models.api import AnswerFold, Api
from dualclaw_server.models.beginnings import Beginnings
from dualclaw_server.models.endpoint import Answer, Endpoint, ModelTimeouts
from dualclaw_server.models.failures import UnreadableError
from dualclaw_server.models.history import call_ids, without_images
from dualclaw_server.models.sse import DEFAULT_MAX_EVENT_BYTES, EventTooLargeError, SSEReader

_EVENT_STREAM = "text/event-stream"
_EARLY_BYTES = 1024 * 1024
_NO_STREAM = ("text/html", "application/json", "application/problem+json", "application/xml", "text/xml")
_BODY_BYTES = 64 * 1024 * 1024
_TOOL_SETS = 64  # most agents have one; each run asks for it anew


class HttpChatModel:
    """A model behind an HTTP endpoint. Owns the endpoint.

    Args:
        name: the model's name at the vendor.
        endpoint: where it is; made with the path and the headers of the API.
        api: how it speaks.
        traits: what it can do; None: the defaults.
        max_event_bytes: bound of one event of a stream.

    Raises:
        ValueError: the name is empty.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        api: Api,
        *,
        traits: ModelTraits | None = None,
        max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES,
    ) -> None:
        if not name:
            raise ValueError("the model needs a name")
        self._name = name
        self._endpoint = endpoint
        self._api = api
        self._traits = traits or ModelTraits()
        self._max_event_bytes = max_event_bytes
        self._tools: msgspec.Raw | None = None
        self._tool_names: frozenset[str] = frozenset()
        self._tool_sets: dict[tuple[ToolSpec, ...], tuple[msgspec.Raw | None, frozenset[str]]] = {}
        self._prepare = list if self._traits.images else without_images
        self._beginnings = Beginnings(api.items, api.call_ids, self._prepare)

    @property
    def name(self) -> str:
        """The model's name at the vendor."""
        return self._name

    @property
    def traits(self) -> ModelTraits:
        """What it can do."""
        return self._traits

    def with_tools(self, tools: Sequence[ToolSpec]) -> Self:
        """Return a new model that may call these tools; it shares this one's connections.

        Raises:
            ValueError: a tool's parameters are not a JSON object.
        """
        made = copy.copy(self)
        key = tuple(tools)
        known = self._tool_sets.get(key)
        if known is None:
            known = self._api.tools(tools) if tools else None, frozenset(tool.name for tool in tools)
            if len(self._tool_sets) >= _TOOL_SETS:
                del self._tool_sets[next(iter(self._tool_sets))]
            self._tool_sets[key] = known
        made._tools, made._tool_names = known
        return made

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Yield deltas, one batch per network read, and last the ModelResponse. Raises ModelError."""
        timeouts = self._endpoint.timeouts
        start = asyncio.get_running_loop().time()
        whole = False
        body, taken = self._body(request, stream=True)
        answer = await self._endpoint.post(body, accept=_EVENT_STREAM, within=timeouts.first_token)
        try:
            fold = self._api.answer(self._endpoint.redact, taken, answer.request_id)
            try:
                if answer.media_type.endswith("+json") or answer.media_type in _NO_STREAM:
                    await self._read_body(answer, fold)
                else:
                    waits = _Waits(timeouts, start)
                    reader = SSEReader(max_event_bytes=self._max_event_bytes)
                    early = bytearray()
                    while not fold.done:
                        data = await self._read(answer, fold, waits)
                        failure = _feed(reader, fold, data)
                        _keep_early(early, fold, data)
                        for chunk in fold.take():
                            yield chunk
                        if failure is not None:
                            raise failure
                        if data is None:
                            break
                    self._end(answer, fold, early)
                for chunk in fold.take():
                    yield chunk
                response = fold.response()
            except ModelError as error:
                _add_usage(error, fold)
                raise
            whole = True
            yield response
        finally:
            if whole:
                await answer.drain()
            await answer.aclose()

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Return the whole answer, asked for in one piece. Raises ModelError."""
        body, taken = self._body(request, stream=False)
        answer = await self._endpoint.post(body, accept="application/json", within=self._endpoint.timeouts.whole)
        try:
            fold = self._api.answer(self._endpoint.redact, taken, answer.request_id)
            try:
                if answer.media_type == _EVENT_STREAM:
                    await self._read_events(answer, fold)
                else:
                    await self._read_body(answer, fold)
                return fold.response()
            except ModelError as error:
                _add_usage(error, fold)
                raise
        finally:
            await answer.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._endpoint.aclose()

    def _body(self, request: ModelRequest, *, stream: bool) -> tuple[bytes, frozenset[str]]:
        """Return the body of a request, and the ids of all calls in the conversation."""
        beginning = self._beginnings.of(request.messages, request.settled, self._tool_names)
        rest = request.messages[len(beginning.messages) :]
        body = self._api.body(
            replace(request, messages=self._prepare(rest)),
            model=self._name,
            tools=self._tools,
            tool_names=self._tool_names,
            stream=stream,
            beginning=beginning,
        )
        return body, beginning.call_ids | call_ids(rest)

    async def _read(self, answer: Answer, fold: AnswerFold, waits: "_Waits") -> bytes | None:
        """Return the next bytes, or None when the answer is over: at its end, or whole and nothing follows."""
        try:
            data = await answer.read(waits.due(answer.now(), fold))
        except TimeoutError:
            if fold.finished:
                return None
            raise waits.error(fold) from None
        except ModelError:
            if fold.finished:
                return None
            raise
        return data

    async def _read_events(self, answer: Answer, fold: AnswerFold) -> None:
        """Read a stream nobody asked for; like any stream it is over at its end mark, not when the body ends."""
        waits = _Waits(self._endpoint.timeouts, answer.now())
        reader = SSEReader(max_event_bytes=self._max_event_bytes)
        early = bytearray()
        while not fold.done:
            data = await self._read(answer, fold, waits)
            failure = _feed(reader, fold, data)
            _keep_early(early, fold, data)
            fold.take()
            if failure is not None:
                raise failure
            if data is None:
                break
        self._end(answer, fold, early)

    async def _read_body(self, answer: Answer, fold: AnswerFold) -> None:
        """Read an answer that is not a stream: a completion, an error, or something else entirely."""
        await answer.read_all(_BODY_BYTES, answer.now() + self._endpoint.timeouts.whole)
        self._feed_body(answer, fold, answer.text())

    def _end(self, answer: Answer, fold: AnswerFold, early: bytearray) -> None:
        """End a stream; one without any event may be a whole body that only calls itself a stream."""
        text = early.decode("utf-8", "replace").lstrip("\ufeff \t\r\n") if not fold.events else ""
        if text.startswith(("{", "[", "<")):
            self._feed_body(answer, fold, text)
        else:
            fold.end()

    def _feed_body(self, answer: Answer, fold: AnswerFold, body: str) -> None:
        try:
            fold.feed_body(body)
        except ModelError as error:
            if error.reason != "MODEL_BAD_RESPONSE":
                raise
            kind = answer.media_type or "no content type"
            text = f"The model's endpoint answered with {kind} instead of a completion."
            raise ModelError(
                "MODEL_BAD_RESPONSE",
                text if isinstance(error, UnreadableError) else error.message,
                retryable=False,
                detail=error.detail,
                hint=f"Check the base URL: asked for {self._endpoint.path}; most endpoints want it to end in /v1.",
                usage=error.usage,
            ) from None
        fold.end()


class _Waits:
    """Which wait bounds the next read: the first token, silence, or the end after a finish reason."""

    def __init__(self, timeouts: ModelTimeouts, start: float) -> None:
        self._timeouts = timeouts
        self._first = start + timeouts.first_token
        self._finish_due: float | None = None
        self._events = 0
        self._last_event = start

    def due(self, now: float, fold: AnswerFold) -> float:
        """Return until when the next read may take."""
        if fold.finished:
            if self._finish_due is None:
                self._finish_due = now + self._timeouts.after_finish
            return self._finish_due
        if not fold.started:
            return self._first
        if fold.events != self._events:
            self._events = fold.events
            self._last_event = now
        return min(now + self._timeouts.idle, self._last_event + self._timeouts.stalled)

    def error(self, fold: AnswerFold) -> ModelError:
        """Return what it means that nothing came in time."""
        if fold.started:
            text = "The model fell silent in the middle of its answer."
        else:
            text = f"The model gave no first token within {self._timeouts.first_token:g} s."
        return ModelError("MODEL_TIMEOUT", text, retryable=True)


def _feed(reader: SSEReader, fold: AnswerFold, data: bytes | None) -> ModelError | None:
    """Fold one read. A failure is returned, so that what came before it is shown first."""
    try:
        for event in reader.finish() if data is None else reader.feed(data):
            if fold.done:
                break
            fold.feed(event)
    except UnreadableError as error:
        # Half an event at the end says only that the stream broke there, which its missing end says too.
        return None if data is None else error
    except ModelError as error:
        return error
    except EventTooLargeError as error:
        return _too_large(error)
    return None


def _keep_early(early: bytearray, fold: AnswerFold, data: bytes | None) -> None:
    """Keep what was read before the first event, up to a bound."""
    if data and not fold.events and len(early) < _EARLY_BYTES:
        early += data


def _add_usage(error: ModelError, fold: AnswerFold) -> None:
    if error.usage is None:
        error.usage = fold.usage


def _too_large(error: EventTooLargeError) -> ModelError:
    return ModelError("MODEL_BAD_RESPONSE", f"The model's stream cannot be read: {error}.", retryable=False)
