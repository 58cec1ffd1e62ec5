"""Observations the engine makes itself, and what becomes of one on its way to the model and to people."""

from __future__ import annotations

from collections.abc import Sequence

from dualclaw import ContentPart, Diagnosis
from dualclaw.errors import Reason, diagnosis_code
from dualclaw.events import canonical_json, clean_text, make_diagnosis
from dualclaw_server.engine.interceptor import Observation

MAX_DETAIL = 2_000
"""Characters of a tool's own error text that are kept."""
MAX_ADDRESS = 8_192
"""Characters of the address of an image or file that people are shown; a longer one carries its data."""


def failure(
    reason: Reason,
    summary: str,
    *,
    detail: str = "",
    hint: str = "",
    retryable: bool = False,
    error: BaseException | None = None,
    not_done: bool = False,
) -> Observation:
    """Return why a call has no result: JSON for the model, a diagnosis for people."""
    code = diagnosis_code(reason)
    told = {"code": code, "message": f"{summary} {detail}".strip(), "retryable": retryable, "hint": hint}
    text = canonical_json({"error": {key: value for key, value in told.items() if value != ""}})
    return Observation(
        [ContentPart(text=text)],
        make_diagnosis(code=code, severity="error", summary=summary, detail=detail, hint=hint, retryable=retryable),
        is_error=True,
        error=error,
        not_done=not_done,
    )


def said(error: BaseException) -> str:
    """Return an error's own text, whatever its ``__str__`` does."""
    try:
        return clean_text(str(error))[:MAX_DETAIL]
    except Exception as worse:
        return f"(its text cannot be had: {type(worse).__name__})"


def text_of(parts: Sequence[ContentPart]) -> str:
    """Return parts as text for people; images and files by their address or name."""
    lines = []
    for part in parts:
        kind = part.WhichOneof("part")
        if kind == "text":
            lines.append(part.text)
        elif kind in ("image", "file"):
            media = part.image if kind == "image" else part.file
            shown = media.url if len(media.url) <= MAX_ADDRESS else ""
            lines.append(shown or f"[{media.name or media.media_type or kind}]")
    return "\n".join(lines)


def cut(parts: Sequence[ContentPart], limit: int, note: str) -> tuple[list[ContentPart], Diagnosis | None]:
    """Return parts with over-long texts cut to head and tail, and the diagnosis that says so.

    Args:
        parts: the result.
        limit: characters of text that are kept.
        note: what stands in place of what is left out; ``{count}`` is how many characters that is.
    """
    kept: list[ContentPart] = []
    missing, room = 0, limit
    for part in parts:
        surplus = len(part.text) - room if part.WhichOneof("part") == "text" else 0
        if surplus <= 0:
            kept.append(part)
            room -= len(part.text)
            continue
        missing += surplus
        head, tail = part.text[: room * 3 // 4], part.text[len(part.text) - room // 4 :]
        if room:
            kept.append(ContentPart(text=f"{head}\n{note.format(count=surplus)}\n{tail}"))
        room = 0
    if not missing:
        return kept, None
    return kept, make_diagnosis(code="result.truncated", severity="info", summary=note.format(count=missing))
