"""The event wire format: an event as a dict of JSON values, and back.

Rules and their reasons:

- Keys that front-ends of the first hour read are always written, empty or not; every later key only when
  non-empty. So an old front-end sees exactly what it always saw.
- What is newer than this code has no wire form: ``to_wire`` gives None and adapters skip and count it. But a
  ``done`` is never dropped, because clients wait for it; steps of unknown kinds inside it are left out.
- ``from_wire`` reads what any producer of any age sends and never raises: a wrong value is an empty one.
- ``to_wire(from_wire(to_wire(e))) == to_wire(e)`` for every event. So whatever reading would lose (negative
  positions, a diagnosis with nothing but an unknown severity) is not written in the first place.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta, timezone

from google.protobuf.timestamp_pb2 import Timestamp

from dualclaw import names
from dualclaw.diagnosis import diagnosis_from_dict, diagnosis_to_dict, has_content
from dualclaw.json_text import clean_text, lenient_args, parse_args
from dualclaw.v1.event_pb2 import (
    Delta,
    Done,
    EngineEvent,
    Error,
    Interrupt,
    InterruptItem,
    InterruptKind,
    Node,
    Phase,
    Reasoning,
    Rewind,
    Step,
    StepEvent,
    StepKind,
)

INT32_MAX = 2**31 - 1
_MAX_ID_BITS = 13_000
_RFC3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]+))?(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_wire(event: EngineEvent) -> dict[str, object] | None:
    """Return the wire dict of an event, keys in wire order; None when it has no wire form.

    It has none when its payload, or the kind of its step, is unset or newer than this code.
    """
    wire: dict[str, object] | None
    # The order of the branches is the order of frequency: nearly every event of a stream is a delta.
    match event.WhichOneof("payload"):
        case "delta":
            wire = {"type": "delta", "content": event.delta.content}
        case "reasoning":
            wire = {"type": "reasoning", "content": event.reasoning.content}
        case "step":
            wire = _step_event_to_wire(event.step)
        case "done":
            wire = _done_to_wire(event.done)
        case "error":
            wire = {"type": "error", "message": event.error.message}
            if event.error.HasField("diagnosis") and has_content(event.error.diagnosis):
                wire["diagnosis"] = diagnosis_to_dict(event.error.diagnosis)
        case "interrupt":
            wire = {"type": "interrupt", "items": [_item_to_wire(item) for item in event.interrupt.items]}
        case "rewind":
            wire = _rewind_to_wire(event.rewind)
        case _:
            return None
    if wire is None:
        return None
    if (seq := event.seq) > 0:
        wire["seq"] = seq
    if trace_id := event.trace_id:
        wire["trace_id"] = trace_id
    if tenant_id := event.tenant_id:
        wire["tenant_id"] = tenant_id
    if claw := event.claw:
        wire["claw"] = claw
    if run_id := event.run_id:
        wire["run_id"] = run_id
    return wire


def step_to_wire(step: Step) -> dict[str, object] | None:
    """Return the wire object of a step; None when its kind is unspecified or unknown."""
    kind = names.KIND_NAMES.get(step.kind)
    if kind is None:
        return None
    wire: dict[str, object]
    if kind == "thinking":
        wire = {"type": kind, "text": step.text}
    elif kind == "mcp":
        args = parse_args(step.args_json)
        wire = {"type": kind, "server": step.server, "name": step.name, "args": args, "result": step.result}
    else:
        wire = {"type": kind, "name": step.name, "args": parse_args(step.args_json), "result": step.result}
    if step.HasField("diagnosis") and has_content(step.diagnosis):
        wire["diagnosis"] = diagnosis_to_dict(step.diagnosis)
    if phase := names.PHASE_NAMES.get(step.phase):
        wire["phase"] = phase
    if step.HasField("node"):
        node = step.node
        if node.id or node.type or node.label:
            wire["node"] = {"id": node.id, "type": node.type, "label": node.label}
    return wire


def _step_event_to_wire(event: StepEvent) -> dict[str, object] | None:
    step = step_to_wire(event.step)
    if step is None:
        return None
    wire: dict[str, object] = {"type": "step", "step": step}
    if event.HasField("index") and event.index >= 0:
        wire["index"] = event.index
    return wire


def _done_to_wire(done: Done) -> dict[str, object]:
    return {
        "type": "done",
        "message_id": done.message_id,
        "conversation_id": done.conversation_id,
        "content": done.content,
        "process_steps": [wire for step in done.process_steps if (wire := step_to_wire(step)) is not None],
        "used_skills": list(done.used_skills),
        "used_mcp": list(done.used_mcp),
        "generating": done.generating,
    }


def _item_to_wire(item: InterruptItem) -> dict[str, object]:
    wire: dict[str, object] = {"id": item.id, "kind": names.INTERRUPT_KIND_NAMES.get(item.kind, "")}
    later: dict[str, object] = {
        "tool_name": item.tool_name,
        "args": parse_args(item.args_json),
        "prompt": item.prompt,
        "allowed_actions": [names.ACTION_NAMES[a] for a in item.allowed_actions if a in names.ACTION_NAMES],
        "response_schema": parse_args(item.response_schema_json),
        "path": list(item.path),
        "args_hash": item.args_hash,
        "expire_time": _time_text(item.expire_time) if item.HasField("expire_time") else "",
    }
    wire.update((key, value) for key, value in later.items() if value)
    return wire


def _rewind_to_wire(rewind: Rewind) -> dict[str, object]:
    wire: dict[str, object] = {"type": "rewind", "content": rewind.content}
    if rewind.reasoning:
        wire["reasoning"] = rewind.reasoning
    if rewind.reason:
        wire["reason"] = rewind.reason
    if rewind.attempt > 0:
        wire["attempt"] = rewind.attempt
    return wire


def from_wire(payload: object) -> EngineEvent | None:
    """Return the event that a payload stands for; never raises.

    An EngineEvent passes unchanged. Of a dict, integer ids become decimal strings, values of a wrong type
    empty, wrong elements of a list are dropped, numbers out of range unset, unknown keys ignored. None: not
    a dict, no known ``type``, or a step of no known kind.
    """
    if isinstance(payload, EngineEvent):
        return payload
    if not isinstance(payload, dict):
        return None
    read = _READERS.get(_text(payload.get("type")))
    event = read(payload) if read is not None else None
    if event is None:
        return None
    event.seq = _number(payload.get("seq")) or 0
    event.trace_id = _identity(payload.get("trace_id"))
    event.tenant_id = _identity(payload.get("tenant_id"))
    event.claw = _text(payload.get("claw"))
    event.run_id = _identity(payload.get("run_id"))
    return event


def step_from_wire(value: object) -> Step | None:
    """Return the step of a wire object; None when it is no object of a known kind."""
    if not isinstance(value, dict):
        return None
    kind = names.KINDS.get(_text(value.get("type")))
    if kind is None:
        return None
    step = Step(kind=kind)
    if kind == StepKind.STEP_KIND_THINKING:
        step.text = _text(value.get("text"))
    else:
        step.name = _text(value.get("name"))
        step.args_json = lenient_args(value.get("args"))
        step.result = _text(value.get("result"))
        if kind == StepKind.STEP_KIND_MCP:
            step.server = _text(value.get("server"))
    step.phase = names.PHASES.get(_text(value.get("phase")), Phase.PHASE_UNSPECIFIED)
    if isinstance(found := value.get("diagnosis"), dict):
        diagnosis = diagnosis_from_dict(found)
        if has_content(diagnosis):
            step.diagnosis.CopyFrom(diagnosis)
    if isinstance(found := value.get("node"), dict):
        node = Node(id=_identity(found.get("id")), type=_text(found.get("type")), label=_text(found.get("label")))
        if node.id or node.type or node.label:
            step.node.CopyFrom(node)
    return step


def time_from_text(text: str) -> Timestamp | None:
    """Return the Timestamp of an RFC 3339 text; None when it is none or lies outside the years 1 to 9999."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        return None
    day, clock, fraction, sign, hours, minutes = match.groups()
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC)
        if sign:
            offset = timedelta(hours=int(hours), minutes=int(minutes))
            zone = timezone(offset if sign == "+" else -offset)
            moment = moment.replace(tzinfo=zone).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    return Timestamp(seconds=seconds, nanos=int((fraction or "")[:9].ljust(9, "0")))


