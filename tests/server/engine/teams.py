"""Short ways for tests with several agents: scripts of their own, answers to questions, what is saved and seen."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing

from dualclaw import Decision, DecisionAction, EngineEvent, Phase, ResumeRequest, RunResponse, Step, StepKind
from dualclaw.rules import check_stream
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.checkpoint import Checkpoint
from dualclaw_server.engine.store import RunKey, RunStore

from .conftest import CALLER, TIMEOUT, TRACE, Asked, Engine, echo, scripted, turn

NEVER: dict[str, object] = {"say": [{"fail": "MODEL_AUTH", "message": "nobody should ask the engine's own model"}]}


ASK_B: dict[str, object] = {"call": "b", "id": "B", "args": {"request": "find x"}}
SAY_RESULT = turn(1, {"text": "b says: {{result}}"})


def echo_call(text: str, call_id: str = "e") -> dict[str, object]:
    """Return a call of echo."""
    return {"call": "echo", "id": call_id, "args": {"text": text}}


def pair(*inner: dict[str, object], parent: dict[str, object] | None = None, **fields: object) -> Agent:
    """Return an agent ``a`` that asks its sub-agent ``b`` and says what it said; ``fields`` are b's."""
    fields = {"tools": [echo], "models": [scripted(*inner, name="inner")], **fields}
    b = Agent("b", **fields)  # type: ignore[arg-type]
    outer = scripted(turn(0, ASK_B), SAY_RESULT, name="outer")
    return Agent("a", models=[outer], sub_agents=[b], **(parent or {}))  # type: ignore[arg-type]


async def resume(engine: Engine, asked: Asked, **answers: str) -> Asked:
    """Answer questions by their ids ("approve", "reject", "skip", else the text of a response); read on to the end."""
    decisions = []
    for interrupt_id, answer in answers.items():
        decision = Decision(interrupt_id=interrupt_id, action=DecisionAction.DECISION_ACTION_RESPOND)
        if answer in ("approve", "reject", "skip"):
            decision.action = DecisionAction.Value(f"DECISION_ACTION_{answer.upper()}")
        else:
            decision.response_json = json.dumps(answer)
        decisions.append(decision)
    request = ResumeRequest(run_id=asked.key.run_id, decisions=decisions)
    await engine.runner.resume(CALLER, request, TRACE)
    return await read_on(engine.store, asked)


async def read_on(store: RunStore, asked: Asked) -> Asked:
    """Read the whole log of a run again, to the first end of a segment after what was read before."""
    again, before = Asked(asked.key, asked.conversation_id), len(asked.events)
    async with asyncio.timeout(TIMEOUT), aclosing(store.follow(asked.key, 0)) as batches:
        async for frames in batches:
            for frame in frames:
                again.events += RunResponse.FromString(frame.body).events
                if frame.ends_segment and len(again.events) > before:
                    assert check_stream(again.events) == []
                    return again
    raise AssertionError("the stream ended without a terminal event")


async def checkpoint_of(store: RunStore, key: RunKey) -> Checkpoint:
    """Return what is saved of a run."""
    return Checkpoint.FromString((await store.load(key)).checkpoint)


def ended(name: str) -> Callable[[Sequence[EngineEvent]], bool]:
    """Return a condition on events: a step of this name has ended."""
    return lambda events: any(
        e.step.step.name == name and e.step.step.phase in (Phase.PHASE_OK, Phase.PHASE_FAIL) for e in events
    )


def begun(name: str) -> Callable[[Sequence[EngineEvent]], bool]:
    """Return a condition on events: a step of this name has begun."""
    return lambda events: any(e.step.step.name == name for e in events)


def step_named(asked: Asked, name: str) -> Step:
    """Return the one step of this name as it is in the end."""
    found = [step for step in asked.view.process_steps if step.name == name]
    assert len(found) == 1, [step.name for step in asked.view.process_steps]
    return found[0]


def thoughts(asked: Asked) -> list[str]:
    """Return the texts of the thinking steps."""
    return [step.text for step in asked.view.process_steps if step.kind == StepKind.STEP_KIND_THINKING]
