"""Anthropic Messages answers, streamed or whole, folded into deltas and one ModelResponse.

Rules and their reasons:

- Parsing is typed and lenient, as for the other APIs; event, block and delta types that are not known here
  (server tools, citations, whatever comes next) are skipped: the vendor adds some without a new version.
- A fragment belongs to the block its index names. Without an index, or where the kind does not fit, it belongs
  to the block that is being written; text and thinking open one, arguments never do.
- The arguments of a call are its fragments joined, parsed once when the answer is over. No fragment, or only
  empty ones, mean ``{}``; a block that the answer was cut off in is never taken for whole. So a second
  ``content_block_stop`` changes nothing, and a block sent twice is one call.
- Thinking, its signature and redacted blocks are kept as they came and where they stood, also a signature
  without text: the API wants all of it back.
- ``message_start`` again with the same id is a gateway's repeat. With another one the gateway has begun a second
  generation behind half of the first: nobody can tell them apart again, so the stream is broken.
- ``message_stop`` is the end. The end of the body after a stop reason is one too: the reason comes when all
  blocks are closed and the tokens are counted, so nothing but the end mark can be missing. Before it, it is a
  break. ``[DONE]``, which some gateways add, counts like ``message_stop``.
- Reports of usage are cumulative; what was counted before an error is kept.
"""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dualclaw import ContentPart, Message, ReasoningPart, Role, Usage
from dualclaw.events import clean_text
from dualclaw_server.engine.model import FinishReason, ModelChunk, ModelError, ModelResponse
from dualclaw_server.models.anthropic.wire import (
    UsageCount,
    WireBlock,
    WireDelta,
    WireMessage,
    WireReader,
)
from dualclaw_server.models.deltas import Deltas
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.history import mark
from dualclaw_server.models.sse import HalfJoiner, ServerEvent
from dualclaw_server.models.tool_calls import AssembledCall, NamelessCallError, OpenCall, ToolCallAssembler, read_index

logger = logging.getLogger(__name__)

ANSWER_TOOL = "dualclaw_structured_answer"
"""Name of the tool whose arguments are the text of a structured answer."""

_FINISH: Mapping[str, FinishReason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "length": "length",
    # The vendor's own tools want another round, which nobody asked for here: the answer is not at its end.
    "pause_turn": "length",
    "refusal": "content_filter",
    "content_filter": "content_filter",
    "sensitive": "content_filter",
}
_Kind = Literal["text", "thinking", "redacted", "call", "skipped"]
_KINDS: Mapping[object, _Kind] = {
    "text": "text",
    "thinking": "thinking",
    "redacted_thinking": "redacted",
    "tool_use": "call",
}


@dataclass(slots=True, eq=False)
class _Block:
    """A block that is being written. ``pieces`` are its text, thinking, sealed data or arguments."""

    kind: _Kind
    pieces: list[str] = field(default_factory=list)
    seals: list[str] = field(default_factory=list)
    """Pieces of the signature."""
    id: str = ""
    name: str = ""
    stopped: bool = False
    joiner: HalfJoiner = field(default_factory=HalfJoiner)

    def text(self) -> str:
        return "".join(self.pieces)

    def signature(self) -> str:
        return "".join(self.seals)


