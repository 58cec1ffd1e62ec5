"""The Anthropic Messages API as an ``Api``: what ``http_model`` drives.

The translation of messages is in ``anthropic.request``, of options in ``anthropic.options``, the folding of
answers in ``anthropic.answer``; what vendors vary in ``anthropic.dialect``.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from dualclaw_server.engine.model import ModelRequest, ToolSpec
from dualclaw_server.models.anthropic.answer import AnthropicAnswer
from dualclaw_server.models.anthropic.dialect import DEFAULT_DIALECT, AnthropicDialect
from dualclaw_server.models.anthropic.options import wire_options
from dualclaw_server.models.anthropic.request import tools_json, wire_messages, wire_turns
from dualclaw_server.models.beginnings import NOTHING, Beginning, joined
from dualclaw_server.models.endpoint import bearer
from dualclaw_server.models.failures import Redactor
from dualclaw_server.models.history import CallIds, Turn, system_text

_BREAKPOINT = {"type": "ephemeral"}


class AnthropicApi:
    """The Messages API as one vendor speaks it.

    Raises:
        ValueError: the dialect's ``thinking`` is not a JSON object.
    """

    def __init__(self, dialect: AnthropicDialect | None = None) -> None:
        self.dialect = dialect or DEFAULT_DIALECT
        if self.dialect.thinking:
            try:
                msgspec.json.decode(self.dialect.thinking, type=dict[str, msgspec.Raw])
            except msgspec.MsgspecError as error:
                raise ValueError(f"the dialect's thinking is not a JSON object: {error}") from None

    @property
    def path(self) -> str:
        """What is appended to the base URL."""
        return self.dialect.path

    def headers(self, api_key: str) -> Mapping[str, str]:
        """Return the key's header, the version, and the betas."""
        made = dict(bearer(api_key))
        if self.dialect.key_header == "x-api-key":
            made = {"x-api-key": api_key} if api_key else {}
        if self.dialect.version:
            made["anthropic-version"] = self.dialect.version
        if self.dialect.betas:
            made["anthropic-beta"] = ",".join(self.dialect.betas)
        return made

    def tools(self, specs: Sequence[ToolSpec]) -> msgspec.Raw:
        """Return the request's ``tools`` as JSON. Raises ValueError: parameters are not a JSON object."""
        return tools_json(specs)

    @property
    def call_ids(self) -> CallIds:
        """What the vendor takes as call ids."""
        return CallIds()

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
        dialect = self.dialect
        messages = wire_messages(request, tool_names, dialect, beginning)
        named = {"anthropic_version": dialect.body_version} if dialect.body_version else {"model": model}
        options = wire_options(
            request, messages, tools=tools, tool_names=tool_names, dialect=dialect, called=beginning.tools
        )
        if dialect.cache:
            _cache_up_to_here(messages)
        body: dict[str, object] = {**named, "messages": joined([], beginning, messages), "stream": stream, **options}
        if (system := system_text(request, beginning.system)).strip():
            body["system"] = _cached(system) if dialect.cache else system
        return msgspec.json.encode(body)

    def answer(self, redact: Redactor, taken: Collection[str], request_id: str) -> AnthropicAnswer:
        """Return the fold for one answer."""
        return AnthropicAnswer(redact, taken=taken, request_id=request_id)


def _cached(text: str) -> list[dict[str, object]]:
    return [{"type": "text", "text": text, "cache_control": _BREAKPOINT}]


def _cache_up_to_here(messages: Sequence[dict[str, object]]) -> None:
    """Put a breakpoint behind what users and tools said last; the next call begins with the same."""
    for message in reversed(messages):
        content = message["content"]
        if message["role"] == "user" and isinstance(content, list):
            content[-1]["cache_control"] = _BREAKPOINT
            return
