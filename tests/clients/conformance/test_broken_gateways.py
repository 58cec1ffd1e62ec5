"""The kit against gateways that are wrong in one way each: it finds what is wrong, and only what follows from it."""

from collections.abc import Sequence

import pytest

from dualclaw_clients.conformance.catalogue import checks_of
from dualclaw_clients.conformance.check import Target
from dualclaw_clients.conformance.http_probe import HttpProbe
from dualclaw_clients.conformance.playing import play_web
from dualclaw_clients.conformance.verdict import Outcome, judge

from .broken.gateways import NATIVE, ORIGINAL, BrokenWeb
from .broken.verdict import Found, examined, faults_in
from .broken.web_proxy import HonestWeb, served
from .conftest import KEY, GoodEngine

AT_A_TIME = 8
ROUTES: list[tuple[Target, Sequence[BrokenWeb]]] = [("native", NATIVE), ("original", ORIGINAL)]


async def findings(engine: GoodEngine, broken: BrokenWeb, route: Target) -> Found:
    """Return what the kit has against a broken gateway, by check."""
    async with served(engine.address, broken.hooks()) as url:
        probe = HttpProbe(url, key=KEY, timeout=broken.timeout)
        evidence = await play_web(probe, "conformance", route, lambda *_: None)
    return faults_in(route, evidence)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("route", "gateways"), ROUTES)
async def test_every_broken_gateway_fails_its_check_and_no_other(
    good_engine: GoodEngine, route: Target, gateways: Sequence[BrokenWeb]
) -> None:
    """Each broken gateway fails the checks it breaks, and beyond them only what those name as implied."""
    waiting_first = sorted(gateways, key=lambda broken: broken.timeout)  # those that let it wait
    wrong = await examined(waiting_first, lambda broken: findings(good_engine, broken, route), AT_A_TIME)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("route", ["native", "original"])
async def test_our_gateway_passes_by_both_routes(good_engine: GoodEngine, route: Target) -> None:
    """Every check of the route passes, none is left out; and so the layer of the broken ones breaks nothing itself."""
    async with served(good_engine.address, HonestWeb()) as url:
        evidence = await play_web(HttpProbe(url, key=KEY, timeout=100), "conformance", route, lambda *_: None)
    results = judge(route, checks_of(route), evidence)
    assert [(r.check.id, r.faults, r.why) for r in results if r.outcome is not Outcome.PASSED] == []


@pytest.mark.parametrize(("route", "gateways"), ROUTES)
def test_every_check_of_a_route_has_a_gateway_that_fails_it(route: Target, gateways: Sequence[BrokenWeb]) -> None:
    """A check that no broken gateway fails may be one that cannot fail."""
    broken = {id_ for gateway in gateways for id_ in gateway.fails}
    assert {check.id for check in checks_of(route)} - broken == set()
