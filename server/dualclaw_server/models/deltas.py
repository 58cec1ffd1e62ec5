"""The deltas of one read: neighbours of one kind are one, made when they are taken and not per token."""

from dualclaw_server.engine.model import ReasoningDelta, TextDelta


class Deltas:
    """Collects what a model says until it is taken. Pieces are never empty."""

    __slots__ = ("_made", "_pieces", "_reasons")

    def __init__(self) -> None:
        self._made: list[TextDelta | ReasoningDelta] = []
        self._pieces: list[str] = []
        self._reasons = False

    def text(self, piece: str) -> None:
        """Add text."""
        if self._reasons:
            self._close()
            self._reasons = False
        self._pieces.append(piece)

    def reasoning(self, piece: str) -> None:
        """Add reasoning."""
        if not self._reasons:
            self._close()
            self._reasons = True
        self._pieces.append(piece)

    def take(self) -> list[TextDelta | ReasoningDelta]:
        """Return the deltas since the last time."""
        self._close()
        made, self._made = self._made, []
        return made

    def _close(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._made.append(ReasoningDelta(text) if self._reasons else TextDelta(text))
            self._pieces = []
