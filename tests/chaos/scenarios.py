"""What clients do while servers die: each scenario is one run from a client's call to its end, or a few reads."""

import asyncio
import signal
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from dualclaw import (
    ContentPart,
    Decision,
    DecisionAction,
    EngineEvent,
    ListMessagesRequest,
    Message,
    ResumeRequest,
    Role,
    RunRequest,
)
from dualclaw.errors import EngineError
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, RunStream

from .stage import AGAIN, PATIENCE, Stage, Succession, persist
from .watching import collect, watch

_BEGUN = 4
"""Events after which a run is in the middle of its first answer."""


@dataclass(slots=True)
class Told:
    """What the clients of a run did and saw."""

    request: RunRequest
    resume: ResumeRequest | None = None
    first: list[EngineEvent] = field(default_factory=list)
    """The segment of ``request``."""
    second: list[EngineEvent] = field(default_factory=list)
    """The segment of ``resume``."""
    watched: list[Sequence[EngineEvent]] = field(default_factory=list)
    """All of the run, as each client saw it that only watched."""

    @property
    def run_id(self) -> str:
        """The run."""
        return self.first[0].run_id


class Watchers:
    """Clients that attach to a run as soon as it is known: one through the door, one to the server that stands by."""

    def __init__(self, stage: Stage, succession: Succession) -> None:
        self._addresses = [stage.door, *filter(None, [succession.spare])]
        self._tasks: list[asyncio.Task[Sequence[EngineEvent]]] = []

    def begin(self, event: EngineEvent) -> None:
        """Attach, at the first event."""
        if not self._tasks:
            for address in self._addresses:
                self._tasks.append(asyncio.create_task(watch(lambda address=address: address, event.run_id)))  # type: ignore[misc]

    async def end(self) -> list[Sequence[EngineEvent]]:
        """Return what each saw."""
        return list(await asyncio.gather(*self._tasks))

    async def close(self) -> None:
        """Leave."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def ask(text: str, agent: str = "worker", conversation_id: str = "") -> RunRequest:
    """Return a request with an id of its own."""
    message = Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])
    return RunRequest(request_id=uuid.uuid4().hex, agent=agent, message=message, conversation_id=conversation_id)


def approve(events: Sequence[EngineEvent]) -> ResumeRequest:
    """Return a yes to everything a segment asks."""
    items = events[-2].interrupt.items
    yes = DecisionAction.DECISION_ACTION_APPROVE
    decisions = [Decision(interrupt_id=item.id, action=yes, args_hash=item.args_hash) for item in items]
    return ResumeRequest(request_id=uuid.uuid4().hex, run_id=events[-1].run_id, decisions=decisions)


async def begin(client: EngineClient, told: Told, seen: Callable[[EngineEvent], None]) -> None:
    """Start the run and read its first segment."""
    await _segment(lambda: client.run(told.request), told.first, seen)


async def answer(client: EngineClient, told: Told) -> None:
    """Say yes to what the first segment asks, and read the second."""
    told.resume = resume = approve(told.first)
    await _segment(lambda: client.resume(resume), told.second, lambda _: None)


async def _segment(
    call: Callable[[], RunStream], events: list[EngineEvent], seen: Callable[[EngineEvent], None]
) -> None:
    """Read a segment. Only a door at which nobody answers the very call is knocked at again: the client says so at
    once, for people who have mistyped an address. Everything later is the client's own business.
    """

    def keep(event: EngineEvent) -> None:
        events.append(event)
        seen(event)

    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await collect(call(), keep)
                return
            except EngineUnreachable:
                if events:
                    raise
            await asyncio.sleep(AGAIN)


async def work(client: EngineClient, told: Told, watchers: Watchers, _: Succession) -> None:
    """Two tools at once, an approval, a third tool, an answer."""
    await begin(client, told, watchers.begin)
    await answer(client, told)


async def cancel(client: EngineClient, told: Told, watchers: Watchers, _: Succession) -> None:
    """A long answer, stopped in its middle."""
    begun = asyncio.Event()

    def seen(event: EngineEvent) -> None:
        watchers.begin(event)
        if event.seq == _BEGUN:
            begun.set()

    running = asyncio.create_task(begin(client, told, seen))
    waiting = asyncio.create_task(begun.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        await persist(lambda: client.cancel(told.run_id, "enough"))
    finally:
        waiting.cancel()
        await running


async def cancel_parked(client: EngineClient, told: Told, watchers: Watchers, _: Succession) -> None:
    """A run that waits for a yes is told to end instead."""
    await begin(client, told, watchers.begin)
    await persist(lambda: client.cancel(told.run_id, "enough"))
    seq = told.first[-1].seq
    await _segment(lambda: client.attach(told.run_id, after_seq=seq, wait=True), told.second, lambda _: None)


async def release(client: EngineClient, told: Told, watchers: Watchers, _: Succession) -> None:
    """An operator takes a run from the process that works on it, in the middle of its answer."""
    releasing: list[asyncio.Task[object]] = []

    def seen(event: EngineEvent) -> None:
        watchers.begin(event)
        if event.seq == _BEGUN:
            releasing.append(asyncio.create_task(persist(lambda: client.release_run(event.run_id))))

    await begin(client, told, seen)
    await asyncio.gather(*releasing)


async def drain(client: EngineClient, told: Told, watchers: Watchers, succession: Succession) -> None:
    """The server is told to stop while a run is at work, and dies of its failpoint as it puts the run back."""

    def seen(event: EngineEvent) -> None:
        watchers.begin(event)
        if event.seq == _BEGUN:
            succession.at_work.send(signal.SIGTERM)

    await begin(client, told, seen)


async def calls(client: EngineClient, told: Told, watchers: Watchers, _: Succession) -> None:
    """A run, and then every call that reads; a switch; and another run that is purged with its conversation."""
    await begin(client, told, watchers.begin)
    conversation_id = told.first[-1].done.conversation_id
    runs = await persist(client.list_runs)
    assert [run.id for run in runs.runs] == [told.run_id]
    conversations = await persist(client.list_conversations)
    assert [each.id for each in conversations.conversations] == [conversation_id]
    assert (await persist(lambda: client.get_conversation(conversation_id))).id == conversation_id
    asked = ListMessagesRequest(conversation_id=conversation_id)
    assert len((await persist(lambda: client.list_messages(asked))).messages) == 2
    assert (await persist(lambda: client.inspect_run(told.run_id))).run.id == told.run_id
    assert (await persist(lambda: client.set_interceptor_enabled("worker", "spare", False))).enabled is False
    switches = {item.name: item.enabled for item in (await persist(lambda: client.get_agent("worker"))).interceptors}
    assert switches["spare"] is False
    gone = Told(ask("hello"))
    await begin(client, gone, lambda _: None)
    await _remove(lambda: client.purge_run(gone.run_id))
    await _remove(lambda: client.delete_conversation(gone.first[-1].done.conversation_id))


async def _remove(call: Callable[[], Awaitable[None]]) -> None:
    """Have something removed; at a second attempt it may be gone already."""
    try:
        await persist(call)
    except EngineError as error:
        if error.reason not in ("UNKNOWN_RUN", "UNKNOWN_CONVERSATION"):
            raise


Play = Callable[[EngineClient, Told, Watchers, Succession], Awaitable[None]]
PLAYS: dict[str, tuple[Play, str, str]] = {
    "work": (work, "work {kind}", "worker"),
    "cancel": (cancel, "talk", "talker"),
    "cancel_parked": (cancel_parked, "work {kind}", "worker"),
    "drain": (drain, "talk", "talker"),
    "release": (release, "talk", "talker"),
    "calls": (calls, "hello", "worker"),
}
"""What is played, what the user says, to which agent."""
