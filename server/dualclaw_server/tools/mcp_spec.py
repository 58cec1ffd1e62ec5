"""What is known of an MCP server before it is spoken to: where it is, how far it is trusted, its limits.

Values of ``env`` and ``headers`` are secrets: they are in no repr, and ``clean`` takes them out of every text that
goes into a log line, an error or an observation of failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from dualclaw.events import clean_text

_NAME = re.compile(r"[a-zA-Z0-9]+(?:[-_][a-zA-Z0-9]+)*")
MAX_NAME = 32
MAX_ERROR = 500
"""Characters of a server's own words in an error."""
_MIN_SECRET = 6
"""Characters of the shortest value that is masked; shorter ones, such as "true", occur by chance."""

Protocol = Literal["auto", "legacy", "2026-07-28"]


@dataclass(frozen=True, slots=True)
class Spec:
    """An MCP server, as ``McpServer`` describes it. Raises ValueError that names every fault."""

    name: str
    command: str
    args: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    cwd: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    trusted: bool
    required: bool
    only: frozenset[str] | None
    timeout: float
    max_time: float
    connect_timeout: float
    hold_time: float
    max_message: int
    protocol: Protocol

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))
        object.__setattr__(self, "headers", MappingProxyType(dict(self.headers)))
        faults = list(self._faults())
        if faults:
            raise ValueError(f"MCP server {self.name[:MAX_NAME]!r}: {'; '.join(faults)}")

    def _faults(self) -> Sequence[str]:
        found = []
        if len(self.name) > MAX_NAME or not _NAME.fullmatch(self.name):
            found.append(f"its name must be 1 to {MAX_NAME} letters and digits, with single - or _ between them")
        if bool(self.command) == bool(self.url):
            found.append("give a command (stdio) or a url (Streamable HTTP), one of them")
        if self.command and self.headers:
            found.append("headers are for a url; a command takes env")
        if self.url:
            parts = urlsplit(self.url)
            if self.args or self.env or self.cwd:
                found.append("args, env and cwd are for a command; a url takes headers")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                found.append("its url must begin with http:// or https:// and name a host")
            if parts.username or parts.password:
                found.append("its url must carry no credentials; put them in headers")
        limits = ("timeout", "max_time", "connect_timeout", "hold_time", "max_message")
        found += [
            f"{name} must be above 0, not {getattr(self, name)}" for name in limits if not getattr(self, name) > 0
        ]
        if self.max_time < self.timeout:
            found.append(f"max_time {self.max_time:g} must not be below timeout {self.timeout:g}")
        return found

    def clean(self, text: str) -> str:
        """Return a text of, or about, the server that people may see: in one line, bounded, without its secrets."""
        for secret in self._secrets():
            text = text.replace(secret, "***")
        line = " ".join(clean_text(text).split())
        return line if len(line) <= MAX_ERROR else f"{line[:MAX_ERROR]}..."

    def _secrets(self) -> Sequence[str]:
        values = {*self.env.values(), *self.headers.values()}
        values.update(word for value in tuple(values) for word in value.split())  # the token of "Bearer token"
        return sorted((value for value in values if len(value) >= _MIN_SECRET), key=len, reverse=True)


class Unreachable(Exception):
    """The server cannot be had now; nothing was sent. The text says why and may be shown."""


def reason_of(error: BaseException) -> str:
    """Return what an error says, or the first one in a group of them."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or type(error).__name__
