"""When frames begin: by themselves in a quiet process, together in a busy one."""

import asyncio
from collections.abc import Callable
from itertools import groupby

from dualclaw_server.engine.pace import BUSY, TICK, Pace

from .conftest import until


async def busy() -> Pace:
    """A pace that has seen more frames than BUSY."""
    pace = Pace()
    await asyncio.sleep(0.11)
    for _ in range(int(BUSY * 100)):  # so many that it was busy however long the pause took
        pace.count()
    return pace


async def test_in_a_quiet_process_a_frame_begins_when_it_is_due() -> None:
    """What is due begins in this very turn of the loop, whoever else waits; what is due later, then."""
    loop = asyncio.get_running_loop()
    pace = Pace()
    begun: list[str] = []
    pace.begin_at(loop.time() + 0.05, lambda: begun.append("later"))
    pace.begin_at(loop.time() - 1, lambda: begun.append("now"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun == ["now"]
    await until(lambda: len(begun) == 2)


async def test_in_a_busy_process_frames_begin_together() -> None:
    """However they fall due, frames of one tick begin in one turn of the loop, and none before it is due."""
    loop = asyncio.get_running_loop()
    pace = await busy()
    begun: list[tuple[int, float, float]] = []
    turns = 0

    def note(due: float) -> Callable[[], None]:
        return lambda: begun.append((turns, due, loop.time()))

    start = loop.time()
    for number in range(100):
        due = start + number * TICK / 50  # over two ticks and a bit
        pace.begin_at(due, note(due))
    async with asyncio.timeout(60):
        while len(begun) < 100:
            turns += 1
            await asyncio.sleep(0)
    together = [len(list(group)) for _, group in groupby(begun, key=lambda one: one[0])]
    assert len(together) <= 4
    assert all(at >= due - 0.002 for _, due, at in begun)  # the clock of the loop counts milliseconds


async def test_a_place_that_is_given_up_begins_nothing_and_a_failing_frame_fails_alone() -> None:
    """A run that ends before the tick has no frame in it; one whose frame fails takes no other with it."""
    loop = asyncio.get_running_loop()
    failures: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    pace = await busy()
    begun: list[str] = []
    pace.begin_at(0, lambda: begun.append("given up")).cancel()
    pace.begin_at(0, lambda: begun.append(str(1 // 0)))
    pace.begin_at(0, lambda: begun.append("fine"))
    await until(lambda: begun == ["fine"])
    assert [type(failure["exception"]) for failure in failures] == [ZeroDivisionError]


async def test_a_process_calms_down() -> None:
    """Once few frames begin, each begins by itself again."""
    loop = asyncio.get_running_loop()
    pace = await busy()
    begun: list[str] = []
    pace.begin_at(0, lambda: begun.append("together"))
    await asyncio.sleep(0)
    assert not begun
    await until(lambda: begun == ["together"])
    await asyncio.sleep(0.25)
    pace.begin_at(loop.time(), lambda: begun.append("alone"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun == ["together", "alone"]
