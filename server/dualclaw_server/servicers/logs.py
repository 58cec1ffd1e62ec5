"""Structured logs, and the one redactor for logs, error texts and whatever else leaves the process.

A log line is one JSON object: time, level, logger, message, then trace_id, what a line about a run says of it
(run_id, tenant, agent, reason), and exception, where there is one.
Redaction works on the finished text, tracebacks included, because secrets arrive inside other people's
exceptions. It masks what looks like a credential and, whatever they look like, the secrets it was given.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Final, TextIO

from opentelemetry import trace

MASK: Final = "***"
RUN_FIELDS: Final = ("run_id", "tenant", "agent", "reason")
"""What a line about a run gives in ``extra``; each becomes a field of the line."""

_VALUE: Final = r"[^\s\"',;&)}\]]"
_HEADER: Final = r"(?<![^\W_])(authorization(?:[\"']?\s*[:=]|[\"']\s*,)\s*(?:b?[\"'])?)"
_SCHEME: Final = r"(?:bearer|basic|token|digest|negotiate|api-?key|key)[ \t]+[\"']?"
_SHAPES: Final = (
    # what follows a scheme of an authorization header
    re.compile(r"(?i)\b(bearer|basic)(\s+)[\w.~+/=:-]{4,}"),
    # an authorization header: the value after a scheme that is known, else both words there may be; "Bearer KEY"
    # is how people are told to write it, and stays
    re.compile(rf"(?i){_HEADER}({_SCHEME}){_VALUE}{{4,}}"),
    re.compile(rf"(?i){_HEADER}()(?!\s|{_SCHEME})(?:{_VALUE}++[ \t]++)?{_VALUE}{{4,}}"),
    # name: value, name=value, "name": "value", ('name', 'value')
    re.compile(
        r"(?i)(?<![^\W_])((?:api[_-]?key|access[_-]?token|refresh[_-]?token|auth[_-]?token|"
        r"client[_-]?secret|password|passwd|secret|token))([\"']?\s*[:=,]\s*[\"']?)(?!\s)[^\s\"',;&)}\]]{4,}"
    ),
    # user:password@ of an address
    re.compile(r"(://[^/\s:@]{0,256})(:)[^/\s@]{1,256}(?=@)"),
    # keys that vendors mark
    re.compile(r"\b(sk|pk|rk|xox[abprs]|gh[pousr]|glpat|AIza|AKIA)()[-_]?[A-Za-z0-9_-]{12,}"),
)
_MIN_SECRET: Final = 6


class Redactor:
    """Takes credentials out of text. ``secrets`` are masked wherever they stand; very short ones are ignored,
    since masking them would mangle every text. ``mask`` is a masker that knows more shapes than this one.
    """

    def __init__(self, secrets: Iterable[str] = (), mask: Callable[[str], str] = str) -> None:
        self._mask = mask
        self._secrets = sorted({s for s in secrets if len(s) >= _MIN_SECRET}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text with every credential masked."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        for shape in _SHAPES:
            text = shape.sub(rf"\1\2{MASK}", text)
        return self._mask(text)


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON, redacted."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._redactor.text(record.getMessage()),
        }
        trace_id = getattr(record, "trace_id", "") or _current_trace_id()
        if trace_id:
            fields["trace_id"] = str(trace_id)
        fields |= {name: str(value) for name in RUN_FIELDS if (value := getattr(record, name, ""))}
        if record.exc_info:
            fields["exception"] = self._redactor.text(self.formatException(record.exc_info))
        return json.dumps(fields, ensure_ascii=False)


def start_logging(stream: TextIO, redactor: Redactor, level: int = logging.INFO) -> None:
    """Send all logs of the process to a stream, one JSON line each."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(redactor))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore"):  # a line per request, with its whole address
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _current_trace_id() -> str:
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""
