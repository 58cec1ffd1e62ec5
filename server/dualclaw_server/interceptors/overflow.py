"""Results that are too long: head and tail for the model, the rest under a handle that it can page through.

Rules

- What is kept is masked already, belongs to one run and one tenant, and is found by nobody else: the name of
  the kept value holds the run's id, and a handle is the digest of the text and nothing more.
- The handle comes from the content. The same result gives the same note again, so that a repeated call is seen to
  be one, and is kept once however often it comes.
- A cut is never inside a character as people see it: not before a combining mark, a variation selector or a
  skin tone, and not after a joiner.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dualclaw import ContentPart
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.tool import NotDone, Tool, ToolContext, tool

READ_MORE = "read_more"
"""Name of the tool that pages."""
_HANDLE = re.compile(r"[0-9a-f]{16}")
_LONGEST_CHARACTER = 32
"""Code points that a border moves at most."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What stands in cut results and pages."""

    empty: str
    cut: str
    """``count`` characters are left out."""
    cut_kept: str
    """The same, and ``kept`` characters from the beginning can be had with ``tool`` under ``handle``."""
    page: str
    page_end: str
    unknown_handle: str
    bad_offset: str


TEXTS: Mapping[Locale, Texts] = MappingProxyType(
    {
        "en": Texts(
            empty="[no output]",
            cut="[{count} characters left out]",
            cut_kept="[{count} characters left out. To read on: {tool} with handle {handle} and offset {offset}, "
            "up to {kept}.]",
            page="[characters {start} to {end} of {total}; go on with offset {end}]",
            page_end="[characters {start} to {total} of {total}; this is the end]",
            unknown_handle="There is no text under the handle {handle!r} in this run. "
            "Handles stand in the notes of cut results, and are of one run only.",
            bad_offset="The offset must be from 0 to {last}; the text has {total} characters.",
        ),
        "zh": Texts(
            empty="[无输出]",
            cut="[省略 {count} 个字符]",
            cut_kept="[省略 {count} 个字符。如需继续阅读：调用 {tool}，handle 为 {handle}，offset 为 {offset}，"
            "最大 {kept}。]",
            page="[第 {start} 到 {end} 个字符，共 {total} 个；继续请用 offset {end}]",
            page_end="[第 {start} 到 {total} 个字符，共 {total} 个；已到末尾]",
            unknown_handle="本次运行中没有句柄 {handle!r} 对应的文本。句柄见被截断结果的说明，且只在同一次运行内有效。",
            bad_offset="offset 必须在 0 到 {last} 之间；文本共 {total} 个字符。",
        ),
    }
)


def handle_of(text: str) -> str:
    """Return the handle of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def place_of(run_id: str, handle: str) -> str:
    """Return the name a text is kept under for the tenant."""
    return f"overflow/{run_id}/{handle}"


def read_more_tool(page: int, locale: Locale) -> Tool:
    """Return the tool that pages through kept texts, ``page`` characters at a time, its own note included."""
    texts = TEXTS[locale]

    @tool(name=READ_MORE, effect="read", timeout=30)
    async def read_more(context: ToolContext, handle: str, offset: int = 0) -> str:  # noqa: D417  # for models
        """Read on in a result that was cut because it was too long.

        Args:
            handle: The handle in the note where the result was cut.
            offset: Character to begin at, from 0; each page says where the next one begins.
        """
        known = _HANDLE.fullmatch(handle)
        kept = await context.trace.recall(place_of(context.run_id, handle)) if known else None
        if kept is None:
            raise NotDone(texts.unknown_handle.format(handle=handle[:80]))
        text = kept.decode()
        if not 0 <= offset < len(text):
            raise NotDone(texts.bad_offset.format(last=len(text) - 1, total=len(text)))
        room = page - len(texts.page.format(start=len(text), end=len(text), total=len(text))) - 1
        end = border(text, min(len(text), offset + room), floor=offset)
        note = texts.page_end if end == len(text) else texts.page
        return f"{text[offset:end]}\n{note.format(start=offset, end=end, total=len(text))}"

    return read_more


def border(text: str, place: int, *, floor: int = 0) -> int:
    """Return the place, or one a little before it, that is inside no character people see."""
    for best in range(place, max(floor, place - _LONGEST_CHARACTER), -1):
        if best >= len(text) or not _joined(text[best - 1], text[best]):
            return best
    return place


def _joined(before: str, after: str) -> bool:
    return (
        bool(unicodedata.combining(after))
        or after == "\u200d"
        or before == "\u200d"
        or "\ufe00" <= after <= "\ufe0f"
        or "\U0001f3fb" <= after <= "\U0001f3ff"
        or ("\U0001f1e6" <= before <= "\U0001f1ff" and "\U0001f1e6" <= after <= "\U0001f1ff")
    )


@dataclass(frozen=True, slots=True)
class Gap:
    """What is left out of a text."""

    head: int
    """Characters before it."""
    tail: int
    """Place of the first character after it."""


def gap_in(text: str, room: int) -> Gap:
    """Return what must be left out so that at most ``room`` characters stay, three quarters of them the head."""
    head = border(text, room * 3 // 4)
    return Gap(head, _tail(text, len(text) - (room - head)))


def cut(parts: Sequence[ContentPart], gap: Gap, note: str) -> list[ContentPart]:
    """Return parts with a note in place of the gap, whose places count over all their text. Media stays."""
    made: list[ContentPart] = []
    offset, noted = 0, False
    for part in parts:
        if part.WhichOneof("part") != "text":
            made.append(part)
            continue
        text = part.text
        before, after = text[: max(0, gap.head - offset)], text[max(0, gap.tail - offset) :]
        offset += len(text)
        if offset <= gap.head or (noted and len(after) == len(text)):
            made.append(part)
        elif not noted:
            noted = True
            made.append(ContentPart(text="\n".join(piece for piece in (before, note, after) if piece)))
        elif after:
            made.append(ContentPart(text=after))
    return made


def _tail(text: str, place: int) -> int:
    """Return the place, or one a little after it, that is inside no character people see."""
    for step in range(_LONGEST_CHARACTER):
        if not 0 < place + step < len(text) or not _joined(text[place + step - 1], text[place + step]):
            return place + step
    return place
