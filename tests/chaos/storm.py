"""Servers that are killed and frozen at random while many runs are at work, and what came of it, in figures.

Each slot has one run after another, started by a client that stays with one server, watched by one that attaches
to another server each time its stream is lost, answered through any server, now and then by two people at once.
"""

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from typing import TypeVar

from dualclaw import BusyPolicy, Done, EngineEvent, Phase, ResumeRequest, RunState, StopReason
from dualclaw.errors import EngineError
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, Reconnect
from tests.nats_servers import NatsServers

from .failing_parts import ASKING, KINDS, LOOKING, SAYING, TALK
from .judging import UNKNOWN, tool_steps
from .ledger import Effect
from .processes import Server
from .scenarios import approve, ask
from .stage import LEASE, Stage
from .watching import collect, watch

T = TypeVar("T")

LAST_WAIT = 180.0
"""Seconds that runs may take to end once nothing is killed any more."""
_RECONNECT = Reconnect(total=LAST_WAIT, first=0.05, longest=1.0)
_LATER = frozenset({"STORE_UNAVAILABLE", "OVERLOADED"})
_PAUSE = 0.2
FINAL = frozenset({RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_CANCELLED})


@dataclass(frozen=True, slots=True)
class Weather:
    """How much of everything there is."""

    seconds: float
    slots: int
    """Runs at a time; each has two clients that stay with it."""
    seed: int
    servers: int = 3
    stream: str = ""
    """Name of the store's stream, if it has nodes."""


@dataclass(slots=True)
class Seen:
    """A run, as its clients saw it."""

    kind: str
    started: list[EngineEvent] = field(default_factory=list)
    """By the client that started it, over all segments."""
    watched: Sequence[EngineEvent] = ()
    wins: int = 0
    """How many of those who answered were told that theirs is the answer."""
    answered: int = 0
    """How many questions there were."""


class Storm:
    """One chaos run.

    Args:
        stage: where; its store is open to all servers.
        weather: how much of everything.
        nodes: servers of the store, of which one at a time is killed, too; None: the store is a file.
    """

    def __init__(self, stage: Stage, weather: Weather, nodes: NatsServers | None = None) -> None:
        self._stage = stage
        self._weather = weather
        self._nodes = nodes
        self._random = random.Random(weather.seed)
        self._servers: list[Server] = []
        self._clients: list[EngineClient] = []
        self._over = asyncio.Event()
        self.seen: list[Seen] = []
        self.kills = self.freezes = self.node_kills = 0

    async def rage(self) -> None:
        """Let it happen, then wait until every run has come to its end."""
        environment = {"CHAOS_PACE": "0.1"}
        for number in range(self._weather.servers):
            self._servers.append(await self._stage.start(**environment))
            self._stage.lead_to(self._servers[number], f"door{number}")
            self._clients.append(self._stage.client(self._address(number), _RECONNECT))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._weather.slots):
                    group.create_task(self._slot(number), name=f"slot {number}")
                destroyer = group.create_task(self._destroy(environment), name="destroyer")
                await asyncio.sleep(self._weather.seconds)
                self._over.set()
                await destroyer
        finally:
            for client in self._clients:
                await client.close()

    def _address(self, number: int) -> str:
        return f"unix:{self._stage.folder / f'door{number}'}"

    def _any(self) -> EngineClient:
        return self._random.choice(self._clients)

    # What is destroyed

    async def _destroy(self, environment: dict[str, str]) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._random.uniform(1, 3))
            if self._nodes is not None and self._random.random() < 0.2:
                await self._destroy_node(self._nodes)
                continue
            number = self._random.randrange(self._weather.servers)
            server = self._servers[number]
            if self._random.random() < 0.2:
                self.freezes += 1
                server.send(signal.SIGSTOP)
                await asyncio.sleep(self._random.uniform(0.5, 2 * LEASE))
                server.send(signal.SIGCONT)
                continue
            self.kills += 1
            await server.kill()
            self._servers[number] = await self._stage.start(**environment)
            self._stage.lead_to(self._servers[number], f"door{number}")

    async def _destroy_node(self, nodes: NatsServers) -> None:
        """Kill a server of the store for a while; the next one is killed only once it is back, so most are there."""
        self.node_kills += 1
        number = self._random.randrange(len(nodes.ports))
        await asyncio.to_thread(nodes.kill, number)
        await asyncio.sleep(self._random.uniform(0, 2))
        await asyncio.to_thread(nodes.start, number)
        async with asyncio.timeout(LAST_WAIT):
            while not await asyncio.to_thread(_caught_up, nodes, self._weather.stream):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(_PAUSE)

    # What goes on meanwhile

    async def _slot(self, number: int) -> None:
        dice = random.Random(self._weather.seed * 1_000 + number)
        await asyncio.sleep(dice.uniform(0, 2))
        conversation = ""
        while not self._over.is_set():
            conversation = await self._run(dice, conversation if dice.random() < 0.5 else "")

    async def _run(self, dice: random.Random, conversation: str) -> str:
        kind = dice.choice([*KINDS, *KINDS, "talk"])
        seen = Seen(kind)
        self.seen.append(seen)
        request = ask("talk" if kind == "talk" else f"work {kind}", "worker", conversation)
        request.on_busy = BusyPolicy.BUSY_POLICY_QUEUE
        stop_at = dice.randint(3, 25) if dice.random() < 0.15 else 0
        watcher: asyncio.Task[Sequence[EngineEvent]] | None = None
        stopping: asyncio.Task[None] | None = None
        client = dice.choice(self._clients)
        async with asyncio.timeout(self._weather.seconds + LAST_WAIT), AsyncExitStack() as streams:
            stream = await _again(lambda: streams.enter_async_context(client.run(request)))
            async for event in stream:
                seen.started.append(event)
                if watcher is None:
                    watcher = asyncio.create_task(self._watch(dice, event.run_id))
                if event.seq == stop_at:
                    stopping = asyncio.create_task(self._stop(event.run_id))
            if seen.started[-2].HasField("interrupt") and stopping is None:
                await self._answer(dice, seen)
            run_id, seq = seen.started[-1].run_id, seen.started[-1].seq
            rest = await _again(lambda: streams.enter_async_context(client.attach(run_id, after_seq=seq, wait=True)))
            async for event in rest:
                seen.started.append(event)
            if stopping is not None:
                await stopping
            assert watcher is not None
            seen.watched = await watcher
        return seen.started[-1].done.conversation_id

    async def _watch(self, dice: random.Random, run_id: str) -> Sequence[EngineEvent]:
        """Follow a run, at another server each time."""
        limit = self._weather.seconds + LAST_WAIT
        return await watch(lambda: self._address(dice.randrange(self._weather.servers)), run_id, limit)

    async def _stop(self, run_id: str) -> None:
        await _again(lambda: self._any().cancel(run_id, "storm"))

    async def _answer(self, dice: random.Random, seen: Seen) -> None:
        people = 2 if dice.random() < 0.3 else 1
        seen.answered += 1
        outcomes = await asyncio.gather(*[self._say_yes(approve(seen.started)) for _ in range(people)])
        seen.wins += sum(outcomes)

    async def _say_yes(self, resume: ResumeRequest) -> bool:
        """Answer through any server, as often as the connection is lost; True when this answer is the one."""

        async def attempt() -> None:
            async with self._any().resume(resume):
                pass

        try:
            await _again(attempt)
        except EngineError as error:
            if error.reason != "ALREADY_ANSWERED":
                raise
            return False
        return True


