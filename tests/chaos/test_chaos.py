"""Chaos: servers are killed and frozen at random under many runs, for minutes; every figure of harm must be 0.

The seed decides what is killed when and what the clients do; how it all interleaves is the machine's affair.
"""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.nats_servers import NatsServers

from .processes import Nursery
from .stage import Stage
from .storm import Storm, Weather, reckon

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow, pytest.mark.timeout(1_500)]


@pytest.fixture
def weather(pytestconfig: pytest.Config) -> Weather:
    """How long and how much, by the options."""
    given = pytestconfig.getoption("--seed", None)
    seed = random.randrange(1_000_000) if given is None else given
    print(f"seed {seed}")  # noqa: T201  # shown when it fails
    long = pytestconfig.getoption("--long", False)
    return Weather(seconds=600, slots=200, seed=seed) if long else Weather(seconds=120, slots=30, seed=seed)


async def rage(stage: Stage, weather: Weather, report: list[str], nodes: NatsServers | None = None) -> None:
    storm = Storm(stage, weather, nodes)
    try:
        await storm.rage()
        async with stage.client(stage.servers[-1].address.result()) as client:
            figures = await reckon(client, storm.seen, stage.ledger.effects())
    except BaseException as error:
        error.add_note(f"seed {weather.seed}; the servers wrote last:\n{stage.log()}")
        raise
    where = "sqlite" if nodes is None else f"{len(nodes.ports)} NATS nodes, killed {storm.node_kills}"
    clients = f"{weather.slots} runs at a time, {2 * weather.slots} clients"
    report.append(f"storm of {weather.seconds:g} s on {where}, {clients}, seed {weather.seed}:")
    report.append(f"  kills {storm.kills}  freezes {storm.freezes}  {figures}")
    assert storm.kills > weather.seconds / 10
    assert figures.wrong == {}


async def test_nothing_is_lost_in_a_storm(stage: Stage, weather: Weather, report: list[str]) -> None:
    """Runs end, events come once to every client, "once" effects happen once, of two answers one wins."""
    await rage(stage, weather, report)


async def test_nothing_is_lost_in_a_storm_that_takes_store_nodes_too(
    nursery: Nursery, folder: Path, weather: Weather, report: list[str]
) -> None:
    """The same on three NATS nodes, one of which at a time is killed, the leader among them."""
    nodes = await asyncio.to_thread(NatsServers, folder / "nodes", 3)
    try:
        stage = Stage(nursery, folder, nodes.url("Storm"))
        try:
            await rage(stage, replace(weather, stream="Storm"), report, nodes)
        finally:
            await stage.close()
    finally:
        await asyncio.to_thread(nodes.stop)
