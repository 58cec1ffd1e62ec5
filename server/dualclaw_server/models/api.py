"""What differs between the wire APIs of model vendors: how a request reads, and how its answer is folded.

Implemented by ``chat.api`` (Chat Completions), ``responses.api`` and ``anthropic.api``; driven by ``http_model``,
which has everything the three share: connection, waits, reading of the stream, its end. Values of these classes
are shared by concurrent calls, so an ``Api`` keeps no state of a call; an ``AnswerFold`` is one call's own.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from dualclaw import Usage
from dualclaw_server.engine.model import ModelChunk, ModelRequest, ModelResponse, ToolSpec
from dualclaw_server.models.beginnings import NOTHING, Beginning
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.history import CallIds, Turn
from dualclaw_server.models.sse import ServerEvent


class AnswerFold(Protocol):
    """Folds one answer. Feed it events (or one whole body); ``take`` the deltas; ``end``; ask for ``response``."""

    @property
    def started(self) -> bool:
        """Text, reasoning or a call was there."""

    @property
    def finished(self) -> bool:
        """The answer is whole; only usage or the end mark may follow."""

    @property
    def done(self) -> bool:
        """The stream's end mark was there; whatever follows is not read."""

    @property
    def events(self) -> int:
        """How many events were fed."""

    @property
    def usage(self) -> Usage | None:
        """Tokens reported so far; None: none were. A call that fails later has cost them all the same."""

    def feed(self, event: ServerEvent) -> None:
        """Take one event of a stream.

        Raises:
            ModelError: it holds an error; UnreadableError: nothing that belongs into such a stream.
        """

    def feed_body(self, text: str) -> None:
        """Take a whole answer that was not streamed.

        Raises:
            ModelError: it holds an error; UnreadableError: it is no answer.
        """

    def take(self) -> Sequence[ModelChunk]:
        """Return the deltas since the last time, neighbours of one kind as one."""

    def end(self) -> None:
        """Give back what was held; the answer is over, whole or not. ``take`` and ``response`` follow."""

    def response(self) -> ModelResponse:
        """Return the whole answer.

        Raises:
            ModelError: the answer is not whole (MODEL_STREAM_BROKEN), or cannot be used.
        """


class Api(Protocol):
    """A wire API as one vendor speaks it."""

    @property
    def path(self) -> str:
        """What is appended to the base URL, such as "/chat/completions"."""

    def headers(self, api_key: str) -> Mapping[str, str]:
        """Return the headers of every request: the key in the vendor's way (empty: none), and what else it demands."""

    def tools(self, specs: Sequence[ToolSpec]) -> msgspec.Raw:
        """Return the request's ``tools`` as JSON, made once per set of tools.

        Raises:
            ValueError: a tool's parameters are not a JSON object.
        """

    @property
    def call_ids(self) -> CallIds:
        """What the vendor takes as call ids."""

    def items(self, conversation: Sequence[Turn], tool_names: frozenset[str]) -> Sequence[object]:
        """Return what is sent of turns, to be kept as JSON.

        Of parts of a conversation that stand by themselves (``beginnings``) it is what is sent of the whole, in parts.
        """

    def body(
        self,
        request: ModelRequest,
        *,
        model: str,
        tools: msgspec.Raw | None,
        tool_names: frozenset[str],
        stream: bool,
        beginning: Beginning = NOTHING,
    ) -> bytes:
        """Return the request as JSON.

        Args:
            request: the conversation, behind its beginning, and its options.
            model: the model's name at the vendor.
            tools: as ``tools`` gave them; None: it may call nothing.
            tool_names: names of these tools; they are sent as they are.
            stream: whether the answer is to be streamed.
            beginning: what stands before the request's messages; made by ``items`` with the same tools.

        Raises:
            ModelError: an option cannot be expressed.
        """

    def answer(self, redact: Redactor, taken: Collection[str], request_id: str) -> AnswerFold:
        """Return the fold for one answer.

        Args:
            redact: takes secrets out of what goes into errors.
            taken: call ids of the conversation so far.
            request_id: the vendor's id from the headers; empty: the id in the answer.
        """
