"""The webhook connector: takes signed messages by HTTP and answers by signed POSTs, for a platform of one's own.

``POST /webhook/NAME`` with ``{"message_id", "chat_id", "user_id", "text"}`` in JSON, signed as ``signature`` says.

- The raw bytes are checked before anything parses them, and their number before they are all read.
- 200 means stored, long before the answer; 503 means not stored, deliver it again. A message that came before is
  acknowledged in the same way and not answered twice. The sender's 4xx are mistakes that another try does not mend.
- ``GET /healthz`` answers 200 to whoever looks after processes.
- Where to reply is a matter of settings (``webhook_reply``). A field of the message that says otherwise is ignored.
"""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Final, Protocol

import uvicorn

from dualclaw_clients.http_heads import HEAD_TIMEOUT, TimedH11
from dualclaw_clients.im.connector import (
    Accept,
    ChatKey,
    IncomingMessage,
    Limit,
    Media,
    Overloaded,
    Sending,
    Unit,
)
from dualclaw_clients.im.signature import SIGNATURE_HEADER, TIMESTAMP_HEADER, BadSignature, check
from dualclaw_clients.im.state import StateError

log = logging.getLogger(__name__)

MAX_ID: Final = 512
"""Bytes of an id."""
READ_TIMEOUT: Final = 15.0
"""Seconds a body may take."""
GRACE: Final = 5
"""Seconds that open requests may take to finish once the connector ends."""
_IDS = ("message_id", "chat_id", "user_id")

Message = MutableMapping[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Replies(Protocol):
    """What sends replies. Implemented by ``webhook_reply.ReplySender``."""

    async def send_text(self, chat: ChatKey, text: str, sending: Sending) -> None:
        """Send a text. Raises SendError."""
        ...

    async def send_media(self, chat: ChatKey, media: Media, sending: Sending) -> None:
        """Send an image or a video as such. Raises SendError."""
        ...


class Refused(Exception):
    """A request cannot be taken; HTTP status and what is wrong with it."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class WebhookConnector:
    """One bot behind one address.

    Args:
        sockets: bound sockets to listen on; closed in the end.
        replies: sends what the bot says.
        bot: its name in the address.
        secrets: sign messages; each counts.
        tenant: see Connector.
        approvers: see Connector.
        limit: characters of one reply.
        max_body: bytes of one request.
        window: seconds a timestamp may be off.
        head_timeout: seconds a connection may take to bring the head of a request.
    """

    name = "webhook"
    claw = "im_webhook"
    gated = True

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        replies: Replies,
        *,
        bot: str,
        secrets: Sequence[str],
        tenant: str = "",
        approvers: Collection[str] = (),
        limit: int = 4000,
        max_body: int = 1024 * 1024,
        window: float = 300.0,
        head_timeout: float = HEAD_TIMEOUT,
    ) -> None:
        if not secrets:
            raise ValueError("a webhook without a secret would take messages from anybody")
        self._sockets = list(sockets)
        self._replies = replies
        self._bot = bot
        self._secrets = tuple(secrets)
        self._max_body = max_body
        self._window = window
        self._head_timeout = head_timeout
        self._accept: Accept | None = None
        self.tenant = tenant
        self.approvers = frozenset(approvers)
        self.limit = Limit(limit, Unit.CHARACTERS)

    async def listen(self, accept: Accept) -> None:
        """Serve until cancelled; open requests get their answer."""
        self._accept = accept
        config = uvicorn.Config(
            self._app, interface="asgi3", http=TimedH11.within(self._head_timeout), ws="none", lifespan="off",
            access_log=False, log_config=None, server_header=False, timeout_graceful_shutdown=GRACE,
            h11_max_incomplete_event_size=16 * 1024,
        )  # fmt: skip
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve(self._sockets))
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            await serving

    async def send_text(self, chat: ChatKey, text: str, sending: Sending) -> None:
        """POST a part to where replies go."""
        await self._replies.send_text(chat, text, sending)

    async def send_media(self, chat: ChatKey, media: Media, sending: Sending) -> None:
        """POST an image or a video to where replies go."""
        await self._replies.send_media(chat, media, sending)

    async def _app(self, scope: Mapping[str, object], receive: Receive, send: Send) -> None:
        try:
            status, answer = await self._take(scope, receive)
        except Refused as error:
            status, answer = error.status, {"error": str(error)}
        except Exception:
            log.exception("a webhook request failed")
            status, answer = 500, {"error": "internal error; deliver the message again"}
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 503:
            headers.append((b"retry-after", b"5"))
        if status in {408, 413}:
            headers.append((b"connection", b"close"))  # what is left of the body is not wanted
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _take(self, scope: Mapping[str, object], receive: Receive) -> tuple[int, dict[str, str]]:
        path, method = scope.get("path"), scope.get("method")
        if path == "/healthz" and method in {"GET", "HEAD"}:
            return 200, {"status": "ok"}
        if path != f"/webhook/{self._bot}":
            raise Refused(404, "there is nothing here")
        if method != "POST":
            raise Refused(405, "POST messages here")
        headers = _headers(scope)
        body = await self._body(headers, receive)
        try:
            check(
                self._secrets, headers.get(TIMESTAMP_HEADER, ""), headers.get(SIGNATURE_HEADER, ""), body,
                now=time.time(), window=self._window,
            )  # fmt: skip
        except BadSignature as error:
            raise Refused(401, str(error)) from None
        message = _message(self._bot, body)
        if self._accept is None:
            raise Refused(503, "not ready; deliver the message again")
        try:
            receipt = await self._accept(message)
        except Overloaded as error:
            raise Refused(503, f"{error}; deliver the message again") from None
        except StateError as error:
            log.error("a message could not be stored: %s", error)
            raise Refused(503, "the message could not be stored; deliver it again") from None
        return 200, {"status": "duplicate" if receipt.duplicate else "accepted"}

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        too_long = Refused(413, f"the body is longer than {self._max_body} bytes")
        declared = headers.get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()) or int(declared[:20]) > self._max_body:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                while True:
                    event = await receive()
                    chunk = event.get("body", b"")
                    if event.get("type") != "http.request" or not isinstance(chunk, bytes):
                        raise Refused(400, "the request ended early")
                    body += chunk
                    if len(body) > self._max_body:
                        raise too_long
                    if not event.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise Refused(408, f"the body took longer than {READ_TIMEOUT:g} seconds") from None


class _Server(uvicorn.Server):
    """A server that leaves the process's signals alone: they are the program's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _headers(scope: Mapping[str, object]) -> dict[str, str]:
    """Return the headers by name; of one that comes twice all values, so that no first or last one is trusted."""
    raw = scope.get("headers")
    found: dict[str, str] = {}
    for name, value in raw if isinstance(raw, list) else []:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        found[key] = f"{found[key]},{text}" if key in found else text
    return found


def _message(bot: str, body: bytes) -> IncomingMessage:
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, "the body must be one JSON object")
    problems = [f"{name} must be a text of 1 to {MAX_ID} bytes" for name in _IDS if not _is_id(found.get(name))]
    if not isinstance(found.get("text"), str):
        problems.append("text must be a text")
    if problems:
        raise Refused(400, "; ".join(problems))
    return IncomingMessage(bot, found["chat_id"], found["user_id"], found["message_id"], found["text"])


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value.encode("utf-8", "replace")) <= MAX_ID
