"""Splits an answer into parts a platform takes, without hurting characters, lines or code blocks.

- Every part is within the limit, counted in the platform's own unit, its fence lines included.
- The slices are the answer: ``"".join(part.body for part in parts) == text``, nothing trimmed, nothing added.
- A cut inside a fenced code block closes the block and opens it again: the part gets a closing fence line
  (``tail``) and the next one the block's own opening line, language included (``head``). Head and tail are all
  that is added. A tail starts with a line break only if the cut is not at a line's end.
- A cut never lies inside a grapheme cluster (letter with its accents, flag, family emoji, CR LF). Only a
  cluster longer than the room of a whole part is cut, and then between code points: Python's strings have no
  halves of a surrogate pair, so none can be made.
- Of the borders in the second half of a part the last one of the best kind wins: line end outside code, line
  end inside code, end of a space, any cluster. Borders in the first half would make parts needlessly small.
- A fence whose two lines would take more than half a part is not kept up: its lines are plain text then.
  So every part makes progress.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import regex

from dualclaw_clients.im.connector import Limit, Unit

SMALLEST_LIMIT = 16
"""Below this a part could not hold one code point beside the fence lines it may carry."""

_CLUSTER = regex.compile(r"\X")
# Any indentation: models put fences into list items, and chat platforms do not count the spaces.
_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^\r\n]*)\r?\n?")


@dataclass(frozen=True, slots=True)
class Part:
    """One message: a slice of the answer, and the fence lines that keep its code blocks whole."""

    body: str
    head: str = ""
    """The opening line of the code block the slice begins in, with its line break."""
    tail: str = ""
    """The closing line of the code block the slice ends in."""

    @property
    def text(self) -> str:
        """What is sent."""
        return self.head + self.body + self.tail


@dataclass(frozen=True, slots=True)
class _Block:
    """A fenced code block: offsets of its lines in the text."""

    start: int
    """Of its opening line."""
    content: int
    """Of the line after the opening one."""
    closing: int
    """Of its closing line; the text's end when it is never closed."""
    end: int
    """Behind its closing line."""
    opening_line: str
    closing_line: str

    def is_inside(self, offset: int) -> bool:
        """Return whether a cut there leaves the block open behind it."""
        return self.content <= offset <= self.closing and self.closing < self.end

    def cuts_a_line(self, offset: int) -> bool:
        """Return whether a cut there would break one of its fence lines, or leave a block without content."""
        return self.start < offset <= self.content or self.closing <= offset < self.end


def size_of(text: str, unit: Unit) -> int:
    """Return a text's length as a platform counts it."""
    match unit:
        case Unit.BYTES:
            return len(text.encode("utf-8", "surrogatepass"))
        case Unit.CHARACTERS:
            return len(text)
        case Unit.UTF16:
            return len(text.encode("utf-16-le", "surrogatepass")) // 2


def split_text(text: str, limit: Limit) -> list[Part]:
    """Return the parts of a text in order, each within the limit; none for an empty text.

    Raises:
        ValueError: the limit is below SMALLEST_LIMIT.
    """
    if limit.size < SMALLEST_LIMIT:
        raise ValueError(f"a limit of {limit.size} {limit.unit.value} is too small; the smallest is {SMALLEST_LIMIT}")
    blocks = [block for block in _blocks(text) if _is_kept_up(text, block, limit)]
    parts: list[Part] = []
    offset = 0
    while offset < len(text):
        block = _block_at(blocks, offset)
        head = block.opening_line if block and block.is_inside(offset) else ""
        rest = text[offset : offset + limit.size + 1]
        if offset + len(rest) == len(text) and size_of(head + rest, limit.unit) <= limit.size:
            parts.append(Part(rest, head))
            break
        cut, tail = _best_cut(text, offset, blocks, limit.size - size_of(head, limit.unit), limit.unit)
        parts.append(Part(text[offset:cut], head, tail))
        offset = cut
    return parts


def _best_cut(text: str, start: int, blocks: list[_Block], room: int, unit: Unit) -> tuple[int, str]:
    """Return where the part that begins at ``start`` ends, and the closing line it then needs."""
    best: dict[int, tuple[int, str]] = {}
    used = 0
    for cluster in _CLUSTER.finditer(text, start):
        used += size_of(cluster[0], unit)
        if used > room:
            break
        cut = cluster.end()
        block = _block_at(blocks, cut)
        tail = _tail(text, cut, block)
        if used + size_of(tail, unit) > room:
            continue
        rank = _rank(text, cut, block, in_second_half=2 * used >= room)
        best[rank] = (cut, tail)
    if best:
        return best[min(best)]
    return _cut_cluster(text, start, blocks, room, unit)


def _rank(text: str, cut: int, block: _Block | None, *, in_second_half: bool) -> int:
    """Return how good a cut is; the lowest is best."""
    if block and block.cuts_a_line(cut):
        return 5
    if not in_second_half:
        return 4
    if text[cut - 1] == "\n":
        return 1 if block and block.is_inside(cut) else 0
    return 2 if text[cut - 1].isspace() else 3


def _cut_cluster(text: str, start: int, blocks: list[_Block], room: int, unit: Unit) -> tuple[int, str]:
    """Return a cut inside the cluster at ``start``, which no part can hold whole."""
    cut, tail, used = start, "", 0
    for offset in range(start, len(text)):
        used += size_of(text[offset], unit)
        next_tail = _tail(text, offset + 1, _block_at(blocks, offset + 1))
        if used + size_of(next_tail, unit) > room:
            break
        cut, tail = offset + 1, next_tail
    if cut == start:
        raise AssertionError(f"no room for one code point in {room} {unit.value}")
    return cut, tail


def _tail(text: str, cut: int, block: _Block | None) -> str:
    if block is None or not block.is_inside(cut):
        return ""
    return block.closing_line if text[cut - 1] == "\n" else "\n" + block.closing_line


def _blocks(text: str) -> Iterator[_Block]:
    """Yield the fenced code blocks of a text; one that is never closed ends behind the text."""
    opening: re.Match[str] | None = None
    for start, line in _lines(text):
        match = _FENCE.fullmatch(line)
        if match is None:
            continue
        fence, info = match["fence"], match["info"]
        if opening is None:
            if fence[0] == "~" or "`" not in info:
                opening, opened_at = match, start
        elif fence[0] == opening["fence"][0] and len(fence) >= len(opening["fence"]) and not info.strip():
            yield _block(opening, opened_at, start, start + len(line))
            opening = None
    if opening is not None:
        yield _block(opening, opened_at, len(text), len(text) + 1)


def _block(opening: re.Match[str], start: int, closing: int, end: int) -> _Block:
    mark = opening["indent"] + opening["fence"]
    return _Block(start, start + opening.end(), closing, end, mark + opening["info"] + "\n", mark)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its offset; only LF ends a line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield start, text[start:end]
        start = end


def _is_kept_up(text: str, block: _Block, limit: Limit) -> bool:
    """Return whether a part still has room when it carries the block's fence lines."""
    added = size_of(block.opening_line, limit.unit) + size_of("\n" + block.closing_line, limit.unit)
    closing = size_of(text[block.closing : block.end], limit.unit)
    return 2 * added <= limit.size and 2 * closing <= limit.size


def _block_at(blocks: list[_Block], offset: int) -> _Block | None:
    """Return the block a cut at the offset would touch; None between blocks."""
    return next((block for block in blocks if block.start < offset < block.end), None)
