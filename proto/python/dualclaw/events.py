"""Events: how they are made, how they look on the wire, how they read as text.

The ``make_*`` factories are the one way in: they know the names, check the types and clean the text, so
nothing that a client could not read is ever committed. ``seq`` is left at 0; the frame writer stamps it.
"""

from collections.abc import Iterable, Mapping
from typing import TypedDict, TypeVar, Unpack

from google.protobuf.timestamp_pb2 import Timestamp

from dualclaw import names
from dualclaw.diagnosis import (
    SEVERITIES,
    diagnosis_from_dict,
    diagnosis_text,
    diagnosis_to_dict,
    has_content,
    make_diagnosis,
)
from dualclaw.json_text import canonical_args, canonical_json, clean_text, parse_args
from dualclaw.v1.event_pb2 import (
    Delta,
    Diagnosis,
    Done,
    EngineEvent,
    Error,
    Interrupt,
    InterruptItem,
    Node,
    Reasoning,
    Rewind,
    Severity,
    Step,
    Usage,
)
from dualclaw.wire import INT32_MAX, from_wire, step_from_wire, time_from_text, to_wire

__all__ = [
    "Meta",
    "canonical_json",
    "clean_text",
    "diagnosis_from_dict",
    "diagnosis_text",
    "diagnosis_to_dict",
    "from_wire",
    "make_delta",
    "make_diagnosis",
    "make_done",
    "make_error",
    "make_interrupt",
    "make_reasoning",
    "make_rewind",
    "make_step",
    "parse_args",
    "to_text",
    "to_wire",
]


T = TypeVar("T")

_ITEM_KEYS = (
    "id",
    "kind",
    "tool_name",
    "args",
    "prompt",
    "allowed_actions",
    "response_schema",
    "path",
    "args_hash",
    "expire_time",
)


class Meta(TypedDict, total=False):
    """The envelope of an event: where it belongs. All optional."""

    seq: int
    trace_id: str
    tenant_id: str
    claw: str
    run_id: str


def make_delta(content: str, **meta: Unpack[Meta]) -> EngineEvent:
    """Return an event that adds text to the answer. Raises ValueError for a wrong type."""
    return _event(EngineEvent(delta=Delta(content=_text("content", content))), meta)


def make_reasoning(content: str, **meta: Unpack[Meta]) -> EngineEvent:
    """Return an event that adds to the model's reasoning. Raises ValueError for a wrong type."""
    return _event(EngineEvent(reasoning=Reasoning(content=_text("content", content))), meta)


def make_step(
    kind: str,
    *,
    name: str = "",
    text: str = "",
    server: str = "",
    args: Mapping[str, object] | None = None,
    result: str = "",
    phase: str = "",
    index: int | None = None,
    diagnosis: Diagnosis | Mapping[str, object] | None = None,
    node: Node | Mapping[str, object] | None = None,
    call_id: str = "",
    parent_call_id: str = "",
    **meta: Unpack[Meta],
) -> EngineEvent:
    """Return an event that a step began, ended or changed.

    An error diagnosis fills an empty ``result`` with its text, because front-ends take an empty result for
    "still running". Arguments nested deeper than readers accept (100) are left out.

    ``kind`` is "thinking", "skill", "mcp", "agent", "kb" or "media"; ``phase`` is "start", "ok", "fail" or ""
    (thinking); ``index`` is its place in the run, from 0; ``args`` are put into canonical form.

    Raises:
        ValueError: a wrong type or an unknown name; the message says which.
    """
    event = EngineEvent()
    step = event.step.step  # filled where it is: a message made apart would be copied twice
    step.kind = _named("kind", kind, names.KINDS)
    step.name = _text("name", name)
    step.text = _text("text", text)
    step.server = _text("server", server)
    step.args_json = _args("args", args)
    step.result = _text("result", result)
    step.call_id = _text("call_id", call_id)
    step.parent_call_id = _text("parent_call_id", parent_call_id)
    if phase != "":
        step.phase = _named("phase", phase, names.PHASES)
    if diagnosis is not None:
        found = _diagnosis(diagnosis)
        if has_content(found):
            step.diagnosis.CopyFrom(found)
        if found.severity == Severity.SEVERITY_ERROR and not step.result:
            step.result = diagnosis_text(found)
    if node is not None:
        step.node.CopyFrom(_node(node))
    if index is not None:
        event.step.index = _number("index", index)
    return _event(event, meta)


