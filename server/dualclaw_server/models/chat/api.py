"""Chat Completions as an ``Api``: what ``http_model`` drives.

The translation of messages is in ``chat.request``, of options in ``chat.options``, the folding of answers in
``chat.answer``; what vendors vary in ``chat.dialect``.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from dualclaw_server.engine.model import ModelRequest, ToolSpec
from dualclaw_server.models.beginnings import NOTHING, Beginning, joined
from dualclaw_server.models.chat.answer import ChatAnswer
from dualclaw_server.models.chat.dialect import DEFAULT_DIALECT, ChatDialect
from dualclaw_server.models.chat.options import wire_options
from dualclaw_server.models.chat.request import ids_of, tools_json, wire_messages, wire_turns
from dualclaw_server.models.endpoint import bearer
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.history import CallIds, Turn


class ChatApi:
    """Chat Completions as one vendor speaks it."""

    path = "/chat/completions"

    def __init__(self, dialect: ChatDialect | None = None) -> None:
        self.dialect = dialect or DEFAULT_DIALECT

    def headers(self, api_key: str) -> Mapping[str, str]:
        """Return the header that carries the key."""
        if self.dialect.key_header:
            return {self.dialect.key_header: api_key} if api_key else {}
        return bearer(api_key)

    def tools(self, specs: Sequence[ToolSpec]) -> msgspec.Raw:
        """Return the request's ``tools`` as JSON. Raises ValueError: parameters are not a JSON object."""
        return tools_json(specs)

    @property
    def call_ids(self) -> CallIds:
        """What the vendor takes as call ids."""
        return ids_of(self.dialect)

    def items(self, conversation: Sequence[Turn], tool_names: frozenset[str]) -> Sequence[object]:
        """Return what is sent of turns."""
        return wire_turns(conversation, tool_names, self.dialect)

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
        """Return the request as JSON. Raises ModelError: an option cannot be expressed."""
        made = wire_messages(request, tool_names, self.dialect, beginning)
        first = made[:1] if made and made[0]["role"] == "system" else []
        messages = joined(first, beginning, made[len(first) :])
        body: dict[str, object] = {
            "model": model,
            "messages": messages,
            "stream": stream,
        }
        if stream and self.dialect.stream_usage:
            body["stream_options"] = {"include_usage": True}
        body |= wire_options(request.options, tools, tool_names, self.dialect)
        return msgspec.json.encode(body)

    def answer(self, redact: Redactor, taken: Collection[str], request_id: str) -> ChatAnswer:
        """Return the fold for one answer."""
        return ChatAnswer(redact, taken=taken, request_id=request_id)
