"""All wiring of the engine: from settings to a server that runs, and back to nothing at work.

What a process does is its role. ``all`` and ``worker`` work on runs and compact old logs; ``all`` and ``api`` answer
rpcs. A worker serves nothing but health, under the name "": it is SERVING while it takes work. Processes of any role
that share a store are one engine: whoever answers a call, whoever works on the run.

Order of a drain, so that nobody loses more than a connection: health says NOT_SERVING and new runs are
refused; runs at work get the grace time and are handed over after it; streams send what is committed and
end; calls and their cleanup are waited for (``grpc.aio.Server.stop`` does not); then the server, the
store and the exporter are closed. A second signal does what signals do by default: it ends the process.
"""

import asyncio
import contextlib
import gc
import importlib
import logging
import signal
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
    OPERATOR_SERVICE,
    add_agent_service,
    add_conversation_service,
    add_engine_service,
    add_operator_service,
)
from dualclaw_server import models, stores
from dualclaw_server.engine.agent import Agent, AgentTool
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.operators import Operators
from dualclaw_server.engine.retention import Keeper
from dualclaw_server.engine.runner import Runner
from dualclaw_server.engine.store import RunStore, StoreError
from dualclaw_server.engine.tool import DEFAULT_TIMEOUT
from dualclaw_server.servicers.access import Access, KeysFileError, anonymous_access, read_keys
from dualclaw_server.servicers.agents import AgentServicer
from dualclaw_server.servicers.calls import Calls
from dualclaw_server.servicers.conversations import ConversationServicer
from dualclaw_server.servicers.engine import EngineServicer
from dualclaw_server.servicers.listening import StartError, check_free, credentials_of, options_of
from dualclaw_server.servicers.logs import Redactor
from dualclaw_server.servicers.operators import OperatorServicer
from dualclaw_server.servicers.runs import Runs
from dualclaw_server.servicers.streams import PATIENCE, Streams
from dualclaw_server.servicers.telemetry import exporting_meters, exporting_provider, tracing_interceptor
from dualclaw_server.settings import Settings, SettingsError, is_loopback, split_address
from dualclaw_server.tools import assistant

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

SERVICES: Final = (ENGINE_SERVICE, CONVERSATION_SERVICE, AGENT_SERVICE, OPERATOR_SERVICE)
MIN_PING_INTERVAL: Final = 10.0
"""Seconds between pings that a client may send without being thrown out; clients of this project send every 30 s."""
STALL: Final = 60.0
"""Seconds the event loop may stand still beyond the longest tool's timeout; then the process gives up its runs."""
LINGER: Final = 5.0
"""Seconds that calls get to end once the runs are done."""

_YOUNG: Final = 10_000
"""New objects after which the garbage collector looks at them; runs at work make some hundreds each."""

_log = logging.getLogger(__name__)


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
    try:
        store = stores.store_from_url(
            settings.store,
            lease=settings.lease,
            max_stall=longest_tool(agents) + STALL,
            accept_loss=settings.accept_loss,
        )
    except ValueError as error:
        problems.append(f"DUALCLAW_STORE: {error}")
    if problems or store is None or model is None:
        return None, problems
    return Parts(store, model, agents, access), []


def longest_tool(agents: Sequence[Agent]) -> float:
    """Return the longest timeout of the agents' tools, in seconds; that of a sub-agent is the sum of its own steps."""
    tools = [tool for agent in agents for tool in agent.tools_by_name.values()]
    below = [tool.agent for tool in tools if isinstance(tool, AgentTool)]
    own = (tool.timeout for tool in tools if not isinstance(tool, AgentTool))
    return max(*own, longest_tool(below) if below else 0.0, DEFAULT_TIMEOUT)


def access_of(settings: Settings) -> Access:
    """Return who may call. Raises KeysFileError."""
    if settings.keys_file is not None:
        return read_keys(settings.keys_file)
    return anonymous_access(loopback=is_loopback(settings.listen))


