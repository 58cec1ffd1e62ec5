"""SIGTERM ends the engine, whatever tools do."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from dualclaw_clients.engine_client import EngineClient

from .conftest import Launcher
from .test_one_run_everywhere import request

AGENT = """
import asyncio
from pathlib import Path

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.tool import tool


@tool
async def stubborn() -> str:
    \"\"\"Never end.\"\"\"
    Path("begun").touch()
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


AGENT = Agent("stubborn", tools=[stubborn])
"""


async def test_a_tool_that_ignores_its_cancellation_does_not_keep_the_process(
    launch: Launcher, write_script: Callable[..., str], connect: Callable[[str], EngineClient], tmp_path: Path
) -> None:
    """The engine drains, leaves such a tool behind, says so in its log, and exits with 0."""
    (tmp_path / "stubborn_agents.py").write_text(AGENT)
    engine = launch(
        "dualclaw_server",
        DUALCLAW_LISTEN="127.0.0.1:0",
        DUALCLAW_STORE="sqlite:stubborn.db",
        DUALCLAW_AGENTS="stubborn_agents:AGENT",
        DUALCLAW_MODEL=write_script({"say": [{"call": "stubborn"}]}),
        DUALCLAW_GRACE="0",
    )
    begun = tmp_path / "begun"
    async with connect(engine.address).run(request("go")) as stream:
        async with asyncio.timeout(100):
            await anext(aiter(stream))
            while not begun.exists():  # noqa: ASYNC110  # a file tells of no change
                await asyncio.sleep(0.02)
        assert await asyncio.to_thread(engine.stop) == 0  # it waits a minute for the end
    assert "ignores its cancellation" in engine.logged()
