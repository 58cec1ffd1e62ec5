"""Where scenes are played: it asks the server under test and keeps every exchange under a label.

A scene says what it does and nothing of what would be right; that is for the judges. It breaks off only where it
cannot go on, such as at a run that has no id.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from google.protobuf.message import Message as ProtoMessage

from dualclaw import (
    AttachRequest,
    BusyPolicy,
    CancelRequest,
    ContentPart,
    Decision,
    DecisionAction,
    GetRunRequest,
    GetRunResponse,
    ListRunsRequest,
    ListRunsResponse,
    Message,
    ResumeRequest,
    Role,
    Run,
    RunOptions,
    RunRequest,
)
from dualclaw_clients.conformance.engine_probe import EngineProbe, OpenStream, StreamRequest
from dualclaw_clients.conformance.seen import Exchange, Scene
from dualclaw_clients.engine_client import new_request_id

POLL = 0.1
"""Seconds between two looks at a run's state."""
APPROVE, REJECT, EDIT, RESPOND = (
    DecisionAction.DECISION_ACTION_APPROVE,
    DecisionAction.DECISION_ACTION_REJECT,
    DecisionAction.DECISION_ACTION_EDIT,
    DecisionAction.DECISION_ACTION_RESPOND,
)


class BrokeOff(Exception):
    """The scene cannot go on, and why."""


@dataclass(frozen=True, slots=True)
class Cast:
    """What the person who runs the kit has told it."""

    agent: str
    key: str = ""
    other_key: str = ""
    restart: Callable[[], Awaitable[None]] | None = None


class Stage:
    """One scene's place: asks, and writes down."""

    def __init__(self, probe: EngineProbe, cast: Cast) -> None:
        self.probe = probe
        self.cast = cast
        self._exchanges: dict[str, Exchange] = {}
        self._stories: list[tuple[str, ...]] = []

    def scene(self, name: str, broke_off: str = "") -> Scene:
        """Return what was written down."""
        return Scene(name, dict(self._exchanges), stories=tuple(self._stories), broke_off=broke_off)

    def keep(self, label: str, exchange: Exchange) -> Exchange:
        """Write an exchange down."""
        self._exchanges[label] = exchange
        return exchange

    def story(self, *labels: str) -> None:
        """Say that these streams, one after the other, are a run from its first event on."""
        self._stories.append(labels)

    def question(
        self,
        scenario: str,
        *,
        text: str = "",
        conversation_id: str = "",
        request_id: str = "",
        options: RunOptions | None = None,
        on_busy: BusyPolicy.ValueType = BusyPolicy.BUSY_POLICY_UNSPECIFIED,
    ) -> RunRequest:
        """Return the request that makes the agent play a scenario; ``text``: another message instead."""
        return RunRequest(
            agent=self.cast.agent,
            conversation_id=conversation_id,
            request_id=request_id,
            message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=text or f"conformance: {scenario}")]),
            claw="conformance",
            options=options,
            on_busy=on_busy,
        )

    async def stream(self, label: str, request: StreamRequest) -> Exchange:
        """Make a streaming call, read it to its end, write it down."""
        return self.keep(label, await self.probe.stream(request))

    async def ask(self, label: str, scenario: str) -> Exchange:
        """Start a run of its own and read its first segment."""
        return await self.stream(label, self.question(scenario, request_id=new_request_id()))

    async def attach(self, label: str, run_id: str, after_seq: int = 0, *, wait: bool = False) -> Exchange:
        """Attach and read to the end."""
        return await self.stream(label, AttachRequest(run_id=run_id, after_seq=after_seq, wait=wait))

    async def resume(self, label: str, run_id: str, *decisions: Decision, request_id: str = "") -> Exchange:
        """Answer and read the next segment."""
        request = ResumeRequest(run_id=run_id, decisions=decisions, request_id=request_id or new_request_id())
        return await self.stream(label, request)

    async def call(self, label: str, request: ProtoMessage) -> Exchange:
        """Make a unary call and write it down."""
        return self.keep(label, await self.probe.call(request))

    async def cancel(self, label: str, run_id: str) -> Exchange:
        """Ask a run to end."""
        return await self.call(label, CancelRequest(run_id=run_id, reason="conformance"))

    async def run(self, label: str, run_id: str) -> Exchange:
        """Ask for a run and write it down."""
        return await self.call(label, GetRunRequest(run_id=run_id))

    async def run_once(self, label: str, run_id: str, ready: Callable[[Run], bool], patience: float) -> Exchange:
        """Ask for a run until it is as wanted or patience ends; the last answer is written down."""
        until = time.monotonic() + patience
        while True:
            seen = await self.run(label, run_id)
            if ready(run_of(seen)) or time.monotonic() > until:
                return seen
            await asyncio.sleep(POLL)

    async def runs_in(
        self, label: str, conversation_id: str, enough: int, unless: "asyncio.Task[Exchange] | None" = None
    ) -> Sequence[Run]:
        """Ask for the runs of a conversation until there are so many, newest first.

        It gives up when the time-out passes, or ``unless`` is over, which was to make one of them.
        """
        until = time.monotonic() + self.probe.timeout
        while True:
            seen = await self.call(label, ListRunsRequest(conversation_id=conversation_id))
            found = seen.response.runs if isinstance(seen.response, ListRunsResponse) else ()
            if len(found) >= enough or time.monotonic() > until or (unless is not None and unless.done()):
                return list(found)
            await asyncio.sleep(POLL)

    @asynccontextmanager
    async def opened(self, label: str, request: StreamRequest, events: int) -> AsyncIterator[OpenStream]:
        """Start a streaming call and read so many events; what it has seen is written down when the block ends."""
        async with self.probe.open(request) as stream:
            try:
                if not await stream.until(lambda seen: len(seen) >= events):
                    raise BrokeOff(f"{label} ended, or was silent, before its event {events}")
                yield stream
            finally:
                self.keep(label, stream.leave())


