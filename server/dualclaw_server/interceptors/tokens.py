"""How many tokens a message costs, estimated without any vendor's tokenizer.

A tokenizer per model would be megabytes of tables that are wrong for the next model. What is needed here is a
figure that is never far too low, quickly: it decides when a context is compressed, and a vendor's own count
corrects it afterwards (``compression``). So:

- Letters and spaces of ASCII cost 1/4 token, other ASCII (digits, punctuation) 1/2, which overrates prose a little
  and keeps up with code, JSON and hex. Every other character costs a third of its UTF-8 bytes: a CJK character 1,
  an accented letter 2/3, an emoji 4/3.
- Images cost what a large one costs at vendors, since their size in pixels is not known here.
- What is counted once is remembered by content, so a history of any length is counted once and then looked up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from dualclaw import ContentPart, Media, Message
from dualclaw_server.engine.tool import Tool

PER_MESSAGE = 4
"""Tokens around the content of a message: role and separators."""
PER_CALL = 12
"""Tokens around a tool call, a tool result or the description of a tool."""
PER_IMAGE = 1_600
PER_FILE = 3_000
"""Tokens of a file of unknown size; about two pages."""

_LETTERS = re.compile(rb"[A-Za-z \n]+")


def text_tokens(text: str) -> int:
    """Return the tokens of a text."""
    if not text:
        return 0
    plain = text.encode("ascii", "ignore")
    others = 0 if len(plain) == len(text) else len(text.encode("utf-8", "replace")) - len(plain)
    dense = len(_LETTERS.sub(b"", plain))
    return -(-(3 * (len(plain) - dense) + 6 * dense + 4 * others) // 12)


def tool_tokens(tools: Iterable[Tool]) -> int:
    """Return the tokens of the descriptions of tools, schemas included."""
    return sum(
        PER_CALL + text_tokens(tool.name + tool.description) + text_tokens(tool.parameters_json) for tool in tools
    )


def message_tokens(message: Message) -> int:
    """Return the tokens of a message."""
    return PER_MESSAGE + sum(map(_part_tokens, message.parts))


def _part_tokens(part: ContentPart) -> int:
    match part.WhichOneof("part"):
        case "text":
            return text_tokens(part.text)
        case "reasoning":  # a hidden block costs what was thought; its sealed form is the only measure of that
            sealed = max(len(part.reasoning.redacted), len(part.reasoning.signature))
            return max(text_tokens(part.reasoning.text), sealed // 4)
        case "tool_call":
            return PER_CALL + text_tokens(part.tool_call.name) + text_tokens(part.tool_call.args_json)
        case "tool_result":
            return PER_CALL + sum(map(_part_tokens, part.tool_result.parts))
        case "image":
            return PER_IMAGE
        case "file":
            return _file_tokens(part.file)
        case _:
            return 0


def _file_tokens(file: Media) -> int:
    if not file.data:
        return PER_FILE
    if file.media_type.startswith("text/") or file.media_type == "application/json":
        return text_tokens(file.data.decode("utf-8", "replace"))
    return max(PER_FILE, len(file.data) // 30)


class TokenCounter:
    """Counts messages and remembers the counts by content; safe to share, since they depend on nothing else."""

    def __init__(self, remembered: int = 32_768) -> None:
        """``remembered`` is how many counts are kept; those not asked for the longest go first."""
        if remembered < 1:
            raise ValueError(f"remembered must be at least 1, not {remembered}")
        self.estimates = 0
        """Messages counted so far that were not remembered."""
        self._remembered = remembered
        self._counts: dict[bytes, int] = {}

    def of(self, message: Message) -> int:
        """Return the tokens of a message."""
        key = hashlib.blake2b(message.SerializeToString(), digest_size=16).digest()
        count = self._counts.pop(key, None)
        if count is None:
            self.estimates += 1
            count = message_tokens(message)
            if len(self._counts) >= self._remembered:
                del self._counts[next(iter(self._counts))]
        self._counts[key] = count
        return count

    def total(self, messages: Iterable[Message]) -> int:
        """Return the tokens of messages."""
        return sum(map(self.of, messages))
