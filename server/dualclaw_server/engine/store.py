"""What the engine asks of a store: one log per run, with the checkpoint inside it.

Implemented by ``stores.memory.MemoryStore`` (the reference) and ``stores.sqlite.SqliteStore``. The
checkpoint lives inside the log, because separate log, queue and checkpoint stores need two writes exactly
where crashes hurt. Rules every implementation keeps:

- The tenant is part of every key. What belongs to another tenant does not exist: UNKNOWN_RUN.
- One writer per log: ``append`` names the version it builds on, and anyone else's append makes it Fenced.
- ``create``, ``signal`` and every ``append`` are atomic: all they carry is stored, or nothing is.
- A reader sees committed frames only, in order, without gap or repeat, each the same for every reader.
- A conversation has at most one active run (RUNNING, INTERRUPTED, or next to start). ``create`` and the
  appends that end a run keep this; a QUEUED run becomes RUNNING, with a work item, in the same atomic step
  in which the run before it ends.
- A run's messages become part of the conversation in the same atomic step that parks or ends the run; its
  user message already when it becomes active. Order in a conversation: order of activation, then position.

StoreError
  Fenced        another writer owns the log; this one must stop and write nothing more
  Ambiguous     it is unknown whether the append was stored, and the store could not find out: it has read the
                tail, where its own frame would mean success, the same version another try, anything else Fenced
  Full          no room; nothing was stored
  Unavailable   the store does not answer; nothing was stored
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, Protocol, TypeVar

from dualclaw import BusyPolicy, Conversation, Message, Run, RunState

FINAL: frozenset[RunState.ValueType] = frozenset(
    {RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_FAILED, RunState.RUN_STATE_CANCELLED}
)
"""States a run never leaves."""

T = TypeVar("T")

MAX_QUEUED = 8
"""Runs that may wait behind the active one of a conversation."""

MAX_FRAME_INFOS = 1000
"""Frames an inspection lists."""


class StoreError(Exception):
    """The store could not do what was asked."""


class Fenced(StoreError):
    """Another writer owns the log."""


class Ambiguous(StoreError):
    """It is unknown whether the append was stored."""


class Full(StoreError):
    """There is no room; nothing was stored."""


class Unavailable(StoreError):
    """The store does not answer; nothing was stored."""


class Sync(Enum):
    """How strongly a frame must be on disk before it counts as committed."""

    NORMAL = "normal"
    """Survives the death of the process."""
    FULL = "full"
    """Survives a power loss too: create, signals, started and finished of tools that are not read, park, terminal."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """A run of a tenant. The tenant comes from the authenticated call, never from a request's body."""

    tenant: str
    run_id: str


@dataclass(frozen=True, slots=True)
class RunMessage:
    """A message that came into being in a run; ``position`` orders it within the run, from 0."""

    position: int
    message: Message
    scope: str = ""
    """Id of the call whose sub-agent it belongs to: kept with the run, never part of the conversation. Empty: it is."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A contiguous range of a run's events, committed as one.

    ``body`` is the events as the bytes of ``RunResponse`` (field 1, repeated): they go to the log and to
    every client unparsed, and several bodies joined are one message. A frame without events (claimed,
    checkpoint only) has ``count`` 0, and ``first_seq`` is then the seq of the next event.
    """

    epoch: int
    first_seq: int
    count: int
    body: bytes
    state: RunState.ValueType
    durable: bool = False
    """False for a frame of text only; recovery needs every durable frame."""
    ends_segment: bool = False
    """True when its last event is terminal."""
    checkpoint: bytes = b""
    """A ``checkpoint.v1.Checkpoint``; empty: the last one still holds."""
    messages: tuple[RunMessage, ...] = ()
    signals: tuple[str, ...] = ()
    """Ids of the signals this frame has taken from the inbox."""
    run: Run | None = None
    """The run's public record when it changed; ``last_seq``, ``state`` and times are filled in by the store."""
    sync: Sync = Sync.NORMAL

    @property
    def last_seq(self) -> int:
        """Seq of its last event; one below ``first_seq`` when it has none."""
        return self.first_seq + self.count - 1

    def after(self, seq: int) -> Frame:
        """Return the frame without its events up to ``seq``; itself when there are none to drop."""
        drop = seq - self.first_seq + 1
        if drop <= 0:
            return self
        offset = 0
        for _ in range(min(drop, self.count)):
            offset = _end_of_event(self.body, offset)
        return replace(self, first_seq=self.first_seq + drop, count=max(0, self.count - drop), body=self.body[offset:])


