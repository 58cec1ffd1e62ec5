"""The cases of the kill sweep, and how one is played: a few at a time, since most of a case is waiting."""

import asyncio
import itertools
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dualclaw_server.engine.tool import Effect as EffectName
from tests.nats_servers import NatsServers

from .failing_parts import KINDS
from .failpoints import POINTS, STARTED, Point
from .judging import check_end, check_file, judge
from .processes import Nursery
from .scenarios import PLAYS, Told, Watchers, ask
from .stage import Stage, Succession

AT_ONCE = 4
LATE = 0.03
NATS = "nats-r1"


@dataclass(frozen=True, slots=True)
class Case:
    """One death."""

    point: Point
    count: int
    kind: EffectName
    standby: bool
    """Whether the next server is there already, or is started after the death."""
    store: str = "sqlite"

    @property
    def name(self) -> str:
        """Unique and readable."""
        after = f"after.{self.point.first.replace(':', '.')}-" if self.point.first else ""
        mode = "standby" if self.standby else "restart"
        return f"{self.store}-{after}{self.point.name.replace(':', '.')}-{self.count}-{self.kind}-{mode}"

    @property
    def doubt(self) -> bool:
        """True when it is the effect class that decides."""
        return self.point.doubt or self.count >= self.point.unsaved_from


def _once_each(store: str) -> Iterator[Case]:
    """Every point once; classes and modes take turns, so that each meets points of every sort. Where the class decides
    the strictest one is there in any case.
    """
    for number, point in enumerate(POINTS):
        if point.store not in ("", store):
            continue
        turn: EffectName = "reconcile" if point.name.startswith("lookup") else KINDS[number * 3 % len(KINDS)]
        kinds = {"once": None, turn: None} if point.row == STARTED else {turn: None}
        for kind in kinds:
            yield Case(point, point.counts[0], kind, number % 2 == 1, store)


def quick_cases() -> Iterator[Case]:
    """Every point once on SQLite; on NATS, where each case waits for a lease to end, one of each row."""
    yield from _once_each("sqlite")
    rows: set[str] = set()
    for case in _once_each(NATS):
        if case.point.row not in rows:
            rows.add(case.point.row)
            yield case


def whole_cases() -> Iterator[Case]:
    """The rest: on SQLite every point with every count, effect class and mode, on NATS every point once and those
    where the class decides with every class.
    """
    quick = set(quick_cases())
    yield from (case for case in dict.fromkeys([*_every_sqlite(), *_every_nats()]) if case not in quick)


def _every_sqlite() -> Iterator[Case]:
    for point in POINTS:
        kinds = ("reconcile",) if point.name.startswith("lookup") else KINDS if point.scenario == "work" else KINDS[:1]
        for count, kind, standby in itertools.product(point.counts, kinds, (False, True)):
            yield Case(point, count, kind, standby)


def _every_nats() -> Iterator[Case]:
    for case in _once_each(NATS):
        for kind in KINDS if case.point.row == STARTED else (case.kind,):
            yield replace(case, kind=kind)


class Sweep:
    """Plays cases in the background.

    Args:
        nursery: where servers come from.
        cases: all that will be asked for.
        nats: where the cases on NATS have their streams; None: there are none.
    """

    def __init__(self, nursery: Nursery, cases: Sequence[Case], nats: NatsServers | None) -> None:
        self._nursery = nursery
        self._nats = nats
        self._room = asyncio.Semaphore(AT_ONCE)
        self._played = {case: asyncio.create_task(self._play(case), name=case.name) for case in cases}

    async def outcome(self, case: Case) -> str:
        """Return the row of a case; raises what was wrong with it."""
        return await self._played[case]

    async def close(self) -> None:
        """Leave out what nobody waits for any more."""
        for task in self._played.values():
            task.cancel()
        if self._played:
            await asyncio.wait(self._played.values())

    async def _play(self, case: Case) -> str:
        async with self._room:
            folder = Path(tempfile.mkdtemp(prefix="claw-", dir="/tmp"))  # a socket's name must be short
            name = f"T{folder.name[5:]}"
            stage = Stage(self._nursery, folder, self._nats.url(name) if self._nats and case.store == NATS else "")
            try:
                return await die_at(stage, case)
            except BaseException as error:
                error.add_note(f"{case.name}; its servers wrote last:\n{stage.log()}")
                raise
            finally:
                await stage.close()
                shutil.rmtree(folder)
                if self._nats and case.store == NATS:
                    await asyncio.to_thread(self._nats.remove, name)


async def die_at(stage: Stage, case: Case) -> str:
    """Play a case to its end and judge it; returns its row of the table."""
    point = case.point
    play, text, agent = PLAYS[point.scenario]
    failpoints = [*filter(None, [point.first]), f"{point.name}:{case.count}"]
    # Nothing may run before its start is saved; and whoever takes a run from one that lives meets its late appends.
    late = {"CHAOS_DELAY": str(LATE)} if point.row == STARTED or point.scenario == "release" else {}
    environments = [*({"FAILPOINT": failpoint, **late} for failpoint in failpoints), late]
    succession = Succession(stage, environments, standby=case.standby)
    told = Told(ask(text.format(kind=case.kind), agent))
    try:
        await succession.begin()
        watchers = Watchers(stage, succession)
        async with stage.client() as client:
            try:
                await play(client, told, watchers, succession)
                told.watched = await watchers.end()
            finally:
                await watchers.close()
            try:
                ends = await succession.over()
            except TimeoutError:
                raise AssertionError(f"{case.name} did not fire; {stage.fired()} did") from None
            assert ends == [-signal.SIGKILL] * len(failpoints)
            fired = stage.fired()
            assert fired == [each.rpartition(":")[0] for each in failpoints]
            effects = stage.ledger.effects()
            takeovers = len(failpoints) + (point.scenario == "release")
            verdict = await judge(client, told, case.kind, effects, takeovers=takeovers, doubt=case.doubt)
            log = [*told.first, *told.second]
            check_end(log, (await client.get_run(told.run_id)).state, point.scenario, told.request)
    finally:
        await succession.close()
    await stage.close()
    check_file(stage.folder / "runs.db")
    seen = f"{verdict.effects or '-':11} {verdict.rewinds} rewound"
    return f"{case.name:64} {seen}  {verdict.outcome:40} {point.row}"
