"""Claws carry events and decide nothing: no second way to write the wire format may grow anywhere.

The web claw serialises events only through the encoders of ``adapters`` (original route: SseAdapter, native:
NativeSseAdapter), the IM claw only through BufferAdapter; nobody else writes frames or makes events' dicts.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "clients/dualclaw_clients"
SERVER = ROOT / "server/dualclaw_server"
ADAPTERS = CLIENTS / "adapters"

# Who may turn an event into its dict or frame: the adapters, the command line's --json, and the conformance kit, which
# compares frames of others with it.
WRITERS = {"to_wire": {CLIENTS / "cli_render.py", CLIENTS / "cli.py", CLIENTS / "conformance"}}
ENCODERS = {
    "SseAdapter": {CLIENTS / "web/original.py"},
    "NativeSseAdapter": {CLIENTS / "web/native.py"},
    "BufferAdapter": {CLIENTS / "im"},
    "original_frame": set(),
    "native_frame": set(),
}
# Payload messages of EngineEvent; claws that build them by hand would bypass the factories.
PAYLOADS = {"Delta", "Reasoning", "StepEvent", "Done", "Error", "Interrupt", "Rewind", "EngineEvent"}
MAKERS = {SERVER / "engine/frames.py"}


# Formats of others that look like ours, and why.
FOREIGN_FORMATS = {
    "clients/dualclaw_clients/conformance/": "reads frames of the gateways it checks",
    "server/dualclaw_server/models/": "reads SSE of vendors; it names the field, and writes none",
    "server/dualclaw_server/record.py": "reads SSE of vendors, to record it",
    "server/dualclaw_server/interceptors/genai.py": "messages in spans, as OpenTelemetry's conventions want them",
}


def sources(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text("utf-8"))


def imported(tree: ast.Module) -> set[str]:
    """Names a module imports from elsewhere."""
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def texts(tree: ast.Module) -> set[str]:
    """String and bytes literals of a module, docstrings left out."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docs:
            value = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            if isinstance(value, str):
                found.add(value)
    return found


def inside(path: Path, places: set[Path]) -> bool:
    return any(path == place or place in path.parents for place in places)


def test_dual_claw_wiring_source_guard() -> None:
    """Each encoder is imported where it belongs and nowhere else; to_wire only by the adapters and --json."""
    wrong = []
    for folder in (CLIENTS, SERVER):
        for path, tree in sources(folder):
            if ADAPTERS in path.parents:
                continue
            for name, places in {**ENCODERS, **WRITERS}.items():
                if name in imported(tree) and not inside(path, places):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_each_route_uses_its_encoder() -> None:
    """Original route: SseAdapter; native route: NativeSseAdapter; IM: BufferAdapter."""
    used = {path: imported(tree) for path, tree in sources(CLIENTS)}
    assert "SseAdapter" in used[CLIENTS / "web/original.py"]
    assert "NativeSseAdapter" in used[CLIENTS / "web/native.py"]
    assert any("BufferAdapter" in names for path, names in used.items() if CLIENTS / "im" in path.parents)


def test_nobody_else_writes_frames() -> None:
    """The bytes of an SSE data line and the wire names of events occur in the adapters and the contract only."""
    kinds = {"delta", "reasoning", "rewind", "interrupt"}
    wrong = []
    for folder in (CLIENTS, SERVER):
        for path, tree in sources(folder):
            if ADAPTERS in path.parents:
                continue
            name = path.relative_to(ROOT)
            wrong += [
                f"{name} writes {text!r}" for text in texts(tree) if text.startswith("data:") or "\ndata:" in text
            ]
            wrong += [
                f"{name}:{node.lineno} builds an event's dict"
                for node in ast.walk(tree)
                if isinstance(node, ast.Dict) and _says_type(node, kinds)
            ]
    assert [line for line in wrong if not line.startswith(tuple(FOREIGN_FORMATS))] == []


def _says_type(node: ast.Dict, kinds: set[str]) -> bool:
    return any(
        isinstance(key, ast.Constant)
        and key.value == "type"
        and isinstance(value, ast.Constant)
        and value.value in kinds
        for key, value in zip(node.keys, node.values, strict=True)
    )


def test_events_are_made_by_the_factories() -> None:
    """Outside the contract only the frame writer builds payload messages: it turns waiting text into events."""
    wrong = []
    for folder in (CLIENTS, SERVER):
        for path, tree in sources(folder):
            payloads = PAYLOADS & imported(tree)  # a class of the module's own may have such a name
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in payloads:
                    bare = node.func.id == "EngineEvent" and not any(k.arg in _PAYLOAD_FIELDS for k in node.keywords)
                    if not bare and path not in MAKERS:
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} builds {node.func.id}")
    assert wrong == []


_PAYLOAD_FIELDS = {"delta", "reasoning", "step", "done", "error", "interrupt", "rewind"}


@pytest.mark.parametrize(
    "source",
    ["from dualclaw.events import to_wire", "from dualclaw_clients.adapters import SseAdapter"],
)
def test_the_guard_sees_a_second_way(source: str) -> None:
    """The guard itself fails on a module that does what it forbids."""
    names = imported(ast.parse(source))
    assert names & {"to_wire", "SseAdapter"}
    assert not inside(CLIENTS / "web/other.py", ENCODERS["SseAdapter"] | WRITERS["to_wire"])
