"""What must hold after a run that lived through crashes, whatever died where."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dualclaw import EngineEvent, ListMessagesRequest, Phase, Role, RunRequest, RunState, Step, StepKind, StopReason
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient
from dualclaw_server.engine.tool import Effect as EffectName

from .failing_parts import ASKING, GATED_ITEM, ITEMS, LOOKING, SAYING, TALK
from .ledger import Effect
from .scenarios import Told
from .watching import collect

UNKNOWN = "tool.outcome_unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a run, for the table."""

    effects: str
    rewinds: int
    outcome: str


async def judge(
    client: EngineClient, told: Told, kind: EffectName, effects: Sequence[Effect], *, takeovers: int, doubt: bool
) -> Verdict:
    """Hold a run against every promise; returns what came of it.

    Args:
        client: of a server that lives.
        told: what its clients did and saw.
        kind: effect class of its tools.
        effects: what its tools did in the world.
        takeovers: how often it was taken from a server, by death or by an operator.
        doubt: True when a tool may have been at work at that moment.
    """
    run_id = told.run_id
    log = await collect(client.attach(run_id))
    assert check_stream(log) == []  # R1 to R9
    assert [*told.first, *told.second] == log  # R10, as the starter saw it: over re-attaching
    for seen in told.watched:
        assert [event.seq for event in seen] == list(range(1, len(log) + 1))
        assert list(seen) == log
    for after in {1, len(log) // 2, len(log) - 1}:
        assert await collect(client.attach(run_id, after_seq=after)) == log[after:]
    assert await collect(client.run(told.request)) == told.first  # R12
    if told.resume is not None:
        assert await collect(client.resume(told.resume)) == told.second
    run = await client.get_run(run_id)
    assert run.last_seq == len(log)
    assert [each.id for each in (await client.list_runs()).runs] == [run_id]
    kinds = [event.WhichOneof("payload") for event in log]
    assert kinds.count("rewind") <= takeovers
    steps = tool_steps(log)
    await _check_messages(client, log, steps)
    _check_effects(kind, steps, effects, takeovers=takeovers, doubt=doubt)
    return Verdict(_shown(effects), kinds.count("rewind"), _outcome(run.state, steps))


def check_end(log: Sequence[EngineEvent], state: RunState.ValueType, scenario: str, request: RunRequest) -> None:
    """Hold the segments' ends and texts against what was played, to the letter: nothing is said twice."""
    done = [event.done for event in log if event.WhichOneof("payload") == "done"]
    finished, cancelled = StopReason.STOP_REASON_FINISHED, StopReason.STOP_REASON_CANCELLED
    parked = StopReason.STOP_REASON_INTERRUPTED
    reasons, texts = {
        "work": ([parked, finished], [f"{LOOKING}\n\n{ASKING}", SAYING]),
        "cancel": ([cancelled], [TALK]),
        "cancel_parked": ([parked, cancelled], [f"{LOOKING}\n\n{ASKING}", ""]),
        "drain": ([finished], [TALK]),
        "release": ([finished], [TALK]),
        "calls": ([finished], [f"You said {request.message.parts[0].text}"]),
    }[scenario]
    assert [each.stop_reason for each in done] == reasons
    said = [each.content for each in done]
    if scenario == "cancel":  # as far as it had come
        assert TALK.startswith(said[0])
    else:
        assert said == texts
    ended = RunState.RUN_STATE_CANCELLED if cancelled in reasons else RunState.RUN_STATE_SUCCEEDED
    assert state == ended


def check_file(path: Path) -> None:
    """Hold a SQLite file against its own rules, if there is one."""
    if path.exists():
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def tool_steps(log: Sequence[EngineEvent]) -> dict[str, Step]:
    """Return the steps of tools by the item they were about, as the run's end has them."""
    steps = [step for step in log[-1].done.process_steps if step.kind == StepKind.STEP_KIND_SKILL]
    found = {str(json.loads(step.args_json)["item"]): step for step in steps}
    assert len(found) == len(steps)
    return found


async def _check_messages(client: EngineClient, log: Sequence[EngineEvent], steps: dict[str, Step]) -> None:
    """The conversation is well-formed: each answer once, each call with exactly one result, in call order."""
    asked = ListMessagesRequest(conversation_id=log[-1].done.conversation_id, page_size=100)
    messages = (await client.list_messages(asked)).messages
    user, agent, tool = Role.ROLE_USER, Role.ROLE_ASSISTANT, Role.ROLE_TOOL
    shapes = {0: [user, agent], 3: [user, agent, tool, tool, agent, tool, agent]}
    assert [message.role for message in messages] == shapes[len(steps)]
    assert len({message.id for message in messages}) == len(messages)
    parts = [part for message in messages for part in message.parts]
    calls = [part.tool_call.id for part in parts if part.WhichOneof("part") == "tool_call"]
    results = [part.tool_result.call_id for part in parts if part.WhichOneof("part") == "tool_result"]
    assert results == calls
    assert len(set(calls)) == len(steps)
    segments = [event.done.content for event in log if event.WhichOneof("payload") == "done"]
    said = [part.text for message in messages if message.role == agent for part in message.parts if part.text]
    assert all(text in "\n".join(segments) or text == said[-1] for text in said)


def _check_effects(
    kind: EffectName, steps: dict[str, Step], effects: Sequence[Effect], *, takeovers: int, doubt: bool
) -> None:
    """What the effect class promises, item by item; where nothing is in doubt, everything was done exactly once."""
    assert set(steps) in ({*ITEMS, GATED_ITEM}, set())
    for item, step in steps.items():
        done = [effect for effect in effects if effect.item == item]
        ok, code = step.phase == Phase.PHASE_OK, step.diagnosis.code
        assert len({effect.key for effect in done}) <= 1, f"{item}: another key at another attempt"
        if code == "tool.skipped":  # cancelled before it began
            assert done == []
            continue
        if not doubt:
            assert ok, f"{item}: {code}, though no tool was at work when the server died"
            assert len(done) == 1, f"{item}: done {len(done)} times, though nothing was in doubt"
        match kind:
            case "read" | "idempotent":
                assert ok
                assert 1 <= len(done) <= 1 + takeovers
            case "reconcile":
                assert ok
                assert len(done) == 1
            case "once":
                assert len(done) <= 1
                assert ok == (code != UNKNOWN)
                assert not ok or len(done) == 1


def _shown(effects: Sequence[Effect]) -> str:
    counts = [(item, sum(effect.item == item for effect in effects)) for item in (*ITEMS, GATED_ITEM)]
    return " ".join(f"{item}x{count}" for item, count in counts if effects)


def _outcome(state: RunState.ValueType, steps: dict[str, Step]) -> str:
    unknown = [item for item, step in steps.items() if step.diagnosis.code == UNKNOWN]
    name = RunState.Name(state).removeprefix("RUN_STATE_").lower()
    return f"{name}, outcome of {', '.join(unknown)} unknown" if unknown else name
