"""Where the answer to a message comes from: the engine, or the service before it.

- The ``RunRequest`` is stored before it is sent and sent as it was stored, in every try and by every process:
  the engine takes another body under the same request_id for a mistake.
- A message never cancels what its chat is waiting for. It answers the one question that is open: the engine sees
  to that, and the answer to the message is then the next segment of the run that asked. If the conversation is busy
  with a run that somebody else started, the message waits in line behind it; if it waits for an approval, which no
  message can give, the person is told.
- An engine out of reach is given some seconds: one that is being restarted should not cost anybody a message.
- An engine that has lost the conversation does not silence the chat: a new one begins, and the person is told.

NoAnswer
"""

import asyncio
import hashlib
import json
import time
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from dualclaw import BusyPolicy, ContentPart, Message, Role, RunRequest
from dualclaw.errors import EngineError, Reason
from dualclaw.json_text import clean_text
from dualclaw_clients.adapters import BufferAdapter
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable
from dualclaw_clients.im import texts
from dualclaw_clients.im.connector import Connector, Limit, Media, MessageKey
from dualclaw_clients.im.gate import LegacyError
from dualclaw_clients.im.split import split_text
from dualclaw_clients.im.state import Claim, RelayState

if TYPE_CHECKING:
    from dualclaw_clients.im.legacy import LegacyClient

Piece = str | Media
"""One message to send: a text within the platform's limit, or media."""

_REACH_PAUSE = 0.25
_NOTHING_BEGAN: frozenset[Reason] = frozenset(
    {"INVALID_REQUEST", "UNKNOWN_AGENT", "UNKNOWN_CONVERSATION", "CONVERSATION_BUSY", "UNAUTHENTICATED",
     "PERMISSION_DENIED", "NOT_SWITCHABLE", "QUOTA_EXCEEDED", "OVERLOADED"}
)  # fmt: skip
"""Refusals after which no run exists, so another try may ask differently."""


class NoAnswer(Exception):
    """There is no answer to send.

    Args:
        notice: what to tell the person.
        cause: what to write down; not for the chat.
        begun: True when a run may exist: another try must repeat the same request.
    """

    def __init__(self, notice: str, cause: str, *, begun: bool) -> None:
        super().__init__(cause)
        self.notice = notice
        self.begun = begun


def request_id_of(key: MessageKey) -> str:
    """Return the run's request_id: the same in every process that ever sees the message, and in no other case."""
    place = [key.chat.platform, key.chat.bot, key.chat.chat_id, key.message_id]
    return "im-" + hashlib.sha256(json.dumps(place).encode()).hexdigest()


def pieces_of(answer: str | Media, limit: Limit) -> list[Piece]:
    """Return an answer as the messages to send."""
    if isinstance(answer, Media):
        return [answer]
    return [part.text for part in split_text(clean_text(answer), limit)]


def dump_pieces(pieces: list[Piece]) -> str:
    """Return pieces as text for the state file."""
    plain = [piece if isinstance(piece, str) else [piece.media_type, piece.url] for piece in pieces]
    return json.dumps(plain, ensure_ascii=False)


def load_pieces(text: str) -> list[Piece]:
    """Return the pieces that ``dump_pieces`` wrote."""
    plain: list[str | tuple[Literal["image", "video"], str]] = json.loads(text)
    return [piece if isinstance(piece, str) else Media(*piece) for piece in plain]


