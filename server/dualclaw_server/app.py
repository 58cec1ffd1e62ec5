"""All wiring of the engine: from settings to a server that runs, and back to nothing at work.

Order of a drain, so that nobody loses more than a connection: health says NOT_SERVING and new runs are
refused; runs at work get the grace time and are handed over after it; streams send what is committed and
end; calls and their cleanup are waited for (``grpc.aio.Server.stop`` does not); then the server, the
store and the exporter are closed. A second signal does what signals do by default: it ends the process.
"""

import asyncio
import contextlib
import errno
import importlib
import logging
import signal
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from opentelemetry import metrics, trace

from dualclaw.rpc import (
    AGENT_SERVICE,
    CONVERSATION_SERVICE,
    ENGINE_SERVICE,
    add_agent_service,
    add_conversation_service,
    add_engine_service,
)
from dualclaw_server import models, stores
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.runner import Runner
from dualclaw_server.engine.store import RunStore, StoreError
from dualclaw_server.servicers.access import Access, KeysFileError, anonymous_access, read_keys
from dualclaw_server.servicers.agents import AgentServicer
from dualclaw_server.servicers.calls import Calls
from dualclaw_server.servicers.conversations import ConversationServicer
from dualclaw_server.servicers.engine import EngineServicer
from dualclaw_server.servicers.logs import Redactor
from dualclaw_server.servicers.runs import Runs
from dualclaw_server.servicers.streams import PATIENCE, Streams
from dualclaw_server.servicers.telemetry import exporting_meters, exporting_provider, tracing_interceptor
from dualclaw_server.settings import Settings, SettingsError, is_loopback, split_address
from dualclaw_server.tools import assistant

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

SERVICES: Final = (ENGINE_SERVICE, CONVERSATION_SERVICE, AGENT_SERVICE)
MIN_PING_INTERVAL: Final = 10.0
"""Seconds between pings that a client may send without being thrown out; clients of this project send every 30 s."""
LINGER: Final = 5.0
"""Seconds that calls get to end once the runs are done."""

_TELLING: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
"""Why an address cannot be had; in other trouble, as without IPv6, gRPC may know a way."""

_log = logging.getLogger(__name__)


class StartError(Exception):
    """The server cannot start, though its settings are right; the text says why in one line."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of; whoever made them closes them, see ``engine_server``."""

    store: RunStore
    model: ChatModel
    agents: Sequence[Agent]
    access: Access
    provider: "TracerProvider | None" = None
    """Where spans go; None: no spans are made."""
    meters: "MeterProvider | None" = None
    """Where metrics go; None: nothing is counted."""


def make_parts(settings: Settings) -> Parts:
    """Make everything the settings name; nothing is opened yet.

    Raises:
        SettingsError: with every fault there is.
    """
    parts, problems = _try_parts(settings)
    if parts is None:
        raise SettingsError(problems)
    if settings.otlp_endpoint:
        parts = replace(parts, provider=exporting_provider(settings.service_name))
    if settings.otlp_metrics_endpoint:
        parts = replace(parts, meters=exporting_meters(settings.service_name))
    return parts


def part_problems(settings: Settings) -> list[str]:
    """Return every fault that ``make_parts`` would find, and keep nothing it would make."""
    return _try_parts(settings)[1]


def _try_parts(settings: Settings) -> tuple[Parts | None, list[str]]:
    problems: list[str] = []
    access, store, model = Access(), None, None
    agents: Sequence[Agent] = ()
    try:
        access = access_of(settings)
    except KeysFileError as error:
        problems += [f"DUALCLAW_KEYS_FILE: {problem}" for problem in error.problems]
    try:
        store = stores.store_from_url(settings.store)
    except ValueError as error:
        problems.append(f"DUALCLAW_STORE: {error}")
    try:
        model = models.model_from_spec(
            settings.model,
            base_url=settings.model_base_url,
            api_key=settings.model_api_key.get_secret_value(),
            environment=settings.keys_for_model,
            timeouts=models.ModelTimeouts(
                connect=settings.model_timeout_connect,
                first_token=settings.model_timeout_first_token,
                idle=settings.model_timeout_idle,
                whole=settings.model_timeout_whole,
            ),
            headers=settings.headers_for_model,
            context_window=settings.model_context_window,
            observe=models.RouteMetrics(),
        )
    except (ValueError, OSError) as error:
        problems.append(f"DUALCLAW_MODEL: {error}")
    try:
        agents = load_agents(settings.agents) if settings.agents else (assistant.AGENT,)
    except ValueError as error:
        problems.append(f"DUALCLAW_AGENTS: {error}")
    if problems or store is None or model is None:
        return None, problems
    return Parts(store, model, agents, access), []


