"""Carries messages from chats to the engine and answers back: one queue per chat, each message once.

- Messages of a chat are answered one after the other in the order they came, chats side by side. A busy chat
  queues; a message that finds the queue full is refused with a text, none vanishes.
- ``accept`` returns when the message is stored, long before its answer: a platform that resends after five
  seconds has its acknowledgement by then, and a resent message is known by its key.
- What ends without an answer ends with a text to the person and the mark ``failed``; the platform's next
  delivery of the message tries again. What ends because the process ends keeps its claim, and is taken up by the
  next relay on the state file, or by one that runs beside this one.
- Commands that are about what a chat waits for overtake it (``desk.OVERTAKES``); only the sending waits its turn.
- What a chat hears without having asked, because a run of its went on elsewhere, stands in its queue like an answer.
- No business here: what is asked, decided and remembered is the engine's.
"""

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dualclaw.json_text import clean_text
from dualclaw_clients.engine_client import EngineClient
from dualclaw_clients.im.answers import Answers
from dualclaw_clients.im.approvals import Approvals
from dualclaw_clients.im.commands import Command, parse_command
from dualclaw_clients.im.connector import (
    ChatKey,
    Connector,
    IncomingMessage,
    MessageKey,
    Overloaded,
    Receipt,
    SendError,
)
from dualclaw_clients.im.delivery import Delivery, SendLimits
from dualclaw_clients.im.desk import OVERTAKES, Desk
from dualclaw_clients.im.gate import Gate
from dualclaw_clients.im.outgoing import Outgoing
from dualclaw_clients.im.reading import Active, NoAnswer, Reader
from dualclaw_clients.im.state import Claim, RelayState, Route, StateError
from dualclaw_clients.im.state_watches import Watch
from dualclaw_clients.im.texts import ZH, Texts
from dualclaw_clients.im.watcher import Watcher

if TYPE_CHECKING:
    from dualclaw_clients.im.legacy import LegacyClient

log = logging.getLogger(__name__)

OWN_MESSAGE = "run:"
"""Begins the ids under which the state file keeps what a chat hears unasked. Ids of platforms that begin so are
stored with another one before them, so that none can be taken for ours."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What bounds a relay; times in seconds."""

    run_timeout: float = 1800.0
    """How long a run may take before the person is told to come back later."""
    reach: float = 10.0
    """How long an engine may be out of reach before a person is told."""
    max_waiting: int = 100
    """Messages that may wait in one chat."""
    max_open: int = 5_000
    """Messages that may wait or be answered in all chats together; further ones the platform has to keep."""
    max_parallel: int = 64
    """Chats that are answered at the same time."""
    max_followed: int = 200
    """Runs that are followed at the same time for chats that are to hear of them."""
    sweep: float = 30.0
    """Between two looks for messages whose process has died."""
    grace: float = 30.0
    """How long leaving the relay waits for answers under way."""
    send: SendLimits = field(default_factory=SendLimits)


@dataclass(slots=True)
class _Job:
    connector: Connector
    outcome: asyncio.Future[bool]
    chat: ChatKey
    claim: Claim | None = None
    """None: there is no message, only something to hear."""
    heard: tuple[Watch, Outgoing] | None = None
    active: Active = field(default_factory=Active)


@dataclass(slots=True)
class _Line:
    """The messages that wait in one chat."""

    waiting: deque[_Job] = field(default_factory=deque)


