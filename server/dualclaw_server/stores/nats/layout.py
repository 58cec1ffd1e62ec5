"""Where everything lies in JetStream: subjects, and the documents under them.

Rules:
- An id of a caller never becomes part of a subject as it is: dots and wildcards in it would reach other subjects.
  A token is base32 of the id; of a long id, its hash (subjects have a length limit). The id itself is in the document.
- Tenant and owner come first in every subject, so one filter reads, or purges, all of a run or a conversation.
- A message is one line of JSON (a Struct below), then raw bytes. What is larger than ``INLINE`` goes to chunks
  before, named by its hash; the document then holds that name.
- Every subject but a run's log holds its newest message only (``Nats-Rollup: sub``).

    NAME.run.TENANT.RUN.log            frames, the only subject with a history
    NAME.run.TENANT.RUN.doc            RunDoc, the public record; written whenever the state changes
    NAME.run.TENANT.RUN.rec            RecordDoc, what ``create`` was given; never changes; right before the first doc
    NAME.run.TENANT.RUN.cp             CheckpointDoc, the last checkpoint
    NAME.run.TENANT.RUN.work           WorkDoc, the work item
    NAME.run.TENANT.RUN.msg.VERSION    MessagesDoc, the messages that frame brought
    NAME.run.TENANT.RUN.in.SIGNAL      SignalDoc, one of the inbox; .tk.SIGNAL: it was taken
    NAME.run.TENANT.RUN.ans.INTERRUPT  Mark: that question has its answer
    NAME.run.TENANT.RUN.req.REQUEST    Mark: that request id belongs to it
    NAME.conv.TENANT.CONVERSATION.doc  ConversationDoc, who is active and who waits
    NAME.conv.TENANT.CONVERSATION.turn.ACTIVATION   MessagesDoc, what people see of one run
    NAME.req.TENANT.REQUEST.doc        RequestDoc
    NAME.set.TENANT.SETTING.doc        SettingDoc
    NAME.item.POOL.TENANT.RUN          ItemDoc, delivered to workers
    NAME.rest.TENANT.RUN.doc           RestDoc, in the order in which runs became final
    NAME.blob.KIND.TENANT.OWNER.HASH.N  chunks of whatever is too large
    NAME_live.TENANT.RUN               core NATS: the server republishes each log message once it is committed
    NAME_note.KIND                     core NATS: signals and releases, for processes that hold the run

A second stream has the timers, because JetStream refuses schedules in a stream that refuses messages when full:

    NAME_timer.TENANT.RUN.AT           DueDoc, a scheduled message
    NAME_due.TENANT.RUN.AT             the same when its time has come
"""

from __future__ import annotations

import base64
import functools
import hashlib
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from dualclaw import RunState
from dualclaw_server.engine.store import Frame, RunKey

INLINE = 256 * 1024
"""Bytes of a message beyond which its body goes to chunks."""

_LONGEST = 80
"""Bytes of an id that still becomes a readable token."""


