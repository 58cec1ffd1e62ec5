"""The examples can be served as their first lines say, with the scripts beside them, and do what they show."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dualclaw import (
    ContentPart,
    Decision,
    DecisionAction,
    EngineEvent,
    Message,
    ResumeRequest,
    Role,
    RunRequest,
)
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient

from .conftest import ROOT, Launcher

EXAMPLES = {
    "supervisor": (
        "What happens in a crash?",
        ["researcher", "search_documents", "writer", "read_findings"],
        "as soon as it starts again",
    ),
    "plan_execute": (
        "Which is larger, 17 * 23 or 40 * 9?",
        ["execute_step", "calculate", "execute_step", "calculate", "execute_step", "calculate"],
        "17 * 23 is larger than 40 * 9, by 31.",
    ),
    "own_strategy": ("effect classes", ["search_documents"], "It is in tools.md."),
}


async def ask(client: EngineClient, text: str) -> list[EngineEvent]:
    message = Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])
    async with asyncio.timeout(100), client.run(RunRequest(message=message), timeout=100) as stream:
        return [event async for event in stream]


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_is_served_as_it_says(
    name: str, launch: Launcher, connect: Callable[[str], EngineClient]
) -> None:
    """The engine loads it by its reference, and a question goes the way it is to show; the stream keeps its rules."""
    question, steps, answer = EXAMPLES[name]
    reference, script = f"examples.{name}:AGENTS", f"scripted:examples/{name}.json"
    text = (ROOT / "examples" / f"{name}.py").read_text("utf-8")
    assert f"DUALCLAW_AGENTS={reference} DUALCLAW_MODEL={script} dualclaw-server" in text
    engine = launch(
        "dualclaw_server",
        DUALCLAW_LISTEN="127.0.0.1:0",
        DUALCLAW_STORE="memory:",
        DUALCLAW_AGENTS=reference,
        DUALCLAW_MODEL=script.replace("examples/", f"{ROOT}/examples/"),
        PYTHONPATH=str(ROOT),
    )
    events = await ask(connect(engine.address), question)
    assert check_stream(events) == []
    done = events[-1].done
    assert answer in done.content
    assert [step.name for step in done.process_steps if step.name] == steps
    assert [step.diagnosis.code for step in done.process_steps if step.HasField("diagnosis")] == []


async def test_the_assistant_notes_only_what_a_person_has_approved(
    launch: Launcher, connect: Callable[[str], EngineClient], tmp_path: Path
) -> None:
    """The agent of `make run` waits before it writes, writes the edited note, and takes a message as an answer."""
    engine = launch(
        "dualclaw_server",
        DUALCLAW_LISTEN="127.0.0.1:0",
        DUALCLAW_STORE="memory:",
        DUALCLAW_AGENTS="assistant:AGENT",
        PYTHONPATH=str(ROOT / "examples"),
    )
    client, notes = connect(engine.address), tmp_path / "var/notes.txt"
    asked = await ask(client, "Note: buy milk")
    (item,) = asked[-2].interrupt.items
    assert (item.tool_name, item.args_json) == ("note_down", '{"text": "buy milk"}')
    assert not notes.exists()
    edit = Decision(
        interrupt_id=item.id, action=DecisionAction.DECISION_ACTION_EDIT, args_json='{"text": "buy oat milk"}'
    )
    async with client.resume(ResumeRequest(run_id=asked[-1].run_id, decisions=[edit])) as stream:
        events = [event async for event in stream]
    assert check_stream([*asked, *events]) == []
    assert notes.read_text("utf-8") == "buy oat milk\n"
    asked = await ask(client, "Ask me")
    message = Message(role=Role.ROLE_USER, parts=[ContentPart(text="Alice")])
    request = RunRequest(conversation_id=asked[-1].done.conversation_id, message=message)
    async with client.run(request) as stream:
        events = [event async for event in stream]
    assert "Alice" in events[-1].done.content
    assert check_stream([*asked, *events]) == []
