"""Every hook x everything that can happen in it x one interceptor or several: who else ran, and how the run came out.

One run passes every hook: an answer with a call, a tool that asks a model aside, a plan, a last answer; and an attempt
at the first answer that fails. The table is held against the class, so a hook without a row fails.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Literal

import pytest

from dualclaw import ContentPart, Message, Role, RunState, StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor, ModelCall, ModelNext
from dualclaw_server.engine.model import ModelChunk, ModelError, ModelRequest
from dualclaw_server.engine.plan import PlanReAct
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import ToolContext, tool
from dualclaw_server.stores.memory import MemoryStore

from .conftest import TIMEOUT, Asked, Engine, Opener, echo, turn
from .probes import HOOKS, FullProbe, Log, Probe, resume

OUTER, ACTOR, INNER = "outer", "actor", "inner"


@dataclass(frozen=True)
class Row:
    """What is special about a hook."""

    order: Literal["in", "out"] = "in"
    """Whether the outermost or the innermost interceptor is called first."""
    all_run: bool = False
    """True: everybody is called, whatever one of them wants."""
    of_call: bool = False
    """True: the failure of one that fails closed fails a call, not the run."""
    replaceable: bool = False
    wants: tuple[str, ...] = ("suspends", "ends", "fails")
    """What it may want."""
    always_closed: bool = False


ROWS = {
    "before_agent": Row(always_closed=True),
    "on_agent_start": Row(),
    "on_agent_end": Row(order="out", all_run=True, wants=("fails",)),
    "on_reason_start": Row(replaceable=True),
    "on_prepare": Row(replaceable=True),
    "intercept_stream": Row(replaceable=True),
    "intercept_call": Row(replaceable=True, of_call=True),
    "on_reason_retry": Row(),
    "on_reason_end": Row(order="out", replaceable=True),
    "on_action_start": Row(replaceable=True),
    "on_plan": Row(of_call=True, replaceable=True),
    "on_tool_call_start": Row(of_call=True, replaceable=True),
    "intercept_tool": Row(of_call=True, replaceable=True),
    "on_tool_call_end": Row(order="out", all_run=True, of_call=True, replaceable=True),
    "on_action_end": Row(order="out", all_run=True),
    "on_thought": Row(order="out", replaceable=True),
    "on_action": Row(of_call=True, replaceable=True),
    "on_observation": Row(order="out", all_run=True, of_call=True, replaceable=True),
}

DEEDS = ("ok", "raises", "cancels itself", "misuses", "suspends", "ends", "fails", "replaces", "hangs")
"""What a hook may do; "hangs" is the hook in which the run is cancelled."""


class Stumble(Interceptor):
    """The first attempt at a run's first answer fails."""

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        if call.attempt == 1 and call.trace.model_calls == 0:
            raise ModelError("MODEL_OVERLOADED", "Try again.", retryable=True)
        async for chunk in call_next(call):
            yield chunk


@tool(effect="read")
async def aside(context: ToolContext) -> str:
    """Ask a model beside the conversation."""
    question = Message(role=Role.ROLE_USER, parts=[ContentPart(text="aside")])
    response = await context.trace.ask(ModelRequest([question]))
    return response.message.parts[0].text


SCRIPT = (
    {"when": {"user": "^aside$"}, "say": [{"text": "By the way."}]},
    turn(0, {"text": "On it."}, {"call": "echo", "id": "one", "args": {"text": "hi"}}),
    turn(1, {"call": "aside", "id": "two"}),
    turn(2, {"call": "create_plan", "id": "three", "args": {"steps": ["first", "second"]}}),
    turn(3, {"text": "Done."}),
)


@pytest.fixture
async def store() -> AsyncIterator[RunStore]:
    """One kind of store is enough: none of this is its work."""
    store = MemoryStore()
    await store.open()
    yield store
    await store.close()


def agent_with(*probes: Interceptor) -> Agent:
    with pytest.warns(DeprecationWarning, match="is deprecated, override"):
        return Agent(
            "a",
            tools=[echo, aside],
            strategy=PlanReAct(),
            interceptors=[*probes, Stumble(order=9)],
            retry=RetryPolicy(first_delay=0.001, max_delay=0.001),
        )


def came_out(asked: Asked) -> str:
    """How the last segment ended."""
    if asked.last.WhichOneof("payload") == "error":
        return "failed"
    return StopReason.Name(asked.last.done.stop_reason).removeprefix("STOP_REASON_").lower()


def effect(hook: str, does: str, *, closed: bool) -> str:
    """What a deed comes to: a value "replaced", "nothing", the "call" or the "run" failed, or what was wanted."""
    row = ROWS[hook]
    if does == "replaces" and row.replaceable:
        return "replaced"
    if does in ("suspends", "ends", "fails") and does in row.wants:
        return does
    if does in ("ok", "hangs"):
        return "nothing"
    if row.always_closed or (closed and not row.of_call):
        return "run fails"
    return "call fails" if closed else "nothing"


