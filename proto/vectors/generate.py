"""Writes the golden vectors; with --check, fails when what is committed differs.

The events are those of ``cases.py``. Wire text, frame and text are computed here by the plainest writing of
the contract's tables, from the protobuf JSON and never through the package that the vectors test; protobuf
itself is asked for the binary only. Run it as ``python proto/vectors/generate.py [--check]``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import cases
import inputs
from google.protobuf import json_format

from dualclaw import EngineEvent

FOLDER = Path(__file__).resolve().parent
Json = dict[str, Any]


def wire_of(event: Json, args: Json | None) -> Json | None:
    """The wire dict of an event in protobuf JSON; ``args`` are those of its step when they are hand-written."""
    wire: Json
    if "delta" in event:
        wire = {"type": "delta", "content": event["delta"].get("content", "")}
    elif "reasoning" in event:
        wire = {"type": "reasoning", "content": event["reasoning"].get("content", "")}
    elif "step" in event:
        step = step_of(event["step"].get("step", {}), args)
        if step is None:
            return None
        wire = {"type": "step", "step": step}
        if event["step"].get("index", -1) >= 0:
            wire["index"] = event["step"]["index"]
    elif "done" in event:
        done = event["done"]
        wire = {
            "type": "done",
            "message_id": done.get("message_id", ""),
            "conversation_id": done.get("conversation_id", ""),
            "content": done.get("content", ""),
            "process_steps": [s for s in (step_of(p, None) for p in done.get("process_steps", [])) if s],
            "used_skills": done.get("used_skills", []),
            "used_mcp": done.get("used_mcp", []),
            "generating": done.get("generating", False),
        }
    elif "error" in event:
        wire = {"type": "error", "message": event["error"].get("message", "")}
        if any((found := diagnosis_of(event["error"].get("diagnosis", {}))).values()):
            wire["diagnosis"] = found
    elif "interrupt" in event:
        wire = {"type": "interrupt", "items": [item_of(item) for item in event["interrupt"].get("items", [])]}
    elif "rewind" in event:
        wire = {"type": "rewind", "content": event["rewind"].get("content", "")}
        wire |= {key: event["rewind"][key] for key in ("reasoning", "reason") if event["rewind"].get(key)}
        if event["rewind"].get("attempt", 0) > 0:
            wire["attempt"] = event["rewind"]["attempt"]
    else:
        return None
    if event.get("seq", 0) > 0:
        wire["seq"] = event["seq"]
    return wire | {key: event[key] for key in ("trace_id", "tenant_id", "claw", "run_id") if event.get(key)}


def name_of(value: object, prefix: str) -> str:
    """The lower-case name of an enum value; "" for an unspecified one and for a bare number, which is unknown."""
    name = value.removeprefix(prefix).lower() if isinstance(value, str) else ""
    return "" if name == "unspecified" else name


def step_of(step: Json, args: Json | None) -> Json | None:
    """The wire object of a step."""
    kind = name_of(step.get("kind"), "STEP_KIND_")
    if not kind:
        return None
    if kind == "thinking":
        wire = {"type": "thinking", "text": step.get("text", "")}
    else:
        wire = {"type": kind}
        if kind == "mcp":
            wire["server"] = step.get("server", "")
        wire["name"] = step.get("name", "")
        wire["args"] = json.loads(step.get("args_json") or "{}") if args is None else args
        wire["result"] = step.get("result", "")
    if any((found := diagnosis_of(step.get("diagnosis", {}))).values()):
        wire["diagnosis"] = found
    if phase := name_of(step.get("phase"), "PHASE_"):
        wire["phase"] = phase
    node = {key: step.get("node", {}).get(key, "") for key in ("id", "type", "label")}
    return wire | ({"node": node} if any(node.values()) else {})


def diagnosis_of(diagnosis: Json) -> Json:
    """The wire object of a diagnosis."""
    return {
        "code": diagnosis.get("code", ""),
        "severity": name_of(diagnosis.get("severity"), "SEVERITY_"),
        "summary": diagnosis.get("summary", ""),
        "detail": diagnosis.get("detail", ""),
        "hint": diagnosis.get("hint", ""),
        "retryable": diagnosis.get("retryable", False),
    }


def item_of(item: Json) -> Json:
    """The wire object of one question."""
    actions = [name_of(action, "DECISION_ACTION_") for action in item.get("allowed_actions", [])]
    later = {
        "tool_name": item.get("tool_name"),
        "args": json.loads(item.get("args_json") or "{}"),
        "prompt": item.get("prompt"),
        "allowed_actions": [action for action in actions if action],
        "response_schema": json.loads(item.get("response_schema_json") or "{}"),
        "path": item.get("path"),
        "args_hash": item.get("args_hash"),
        "expire_time": item.get("expire_time"),
    }
    wire = {"id": item.get("id", ""), "kind": name_of(item.get("kind"), "INTERRUPT_KIND_")}
    return wire | {key: value for key, value in later.items() if value}


def frame_of(wire: Json | None) -> str | None:
    """The frame of the original route; it carries the five original types, thinned."""
    if wire is None or wire["type"] in ("interrupt", "rewind"):
        return None
    dropped = {"seq", "tenant_id", "claw", "run_id"}
    if wire["type"] not in ("done", "error"):
        dropped.add("trace_id")
    return "data: " + json.dumps({k: v for k, v in wire.items() if k not in dropped}, ensure_ascii=False) + "\n\n"


def text_of(event: Json) -> str:
    """What a channel without structure shows."""
    for kind in ("delta", "reasoning", "rewind", "done"):
        if kind in event:
            return str(event[kind].get("content", ""))
    if "step" in event:
        found = diagnosis_of(event["step"].get("step", {}).get("diagnosis", {}))
        return finding_of(found) if found["severity"] in ("warning", "error") else ""
    if "error" in event:
        found = diagnosis_of(event["error"].get("diagnosis", {}))
        return finding_of(found) if any(found.values()) else ("❌ " + event["error"].get("message", "")).rstrip()
    if "interrupt" in event:
        lines = (
            item.get("prompt", "").replace("\n", " ") or item.get("tool_name", "") or item.get("id", "")
            for item in event["interrupt"].get("items", [])
        )
        return "\n".join(lines)
    return ""


def finding_of(diagnosis: Json) -> str:
    """The text of a diagnosis."""
    icon = {"warning": "⚠️", "error": "❌"}.get(diagnosis["severity"], "ℹ️")
    lines = [f"{icon} {diagnosis['summary'].replace(chr(10), ' ') or diagnosis['code']}".rstrip()]
    lines += [diagnosis["detail"]] if diagnosis["detail"] else []
    lines += [f"建议：{diagnosis['hint']}"] if diagnosis["hint"] else []
    return "\n".join(lines)


def vector(file: str, name: str, event: Json) -> Json:
    """One golden vector."""
    args = json.loads(cases.ODD_ARGS[name][1]) if file == "args_not_canonical" else None
    wire = wire_of(event, args)
    message = json_format.ParseDict(event, EngineEvent())
    return {
        "name": f"{file}_{name}",
        "event": event,
        "binary": message.SerializeToString(deterministic=True).hex(),
        "wire": None if wire is None else json.dumps(wire, ensure_ascii=False),
        "frame": frame_of(wire),
        "to_text": text_of(event),
    }


def files() -> dict[str, str]:
    """The text of every file by its path. ASCII only, so that no editor or diff can hide or change a character."""
    tables: dict[str, list[Json]] = {
        file: [vector(file, name, event) for name, event in events.items()] for file, events in cases.EVENTS.items()
    }
    tables["inputs/from_wire"] = [
        {"name": name, "input": text, "wire": wire} for name, (text, wire) in inputs.FROM_WIRE.items()
    ]
    tables["inputs/from_binary"] = [
        {"name": name, "binary": text, "wire": wire} for name, (text, wire) in inputs.FROM_BINARY.items()
    ]
    return {f"{file}.json": json.dumps(rows, indent=1) + "\n" for file, rows in tables.items()}


def main() -> None:
    """Entry point."""
    wanted = files()
    if sys.argv[1:] == ["--check"]:
        found = {path.relative_to(FOLDER).as_posix(): path.read_text() for path in FOLDER.rglob("*.json")}
        stale = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if stale:
            sys.exit("golden vectors are stale, run `python proto/vectors/generate.py`: " + ", ".join(stale))
        return
    if sys.argv[1:]:
        sys.exit("usage: python proto/vectors/generate.py [--check]")
    for path in FOLDER.rglob("*.json"):
        path.unlink()
    (FOLDER / "inputs").mkdir(exist_ok=True)
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
