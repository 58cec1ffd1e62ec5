"""What the relay asks of a chat platform: to hand in messages, and to take text and media back.

A connector is one class per platform and knows nothing of the engine; the relay knows nothing of any
platform. Implemented by ``console.ConsoleConnector`` and ``webhook.WebhookConnector``.

Exception
  Overloaded   the relay has no room for a message; the platform should deliver it again later
  SendError    the platform did not take what was sent, or nobody knows
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class ChatKey:
    """One chat of one bot: the unit of order. A thread that is answered apart is a chat of its own."""

    platform: str
    bot: str
    chat_id: str


@dataclass(frozen=True, slots=True)
class MessageKey:
    """One message of one chat: the unit of deduplication.

    The chat and the bot belong to it, because platforms number messages per user or per bot, and two bots in
    one group see the same message.
    """

    chat: ChatKey
    message_id: str


@dataclass(frozen=True, slots=True)
class IncomingMessage:
    """A message somebody wrote. ``message_id`` is the platform's id of the message, never that of its delivery."""

    bot: str
    chat_id: str
    user_id: str
    message_id: str
    text: str


class Unit(Enum):
    """What a platform counts when it limits a message's length."""

    BYTES = "bytes"
    """UTF-8 bytes."""
    CHARACTERS = "characters"
    """Unicode code points."""
    UTF16 = "utf16"
    """UTF-16 code units; an emoji counts two."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The longest text a platform takes as one message."""

    size: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a video to send, by its address."""

    media_type: Literal["image", "video"]
    url: str


@dataclass(frozen=True, slots=True)
class Sending:
    """Which sending this is, for platforms that can drop what they already have."""

    key: str
    """The same for every try of this part of this answer, in every process; of no other part."""
    repeated: bool = False
    """An earlier process may have delivered it: it died between sending and knowing (``unknown_after_send``)."""


class Overloaded(Exception):
    """The relay has no room for a message. It was not stored: the platform should deliver it again later."""


class SendError(Exception):
    """The platform did not take what was sent, or nobody knows whether it did.

    Args:
        message: what the platform said; no secrets.
        retryable: True only when it is certain that nothing was delivered and another try may help.
        unknown: True when it may have been delivered; it is then marked ``unknown_after_send``.
        retry_after: seconds the platform asks to wait before another try.
    """

    def __init__(
        self, message: str, *, retryable: bool = False, unknown: bool = False, retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.unknown = unknown
        self.retry_after = retry_after


class Receipt:
    """What became of a message that was handed in. It is stored by now: the platform may be told so.

    Args:
        outcome: ends with the work on the message; None for a duplicate, which makes no work.
    """

    def __init__(self, outcome: asyncio.Future[bool] | None) -> None:
        self._outcome = outcome

    @property
    def duplicate(self) -> bool:
        """Whether it was handed in before, and is being answered or has been."""
        return self._outcome is None

    async def answered(self) -> bool:
        """Wait until the work on the message is over; True when its answer was sent (for a duplicate: at once)."""
        return True if self._outcome is None else await asyncio.shield(self._outcome)


Accept = Callable[[IncomingMessage], Awaitable[Receipt]]
"""Hands a message to the relay and returns once it is stored, long before the answer.

Raises ``state.StateError`` when it could not be stored, and Overloaded when there is no room; the platform should
then deliver it again.
"""
EVERYBODY = "*"
"""Among ``approvers``: whoever may chat may approve."""


class Connector(Protocol):
    """One bot platform."""

    @property
    def name(self) -> str:
        """The platform, such as "console"; part of every stored key, so it never changes."""
        ...

    @property
    def claw(self) -> str:
        """The kind of client its runs are labelled with, such as "im_console"."""
        ...

    @property
    def tenant(self) -> str:
        """The tenant its messages belong to; empty: that of the claw's own key, and no person is named."""
        ...

    @property
    def gated(self) -> bool:
        """Whether IM_USE_ENGINE_CORE decides who answers; False: always the engine."""
        ...

    @property
    def approvers(self) -> Collection[str]:
        """User ids of those who may decide what a run asks to be allowed; EVERYBODY among them: all."""
        ...

    @property
    def limit(self) -> Limit:
        """The longest text ``send_text`` takes."""
        ...

    async def listen(self, accept: Accept) -> None:
        """Hand every message to ``accept``; return when there will be no more."""
        ...

    async def send_text(self, chat: ChatKey, text: str, sending: Sending) -> None:
        """Send one part; return once the platform has taken it.

        Raises:
            SendError: it was not taken.
        """
        ...

    async def send_media(self, chat: ChatKey, media: Media, sending: Sending) -> None:
        """Send an image or a video as such; return once the platform has taken it.

        Raises:
            SendError: it was not taken; the relay then sends the address as text.
        """
        ...
