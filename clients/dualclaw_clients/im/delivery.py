"""The outbox: sends an answer part by part, in order, the next one when the platform has taken the one before.

- Before a part goes out it is noted as begun (``send_started``), and as sent when the platform has taken it.
- A part is tried again only when the connector is certain that nothing was delivered, for some minutes; the chat's
  queue waits meanwhile. If it still fails, or was refused, the rest stays in the state file and a repeat of the
  message goes on there.
- A part that had begun when its process died, or whose answer never came, may have arrived or not: it is marked
  ``unknown_after_send`` in the state file and in the log. Who takes the message up again sends it once more by
  default, under the same key and marked as repeated, because half an answer is worse than a doubled paragraph and a
  platform that knows the key drops the double. With ``resend`` False it is not sent again, and a line says so.
- Media that is not taken is sent as its address.
"""

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from dualclaw_clients.im.connector import ChatKey, Connector, Media, MessageKey, SendError, Sending
from dualclaw_clients.im.outgoing import Outgoing, Piece, pieces_of
from dualclaw_clients.im.state import Claim, RelayState
from dualclaw_clients.im.texts import Texts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SendLimits:
    """How long and how often a part is tried."""

    timeout: float = 30.0
    """Seconds the platform may take for one part."""
    tries: int = 10
    pause: float = 0.5
    """Seconds before the second try, doubled each time."""
    longest: float = 60.0
    """Longest pause between two tries, unless the platform asks for more."""
    patience: float = 300.0
    """Longest pause a platform may ask for."""
    resend: bool = True
    """Whether a part is sent again that may have arrived."""


def sending_key_of(key: MessageKey, part: int) -> str:
    """Return the key of a part of the answer to a message: the same for every try, in every process."""
    place = [key.chat.platform, key.chat.bot, key.chat.chat_id, key.message_id, part]
    return "im-part-" + hashlib.sha256(json.dumps(place).encode()).hexdigest()


class Delivery:
    """Sends answers and notices through connectors."""

    def __init__(self, state: RelayState, limits: SendLimits, texts: Texts) -> None:
        self._state = state
        self._limits = limits
        self._texts = texts

    async def send(self, connector: Connector, claim: Claim, answer: Outgoing) -> None:
        """Send what the platform has not taken yet of an answer, and note each part in the state file.

        Raises:
            SendError: a part was not taken, or nobody knows; none after it was sent.
            StateError: a part was sent but not noted; none after it was sent.
        """
        key = claim.key
        shown_at = await self._state.newest_arrival() if answer.numbers else 0
        for part, piece in enumerate(answer.pieces[claim.sent :], claim.sent + 1):
            is_doubtful = claim.started == part
            sending, sent = Sending(sending_key_of(key, part), repeated=is_doubtful), piece
            if is_doubtful:
                log.warning("part %d for chat %s: unknown_after_send", part, key.chat.chat_id)
                if not self._limits.resend:
                    sending, sent = Sending(sending.key + "-note"), self._texts.maybe_sent
            await self._state.start_part(key, part, unsure=is_doubtful)
            try:
                await self._send_piece(connector, key.chat, sent, sending)
            except SendError as error:
                if error.unknown:
                    log.warning("part %d for chat %s: unknown_after_send: %s", part, key.chat.chat_id, error)
                    await self._state.mark_unknown(key)
                else:
                    await self._state.save_sent(key, part - 1)
                raise
            await self._state.save_sent(key, part)
        if answer.numbers:
            await self._state.show(key.chat, answer.numbers, shown_at)

    async def notify(self, connector: Connector, chat: ChatKey, notice: str, numbers: Sequence[int] = ()) -> None:
        """Send a notice; if that fails too there is nobody left to tell but the log."""
        try:
            shown_at = await self._state.newest_arrival() if numbers else 0
            for piece in pieces_of(notice, connector.limit):
                await self._send_piece(connector, chat, piece, Sending("im-notice-" + uuid.uuid4().hex))
            if numbers:
                await self._state.show(chat, numbers, shown_at)
        except SendError as error:
            log.warning("%s did not take a notice for chat %s: %s", connector.name, chat.chat_id, error)

    async def _send_piece(self, connector: Connector, chat: ChatKey, piece: Piece, sending: Sending) -> None:
        if isinstance(piece, Media):
            try:
                await self._try(lambda: connector.send_media(chat, piece, sending))
            except SendError as error:
                log.warning("%s did not take %s, its address is sent: %s", connector.name, piece.media_type, error)
                text = self._texts.media_as_text(piece.media_type, piece.url)
                for number, part in enumerate(pieces_of(text, connector.limit), 1):
                    other = replace(sending, key=f"{sending.key}-text-{number}")
                    await self._send_piece(connector, chat, part, other)
        elif piece.strip():  # platforms refuse a message of white space only
            await self._try(lambda: connector.send_text(chat, piece, sending))

    async def _try(self, send: Callable[[], Awaitable[None]]) -> None:
        limits = self._limits
        for attempt in range(1, limits.tries + 1):
            try:
                async with asyncio.timeout(limits.timeout) as limit:
                    await send()
            except TimeoutError as error:
                if not limit.expired():
                    raise SendError(f"the connection timed out: {error}", unknown=True) from error
                raise SendError(f"not taken within {limits.timeout:g} seconds", unknown=True) from error
            except SendError as error:
                if not error.retryable or attempt == limits.tries:
                    raise
                pause = min(limits.pause * 2 ** (attempt - 1), limits.longest)
                await asyncio.sleep(max(pause, min(error.retry_after, limits.patience)))
            except Exception as error:  # a mistake in a connector costs its own answer only
                log.exception("a connector broke")
                raise SendError(f"the connector broke: {type(error).__name__}: {error}", unknown=True) from error
            else:
                return
