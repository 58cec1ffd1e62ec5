"""Chat Completions, the API of OpenAI that most vendors and local servers speak: streaming and not, any base URL.

One network read is one batch: all its events are folded, and neighbouring text becomes one delta, so a
consumer that lags is not made to pay per token. The translation of messages is in ``chat_request``, the
folding of answers in ``chat_answer``, the connection in ``endpoint``.
"""

import asyncio
import copy
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from dualclaw_server.engine.model import (
    ModelChunk,
    ModelError,
    ModelRequest,
    ModelResponse,
    ReasoningDelta,
    TextDelta,
    ToolSpec,
)
from dualclaw_server.models.chat_answer import ChatAnswer, UnreadableError
from dualclaw_server.models.chat_request import call_ids, tools_json, wire_messages
from dualclaw_server.models.endpoint import Answer, Endpoint, ModelTimeouts
from dualclaw_server.models.sse import DEFAULT_MAX_EVENT_BYTES, EventTooLargeError, SSEReader

DEFAULT_BASE_URL = "https://api.openai.com/v1"

_EVENT_STREAM = "text/event-stream"
_NO_STREAM = ("text/html", "application/json", "application/problem+json", "application/xml", "text/xml")
_BODY_BYTES = 64 * 1024 * 1024
_NEW_TOKEN_FIELD_HOSTS = ("api.openai.com", ".openai.azure.com")


class OpenAIChatModel:
    """A model behind a Chat Completions endpoint.

    Args:
        name: the model's name at the vendor.
        base_url: address of the API, usually ending in ``/v1``.
        api_key: bearer token; empty: none is sent (local servers).
        timeouts: bounds of all waits.
        headers: sent in addition, such as ``api-key`` for Azure.
        tls: settings of TLS, to be shared by models; None: those of the environment (``SSL_CERT_FILE``).
        max_event_bytes: bound of one event of a stream.

    Raises:
        ValueError: name, base URL, key or a header cannot be used.
    """

    def __init__(
        self,
        name: str,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str = "",
        *,
        timeouts: ModelTimeouts | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES,
    ) -> None:
        if not name:
            raise ValueError("the model needs a name")
        self._name = name
        self._max_event_bytes = max_event_bytes
        self._endpoint = Endpoint(
            base_url, "/chat/completions", api_key, timeouts=timeouts or ModelTimeouts(), headers=headers, tls=tls
        )
        self._tools: msgspec.Raw | None = None
        self._tool_names: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The model's name at the vendor."""
        return self._name

    def with_tools(self, tools: Sequence[ToolSpec]) -> "OpenAIChatModel":
        """Return a new model that may call these tools; it shares this one's connections.

        Raises:
            ValueError: a tool's parameters are not a JSON object.
        """
        made = copy.copy(self)
        made._tools = tools_json(tools) if tools else None
        made._tool_names = frozenset(tool.name for tool in tools)
        return made

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Yield deltas, one batch per network read, and last the ModelResponse. Raises ModelError."""
        timeouts = self._endpoint.timeouts
        start = asyncio.get_running_loop().time()
        whole = False
        answer = await self._endpoint.post(
            self._body(request, stream=True), accept=_EVENT_STREAM, within=timeouts.first_token
        )
        try:
            fold = self._fold(request, answer)
            if answer.media_type.endswith("+json") or answer.media_type in _NO_STREAM:
                await self._read_body(answer, fold)
                for chunk in fold.take():
                    yield chunk
            else:
                waits = _Waits(timeouts, start)
                reader = SSEReader(max_event_bytes=self._max_event_bytes)
                while not fold.done:
                    data = await self._read(answer, fold, waits)
                    failure = _feed(reader, fold, data)
                    for chunk in _merged(fold.take()):
                        yield chunk
                    if failure is not None:
                        raise failure
                    if data is None:
                        break
            fold.end()
            for chunk in _merged(fold.take()):
                yield chunk
            response = fold.response()
            whole = True
            yield response
        finally:
            if whole:
                await answer.drain()
            await answer.aclose()

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Return the whole answer, asked for in one piece. Raises ModelError."""
        within = self._endpoint.timeouts.whole
        answer = await self._endpoint.post(self._body(request, stream=False), accept="application/json", within=within)
        try:
            fold = self._fold(request, answer)
            await self._read_body(answer, fold)
            return fold.response()
        finally:
            await answer.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._endpoint.aclose()

    def _fold(self, request: ModelRequest, answer: Answer) -> ChatAnswer:
        return ChatAnswer(self._endpoint.redact, taken=call_ids(request.messages), request_id=answer.request_id)

    def _body(self, request: ModelRequest, *, stream: bool) -> bytes:
        body: dict[str, object] = {
            "model": self._name,
            "messages": wire_messages(request, self._tool_names),
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self._tools is not None:
            body["tools"] = self._tools
        if request.options.temperature is not None:
            body["temperature"] = request.options.temperature
        if request.options.max_output_tokens is not None:
            new = self._endpoint.host.endswith(_NEW_TOKEN_FIELD_HOSTS)
            body["max_completion_tokens" if new else "max_tokens"] = request.options.max_output_tokens
        return msgspec.json.encode(body)

    async def _read(self, answer: Answer, fold: ChatAnswer, waits: "_Waits") -> bytes | None:
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

    async def _read_body(self, answer: Answer, fold: ChatAnswer) -> None:
        """Read an answer that is not a stream: a completion, an error, or something else entirely."""
        await answer.read_all(_BODY_BYTES, answer.now() + self._endpoint.timeouts.whole)
        try:
            if answer.media_type == _EVENT_STREAM:
                reader = SSEReader(max_event_bytes=self._max_event_bytes)
                for event in [*reader.feed(answer.body()), *reader.finish()]:
                    fold.feed(event)
            else:
                fold.feed_body(answer.text())
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
            ) from None
        except EventTooLargeError as error:
            raise _too_large(error) from None
        fold.end()


class _Waits:
    """Which wait bounds the next read: the first token, silence, or the end after a finish reason."""

    def __init__(self, timeouts: ModelTimeouts, start: float) -> None:
        self._timeouts = timeouts
        self._first = start + timeouts.first_token
        self._finish_due: float | None = None
        self._events = 0
        self._last_event = start

    def due(self, now: float, fold: ChatAnswer) -> float:
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

    def error(self, fold: ChatAnswer) -> ModelError:
        """Return what it means that nothing came in time."""
        if fold.started:
            text = "The model fell silent in the middle of its answer."
        else:
            text = f"The model gave no first token within {self._timeouts.first_token:g} s."
        return ModelError("MODEL_TIMEOUT", text, retryable=True)


def _feed(reader: SSEReader, fold: ChatAnswer, data: bytes | None) -> ModelError | None:
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


def _too_large(error: EventTooLargeError) -> ModelError:
    return ModelError("MODEL_BAD_RESPONSE", f"The model's stream cannot be read: {error}.", retryable=False)


def _merged(chunks: list[ModelChunk]) -> list[ModelChunk]:
    """Return the deltas of one read with neighbours of one kind made one."""
    if len(chunks) < 2:
        return chunks
    made: list[ModelChunk] = []
    pieces: list[str] = []
    kind: type[TextDelta] | type[ReasoningDelta] | None = None
    for chunk in chunks:
        if isinstance(chunk, ModelResponse):
            continue
        if kind is not None and type(chunk) is not kind:
            made.append(kind("".join(pieces)))
            pieces = []
        kind = type(chunk)
        pieces.append(chunk.text)
    if kind is not None:
        made.append(kind("".join(pieces)))
    return made
