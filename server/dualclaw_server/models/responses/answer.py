"""Answers of the Responses API, streamed or whole, folded into deltas and one ModelResponse.

Rules and their reasons:

- An answer is a list of items. An event belongs to the item its ``item_id`` names; where that is unknown (gateways
  make up a new one per event), to the one at its ``output_index``; where that does not fit, to the newest item of
  its kind. Text that belongs to none opens one.
- Whole texts (``...done`` events, a finished item) add what the deltas left out, and never repeat what they gave.
  Arguments that come whole replace their fragments: they are the vendor's last word, and nobody has seen them yet.
- ``call_id`` is the call's id; the item's own ``id`` is only good for routing.
- Sealed reasoning is taken from the finished item: what comes when the item is opened is not whole.
- A reasoning item is a sign of life: models think for minutes without showing a word.
- ``response.completed`` or ``response.incomplete`` is the end; ``[DONE]``, or the end of the body, is not. If a
  gateway gave no items before, those of the end event count.
- Errors come as an event ``error``, with the object inside or spread over the event, and as ``response.failed``.
- Event and item types that are not known here are skipped: the vendor adds some every few months.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dualclaw import ContentPart, Message, ReasoningPart, Role, Usage
from dualclaw.events import clean_text
from dualclaw_server.engine.model import FinishReason, ModelChunk, ModelError, ModelResponse
from dualclaw_server.models.deltas import Deltas
from dualclaw_server.models.failures import Redactor, error_from_object, error_in, unreadable, unreadable_event
from dualclaw_server.models.history import mark
from dualclaw_server.models.responses.wire import (
    WireEvent,
    WireItem,
    WireResponse,
    event_decoder,
    read_usage,
    response_decoder,
)
from dualclaw_server.models.sse import HalfJoiner, ServerEvent
from dualclaw_server.models.tool_calls import AssembledCall, NamelessCallError, OpenCall, ToolCallAssembler

_WANTED = "response"
_PARAGRAPH = "\n\n"
"""Between the parts of a reasoning item."""
_KINDS: Mapping[str, "Kind"] = {"message": "text", "reasoning": "reasoning", "function_call": "call"}
_INCOMPLETE: Mapping[str, FinishReason] = {"content_filter": "content_filter"}
_KEEPALIVES = frozenset({"keepalive", "ping"})

Kind = Literal["text", "reasoning", "call"]
PartKey = tuple[str, str]


@dataclass(slots=True, eq=False)
class _Item:
    """An output item that is being written. ``parts`` has the text of each of its parts, as far as it came."""

    kind: Kind
    parts: dict[PartKey, list[str]] = field(default_factory=dict)
    id: str = ""
    sealed: str = ""
    call: OpenCall | None = None

    def so_far(self, key: PartKey) -> str:
        """Return the text of a part."""
        pieces = self.parts.get(key, [])
        if len(pieces) > 1:
            pieces[:] = ["".join(pieces)]
        return pieces[0] if pieces else ""

    def text(self) -> str:
        """Return all text."""
        gap = _PARAGRAPH if self.kind == "reasoning" else ""
        return gap.join("".join(pieces) for pieces in self.parts.values())


class ResponsesAnswer:
    """Folds one answer. Feed it events (or one whole body); ``take`` the deltas; at the end ask for ``response``.

    Args:
        redact: takes secrets out of what goes into errors.
        taken: call ids of the conversation so far.
        request_id: the vendor's id from the headers; empty: the id of the response.
    """

    def __init__(self, redact: Redactor, *, taken: Collection[str] = frozenset(), request_id: str = "") -> None:
        self._redact = redact
        self._calls = ToolCallAssembler(taken)
        self._items: list[_Item] = []
        self._by_id: dict[str, _Item] = {}
        self._by_index: dict[int, _Item] = {}
        self._newest: dict[Kind, _Item] = {}
        self._joiner = HalfJoiner()
        self._last: tuple[_Item, PartKey] | None = None
        self._deltas = Deltas()
        self._finish: FinishReason | None = None
        self._refused = False
        self._where = "the stream"
        self._model = ""
        self._request_id = request_id
        self._id = ""
        self.usage: Usage | None = None
        """Tokens reported so far; None: none were."""
        self.done = False
        """The stream's end mark was there."""
        self.started = False
        """Text, reasoning or a call was there."""
        self.events = 0
        """How many events were fed, keepalives not among them."""

    @property
    def finished(self) -> bool:
        """The response was reported as over, so the answer is whole."""
        return self._finish is not None

    def feed(self, event: ServerEvent) -> None:
        """Take one event of a stream.

        Raises:
            ModelError: it holds an error, or nothing that belongs into such a stream.
        """
        data = event.data
        if data.strip() == "[DONE]":
            self.done = True
            return
        if data.startswith(":"):
            return
        try:
            wire = event_decoder.decode(data)
        except (ValueError, RecursionError):
            wire = self._decode_slowly(data, named=event.event == "error")
        kind = wire.kind if isinstance(wire.kind, str) and wire.kind else event.event
        if kind not in _KEEPALIVES:
            self.events += 1
        if isinstance(wire.response, WireResponse):
            self._take_response(wire.response)
        if kind == "error" or wire.error or not kind:
            self._raise_error(data, named=event.event == "error" or kind == "error")
            if not kind:
                raise unreadable(data, self._redact, wanted=_WANTED)
        self._event(kind, wire)

    def feed_body(self, text: str) -> None:
        """Take a whole answer that was not streamed.

        Raises:
            ModelError: it holds an error, or is no answer.
        """
        self._where = "its answer"
        try:
            response = response_decoder.decode(text)
        except (ValueError, RecursionError):
            try:
                response = msgspec.convert(json.loads(text), WireResponse)
            except (ValueError, RecursionError):
                self._raise_error(text, named=False)
                raise unreadable(text, self._redact, wanted=_WANTED) from None
        self._take_response(response)
        if not isinstance(response.output, list) and response.status not in ("failed", "cancelled"):
            self._raise_error(text, named=False)
            raise unreadable(text, self._redact, wanted=_WANTED)
        self._end(response)

    def take(self) -> Sequence[ModelChunk]:
        """Return the deltas since the last time, neighbours of one kind as one."""
        return self._deltas.take()

    def end(self) -> None:
        """Give back what was held; ``take`` and ``response`` follow."""
        self._flush_half()

    def response(self) -> ModelResponse:
        """Return the whole answer.

        Raises:
            ModelError: MODEL_STREAM_BROKEN, the answer is not whole; MODEL_BAD_RESPONSE, a call has no name.
        """
        if self._finish is None:
            text = "The model's stream ended in the middle of its answer."
            if not self.started:
                text = "The model's stream was empty."
            raise ModelError("MODEL_STREAM_BROKEN", text, retryable=True)
        try:
            calls = self._calls.finish(truncated=self._finish == "length")
        except NamelessCallError:
            raise ModelError(
                "MODEL_BAD_RESPONSE", "The model's answer has a tool call without a name.", retryable=True
            ) from None
        by_source = {call.source: call for call in calls}
        parts = [part for item in self._items if (part := _part(item, by_source)) is not None]
        finish = self._finish
        return ModelResponse(
            message=Message(role=Role.ROLE_ASSISTANT, parts=parts),
            finish_reason="tool_calls" if calls else "content_filter" if self._refused and finish == "stop" else finish,
            usage=self.usage or Usage(),
            bad_arguments={call.call.id: call.bad_arguments for call in calls if call.bad_arguments is not None},
            model=self._model,
            request_id=self._request_id or self._id,
        )

    def _event(self, kind: str, wire: WireEvent) -> None:
        match kind:
            case "response.output_text.delta":
                self._text(self._owner("text", wire), ("text", str(wire.content_index)), wire.delta)
            case "response.output_text.done":
                self._whole(self._owner("text", wire), ("text", str(wire.content_index)), wire.text)
            case "response.refusal.delta":
                self._refused = True
                self._text(self._owner("text", wire), ("text", str(wire.content_index)), wire.delta)
            case "response.refusal.done":
                self._refused = True
                self._whole(self._owner("text", wire), ("text", str(wire.content_index)), wire.refusal)
            case "response.reasoning_summary_text.delta" | "response.reasoning_summary.delta":
                self._text(self._owner("reasoning", wire), ("summary", str(wire.summary_index)), wire.delta)
            case "response.reasoning_summary_text.done" | "response.reasoning_summary.done":
                self._whole(self._owner("reasoning", wire), ("summary", str(wire.summary_index)), wire.text)
            case "response.reasoning_text.delta" | "response.reasoning.delta":
                self._text(self._owner("reasoning", wire), ("content", str(wire.content_index)), wire.delta)
            case "response.reasoning_text.done" | "response.reasoning.done":
                self._whole(self._owner("reasoning", wire), ("content", str(wire.content_index)), wire.text)
            case "response.function_call_arguments.delta":
                self._fragment(self._owner("call", wire), arguments=wire.delta)
            case "response.function_call_arguments.done":
                self._fragment(self._owner("call", wire), name=wire.name, whole=wire.arguments)
            case "response.output_item.added" if isinstance(wire.item, WireItem):
                self._opened(wire.item, wire)
            case "response.output_item.done" if isinstance(wire.item, WireItem):
                self._item_done(wire.item, wire)
            case "response.completed" | "response.done" | "response.incomplete" | "response.failed":
                response = wire.response if isinstance(wire.response, WireResponse) else WireResponse()
                response.status = response.status or kind.rpartition(".")[2]
                self._end(response)
            case "response.cancelled":
                self._end(WireResponse(status="cancelled"))

    def _opened(self, item: WireItem, wire: WireEvent) -> None:
        """Open an item, unless it was opened before."""
        kind = _KINDS.get(str(item.kind))
        if kind is None:
            return
        known = self._by_id.get(item.id) if isinstance(item.id, str) else None
        if known is not None and known.kind == kind:
            return
        opened = self._open(kind, item.id, wire.output_index)
        if kind == "call":
            self._fragment(opened, call_id=item.call_id, name=item.name, arguments=item.arguments)

    def _item_done(self, item: WireItem, wire: WireEvent) -> None:
        kind = _KINDS.get(str(item.kind))
        if kind is None:
            return
        wire.item_id = item.id
        owner = self._owner(kind, wire)
        if kind == "call":
            self._fragment(owner, call_id=item.call_id, name=item.name, whole=item.arguments)
            return
        if isinstance(item.encrypted_content, str):
            owner.sealed = clean_text(item.encrypted_content)
        for source, parts in (("summary", item.summary), ("text" if kind == "text" else "content", item.content)):
            # Vendors count parts each in their own way; what they agree on is the order.
            keys = [key for key in owner.parts if key[0] == source]
            for place, part in enumerate(parts if isinstance(parts, list) else []):
                if isinstance(part, dict):
                    self._refused = self._refused or part.get("type") == "refusal"
                    key = keys[place] if place < len(keys) else (source, f"part {place}")
                    self._whole(owner, key, part.get("text") or part.get("refusal"))

    def _owner(self, kind: Kind, wire: WireEvent) -> _Item:
        """Return the item an event belongs to, opening one if there is none."""
        by_id = self._by_id.get(wire.item_id) if isinstance(wire.item_id, str) else None
        by_index = self._by_index.get(wire.output_index) if isinstance(wire.output_index, int) else None
        for found in (by_id, by_index):
            if found is not None and found.kind == kind:
                return found
        placed = isinstance(wire.output_index, int) and wire.output_index not in self._by_index
        newest = self._newest.get(kind)
        if newest is not None and not placed:
            return newest
        return self._open(kind, wire.item_id, wire.output_index)

    def _open(self, kind: Kind, item_id: object, index: object) -> _Item:
        self.started = True
        item = _Item(kind)
        self._items.append(item)
        self._newest[kind] = item
        if item_id and isinstance(item_id, str):
            item.id = clean_text(item_id)
            self._by_id[item_id] = item
        if isinstance(index, int):
            self._by_index[index] = item
        return item

    def _fragment(
        self,
        item: _Item,
        *,
        call_id: object = None,
        name: object = None,
        arguments: object = None,
        whole: object = None,
    ) -> None:
        """Add what an event tells of a call; ``whole`` are its arguments as a whole."""
        if item.call is None:
            item.call = self._calls.open()
        if isinstance(call_id, str):
            item.call.id = item.call.id or call_id
        if isinstance(name, str):
            item.call.name = item.call.name or name
        if isinstance(arguments, str):
            item.call.add(arguments)
        if isinstance(whole, str) and whole:
            item.call.replace(whole)

    def _text(self, item: _Item, key: PartKey, piece: object) -> None:
        if not isinstance(piece, str) or not piece:
            return
        if self._last is not None and (self._last[0] is not item or self._last[1] != key):
            self._flush_half()
        self._last = (item, key)
        self._emit(item, key, self._joiner.feed(piece))

    def _flush_half(self) -> None:
        if self._last is not None:
            self._emit(*self._last, self._joiner.flush())

    def _emit(self, item: _Item, key: PartKey, text: str) -> None:
        if not text:
            return
        self.started = True
        gap = _PARAGRAPH if item.kind == "reasoning" and item.parts and key not in item.parts else ""
        item.parts.setdefault(key, []).append(text)
        if item.kind == "text":
            self._deltas.text(text)
        else:
            self._deltas.reasoning(gap + text)

    def _whole(self, item: _Item, key: PartKey, text: object) -> None:
        """Take the whole text of a part: what of it was not there yet follows as a delta."""
        if not isinstance(text, str) or not text:
            return
        self._flush_half()
        sent = item.so_far(key)
        text = clean_text(text)
        # What a part before the newest one lacks cannot be shown any more where it belongs.
        if text.startswith(sent) and (key not in item.parts or key == next(reversed(item.parts))):
            self._emit(item, key, text[len(sent) :])

    def _end(self, response: WireResponse) -> None:
        """Take the report that the response is over."""
        status = response.status
        if isinstance(response.error, dict) and response.error:
            raise error_from_object(response.error, self._redact, where=self._where)
        if status in ("failed", "cancelled"):
            raise ModelError("MODEL_UNAVAILABLE", f"The vendor reports the response as {status}.", retryable=True)
        if not self._items:
            for place, item in enumerate(response.output if isinstance(response.output, list) else ()):
                if isinstance(item, WireItem):
                    self._item_done(item, WireEvent(output_index=place))
        details = response.incomplete_details
        reason = details.get("reason") if isinstance(details, dict) else None
        self._finish = _INCOMPLETE.get(str(reason), "length") if status == "incomplete" else "stop"
        self.done = True

    def _take_response(self, response: WireResponse) -> None:
        if not self._id and isinstance(response.id, str):
            self._id = response.id
        if isinstance(response.model, str) and response.model:
            self._model = response.model
        self.usage = read_usage(response.usage) or self.usage

    def _decode_slowly(self, data: str, *, named: bool) -> WireEvent:
        try:
            return msgspec.convert(json.loads(data), WireEvent)
        except (ValueError, RecursionError):
            raise unreadable_event(data, self._redact, where=self._where, wanted=_WANTED, named=named) from None

    def _raise_error(self, data: str, *, named: bool) -> None:
        error = error_in(data, self._redact, where=self._where, named=named)
        if error is not None:
            raise error


def _part(item: _Item, by_source: Mapping[OpenCall, AssembledCall]) -> ContentPart | None:
    match item.kind:
        case "call":
            made = by_source.get(item.call) if item.call is not None else None
            return None if made is None else ContentPart(tool_call=made.call)
        case "text":
            text = item.text()
            return ContentPart(text=text) if text else None
        case "reasoning":
            text, sealed = item.text(), item.sealed.encode()
            raw = any(source == "content" for source, _ in item.parts)
            signature = mark("responses", "content" if raw else "summary")
            part = ReasoningPart(text=text, signature=signature, redacted=sealed, id=item.id)
            return ContentPart(reasoning=part) if text or sealed else None
