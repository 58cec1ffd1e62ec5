"""Chat Completions answers, streamed or whole, folded into deltas and one ModelResponse.

Rules and their reasons:

- Parsing is typed and lenient: what is not looked at is skipped unparsed, whatever may be null may be null,
  and fields that vendors fill with various types are looked at by hand. Text that the fast parser refuses
  (half a surrogate pair, NaN) goes to the slow one before it counts as broken.
- Reasoning comes as ``reasoning_content``, ``reasoning``, ``reasoning_details``, as typed parts of the
  content, or inline as ``<think>``. Vendors send the first three side by side with the same text, so of one
  delta only one counts: the details, if they have text, else the first of the others.
- What a detail says besides its text (type, format, index, signature) is kept whole with its block, as the
  signature of the part: the vendor wants it back as it came. A late signature finds its block by the index.
- A delta is handled before the finish reason in the same chunk; reading goes on after a finish reason, because
  usage, or a second finish reason, may follow. The last usage counts.
- Complete calls decide, not the finish reason: "tool_calls" exactly when the message has calls.
- The end of the body without ``[DONE]`` is the end of the answer only after a finish reason.
"""

import json
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dualclaw import ContentPart, Message, ReasoningPart, Role, Usage
from dualclaw.events import clean_text
from dualclaw_server.engine.model import FinishReason, ModelChunk, ModelError, ModelResponse
from dualclaw_server.models.chat.wire import WireChunk, WireDelta, WireFunction, chunk_decoder, read_usage
from dualclaw_server.models.deltas import Deltas
from dualclaw_server.models.failures import Redactor, error_in, unreadable, unreadable_event
from dualclaw_server.models.history import mark
from dualclaw_server.models.reasoning import ThinkSplitter
from dualclaw_server.models.sse import HalfJoiner, ServerEvent
from dualclaw_server.models.tool_calls import NamelessCallError, OpenCall, ToolCallAssembler, read_index

logger = logging.getLogger(__name__)

_FINISH: Mapping[str, FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "max_output_tokens": "length",
    "content_filter": "content_filter",
    "safety": "content_filter",
    "recitation": "content_filter",
    "sensitive": "content_filter",
    "refusal": "content_filter",
}
_WANTED = "chat completion"
_OPEN_BLOCKS = 32  # of reasoning, that a later fragment may still belong to
_FAILED_FINISH = frozenset({"error", "network_error", "abort", "insufficient_system_resource"})


@dataclass(slots=True, eq=False)
class _Block:
    """A part of the message that is being written: text, reasoning, or the place of a call."""

    kind: str
    pieces: list[str] = field(default_factory=list)
    detail: dict[str, object] = field(default_factory=dict)
    seals: list[str] = field(default_factory=list)
    """Pieces of the signature; once there is one, the block is over."""
    redacted: bytes = b""
    call: OpenCall | None = None

    def fits(self, detail: Mapping[str, object]) -> bool:
        """Return whether a further fragment with this description belongs to this block of reasoning."""
        names = ("type", "index", "id")
        known = (self.detail.get(name) for name in names)
        return all(
            mine is None or theirs is None or mine == theirs
            for mine, theirs in zip(known, map(detail.get, names), strict=True)
        )


