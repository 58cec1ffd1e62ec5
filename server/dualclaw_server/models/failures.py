"""What went wrong at a vendor, as one ModelError: by status, by error object, by the vendors' own words.

Rules and their reasons:

- An error object inside a 200 stream counts like the status it names. Both shapes are errors: under ``error``,
  and with code and message at the top level.
- Codes and types are read before texts; texts only decide between reasons that a status leaves open.
- A conversation that is too long is CONTEXT_OVERFLOW, because compressing it helps and retrying does not;
  except with a 429, whose texts speak of tokens too ("too many tokens per minute").
- Nothing that left here holds a secret: vendors repeat the key they refuse.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from dualclaw.errors import Reason
from dualclaw.events import clean_text
from dualclaw_server.engine.model import ModelError

EXCERPT_CHARACTERS = 500
"""How much of a vendor's text goes into an error's detail."""
SHORTEST_SECRET = 4
"""Shorter values are placeholders such as "x", and taking them out would garble the text."""
_LONGEST_WAIT = 24 * 3600.0
_JUDGED_CHARACTERS = 8_000  # vendors say what it is at the beginning; an event may be megabytes
_LINES_SEARCHED = 20

_OVERFLOW_CODES = frozenset(
    {
        "context_length_exceeded",
        "context_window_exceeded",
        "exceed_context_size_error",
        "model_context_window_exceeded",
        "request_too_large",
        "string_above_max_length",
        "1261",
    }
)
_OVERFLOW_TEXT = re.compile(
    r"""maximum\ (?:context|prompt|model)\ length
    | context[\ _](?:length|window|size|limit)[^.]{0,40}(?:exceed|\bonly\b)
    | exceed\w*[^.]{0,60}(?:context|token\ limit)
    | (?:prompt|input)\ is\ too\ long
    | prompt\ too\ long
    | prompt\ exceeds\ max\ length
    | input\ token\ count[^.]{0,60}exceeds
    | prompt\ token\ count[^.]{0,40}exceeds
    | reduce\ the\ length\ of\ (?:the|your)\ (?:messages|prompt|input)
    | greater\ than\ the\ context\ length
    | (?:too\ large|longer)[^.]{0,60}\ context\ length
    | range\ of\ input\ length\ should\ be
    | prompt\ 超长 | 上下文(?:长度)?超
    """,
    re.IGNORECASE | re.VERBOSE,
)
_FILTERED = frozenset({"content_filter", "content_policy_violation", "responsibleaipolicyviolation", "1301"})
_OVERLOADED = re.compile(
    r"overload|rate.?limit|too.?many.?requests|at capacity|capacity exceeded|no capacity|throttl"
    r"|insufficient_system_resource|tokens per (?:minute|day)|engine_busy|server is busy",
    re.IGNORECASE,
)
_QUOTA = re.compile(r"insufficient_quota|billing_hard_limit|exceeded your current quota|insufficient.balance", re.I)
_AUTH = re.compile(
    r"invalid.?api.?key|incorrect.?api.?key|authentication_error|unauthorized|unauthenticated|permission_(?:denied|error)"
    r"|invalid_authentication",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timeout|timed.out|deadline.?exceeded", re.IGNORECASE)
_SERVER = re.compile(
    r"server_error|internal.?(?:server.?)?error|api_error|unavailable|bad.gateway|upstream|provider.returned", re.I
)
_HEADER = re.compile(
    r"""(?<=authorization)(["']?\s*[:=]\s*["']?)(?:[^\s"',}]++[ \t]++)?[^\s"',}]+"""
    r"""|\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{16,}""",
    re.IGNORECASE,
)

_KEY_HINT = "Check DUALCLAW_MODEL_API_KEY, and that it belongs to this endpoint and may use this model."
_OVERFLOW_HINT = "Shorten the conversation, or use a model with a larger context."


class UnreadableError(ModelError):
    """What came is neither a piece of an answer nor an error."""