def load_agents(references: str) -> Sequence[Agent]:
    """Return the agents at ``MODULE:ATTRIBUTE``, several by commas: each an Agent, a sequence of them, or a function
    that returns either. The first of all is the default.

    Raises:
        ValueError: saying what is wrong and, for an error inside the module, where.
    """
    agents = [agent for reference in references.split(",") for agent in _agents_at(reference.strip())]
    names = [agent.name for agent in agents]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{references}: agent names must differ, repeated: {', '.join(repeated)}")
    return tuple(agents)


def _agents_at(reference: str) -> Sequence[Agent]:
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
    """A gRPC server around an engine, in the role that the settings give it.

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
        self._works, self._answers = settings.role != "api", settings.role != "worker"
        self._worker: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            interceptors=[tracing_interceptor(provider)] if provider else [],
            options=options_of(
                settings.max_receive_bytes, settings.max_send_bytes, min_ping_interval, shared=settings.workers > 1
            ),
        )
        if self._answers:
            self._add_services()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def _add_services(self) -> None:
        engine = self.engine
        add_engine_service(EngineServicer(engine, self._calls, self._streams), self._server)
        add_conversation_service(ConversationServicer(engine.store, self._calls), self._server)
        add_agent_service(AgentServicer(engine, self._calls), self._server)
        operators = Operators(engine.store, engine.start)
        add_operator_service(OperatorServicer(operators, self._calls), self._server)
        reflection.enable_server_reflection((*SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server)

    @property
    def open_calls(self) -> int:
        """Number of calls at work, their cleanup included."""
        return self._calls.open

    async def start(self) -> None:
        """Listen, begin to work on runs and report SERVING. Raises StartError when the address cannot be had."""
        listen = self._settings.listen
        host, port = split_address(listen)
        if self._settings.workers == 1:  # else the supervisor has it, for all of them
            await check_free(listen, host, port)
        try:
            paths = (self._settings.tls_cert, self._settings.tls_key, self._settings.tls_client_ca)
            credentials = credentials_of(*paths)
            if credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError:
            raise StartError(f"cannot listen on {listen}: it is in use, or not an address of this machine") from None
        self.address = host if host.startswith("unix:") else f"{host}:{port}"
        await self._server.start()
        if self._works:
            self._worker = asyncio.create_task(self.engine.serve(), name="worker")
            if self._settings.retention:
                keeper = Keeper(self.engine.store, self._settings.retention)
                self._keeper = asyncio.create_task(keeper.serve(), name="keeper")
        for service in ("", *(SERVICES if self._answers else ())):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def worker_ended(self) -> None:
        """Wait until the worker ends, or the keeper of logs, which neither should; raises what it ended with."""
        tasks = {task for task in (self._worker, self._keeper) if task is not None}
        if not tasks:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self, grace: float) -> None:
        """Take no more work, let runs end for ``grace`` seconds, hand over the rest, end every call."""
        await self._health.enter_graceful_shutdown()
        await _end(self._keeper, "keeper of old logs")
        await self.engine.drain(grace)
        self._streams.end()
        if not await self._calls.idle(LINGER):
            _log.warning("%d calls did not end in %g s and are cut off", self._calls.open, LINGER)
        await self._server.stop(0)
        await self._calls.idle(LINGER)
        await _end(self._worker, "worker")


async def _end(task: asyncio.Task[None] | None, what: str) -> None:
    """Cancel a task and wait for it; what it failed with goes to the log."""
    if task is None:
        return
    task.cancel()
    await asyncio.wait({task}, timeout=LINGER)
    if task.done() and not task.cancelled() and task.exception() is not None:
        _log.error("the %s failed", what, exc_info=task.exception())


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
            said = str(error) or type(error).__name__
            raise StartError(f"cannot open the store {settings.shown_store}: {said}") from error
        stack.push_async_callback(parts.store.close)
        server = EngineServer(
            settings,
            Runner(parts.store, parts.agents, model=parts.model, capacity=settings.capacity),
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
            _spare_the_collector()
            announce(server.address)
            where = (settings.role, server.address, settings.shown_store, parts.model.name)
            _log.info("serving as %s on %s with store %s and model %s", *where)
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


def _spare_the_collector() -> None:
    """Have the garbage collector leave alone what the start has made, for all of it stays, and look less often at what
    runs make, most of which is gone by itself soon.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)


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