def _time_text(moment: Timestamp) -> str:
    try:
        return moment.ToJsonString()
    except ValueError:
        return ""


def _step_event(payload: Mapping[str, object]) -> EngineEvent | None:
    step = step_from_wire(payload.get("step"))
    if step is None:
        return None
    return EngineEvent(step=StepEvent(step=step, index=_number(payload.get("index"))))


def _done(payload: Mapping[str, object]) -> EngineEvent:
    steps = [step for value in _list(payload.get("process_steps")) if (step := step_from_wire(value)) is not None]
    done = Done(
        message_id=_identity(payload.get("message_id")),
        conversation_id=_identity(payload.get("conversation_id")),
        content=_text(payload.get("content")),
        process_steps=steps,
        used_skills=_texts(payload.get("used_skills")),
        used_mcp=_texts(payload.get("used_mcp")),
        generating=payload.get("generating") is True,
    )
    return EngineEvent(done=done)


def _error(payload: Mapping[str, object]) -> EngineEvent:
    error = Error(message=_text(payload.get("message")))
    if isinstance(found := payload.get("diagnosis"), dict):
        diagnosis = diagnosis_from_dict(found)
        if has_content(diagnosis):
            error.diagnosis.CopyFrom(diagnosis)
    return EngineEvent(error=error)


