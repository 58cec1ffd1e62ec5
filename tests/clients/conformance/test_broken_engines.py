"""The kit against engines that are wrong in one way each: it finds what is wrong, and only what follows from it."""

import asyncio
from collections.abc import Collection

import pytest

from dualclaw import RunRequest
from dualclaw_clients.conformance.catalogue import checks_of
from dualclaw_clients.conformance.engine_probe import EngineProbe
from dualclaw_clients.conformance.playing import SCENES, play_engine
from dualclaw_clients.conformance.seen import Evidence, Scene
from dualclaw_clients.conformance.stage import Cast

from .broken.engine_proxy import Call, EngineProxy, Honest
from .broken.engines import ENGINES, Broken
from .broken.verdict import Found, examined, faults_in
from .conftest import KEY, OTHER_KEY, GoodEngine

AT_A_TIME = 16
APART = {"leave-cancel", "crash", "sizes"}
"""Scenes that take long or much, and are played only against engines that are wrong there."""


async def play(engine: GoodEngine, hooks: Honest, scenes: Collection[str], timeout: float) -> Evidence:
    """Play scenes against a proxy with these hooks."""
    async with EngineProxy(engine.address, hooks) as proxy:
        cast = Cast("conformance", KEY, OTHER_KEY, proxy.crash)
        async with EngineProbe(proxy.target, key=KEY, timeout=timeout) as probe:
            return await play_engine(probe, cast, lambda *_: None, scenes)


@pytest.fixture(scope="module")
def honest(good_engine: GoodEngine) -> Evidence:
    """What an honest proxy is seen to do, in all scenes but those that stand apart."""
    return asyncio.run(play(good_engine, Honest(), set(SCENES) - APART, timeout=100))


def scenario_of(request: RunRequest) -> str:
    """Return the scenario a message asks for, or whatever else it says."""
    return "".join(part.text for part in request.message.parts).removeprefix("conformance: ")


def touched(scene: Scene, hooks: Honest) -> bool:
    """Say whether hooks may change anything in a scene, judged by how an honest proxy answered its calls."""
    calls = [
        (exchange, type(exchange.request).FromString(exchange.request.SerializeToString()))
        for exchange in scene.exchanges.values()
    ]
    scenarios = {
        event.run_id: scenario_of(request)
        for exchange, request in reversed(calls)  # the first of a run has named its scenario
        if isinstance(request, RunRequest)
        for event in exchange.events[:1]
    }
    for exchange, request in calls:
        run_id = str(getattr(request, "run_id", ""))
        scenario = scenario_of(request) if isinstance(request, RunRequest) else scenarios.get(run_id, "")
        if hooks.touches(Call(exchange.rpc, request, (), scenario, run_id), exchange):
            return True
    return False


async def findings(engine: GoodEngine, honest: Evidence, broken: Broken) -> Found:
    """Return what the kit has against a broken engine, by check.

    Scenes it cannot be told from an honest one in are not played again: what was seen of that one stands in.
    """
    again = {name for name, scene in honest.scenes.items() if touched(scene, broken.hooks())}
    assert again or broken.scenes, f"{broken.name}: no scene has a call it changes anything about"
    played = await play(engine, broken.hooks(), again | set(broken.scenes), broken.timeout)
    return faults_in("engine", Evidence({**honest.scenes, **played.scenes}, played.skipped))


@pytest.mark.timeout(1500)
async def test_every_broken_engine_fails_its_check_and_no_other(good_engine: GoodEngine, honest: Evidence) -> None:
    """Each broken engine fails the checks it breaks, and beyond them only what those name as implied."""
    longest_first = sorted(ENGINES, key=lambda one: (not one.scenes, one.timeout))
    wrong = await examined(longest_first, lambda broken: findings(good_engine, honest, broken), AT_A_TIME)
    assert not wrong, "\n".join(wrong)


def test_an_honest_proxy_passes(honest: Evidence) -> None:
    """The proxy itself breaks nothing, so that what is found against the others is their own."""
    assert {name: scene.broke_off for name, scene in honest.scenes.items() if scene.broke_off} == {}
    assert faults_in("engine", honest) == {}


def test_every_check_of_an_engine_has_an_engine_that_fails_it() -> None:
    """A check that no broken engine fails may be one that cannot fail."""
    broken = {id_ for engine in ENGINES for id_ in engine.fails}
    assert {check.id for check in checks_of("engine")} - broken == set()