def access_of(settings: Settings) -> Access:
    """Return who may call. Raises KeysFileError."""
    if settings.keys_file is not None:
        return read_keys(settings.keys_file)
    return anonymous_access(loopback=is_loopback(settings.listen))


def load_agents(reference: str) -> Sequence[Agent]:
    """Return the agents at ``MODULE:ATTRIBUTE``: an Agent, a sequence of them, or a function that returns either.

    Raises:
        ValueError: saying what is wrong and, for an error inside the module, where.
    """
    name, _, path = reference.partition(":")
    try:
        found: object = importlib.import_module(name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
        if callable(found) and not isinstance(found, Agent):
            found = found()
    except Exception as error:
        raise ValueError(f"{reference}: {type(error).__name__}: {error}{_place(error)}") from error
    agents = [found] if isinstance(found, Agent) else found
    if not isinstance(agents, Sequence) or not agents or not all(isinstance(agent, Agent) for agent in agents):
        raise ValueError(f"{reference}: must be an Agent, a sequence of them, or a function that returns either")
    return tuple(agents)


def _place(error: Exception) -> str:
    """Return where in somebody's module an error was raised; empty when it was the import itself."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<frozen ")
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


class Engine(Runs, Protocol):
    """What a server runs: the engine as the rpcs see it, and its worker. Implemented by ``Runner``."""

    async def serve(self) -> None:
        """Work on runs until drained or cancelled."""

    async def drain(self, grace: float) -> None:
        """Take no more work; give runs ``grace`` seconds to end, then hand over the rest."""


class EngineServer:
    """A gRPC server around an engine.

    Args:
        settings: where to listen, TLS and limits.
        engine: what answers; its store is open.
        access: who may call.
        redactor: masks secrets in error texts.
        provider: where spans go; None: no spans are made.
        patience: seconds a client may take for one message.
        min_ping_interval: seconds between pings that a client may send.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        access: Access,
        *,
        redactor: Redactor | None = None,
        provider: "TracerProvider | None" = None,
        patience: float = PATIENCE,
        min_ping_interval: float = MIN_PING_INTERVAL,
    ) -> None:
        self.engine = engine
        self.address = ""
        """Where it listens, once started."""
        self._settings = settings
        self._calls = Calls(access, redactor or Redactor())
        self._streams = Streams(engine.store, patience=patience)
        self._health = health_aio.HealthServicer()
        self._worker: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            interceptors=[tracing_interceptor(provider)] if provider else [],
            options=_options(settings, min_ping_interval),
        )
        add_engine_service(EngineServicer(engine, self._calls, self._streams), self._server)
        add_conversation_service(ConversationServicer(engine.store, self._calls), self._server)
        add_agent_service(AgentServicer(engine, self._calls), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server)

    @property
    def open_calls(self) -> int:
        """Number of calls at work, their cleanup included."""
        return self._calls.open

    async def start(self) -> None:
        """Listen, begin to work on runs and report SERVING. Raises StartError when the address cannot be had."""
        listen = self._settings.listen
        await _check_free(listen)
        try:
            credentials = _credentials(self._settings)
            if credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError:
            raise StartError(f"cannot listen on {listen}: it is in use, or not an address of this machine") from None
        host, _ = split_address(listen)
        self.address = host if host.startswith("unix:") else f"{host}:{port}"
        await self._server.start()
        self._worker = asyncio.create_task(self.engine.serve(), name="worker")
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def worker_ended(self) -> None:
        """Wait until the worker ends; raises what it ended with."""
        if self._worker is not None:
            await asyncio.shield(self._worker)

    async def drain(self, grace: float) -> None:
        """Take no more work, let runs end for ``grace`` seconds, hand over the rest, end every call."""
        await self._health.enter_graceful_shutdown()
        await self.engine.drain(grace)
        self._streams.end()
        if not await self._calls.idle(LINGER):
            _log.warning("%d calls did not end in %g s and are cut off", self._calls.open, LINGER)
        await self._server.stop(0)
        await self._calls.idle(LINGER)
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker}, timeout=LINGER)
            if self._worker.done() and not self._worker.cancelled() and self._worker.exception() is not None:
                _log.error("the worker failed", exc_info=self._worker.exception())


