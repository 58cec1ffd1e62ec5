"""A chat platform that lives in the test, an old bot service on a real socket, and relays between them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from dualclaw.events import make_delta, make_done
from dualclaw_clients.engine_client import EngineClient, Reconnect
from dualclaw_clients.im.connector import ChatKey, IncomingMessage, Limit, Media, SendError, Sending, Unit
from dualclaw_clients.im.delivery import SendLimits
from dualclaw_clients.im.relay import Relay, RelayLimits
from dualclaw_clients.im.state import RelayState

QUICK = RelayLimits(grace=0.2, sweep=0.05, reach=0, send=SendLimits(timeout=60, tries=2, pause=0.01))


class Platform:
    """A connector whose person is the test: ``sent`` is what they read, ``refusals`` what goes wrong next.

    A number or an event of ``refusals`` is what a send takes.
    """

    claw = "im_test"

    def __init__(
        self, name: str = "test", *, gated: bool = False, tenant: str = "", limit: Limit | None = None,
        approvers=("boss",),
    ):  # fmt: skip
        self.name = name
        self.gated = gated
        self.tenant = tenant
        self.limit = limit or Limit(10_000, Unit.CHARACTERS)
        self.approvers = frozenset(approvers)
        self.sendings: list[Sending] = []
        self.sent: list[tuple[str, str | Media]] = []
        self.refusals: list[SendError | asyncio.Event | float | None] = []
        self.arrivals: asyncio.Queue[IncomingMessage | None] = asyncio.Queue()
        self._changed = asyncio.Condition()

    async def listen(self, accept) -> None:
        while (message := await self.arrivals.get()) is not None:
            await accept(message)

    async def send_text(self, chat: ChatKey, text: str, sending: Sending) -> None:
        await self._send(chat, text, sending)

    async def send_media(self, chat: ChatKey, media: Media, sending: Sending) -> None:
        await self._send(chat, media, sending)

    async def _send(self, chat: ChatKey, what: str | Media, sending: Sending) -> None:
        self.sendings.append(sending)
        trouble = self.refusals.pop(0) if self.refusals else None
        if isinstance(trouble, SendError):
            raise trouble
        if isinstance(trouble, asyncio.Event):
            await asyncio.wait_for(trouble.wait(), 100)
        else:
            await asyncio.sleep(trouble or 0)
        self.sent.append((chat.chat_id, what))
        async with self._changed:
            self._changed.notify_all()

    def texts(self, chat_id: str = "c1") -> list[str | Media]:
        """What was sent to a chat, in order."""
        return [what for chat, what in self.sent if chat == chat_id]

    async def wait_for(self, count: int) -> None:
        """Wait until so many messages have been sent."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: len(self.sent) >= count)


@dataclass
class Legacy:
    """The bot service from before: answers each POST with the next of ``replies`` (status, body)."""

    replies: list[tuple[int, bytes] | float] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            self.requests.append(json.loads(await reader.readexactly(length)))
            reply = self.replies.pop(0)
            if isinstance(reply, float):
                await asyncio.wait_for(reader.read(), reply)
            else:
                status, body = reply
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
                await writer.drain()
        writer.close()


@pytest.fixture
async def legacy() -> AsyncIterator[Legacy]:
    """An old bot service on a loopback socket."""
    service = Legacy()
    async with await asyncio.start_server(service.serve, "127.0.0.1", 0) as server:
        service.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/bot"
        yield service


@pytest.fixture
def platform() -> Platform:
    """A platform without a gate."""
    return Platform()


@pytest.fixture
def new_platform() -> type[Platform]:
    """Makes further platforms."""
    return Platform


@pytest.fixture
def relaying(fake_engine, tmp_path):
    """Opens a relay between platforms and the fake engine: ``relaying(platform, state=..., limits=..., ...)``."""

    @contextlib.asynccontextmanager
    async def open_one(*platforms, state=None, limits=QUICK, reconnect=None, **more) -> AsyncIterator[Relay]:
        place = state or tmp_path / "im.sqlite"
        async with (
            EngineClient(fake_engine.target, reconnect=reconnect or Reconnect(total=0.5)) as engine,
            await RelayState.open(place) as memory,
            Relay(memory, engine, platforms, limits=limits, **more) as relay,
        ):
            yield relay

    return open_one


@pytest.fixture
def message() -> Callable[..., IncomingMessage]:
    """Makes messages: ``message("m1", "hello", chat="c1")``."""

    def make(message_id: str, text: str = "hello", chat: str = "c1", user: str = "u1", bot: str = "b1"):
        return IncomingMessage(bot, chat, user, message_id, text)

    return make


@pytest.fixture
def answer(fake_engine):
    """Scripts the next run of the fake engine: a text, in two deltas, after any steps given before it."""

    def script(text: str, *before) -> None:
        middle = len(text) // 2
        done = make_done(message_id="x", conversation_id=fake_engine.conversation_id, content=text)
        fake_engine.on("Run", [*before, make_delta(text[:middle]), make_delta(text[middle:]), done])

    return script


@pytest.fixture
def ask() -> Callable[..., Awaitable[bool]]:
    """Hands a message to a relay and waits for the end of the work on it; True if it was answered."""

    async def hand_in(relay: Relay, platform: Platform, message: IncomingMessage) -> bool:
        async with asyncio.timeout(60):
            return await (await relay.accept(platform, message)).answered()

    return hand_in