class ChatAnswer:
    """Folds one answer. Feed it events (or one whole body); ``take`` the deltas; at the end ask for ``response``.

    Args:
        redact: takes secrets out of what goes into errors.
        taken: call ids of the conversation so far.
        request_id: the vendor's id from the headers; empty: the id in the answer.
    """

    def __init__(self, redact: Redactor, *, taken: Collection[str] = frozenset(), request_id: str = "") -> None:
        self._redact = redact
        self._calls = ToolCallAssembler(taken)
        self._think = ThinkSplitter()
        self._blocks: list[_Block] = []
        self._reasonings: deque[_Block] = deque(maxlen=_OPEN_BLOCKS)
        self._deltas = Deltas()
        self._joiner = HalfJoiner()
        self._call_signatures: dict[OpenCall, str] = {}
        self._refused = False
        self._finish = ""
        self._where = "the stream"
        self._usage: Mapping[str, object] | None = None
        self._model = ""
        self._request_id = request_id
        self._id = ""
        self.done = False
        """The stream's end mark was there."""
        self.started = False
        """Text, reasoning or a call was there."""
        self.events = 0
        """How many events were fed."""

    @property
    def finished(self) -> bool:
        """A finish reason was there, so the answer is whole."""
        return bool(self._finish)

    @property
    def usage(self) -> Usage | None:
        """Tokens reported so far; None: none were."""
        return None if self._usage is None else read_usage(self._usage)

    def feed(self, event: ServerEvent) -> None:
        """Take one event of a stream.

        Raises:
            ModelError: it holds an error, or nothing that belongs into such a stream.
        """
        data = event.data
        self.events += 1
        if data.strip() == "[DONE]":
            self.done = True
            return
        try:
            chunk = chunk_decoder.decode(data)
        except (ValueError, RecursionError):
            slow = self._decode_slowly(data, named=event.event == "error")
            if slow is None:
                return
            chunk = slow
        if isinstance(chunk.usage, dict):
            self._usage = chunk.usage
        if chunk.error or chunk.choices is None or event.event == "error" or chunk.kind == "error":
            self._raise_error(data, named=event.event == "error")
        self._take(chunk)

    def feed_body(self, text: str) -> None:
        """Take a whole answer that was not streamed.

        Raises:
            ModelError: it holds an error, or is no answer.
        """
        self._where = "its answer"
        if not text.lstrip().startswith("{"):
            self._raise_error(text, named=False)
            raise unreadable(text, self._redact, wanted=_WANTED)
        self.feed(ServerEvent(text))
        if not self._finish and not self.started:
            raise unreadable(text, self._redact, wanted=_WANTED)
        self._finish = self._finish or "stop"
        self.done = True

    def take(self) -> Sequence[ModelChunk]:
        """Return the deltas since the last time, neighbours of one kind as one."""
        return self._deltas.take()

    def end(self) -> None:
        """Give back what was held; ``take`` and ``response`` follow."""
        half = self._joiner.flush()
        if half:
            self._text(half)
        reasoning, text = self._think.flush()
        self._emit("reasoning", reasoning)
        self._emit("text", text)

    def response(self) -> ModelResponse:
        """Return the whole answer.

        Raises:
            ModelError: MODEL_STREAM_BROKEN, the answer is not whole or empty; MODEL_BAD_RESPONSE, a call has no
                name; whatever a finish reason like "error" stands for.
        """
        if self._finish in _FAILED_FINISH:
            raise ModelError(
                "MODEL_OVERLOADED" if self._finish == "insufficient_system_resource" else "MODEL_UNAVAILABLE",
                f"The model's endpoint gave up in the middle of its answer (finish reason {self._finish}).",
                retryable=True,
            )
        if not (self._finish or self.started):
            raise ModelError("MODEL_STREAM_BROKEN", "The model's stream was empty.", retryable=True)
        if not (self._finish or self.done):
            raise ModelError(
                "MODEL_STREAM_BROKEN", "The model's stream ended in the middle of its answer.", retryable=True
            )
        finish = _FINISH.get(self._finish, "content_filter" if self._refused else "stop")
        try:
            calls = self._calls.finish(truncated=finish == "length")
        except NamelessCallError:
            raise ModelError(
                "MODEL_BAD_RESPONSE", "The model's answer has a tool call without a name.", retryable=True
            ) from None
        by_source = {call.source: call for call in calls} if calls else {}
        parts: list[ContentPart] = []
        for block in self._blocks:
            if block.call in by_source:
                call = by_source[block.call].call
                if signature := self._call_signatures.get(block.call):
                    call.signature = mark("chat", signature)
                parts.append(ContentPart(tool_call=call))
            elif block.call is None and (block.pieces or block.redacted or block.seals):
                parts.append(_part(block))
        return ModelResponse(
            message=Message(role=Role.ROLE_ASSISTANT, parts=parts),
            finish_reason="tool_calls" if calls else finish,
            usage=read_usage(self._usage),
            bad_arguments={call.call.id: call.bad_arguments for call in calls if call.bad_arguments is not None},
            model=self._model,
            request_id=self._request_id or self._id,
        )

    def _take(self, chunk: WireChunk) -> None:
        if not self._id and isinstance(chunk.id, str):
            self._id = chunk.id
        if not self._model and isinstance(chunk.model, str):
            self._model = chunk.model
        for choice in chunk.choices or ():
            if choice is None or choice.index not in (0, None, "0"):
                continue
            if choice.delta is not None:
                self._delta(choice.delta)
            elif choice.message is not None:
                # In a whole message every call is whole, so its place says which it is.
                for place, call in enumerate(choice.message.tool_calls or ()):
                    if call is not None:
                        call.index = place
                self._delta(choice.message)
            if isinstance(choice.usage, dict):
                self._usage = choice.usage
            if choice.finish_reason and isinstance(choice.finish_reason, str):
                self._finish = choice.finish_reason.lower()

    def _delta(self, delta: WireDelta) -> None:
        told = delta.reasoning_details if isinstance(delta.reasoning_details, list) else ()
        details = [detail for detail in told if isinstance(detail, dict)] if told else ()
        if not (details and any(map(_detail_text, details))):
            if delta.reasoning_content and isinstance(delta.reasoning_content, str):
                self._emit("reasoning", clean_text(delta.reasoning_content))
            elif delta.reasoning and isinstance(delta.reasoning, str):
                self._emit("reasoning", clean_text(delta.reasoning))
        for detail in details:
            self._detail(detail)
        content = delta.content
        if isinstance(content, str):
            if content:
                self._text(content)
        elif isinstance(content, list):
            for part in content:
                self._typed_part(part)
        if delta.refusal and isinstance(delta.refusal, str):
            self._refused = True
            self._text(delta.refusal)
        for call in delta.tool_calls or ():
            if call is not None:
                self._call(call.index, call.id, call.function)
                if call.extra_content:
                    self._sign_call(call.extra_content)
        if delta.function_call is not None:
            self._call(None, None, delta.function_call)

    def _call(self, index: object, call_id: object, function: WireFunction | None) -> None:
        name = function.name if function is not None else None
        arguments = function.arguments if function is not None else None
        if isinstance(arguments, dict | list):
            arguments = json.dumps(arguments, ensure_ascii=False)
        opened = self._calls.feed(
            index=read_index(index),
            call_id=call_id if isinstance(call_id, str) else "" if call_id is None else str(call_id),
            name=name if isinstance(name, str) else "",
            arguments=arguments if isinstance(arguments, str) else "",
        )
        if opened is not None:
            self.started = True
            self._blocks.append(_Block("call", call=opened))

    def _sign_call(self, extra: object) -> None:
        """Keep Gemini's signature of the call that the last fragment belonged to."""
        google = extra.get("google") if isinstance(extra, dict) else None
        signature = google.get("thought_signature") if isinstance(google, dict) else None
        if signature and isinstance(signature, str) and self._calls.current is not None:
            self._call_signatures[self._calls.current] = clean_text(signature)

    def _text(self, piece: str) -> None:
        """Take text; halves of a surrogate pair that were sent apart meet again here."""
        piece = self._joiner.feed(piece)
        if self._think.over:
            self._emit("text", piece)
            return
        reasoning, text = self._think.feed(piece)
        self._emit("reasoning", reasoning)
        self._emit("text", text)

    def _emit(self, kind: str, piece: str) -> None:
        if not piece:
            return
        self.started = True
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.kind != kind or block.seals:
            block = self._open(kind)
        block.pieces.append(piece)
        if kind == "text":
            self._deltas.text(piece)
        else:
            self._deltas.reasoning(piece)

    def _typed_part(self, part: object) -> None:
        if isinstance(part, str):
            self._text(part)
            return
        if not isinstance(part, dict):
            return
        kind = part.get("type")
        if kind in ("thinking", "reasoning"):
            inner = part.get("thinking") or part.get("reasoning") or part.get("text")
            for piece in inner if isinstance(inner, list) else [inner]:
                text = piece.get("text") if isinstance(piece, dict) else piece
                if isinstance(text, str):
                    self._emit("reasoning", clean_text(text))
        elif isinstance(text := part.get("text"), str) and text:
            self._text(text)

    def _detail(self, detail: Mapping[str, object]) -> None:
        """Take one of OpenRouter's blocks, or a fragment of one."""
        told = {name: value for name, value in detail.items() if name not in ("text", "summary", "data")}
        sealed = detail.get("data")
        if sealed and isinstance(sealed, str):
            self.started = True
            self._blocks.append(_Block("sealed", detail=told, redacted=clean_text(sealed).encode()))
            return
        text = clean_text(_detail_text(detail))
        block = next((block for block in reversed(self._reasonings) if block.fits(detail)), None)
        if block is None or (text and (block.seals or block is not self._blocks[-1])):
            block = self._open("reasoning")
        self._emit("reasoning", text)  # before the signature, which ends the block
        block.detail.update(
            (name, value) for name, value in told.items() if value is not None or name not in block.detail
        )
        if (seal := told.get("signature")) and isinstance(seal, str):
            block.seals.append(seal)

    def _open(self, kind: str) -> _Block:
        block = _Block(kind)
        self._blocks.append(block)
        if kind == "reasoning":
            self._reasonings.append(block)
        return block

    def _decode_slowly(self, data: str, *, named: bool) -> WireChunk | None:
        """Return the chunk in data that the fast parser refused, or None if it is a keepalive."""
        if data.startswith(":"):
            logger.debug("skipped a keepalive that was sent as data")
            return None
        try:
            return msgspec.convert(json.loads(data), WireChunk)
        except (ValueError, RecursionError):
            raise unreadable_event(data, self._redact, where=self._where, wanted=_WANTED, named=named) from None

    def _raise_error(self, data: str, *, named: bool) -> None:
        error = error_in(data, self._redact, where=self._where, named=named)
        if error is not None:
            raise error


def _detail_text(detail: Mapping[str, object]) -> str:
    text = detail.get("text") or detail.get("summary")
    return text if isinstance(text, str) else ""


def _part(block: _Block) -> ContentPart:
    text = "".join(block.pieces)
    if block.kind == "text":
        return ContentPart(text=text)
    detail = {**block.detail, "signature": "".join(block.seals)} if block.seals else block.detail
    told = clean_text(json.dumps(detail, ensure_ascii=False)) if detail else ""
    identity = block.detail.get("id")
    return ContentPart(
        reasoning=ReasoningPart(
            text=text,
            signature=mark("chat", told),
            redacted=block.redacted,
            id=clean_text(identity) if isinstance(identity, str) else "",
        )
    )
