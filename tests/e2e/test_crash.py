"""kill -9 of the engine: the run goes on, and no client sees an event twice or misses one."""

import asyncio
from collections.abc import Callable

import pytest

from dualclaw import EngineEvent, RunState
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient

from .conftest import Launcher
from .test_one_run_everywhere import request

pytestmark = pytest.mark.timeout(300)

TEXT = "字 and word, " * 40
SLOW: dict[str, object] = {"say": [{"text": TEXT, "chunk": 2, "delay": 0.01}]}
HALF: dict[str, object] = {"say": [{"text": TEXT[:200], "chunk": 2, "delay": 0.01}, {"hang": True}]}
"""What is to be ended in mid-answer plays this: it can come to no end before."""
PATIENCE = 100


async def test_a_killed_engine_finishes_its_run_after_a_restart(
    launch: Launcher, write_script: Callable[..., str], connect: Callable[[str], EngineClient]
) -> None:
    """Killed in mid-answer and started again: seq 1..n without gap or repeat, one rewind, one end, whole text."""
    settings = {"DUALCLAW_STORE": "sqlite:crash.db", "DUALCLAW_MODEL": write_script(HALF)}
    engine = launch("dualclaw_server", DUALCLAW_LISTEN="127.0.0.1:0", **settings)
    client = connect(engine.address)
    before: list[EngineEvent] = []
    watched: list[EngineEvent] = []
    half = asyncio.Event()

    async def watch() -> None:
        """A client that knows nothing of the crash: its stream comes back by itself."""
        async with client.run(request("go")) as stream:
            async for event in stream:
                watched.append(event)
                if event.WhichOneof("payload") == "delta":
                    half.set()

    watching = asyncio.create_task(watch())
    await asyncio.wait_for(half.wait(), PATIENCE)
    engine.kill()
    before += watched
    write_script(SLOW)
    again = launch("dualclaw_server", DUALCLAW_LISTEN=engine.address, **settings)
    await asyncio.wait_for(watching, PATIENCE)
    assert [event.seq for event in watched] == list(range(1, len(watched) + 1))
    assert watched[: len(before)] == before
    assert check_stream(watched) == []
    payloads = [event.WhichOneof("payload") for event in watched]
    assert payloads.count("rewind") == 1
    assert watched[-1].done.content == TEXT
    for after in (0, 5, len(watched) - 1):
        async with connect(again.address).attach(watched[0].run_id, after_seq=after) as stream:
            assert [event async for event in stream] == watched[after:]
    run = await connect(again.address).get_run(watched[0].run_id)
    assert run.state == RunState.RUN_STATE_SUCCEEDED


async def test_a_stopped_engine_hands_its_run_over(
    launch: Launcher, write_script: Callable[..., str], connect: Callable[[str], EngineClient]
) -> None:
    """SIGTERM with no grace time: exit code 0, and the next process finishes the run."""
    settings = {"DUALCLAW_STORE": "sqlite:stop.db", "DUALCLAW_MODEL": write_script(HALF), "DUALCLAW_GRACE": "0"}
    engine = launch("dualclaw_server", DUALCLAW_LISTEN="127.0.0.1:0", **settings)
    client = connect(engine.address)
    async with client.run(request("go")) as stream:
        first = await anext(aiter(stream))
        assert await asyncio.to_thread(engine.stop) == 0
        write_script(SLOW)
        launch("dualclaw_server", DUALCLAW_LISTEN=engine.address, **settings)
        rest = [event async for event in stream]
    assert check_stream([first, *rest]) == []
    assert rest[-1].done.content == TEXT
