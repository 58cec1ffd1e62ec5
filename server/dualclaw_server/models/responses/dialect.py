"""What vendors of the Responses API vary, as plain data: the table of vendors is made of these."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ResponsesDialect:
    """One vendor's way of speaking the Responses API. The defaults are OpenAI's own."""

    key_header: str = ""
    """Header that carries the key, such as "api-key" (Azure); empty: ``authorization: Bearer``."""
    encrypted_reasoning: bool = True
    """Sealed reasoning is asked for and goes back. Nothing is stored at the vendor, so nothing else keeps it."""
    unsealed_models: tuple[str, ...] = ("gpt-3", "gpt-4", "chatgpt-4")
    """Beginnings of the names of models that do not reason, and refuse to be asked for sealed reasoning."""
    reasoning_ids: bool = True
    """Reasoning goes back with its id. False: without (Azure looks an id up among what it stored)."""
    reasoning_text_back: bool = False
    """Reasoning without a sealed form goes back as its text (DeepSeek, gpt-oss); OpenAI refuses that."""
    reasoning_summary: Literal["auto", "concise", "detailed"] | None = None
    """Summaries of the reasoning to ask for; OpenAI gives none unasked, and some accounts may not ask."""
    images_in_results: bool = True
    """Images of tool results are sent. False: a note stands in their place."""
    schema_strict: bool | None = None
    """``strict`` of a response schema; None: exactly when the schema fits strict mode."""
    longest_call_id: int = 64
    """Characters a call's id may have."""


OPENAI_RESPONSES = ResponsesDialect()
