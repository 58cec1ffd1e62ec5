"""The state of one run: what is saved of it, and the messages a model is given.

Wholly inside the checkpoint and the messages beside it, so that whoever claims the run after a crash has
the same trace. Nothing here knows how events are written.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualclaw import Message, RunOptions, Usage
from dualclaw_server.engine.checkpoint import Checkpoint, RunRecord
from dualclaw_server.engine.store import RunKey, RunMessage

_INT32_MAX = 2**31 - 1


class Trace:
    """One run, as strategies and tools see it."""

    def __init__(
        self,
        key: RunKey,
        record: RunRecord,
        checkpoint: Checkpoint,
        history: Sequence[Message],
        messages: Sequence[RunMessage],
    ) -> None:
        """``history`` are the conversation's messages before this run, ``messages`` the run's own by position."""
        self.key = key
        self.record = record
        self.checkpoint = checkpoint
        self._history = tuple(history)
        self._own = {item.position: item.message for item in messages}
        self._call_ids: set[str] | None = None
        checkpoint.next_position = max([checkpoint.next_position, *(position + 1 for position in self._own)])

    @property
    def conversation_id(self) -> str:
        """Id of the conversation."""
        return self.record.request.conversation_id

    @property
    def options(self) -> RunOptions:
        """What the caller asked of this run."""
        return self.record.request.options

    @property
    def user_text(self) -> str:
        """Text of the question."""
        return "\n".join(part.text for part in self.record.request.message.parts if part.WhichOneof("part") == "text")

    def context(self) -> list[Message]:
        """Return what the next model call gets: the history, then the run's own messages in order."""
        return [*self._history, *(self._own[position] for position in sorted(self._own))]

    def own_messages(self) -> list[Message]:
        """Return the run's own messages in order, its user message first."""
        return [self._own[position] for position in sorted(self._own)]

    def call_ids(self) -> set[str]:
        """Return every tool call id the conversation has used."""
        if self._call_ids is None:
            self._call_ids = set().union(*map(_calls_of, self.context()))
        return self._call_ids

    def reserve(self, count: int = 1) -> int:
        """Reserve places for ``count`` messages and return the first."""
        first = self.checkpoint.next_position
        self.checkpoint.next_position += count
        return first

    def put(self, position: int, message: Message) -> RunMessage:
        """Put a message at a reserved place; returns it as the store takes it."""
        self._own[position] = message
        if self._call_ids is not None:
            self._call_ids |= _calls_of(message)
        return RunMessage(position, message)

    def add_usage(self, usage: Usage) -> None:
        """Add a call's usage to the run's; a field stays absent until some call reports it."""
        total = self.checkpoint.usage
        for field, value in usage.ListFields():
            setattr(total, field.name, min(_INT32_MAX, getattr(total, field.name) + value))

    @property
    def usage(self) -> Usage | None:
        """Tokens used so far; None when no model reported any."""
        return self.checkpoint.usage if self.checkpoint.HasField("usage") else None

    @property
    def tokens(self) -> int:
        """Input and output tokens reported so far."""
        return self.checkpoint.usage.input_tokens + self.checkpoint.usage.output_tokens


def _calls_of(message: Message) -> set[str]:
    return {part.tool_call.id for part in message.parts if part.WhichOneof("part") == "tool_call"}
