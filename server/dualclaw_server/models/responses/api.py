"""The Responses API of OpenAI as an ``Api``: what ``http_model`` drives.

The translation of messages and options is in ``responses.request``, the folding of answers in
``responses.answer``; what vendors vary in ``responses.dialect``.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from dualclaw_server.engine.model import ModelRequest, ToolSpec
from dualclaw_server.models.beginnings import NOTHING, Beginning
from dualclaw_server.models.endpoint import bearer
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.history import CallIds, Turn
from dualclaw_server.models.responses.answer import ResponsesAnswer
from dualclaw_server.models.responses.dialect import OPENAI_RESPONSES, ResponsesDialect
from dualclaw_server.models.responses.request import response_fields, response_tools_json, wire_turns


class ResponsesApi:
    """The Responses API as one vendor speaks it."""

    path = "/responses"

    def __init__(self, dialect: ResponsesDialect | None = None) -> None:
        self.dialect = dialect or OPENAI_RESPONSES

    def headers(self, api_key: str) -> Mapping[str, str]:
        """Return the header that carries the key."""
        if self.dialect.key_header:
            return {self.dialect.key_header: api_key} if api_key else {}
        return bearer(api_key)

    def tools(self, specs: Sequence[ToolSpec]) -> msgspec.Raw:
        """Return the request's ``tools`` as JSON. Raises ValueError: parameters are not a JSON object."""
        return response_tools_json(specs)

    @property
    def call_ids(self) -> CallIds:
        """What the vendor takes as call ids."""
        return CallIds(self.dialect.longest_call_id)

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
        fields = response_fields(request, model, tools, tool_names, self.dialect, beginning)
        return msgspec.json.encode({**fields, "stream": stream})

    def answer(self, redact: Redactor, taken: Collection[str], request_id: str) -> ResponsesAnswer:
        """Return the fold for one answer."""
        return ResponsesAnswer(redact, taken=taken, request_id=request_id)
