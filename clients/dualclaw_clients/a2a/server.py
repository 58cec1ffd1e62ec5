"""One A2A claw that serves: both ports, opened before anything is promised, and drained in order.

Draining: health checks fail first, so that nobody is sent here any more; streams end, each saying that its task goes
on; other calls get the grace time; then both ports close.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn

from dualclaw_clients.a2a.card import Addresses
from dualclaw_clients.a2a.grpc_port import GrpcPort
from dualclaw_clients.a2a.http import Cards, http_app
from dualclaw_clients.a2a.settings import A2aSettings, host_of, is_loopback
from dualclaw_clients.a2a.tasks import EngineTasks
from dualclaw_clients.command_line import installed_version
from dualclaw_clients.http_heads import HEAD_TIMEOUT, TimedH11

LOG = logging.getLogger(__name__)


class ListenError(Exception):
    """An address cannot be listened on."""


@dataclass(frozen=True, slots=True)
class Claw:
    """A claw that serves."""

    addresses: Addresses
    """Where it listens itself, whatever its card says."""
    tasks: EngineTasks


class _HttpServer(uvicorn.Server):
    """An HTTP server that leaves signals to the program around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no signals."""
        yield


@asynccontextmanager
async def open_claw(settings: A2aSettings, *, head_timeout: float = HEAD_TIMEOUT) -> AsyncIterator[Claw]:
    """Serve until the block is left, then drain.

    ``head_timeout`` is how many seconds an HTTP connection may take to bring the head of a request.

    Raises:
        SettingsError: the card would name addresses that nobody can call.
        ListenError: an address cannot be listened on.
    """
    settings.check_service()
    version, hosts = installed_version(), [host_of(settings.a2a_listen), host_of(settings.a2a_grpc_listen)]
    if not all(map(is_loopback, hosts)):
        LOG.warning(
            "other machines can reach this claw without encryption: put a proxy with TLS before it, and give the "
            "engine a DUALCLAW_KEYS_FILE"
        )
    with contextlib.closing(_listen(settings.a2a_listen)) as listening:
        grpc = GrpcPort(max_body=settings.a2a_max_body)
        port = grpc.bind(settings.a2a_grpc_listen)
        if not port:
            raise ListenError(f"cannot listen on {settings.a2a_grpc_listen} (DUALCLAW_A2A_GRPC_LISTEN)")
        here = Addresses(
            json_rpc=f"http://{_with_port(settings.a2a_listen, listening.getsockname()[1])}/",
            grpc=_with_port(settings.a2a_grpc_listen, port),
        )
        told = Addresses(json_rpc=settings.a2a_url or here.json_rpc, grpc=settings.a2a_grpc_url or here.grpc)
        # Callers bring their keys; one of the claw's own could only ever be lent to somebody.
        async with settings.connect(own_key=False) as engine:
            agent = settings.a2a_agent
            tasks = EngineTasks(engine, told, version, agent=agent, max_streams=settings.a2a_max_streams)
            key = settings.api_key.get_secret_value()
            cards = Cards(engine, told, version, agent=agent, key=key)
            app = http_app(tasks, cards, max_body=settings.a2a_max_body, loopback=is_loopback(hosts[0]))
            http = _http_server(app, settings.a2a_grace, head_timeout)
            await grpc.serve(tasks)
            serving = asyncio.create_task(http.serve(sockets=[listening]))
            try:
                yield Claw(here, tasks)
            finally:
                await grpc.leave()
                await tasks.close_streams()
                http.should_exit = True
                await asyncio.gather(serving, grpc.stop(settings.a2a_grace))


def _http_server(app: object, grace: float, head_timeout: float) -> _HttpServer:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application; the library's type is its own
        http=TimedH11.within(head_timeout),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(grace)),
    )
    return _HttpServer(config)


def _listen(address: str) -> socket.socket:
    host, port = host_of(address), int(address.rpartition(":")[2])
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ListenError(f"cannot listen on {address} (DUALCLAW_A2A_LISTEN): {problem}") from None


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