class AnthropicAnswer:
    """Folds one answer: an ``AnswerFold`` of ``models.api``.

    Args:
        redact: takes secrets out of what goes into errors.
        taken: call ids of the conversation so far.
        request_id: the vendor's id from the headers; empty: the message's id.
    """

    def __init__(self, redact: Redactor, *, taken: Collection[str] = frozenset(), request_id: str = "") -> None:
        self._reader = WireReader(redact)
        self._taken = taken
        self._request_id = request_id
        self._blocks: list[_Block] = []
        self._by_index: dict[int, _Block] = {}
        self._deltas = Deltas()
        self._usage = UsageCount()
        self._id = ""
        self._model = ""
        self._begun = False
        self._finish = ""
        self.done = False
        """The end mark was there."""
        self.started = False
        """A block was there. One is enough: with hidden thinking a long time passes before its first text."""
        self.events = 0
        """How many events were fed; pings are none."""

    @property
    def finished(self) -> bool:
        """A stop reason was there, so the answer is whole."""
        return bool(self._finish)

    @property
    def usage(self) -> Usage | None:
        """Tokens reported so far; None: none were."""
        return self._usage.usage()

    def feed(self, event: ServerEvent) -> None:
        """Take one event of a stream.

        Raises:
            ModelError: it holds an error, or begins another message; UnreadableError: it belongs to no such stream.
        """
        if event.data.strip() == "[DONE]":
            self.done = True
            return
        wire = self._reader.event(event)
        if wire is None:
            return
        kind = wire.kind or event.event
        if kind == "ping":
            return
        self.events += 1
        if wire.error or kind == "error":
            self._reader.raise_error(event.data, named=True)
        match kind:
            case "message_start":
                self._begin(wire.message or WireMessage())
            case "content_block_start" if wire.content_block is not None:
                self._open(wire.index, wire.content_block)
            case "content_block_delta" if wire.delta is not None:
                self._delta(wire.index, wire.delta)
            case "content_block_stop":
                self._stop(wire.index)
            case "message_delta":
                self._usage.add(wire.usage)
                if wire.delta is not None:
                    self._finish_with(wire.delta.stop_reason)
            case "message_stop":
                self.done = True
            case str() if kind:
                logger.debug("skipped an event of a type that is not known")
            case _:
                raise self._reader.unreadable(event.data)

    def feed_body(self, text: str) -> None:
        """Take a whole answer that was not streamed.

        Raises:
            ModelError: it holds an error; UnreadableError: it is no answer.
        """
        message = self._reader.message(text)
        self._begin(message)
        for block in message.content or ():
            if block is not None:
                self._open(None, block)
                self._stop(None)
        self._finish_with(message.stop_reason)
        self._finish = self._finish or "end_turn"
        self.done = True

    def take(self) -> Sequence[ModelChunk]:
        """Return the deltas since the last time, neighbours of one kind as one."""
        return self._deltas.take()

    def end(self) -> None:
        """Give back what was held; ``take`` and ``response`` follow."""
        for block in self._blocks:
            self._flush(block)

    def response(self) -> ModelResponse:
        """Return the whole answer.

        Raises:
            ModelError: MODEL_STREAM_BROKEN, it is not whole, or empty; CONTEXT_OVERFLOW, the window was full before
                the first word; MODEL_BAD_RESPONSE, a call has no name.
        """
        if not (self._finish or self.started):
            raise ModelError("MODEL_STREAM_BROKEN", "The model's stream was empty.", retryable=True)
        if not (self._finish or self.done):
            raise _broken("The model's stream ended in the middle of its answer.")
        if self._finish == "model_context_window_exceeded" and not self.started:
            raise ModelError(
                "CONTEXT_OVERFLOW",
                "The conversation fills the model's context window; there was no room for an answer.",
                retryable=False,
                hint="Shorten the conversation, or use a model with a larger context.",
            )
        finish = _FINISH.get(self._finish, "stop")
        calls = self._assemble(finish)
        parts: list[ContentPart] = []
        for block in self._blocks:
            if block.kind == "call":
                if block in calls:
                    parts.append(ContentPart(tool_call=calls[block].call))
            elif (part := _part(block)) is not None:
                parts.append(part)
        return ModelResponse(
            message=Message(role=Role.ROLE_ASSISTANT, parts=parts),
            finish_reason="tool_calls" if calls else finish,
            usage=self.usage or Usage(),
            bad_arguments={
                made.call.id: made.bad_arguments for made in calls.values() if made.bad_arguments is not None
            },
            model=self._model,
            request_id=self._request_id or self._id,
        )

    def _begin(self, message: WireMessage) -> None:
        identity = _string(message.id)
        if self._begun:
            if identity != self._id or (not identity and self.started):
                raise _broken("The model's endpoint began a second answer in the middle of the first.")
            return
        self._begun = True
        self._id, self._model = identity, _string(message.model)
        self._usage.add(message.usage)

    def _open(self, index: object, wire: WireBlock) -> None:
        kind = _KINDS.get(wire.kind if isinstance(wire.kind, str) else None, "skipped")
        identity, name = _string(wire.id), _string(wire.name)
        place = read_index(index)
        before = self._by_index.get(place) if place is not None else None
        if before is not None and not before.stopped:
            if before.kind == kind != "skipped" and before.id == identity and before.name == name:
                return
            self._end_block(before)
        block = _Block("text" if kind == "call" and name == ANSWER_TOOL else kind, id=identity, name=name)
        self.started = True
        self._blocks.append(block)
        if place is not None:
            self._by_index[place] = block
        match kind:
            case "text":
                self._say(block, wire.text)
            case "thinking":
                self._say(block, wire.thinking)
                block.seals.append(_string(wire.signature))
            case "redacted":
                block.pieces.append(_string(wire.data))
            case "call" if wire.input and isinstance(wire.input, dict | list | str):
                given = wire.input if isinstance(wire.input, str) else json.dumps(wire.input, ensure_ascii=False)
                self._argue(block, given)

    def _delta(self, index: object, delta: WireDelta) -> None:
        match delta.kind:
            case "text_delta":
                self._say(self._target(index, "text"), delta.text)
            case "thinking_delta":
                self._say(self._target(index, "thinking"), delta.thinking)
            case "signature_delta":
                if (block := self._target(index, "thinking")) is not None:
                    block.seals.append(_string(delta.signature))
            case "input_json_delta":
                self._argue(self._target(index, "call"), _string(delta.partial_json, clean=False))

    def _target(self, index: object, kind: _Kind) -> _Block | None:
        """Return the block a fragment belongs to; None: one that is skipped."""
        place = read_index(index)
        block = self._by_index.get(place) if place is not None else self._blocks[-1] if self._blocks else None
        if block is not None and (block.kind == kind or (kind == "call" and block.name == ANSWER_TOOL)):
            return block
        if block is not None and block.kind == "skipped":
            return None
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.kind == kind and not last.stopped:
            return last
        if kind == "call":
            raise ModelError(
                "MODEL_BAD_RESPONSE", "The model's answer has arguments that belong to no tool call.", retryable=True
            )
        block = _Block(kind)
        self.started = True
        self._blocks.append(block)
        if place is not None:
            self._by_index[place] = block
        return block

    def _stop(self, index: object) -> None:
        place = read_index(index)
        block = self._by_index.get(place) if place is not None else self._blocks[-1] if self._blocks else None
        if block is not None:
            self._end_block(block)

    def _end_block(self, block: _Block) -> None:
        block.stopped = True
        self._flush(block)

    def _argue(self, block: _Block | None, fragment: str) -> None:
        if block is None:
            return
        if block.kind == "text":
            self._say(block, fragment)
        else:
            block.pieces.append(fragment)

    def _say(self, block: _Block | None, piece: object) -> None:
        """Take text or thinking."""
        if block is not None and piece and isinstance(piece, str):
            self._emit(block, block.joiner.feed(piece))

    def _flush(self, block: _Block) -> None:
        self._emit(block, block.joiner.flush())

    def _emit(self, block: _Block, piece: str) -> None:
        if piece:
            block.pieces.append(piece)
            if block.kind == "text":
                self._deltas.text(piece)
            else:
                self._deltas.reasoning(piece)

    def _finish_with(self, reason: object) -> None:
        if reason and isinstance(reason, str):
            self._finish = reason.lower()

    def _assemble(self, finish: FinishReason) -> Mapping[_Block, AssembledCall]:
        """Return the call of each block that is one; of a block that was sent twice the first."""
        assembler = ToolCallAssembler(self._taken)
        opened: dict[OpenCall, _Block] = {}
        shown = [block for block in self._blocks if block.kind != "skipped"]
        for number, block in enumerate(shown):
            if block.kind == "call":
                call = assembler.feed(index=number, call_id=block.id, name=block.name, arguments=block.text())
                if call is not None:
                    opened[call] = block
        cut = finish != "stop" or not (self._finish or (shown and shown[-1].stopped))
        try:
            calls = assembler.finish(truncated=cut and bool(shown) and shown[-1].kind == "call")
        except NamelessCallError:
            raise ModelError(
                "MODEL_BAD_RESPONSE", "The model's answer has a tool call without a name.", retryable=True
            ) from None
        return {opened[call.source]: call for call in calls}


def _part(block: _Block) -> ContentPart | None:
    text, signature = block.text(), block.signature()
    match block.kind:
        case "text" if text:
            return ContentPart(text=text)
        case "thinking" if text or signature:
            return ContentPart(reasoning=ReasoningPart(text=text, signature=mark("anthropic", signature)))
        case "redacted" if text:
            return ContentPart(reasoning=ReasoningPart(redacted=text.encode(), signature=mark("anthropic", "")))
    return None


def _broken(text: str) -> ModelError:
    return ModelError("MODEL_STREAM_BROKEN", text, retryable=True)


def _string(value: object, *, clean: bool = True) -> str:
    if not isinstance(value, str):
        return ""
    return clean_text(value) if clean else value
