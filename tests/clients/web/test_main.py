"""``dualclaw-web`` as a process: options, settings, the printed address, SIGTERM."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from dualclaw.events import make_delta
from dualclaw_clients.engine_client import EngineClient
from dualclaw_clients.settings import WebSettings, variables_of
from dualclaw_clients.web.__main__ import Gateway
from dualclaw_clients.web.app import WebApp
from dualclaw_clients.web.listen import ListenError, open_sockets


@asynccontextmanager
async def gateway_process(*args: str, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the gateway with these arguments and settings and no others."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DUALCLAW_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dualclaw_clients.web", *args,
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
    async with asyncio.timeout(100):
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
            httpx.AsyncClient(base_url=url, timeout=60) as http,
            http.stream("POST", "/v1/runs", json={}) as answer,
        ):
            chunks = answer.aiter_bytes()
            await anext(chunks)
            process.send_signal(number)
            async with asyncio.timeout(60):
                async for _ in chunks:
                    pass
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()
    assert fake_engine.calls_of("Cancel") == []


async def test_wrong_settings_are_all_named_and_exit_with_2():
    """Every problem has its variable's name, so one start is enough to mend them all."""
    settings = {"DUALCLAW_ENGINE": "nowhere", "DUALCLAW_WEB_LISTEN": "8080"}
    async with gateway_process(**settings) as process:
        _, err = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 2
    assert b"DUALCLAW_ENGINE: must be HOST:PORT" in err
    assert b"DUALCLAW_WEB_LISTEN: must be HOST:PORT" in err


async def test_an_address_in_use_ends_the_process_with_one_line(web):
    """A second gateway at the same address says what is in use and where it was set, and nothing else."""
    address = web.url.removeprefix("http://")
    async with gateway_process(DUALCLAW_WEB_LISTEN=address) as process:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    assert (process.returncode, out) == (1, b"")
    assert err.decode() == f"dualclaw-web: cannot listen on {address} (DUALCLAW_WEB_LISTEN): it is in use\n"


@pytest.mark.parametrize(
    ("address", "problem"),
    [("203.0.113.7:0", "it is not an address of this machine"), ("no-such-host.invalid:0", "the host is not known")],
)
async def test_an_address_that_is_not_here_is_told_apart_from_one_in_use(address, problem):
    """Whoever mistyped the host is not sent to look for another program."""
    with pytest.raises(ListenError, match=problem):
        await open_sockets(address.rpartition(":")[0], 0)


async def test_localhost_is_listened_on_by_every_address_it_has():
    """A browser may take either of localhost's addresses first; where there is no IPv6 the other one will do."""
    sockets = await open_sockets("localhost", 0)
    try:
        assert ("127.0.0.1", socket.AF_INET) in {(s.getsockname()[0], s.family) for s in sockets}
    finally:
        for each in sockets:
            each.close()


async def test_help_names_the_options_and_every_variable_that_matters():
    """One look says what can be set; the key is not among it, because callers bring theirs."""
    async with gateway_process("--help") as process:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    text = out.decode()
    assert (process.returncode, err) == (0, b"")
    for name in ["--listen", "--engine", "--version", *variables_of(WebSettings)]:
        assert name in text, name
    assert "\n  DUALCLAW_API_KEY " not in text
    assert "DUALCLAW_API_KEY is not used" in text
    assert all(field.description for field in WebSettings.model_fields.values())


async def test_version_is_told_and_nothing_is_started():
    """A script that asks for the version gets one line and exit code 0."""
    async with gateway_process("--version") as process:
        out, _ = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0
    assert re.fullmatch(rb"dualclaw-web \S+\n", out)


@pytest.mark.parametrize("args", [("--listen", "8080"), ("--engine", "http://x"), ("surplus",)])
async def test_wrong_arguments_exit_with_2(args):
    """A typing error starts nothing."""
    async with gateway_process(*args) as process:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    assert (process.returncode, out) == (2, b"")
    assert b"dualclaw-web: error: " in err


async def test_options_win_over_the_variables_they_name(fake_engine):
    """It listens and asks where the command line says, even if a variable holds nonsense."""
    settings = {"DUALCLAW_ENGINE": "nonsense", "DUALCLAW_WEB_LISTEN": "nonsense"}
    options = ("--listen", "127.0.0.1:0", "--engine", fake_engine.target)
    async with gateway_process(*options, **settings) as process, httpx.AsyncClient(timeout=60) as http:
        url = await address_of(process)
        assert (await http.get(f"{url}/v1/agents")).status_code == 200
    assert len(fake_engine.calls_of("ListAgents")) == 1


async def test_a_key_in_its_environment_is_never_lent_to_a_caller(fake_engine):
    """Whoever brings no key reaches the engine without one, also when the gateway could find one."""
    settings = {"DUALCLAW_ENGINE": fake_engine.target, "DUALCLAW_API_KEY": "the-gateways-own"}
    async with gateway_process("--listen", "127.0.0.1:0", **settings) as process, httpx.AsyncClient(timeout=60) as http:
        url = await address_of(process)
        await http.get(f"{url}/v1/agents")
        await http.get(f"{url}/v1/agents", headers={"Authorization": "Bearer mine"})
    assert [call.metadata.get("authorization") for call in fake_engine.calls] == [None, "Bearer mine"]


@pytest.mark.parametrize(("listen", "warned"), [("0.0.0.0:0", True), ("127.0.0.1:0", False)])
async def test_listening_beyond_loopback_is_warned_of(listen, warned):
    """It is allowed, because a container must do it, but never silent."""
    async with gateway_process("--listen", listen) as process:
        await address_of(process)
        process.terminate()
        _, err = await asyncio.wait_for(process.communicate(), 100)
    assert (b"can be reached from other machines" in err) is warned
    assert process.returncode == 0


async def test_a_signal_before_the_server_is_ready_is_not_lost(fake_engine):
    """A gateway told to end while it starts ends, and does not stay until somebody kills it."""
    async with EngineClient(fake_engine.target) as engine:
        gateway = Gateway(WebApp(engine), "127.0.0.1", 0, [signal.SIGTERM])
        await asyncio.wait_for(gateway.serve(), 60)
