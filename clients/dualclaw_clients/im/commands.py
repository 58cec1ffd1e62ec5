"""Commands in a chat: a small table of words that are for the relay and not for the agent.

- A command is the whole message, so that no sentence becomes one by its first word. Two commands take a word more.
- Words that people also say in conversation (``help``, ``new``) need the slash; of the plain ones there are few.
- An unknown word behind a slash is a message like any other: paths and foreign commands begin so, too.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final


class Word(Enum):
    """What a command asks for."""

    CANCEL = "cancel"
    """End what the chat waits for. It overtakes the messages before it: it is about them."""
    NEW = "new"
    """Begin a new conversation with the next message."""
    APPROVALS = "approvals"
    """List what waits for a decision; with a run's id: in that run."""
    HELP = "help"
    """Say what can be said."""


WORDS: Final[Mapping[str, Word]] = MappingProxyType(
    {
        "/cancel": Word.CANCEL,
        "/stop": Word.CANCEL,
        "/取消": Word.CANCEL,
        "取消": Word.CANCEL,
        "/new": Word.NEW,
        "/reset": Word.NEW,
        "/新对话": Word.NEW,
        "新对话": Word.NEW,
        "/approvals": Word.APPROVALS,
        "/approve": Word.APPROVALS,
        "/审批": Word.APPROVALS,
        "待审批": Word.APPROVALS,
        "/help": Word.HELP,
        "/帮助": Word.HELP,
        "帮助": Word.HELP,
    }
)
"""The one table; each is matched in any case and width."""
_WITH_ARGUMENT = frozenset({Word.APPROVALS})
_RUN_ID = re.compile(r"[\w.:/#-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the run it names, if any."""

    word: Word
    run_id: str = ""


def parse_command(text: str) -> Command | None:
    """Return the command a message is; None when it is a message like any other."""
    if len(text) > 300:
        return None
    parts = unicodedata.normalize("NFKC", text).split()
    word = WORDS.get(parts[0].casefold().rstrip("。.!")) if 1 <= len(parts) <= 2 else None
    if word is None:
        return None
    if len(parts) == 1:
        return Command(word)
    if word in _WITH_ARGUMENT and parts[0].startswith("/") and _RUN_ID.fullmatch(parts[1]):
        return Command(word, parts[1])
    return None
