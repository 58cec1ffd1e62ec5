"""What a front-end that knows no ``rewind`` shows, and what it may still be sent.

Such a front-end only appends. So after a rewind there are three situations:

- *in step*: what it shows is the run's text. Each piece goes out as it comes.
- *ahead*: the run's text was cut back to a beginning of what is shown. The pieces that write the same text again
  are swallowed; once they get past what is shown, the part beyond goes out.
- *apart*: the run's text differs from what is shown. Nothing goes out any more, since anything appended would
  be wrong; the content of ``done`` replaces the text. Only a later rewind can bring the two together again.

A rewind to a longer text that begins with what is shown sends the part beyond at once: that is in step again.
So at every moment either nothing is sent, or what is shown afterwards equals the run's text.
"""

from io import StringIO
from typing import Final

_IN_STEP: Final = -1
_APART: Final = -2
_LOST: Final = -3


class ShownText:
    """One text of a segment (the answer, or the reasoning) as an append-only front-end shows it."""

    __slots__ = ("_ahead", "_shown", "_state")

    def __init__(self) -> None:
        self._shown = StringIO()
        # One of the above, or when ahead: how many characters of what is shown the run's text has reached again.
        self._state: int = _IN_STEP
        self._ahead = ""

    def append(self, piece: str) -> str | None:
        """Return what to send for a piece of the run's text; None when nothing is to be sent."""
        if self._state == _IN_STEP:
            self._shown.write(piece)
            return piece
        if self._state < 0:
            return None
        missing = len(self._ahead) - self._state
        if not self._ahead.startswith(piece[:missing], self._state):
            self._state = _APART
            return None
        if len(piece) < missing:
            self._state += len(piece)
            return None
        beyond = piece[missing:]
        self._shown.write(beyond)
        self._state = _IN_STEP
        return beyond or None

    def rewind(self, text: str) -> str | None:
        """Return what to send when the run's text is now exactly this; None when nothing is to be sent."""
        if self._state == _LOST:
            return None
        shown = self._shown.getvalue()
        if text.startswith(shown):
            self._state = _IN_STEP
            beyond = text[len(shown) :]
            self._shown.write(beyond)
            return beyond or None
        if shown.startswith(text):
            self._state, self._ahead = len(text), shown
        else:
            self._state = _APART
        return None

    def lose(self) -> None:
        """Note that something did not reach the front-end: nothing is sent any more, as what it shows is unknown."""
        self._state = _LOST
