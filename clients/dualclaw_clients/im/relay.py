"""Carries messages from chats to the engine and answers back: one queue per chat, each message once.

- Messages of a chat are answered one after the other in the order they came, chats side by side. A busy chat
  queues; a message that finds the queue full is refused with a text, none vanishes.
- ``accept`` returns when the message is stored, long before its answer: a platform that resends after five
  seconds has its acknowledgement by then, and a resent message is known by its key.
- What ends without an answer ends with a text to the person and the mark ``failed``; the platform's next
  delivery of the message tries again. What ends because the process ends keeps its claim, and is taken up by the
  next relay on the state file, or by one that runs beside this one.
- No business here: what is asked, decided and remembered is the engine's.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dualclaw.json_text import clean_text
from dualclaw_clients.engine_client import EngineClient
from dualclaw_clients.im import texts
from dualclaw_clients.im.answers import Answers, NoAnswer, dump_pieces, load_pieces
from dualclaw_clients.im.connector import ChatKey, Connector, IncomingMessage, MessageKey, Receipt, SendError
from dualclaw_clients.im.delivery import Delivery, SendLimits
from dualclaw_clients.im.gate import Gate
from dualclaw_clients.im.state import Claim, RelayState, Route, StateError

if TYPE_CHECKING:
    from dualclaw_clients.im.legacy import LegacyClient

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What bounds a relay; times in seconds."""

    run_timeout: float = 1800.0
    """How long a run may take before the person is told to come back later."""
    reach: float = 10.0
    """How long an engine may be out of reach before a person is told."""
    max_waiting: int = 100
    """Messages that may wait in one chat."""
    max_parallel: int = 64
    """Chats that are answered at the same time."""
    sweep: float = 30.0
    """Between two looks for messages whose process has died."""
    grace: float = 30.0
    """How long leaving the relay waits for answers under way."""
    send: SendLimits = field(default_factory=SendLimits)


@dataclass(slots=True)
class _Job:
    connector: Connector
    claim: Claim
    outcome: asyncio.Future[bool]


