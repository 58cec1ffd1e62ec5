"""What goes out to a chat: messages within the platform's limit, and the numbers of the questions they show."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from dualclaw.json_text import clean_text
from dualclaw_clients.im.connector import Limit, Media
from dualclaw_clients.im.split import split_text

Piece = str | Media
"""One message to send: a text within the platform's limit, or media."""


@dataclass(frozen=True, slots=True)
class Told:
    """How far a chat that gets an answer then knows a run."""

    run_id: str
    seq: int
    """Position of the event the answer ends with."""
    over: bool
    """The run has ended; False: it goes on, and so the chat has more to hear."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An answer, ready to be sent."""

    pieces: tuple[Piece, ...]
    numbers: tuple[int, ...] = ()
    """Of the questions it shows."""
    told: tuple[Told, ...] = ()
    """The runs it tells of; not part of what is stored with it."""
    follow: tuple[str, ...] = ()
    """Further runs the chat is still to hear of; neither."""


class _Stored(TypedDict):
    numbers: list[int]
    pieces: list[str | tuple[Literal["image", "video"], str]]


def pieces_of(answer: str | Media, limit: Limit) -> tuple[Piece, ...]:
    """Return an answer as the messages to send."""
    if isinstance(answer, Media):
        return (answer,)
    return tuple(part.text for part in split_text(clean_text(answer), limit))


def outgoing_text(text: str, limit: Limit, numbers: Sequence[int] = ()) -> Outgoing:
    """Return a text of the relay's own as an answer."""
    return Outgoing(pieces_of(text, limit), tuple(numbers))


def joined(answers: Sequence[Outgoing]) -> Outgoing:
    """Return several answers as one."""
    return Outgoing(
        tuple(piece for answer in answers for piece in answer.pieces),
        tuple(number for answer in answers for number in answer.numbers),
        tuple(told for answer in answers for told in answer.told),
        tuple(run_id for answer in answers for run_id in answer.follow),
    )


def dump_outgoing(answer: Outgoing) -> str:
    """Return an answer as text for the state file."""
    plain = [piece if isinstance(piece, str) else (piece.media_type, piece.url) for piece in answer.pieces]
    return json.dumps({"numbers": answer.numbers, "pieces": plain}, ensure_ascii=False)


def load_outgoing(text: str) -> Outgoing:
    """Return the answer that ``dump_outgoing`` wrote."""
    stored: _Stored = json.loads(text)
    pieces = tuple(piece if isinstance(piece, str) else Media(*piece) for piece in stored["pieces"])
    return Outgoing(pieces, tuple(stored["numbers"]))
