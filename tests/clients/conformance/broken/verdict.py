"""What must be found on a server that is wrong in one way, and nothing else."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from dualclaw_clients.conformance.catalogue import checks_of, implied_by
from dualclaw_clients.conformance.check import Target
from dualclaw_clients.conformance.seen import Evidence
from dualclaw_clients.conformance.verdict import failed_ids, judge

Found = Mapping[str, Sequence[str]]
"""Faults by the id of the check that found them."""


class Server(Protocol):
    """One that is wrong in one way."""

    @property
    def name(self) -> str:
        """What is wrong with it."""

    @property
    def fails(self) -> Sequence[str]:
        """Ids of the checks that it must fail."""


S = TypeVar("S", bound=Server)


async def examined(servers: Sequence[S], findings: Callable[[S], Awaitable[Found]], at_a_time: int) -> list[str]:
    """Have the kit look at servers, the first ones first; return what it missed and what it found beyond."""
    gate = asyncio.Semaphore(at_a_time)
    wrong: list[str] = []

    async def examine(server: S) -> None:
        async with gate:
            found = await findings(server)
        wrong.extend(disagreements(server.name, server.fails, found))

    async with asyncio.TaskGroup() as group:
        for server in servers:
            group.create_task(examine(server))
    return wrong


def faults_in(target: Target, evidence: Evidence) -> Found:
    """Return the faults the kit finds."""
    results = list(judge(target, checks_of(target), evidence))
    return {result.check.id: result.faults for result in results if result.check.id in failed_ids(results)}


def disagreements(name: str, fails: Sequence[str], found: Found) -> Iterator[str]:
    """Say what the kit missed on a broken server, and what it found beyond what its checks name as implied.

    Args:
        name: of the server.
        fails: ids of the checks that it must fail.
        found: faults by the id of the check that found them.
    """
    for id_ in set(fails) - set(found):
        yield f"{name}: missed {id_}"
    for id_ in set(found) - set(fails) - implied_by(fails):
        yield f"{name}: beyond {id_}: {found[id_][0]}"