@dataclass(slots=True)
class _Line:
    """The messages that wait in one chat."""

    waiting: deque[_Job] = field(default_factory=deque)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an answer or a notice goes out, so that none gets between the parts of another."""


class Relay:
    """The relay of one process; an async context manager. Entering takes up what an earlier process left.

    Args:
        state: the state file; may be shared with other processes.
        engine: the engine; closed by the caller.
        connectors: the platforms, each name once.
        gate: which tenants of gated connectors the engine answers.
        legacy: answers the others; None only if there are none.
        agent: name of the agent to ask; empty: the engine's default.
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
    ) -> None:
        self._state = state
        self._connectors = {connector.name: connector for connector in connectors}
        if len(self._connectors) != len(connectors):
            raise ValueError("two connectors of one name: their messages could not be told apart")
        self._gate = gate or Gate()
        if legacy is None and any(connector.gated for connector in connectors):
            self._gate.require_legacy("")
        self._limits = limits or RelayLimits()
        self._answers = Answers(
            state, engine, legacy, agent=agent, run_timeout=self._limits.run_timeout, reach=self._limits.reach
        )
        self._delivery = Delivery(state, self._limits.send)
        self._slots = asyncio.Semaphore(self._limits.max_parallel)
        self._lines: dict[ChatKey, _Line] = {}
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    async def __aenter__(self) -> Self:
        orphans = await self._state.adopt(self._connectors)
        await self._group.__aenter__()
        self._adopt(orphans)
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
            StateError: it could not be stored; nothing will be done about it.
        """
        # A task of its own: whoever is cancelled here, say with its HTTP request, must not leave a message that
        # is claimed but stands in no queue.
        admission = self._group.create_task(self._admit(connector, message))
        outcome = await asyncio.shield(admission)
        if isinstance(outcome, StateError):
            raise outcome
        return outcome

    async def _admit(self, connector: Connector, message: IncomingMessage) -> Receipt | StateError:
        chat = ChatKey(connector.name, clean_text(message.bot), clean_text(message.chat_id))
        key = MessageKey(chat, clean_text(message.message_id))
        message = replace(message, user_id=clean_text(message.user_id), text=clean_text(message.text))
        through = not connector.gated or self._gate.lets_through(connector.tenant)
        route: Route = "engine" if through else "legacy"
        try:
            claim = await self._state.claim(key, message, route)
            if claim is None:
                return Receipt(None)
            line = self._lines.get(chat)
            if line is not None and len(line.waiting) >= self._limits.max_waiting:
                await self._state.fail(key, "too many messages wait in the chat")
                return Receipt(self._refuse(connector, chat, line))
        except StateError as error:
            return error
        return Receipt(self._enqueue(connector, claim))

    def _refuse(self, connector: Connector, chat: ChatKey, line: _Line) -> asyncio.Future[bool]:
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def tell() -> None:
            async with line.sending:
                await self._delivery.notify(connector, chat, texts.TOO_MANY_WAITING)

        def told(_: asyncio.Task[None]) -> None:
            outcome.set_result(False)

        self._start(tell()).add_done_callback(told)
        return outcome

    def _adopt(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._enqueue(self._connectors[claim.key.chat.platform], claim)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep)
            try:
                await self._state.prune()
                self._adopt(await self._state.adopt(self._connectors))
            except StateError as error:
                log.warning("messages left by dead processes were not looked for: %s", error)

    def _enqueue(self, connector: Connector, claim: Claim) -> asyncio.Future[bool]:
        job = _Job(connector, claim, asyncio.get_running_loop().create_future())
        if self._closing:  # it stays claimed, and is free with this process's end
            job.outcome.set_result(False)
            return job.outcome
        chat = claim.key.chat
        line = self._lines.get(chat)
        if line is None:
            line = self._lines[chat] = _Line()
            self._start(self._work(chat, line))
        line.waiting.append(job)
        return job.outcome

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
                        answered = await self._answer(line, job)
                    job.outcome.set_result(answered)
                finally:
                    line.waiting.popleft()
                    if not job.outcome.done():
                        job.outcome.set_result(False)
        finally:
            del self._lines[chat]
            for job in line.waiting:
                job.outcome.set_result(False)

    async def _answer(self, line: _Line, job: _Job) -> bool:
        """Answer one message; False when the person got a notice instead, or nothing could be sent."""
        connector, claim = job.connector, job.claim
        try:
            if claim.answer is None:
                pieces = await self._answers.pieces(connector, claim)
                await self._state.save_answer(claim.key, dump_pieces(pieces))
            else:
                pieces = load_pieces(claim.answer)
            async with line.sending:
                await self._delivery.send(connector, claim.key, pieces, sent=claim.sent)
            await self._state.finish(claim.key)
        except NoAnswer as error:
            await self._give_up(line, job, error.notice, str(error), forget_request=not error.begun)
        except SendError as error:
            await self._give_up(line, job, "", f"not sent: {error}")
        except Exception as error:  # one message must not end the relay
            log.exception("message %s of chat %s failed", claim.key.message_id, claim.key.chat.chat_id)
            await self._give_up(line, job, texts.INTERNAL, f"{type(error).__name__}: {error}")
        else:
            return True
        return False

    async def _give_up(self, line: _Line, job: _Job, notice: str, cause: str, *, forget_request: bool = False) -> None:
        key = job.claim.key
        log.warning("message %s of chat %s was not answered: %s", key.message_id, key.chat.chat_id, cause)
        if notice:
            async with line.sending:
                await self._delivery.notify(job.connector, key.chat, notice)
        try:
            if forget_request:
                await self._state.save_request(key, b"")
            await self._state.fail(key, cause)
        except StateError as error:
            log.error("message %s of chat %s stays claimed: %s", key.message_id, key.chat.chat_id, error)