def who_ran(hook: str, what: str) -> list[str]:
    """Who is called at a hook in which the one in the middle does something that comes to ``what``."""
    row = ROWS[hook]
    names = [OUTER, ACTOR, INNER] if row.order == "in" else [INNER, ACTOR, OUTER]
    return names if row.all_run or what == "nothing" else names[:2]


def check_pairs(log: Log) -> None:
    """Every start has its end, of the same interceptor, in reverse order; an answer is reviewed after it came."""
    for start, end in (("on_agent_start", "on_agent_end"), ("on_tool_call_start", "on_tool_call_end")):
        open_ones: dict[str, list[str]] = {}
        for entry in log.entries:
            if entry.over:
                continue
            if entry.hook == start:
                open_ones.setdefault(entry.call_id, []).append(entry.name)
            elif entry.hook == end:
                assert open_ones[entry.call_id].pop() == entry.name
        assert not any(open_ones.values()), f"{start} without {end}: {open_ones}"
    order = [entry.hook for entry in log.entries if entry.hook in ("on_reason_end", "intercept_stream")]
    assert "on_reason_end" not in order or order[0] == "intercept_stream"


CASES = [
    pytest.param(hook, does, closed, id=f"{hook}-{does}-{'closed' if closed else 'open'}")
    for hook in HOOKS
    for does in DEEDS
    for closed in ((False, True) if does in ("raises", "cancels itself", "misuses") else (False,))
]


def test_every_hook_has_a_row() -> None:
    """A hook that is added to the class must say here what becomes of it."""
    assert list(ROWS) == HOOKS


@pytest.mark.parametrize(("hook", "does", "closed"), CASES)
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
async def test_what_a_hook_does(open_engine: Opener, hook: str, does: str, closed: bool, several: bool) -> None:
    """The others run as the table says, every start has its end, and the run comes out typed; suspended it goes on."""
    log = Log()
    probes: list[Probe] = [FullProbe(log, name=ACTOR, at=hook, does=does, fail_closed=closed)]
    if several:
        probes += [FullProbe(log, name=OUTER, order=-1), FullProbe(log, name=INNER, order=1)]
    engine = await open_engine(agent_with(*probes), *SCRIPT)
    if does == "hangs":
        asked = await cancelled_in(engine, log, hook)
    else:
        asked = await engine.ask("go")
    what = effect(hook, does, closed=closed)
    check_pairs(log)
    if several:
        check_others(log, hook, does, what)
    match what:
        case "suspends":
            assert came_out(asked) == "interrupted"
            asked = await resume(engine, asked)
            assert came_out(asked) == "finished"
            assert log.names(hook).count(ACTOR) >= 2
            check_pairs(log)
        case "ends":
            assert came_out(asked) == "exited"
            assert asked.last.done.content.endswith("That is all.")
        case "fails":
            assert asked.last.error.message == "Enough."
        case "run fails":
            assert asked.last.error.message.startswith(f"Interceptor {ACTOR} failed in {hook}: ")
        case "call fails":
            assert came_out(asked) == "finished"
            assert await failed_calls(engine, asked) == 1
        case _:
            assert came_out(asked) == ("cancelled" if does == "hangs" else "finished")
            assert does == "hangs" or await failed_calls(engine, asked) == 0
    head = await engine.store.head(asked.key)
    assert head.state == {"failed": RunState.RUN_STATE_FAILED, "cancelled": RunState.RUN_STATE_CANCELLED}.get(
        came_out(asked), RunState.RUN_STATE_SUCCEEDED
    )
    runs = [name for _, name, phase, _ in asked.steps if phase == "ok"]
    assert len(runs) == len(set(runs)), "a tool ran twice"


def check_others(log: Log, hook: str, does: str, what: str) -> None:
    """Who was called the first time, and that the next ones began from the start again."""
    names = log.names(hook)
    expected = who_ran(hook, what)
    if does == "hangs" and not ROWS[hook].all_run:
        expected = expected[:2]
    assert names[: len(expected)] == expected
    assert names[len(expected) : len(expected) + 1] in ([], expected[:1])


async def cancelled_in(engine: Engine, log: Log, hook: str) -> Asked:
    """Cancel a run while a hook is at work. What ends something may finish first, everything else is interrupted."""
    created = await engine.start("go")
    async with asyncio.timeout(TIMEOUT):
        await log.reached.wait()
        await engine.cancel(created.head.key)
        if ROWS[hook].all_run:
            # nothing tells of a cancel that waits; it can only be looked for
            while not any(t.get_name() == "strategy" and t.cancelling() for t in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            log.gate.set()
    asked = await engine.read(created)
    assert any(entry.over for entry in log.entries) == ROWS[hook].all_run
    return asked


async def failed_calls(engine: Engine, asked: Asked) -> int:
    """How many results of the run are errors."""
    results = [part.tool_result for m in await engine.messages(asked.conversation_id) for part in m.parts]
    return sum(result.is_error for result in results)
