"""The messages of a conversation before a run, as stores give them: never changed, and shared by its later runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Self

from dualclaw import Message


class History(tuple[Message, ...]):
    """Messages, oldest first. Nobody changes one: the next run of the conversation is given the very same objects."""

    @cached_property
    def call_ids(self) -> frozenset[str]:
        """Ids of all calls in them."""
        return frozenset().union(*map(calls_of, self))

    def then(self, messages: Iterable[Message]) -> Self:
        """Return the history with what came later; only that is looked at anew."""
        added = type(self)(messages)
        if not added:
            return self
        made = type(self)((*self, *added))
        if "call_ids" in self.__dict__:
            made.__dict__["call_ids"] = self.call_ids | added.call_ids
        return made


def calls_of(message: Message) -> set[str]:
    """Return the ids of the calls in a message."""
    return {part.tool_call.id for part in message.parts if part.WhichOneof("part") == "tool_call"}