def _item(value: Mapping[str, object]) -> InterruptItem:
    expire = value.get("expire_time")
    return InterruptItem(
        id=_identity(value.get("id")),
        kind=names.INTERRUPT_KINDS.get(_text(value.get("kind")), InterruptKind.INTERRUPT_KIND_UNSPECIFIED),
        tool_name=_text(value.get("tool_name")),
        args_json=lenient_args(value.get("args")),
        prompt=_text(value.get("prompt")),
        allowed_actions=[names.ACTIONS[a] for a in _texts(value.get("allowed_actions")) if a in names.ACTIONS],
        response_schema_json=lenient_args(value.get("response_schema")),
        path=_texts(value.get("path")),
        args_hash=_text(value.get("args_hash")),
        expire_time=time_from_text(expire) if isinstance(expire, str) else None,
    )


def _interrupt(payload: Mapping[str, object]) -> EngineEvent:
    items = [_item(value) for value in _list(payload.get("items")) if isinstance(value, dict)]
    return EngineEvent(interrupt=Interrupt(items=items))


def _rewind(payload: Mapping[str, object]) -> EngineEvent:
    rewind = Rewind(
        content=_text(payload.get("content")),
        reasoning=_text(payload.get("reasoning")),
        reason=_text(payload.get("reason")),
        attempt=_number(payload.get("attempt")) or 0,
    )
    return EngineEvent(rewind=rewind)


_READERS: Mapping[str, Callable[[Mapping[str, object]], EngineEvent | None]] = {
    "delta": lambda payload: EngineEvent(delta=Delta(content=_text(payload.get("content")))),
    "reasoning": lambda payload: EngineEvent(reasoning=Reasoning(content=_text(payload.get("content")))),
    "step": _step_event,
    "done": _done,
    "error": _error,
    "interrupt": _interrupt,
    "rewind": _rewind,
}


def _text(value: object) -> str:
    return clean_text(value) if isinstance(value, str) else ""


def _identity(value: object) -> str:
    """An id; integers are what older producers used. One too long to print is no id."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < _MAX_ID_BITS:
        return int.__repr__(value)
    return _text(value)


def _number(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32_MAX:
        return value
    return None


def _list(value: object) -> Iterable[object]:
    return value if isinstance(value, list | tuple) else ()


def _texts(value: object) -> list[str]:
    return [clean_text(element) for element in _list(value) if isinstance(element, str)]
