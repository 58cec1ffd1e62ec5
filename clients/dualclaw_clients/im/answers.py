"""Where the answer to a message comes from: the engine, or the service before it.

- The ``RunRequest`` is stored before it is sent and sent as it was stored, in every try and by every process:
  the engine takes another body under the same request_id for a mistake.
- A message never cancels what its chat is waiting for. It answers the one question that is open: the engine sees
  to that, and the answer to the message is then the next segment of the run that asked. If the conversation is busy
  with a run that somebody else started, the message waits in line behind it; if it waits for an approval, which no
  plain message can give, the person is told what to reply.
- An engine that has lost the conversation does not silence the chat: a new one begins, and the person is told.
"""

import hashlib
import json
from typing import TYPE_CHECKING, Final

from dualclaw import BusyPolicy, ContentPart, Message, Role, RunRequest, RunState
from dualclaw.errors import EngineError, Reason
from dualclaw_clients.adapters.questions import questions_text
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable
from dualclaw_clients.im.approvals import Approvals
from dualclaw_clients.im.connector import Connector, MessageKey
from dualclaw_clients.im.gate import LegacyError
from dualclaw_clients.im.outgoing import Outgoing, joined, outgoing_text
from dualclaw_clients.im.reading import Active, NoAnswer, Reader, Stopped
from dualclaw_clients.im.state import Claim

if TYPE_CHECKING:
    from dualclaw_clients.im.legacy import LegacyClient

MAX_TEXT: Final = 256 * 1024
"""Characters of a message; the engine takes no longer one."""
_NOTHING_BEGAN: frozenset[Reason] = frozenset(
    {"INVALID_REQUEST", "UNKNOWN_AGENT", "UNKNOWN_CONVERSATION", "CONVERSATION_BUSY", "UNAUTHENTICATED",
     "PERMISSION_DENIED", "NOT_SWITCHABLE", "QUOTA_EXCEEDED", "OVERLOADED"}
)  # fmt: skip
"""Refusals after which no run exists, so another try may ask differently."""


def request_id_of(key: MessageKey) -> str:
    """Return the run's request_id: the same in every process that ever sees the message, and in no other case."""
    place = [key.chat.platform, key.chat.bot, key.chat.chat_id, key.message_id]
    return "im-" + hashlib.sha256(json.dumps(place).encode()).hexdigest()


class Answers:
    """Asks for answers.

    Args:
        agent: name of the agent to ask; empty: the engine's default.
    """

    def __init__(self, reader: Reader, approvals: Approvals, legacy: "LegacyClient | None", *, agent: str) -> None:
        self._reader = reader
        self._state = reader.state
        self._texts = reader.texts
        self._approvals = approvals
        self._legacy = legacy
        self._agent = agent

    async def answer(self, connector: Connector, claim: Claim, active: Active) -> Outgoing:
        """Return what to send in answer to a message; nothing only if the old service had nothing to say.

        Raises:
            NoAnswer: the engine or the old service gave none.
            StateError: the request could not be stored, so it was not made.
        """
        if claim.route == "legacy" and self._legacy is not None:
            try:
                text = await self._legacy.answer(claim.key, claim.message.user_id, claim.message.text)
            except LegacyError as error:
                notice = self._texts.legacy_failed.format(problem=error)
                raise NoAnswer(notice, f"legacy: {error}", begun=False) from error
            return outgoing_text(text, connector.limit)
        if not claim.message.text.strip():
            return outgoing_text(self._texts.empty_message, connector.limit)
        if len(claim.message.text) > MAX_TEXT:
            return outgoing_text(self._texts.long_message.format(limit=MAX_TEXT), connector.limit)
        try:
            if not claim.request and (replied := await self._approvals.reply(connector, claim, active)) is not None:
                return replied
            return await self._ask(connector, claim, active)
        except Stopped:
            return outgoing_text(self._texts.cancelled, connector.limit)

    async def _ask(self, connector: Connector, claim: Claim, active: Active) -> Outgoing:
        chat = claim.key.chat
        engine = self._reader.engine_for(connector, chat, claim.message.user_id)
        if claim.request:
            request = RunRequest.FromString(claim.request)
        else:
            request = self._compose(connector, claim, await self._state.conversation_of(chat))
        notices: list[Outgoing] = []
        tried: set[Reason] = set()
        while True:
            await self._state.save_request(claim.key, request.SerializeToString(deterministic=True))
            try:
                answer = await self._reader.within_reach(
                    lambda: self._segment(connector, claim, engine, request, active), active
                )
                return joined([*notices, answer])
            except EngineError as error:
                unreachable = isinstance(error, EngineUnreachable)
                again = not unreachable and error.reason not in tried
                if not (again and await self._amend(connector, claim, engine, request, error)):
                    begun = error.reason not in _NOTHING_BEGAN
                    cause = f"{error.reason}: {error.message}"
                    notice = self._texts.refused(error)
                    raise NoAnswer(notice, cause, begun=begun, follow=active.run_id) from error
                tried.add(error.reason)
                if error.reason == "UNKNOWN_CONVERSATION":
                    await self._state.save_conversation(chat, "")
                    notices.append(outgoing_text(self._texts.new_conversation, connector.limit))

    async def _amend(
        self, connector: Connector, claim: Claim, engine: EngineClient, request: RunRequest, error: EngineError
    ) -> bool:
        """Change a refused request so that it can be made again; False when that would not help."""
        if error.reason == "UNKNOWN_CONVERSATION" and request.conversation_id:
            request.conversation_id = ""
            return True
        if error.reason == "CONVERSATION_BUSY":
            if run_id := error.metadata.get("run_id", ""):
                run = await engine.get_run(run_id)
                if run.state == RunState.RUN_STATE_INTERRUPTED:
                    numbers = await self._reader.numbers(claim.key.chat, run_id, run.interrupts)
                    asked = questions_text(run.interrupts, numbers=numbers, wording=self._texts.wording)
                    notice = "\n\n".join(filter(None, (self._texts.parked.format(run=run_id), asked)))
                    raise NoAnswer(notice, f"run {run_id} waits for people", begun=False, numbers=numbers) from error
            request.on_busy = BusyPolicy.BUSY_POLICY_QUEUE
            return True
        return False

    async def _segment(
        self, connector: Connector, claim: Claim, engine: EngineClient, request: RunRequest, active: Active
    ) -> Outgoing:
        known = request.conversation_id

        # At once and not at the end: after a crash the next message must not begin another conversation.
        async def remember(conversation_id: str) -> None:
            nonlocal known
            if conversation_id not in {"", known}:
                await self._state.save_conversation(claim.key.chat, conversation_id)
                known = conversation_id

        stream = engine.run(request, timeout=self._reader.run_timeout)
        return await self._reader.segment(connector, claim, stream, active, remember)

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
