"""Saved runs as files: what a store holds of a run, so that a later release can be shown to go on with it.

A fixture is made once per release, by ``python -m tests.server.engine.saved_runs NAME`` in the root of the checkout,
and never changed: it is what people's files hold.
"""

import asyncio
import base64
import json
import sys
from pathlib import Path

from google.protobuf import json_format

from dualclaw import BusyPolicy, Message, Run
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.store import Frame, NewRun, RunKey, RunMessage, RunStore
from dualclaw_server.stores.memory import MemoryStore

from .conftest import CALLER, turn
from .people import DONE, Ledger, asks, at_work, pay, segment_of

FIXTURES = Path(__file__).parent / "fixtures"

FREE: dict[str, object] = {"call": "free", "id": "f5", "args": {"to": "f5"}}
SCRIPT = [
    turn(0, pay("p1"), {"call": "look", "id": "l2", "args": {"to": "l2"}}, user="^help$"),
    turn(1, {"text": "helped"}, user="^help$"),
    turn(0, {"text": "One moment."}, FREE, {"call": "helper", "id": "h", "args": {"request": "help"}}, user="ask"),
    turn(0, {"text": "Let me see."}, {"call": "look", "id": "l4", "args": {"to": "l4"}}, user="crash"),
    turn(0, FREE, {"call": "look", "id": "l6", "args": {"to": "l6"}}),
    DONE,
]
"""Asked "ask" it waits for an approval below a sub-agent; "crash": it dies in its second answer; else in its tools."""
LONG_AGO = 1e10
"""Seconds; a fixture must not run out of time for being old."""


def agent(ledger: Ledger) -> Agent:
    """The agent of every fixture; it must never lose what they use of it."""
    tools = [ledger.tool(), ledger.tool("free"), ledger.tool("look", effect="read")]
    helper = Agent("helper", tools=tools, interceptors=[asks()])
    return Agent("clerk", tools=tools, sub_agents=[helper], interceptors=[asks()], limits=Limits(wall_time=LONG_AGO))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def save(store: RunStore, key: RunKey) -> dict[str, object]:
    """Return a run as JSON data."""
    loaded = await store.load(key)
    frames = await store.read(key, 0, limit=1 << 30)
    return {
        "tenant": key.tenant,
        "run_id": key.run_id,
        "conversation_id": loaded.head.conversation_id,
        "record": _text(loaded.record),
        "checkpoint": _text(loaded.checkpoint),
        "checkpoint_seq": loaded.checkpoint_seq,
        "run": json_format.MessageToDict(loaded.head.run),
        "messages": [[item.position, item.scope, _text(item.message.SerializeToString())] for item in loaded.messages],
        "frames": [
            [frame.first_seq, frame.count, frame.epoch, int(frame.state), frame.ends_segment, _text(frame.body)]
            for frame in frames
        ],
    }


async def restore(store: RunStore, saved: str) -> RunKey:
    """Put a saved run into a store, with a work item, as the process that had it has left it."""
    data = json.loads(saved)
    key = RunKey(data["tenant"], data["run_id"])
    messages = [
        RunMessage(position, Message.FromString(base64.b64decode(text)), scope)
        for position, scope, text in data["messages"]
    ]
    run = json_format.ParseDict(data["run"], Run())
    created = Run(id=key.run_id, conversation_id=data["conversation_id"], agent=run.agent)
    record, first, busy = base64.b64decode(data["record"]), messages[0].message, BusyPolicy.BUSY_POLICY_REJECT
    await store.create(NewRun(key, data["conversation_id"], True, "saved", "", "", record, created, first, busy, b""))
    for version, (first_seq, count, epoch, state, ends_segment, body) in enumerate(data["frames"]):
        holds = first_seq <= data["checkpoint_seq"] <= first_seq + count - 1
        frame = Frame(
            epoch,
            first_seq,
            count,
            base64.b64decode(body),
            state,
            durable=True,
            ends_segment=ends_segment,
            checkpoint=base64.b64decode(data["checkpoint"]) if holds else b"",
            messages=tuple(messages[1:]) if holds else (),
            run=run if holds else None,
        )
        await store.append(key, frame, version)
    return key


async def make() -> dict[str, str]:
    """Return a run that waits for people, one that died in mid-answer, one that died with calls at work."""
    made = {}
    for name in ("ask", "crash", "tools"):
        store, ledger = MemoryStore(), Ledger()
        await store.open()
        script = [*SCRIPT[:-1], turn(1, {"text": "Half an ans"}, {"hang": True})] if name == "crash" else SCRIPT
        ledger.hanging = name == "tools"
        async with at_work(store, agent(ledger), *script) as engine:
            started = await engine.start(name)
            if name == "ask":
                await segment_of(engine, started)
            elif name == "crash":
                await engine.wait_for(started.head.key, lambda events: events[-1].delta.content.endswith("ans"))
            else:
                await engine.wait_for(started.head.key, lambda events: len(events) == 2)
                await asyncio.sleep(0.1)
            saved = await save(store, RunKey(CALLER.tenant, started.head.key.run_id))
        made[name] = json.dumps(saved, indent=1)
        await store.close()
    return made


if __name__ == "__main__":
    folder = FIXTURES / sys.argv[1]
    folder.mkdir(parents=True)
    for fixture, text in asyncio.run(make()).items():
        (folder / f"{fixture}.json").write_text(text)