class Answers:
    """Asks for answers.

    Args:
        agent: name of the agent to ask; empty: the engine's default.
        run_timeout: seconds a run may take before the person is told to come back; the run goes on.
        reach: seconds an engine may be out of reach before the person is told.
    """

    def __init__(
        self,
        state: RelayState,
        engine: EngineClient,
        legacy: "LegacyClient | None",
        *,
        agent: str,
        run_timeout: float,
        reach: float,
    ) -> None:
        self._state = state
        self._engine = engine
        self._legacy = legacy
        self._agent = agent
        self._run_timeout = run_timeout
        self._reach = reach

    async def pieces(self, connector: Connector, claim: Claim) -> list[Piece]:
        """Return what to send in answer to a message; nothing only if the old service had nothing to say.

        Raises:
            NoAnswer: the engine or the old service gave none.
            StateError: the request could not be stored, so it was not made.
        """
        if claim.route == "legacy" and self._legacy is not None:
            try:
                text = await self._legacy.answer(claim.key, claim.message.user_id, claim.message.text)
            except LegacyError as error:
                raise NoAnswer(texts.legacy_failed(str(error)), f"legacy: {error}", begun=False) from error
            return pieces_of(text, connector.limit)
        return await self._from_engine(connector, claim)

    async def _from_engine(self, connector: Connector, claim: Claim) -> list[Piece]:
        engine, chat = self._engine, claim.key.chat
        if connector.tenant:
            engine = engine.acting_for(tenant=connector.tenant, subject=_subject(claim))
        if claim.request:
            request = RunRequest.FromString(claim.request)
        else:
            request = self._compose(connector, claim, await self._state.conversation_of(chat))
        notices: list[Piece] = []
        tried: set[Reason] = set()
        deadline = time.monotonic() + self._reach
        while True:
            await self._state.save_request(claim.key, request.SerializeToString(deterministic=True))
            try:
                answer = await self._stream(connector, claim, engine, request)
            except EngineUnreachable as error:
                if time.monotonic() >= deadline:
                    raise NoAnswer(texts.refused(error), str(error), begun=True) from error
                await asyncio.sleep(_REACH_PAUSE)
            except EngineError as error:
                again = error.reason not in tried and await self._amend(engine, request, error)
                if not again:
                    begun = error.reason not in _NOTHING_BEGAN
                    raise NoAnswer(texts.refused(error), f"{error.reason}: {error.message}", begun=begun) from error
                tried.add(error.reason)
                if error.reason == "UNKNOWN_CONVERSATION":
                    await self._state.save_conversation(chat, "")
                    notices.append(texts.NEW_CONVERSATION)
            else:
                return notices + (pieces_of(answer, connector.limit) or [texts.EMPTY_ANSWER])

    async def _amend(self, engine: EngineClient, request: RunRequest, error: EngineError) -> bool:
        """Change a refused request so that it can be made again; False when that would not help."""
        if error.reason == "UNKNOWN_CONVERSATION" and request.conversation_id:
            request.conversation_id = ""
            return True
        if error.reason == "CONVERSATION_BUSY":
            if run_id := error.metadata.get("run_id", ""):
                run = await engine.get_run(run_id)
                if texts.is_parked(run):
                    raise NoAnswer(texts.parked(run), f"run {run_id} waits for people", begun=False) from error
            request.on_busy = BusyPolicy.BUSY_POLICY_QUEUE
            return True
        return False

    async def _stream(
        self, connector: Connector, claim: Claim, engine: EngineClient, request: RunRequest
    ) -> str | Media:
        adapter = BufferAdapter(claw=connector.claw, numbered_replies=False)
        known = request.conversation_id
        async with engine.run(request, timeout=self._run_timeout) as run:
            # At once and not at the end: after a crash the next message must not begin another conversation.
            known = await self._remember(claim, known, run.conversation_id)
            async for event in run:
                await adapter(event)
                if event.HasField("done"):
                    known = await self._remember(claim, known, event.done.conversation_id)
        assembled = adapter.assemble()
        if isinstance(assembled, str):
            return assembled
        return Media(assembled["media_type"], clean_text(assembled["url"]))

    async def _remember(self, claim: Claim, known: str, conversation_id: str) -> str:
        if conversation_id in {"", known}:
            return known
        await self._state.save_conversation(claim.key.chat, conversation_id)
        return conversation_id

    def _compose(self, connector: Connector, claim: Claim, conversation_id: str) -> RunRequest:
        key, message = claim.key, claim.message
        return RunRequest(
            agent=self._agent,
            conversation_id=conversation_id,
            request_id=request_id_of(key),
            message=Message(role=Role.ROLE_USER, parts=[ContentPart(text=message.text)]),
            claw=connector.claw,
            metadata={
                "platform": key.chat.platform,
                "bot": key.chat.bot,
                "chat_id": key.chat.chat_id,
                "user_id": message.user_id,
                "message_id": key.message_id,
            },
        )


def _subject(claim: Claim) -> str:
    """Return the person as the engine records them; metadata takes printable ASCII only."""
    return f"{quote(claim.key.chat.platform)}:{quote(claim.message.user_id)}"