def make_done(
    *,
    message_id: str,
    conversation_id: str,
    content: str = "",
    process_steps: Iterable[Step | Mapping[str, object]] | None = None,
    used_skills: Iterable[str] | None = None,
    used_mcp: Iterable[str] | None = None,
    generating: bool = False,
    usage: Usage | None = None,
    stop_reason: str = "",
    **meta: Unpack[Meta],
) -> EngineEvent:
    """Return the event that ends a segment.

    ``process_steps`` are messages or step objects of the wire format; ``stop_reason`` is the lower-case name
    of a StopReason, such as "finished", or "" when there is none to give.

    Raises:
        ValueError: a wrong type or an unknown name; the message says which.
    """
    if not isinstance(generating, bool):
        raise _wrong("generating", "a bool", generating)
    if usage is not None and not isinstance(usage, Usage):
        raise _wrong("usage", "a Usage", usage)
    done = Done(
        message_id=_text("message_id", message_id),
        conversation_id=_text("conversation_id", conversation_id),
        content=_text("content", content),
        process_steps=[_step(value) for value in _elements("process_steps", process_steps)],
        used_skills=[_text("used_skills", value) for value in _elements("used_skills", used_skills)],
        used_mcp=[_text("used_mcp", value) for value in _elements("used_mcp", used_mcp)],
        generating=generating,
        usage=usage,
    )
    if stop_reason != "":
        done.stop_reason = _named("stop_reason", stop_reason, names.STOP_REASONS)
    return _event(EngineEvent(done=done), meta)


def make_error(
    message: str, *, diagnosis: Diagnosis | Mapping[str, object] | None = None, **meta: Unpack[Meta]
) -> EngineEvent:
    """Return the event that a run failed. Raises ValueError for a wrong type, saying which."""
    error = Error(message=_text("message", message))
    if diagnosis is not None and has_content(found := _diagnosis(diagnosis)):
        error.diagnosis.CopyFrom(found)
    return _event(EngineEvent(error=error), meta)


def make_interrupt(items: Iterable[InterruptItem | Mapping[str, object]], **meta: Unpack[Meta]) -> EngineEvent:
    """Return the event that asks people; items are messages, or dicts with the keys of the wire format.

    Raises:
        ValueError: a wrong type, an unknown key or an unknown name; the message says which.
    """
    if items is None:
        raise _wrong("items", "a list", items)
    return _event(EngineEvent(interrupt=Interrupt(items=[_item(value) for value in _elements("items", items)])), meta)


def make_rewind(
    content: str, *, reasoning: str = "", reason: str = "", attempt: int = 0, **meta: Unpack[Meta]
) -> EngineEvent:
    """Return the event that replaces text and reasoning of the segment; ``reason`` is free text for logs."""
    rewind = Rewind(
        content=_text("content", content),
        reasoning=_text("reasoning", reasoning),
        reason=_text("reason", reason),
        attempt=_number("attempt", attempt),
    )
    return _event(EngineEvent(rewind=rewind), meta)


def to_text(event: EngineEvent) -> str:
    """Return what a channel without structure shows of an event; "" when that is nothing."""
    match event.WhichOneof("payload"):
        case "delta":
            return event.delta.content
        case "reasoning":
            return event.reasoning.content
        case "step":
            found = event.step.step.diagnosis
            loud = found.severity in (Severity.SEVERITY_WARNING, Severity.SEVERITY_ERROR)
            return diagnosis_text(found) if loud else ""
        case "done":
            return event.done.content
        case "error":
            return diagnosis_text(event.error.diagnosis) or f"❌ {event.error.message}".rstrip()
        case "interrupt":
            return "\n".join(_question(item) for item in event.interrupt.items)
        case "rewind":
            return event.rewind.content
        case _:
            return ""


def _question(item: InterruptItem) -> str:
    return " ".join(item.prompt.split()) or item.tool_name or item.id


