"""The agreement check: what clients have been shown of an answer, and what a new attempt at it changes.

A stream that breaks in the middle is asked for again, and the new attempt is under no duty to say the same.
Rules, with "shown" for what clients have and "said" for what the present attempt has come to:

- Text and reasoning are compared apart, by code point. While an attempt repeats what is shown nothing is sent;
  what goes beyond is sent at once. The first attempt has nothing to repeat and pays nothing for the comparison.
- Where it differs there is one Withdraw, after which shown is said, in both: a rewind replaces text and reasoning
  together, and what only a void attempt has said, of either, must not be shown again. From there on everything
  said is new, so an attempt needs one Withdraw at most. What is left over at its end costs the same one.
- HOLD keeps an attempt's deltas and treats them at its end as if they came then; those of a broken one vanish.
- CONTINUE is the same comparison from another place: the shown text counts as said, and is the prefix to ask with,
  without the white space at its end, which vendors refuse or choke on; that is still compared. Shown reasoning
  stays, and more of it is more, for nobody asked the model to repeat any. With no text shown there is nothing to
  go on from, and the attempt is an ordinary one. A repeated prefix is not looked for: "ha" may truly go on as
  "haha", and only a vendor's table could tell. A model that repeats it does not continue; ask it in LIVE.
- Pieces are kept as they come and joined once per attempt; every code point is compared once per attempt.
"""

from __future__ import annotations  # ValueType exists for type checkers only

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby

