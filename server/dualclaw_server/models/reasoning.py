"""Inline reasoning: a ``<think>`` block at the start of the text becomes reasoning, however it is cut.

Rules and their reasons:

- Only the very start of a message (white space aside) can open a block: further on, a tag is something the
  model writes about. ``<think-tank>`` and ``<thread>`` are text everywhere.
- Held back is only what may still become a tag, and white space that touches one: text is shown as it comes,
  and ``flush`` gives back whatever is left at the end.
- White space around the tags belongs to neither side.
- A block that is never closed stays reasoning: it was shown as such.
"""

from enum import Enum

_OPEN = "<think>"
_CLOSE = "</think>"
_WHITESPACE = " \t\r\n"


class _State(Enum):
    START = "nothing but white space yet"
    OPENED = "in the block, before its first character"
    THINKING = "in the block"
    CLOSED = "after the block, before the first character of the text"
    TEXT = "in the text"


class ThinkSplitter:
    """Splits one message's text into reasoning and text. ``feed`` the pieces, then ``flush``.

    Both return ``(reasoning, text)`` of what is sure by then; the reasoning comes first.
    """

    def __init__(self) -> None:
        self._state = _State.START
        self._held: list[str] = []

    @property
    def over(self) -> bool:
        """Return whether the text has begun, so that all that follows is text."""
        return self._state is _State.TEXT

    def feed(self, piece: str) -> tuple[str, str]:
        """Take the next piece of the text."""
        if self._state is _State.TEXT:
            return "", piece
        if self._is_more_space(piece):
            self._held.append(piece)
            return "", ""
        text = "".join([*self._held, piece])
        self._held.clear()
        if self._state is _State.START:
            bare = text.lstrip(_WHITESPACE)
            if bare.startswith(_OPEN):
                self._state = _State.OPENED
                text = bare[len(_OPEN) :]
            elif _OPEN.startswith(bare):
                self._held.append(text)
                return "", ""
            else:
                self._state = _State.TEXT
                return "", text
        return self._in_block(text)

    def flush(self) -> tuple[str, str]:
        """Give back what was held; the message is over."""
        held = "".join(self._held)
        self._held.clear()
        if self._state is _State.THINKING:
            return held, ""
        return "", held if self._state is _State.START else ""

    def _is_more_space(self, piece: str) -> bool:
        """Return whether the piece only lengthens the white space that is held; joining it each time costs too much."""
        held = self._held[-1] if self._held else ""
        waiting = self._state in (_State.START, _State.THINKING)
        return waiting and not piece.strip(_WHITESPACE) and not held.strip(_WHITESPACE)

    def _in_block(self, text: str) -> tuple[str, str]:
        if self._state is _State.CLOSED:
            return "", self._after_block(text)
        if self._state is _State.OPENED:
            text = text.lstrip(_WHITESPACE)
            if not text:
                return "", ""
            self._state = _State.THINKING
        end = text.find(_CLOSE)
        if end >= 0:
            self._state = _State.CLOSED
            return text[:end].rstrip(_WHITESPACE), self._after_block(text[end + len(_CLOSE) :])
        keep = len(text) - _possible_tag(text)
        keep = len(text[:keep].rstrip(_WHITESPACE))
        if keep < len(text):
            self._held.append(text[keep:])
        return text[:keep], ""

    def _after_block(self, text: str) -> str:
        text = text.lstrip(_WHITESPACE)
        if text:
            self._state = _State.TEXT
        return text


def _possible_tag(text: str) -> int:
    """Return how many characters at the end of the text may be the start of the closing tag."""
    at = text.rfind("<", max(0, len(text) - len(_CLOSE) + 1))
    return len(text) - at if at >= 0 and _CLOSE.startswith(text[at:]) else 0
