"""Rows that compare with the wire itself, and one store with the other: 1, 2, 8, 9 and 11."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from dualclaw import BusyPolicy, ContentPart, Message, Role, Run, RunResponse, RunState
from dualclaw.events import make_delta, make_done
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.store import Frame, NewRun, RunKey
from dualclaw_server.stores import store_from_url
from tests.bench.children import BenchError, Disturbed
from tests.bench.measuring import Spent, cpu_of, rest, whole, window
from tests.bench.plan import Plan, Report, case, in_turns
from tests.bench.provider import TOKENS
from tests.bench.ratios import Goal
from tests.bench.stage import Stage, Target

APART = 50
"""Milliseconds between tokens that are never merged: more than twice the engine's frame time."""
FLOWS = 16
"""Answers that flow at once, few enough that each token is sent before the next one comes."""
BURST = 2_000
"""Tokens of an answer that comes all at once."""
_MICRO = 1e6
_TRIES = 3


async def token_by_token(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 1: the engine's CPU for a token that is an event and a message of its own."""
    engine, raw = await stage.engine("memory"), await stage.raw()
    tokens, runs = plan.flowing(APART), plan.at_most(FLOWS)

    async def flow(target: Target) -> Spent:
        return await _undisturbed(
            lambda: window(stage, target, runs=runs, tokens=tokens, pace=APART, each=True), report
        )

    ours, theirs = await in_turns(plan.pairs, lambda: flow(engine), lambda: flow(raw))
    each = [[spent.total / spent.events * _MICRO for spent in side] for side in (ours, theirs)]
    report.cases.append(case(f"{runs} runs, a token every {APART} ms", Goal(3.5), raw.name, "us/token", *each))
    report.notes.append(f"every one of the {runs * tokens} tokens of a repetition came as an event of its own")


async def _undisturbed(measure: Callable[[], Awaitable[Spent]], report: Report) -> Spent:
    """Measure again where something stalled: tokens that were merged, runs that did not flow together."""
    for _ in range(_TRIES - 1):
        try:
            return await measure()
        except Disturbed as merged:
            report.notes.append(f"measured again: {merged}")
    return await measure()


async def burst(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 2: the engine's CPU for a token when tokens come faster than frames, without what a run costs anyway."""
    engine, raw = await stage.engine(), await stage.raw()
    tokens, runs = plan.long(BURST), plan.at_most(16)
    merged: list[float] = []

    async def each_token(target: Target) -> float:
        long = await whole(stage, target, runs=runs, tokens=tokens)
        short = await whole(stage, target, runs=runs, tokens=1)
        if target is engine:
            merged.append(long.tokens / long.events)
        return (long.total - short.total) / (long.tokens - short.tokens) * _MICRO

    sides = await in_turns(plan.pairs, lambda: each_token(engine), lambda: each_token(raw))
    report.cases.append(case(f"{runs} runs, {tokens} tokens at once", Goal(1.5), raw.name, "us/token", *sides))
    report.notes.append(f"the engine sent {max(merged):.0f} tokens an event, the raw server one a message")


async def gateway(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 8: the gateway's CPU for an event that is a frame of its own; the engine behind it does not count."""
    web, raw = await stage.web(), await stage.raw_gateway()
    own = Target("gateway", web.kind, web.address, web.servers[-1:])
    tokens, runs = plan.flowing(APART), plan.at_most(FLOWS)

    async def flow(target: Target) -> Spent:
        return await _undisturbed(
            lambda: window(stage, target, runs=runs, tokens=tokens, pace=APART, each=True), report
        )

    ours, theirs = await in_turns(plan.pairs, lambda: flow(own), lambda: flow(raw))
    each = [[spent.total / spent.events * _MICRO for spent in side] for side in (ours, theirs)]
    report.cases.append(case(f"{runs} runs, a token every {APART} ms", Goal(1.5), raw.name, "us/event", *each))


async def stores(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 9: what the SQLite store costs per token beside the one in memory."""
    sqlite, memory = await stage.engine(), await stage.engine("memory")
    runs = plan.at_most(64)
    for pace in (10, 30):

        async def flow(target: Target, pace: int = pace) -> float:
            spent = await _undisturbed(
                lambda: window(stage, target, runs=runs, tokens=plan.flowing(pace), pace=pace), report
            )
            return spent.total / spent.tokens * _MICRO

        sides = await in_turns(plan.pairs, lambda: flow(sqlite), lambda: flow(memory))
        label = f"{runs} runs, a token every {pace} ms"
        report.cases.append(case(label, Goal(1.3), memory.name, "us/token", *sides))


async def replay(stage: Stage, plan: Plan, report: Report) -> None:
    """Row 11: how many events a second a reader of a stored run gets."""
    run_id = await _store_run(stage.store_file("replay"), plan.stored)
    engine, raw = await stage.engine(use="replay"), await stage.raw()
    client = await stage.load()
    cpu: dict[str, float] = {}

    async def read(target: Target) -> float:
        await rest(target)
        before = sum(cpu_of(target).values())
        # The raw server's rate does not depend on how many messages there are, so a part of them will do.
        events = plan.stored if target is engine else plan.stored // 10
        answer = await client.do("replay", {**target.ask, "run_id": run_id, "events": events})
        if answer["events"] != events:
            raise BenchError(f"{target.name}: {answer['events']} events came of {events}")
        cpu[target.name] = (sum(cpu_of(target).values()) - before) / events * _MICRO
        return float(answer["events"] / answer["seconds"] / 1000)

    sides = await in_turns(plan.pairs, lambda: read(engine), lambda: read(raw))
    goal = Goal(5.0, at_least=True)
    report.cases.append(case(f"{plan.stored:,} events", goal, raw.name, "k events/s", *sides))
    report.notes += [f"CPU of {name}: {spent:.1f} us/event" for name, spent in cpu.items()]


async def _store_run(path: Path, events: int) -> str:
    """Write a finished run, a frame for each event as paced tokens make them; returns its id.

    An engine would need an hour for it, so the frames go through the store's own ``append`` here.
    """
    store = store_from_url(f"sqlite:{path}")
    await store.open()
    try:
        key, conversation = RunKey("default", new_id()), new_id()
        question = Message(id=new_id(), role=Role.ROLE_USER, parts=[ContentPart(text="bench")])
        run = Run(id=key.run_id, conversation_id=conversation, agent="bench", claw="bench")
        new = NewRun(
            key, conversation, True, "bench", "", "", b"", run, question,
            BusyPolicy.BUSY_POLICY_REJECT, b"",
        )  # fmt: skip
        await store.create(new)
        claim = await store.claim("default", "bench", 5.0)
        if claim is None:
            raise BenchError("the store gives out no work for the run to be replayed")
        waiting = []
        for seq in range(1, events + 1):
            last = seq == events
            frame = Frame(
                1, seq, 1, _body(key, seq, conversation if last else ""),
                RunState.RUN_STATE_SUCCEEDED if last else RunState.RUN_STATE_RUNNING,
                durable=last, ends_segment=last, run=run if last else None,
            )  # fmt: skip
            waiting.append(asyncio.ensure_future(store.append(key, frame, seq - 1)))
            if len(waiting) == 1_000 or last:
                await asyncio.gather(*waiting)
                waiting.clear()
        await claim.ack()
    finally:
        await store.close()
    return key.run_id


def _body(key: RunKey, seq: int, ends: str) -> bytes:
    if ends:
        event = make_done(message_id="", conversation_id=ends, stop_reason="finished")
    else:
        event = make_delta(TOKENS[seq % len(TOKENS)])
    event.seq, event.run_id, event.tenant_id, event.claw = seq, key.run_id, key.tenant, "bench"
    event.trace_id = "0af7651916cd43dd8448eb211c80319c"
    return RunResponse(events=[event]).SerializeToString()
