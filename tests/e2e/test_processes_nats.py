"""Engines of several processes on a cluster of NATS servers: what a reader sees when a process, or a server, dies."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient
from dualclaw_server.stores.nats import parse_address
from tests.nats_servers import NatsServers

from .conftest import Launcher
from .effects import effects, hold, let_go, settings_of
from .test_one_run_everywhere import request
from .test_processes import PATIENCE, Watch, begun, events_of, until

Connect = Callable[[str], EngineClient]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServers]:
    """Three servers of this module's own, for one is killed."""
    servers = NatsServers(tmp_path_factory.mktemp("nats-e2e"), 3)
    yield servers
    servers.stop()


@pytest.fixture
def settings(cluster: NatsServers, tmp_path: Path) -> Iterator[Callable[..., dict[str, str]]]:
    """Settings of an engine on a store of this test's own, with a short lease."""
    url = cluster.url(sync="always", lease=3, patience=PATIENCE)
    yield lambda **more: settings_of(tmp_path, **{"DUALCLAW_STORE": url, **more})
    cluster.remove(parse_address(url).name)


async def test_a_run_outlives_its_process_and_a_server(
    launch: Launcher, connect: Connect, settings: Callable[..., dict[str, str]], cluster: NatsServers, tmp_path: Path
) -> None:
    """Its reader hangs on another process: it sees each event once, the tool that may run once is begun once."""
    first = launch("dualclaw_server", **settings())
    second = launch("dualclaw_server", **settings(DUALCLAW_ROLE="api"))
    hold(tmp_path)
    watch = Watch(connect(second.address).run(request("once")))
    await until(lambda: begun(tmp_path, "once"))
    await until(lambda: watch.events)
    first.kill()
    let_go(tmp_path)
    await asyncio.to_thread(cluster.kill, await asyncio.to_thread(cluster.leader, _name(settings)))
    launch("dualclaw_server", **settings(DUALCLAW_ROLE="worker"))
    events = await watch.done()
    assert len(begun(tmp_path, "once")) == 1
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert check_stream(events) == []
    again = await events_of(connect(second.address).attach(events[0].run_id))
    assert [event.SerializeToString() for event in again] == [event.SerializeToString() for event in events]
    assert {effect.what for effect in effects(tmp_path)} <= {"begin", "end"}


def _name(settings: Callable[..., dict[str, str]]) -> str:
    return parse_address(settings()["DUALCLAW_STORE"]).name


async def test_servers_that_could_lose_runs_are_refused_at_the_start(
    launch: Launcher, cluster: NatsServers, tmp_path: Path
) -> None:
    """The process ends and says what to do, instead of running with less than was promised."""
    with pytest.raises(AssertionError, match=r"sync_interval: always"):
        await asyncio.wait_for(
            asyncio.to_thread(launch, "dualclaw_server", **settings_of(tmp_path, DUALCLAW_STORE=cluster.url())),
            PATIENCE,
        )