def _end_of_event(body: bytes, offset: int) -> int:
    """Return where the length-delimited field that starts at ``offset`` ends (one tag byte, varint, payload)."""
    offset += 1
    shift = length = 0
    while True:
        byte = body[offset]
        offset += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return offset + length
        shift += 7


@dataclass(frozen=True, slots=True)
class NewRun:
    """Everything ``create`` stores in one atomic step."""

    key: RunKey
    conversation_id: str
    new_conversation: bool
    """True: the conversation is created with it, under ``title``. False: it must exist (UNKNOWN_CONVERSATION)."""
    title: str
    request_id: str
    """Empty: not idempotent."""
    fingerprint: str
    """Hash of the request's body; the same request_id with another one is REQUEST_ID_REUSED."""
    record: bytes
    """A ``checkpoint.v1.RunRecord``."""
    run: Run
    message: Message
    """The user's message, position 0."""
    on_busy: BusyPolicy.ValueType
    replace_signal: bytes
    """The ``checkpoint.v1.Signal`` that REPLACE puts into the inbox of every run it cancels."""
    pool: str = "default"


@dataclass(frozen=True, slots=True)
class Answers:
    """What a caller says to a run that asked, accepted as a whole or not at all."""

    key: RunKey
    interrupt_ids: tuple[str, ...]
    """Questions that are answered by it; may be none (then only the signal reaches the run)."""
    signal_id: str
    signal: bytes
    """A ``checkpoint.v1.Signal`` with a resume."""
    request_id: str
    """Empty: not idempotent. Shares its namespace with ``NewRun.request_id``."""
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Head:
    """Where a run's log stands, read linearizably."""

    key: RunKey
    version: int
    """Number of frames ever appended; what the next ``append`` must expect. 0 right after ``create``."""
    last_seq: int
    epoch: int
    """Epoch of the newest frame; 0 before the first claim."""
    state: RunState.ValueType
    conversation_id: str
    run: Run
    """The public record with ``state``, ``last_seq`` and times filled in."""
    kept_from: int = 1
    """Seq of the oldest event still kept; above 1 after compaction, then an attach below is LOG_COMPACTED."""


@dataclass(frozen=True, slots=True)
class Created:
    """The outcome of ``create``."""

    head: Head
    first_seq: int
    """Seq at which the segment of this request begins."""
    existing: bool
    """True when the request_id was known: nothing was stored, stream that segment again."""


@dataclass(frozen=True, slots=True)
class InboxSignal:
    """A signal in a run's inbox; ``body`` is a ``checkpoint.v1.Signal``."""

    signal_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker needs to go on with a run."""

    head: Head
    record: bytes
    checkpoint: bytes
    """The last one stored; empty before the first."""
    checkpoint_seq: int
    """``last_seq`` of the frame that carried it; 0 before the first."""
    messages: tuple[RunMessage, ...]
    """The run's own messages by position, its user message first."""
    unread: tuple[InboxSignal, ...]


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """What an operator sees of a stored frame; its events are read like everybody else's."""

    first_seq: int
    count: int
    epoch: int
    state: RunState.ValueType
    durable: bool
    size: int
    """Bytes of its events."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What an operator sees of a run: where it stands, who works on it, and what it waits for."""

    head: Head
    record: bytes
    checkpoint: bytes
    frames: tuple[FrameInfo, ...]
    """The newest 1,000 that are kept, oldest first; those without events are not kept by every store."""
    unread: tuple[InboxSignal, ...]
    waiting: bool
    """True when it has a work item: somebody works on it, or will."""
    worker: str
    """Name of the process that works on it; empty: none does."""
    deliveries: int
    """How often its work item was delivered."""
    ready_time: float
    """Held: end of the lease. Else: when its work item may be claimed. Seconds since the epoch; 0: no work item."""
    timers: tuple[float, ...]
    """When it will be woken by time, seconds since the epoch, soonest first."""