def _event(event: EngineEvent, meta: Meta) -> EngineEvent:
    for key, value in meta.items():
        if key == "seq":
            event.seq = _number(key, value)
        elif key in Meta.__annotations__:
            setattr(event, key, _text(key, value))
        else:
            raise TypeError(
                f"unexpected keyword argument {key!r}; an event's envelope has {', '.join(Meta.__annotations__)}"
            )
    return event


def _wrong(name: str, wanted: str, value: object) -> ValueError:
    return ValueError(f"{name} must be {wanted}, not {type(value).__name__}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a str", value)
    return clean_text(value)


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, "an int", value)
    if not 0 <= value <= INT32_MAX:
        raise ValueError(f"{name} must be between 0 and {INT32_MAX}")
    return value


def _named(name: str, value: object, known: Mapping[str, T]) -> T:
    if not isinstance(value, str):
        raise _wrong(name, "a str", value)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    return known[value]


def _elements(name: str, values: object) -> list[object]:
    if values is None:
        return []
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise _wrong(name, "a list", values)
    return list(values)


def _args(name: str, args: object) -> str:
    if args is None:
        return ""
    if not isinstance(args, Mapping):
        raise _wrong(name, "a dict", args)
    try:
        return canonical_args(args)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _keys(name: str, value: Mapping[str, object], known: Iterable[str]) -> None:
    for key in value:
        if key not in known:
            raise ValueError(f"{name} has no key {key!r}; it has {', '.join(known)}")


def _diagnosis(value: object) -> Diagnosis:
    if isinstance(value, Diagnosis):
        return value
    if not isinstance(value, Mapping):
        raise _wrong("diagnosis", "a Diagnosis or a dict", value)
    _keys("diagnosis", value, ("code", "severity", "summary", "detail", "hint", "retryable"))
    severity = value.get("severity", "")
    if severity != "":
        _named("diagnosis.severity", severity, SEVERITIES)
    for key in ("code", "summary", "detail", "hint"):
        _text(f"diagnosis.{key}", value.get(key, ""))
    if not isinstance(value.get("retryable", False), bool):
        raise _wrong("diagnosis.retryable", "a bool", value["retryable"])
    return diagnosis_from_dict(value)


def _node(value: object) -> Node:
    if isinstance(value, Node):
        return value
    if not isinstance(value, Mapping):
        raise _wrong("node", "a Node or a dict", value)
    _keys("node", value, ("id", "type", "label"))
    return Node(
        id=_text("node.id", value.get("id", "")),
        type=_text("node.type", value.get("type", "")),
        label=_text("node.label", value.get("label", "")),
    )


def _step(value: object) -> Step:
    if isinstance(value, Step):
        return value
    if not isinstance(value, Mapping):
        raise _wrong("process_steps", "a list of Step or dict", value)
    step = step_from_wire(dict(value))
    if step is None:
        raise ValueError(f"process_steps: a step's type must be one of {', '.join(names.KINDS)}")
    return step


def _item(value: object) -> InterruptItem:
    if isinstance(value, InterruptItem):
        return value
    if not isinstance(value, Mapping):
        raise _wrong("items", "a list of InterruptItem or dict", value)
    _keys("items", value, _ITEM_KEYS)
    expire = value.get("expire_time")
    if isinstance(expire, str):
        expire = time_from_text(expire)
        if expire is None:
            raise ValueError("items.expire_time must be an RFC 3339 time")
    if expire is not None and not isinstance(expire, Timestamp):
        raise _wrong("items.expire_time", "a Timestamp or an RFC 3339 str", expire)
    actions = _elements("items.allowed_actions", value.get("allowed_actions"))
    path = _elements("items.path", value.get("path"))
    return InterruptItem(
        id=_text("items.id", value.get("id", "")),
        kind=_named("items.kind", value.get("kind", ""), names.INTERRUPT_KINDS),
        tool_name=_text("items.tool_name", value.get("tool_name", "")),
        args_json=_args("items.args", value.get("args")),
        prompt=_text("items.prompt", value.get("prompt", "")),
        allowed_actions=[_named("items.allowed_actions", action, names.ACTIONS) for action in actions],
        response_schema_json=_args("items.response_schema", value.get("response_schema")),
        path=[_text("items.path", part) for part in path],
        args_hash=_text("items.args_hash", value.get("args_hash", "")),
        expire_time=expire,
    )
