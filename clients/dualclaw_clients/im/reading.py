"""Reads runs from the engine for a chat: from a stream of events to what goes out.

- An engine out of reach is given some seconds: one that is being restarted should not cost anybody a message.
- Nobody waits longer than the time limit. The run goes on, and the chat hears its end from the watcher.
- An answer that is an image or a video has no place for questions, so they follow it as a text.

NoAnswer
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import quote

from dualclaw import InterruptItem, StopReason
from dualclaw.errors import EngineError
from dualclaw.json_text import clean_text
from dualclaw_clients.adapters import BufferAdapter
from dualclaw_clients.adapters.questions import questions_text
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, RunStream
from dualclaw_clients.im.connector import ChatKey, Connector, Media
from dualclaw_clients.im.outgoing import Outgoing, Piece, Told, pieces_of
from dualclaw_clients.im.state import Claim, RelayState
from dualclaw_clients.im.state_watches import Watch
from dualclaw_clients.im.texts import Texts

T = TypeVar("T")

MAX_SUBJECT: Final = 128
"""Longest name of a person the engine takes."""
_REACH_PAUSE = 0.25


class NoAnswer(Exception):
    """There is no answer to send.

    Args:
        notice: what to tell the person.
        cause: what to write down; not for the chat.
        begun: True when a run may exist: another try must repeat the same request.
        numbers: of the questions the notice shows.
        follow: a run the chat is still to hear of.
    """

    def __init__(self, notice: str, cause: str, *, begun: bool, numbers: Sequence[int] = (), follow: str = "") -> None:
        super().__init__(cause)
        self.notice = notice
        self.begun = begun
        self.numbers = tuple(numbers)
        self.follow = follow


@dataclass(slots=True)
class Active:
    """What is being done for a message, so that a command can end it."""

    run_id: str = ""
    """The run it waits for; empty: none has begun."""
    stopped: bool = False
    """Somebody wants it to end."""
    over: bool = False
    """There is an answer: nothing is left to end."""


class Stopped(Exception):
    """The person has cancelled before a run had begun."""


class Reader:
    """Reads segments.

    Args:
        run_timeout: seconds a segment may take before the person is told to wait for its result.
        reach: seconds an engine may be out of reach before the person is told.
    """

    def __init__(
        self, state: RelayState, engine: EngineClient, texts: Texts, *, run_timeout: float, reach: float
    ) -> None:
        self.state = state
        self.texts = texts
        self.run_timeout = run_timeout
        self._engine = engine
        self._reach = reach

    def engine_for(self, connector: Connector, chat: ChatKey, user_id: str) -> EngineClient:
        """Return the engine as a person's platform sees it: in the name of tenant and person, if there is a tenant."""
        if not connector.tenant:
            return self._engine
        return self._engine.acting_for(tenant=connector.tenant, subject=subject_of(chat.platform, user_id))

    def adapter(self, connector: Connector) -> BufferAdapter:
        """Return what collects a segment for a connector."""
        return BufferAdapter(claw=connector.claw, wording=self.texts.wording)

    async def within_reach(self, work: Callable[[], Awaitable[T]], active: Active) -> T:
        """Do something that needs the engine, again and again while it is out of reach and there is time.

        Raises:
            EngineError: also when the time is up.
            Stopped: it was to end before it began.
        """
        deadline = time.monotonic() + self._reach
        while True:
            try:
                return await work()
            except EngineUnreachable:
                if time.monotonic() >= deadline:
                    raise
                if active.stopped:
                    raise Stopped from None
                await asyncio.sleep(_REACH_PAUSE)

    async def segment(
        self,
        connector: Connector,
        claim: Claim,
        stream: RunStream,
        active: Active,
        started: Callable[[str], Awaitable[None]] | None = None,
    ) -> Outgoing:
        """Read a segment to its end; ``started`` is told the conversation as soon as it is known, and at the end.

        Raises EngineError. If there is a run by then, ``active`` names it and the chat hears of its end.
        """
        chat, user_id = claim.key.chat, claim.message.user_id
        adapter = self.adapter(connector)
        before = -1
        try:
            async with stream as run:
                active.run_id = run.run_id
                if active.stopped:
                    await self.engine_for(connector, chat, user_id).cancel(run.run_id, "cancelled in the chat")
                if started:
                    await started(run.conversation_id)
                async for event in run:
                    active.run_id = active.run_id or event.run_id
                    before = event.seq - 1 if before < 0 else before
                    await adapter(event)
                    if event.HasField("done") and started:
                        await started(event.done.conversation_id)
        except EngineError as error:
            if not active.run_id:
                raise
            if before >= 0 or isinstance(error, EngineUnreachable) or is_late(error):
                told = before if before >= 0 else await self._last_told(chat, active.run_id)
                await self.state.watch(Watch(chat, active.run_id, user_id, told))
            if is_late(error):
                text = self.texts.still_running.format(run=active.run_id)
                return Outgoing(pieces_of(text, connector.limit), follow=(active.run_id,))
            raise
        return await self.outgoing(connector, chat, active.run_id, adapter)

    async def outgoing(self, connector: Connector, chat: ChatKey, run_id: str, adapter: BufferAdapter) -> Outgoing:
        """Return what a segment comes to, its questions numbered."""
        items, terminal = adapter.view.interrupts, adapter.view.terminal
        numbers = await self.numbers(chat, run_id, items)
        answer = adapter.assemble(numbers)
        stop_reason = terminal.done.stop_reason if terminal is not None and terminal.HasField("done") else None
        pieces: tuple[Piece, ...]
        if isinstance(answer, str):
            if stop_reason == StopReason.STOP_REASON_CANCELLED:
                answer = "\n\n".join(filter(str.strip, (answer, self.texts.cancelled)))
            pieces = pieces_of(answer, connector.limit) or pieces_of(self.texts.empty_answer, connector.limit)
        else:
            pieces = pieces_of(Media(answer["media_type"], clean_text(answer["url"])), connector.limit)
            asked = questions_text(items, numbers=numbers, wording=self.texts.wording)
            pieces += pieces_of(asked, connector.limit)
        if terminal is None or not run_id:
            return Outgoing(pieces, tuple(numbers))
        over = stop_reason != StopReason.STOP_REASON_INTERRUPTED
        return Outgoing(pieces, tuple(numbers), (Told(run_id, terminal.seq, over),))

    async def numbers(self, chat: ChatKey, run_id: str, items: Sequence[InterruptItem]) -> list[int]:
        """Return the numbers of what a run asks now; what it asked before is closed."""
        await self.state.close_others(chat, run_id, items)
        return await self.state.number(chat, run_id, items) if items else []

    async def _last_told(self, chat: ChatKey, run_id: str) -> int:
        """Return up to where the chat knows a run of whose new segment nothing was read."""
        watch = await self.state.watched(chat, run_id)
        return watch.told if watch is not None else 0


def is_late(error: EngineError) -> bool:
    """Return whether the time a caller gave was up; the run goes on."""
    return error.metadata.get("grpc_code") == "DEADLINE_EXCEEDED"


def subject_of(platform: str, user_id: str) -> str:
    """Return a person as the engine records them: printable ASCII, at most MAX_SUBJECT characters, one person each."""
    name = f"{quote(platform)}:{quote(user_id)}"
    if len(name) <= MAX_SUBJECT:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name[: MAX_SUBJECT - 33]}~{digest}"
