"""What readers nobody here wrote make of the streams: npm's EventSource, and a copy of an original front-end."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from dualclaw import InterruptItem, InterruptKind, Run, RunState
from dualclaw.errors import EngineError
from dualclaw.events import make_delta, make_done, make_error, make_interrupt, make_reasoning, make_rewind, make_step
from tests.toolchains import require

pytestmark = pytest.mark.timeout(400)

NODE = Path(__file__).parent / "node"
VECTORS = Path(__file__).resolve().parents[3] / "proto/vectors"


@pytest.fixture(scope="session")
def node() -> str:
    """Return node, with the packages of the folder installed from their lock file."""
    path, npm = require("node"), require("npm")
    if not (NODE / "node_modules" / ".package-lock.json").exists():
        subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=NODE, check=True, capture_output=True, timeout=300)
    return path


async def lines_of(node: str, *arguments: str, stdin: bytes = b"") -> list[object]:
    """Run a program of the folder to its end; returns the JSON of each line it printed."""
    process = await asyncio.create_subprocess_exec(
        node, *arguments, cwd=NODE,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return [json.loads(line) for line in out.decode().split("\n") if line]


def done(text: str, seq: int = 0, **more):
    return make_done(message_id="m", conversation_id="c", content=text, seq=seq, **more)


def run(state: str, last_seq: int) -> Run:
    return Run(id="r", state=RunState.Value(f"RUN_STATE_{state}"), last_seq=last_seq)


# ---- npm's EventSource on the native route


async def test_an_event_source_follows_a_run_over_lost_lines_to_its_204(node, relay, fake_engine):
    """Cut in the middle of frames and of characters, it sends its last id and gets every event once; 204 ends it."""
    text = "你好\u2028世界🍸\u0085x" * 10
    fake_engine.log += [make_delta(char, seq=seq, run_id="r") for seq, char in enumerate(text, 1)]
    fake_engine.log.append(done(text, seq=len(text) + 1, run_id="r"))
    fake_engine.runs["r"] = run("SUCCEEDED", len(text) + 1)
    relay.cut_after(1_501, 3_003)
    lines = await lines_of(node, "event_source.mjs", f"{relay.url}/v1/runs/r/events")
    assert lines.pop() == {"end": 204}
    events = [line for line in lines if "data" in line]
    assert [event["id"] for event in events] == [str(seq) for seq in range(1, len(text) + 2)]
    assert "".join(event["data"]["content"] for event in events[:-1]) == text
    assert events[-1]["data"]["type"] == "done"
    # Two cuts, and the end of the response of a run that is over.
    assert lines.count({"lost": True}) == 3
    assert len({call.request.after_seq for call in fake_engine.calls_of("Attach")}) == 3


async def test_an_event_source_begins_after_a_position_and_stays_over_a_parked_phase(node, web, fake_engine):
    """``?after=`` stands in for the first id; the ids it has seen since then win when it comes back."""
    fake_engine.runs["r"] = run("INTERRUPTED", 3)
    item = InterruptItem(id="i", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="t")
    fake_engine.on("Attach", [make_interrupt([item], seq=2), done("a", seq=3)])

    async def decided() -> None:
        # The first attach has ended; the reader must come back with the id it has seen, and not with ?after=1.
        await fake_engine.wait_for_call("Attach", 2, timeout=90)
        fake_engine.runs["r"] = run("SUCCEEDED", 5)

    fake_engine.on("Attach", [make_delta("b", seq=4), done("b", seq=5)])
    deciding = asyncio.create_task(decided())
    lines = await lines_of(node, "event_source.mjs", f"{web.url}/v1/runs/r/events?after=1")
    await deciding
    assert [line["id"] for line in lines if "data" in line] == ["2", "3", "4", "5"]
    assert lines[-1] == {"end": 204}
    assert [call.request.after_seq for call in fake_engine.calls_of("Attach")] == [1, 3]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(EngineError("LOG_COMPACTED", "gone"), 410), (EngineError("AFTER_SEQ_OUT_OF_RANGE", "beyond"), 416)],
)
async def test_an_event_source_gives_up_on_a_position_that_cannot_be_served(node, web, fake_engine, refusal, status):
    """A compacted log must not look like a lost line, or it would ask for it for ever."""
    fake_engine.runs["r"] = run("SUCCEEDED", 9)
    fake_engine.on("Attach", [refusal])
    lines = await lines_of(node, "event_source.mjs", f"{web.url}/v1/runs/r/events?after=3")
    assert lines == [{"end": status}]
    assert len(fake_engine.calls_of("Attach")) == 1


# ---- the original front-end


def golden() -> list[dict[str, object]]:
    """Every vector that the original route carries."""
    found = []
    for path in sorted(VECTORS.glob("*.json")):
        found += [entry for entry in json.loads(path.read_text()) if entry["frame"] is not None]
    assert len(found) > 100
    return found


async def test_an_original_front_end_reads_every_golden_frame(node):
    """Each frame is one event of the five types it knows, and shows what its wire text says."""
    vectors = golden()
    (pages,) = await lines_of(node, "old_front_end.mjs", stdin=json.dumps([v["frame"] for v in vectors]).encode())
    for vector, shown in zip(vectors, pages, strict=True):
        wire = json.loads(vector["wire"])
        match wire["type"]:
            case "delta":
                wanted = {"text": wire["content"]}
            case "reasoning":
                wanted = {"reasoning": wire["content"]}
            case "step":
                wanted = {"done": False}
                names = [wire["step"].get("name", wire["step"].get("text"))]
                assert [step["name"] for step in shown["steps"]] == names, vector["name"]
            case "done":
                wanted = {"text": wire["content"], "conversation": wire["conversation_id"], "done": True}
                assert len(shown["steps"]) == len(wire["process_steps"]), vector["name"]
            case _:
                wanted = {"error": wire["message"], "done": True}
        assert wanted.items() <= shown.items(), vector["name"]


async def shown(node, web, content="hi") -> list[dict[str, object]]:
    """Ask a question and return what an original front-end shows after each frame."""
    lines = await lines_of(node, "old_front_end.mjs", f"{web.url}/messages/stream", json.dumps({"content": content}))
    assert lines.pop() == "over"
    return lines


async def test_an_original_front_end_never_sees_withdrawn_text_twice(node, web, fake_engine):
    """Text that is written again is not repeated; other text comes with done; reasoning goes its own way."""
    fake_engine.on(
        "Run",
        [make_reasoning("hm"), make_delta("Hello"), make_rewind("He", reasoning="hm"), make_delta("llo, you"),
         make_reasoning("m"), make_rewind("Bye"), make_delta(" now"), done("Bye now")],
    )  # fmt: skip
    states = await shown(node, web)
    assert [state["text"] for state in states] == ["", "Hello", "Hello, you", "Hello, you", "Bye now"]
    assert [state["reasoning"] for state in states] == ["hm", "hm", "hm", "hmm", "hmm"]


async def test_an_original_front_end_sees_a_waiting_step_and_what_is_asked(node, web, fake_engine):
    """No interrupt reaches it: the step says what waits and how to answer, while it runs and when all has been said."""
    waits = {"code": "approval.required", "severity": "warning", "summary": "May this be noted?", "hint": "Approve it."}
    step = make_step("skill", name="note", phase="start", index=0, diagnosis=waits)
    item = InterruptItem(id="i", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="note")
    end = done("One moment.", process_steps=[step.step.step], stop_reason="interrupted")
    fake_engine.on("Run", [make_delta("One moment."), step, make_interrupt([item]), end])
    states = await shown(node, web)
    assert [state["type"] for state in states] == ["delta", "step", "done"]
    told = {"name": "note", "running": True, "says": "May this be noted?", "hint": "Approve it."}
    assert [state["steps"] for state in states] == [[], [told], [told]]
    assert states[-1]["text"] == "One moment."


async def test_an_original_front_end_is_told_every_failure_in_the_stream(node, web, fake_engine):
    """A start that is refused, a run that fails after some text, a cancelled run: always one last frame."""
    fake_engine.on("Run", [EngineError("UNKNOWN_AGENT", "no agent x")])
    fake_engine.on("Run", [make_delta("It begins"), make_error("the model is away")])
    fake_engine.on("Run", [make_delta("So far"), done("So far", stop_reason="cancelled")])
    refused, failed, cancelled = [await shown(node, web) for _ in range(3)]
    assert [(state["type"], state["error"]) for state in refused] == [("error", "no agent x")]
    assert (failed[-1]["text"], failed[-1]["error"]) == ("It begins", "the model is away")
    assert failed[-1]["trace"] == cancelled[-1]["trace"] == fake_engine.trace_id
    assert (cancelled[-1]["type"], cancelled[-1]["text"], cancelled[-1]["error"]) == ("done", "So far", "")
