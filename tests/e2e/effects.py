"""An agent whose tools write down what they do, and wait while they are told to; its script and its settings."""

import json
from dataclasses import dataclass
from pathlib import Path

AGENTS = '''
import asyncio
import os
import time
from contextlib import aclosing
from pathlib import Path

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.model import TextDelta
from dualclaw_server.engine.tool import ToolContext, tool
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy


def write(what, name, key):
    with Path("effects.log").open("a") as log:
        log.write(f"{what} {name} {os.getpid()} {key}\\n")
        log.flush()
        os.fsync(log.fileno())


async def work(name, context):
    """Begin, wait while there is a file "hold", end."""
    write("begin", name, context.idempotency_key)
    while Path("hold").exists():
        await asyncio.sleep(0.02)
    write("end", name, context.idempotency_key)
    return f"{name} done"


async def lookup(key):
    write("lookup", "reconcile", key)
    return "found again" if f" {key}\\n" in Path("done.log").read_text() else None


@tool(name="read", effect="read")
async def read(context: ToolContext) -> str:
    return await work("read", context)


@tool(name="idempotent", effect="idempotent")
async def idempotent(context: ToolContext) -> str:
    return await work("idempotent", context)


@tool(name="reconcile", effect="reconcile", lookup=lookup)
async def reconcile(context: ToolContext) -> str:
    return await work("reconcile", context)


@tool(name="once", effect="once")
async def once(context: ToolContext) -> str:
    return await work("once", context)


@tool(name="asking", effect="once", unknown_outcome="ask")
async def asking(context: ToolContext) -> str:
    return await work("asking", context)


@tool(name="block", effect="once", timeout=30)
async def block(seconds: float, context: ToolContext) -> str:
    """Stand still, event loop and all."""
    write("begin", "block", context.idempotency_key)
    time.sleep(seconds)
    write("end", "block", context.idempotency_key)
    return "block done"


@tool(name="short", effect="read")
async def short(context: ToolContext) -> str:
    return await work("short", context)


@tool(name="guarded", effect="once")
async def guarded(context: ToolContext) -> str:
    return await work("guarded", context)


class PauseInterceptor(Interceptor):
    """Has an answer stand still in its middle while there is a file "pause"."""

    async def intercept_stream(self, call, call_next):
        deltas = 0
        async with aclosing(call_next(call)) as chunks:
            async for chunk in chunks:
                yield chunk
                deltas += isinstance(chunk, TextDelta)
                while deltas > 20 and Path("pause").exists():
                    await asyncio.sleep(0.02)


AGENT = Agent(
    "worker",
    tools=[read, idempotent, reconcile, once, asking, block, short, guarded],
    interceptors=[HitlInterceptor([Policy("guarded"), Policy("short", expires_in=3.0)]), PauseInterceptor()],
)
'''

TOOLS = ("read", "idempotent", "reconcile", "once", "asking", "short", "guarded")
LONG = "字 and word, " * 60
TURNS: list[dict[str, object]] = [
    *({"when": {"user": f"^{name}$", "step": 0}, "say": [{"call": name}]} for name in TOOLS),
    {"when": {"user": "^block$", "step": 0}, "say": [{"call": "block", "args": {"seconds": 8.0}}]},
    {"when": {"user": "^talk$", "step": 0}, "say": [{"text": LONG, "chunk": 2, "delay": 0.01}]},
    {"when": {"user": "^wait$", "step": 0}, "say": [{"text": "half"}, {"hang": True}]},
    {"when": {"step": 1}, "say": [{"text": "Result: {{result}}"}]},
    {"say": [{"text": "You said {{user}}"}]},
]
"""What a test asks is the name of the tool, or talk (a long answer), or wait (an answer without end)."""


@dataclass(frozen=True)
class Effect:
    """A line of what tools did."""

    what: str
    """begin, end or lookup."""
    tool: str
    process: int
    key: str


def settings_of(folder: Path, **more: str) -> dict[str, str]:
    """Write script and agents into a folder; returns the settings of an engine that has them, sharing one store."""
    (folder / "effect_agents.py").write_text(AGENTS, "utf-8")
    (folder / "effects.json").write_text(json.dumps({"name": "effects", "turns": TURNS}, ensure_ascii=False), "utf-8")
    (folder / "done.log").touch()
    return {
        "DUALCLAW_LISTEN": "127.0.0.1:0",
        "DUALCLAW_STORE": f"sqlite:{folder / 'effects.db'}",
        "DUALCLAW_GRACE": "0",
        "DUALCLAW_MODEL": f"scripted:{folder / 'effects.json'}",
        "DUALCLAW_AGENTS": "effect_agents:AGENT",
        **more,
    }


def pause(folder: Path) -> None:
    """Have long answers stand still in their middle."""
    (folder / "pause").touch()


def go_on(folder: Path) -> None:
    """Have answers that stand still go on."""
    (folder / "pause").unlink()


def hold(folder: Path) -> None:
    """Have tools wait."""
    (folder / "hold").touch()


def let_go(folder: Path) -> None:
    """Have tools that wait end."""
    (folder / "hold").unlink()


def effects(folder: Path) -> list[Effect]:
    """Return what tools have written down."""
    path = folder / "effects.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Effect(what, tool, int(process), key) for what, tool, process, key in (line.split() for line in lines)]
