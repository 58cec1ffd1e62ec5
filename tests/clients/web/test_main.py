"""``dualclaw-web`` as a process: settings, the printed address, SIGTERM."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from dualclaw.events import make_delta


@asynccontextmanager
async def gateway_process(**settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the gateway with these settings and no others."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DUALCLAW_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dualclaw_clients.web",
        env={**env, **settings}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def address_of(process: asyncio.subprocess.Process) -> str:
    """Return the address it says it listens on."""
    assert process.stdout is not None
    async with asyncio.timeout(20):
        while line := await process.stdout.readline():
            if found := re.fullmatch(rb"dualclaw-web listening on (http://\S+)\n", line):
                return found[1].decode()
    raise AssertionError("the gateway ended without an address")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_open_streams_at_once_and_the_process_with_0(fake_engine, number):
    """A deploy does not wait for a run's end; the run itself is not cancelled."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    settings = {"DUALCLAW_ENGINE": fake_engine.target, "DUALCLAW_WEB_LISTEN": "127.0.0.1:0"}
    async with gateway_process(**settings) as process:
        url = await address_of(process)
        async with (
            httpx.AsyncClient(base_url=url, timeout=10) as http,
            http.stream("POST", "/v1/runs", json={}) as answer,
        ):
            chunks = answer.aiter_bytes()
            await anext(chunks)
            process.send_signal(number)
            async with asyncio.timeout(3):
                async for _ in chunks:
                    pass
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()
    assert fake_engine.calls_of("Cancel") == []


async def test_wrong_settings_are_all_named_and_exit_with_2():
    """Every problem has its variable's name, so one start is enough to mend them all."""
    settings = {"DUALCLAW_ENGINE": "nowhere", "DUALCLAW_WEB_LISTEN": "8080"}
    async with gateway_process(**settings) as process:
        _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert b"DUALCLAW_ENGINE: must be HOST:PORT" in err
    assert b"DUALCLAW_WEB_LISTEN: must be HOST:PORT" in err


async def test_an_address_in_use_ends_the_process(web):
    """A second gateway at the same address says so instead of running unseen."""
    async with gateway_process(DUALCLAW_WEB_LISTEN=web.url.removeprefix("http://")) as process:
        _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode not in {0, None}
    assert b"address already in use" in err