from dualclaw import RetryMode
from dualclaw_server.engine.model import ReasoningDelta, TextDelta


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Replace text and reasoning of the whole segment: one ``rewind``."""

    text: str
    reasoning: str


Delta = TextDelta | ReasoningDelta

Action = TextDelta | ReasoningDelta | Withdraw
"""What to do for clients: add to the text of the segment, add to its reasoning, or replace both."""


class _Stage(Enum):
    """Where the present attempt stands."""

    NONE = auto()
    """None has begun, or the last one is complete."""
    LIVE = auto()
    HELD = auto()


class Shown:
    """What clients have been shown of one answer. Per attempt: ``begin``, its deltas, and ``end`` unless it broke.

    The caller carries out what is returned, in order. Deltas give one action at most; only a held attempt gives
    more, at its end.

    Args:
        base_text, base_reasoning: of the segment before this answer; a Withdraw repeats them.
        separator: what sets the first text of this answer apart from the base; shown with that text only.
    """

    def __init__(self, base_text: str = "", base_reasoning: str = "", separator: str = "") -> None:
        self._base_text = base_text
        self._base_reasoning = base_reasoning
        self._separator = separator
        self._text = _Comparison()
        self._reasoning = _Comparison()
        self._stage = _Stage.NONE
        self._held: list[Delta] = []
        self._gap = separator
        """The separator while no text is shown; empty from then on."""
        self.prefix = ""
        """Beginning of the answer that the present attempt goes on from, for ``ModelRequest.prefix``; the message
        of its response lacks it. Empty when the attempt begins anew.
        """

    @property
    def text(self) -> str:
        """The text of this answer as clients have it; once an attempt is complete, the text of the answer."""
        return self._text.shown

    @property
    def reasoning(self) -> str:
        """The reasoning of this answer as clients have it; once an attempt is complete, all of it."""
        return self._reasoning.shown

    def begin(self, mode: RetryMode.ValueType) -> None:
        """Begin an attempt, the first one or one after a break; sets ``prefix``.

        Args:
            mode: how it is treated, LIVE when unspecified or unknown. CONTINUE only for a model whose
                ``traits.continues`` is true, and not for an answer that begins anew (``Restart``).
        """
        self._held.clear()
        self._stage = _Stage.HELD if mode == RetryMode.RETRY_MODE_HOLD else _Stage.LIVE
        self.prefix = self.text.rstrip() if mode == RetryMode.RETRY_MODE_CONTINUE else ""
        self._text.restart(said=len(self.prefix))
        self._reasoning.restart(said=len(self.reasoning) if self.prefix else 0)

    def take(self, delta: Delta) -> Sequence[Action]:
        """Take in the next delta of the attempt. Raises RuntimeError when none has begun."""
        if self._stage is not _Stage.LIVE:
            return self._hold(delta)
        if isinstance(delta, TextDelta):
            beyond = self._text.take(delta.text)
            if beyond and self._gap:
                beyond, self._gap = self._gap + beyond, ""
        else:
            beyond = self._reasoning.take(delta.text)
        if beyond:
            return (delta,) if beyond is delta.text else (type(delta)(beyond),)
        return self._withdraw() if beyond is None else ()

    def end(self) -> Sequence[Action]:
        """The attempt is complete: show what was held, withdraw what it did not say.

        Raises RuntimeError when none has begun.
        """
        self._check_begun()
        self._stage = _Stage.LIVE
        held, self._held = self._held, []
        actions: list[Action] = []
        for kind, run in groupby(held, type):
            actions += self.take(kind("".join([delta.text for delta in run])))
        if self._text.left_over or self._reasoning.left_over:
            actions += self._withdraw()
        self._stage = _Stage.NONE
        return actions

    def replace(self, text: str) -> Sequence[Action]:
        """Make this the text of the answer, whatever the model said; its reasoning stays.

        Raises RuntimeError while an attempt is under way: only what is complete has a text to replace.
        """
        if self._stage is not _Stage.NONE:
            raise RuntimeError("the attempt is under way; end it before its text is replaced")
        # An attempt like any other, which says this text and the same reasoning.
        self._stage = _Stage.LIVE
        self._text.restart(said=0)
        self._reasoning.restart(said=len(self.reasoning))
        return [*self.take(TextDelta(text)), *self.end()]

    def _withdraw(self) -> Sequence[Action]:
        """Make shown what is said."""
        self._text.forget()
        self._reasoning.forget()
        text, reasoning = self.text, self.reasoning
        self._gap = "" if text else self._separator
        apart = self._separator if text else ""
        return (Withdraw(self._base_text + apart + text, self._base_reasoning + reasoning),)

    def _hold(self, delta: Delta) -> Sequence[Action]:
        self._check_begun()
        self._held.append(delta)
        return ()

    def _check_begun(self) -> None:
        if self._stage is _Stage.NONE:
            raise RuntimeError("no attempt is under way; begin one first")


class _Comparison:
    """What is shown of one kind (text or reasoning) against what the attempt says of it.

    Shown is ``before`` and then ``new``; ``before`` was there when the attempt began, and as much of it as
    ``said`` tells is confirmed. Nothing is new before all of it is.
    """

    __slots__ = ("_before", "_new", "_said")

    def __init__(self) -> None:
        self._before = ""
        self._said = 0
        self._new: list[str] = []

    @property
    def shown(self) -> str:
        return self._before + "".join(self._new)

    @property
    def left_over(self) -> bool:
        """True while something is shown that the attempt has not said."""
        return self._said < len(self._before)

    def restart(self, *, said: int) -> None:
        """Compare a new attempt, of which so many code points of what is shown count as said."""
        self._before, self._new, self._said = self.shown, [], said

    def take(self, piece: str) -> str | None:
        """Return what of the piece goes beyond what is shown; None when it differs, and then ``forget`` is due."""
        left = len(self._before) - self._said
        if not left:
            self._new.append(piece)
            return piece
        if self._before.startswith(piece, self._said):
            self._said += len(piece)
            return ""
        if piece.startswith(self._before[self._said :]):
            self._said = len(self._before)
            self._new.append(piece[left:])
            return piece[left:]
        self.forget()
        self._new.append(piece)
        return None

    def forget(self) -> None:
        """Drop what the attempt has not said."""
        self._before = self._before[: self._said]