class Relay:
    """The relay of one process; an async context manager. Entering takes up what an earlier process left.

    Args:
        state: the state file; may be shared with other processes.
        engine: the engine; closed by the caller.
        connectors: the platforms, each name once.
        gate: which tenants of gated connectors the engine answers.
        legacy: answers the others; None only if there are none.
        agent: name of the agent to ask; empty: the engine's default.
        texts: the language of the relay's own words.
    """

    def __init__(
        self,
        state: RelayState,
        engine: EngineClient,
        connectors: Sequence[Connector],
        *,
        gate: Gate | None = None,
        legacy: "LegacyClient | None" = None,
        agent: str = "",
        limits: RelayLimits | None = None,
        texts: Texts = ZH,
    ) -> None:
        self._state = state
        self._connectors = {connector.name: connector for connector in connectors}
        if len(self._connectors) != len(connectors):
            raise ValueError("two connectors of one name: their messages could not be told apart")
        self._gate = gate or Gate()
        if legacy is None and any(connector.gated for connector in connectors):
            self._gate.require_legacy("")
        self._limits = limits or RelayLimits()
        self._texts = texts
        reader = Reader(state, engine, texts, run_timeout=self._limits.run_timeout, reach=self._limits.reach)
        approvals = Approvals(reader)
        self._answers = Answers(reader, approvals, legacy, agent=agent)
        self._desk = Desk(reader, approvals)
        self._delivery = Delivery(state, self._limits.send, texts)
        self._slots = asyncio.Semaphore(self._limits.max_parallel)
        self._lines: dict[ChatKey, _Line] = {}
        # Held while an answer or a notice goes out, so that none gets between the parts of another.
        self._sending: weakref.WeakValueDictionary[ChatKey, asyncio.Lock] = weakref.WeakValueDictionary()
        self._open = 0
        self._group = asyncio.TaskGroup()
        self._watcher = Watcher(
            reader, self._connectors, self._hear, self._group, max_followed=self._limits.max_followed
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    async def __aenter__(self) -> Self:
        orphans = await self._state.adopt(self._connectors)
        await self._group.__aenter__()
        self._adopt(orphans)
        await self._watcher.take_over()
        self._sweeper = self._group.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the answers under way, then end; an error ends them at once. What is cut off stays claimed."""
        try:
            if error is None:
                await self.drain(self._limits.grace)
        finally:
            if self._sweeper is not None:
                self._sweeper.cancel()
            self._closing = True
            self._watcher.stop()
            for task in self._tasks:
                task.cancel()
            # Not told of the error: the group would wrap it, and it propagates as it is.
            await self._group.__aexit__(None, None, None)

    async def listen(self) -> None:
        """Listen on every connector until none has more to hand in. Answers may still be under way then.

        Raises:
            Exception: what ended a connector, as it is; a group only if it ended several.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for connector in self._connectors.values():
                    group.create_task(connector.listen(partial(self.accept, connector)))
        except BaseExceptionGroup as errors:
            if len(errors.exceptions) == 1:
                raise errors.exceptions[0] from None
            raise

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until no message is being answered; False when that took longer than ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            return False
        return True

    async def accept(self, connector: Connector, message: IncomingMessage) -> Receipt:
        """Take a message in; returns when it is stored and stands in its chat's queue.

        Raises:
            Overloaded: there is no room for it; nothing will be done about it.
            StateError: it could not be stored; nothing will be done about it.
        """
        if self._open >= self._limits.max_open:
            raise Overloaded(f"{self._open} messages wait already")
        # A task of its own: whoever is cancelled here, say with its HTTP request, must not leave a message that
        # is claimed but stands in no queue.
        admission = self._group.create_task(self._admit(connector, message))
        outcome = await asyncio.shield(admission)
        if isinstance(outcome, StateError):
            raise outcome
        return outcome

    async def _admit(self, connector: Connector, message: IncomingMessage) -> Receipt | StateError:
        chat = ChatKey(connector.name, clean_text(message.bot), clean_text(message.chat_id))
        message_id = clean_text(message.message_id)
        key = MessageKey(chat, OWN_MESSAGE + message_id if message_id.startswith(OWN_MESSAGE) else message_id)
        message = replace(message, user_id=clean_text(message.user_id), text=clean_text(message.text))
        through = not connector.gated or self._gate.lets_through(connector.tenant)
        route: Route = "engine" if through else "legacy"
        command = parse_command(message.text) if route == "engine" else None
        overtakes = command is not None and command.word in OVERTAKES
        try:
            claim = await self._state.claim(key, message, route)
            if claim is None:
                return Receipt(None)
            line = self._lines.get(chat)
            if line is not None and len(line.waiting) >= self._limits.max_waiting and not overtakes:
                await self._state.fail(key, "too many messages wait in the chat")
                return Receipt(self._refuse(connector, chat))
        except StateError as error:
            return error
        return Receipt(self._enqueue(connector, claim))

    def _refuse(self, connector: Connector, chat: ChatKey) -> asyncio.Future[bool]:
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def tell() -> None:
            async with self._turn_to_send(chat):
                await self._delivery.notify(connector, chat, self._texts.too_many_waiting)

        def told(_: asyncio.Task[None]) -> None:
            self._open -= 1
            outcome.set_result(False)

        self._open += 1  # or a flood that is refused faster than its notices go out would have no bound

        self._start(tell()).add_done_callback(told)
        return outcome

    def _turn_to_send(self, chat: ChatKey) -> asyncio.Lock:
        return self._sending.setdefault(chat, asyncio.Lock())

    async def _hear(self, connector: Connector, watch: Watch, answer: Outgoing) -> None:
        """Have a chat hear of a run that went on elsewhere."""
        outcome = asyncio.get_running_loop().create_future()
        self._stand_in_line(_Job(connector, outcome, watch.chat, heard=(watch, answer)))

    def _adopt(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._enqueue(self._connectors[claim.key.chat.platform], claim)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep)
            try:
                await self._state.prune()
                self._adopt(await self._state.adopt(self._connectors))
                await self._watcher.take_over()
            except StateError as error:
                log.warning("messages left by dead processes were not looked for: %s", error)

    def _enqueue(self, connector: Connector, claim: Claim) -> asyncio.Future[bool]:
        job = _Job(connector, asyncio.get_running_loop().create_future(), claim.key.chat, claim)
        command = parse_command(claim.message.text) if claim.route == "engine" else None
        if command is not None and command.word in OVERTAKES:
            self._overtake(job, command)
        else:
            self._stand_in_line(job)
        return job.outcome

    def _stand_in_line(self, job: _Job) -> None:
        if self._closing:  # a message stays claimed, and is free with this process's end
            job.outcome.set_result(False)
            return
        self._open += 1
        line = self._lines.get(job.chat)
        if line is None:
            line = self._lines[job.chat] = _Line()
            self._start(self._work(job.chat, line))
        line.waiting.append(job)

    def _overtake(self, job: _Job, command: Command) -> None:
        if self._closing:
            job.outcome.set_result(False)
            return
        self._open += 1
        line = self._lines.get(job.chat)
        before = line.waiting[0].active if line is not None and line.waiting else None

        async def carry_out() -> None:
            try:
                job.outcome.set_result(await self._answer(job, command, before))
            finally:
                self._open -= 1
                if not job.outcome.done():
                    job.outcome.set_result(False)

        self._start(carry_out())

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work(self, chat: ChatKey, line: _Line) -> None:
        """Answer what waits in a chat, then forget the chat."""
        try:
            while line.waiting:
                job = line.waiting[0]
                try:
                    async with self._slots:
                        command = parse_command(job.claim.message.text) if job.claim else None
                        answered = await self._answer(job, command, None)
                    job.outcome.set_result(answered)
                finally:
                    line.waiting.popleft()
                    self._open -= 1
                    if not job.outcome.done():
                        job.outcome.set_result(False)
        finally:
            del self._lines[chat]
            self._open -= len(line.waiting)
            for job in line.waiting:
                job.outcome.set_result(False)

    async def _answer(self, job: _Job, command: Command | None, before: Active | None) -> bool:
        """Answer one message; False when the person got a notice instead, or nothing could be sent.

        ``before``: what is being done for the message that a command overtakes.
        """
        connector, claim = job.connector, job.claim
        try:
            if claim is None:
                claim = await self._claim_heard(job.chat, job.heard) if job.heard else None
                if claim is None:
                    return True
            answer = claim.answer
            if answer is None:
                if command is not None and claim.route == "engine":
                    answer = await self._desk.carry_out(command, connector, claim, before)
                else:
                    answer = await self._answers.answer(connector, claim, job.active)
                job.active.over = True
                going_on = [told.run_id for told in answer.told if not told.over]
                answer = await self._state.save_answer(claim.key, claim.message.user_id, answer)
                await self._follow(job.chat, *going_on, *answer.follow)
            async with self._turn_to_send(job.chat):
                await self._delivery.send(connector, claim, answer)
            await self._state.finish(claim.key)
        except NoAnswer as error:
            await self._give_up(job, claim, str(error), error)
        except SendError as error:
            await self._give_up(job, claim, f"not sent: {error}")
        except Exception as error:  # one message must not end the relay
            log.exception("a message of chat %s failed", job.chat.chat_id)
            cause = f"{type(error).__name__}: {error}"
            await self._give_up(job, claim, cause, NoAnswer(self._texts.internal, cause, begun=True))
        else:
            return True
        return False

    async def _claim_heard(self, chat: ChatKey, heard: tuple[Watch, Outgoing]) -> Claim | None:
        """Claim what a chat is to hear; None if it has heard it."""
        watch, answer = heard
        key = MessageKey(chat, f"{OWN_MESSAGE}{watch.run_id}:{answer.told[0].seq}")
        return await self._state.claim_told(key, watch.user_id, answer)

    async def _follow(self, chat: ChatKey, *run_ids: str) -> None:
        for run_id in run_ids:
            watch = await self._state.watched(chat, run_id)
            if watch is not None:
                self._watcher.follow(watch)

    async def _give_up(self, job: _Job, claim: Claim | None, cause: str, told: NoAnswer | None = None) -> None:
        name = claim.key.message_id if claim is not None else "of a run"
        log.warning("message %s of chat %s was not answered: %s", name, job.chat.chat_id, cause)
        try:
            if told is not None:
                async with self._turn_to_send(job.chat):
                    await self._delivery.notify(job.connector, job.chat, told.notice, told.numbers)
                if told.follow:
                    await self._follow(job.chat, told.follow)
            if claim is not None:
                if told is not None and not told.begun:
                    await self._state.save_request(claim.key, b"")
                await self._state.fail(claim.key, cause)
        except StateError as error:
            log.error("message %s of chat %s stays claimed: %s", name, job.chat.chat_id, error)
