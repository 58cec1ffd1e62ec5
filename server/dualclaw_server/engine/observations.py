"""Observations the engine makes itself, and what becomes of one on its way to the model and to people."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from dualclaw import ContentPart, Diagnosis
from dualclaw.errors import Reason, diagnosis_code
from dualclaw.events import canonical_json, clean_text, make_diagnosis
from dualclaw_server.engine.interceptor import Observation
from dualclaw_server.engine.texts import Texts

MAX_DETAIL = 2_000
"""Characters of a tool's own error text that are kept."""
MAX_ADDRESS = 8_192
"""Characters of the address of an image or file that people are shown; a longer one carries its data."""
MAX_LOGGED = 32_768
"""Characters of a traceback that are logged."""
MAX_CREDENTIAL = 16_384
"""Characters; no credential is longer."""
MAX_MEDIA = 4 * 1024 * 1024
"""Bytes of the images and files of one result that are kept, addresses included."""
MAX_MEDIA_PARTS = 50
"""Images and files of one result that are kept."""


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


def traceback_of(error: BaseException, mask: Callable[[str], str]) -> str:
    """Return an exception with its traceback as text for the log, with nothing in it that must not be shown."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as worse:  # of an exception whose own text cannot be had
        return f"{type(error).__name__} (its text cannot be had: {type(worse).__name__})"
    if len(text) > MAX_LOGGED + MAX_CREDENTIAL:
        # whatever the cut has split would not be known as a credential, so a margin goes with it
        return mask(text[: MAX_LOGGED + MAX_CREDENTIAL])[:-MAX_CREDENTIAL] + "..."
    return mask(text)


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


def cut(parts: Sequence[ContentPart], limit: int, texts: Texts) -> tuple[list[ContentPart], Diagnosis | None]:
    """Return parts with over-long texts cut to head and tail, and without images and files beyond what can be kept;
    and the diagnosis that says so.

    Args:
        parts: the result.
        limit: characters of text that are kept.
        texts: words for what is left out.
    """
    kept: list[ContentPart] = []
    missing, room = 0, limit
    left_out, media, size = 0, 0, 0
    for part in parts:
        if part.WhichOneof("part") != "text":
            if media < MAX_MEDIA_PARTS and size + part.ByteSize() <= MAX_MEDIA:
                media, size = media + 1, size + part.ByteSize()
                kept.append(part)
            else:
                left_out += 1
            continue
        surplus = len(part.text) - room
        if surplus <= 0:
            if part.text:
                kept.append(part)
            room -= len(part.text)
            continue
        missing += surplus
        head, tail = part.text[: room * 3 // 4], part.text[len(part.text) - room // 4 :]
        if room:
            note = texts.result_truncated.format(count=surplus)
            kept.append(ContentPart(text=f"{head}\n{note}\n{tail}"))
        room = 0
    notes = [texts.result_truncated.format(count=missing)] if missing else []
    if left_out:
        notes.append(texts.media_left_out.format(count=left_out))
        kept.append(ContentPart(text=notes[-1]))
    if not notes:
        return kept, None
    return kept, make_diagnosis(code="result.truncated", severity="info", summary=" ".join(notes))