@contextlib.asynccontextmanager
async def engine_server(
    settings: Settings,
    parts: Parts,
    *,
    redactor: Redactor | None = None,
    patience: float = PATIENCE,
    min_ping_interval: float = MIN_PING_INTERVAL,
) -> AsyncIterator[EngineServer]:
    """Run a server while the context lasts, then drain it and close its parts.

    Raises:
        StartError: the store cannot be opened, or the address not be had.
    """
    async with contextlib.AsyncExitStack() as stack:
        if parts.provider is not None:
            stack.push_async_callback(asyncio.to_thread, parts.provider.shutdown)
        if parts.meters is not None:
            stack.push_async_callback(asyncio.to_thread, parts.meters.shutdown)
        stack.push_async_callback(parts.model.aclose)
        shared = {id(item): item for agent in parts.agents for item in agent.every_interceptor}
        for interceptor in shared.values():
            stack.push_async_callback(interceptor.aclose)
        try:
            await parts.store.open()
        except (StoreError, OSError) as error:
            raise StartError(f"cannot open the store {settings.store}: {error or type(error).__name__}") from error
        stack.push_async_callback(parts.store.close)
        server = EngineServer(
            settings,
            Runner(parts.store, parts.agents, model=parts.model),
            parts.access,
            redactor=redactor,
            provider=parts.provider,
            patience=patience,
            min_ping_interval=min_ping_interval,
        )
        stack.push_async_callback(server.drain, settings.grace)
        await server.start()
        yield server


async def serve(settings: Settings, parts: Parts, redactor: Redactor, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. ``announce`` is told the address once calls are answered.

    Raises:
        StartError: it cannot start.
        Exception: what ended the worker, should it fail.
    """
    if parts.provider is not None:
        trace.set_tracer_provider(parts.provider)
    if parts.meters is not None:
        metrics.set_meter_provider(parts.meters)
    stopped = asyncio.Event()
    with _signals(stopped.set):
        async with engine_server(settings, parts, redactor=redactor) as server:
            announce(server.address)
            _log.info("serving on %s with store %s and model %s", server.address, settings.store, settings.model)
            waiting = asyncio.create_task(stopped.wait(), name="stop signal")
            working = asyncio.create_task(server.worker_ended(), name="worker watch")
            try:
                await asyncio.wait({waiting, working}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    await working
                    raise RuntimeError("the worker ended, though nobody asked it to")
            finally:
                waiting.cancel()
                working.cancel()
            _log.info("draining for at most %g s", settings.grace)
    _log.info("stopped")


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    def first() -> None:
        restore()  # so that a second signal ends the process at once, whatever the loop is doing
        stop()

    for number in numbers:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        restore()


async def _check_free(listen: str) -> None:
    """Try to have the address before gRPC does, which tells no reason but writes a line of its own to stderr.

    A name may stand for several addresses; as with gRPC, one that can be had is enough.

    Raises:
        StartError: with the reason of the operating system.
    """
    host, port = split_address(listen)
    if host.startswith("unix:"):
        return
    failure: OSError | None = None
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC binds it
                    trial.bind(address)
                return
            except OSError as error:
                if error.errno not in _TELLING:
                    return
                failure = error if failure is None or error.errno == errno.EADDRINUSE else failure
    except OSError as error:
        failure = error
    if failure is not None:
        raise StartError(f"cannot listen on {listen}: {failure.strerror or failure}") from None


def _options(settings: Settings, min_ping_interval: float) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share its calls
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", round(min_ping_interval * 1000)),
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        ("grpc.max_send_message_length", settings.max_send_bytes),
    )


def _credentials(settings: Settings) -> grpc.ServerCredentials | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
        roots = settings.tls_client_ca.read_bytes() if settings.tls_client_ca is not None else None
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)
