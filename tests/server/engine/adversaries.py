"""What an adversary is: agents that behave as badly as they can, and how their run must end all the same.

The table is in the modules beside this one (``adversaries_loops``, ``_tools``, ``_results``, ``_models``,
``_hooks``, ``_teams``); ``test_adversaries`` plays it. Every entry makes its agents anew, so that no play sees
the state of another.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dualclaw import EngineEvent, RunOptions
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.engine.strategy import Strategy
from dualclaw_server.engine.tool import Tool

Turn = Mapping[str, object]
NEXT: dict[str, object] = {"when": {"user": "^next$"}, "say": [{"text": "fine"}]}
"""What the engine's own model says to the message after."""
END: dict[str, object] = {"say": [{"text": "end"}]}
MOMENT = Limits(max_steps=6, wall_time=0.1)
"""Limits of a run that only its wall time ends; its next message goes to CALM, however slow the machine is."""
CALM = Agent("calm")
QUICK = RetryPolicy(attempts=2, first_delay=0.01, max_delay=0.01)

# Shaped like credentials, put together here so that no scanner takes the repository for leaky.
SECRETS: Mapping[str, str] = {
    "aws": "AKIA" + "2OEEO8Q5WFG9IUAP",
    "github": "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8",
    "password": "hunter2" + "-Zq8vT1xW",
}
LEAK = f"key={SECRETS['aws']} token={SECRETS['github']} postgres://admin:{SECRETS['password']}@db.internal/prod"


@dataclass
class Traps:
    """What holds an adversary in place until its play is over."""

    release: asyncio.Event = field(default_factory=asyncio.Event)
    release_threads: threading.Event = field(default_factory=threading.Event)
    counts: dict[str, int] = field(default_factory=dict)
    values: list[object] = field(default_factory=list)

    def count(self, name: str) -> int:
        """Count one more and return how many that makes."""
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name]

    def open(self) -> None:
        """Let go of everything that is held."""
        self.release.set()
        self.release_threads.set()


@dataclass(frozen=True)
class Adversary:
    """One entry of the table."""

    agents: Sequence[Agent]
    script: Sequence[Turn]
    """Turns of the engine's own model, for agents that have none."""
    ends: str
    """Stop reason of the run, or the diagnosis code of its error."""
    after: str = "finished"
    """How the next message of the conversation ends."""
    next_to: str = ""
    """Agent the next message goes to; empty: the same one."""
    codes: Iterable[str] = ()
    """Diagnosis codes that steps of the run must show."""
    says: str = ""
    """Text that must be in the answer."""
    size: int = 1_000_000
    """Bytes that log, transcript and checkpoint of the run may take together."""
    options: RunOptions | None = None
    holds: Callable[[Sequence[EngineEvent]], object] = bool
    """What else must be true of the events of the run."""


Entry = Callable[[Traps], Adversary]


def agent(
    *tools: Tool,
    guards: Sequence[Interceptor] = (),
    limits: Limits | None = None,
    strategy: Strategy | None = None,
    name: str = "a",
    sub_agents: Sequence[Agent] = (),
    transfer_to: Sequence[str] = (),
) -> Agent:
    """Return an agent that is impatient with its model and has little time."""
    return Agent(
        name,
        tools=tools,
        interceptors=guards,
        limits=limits or Limits(max_steps=6, wall_time=50),
        strategy=strategy,
        retry=QUICK,
        sub_agents=sub_agents,
        transfer_to=transfer_to,
    )


def says(*items: Mapping[str, object], **when: object) -> dict[str, object]:
    """Return a turn."""
    return {"when": when, "say": [dict(item) for item in items]}


def calls(name: str, *, when: Mapping[str, object] | None = None, raw: str = "", **args: object) -> dict[str, object]:
    """Return a turn with one call; ``raw`` in place of arguments."""
    call: dict[str, object] = {"call": name, "raw_args": raw} if raw else {"call": name, "args": args}
    return {"when": dict(when or {}), "say": [call]}
