"""One measurement: what some answers cost the processes that gave them; each leaves them at rest for the next."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.bench import machine
from tests.bench.children import BenchError, Disturbed
from tests.bench.load import LEAD
from tests.bench.stage import Stage, Target

_REST = 0.05
_IDLE = 0.02
"""Share of a core below which a server has done its work; timers of an idle one stay far under it."""
_PATIENCE = 5.0
_LATE = 0.1
"""Share of a window by which the reading of the CPU may lag behind what clients have counted."""


@dataclass(frozen=True)
class Spent:
    """What was used, and what came of it."""

    cpu: Mapping[str, float]
    """Seconds by the name of the process."""
    events: int
    """Pieces of text that clients got."""
    tokens: float
    """Tokens those pieces are made of."""
    firsts: tuple[float, ...] = ()
    """Seconds to the first text of each answer."""

    @property
    def total(self) -> float:
        """Seconds of CPU of all processes."""
        return sum(self.cpu.values())


def cpu_of(target: Target) -> dict[str, float]:
    """Return the CPU its servers have used. Raises BenchError when one is gone."""
    try:
        return {server.name: machine.cpu_seconds(server.pid) for server in target.servers}
    except OSError:
        gone = "; ".join(f"{server.name}: {server.tail()}" for server in target.servers if not server.alive)
        raise BenchError(f"a server has ended: {gone}") from None


async def rest(target: Target) -> None:
    """Wait until the servers have nothing more to do, so that no work of one measurement is counted in the next."""
    before = sum(cpu_of(target).values())
    for _ in range(round(_PATIENCE / _REST)):
        await asyncio.sleep(_REST)
        now = sum(cpu_of(target).values())
        if now - before < _IDLE * _REST:
            return
        before = now


async def whole(stage: Stage, target: Target, *, runs: int, tokens: int, pace: int = 0, **more: object) -> Spent:
    """Measure whole answers, with everything that begins and ends one."""
    client = await stage.load()
    before = cpu_of(target)
    answer = await client.do("run", {**target.ask, "runs": runs, "tokens": tokens, "pace": pace, **more})
    await rest(target)
    return Spent(_since(before, target), answer["events"], runs * tokens, tuple(answer["firsts"]))


async def window(stage: Stage, target: Target, *, runs: int, tokens: int, pace: int, each: bool = False) -> Spent:
    """Measure the flow of answers: from when all have begun to when the first is about to end.

    ``each``: every token must have been an event of its own, in all of the answers.

    Raises:
        Disturbed: something stalled, so that tokens came together that were to come one by one, or runs never did.
    """
    client = await stage.load()
    marks: list[tuple[Mapping[str, Any], dict[str, float], float]] = []
    ask = {**target.ask, "runs": runs, "tokens": tokens, "pace": pace, "window": True}
    answer = await client.do("run", ask, mark=lambda mark: marks.append((mark, cpu_of(target), time.perf_counter())))
    await rest(target)
    if len(marks) != 2:
        raise Disturbed(f"{target.name}: the answers were never all in flow at once")
    (begun, before, read_first), (ending, after, read_last) = marks
    length, planned = ending["time"] - begun["time"], (tokens - 2 * LEAD) * pace / 1000
    late = max(read_first - begun["time"], read_last - ending["time"])  # one clock serves all processes
    if length < planned / 2 or late > length * _LATE:
        raise Disturbed(f"{target.name}: flowed for {length:.2f} s of {planned:.2f} s, CPU was read {late:.2f} s late")
    spent = {name: after[name] - before[name] for name in after}
    if each and answer["events"] != runs * tokens:
        raise Disturbed(f"{target.name}: {runs * tokens} tokens came as {answer['events']} events")
    return Spent(spent, ending["events"] - begun["events"], ending["tokens"] - begun["tokens"])


async def turns(stage: Stage, target: Target, count: int, conversation: str = "") -> tuple[float, str]:
    """Take turns of a conversation; returns the CPU of each in seconds, and the conversation's id."""
    client = await stage.load()
    before = cpu_of(target)
    answer = await client.do("turns", {**target.ask, "turns": count, "tokens": 1, "conversation": conversation})
    await rest(target)
    return sum(_since(before, target).values()) / count, str(answer["conversation"])


def _since(before: Mapping[str, float], target: Target) -> dict[str, float]:
    return {name: now - before[name] for name, now in cpu_of(target).items()}