class Redactor:
    """Takes secrets out of texts. Knows the secrets, so it keeps to itself: it has no repr of its own."""

    def __init__(self, secrets: Collection[str]) -> None:
        found = {secret for secret in secrets if len(secret) >= SHORTEST_SECRET}
        self._secrets = sorted(found, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return the text without the secrets and without anything that reads like an Authorization header."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _HEADER.sub(lambda found: f"{found[1] or found[2]}***", text)

    def excerpt(self, text: str) -> str:
        """Return the beginning of the text, redacted before it is cut, on one line."""
        window = text if len(text) < 100_000 else text[:100_000]
        short = " ".join(clean_text(self(window)).split())
        return short if len(short) <= EXCERPT_CHARACTERS else short[: EXCERPT_CHARACTERS - 1] + "…"


def unreadable(data: str, redact: Redactor, *, wanted: str) -> UnreadableError:
    """Return the error for text that is nothing of what an API sends.

    Args:
        data: the text.
        redact: takes secrets out.
        wanted: what it should have been, for people: "chat completion".
    """
    detail = redact.excerpt(data)
    text = f"The model's endpoint sent something that is no {wanted}: {detail}"
    return UnreadableError("MODEL_BAD_RESPONSE", text, retryable=True, detail=detail)


def error_in(data: str, redact: Redactor, *, where: str, named: bool = False) -> ModelError | None:
    """Return the error that the JSON of a body or an event holds, or None.

    Args:
        data: the text; one that is no JSON holds an error only if it is named.
        redact: takes secrets out.
        where: what it was found in, for people: "the stream".
        named: the event itself is called "error", so whatever it holds is one.
    """
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        if not named:
            return None
        value = data
    error = find_error(value, named=named)
    return None if error is None else error_from_object(error, redact, where=where)


def unreadable_event(data: str, redact: Redactor, *, where: str, wanted: str, named: bool) -> ModelError:
    """Return what it means that an event is not of the API: the error somewhere in it, or that it is unreadable.

    A gateway may have put its error object into an event that was still open: then it is a line of its own, near
    the end.
    """
    for text in (data, *data.rsplit("\n", _LINES_SEARCHED)):
        if (error := error_in(text, redact, where=where)) is not None:
            return error
    if named and (error := error_in(data, redact, where=where, named=True)) is not None:
        return error
    return unreadable(data, redact, wanted=wanted)


def find_error(value: object, *, named: bool = False) -> Mapping[str, object] | None:
    """Return the error object in a vendor's JSON, in any shape seen, or None if it holds none.

    Args:
        value: the parsed JSON of a body or of one event.
        named: the event itself is called "error", so whatever it holds is one.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping):
        return {"message": str(value)} if named else None
    error = value.get("error")
    if isinstance(error, Mapping) and error:
        return error
    if isinstance(error, str) and error:
        return {**value, "message": _text(value.get("message")) or error, "code": value.get("code") or error}
    if error:
        return {"message": str(error)}
    if named or value.get("type") == "error" or value.get("object") == "error":
        return value
    if "choices" not in value and not value.get("usage"):
        message = _text(value.get("message")) or _text(value.get("detail")) or _text(value.get("msg"))
        if message:
            return {**value, "message": message}
    return None


def error_from_object(error: Mapping[str, object], redact: Redactor, *, where: str) -> ModelError:
    """Return the ModelError for an error object that came without an HTTP status of its own.

    Args:
        error: the object, as ``find_error`` gives it.
        redact: takes secrets out.
        where: what it was found in, for people: "the stream".
    """
    status = _status_in(error)
    message = _message(error)
    return _classify(status, error, message, redact, f"The model's endpoint reported an error in {where}")


def error_from_status(
    status: int, body: object, text: str, headers: Mapping[str, str], redact: Redactor, *, path: str
) -> ModelError:
    """Return the ModelError for an HTTP answer that is not 2xx.

    Args:
        status: the HTTP status.
        body: the parsed JSON of the body, or None.
        text: the body as text.
        headers: the answer's headers.
        redact: takes secrets out.
        path: path of the URL that was asked, for the hint.
    """
    error = find_error(body, named=body is not None) or {}
    message = _message(error) or text
    return _classify(
        status,
        error,
        message,
        redact,
        f"The model's endpoint answered with HTTP {status}",
        retry_after=read_retry_after(headers),
        path=path,
    )


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a vendor asks to wait: ``retry-after-ms``, or ``retry-after`` as seconds or as a date."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if not value:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                when = parsedate_to_datetime(value)
            except ValueError:
                continue
            seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        if not math.isnan(seconds):
            return min(max(seconds, 0.0), _LONGEST_WAIT)
    return None


def _classify(
    status: int,
    error: Mapping[str, object],
    message: str,
    redact: Redactor,
    what: str,
    *,
    retry_after: float | None = None,
    path: str = "",
) -> ModelError:
    codes = {_text(error.get(key)).lower() for key in ("code", "type", "status", "error_type")}
    metadata = error.get("metadata")
    raw = _text(metadata.get("raw")) if isinstance(metadata, Mapping) else ""
    words = " ".join(text[:_JUDGED_CHARACTERS] for text in (*sorted(codes), message, raw))
    reason, retryable, hint = _decide(status, codes, words)
    if status == 404 and path:
        hint = f"Check the base URL (asked for {path}; most endpoints want it to end in /v1) and the model's name."
    elif 300 <= status < 400:
        hint = f"The address was redirected (asked for {path}); set DUALCLAW_MODEL_BASE_URL to where it leads."
    detail = redact.excerpt(message)
    return ModelError(
        reason,
        f"{what}: {detail}" if detail else f"{what}.",
        retryable=retryable,
        detail=detail,
        hint=hint,
        retry_after=retry_after,
    )


def _decide(status: int, codes: Collection[str], words: str) -> tuple[Reason, bool, str]:
    """Return (reason, retryable, hint): the first row that fits wins."""
    overflow = not _OVERFLOW_CODES.isdisjoint(codes) or bool(_OVERFLOW_TEXT.search(words))
    if _QUOTA.search(words) and status in (0, 402, 403, 429):
        return "MODEL_OVERLOADED", False, "The account's quota is used up; check its plan and balance."
    if status == 429:
        return "MODEL_OVERLOADED", True, ""
    if status in (401, 403):
        return "MODEL_AUTH", False, _KEY_HINT
    if not _FILTERED.isdisjoint(codes) and status < 500:
        return "MODEL_BAD_RESPONSE", False, "The vendor's content filter refused the conversation."
    if status == 413 and not _OVERLOADED.search(words):
        return "CONTEXT_OVERFLOW", False, _OVERFLOW_HINT
    if status in (498, 529) or ((status == 0 or status >= 500 or status == 413) and _OVERLOADED.search(words)):
        return "MODEL_OVERLOADED", True, ""
    if overflow:
        return "CONTEXT_OVERFLOW", False, _OVERFLOW_HINT
    if status == 408:
        return "MODEL_TIMEOUT", True, ""
    if status == 409 or status >= 500:
        return "MODEL_UNAVAILABLE", True, ""
    if status == 0:
        if _AUTH.search(words):
            return "MODEL_AUTH", False, _KEY_HINT
        if _TIMEOUT.search(words):
            return "MODEL_TIMEOUT", True, ""
        if _SERVER.search(words):
            return "MODEL_UNAVAILABLE", True, ""
        return "MODEL_BAD_RESPONSE", "invalid" not in words.lower(), ""
    return "MODEL_BAD_RESPONSE", False, ""


def _status_in(error: Mapping[str, object]) -> int:
    """Return the HTTP status an error object names, or 0."""
    for key in ("status_code", "code", "status", "http_code"):
        value = error.get(key)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3:
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
            return value
    return 0


def _message(error: Mapping[str, object]) -> str:
    for key in ("message", "detail", "msg", "error", "code", "type"):
        value = error.get(key)
        if isinstance(value, str) and value:
            return value
        if value and not isinstance(value, bool):
            return str(value)
    return ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else ""
