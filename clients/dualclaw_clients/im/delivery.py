"""Sends an answer part by part: in order, the next one when the platform has taken the one before.

A part is tried again only when the connector is certain that nothing was delivered; else the rest of the answer
stays in the state file and a repeat of the message goes on there. Media that is not taken is sent as its address.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dualclaw_clients.im import texts
from dualclaw_clients.im.answers import Piece, pieces_of
from dualclaw_clients.im.connector import ChatKey, Connector, Media, MessageKey, SendError
from dualclaw_clients.im.state import RelayState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SendLimits:
    """How long and how often a part is tried."""

    timeout: float = 30.0
    """Seconds the platform may take for one part."""
    tries: int = 3
    pause: float = 0.5
    """Seconds before the second try, doubled each time."""


class Delivery:
    """Sends answers and notices through connectors."""

    def __init__(self, state: RelayState, limits: SendLimits) -> None:
        self._state = state
        self._limits = limits

    async def send(self, connector: Connector, key: MessageKey, pieces: list[Piece], *, sent: int) -> None:
        """Send the pieces from number ``sent`` on and count each in the state file.

        Raises:
            SendError: a piece was not taken; none after it was sent.
            StateError: a piece was sent but not counted; none after it was sent.
        """
        for number, piece in enumerate(pieces[sent:], sent + 1):
            await self._send_piece(connector, key.chat, piece)
            await self._state.save_sent(key, number)

    async def notify(self, connector: Connector, chat: ChatKey, notice: str) -> None:
        """Send a notice; if that fails too there is nobody left to tell but the log."""
        try:
            for piece in pieces_of(notice, connector.limit):
                await self._send_piece(connector, chat, piece)
        except SendError as error:
            log.warning("%s did not take a notice for chat %s: %s", connector.name, chat.chat_id, error)

    async def _send_piece(self, connector: Connector, chat: ChatKey, piece: Piece) -> None:
        if isinstance(piece, Media):
            try:
                await self._try(lambda: connector.send_media(chat, piece))
            except SendError as error:
                log.warning("%s did not take %s, its address is sent: %s", connector.name, piece.media_type, error)
                for part in pieces_of(texts.media_as_text(piece.media_type, piece.url), connector.limit):
                    await self._send_piece(connector, chat, part)
        elif piece.strip():  # platforms refuse a message of white space only
            await self._try(lambda: connector.send_text(chat, piece))

    async def _try(self, send: Callable[[], Awaitable[None]]) -> None:
        for attempt in range(1, self._limits.tries + 1):
            try:
                async with asyncio.timeout(self._limits.timeout) as limit:
                    await send()
            except TimeoutError as error:
                if not limit.expired():
                    raise SendError(f"the connection timed out: {error}") from error
                raise SendError(f"not taken within {self._limits.timeout:g} seconds") from error
            except SendError as error:
                if not error.retryable or attempt == self._limits.tries:
                    raise
                await asyncio.sleep(self._limits.pause * 2 ** (attempt - 1))
            except Exception as error:  # a mistake in a connector costs its own answer only
                log.exception("a connector broke")
                raise SendError(f"the connector broke: {type(error).__name__}: {error}") from error
            else:
                return