class Doc(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What every message begins with."""

    op: str = ""
    """Id of the operation that wrote it: who is unsure whether it was stored recognises its own."""
    blob: tuple[str, int] | None = None
    """Hash and number of chunks of a body that is not in the message itself."""


class LogEntry(Doc):
    """A frame; its body is the events."""

    version: int
    first: int
    count: int
    epoch: int
    state: int
    at: int
    """Microseconds since the epoch."""
    turned: int = 0
    """Version of the newest frame, up to this one, that came with a new RunDoc."""
    size: int = 0
    durable: bool = False
    ends: bool = False
    gone: bool = False
    """True for the end mark of a deleted run."""
    writer: str = ""
    """The process that wrote it: it tells its own followers itself."""

    @property
    def last(self) -> int:
        """Seq of its last event."""
        return self.first + self.count - 1

    def frame(self, body: bytes) -> Frame:
        """Return it as readers see it."""
        return Frame(self.epoch, self.first, self.count, body, state_of(self.state), self.durable, self.ends)


class RunDoc(Doc):
    """A run between two frames that change more than its text; its body is the public record."""

    tenant: str
    run_id: str
    conversation: str
    pool: str
    state: int
    created: int
    updated: int
    number: int = 0
    """Its place among all runs; 0: the sequence of this very message."""
    activation: int = 0
    version: int = 0
    """Version of the frame it came with."""
    kept_from: int = 1
    checkpoint: tuple[str, int] | None = None
    """Chunks of the current checkpoint, to be dropped with it."""
    deleted: bool = False


class RecordDoc(Doc):
    """What create was given; its body is the record, then the user's message."""

    cut: int
    request: str = ""


class CheckpointDoc(Doc):
    """A checkpoint; its body is the bytes."""

    seq: int


class MessagesDoc(Doc):
    """Messages by position; its body is theirs, joined."""

    parts: list[tuple[int, str, int]] = []
    """Position, scope, length."""


class SignalDoc(Doc):
    """A signal; its body is the bytes."""

    signal_id: str


class Mark(Doc):
    """Says by being there."""


class ConversationDoc(Doc):
    """A conversation and the runs in it that have not ended."""

    conversation_id: str
    title: str
    created: int
    updated: int
    number: int = 0
    active: str | None = None
    queue: list[str] = []
    activations: int = 0
    deleted: bool = False


class RequestDoc(Doc):
    """What a request id has begun."""

    run_id: str
    first_seq: int
    fingerprint: str


class SettingDoc(Doc):
    """A small setting; its body is the value."""

    revision: int


class WorkDoc(Doc):
    """A run's work item. Waiting, held (``token`` is set), or not there; see ``work``."""

    generation: int = 0
    """Number of the ItemDoc that counts; any other one is stale."""
    waiting: bool = False
    token: str = ""
    """Whoever holds it."""
    worker: str = ""
    ready: float = 0.0
    deliveries: int = 0
    again: int = 0
    timers: list[float] = []


class ItemDoc(Doc):
    """A work item on its way to a worker."""

    tenant: str
    run_id: str
    generation: int


class DueDoc(Doc):
    """A timer, or a work item that was put back for long (then ``generation`` is set)."""

    tenant: str
    run_id: str
    at: float
    generation: int = 0


class RestDoc(Doc):
    """A run that became final and still has its log."""

    tenant: str
    run_id: str
    rested: int


D = TypeVar("D", bound=Doc)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as the server keeps it."""

    subject: str
    seq: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Found(Generic[D]):
    """A document that was read, with its body."""

    seq: int
    doc: D
    body: bytes


def pack(doc: Doc, body: bytes = b"") -> bytes:
    """Return a message's bytes."""
    return msgspec.json.encode(doc) + b"\n" + body


def unpack(data: bytes, kind: type[D]) -> tuple[D, bytes]:
    """Return what a message holds. Raises ValueError for one that nobody here wrote."""
    head, _, body = data.partition(b"\n")
    return msgspec.json.decode(head, type=kind), body


@functools.lru_cache(maxsize=8192)
def token(text: str) -> str:
    """Return an id as one token of a subject; different ids give different tokens."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > _LONGEST:
        return "h" + base64.b32encode(hashlib.sha256(data).digest()).decode().rstrip("=").lower()
    return "b" + base64.b32encode(data).decode().rstrip("=").lower()


def state_of(number: int) -> RunState.ValueType:
    """Return a state as the contract has it."""
    return RunState.ValueType(number)


def _owner(subject: str) -> tuple[str, str, str]:
    """Return kind, tenant and name of whoever a chunk belongs to. A run's log can go while its record stays."""
    _, kind, tenant, name, *rest = subject.split(".")
    return ("log" if kind == "run" and rest[0] in ("log", "cp", "in") else kind), tenant, name


class Subjects:
    """The subjects of one store."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream = name
        self.timers_stream = f"{name}_TIMERS"
        self.all = f"{name}.*.*.>"
        self.live_source = f"{name}.run.*.*.log"
        self.live_target = f"{name}_live.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}"
        self.timers = f"{name}_timer.>"
        self.due = f"{name}_due.>"
        self.notes = f"{name}_note.*"

    def run(self, key: RunKey, *rest: str) -> str:
        """Return a subject of a run."""
        return ".".join((self.name, "run", token(key.tenant), token(key.run_id), *rest))

    def runs(self, tenant: str) -> str:
        """Return the filter for the documents of a tenant's runs."""
        return f"{self.name}.run.{token(tenant)}.*.doc"

    def conversation(self, tenant: str, conversation_id: str, *rest: str) -> str:
        """Return a subject of a conversation."""
        return ".".join((self.name, "conv", token(tenant), token(conversation_id), *rest))

    def conversations(self, tenant: str) -> str:
        """Return the filter for the documents of a tenant's conversations."""
        return f"{self.name}.conv.{token(tenant)}.*.doc"

    def signal(self, signal_id: str) -> str:
        """Return the last token of what belongs to a signal."""
        return token(signal_id)

    def request(self, tenant: str, request_id: str) -> str:
        """Return the subject of a request id."""
        return f"{self.name}.req.{token(tenant)}.{token(request_id)}.doc"

    def request_of(self, tenant: str, request: str) -> str:
        """Return the subject of a request id that is a token already."""
        return f"{self.name}.req.{token(tenant)}.{request}.doc"

    def setting(self, tenant: str, name: str) -> str:
        """Return the subject of a setting."""
        return f"{self.name}.set.{token(tenant)}.{token(name)}.doc"

    def item(self, pool: str, key: RunKey) -> str:
        """Return the subject of a run's work item."""
        return f"{self.name}.item.{token(pool)}.{token(key.tenant)}.{token(key.run_id)}"

    def items(self, pool: str) -> str:
        """Return the filter for the work items of a pool."""
        return f"{self.name}.item.{token(pool)}.>"

    def rest(self, key: RunKey) -> str:
        """Return the subject of the mark that a run is final and has its log."""
        return f"{self.name}.rest.{token(key.tenant)}.{token(key.run_id)}.doc"

    def rests(self) -> str:
        """Return the filter for those marks."""
        return f"{self.name}.rest.>"

    def blob(self, owner: str, digest: str, chunk: str) -> str:
        """Return the subject of a chunk; ``owner`` is any subject of whoever it belongs to."""
        return ".".join((self.name, "blob", *_owner(owner), digest, chunk))

    def blobs(self, owner: str) -> str:
        """Return the filter for all chunks of an owner."""
        return ".".join((self.name, "blob", *_owner(owner), ">"))

    def live(self, key: RunKey) -> str:
        """Return the subject on which a run's committed frames are republished."""
        return f"{self.name}_live.{token(key.tenant)}.{token(key.run_id)}"

    def note(self, kind: str) -> str:
        """Return the subject of notes to other processes."""
        return f"{self.name}_note.{kind}"

    def timer(self, key: RunKey, at: float) -> str:
        """Return the subject of a timer."""
        return f"{self.name}_timer.{token(key.tenant)}.{token(key.run_id)}.{int(at * 1_000_000)}"

    def timers_of(self, key: RunKey) -> str:
        """Return the filter for a run's timers."""
        return f"{self.name}_timer.{token(key.tenant)}.{token(key.run_id)}.>"

    def due_at(self, key: RunKey, at: float) -> str:
        """Return the subject a timer goes to when its time has come."""
        return f"{self.name}_due.{token(key.tenant)}.{token(key.run_id)}.{int(at * 1_000_000)}"