class Claim(Protocol):
    """A work item in hand: the lease on a run. Heartbeats go on by themselves until ``ack`` or ``nak``.

    ``ack`` only after one's own append of a park or terminal frame, or when there is nothing to do.
    """

    @property
    def key(self) -> RunKey:
        """The run to work on."""

    @property
    def redelivered(self) -> bool:
        """True when this very item had been claimed before: its earlier holder is gone."""

    @property
    def lost(self) -> bool:
        """True once the lease could not be kept; start no further model or tool call."""

    async def ack(self) -> None:
        """The work is done; the item goes away. A signal, answer or due timer that came after the claim, for a run
        that is not final, is delivered all the same.
        """

    async def nak(self, delay: float) -> None:
        """Put the item back, to be delivered again after ``delay`` seconds."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list; ``next_token`` is empty on the last one."""

    items: Sequence[T]
    next_token: str


class RunStore(Protocol):
    """Runs, their logs, and conversations. Methods raise EngineError for what a caller did wrong
    (UNKNOWN_RUN, CONVERSATION_BUSY, ...) and StoreError for what befell the store.
    """

    async def open(self) -> None:
        """Make it ready: files, migrations, threads. Work items of processes that are gone become claimable."""

    async def close(self) -> None:
        """Commit what waits and release everything. Work items in hand become claimable at once."""

    async def create(self, new: NewRun) -> Created:
        """Store a new run with its work item, or return the one its request_id already made.

        Raises:
            EngineError: UNKNOWN_CONVERSATION, REQUEST_ID_REUSED, CONVERSATION_BUSY (metadata run_id),
                OVERLOADED (more than MAX_QUEUED wait).
        """

    async def signal(self, key: RunKey, body: bytes, signal_id: str) -> bytes | None:
        """Put a wish into the run's inbox and wake it, atomically. Returns the body stored earlier under that
        id, if any (then nothing changes). A final run takes no signals: nothing is stored, None is returned.
        """

    async def answer(self, answers: Answers) -> Created:
        """Record that questions of a parked run are answered, put the signal into its inbox and wake it, in one step.

        Returns the run's head, with the seq at which the segment of these answers begins: the one after its last
        event. A known ``request_id`` changes nothing and gives the segment it had begun, whatever the run's state.

        Raises:
            EngineError: UNKNOWN_RUN; REQUEST_ID_REUSED; ALREADY_ANSWERED (metadata interrupt_id), also for a run that
                went on since; RUN_NOT_INTERRUPTED (metadata state); UNKNOWN_INTERRUPT (metadata interrupt_id) for what
                is none of the run's ``interrupts``. Nothing is stored then.
        """

    def on_signal(self, callback: Callable[[RunKey], None]) -> None:
        """Have ``callback`` called, on the event loop, whenever a signal reached a run's inbox."""

    async def wake(self, key: RunKey, at: float) -> None:
        """Have the run claimed at ``at`` (seconds since the epoch), whatever else happens; a durable timer."""

    async def claim(self, pool: str, worker: str, wait: float) -> Claim | None:
        """Return the next work item, waiting up to ``wait`` seconds for one; None when there is none.

        An item of a run that is RUNNING under another item's lease is not delivered before that lease ends.
        """

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        """Store a frame on top of version ``expect``; the awaitable gives the new version once committed.

        It takes effect in call order without being awaited at once; one that builds on an append that failed fails the
        same way. Its outcome may also be Fenced (another version, an older epoch, a run that is final or gone),
        Ambiguous, Full or Unavailable. A frame of a QUEUED run may only end it; ``first_seq`` must follow the log's
        last event (else ValueError).
        """

    async def head(self, key: RunKey) -> Head:
        """Return where a run stands. Raises EngineError UNKNOWN_RUN."""

    async def load(self, key: RunKey) -> Loaded:
        """Return what a worker needs to go on. Raises EngineError UNKNOWN_RUN."""

    async def read(self, key: RunKey, after: int, limit: int = 262_144) -> Sequence[Frame]:
        """Return stored frames with events after seq ``after``, the first one trimmed, up to ``limit`` bytes
        (at least one frame when there is any). ``checkpoint``, ``messages``, ``signals``, ``run`` are left out.
        """

    def follow(self, key: RunKey, after: int) -> AsyncGenerator[Sequence[Frame], None]:
        """Yield frames with events after seq ``after``: stored ones, then live ones, for ever; close it to stop.

        A consumer that lags gets many frames at once, read from the log; memory per follower is bounded.
        """

    async def list_runs(
        self,
        tenant: str,
        *,
        states: Collection[RunState.ValueType],
        conversation_id: str,
        page_size: int,
        page_token: str,
    ) -> Page[Run]:
        """List runs, newest first. An unreadable page_token is INVALID_REQUEST."""

    async def inspect(self, key: RunKey) -> Inspection:
        """Return what an operator wants to know of a run. Raises EngineError UNKNOWN_RUN."""

    async def release(self, key: RunKey) -> bool:
        """Take the run from whoever works on it and deliver its work item anew at once, back-off or not.

        The holder's claim is lost, in this process at once, elsewhere at its next heartbeat; what it still writes is
        fenced once the next holder has claimed. Returns whether there was a work item. Raises EngineError UNKNOWN_RUN.
        """

    async def compact(self, before: float, limit: int = 100) -> int:
        """Drop the frames of final runs that came to rest before that time (seconds since the epoch); parked runs are
        never touched by age. Their record, messages and request ids stay; ``Head.kept_from`` says what is gone.

        Their checkpoint and inbox go too; their answers stay, so a late one still is ALREADY_ANSWERED. A follower that
        lags learns LOG_COMPACTED, one that has read everything notices nothing. Handles at most ``limit`` runs, of
        all tenants, the oldest first, and returns how many it compacted.
        """

    async def delete(self, key: RunKey) -> None:
        """Purge a run's log and record; unknown is fine. Messages stay until their conversation is deleted."""

    async def get_conversation(self, tenant: str, conversation_id: str) -> Conversation:
        """Return a conversation. Raises EngineError UNKNOWN_CONVERSATION."""

    async def list_conversations(self, tenant: str, *, page_size: int, page_token: str) -> Page[Conversation]:
        """List conversations, the last changed first."""

    async def list_messages(
        self, tenant: str, conversation_id: str, *, page_size: int, page_token: str
    ) -> Page[Message]:
        """List messages, the oldest first. Raises EngineError UNKNOWN_CONVERSATION."""

    async def history(self, tenant: str, conversation_id: str, before_run: str) -> Sequence[Message]:
        """Return all messages of a conversation that came before the given run became active, oldest first."""

    async def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation, its messages, runs and request ids.

        Raises:
            EngineError: UNKNOWN_CONVERSATION; CONVERSATION_BUSY (metadata run_id) while a run is active.
        """

    async def get(self, tenant: str, name: str) -> tuple[bytes, int] | None:
        """Return a small setting and its revision (from 1); None when there is none."""

    async def put(self, tenant: str, name: str, value: bytes, revision: int) -> int | None:
        """Store a setting if its revision still is ``revision`` (0: it must not exist). Returns the new revision,
        or None when somebody else was faster.
        """
