"""What the kit has seen of a server: values without behaviour, which the judges read and nothing changes.

A scene drives one thing and keeps every exchange under a label. A judge that asks for an exchange that is not there
raises Unseen: its check is then "not checked" with the reason, and never passed by accident.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from google.protobuf.message import Message as ProtoMessage

from dualclaw import EngineEvent
from dualclaw.events import to_wire

_T = TypeVar("_T")


class Unseen(Exception):
    """There is nothing to judge, and why."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a gRPC call ended; code "OK" has nothing else."""

    code: str
    """Name of the gRPC code, such as "NOT_FOUND"."""
    text: str = ""
    domain: str = ""
    """Of google.rpc.ErrorInfo; "" when the status carries none."""
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    """Fields that google.rpc.BadRequest names."""
    size: int = 0
    """Bytes of the text and the details as they travel."""

    def __str__(self) -> str:
        """Return it in a short form."""
        return f"{self.code} {self.domain or 'without ErrorInfo'} {self.reason}".rstrip()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One gRPC call: what was asked, what came, how it ended."""

    rpc: str
    request: ProtoMessage
    events: tuple[EngineEvent, ...] = ()
    response: ProtoMessage | None = None
    """Of a unary call that ended with OK."""
    status: Status | None = None
    """None: the kit hung up, or gave up waiting (``late``)."""
    late: bool = False
    """It was still open when the kit gave up waiting."""
    faults: tuple[str, ...] = ()
    """What came and is no message of the contract."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of an SSE stream."""

    raw: bytes
    """All its bytes, the blank line included."""
    id: str | None = None
    data: bytes | None = None
    """Behind ``data: ``; None for a frame without data."""
    comment: bool = False


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """One HTTP exchange; ``frames`` are those of a body that is an event stream."""

    request: str
    """Method and path, for texts."""
    status: int = 0
    """0: no response came."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By lower-case name."""
    body: bytes = b""
    complete: bool = False
    """The response ended as HTTP wants it to end."""
    late: bool = False
    cut: str = ""
    """Why the response did not come to its end, if it broke off."""
    frames: tuple[Frame, ...] = ()
    faults: tuple[str, ...] = ()
    """What breaks the framing, and where."""


@dataclass(frozen=True, slots=True)
class Story:
    """The events of one run from the first on, over all its segments."""

    scene: str
    events: tuple[EngineEvent, ...]
    whole: bool = True
    """False: the stream was still open when the kit gave up waiting."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What one scene has seen, by label."""

    name: str
    exchanges: Mapping[str, Exchange] = field(default_factory=dict)
    http: Mapping[str, HttpExchange] = field(default_factory=dict)
    stories: tuple[tuple[str, ...], ...] = ()
    """Labels whose streams, one after the other, are a run from its first event to where it stands."""
    broke_off: str = ""
    """Why it did not come to its end; "" when it did."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything seen of one server."""

    scenes: Mapping[str, Scene]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Scenes that were not played, and why."""
    _known: dict[Callable[..., object], object] = field(default_factory=dict, repr=False, compare=False)

    def once(self, find: "Callable[[Evidence], _T]") -> _T:
        """Return what a function finds in this evidence; several judges ask, and it looks once."""
        if find not in self._known:
            self._known[find] = find(self)
        return cast("_T", self._known[find])

    def scene(self, name: str) -> Scene:
        """Return a scene. Raises Unseen."""
        if name in self.scenes:
            return self.scenes[name]
        raise Unseen(self.skipped.get(name, f"scene {name} was not played"))

    def call(self, scene: str, label: str) -> Exchange:
        """Return an exchange with an engine. Raises Unseen."""
        played = self.scene(scene)
        if label in played.exchanges:
            return played.exchanges[label]
        raise Unseen(f"scene {scene} broke off: {played.broke_off or f'there is no {label}'}")

    def http(self, scene: str, label: str) -> HttpExchange:
        """Return an exchange with a web gateway. Raises Unseen."""
        played = self.scene(scene)
        if label in played.http:
            return played.http[label]
        raise Unseen(f"scene {scene} broke off: {played.broke_off or f'there is no {label}'}")

    def calls(self) -> Iterator[tuple[str, Exchange]]:
        """Yield every exchange with an engine under "scene/label"."""
        for scene in self.scenes.values():
            for label, exchange in scene.exchanges.items():
                yield f"{scene.name}/{label}", exchange

    def streams(self) -> Iterator[tuple[str, HttpExchange]]:
        """Yield every event stream of a web gateway under "scene/label"."""
        for scene in self.scenes.values():
            for label, exchange in scene.http.items():
                if exchange.status == 200 and exchange.headers.get("content-type", "").startswith("text/event-stream"):
                    yield f"{scene.name}/{label}", exchange


def short(event: EngineEvent | None, limit: int = 160) -> str:
    """Return an event as people can read it in a line."""
    if event is None:
        return "nothing"
    wire = to_wire(event)
    if wire is None:
        return f"an event of an unknown kind with seq {event.seq}"
    for name in ("trace_id", "tenant_id", "claw", "run_id"):
        wire.pop(name, None)
    if "process_steps" in wire:
        wire["process_steps"] = len(event.done.process_steps)
    text = json.dumps(wire, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def text_of(events: Sequence[EngineEvent]) -> str:
    """Return all deltas joined, whatever was withdrawn."""
    return "".join(event.delta.content for event in events if event.WhichOneof("payload") == "delta")


def last(events: Sequence[EngineEvent]) -> EngineEvent | None:
    """Return the last event, None of none."""
    return events[-1] if events else None


def is_terminal(event: EngineEvent | None) -> bool:
    """Say whether an event ends a segment."""
    return event is not None and event.WhichOneof("payload") in {"done", "error"}
