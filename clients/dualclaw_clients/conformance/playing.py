"""Playing scenes: which are needed, several at a time, and what stands in for those that cannot be played.

The scene of a crash comes last and alone, because it takes the server from all others. Every other scene has a limit,
so that a server which never answers does not hold the kit for as many time-outs as there are calls.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from dualclaw_clients.conformance.check import Target
from dualclaw_clients.conformance.engine_call_scenes import SCENES as CALL_SCENES
from dualclaw_clients.conformance.engine_probe import EngineProbe
from dualclaw_clients.conformance.engine_scenes import SCENES as RUN_SCENES
from dualclaw_clients.conformance.http_probe import HttpProbe
from dualclaw_clients.conformance.seen import Evidence, Scene
from dualclaw_clients.conformance.stage import BrokeOff, Cast, Stage
from dualclaw_clients.conformance.web_scenes import NATIVE_SCENES, ORIGINAL_SCENES, WebStage

AT_A_TIME: Final = 6
"""Scenes played at a time: most of the time is the server's pauses, and a small one must not be flooded."""
LAST: Final = "crash"
PAUSES: Final = 20.0
"""Seconds the longest scene takes by itself, because a rule has to be waited for."""
CALLS: Final = 3
"""Calls of one scene that may run into the time-out before the scene is broken off."""
SCENES: Final = {**RUN_SCENES, **CALL_SCENES}

_ONLY_FOR: Final[Mapping[str, frozenset[str]]] = {
    "leave-cancel": frozenset({"L2"}),
    "leave": frozenset({"L1"}),
    "crash": frozenset({"K1", "K2", "K3"}),
    "sizes": frozenset({"M3"}),
    "tenants": frozenset({"T1", "T2", "T3"}),
    "keys": frozenset({"E13"}),
    "busy": frozenset({"B1", "B2", "E8", "E12"}),
    "queue": frozenset({"B1"}),
    "silent": frozenset({"H2", "H3", "H4"}),
}
"""Scenes that are not played when none of these checks is asked for; they take time, or harm."""

Played = Callable[[str, int, int], None]
"""Told the name of each scene that is over, how many are, and how many there are."""


def scenes_for(target: Target, ids: Sequence[str]) -> Sequence[str]:
    """Return the scenes that these checks need."""
    scenes: Iterable[str]
    match target:
        case "engine":
            scenes = SCENES
        case "native":
            scenes = NATIVE_SCENES
        case "original":
            scenes = ORIGINAL_SCENES
    return [name for name in scenes if name not in _ONLY_FOR or _ONLY_FOR[name] & set(ids)]


async def play_engine(probe: EngineProbe, cast: Cast, told: Played, wanted: Iterable[str] | None = None) -> Evidence:
    """Play scenes against an engine (None: all) and return what was seen."""
    skipped = {}
    if not cast.key:
        skipped["keys"] = "it needs --key"
    if not cast.other_key:
        skipped["tenants"] = "it needs --other-key"
    if cast.restart is None:
        skipped["crash"] = "it needs --restart"

    async def play(name: str) -> Scene:
        stage = Stage(probe, cast)
        try:
            async with scene_limit(None if name == LAST else probe.timeout):
                await SCENES[name](stage)
        except BrokeOff as error:
            return stage.scene(name, str(error))
        return stage.scene(name)

    chosen = None if wanted is None else set(wanted)
    names = [name for name in SCENES if (chosen is None or name in chosen) and name not in skipped]
    return Evidence(await _play_all(names, play, told), skipped)


async def play_web(
    probe: HttpProbe, agent: str, target: Target, told: Played, wanted: Iterable[str] | None = None
) -> Evidence:
    """Play scenes against a web gateway, by its native or original route."""
    scenes = NATIVE_SCENES if target == "native" else ORIGINAL_SCENES

    async def play(name: str) -> Scene:
        stage = WebStage(probe, agent)
        try:
            async with scene_limit(probe.timeout):
                await scenes[name](stage)
        except (BrokeOff, OSError) as error:  # a connection that cannot be made
            return stage.scene(name, str(error) or type(error).__name__)
        return stage.scene(name)

    chosen = None if wanted is None else set(wanted)
    return Evidence(await _play_all([name for name in scenes if chosen is None or name in chosen], play, told))


@asynccontextmanager
async def scene_limit(timeout: float | None, pauses: float = PAUSES) -> AsyncIterator[None]:
    """Raise BrokeOff in a scene that takes too long; ``timeout``: seconds of one call, None for no limit."""
    seconds = None if timeout is None else pauses + CALLS * timeout
    try:
        async with asyncio.timeout(seconds) as clock:
            yield
    except TimeoutError:
        if clock.expired():
            raise BrokeOff(f"it took more than {seconds:g} s") from None
        raise


async def _play_all(names: Sequence[str], play: Callable[[str], Awaitable[Scene]], told: Played) -> dict[str, Scene]:
    gate = asyncio.Semaphore(AT_A_TIME)
    scenes: dict[str, Scene] = {}

    async def one(name: str) -> None:
        async with gate:
            scenes[name] = await play(name)
        told(name, len(scenes), len(names))

    async with asyncio.TaskGroup() as group:
        for name in names:
            if name != LAST:
                group.create_task(one(name))
    if LAST in names:
        await one(LAST)
    return {name: scenes[name] for name in names}
