"""The kill sweep: a server dies by SIGKILL at each await of worker and API, a second one finishes, nobody notices.

One table has all points (``failpoints.POINTS``). A case is a point, the how manieth time it is passed, the effect
class of the tools, and whether the next server stands by already or is started after the death.
"""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
import pytest_asyncio
from _pytest.mark import ParameterSet

from .failpoints import POINTS, ROWS, WITHIN
from .processes import Nursery
from .scenarios import PLAYS, Told, Watchers, ask
from .stage import Stage, Succession
from .sweep import NATS, Case, Sweep, quick_cases, whole_cases

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sweep(request: pytest.FixtureRequest, nursery: Nursery) -> AsyncIterator[Sweep]:
    """The cases that were chosen, at work from the first test on."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    params = [each.params.get("case") for each in chosen if each is not None]
    cases = [each for each in params if isinstance(each, Case)]  # other tests have cases of their own
    nats = request.getfixturevalue("nats_r1") if any(case.store == NATS for case in cases) else None
    sweep = Sweep(nursery, cases, nats)
    yield sweep
    await sweep.close()


def named(cases: Iterable[Case]) -> list[ParameterSet]:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", named(quick_cases()))
async def test_a_run_survives_a_death_at_each_point(sweep: Sweep, case: Case, report: list[str]) -> None:
    """Seq without gap, one end per segment, effects as promised, every client the same events once, one run."""
    report.append(await sweep.outcome(case))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", named(whole_cases()))
async def test_a_run_survives_a_death_at_each_point_with_each_class(
    sweep: Sweep, case: Case, report: list[str]
) -> None:
    """The same with every effect class, later passes of the point, and both ways to have a next server."""
    report.append(await sweep.outcome(case))


TRACE = {"FAILPOINT_TRACE": "1"}
PASSING: list[tuple[str, list[dict[str, str]]]] = [
    ("work", [TRACE]),
    ("cancel", [TRACE]),
    ("cancel_parked", [TRACE]),
    ("drain", [TRACE, {}]),
    ("release", [TRACE]),
    ("calls", [TRACE]),
    *(("work", [{"FAILPOINT": first}, TRACE]) for first in sorted({point.first for point in POINTS} - {""})),
]
"""Every scenario, and every recovery, with a server that writes down what it passes."""


async def test_the_table_has_every_point_that_a_server_passes(nursery: Nursery, folder: Path) -> None:
    """Through every scenario servers pass the points of the table and no other, and leave out none of them."""
    passed: set[str] = set()
    for number, (scenario, environments) in enumerate(PASSING):
        place = folder / str(number)
        place.mkdir()
        stage = Stage(nursery, place)
        play, text, agent = PLAYS[scenario]
        succession = Succession(stage, environments)
        watchers = Watchers(stage, succession)
        try:
            await succession.begin()
            async with stage.client() as client:
                await play(client, Told(ask(text.format(kind="reconcile"), agent)), watchers, succession)
                await watchers.end()
        finally:
            await watchers.close()
            await succession.close()
            await stage.close()
        passed |= set((place / "fired").read_text().split())
    assert passed == {point.name for point in POINTS if not point.store}


async def test_the_table_covers_the_crash_matrix() -> None:
    """Each row of the matrix has its points; the quick sweep takes every point of the table once."""
    assert {point.row for point in POINTS} == set(ROWS)
    quick = list(quick_cases())
    assert list(dict.fromkeys(case.point for case in quick if case.store == "sqlite")) == list(POINTS)
    assert {case.point.row for case in quick if case.store == NATS} == set(ROWS) - {WITHIN}
    assert len({case.name for case in (*quick_cases(), *whole_cases())}) == len([*quick_cases(), *whole_cases()])