@asynccontextmanager
async def beside() -> AsyncIterator[Callable[[Coroutine[None, None, Exchange]], asyncio.Task[Exchange]]]:
    """Give what begins calls beside those of the block, which ends when they have; none outlives a scene broken off."""
    calls: list[asyncio.Task[Exchange]] = []

    def begin(call: Coroutine[None, None, Exchange]) -> asyncio.Task[Exchange]:
        calls.append(asyncio.create_task(call))
        return calls[-1]

    try:
        yield begin
        await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def decide(
    interrupt_id: str,
    action: DecisionAction.ValueType,
    *,
    args_json: str = "",
    response_json: str = "",
    args_hash: str = "",
) -> Decision:
    """Return a decision."""
    return Decision(
        interrupt_id=interrupt_id,
        action=action,
        args_json=args_json,
        response_json=response_json,
        args_hash=args_hash,
    )


def run_of(exchange: Exchange) -> Run:
    """Return the run of a GetRun; an empty one when it was refused."""
    return exchange.response.run if isinstance(exchange.response, GetRunResponse) else Run()


def run_id_of(exchange: Exchange) -> str:
    """Return the id of a stream's run. Raises BrokeOff."""
    for event in exchange.events:
        if event.run_id:
            return event.run_id
    told = f", it ended with {exchange.status}" if exchange.status and exchange.status.code != "OK" else ""
    raise BrokeOff(f"{exchange.rpc} brought no event with a run_id{told}")


async def conversation_of(stage: Stage, exchange: Exchange) -> str:
    """Return the conversation a stream's run belongs to. Raises BrokeOff."""
    found = run_of(await stage.probe.call(GetRunRequest(run_id=run_id_of(exchange)))).conversation_id
    if not found:
        raise BrokeOff("GetRun names no conversation")
    return found


Player = Callable[[Stage], Awaitable[None]]
Players = Mapping[str, Player]
