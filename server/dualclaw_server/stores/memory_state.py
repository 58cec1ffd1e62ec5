"""What MemoryStore holds of runs and conversations: plain values, and what each of them can do alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dualclaw import Conversation, Message, RunState
from dualclaw_server.engine.store import (
    MAX_FRAME_INFOS,
    Frame,
    FrameInfo,
    Head,
    InboxSignal,
    Inspection,
    Page,
    RunKey,
    RunMessage,
)
from dualclaw_server.stores import records
from dualclaw_server.stores.pages import make_token, page_key, page_length

T = TypeVar("T")


@dataclass(slots=True)
class StoredSignal:
    """A signal in an inbox; it stays after it was taken, so that its id is known."""

    body: bytes
    taken: bool = False


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a run; one with a scope is never part of the conversation."""

    body: bytes
    scope: str = ""


@dataclass(slots=True)
class Item:
    """A run's work item. ``again`` says that it is wanted once more after the delivery in hand."""

    ready: float
    token: int = 0
    worker: str = ""
    deliveries: int = 0
    again: bool = False
    again_for_signal: bool = False


@dataclass(slots=True, eq=False)
class StoredConversation:
    """A conversation, the run that is active in it, and those that wait."""

    number: int
    tenant: str
    conversation_id: str
    title: str
    created: int
    updated: int
    active: StoredRun | None = None
    queue: list[StoredRun] = field(default_factory=list)
    activations: int = 0
    messages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By activation of their run and position within it; only what people may see."""

    def public(self) -> Conversation:
        """Return it as people see it."""
        active = self.active.key.run_id if self.active is not None else ""
        return records.public_conversation(self.conversation_id, self.title, self.created, self.updated, active)


@dataclass(slots=True, eq=False)
class StoredRun:
    """A run with its log, its messages, its inbox and its work item."""

    number: int
    key: RunKey
    conversation: StoredConversation
    pool: str
    record: bytes
    info: bytes
    created: int
    updated: int
    state: RunState.ValueType
    activation: int = 0
    """Its place in the conversation, from 1; 0 before it became active."""
    version: int = 0
    last_seq: int = 0
    epoch: int = 0
    kept_from: int = 1
    rested: int | None = None
    """When it became final; None before, and once its log was compacted."""
    checkpoint: bytes = b""
    checkpoint_seq: int = 0
    frames: list[Frame] = field(default_factory=list)
    messages: dict[int, StoredMessage] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    """Ids of the interrupts that have their answer."""
    inbox: dict[str, StoredSignal] = field(default_factory=dict)
    item: Item | None = None
    timers: set[float] = field(default_factory=set)

    def store_message(self, message: RunMessage) -> None:
        """Store or replace a message; one that people see already changes in its place, or goes with a scope."""
        stored = StoredMessage(message.message.SerializeToString(), message.scope)
        self.messages[message.position] = stored
        shown = self.conversation.messages
        place = (self.activation, message.position)
        if stored.scope:
            shown.pop(place, None)
        elif place in shown:
            shown[place] = stored.body

    def show(self) -> None:
        """Make its messages part of the conversation, in the place it got when it became active."""
        if not self.activation:
            self.conversation.activations += 1
            self.activation = self.conversation.activations
        for position, message in self.messages.items():
            if not message.scope:
                self.conversation.messages[self.activation, position] = message.body

    def own_messages(self) -> tuple[RunMessage, ...]:
        """Return all its messages by position, those with a scope too."""
        return tuple(
            RunMessage(position, Message.FromString(stored.body), stored.scope)
            for position, stored in sorted(self.messages.items())
        )

    def unread(self) -> tuple[InboxSignal, ...]:
        """Return the signals no frame has taken, in the order they came."""
        return tuple(InboxSignal(name, signal.body) for name, signal in self.inbox.items() if not signal.taken)

    def head(self) -> Head:
        """Return where it stands."""
        public = records.public_run(self.info, self.state, self.last_seq, self.created, self.updated)
        return Head(
            self.key,
            self.version,
            self.last_seq,
            self.epoch,
            self.state,
            self.conversation.conversation_id,
            public,
            self.kept_from,
        )

    def compact(self) -> None:
        """Drop the log, and what fed it."""
        self.kept_from = self.last_seq + 1
        self.rested = None
        self.frames.clear()
        self.checkpoint, self.checkpoint_seq = b"", 0
        self.inbox.clear()

    def inspect(self, lease_end: float) -> Inspection:
        """Return what operators want to know; ``lease_end`` is that of an item in hand."""
        item = self.item
        held = item is not None and item.token
        return Inspection(
            self.head(),
            self.record,
            self.checkpoint,
            tuple(
                FrameInfo(one.first_seq, one.count, one.epoch, one.state, one.durable, len(one.body))
                for one in self.frames[-MAX_FRAME_INFOS:]
            ),
            self.unread(),
            item is not None,
            item.worker if item is not None and held else "",
            item.deliveries if item is not None else 0,
            lease_end if held else item.ready if item is not None else 0.0,
            tuple(sorted(self.timers)),
        )


class MemoryClaim:
    """A run in hand, for as long as its item carries this claim's token."""

    def __init__(
        self, run: StoredRun, item: Item, ack: Callable[[StoredRun], None], nak: Callable[[StoredRun, float], None]
    ) -> None:
        self._run = run
        self._token = item.token
        self._ack = ack
        self._nak = nak
        self.key = run.key
        self.redelivered = item.deliveries > 1

    @property
    def lost(self) -> bool:
        """True once the item is in other hands, or gone."""
        return self._run.item is None or self._run.item.token != self._token

    async def ack(self) -> None:
        """The work is done."""
        if not self.lost:
            self._ack(self._run)

    async def nak(self, delay: float) -> None:
        """Put the item back for ``delay`` seconds."""
        if not self.lost:
            self._nak(self._run, delay)


def page_of(items: Sequence[tuple[tuple[int, ...], T]], size: int, token: str, parts: int) -> Page[T]:
    """Return the page of items (each with its sort key of ``parts`` integers) that the token asks for."""
    after = page_key(token, parts)
    rest = sorted((item for item in items if after is None or item[0] > after), key=lambda item: item[0])
    page = rest[: page_length(size)]
    return Page([item for _, item in page], make_token(*page[-1][0]) if len(rest) > len(page) else "")