def _caught_up(nodes: NatsServers, stream: str) -> bool:
    """Tell whether every node has all of the stream."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        replicas = nodes.ask(f"STREAM.INFO.{stream}")["cluster"]["replicas"]
        return len(replicas) == len(nodes.ports) - 1 and all(each["current"] for each in replicas)
    return False


async def _again(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call until it is answered; lost connections and busy stores are reasons to repeat it."""
    while True:
        try:
            return await call()
        except EngineUnreachable:
            pass
        except EngineError as error:
            if error.reason not in _LATER:
                raise
        await asyncio.sleep(_PAUSE)


@dataclass(slots=True)
class Figures:
    """What came of a storm. All but the first group must be 0."""

    runs: int = 0
    events: int = 0
    rewinds: int = 0
    unknown: int = 0
    """Calls of "once" tools whose outcome nobody knows."""
    repeated: int = 0
    """Effects that were had more than once, as "read" and "idempotent" allow, and "reconcile" when frozen."""

    lost: int = 0
    doubled: int = 0
    differing: int = 0
    once_twice: int = 0
    keys_changed: int = 0
    broken_rules: int = 0
    garbled: int = 0
    """Segments whose text is not what the model says, to the letter; of cancelled ones, its beginning."""
    unfinished: int = 0
    won_twice: int = 0
    never_done: int = 0
    """Calls that count as done and of which the world has seen nothing."""

    @property
    def wrong(self) -> Mapping[str, int]:
        """What must not be."""
        names = [each.name for each in fields(self)]
        return {name: value for name in names[names.index("lost") :] if (value := getattr(self, name))}

    def __str__(self) -> str:
        return "  ".join(f"{each.name} {getattr(self, each.name)}" for each in fields(self))


async def reckon(client: EngineClient, runs: Sequence[Seen], effects: Sequence[Effect]) -> Figures:
    """Hold every run of a storm against its log and its effects."""
    figures = Figures(runs=len(runs))
    by_run: dict[str, list[Effect]] = {}
    for effect in effects:
        by_run.setdefault(effect.run_id, []).append(effect)
    for seen in runs:
        if not seen.started:
            figures.unfinished += 1
            continue
        run_id = seen.started[0].run_id
        log = await collect(client.attach(run_id))
        figures.events += len(log)
        figures.rewinds += sum(event.HasField("rewind") for event in log)
        figures.unfinished += (await client.get_run(run_id)).state not in FINAL
        figures.broken_rules += len(check_stream(log))
        figures.garbled += sum(not _is_said(event.done) for event in log if event.HasField("done"))
        figures.won_twice += seen.wins != seen.answered
        for told in (seen.started, seen.watched):
            seqs = [event.seq for event in told]
            figures.doubled += len(seqs) - len(set(seqs))
            figures.lost += len({event.seq for event in log} - set(seqs))
            figures.differing += list(told) != log
        _count_effects(figures, seen.kind, log, by_run.get(run_id, []))
    return figures


def _is_said(done: Done) -> bool:
    whole = (f"{LOOKING}\n\n{ASKING}", SAYING, TALK)
    if done.stop_reason == StopReason.STOP_REASON_CANCELLED:
        return any(text.startswith(done.content) for text in whole)
    return done.content in whole


def _count_effects(figures: Figures, kind: str, log: Sequence[EngineEvent], effects: Sequence[Effect]) -> None:
    for item, step in tool_steps(log).items():
        done = [effect for effect in effects if effect.item == item]
        figures.keys_changed += len({effect.key for effect in done}) > 1
        figures.unknown += step.diagnosis.code == UNKNOWN
        figures.never_done += step.phase == Phase.PHASE_OK and not done
        if kind == "once":
            figures.once_twice += len(done) > 1
        else:
            figures.repeated += len(done) > 1
