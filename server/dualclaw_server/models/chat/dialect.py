"""What vendors of Chat Completions vary, as plain data: the table of vendors is made of these."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

_OPENAI_HOSTS = (".api.openai.com", ".openai.azure.com")

Prefill = Literal["plain", "prefix", "partial"]
"""How an assistant message at the end is continued. The answer must give only what follows; a vendor that repeats
the beginning (Mistral is said to) is not one that continues.

"plain": by its place alone (vLLM and llama.cpp with their templates' defaults, OpenRouter for some models);
"prefix": it carries ``"prefix": true`` (DeepSeek's beta endpoint); "partial": it carries
``"partial": true`` (Qwen, Kimi).
"""

ReasoningBack = Literal["turn", "calls", "details"]
"""How earlier reasoning goes back.

"turn": as ``reasoning_content`` of the messages since the last user message, which is what a model in the middle
of its tool calls needs; older reasoning stays away.
"calls": as ``reasoning_content`` of every message with calls, however old: vendors that answer 400 when one lacks
it. Where there is none of this API's own, a blank stands for it.
"details": as ``reasoning_details``, the blocks as they came, signatures included and in order (OpenRouter).
"""

SchemaForm = Literal["json_schema", "json_object"]
"""How a response schema is asked for: as the format, or, where the vendor only knows "some JSON object", as that
and with the schema in the instructions.
"""

ToolChoice = Literal["auto", "none", "required", "named"]
"""A form of ``tool_choice``; "named" is the object that names one tool."""


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """One vendor's way of speaking Chat Completions. The defaults fit most that call themselves compatible."""

    key_header: str = ""
    """Header that carries the key, such as "api-key" (Azure); empty: ``authorization: Bearer``."""
    max_tokens_field: str = "max_tokens"
    """Name of the bound on the answer; OpenAI's own newer models refuse this one and want "max_completion_tokens"."""
    prefill: Prefill | None = None
    """How it goes on from the beginning of an answer; None: it does not."""
    reasoning_back: ReasoningBack | None = None
    """How earlier reasoning goes back; None: it must not, or is ignored."""
    schema_form: SchemaForm | None = "json_schema"
    """How a response schema is asked for; None: in the instructions alone."""
    schema_strict: bool | None = None
    """Value of the schema's ``strict``. True only where the vendor holds every schema to it: OpenAI's strict mode
    refuses schemas with optional properties, so it is asked for exactly when the schema fits (None).
    False: never.
    """
    parallel_tool_calls: bool = True
    """False: the vendor refuses the option of this name; it is left out."""
    tool_choices: tuple[ToolChoice, ...] = ("auto", "none", "required", "named")
    """What it takes as ``tool_choice``; what it does not is put another way, or refused before it is sent."""
    stream_usage: bool = True
    """False: the vendor refuses ``stream_options``."""
    longest_call_id: int = 64
    """Characters a call's id may have."""
    exact_call_id: bool = False
    """True: call ids are exactly ``longest_call_id`` letters and digits (Mistral: 9)."""
    call_signatures: bool = False
    """True: signatures of calls go back as ``extra_content`` (Gemini)."""


DEFAULT_DIALECT = ChatDialect()
OPENAI_DIALECT = ChatDialect(max_tokens_field="max_completion_tokens", longest_call_id=40)


def dialect_of(base_url: str) -> ChatDialect:
    """Return OpenAI's own dialect for its hosts and Azure's, else the one that most endpoints take."""
    host = urlsplit(base_url.strip()).hostname or ""
    return OPENAI_DIALECT if f".{host}".endswith(_OPENAI_HOSTS) else DEFAULT_DIALECT
