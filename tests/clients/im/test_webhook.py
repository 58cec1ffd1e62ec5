"""The webhook connector over real sockets: who may hand in messages, and what becomes of replies."""

import asyncio
import contextlib
import json
import socket
import time

import httpx
import pytest

from dualclaw_clients.im.connector import ChatKey, Media, Overloaded, Receipt, SendError, Sending
from dualclaw_clients.im.signature import BadSignature, check, sign
from dualclaw_clients.im.state import StateError
from dualclaw_clients.im.webhook import WebhookConnector
from dualclaw_clients.im.webhook_reply import ReplySender, check_reply_url

SECRETS = ("the new secret of this", "the old secret of this")
GOOD = {"message_id": "m1", "chat_id": "c1", "user_id": "u1", "text": "hi", "reply_url": "http://169.254.169.254/"}
CHAT = ChatKey("webhook", "bot", "c1")


class Inbox:
    """Takes what the connector hands in; ``trouble`` is raised instead."""

    def __init__(self):
        self.messages, self.trouble = [], None

    async def accept(self, message):
        if self.trouble:
            raise self.trouble
        duplicate = message in self.messages
        self.messages.append(message)
        return Receipt(None if duplicate else asyncio.get_running_loop().create_future())


@pytest.fixture
async def hook():
    """A listening connector: its inbox, a function that posts to it, and a client."""
    async with hooked(head_timeout=60) as parts:
        yield parts


@contextlib.asynccontextmanager
async def hooked(*, head_timeout):
    """The same, with so much patience for the heads of requests."""
    inbox = Inbox()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        connector = WebhookConnector(
            [listening], None, bot="bot", secrets=SECRETS, max_body=2000, head_timeout=head_timeout
        )
        task = asyncio.ensure_future(connector.listen(inbox.accept))
        async with httpx.AsyncClient(trust_env=False, base_url=url, timeout=60) as http:

            async def post(body=GOOD, *, secret=SECRETS[0], at=None, path="/webhook/bot", signature=None):
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                when = str(int(time.time()) if at is None else at)
                headers = {"dualclaw-timestamp": when, "dualclaw-signature": signature or sign(secret, when, raw)}
                return await http.post(path, content=raw, headers=headers)

            yield inbox, post, http
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)


async def test_a_signed_message_is_taken_by_any_secret_and_known_again(hook):
    """200 says stored; the same message again is a duplicate, acknowledged as well."""
    inbox, post, http = hook
    first, again, old = await post(), await post(), await post({**GOOD, "message_id": "m2"}, secret=SECRETS[1])
    assert [r.status_code for r in (first, again, old)] == [200] * 3
    assert [r.json()["status"] for r in (first, again, old)] == ["accepted", "duplicate", "accepted"]
    message = inbox.messages[0]
    assert (message.bot, message.chat_id, message.user_id, message.message_id, message.text) == (
        "bot", "c1", "u1", "m1", "hi",
    )  # fmt: skip
    assert (await http.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": "another secret"},
        {"signature": "v1=" + "0" * 64},
        {"signature": "v1=é"},
        {"at": int(time.time()) - 3600},
        {"at": int(time.time()) + 3600},
        {"at": ""},
        {"at": "-1"},
        {"at": "9" * 400},
    ],
)
async def test_what_is_not_signed_lately_is_refused(hook, wrong):
    """A wrong secret, a wrong signature, an old or a future time, or none: 401, and nothing is handed in."""
    inbox, post, _ = hook
    if wrong.get("signature") == "v1=é":
        wrong = {"signature": "v1=é".encode()}
    assert (await post(**wrong)).status_code == 401
    assert inbox.messages == []


async def test_the_signature_covers_the_raw_bytes(hook):
    """A body that means the same in other bytes is another body."""
    _, _, http = hook
    raw = json.dumps(GOOD).encode()
    at = str(int(time.time()))
    headers = {"dualclaw-timestamp": at, "dualclaw-signature": sign(SECRETS[0], at, raw)}
    assert (await http.post("/webhook/bot", content=raw + b" ", headers=headers)).status_code == 401
    assert (await http.post("/webhook/bot", content=raw, headers=headers)).status_code == 200
    assert (await http.post("/webhook/bot", content=raw)).status_code == 401


@pytest.mark.parametrize("head", [b"", b"POST /webhook/bot HTTP/1.1\r\nHost: x", b"POST /"])
async def test_a_connection_that_brings_no_whole_head_is_closed(head):
    """Strangers need no secret to connect, and must not use up the files of the process."""
    async with hooked(head_timeout=1) as (_, _, http):
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        try:
            writer.write(head)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
        finally:
            writer.transport.abort()


async def test_a_head_without_end_is_refused(hook):
    """Whatever server library is installed beside it."""
    _, _, http = hook
    _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(b"POST /webhook/bot HTTP/1.1\r\nX: ")
    sent = 0
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            while sent < 4_000_000:
                writer.write(b"a" * 10_000)
                sent += 10_000
                await writer.drain()
                await asyncio.sleep(0)
    writer.transport.abort()
    assert sent < 4_000_000


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{", 400, "JSON"),
        (b"[" * 1900, 400, "JSON"),
        (b"[]", 400, "object"),
        ({**GOOD, "chat_id": 7}, 400, "chat_id"),
        ({**GOOD, "user_id": "x" * 513}, 400, "user_id"),
        ({**GOOD, "message_id": ""}, 400, "message_id"),
        ({**GOOD, "text": None}, 400, "text"),
        ({**GOOD, "text": "x" * 3000}, 413, "2000 bytes"),
    ],
)
async def test_what_is_no_message_is_refused_by_name(hook, body, status, named):
    """The sender learns which field is wrong; too long a body is not read."""
    inbox, post, _ = hook
    answer = await post(body)
    assert (answer.status_code, named in answer.json()["error"]) == (status, True), answer.text
    assert inbox.messages == []


async def test_other_places_and_methods_are_refused(hook):
    """There is one address."""
    _, post, http = hook
    assert (await post(path="/webhook/other")).status_code == 404
    assert (await http.get("/webhook/bot")).status_code == 405


@pytest.mark.parametrize("trouble", [StateError("disk full at /secret/path"), Overloaded("5000 messages wait already")])
async def test_what_cannot_be_stored_is_to_be_delivered_again(hook, trouble):
    """503 with Retry-After, without telling where the file is."""
    inbox, post, _ = hook
    inbox.trouble = trouble
    answer = await post()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "/secret/path" not in answer.text


def test_one_of_several_signatures_is_enough_and_too_many_are_refused():
    """A sender that changes its secret signs with both; a list without end is not compared."""
    good = sign(SECRETS[1], 100, b"x")
    check(SECRETS, "100", f"v1=00, {good}", b"x", now=100, window=5)
    with pytest.raises(BadSignature):
        check(SECRETS, "100", ",".join([good] * 9), b"x", now=100, window=5)
    with pytest.raises(BadSignature):
        check((), "100", good, b"x", now=100, window=5)


@pytest.fixture
async def far_side():
    """The side that takes replies: answers with ``statuses``; None: hangs up without an answer."""

    class Side:
        def __init__(self):
            self.statuses, self.requests, self.url, self.extra = [], [], "", ""

        async def serve(self, reader, writer):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:])}
                body = await reader.readexactly(int(headers["content-length"]))
                self.requests.append((headers, body))
                status = self.statuses.pop(0) if self.statuses else 204
                if status is not None:
                    writer.write(f"HTTP/1.1 {status} X\r\n{self.extra}Connection: close\r\n\r\n".encode())
                    await writer.drain()
            writer.close()

    side = Side()
    async with await asyncio.start_server(side.serve, "127.0.0.1", 0) as server:
        side.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/replies"
        yield side


@pytest.fixture
async def sender(far_side):
    """Sends replies there."""
    sender = ReplySender(check_reply_url(far_side.url), SECRETS, timeout=60)
    yield sender
    await sender.close()


async def test_a_reply_is_signed_and_carries_its_key(sender, far_side):
    """The other side can check it as we check messages, and drop a part it has."""
    await sender.send_text(CHAT, "你好", Sending("k1"))
    await sender.send_media(CHAT, Media("image", "https://x/y.png"), Sending("k2", repeated=True))
    (first, text), (second, media) = far_side.requests
    check(SECRETS, first["dualclaw-timestamp"], first["dualclaw-signature"], text, now=time.time(), window=60)
    assert json.loads(text) == {"bot": "bot", "chat_id": "c1", "type": "text", "text": "你好"}
    assert json.loads(media) == {"bot": "bot", "chat_id": "c1", "type": "image", "url": "https://x/y.png"}
    assert (first["idempotency-key"], second["idempotency-key"]) == ("k1", "k2")
    assert (first.get("dualclaw-repeat"), second["dualclaw-repeat"]) == (None, "unknown_after_send")


@pytest.mark.parametrize(
    ("status", "retryable", "unknown"),
    [(429, True, False), (503, True, False), (500, False, True), (502, False, True), (None, False, True),
     (400, False, False), (301, False, False), (307, False, False)],
)  # fmt: skip
async def test_only_what_was_surely_not_delivered_may_be_tried_again(sender, far_side, status, retryable, unknown):
    """A failure that may have come after the reply was taken is unknown; a redirect is not followed."""
    far_side.statuses = [status]
    far_side.extra = f"Location: {far_side.url}\r\nRetry-After: 7\r\n"
    with pytest.raises(SendError) as caught:
        await sender.send_text(CHAT, "x", Sending("k"))
    assert (caught.value.retryable, caught.value.unknown) == (retryable, unknown)
    assert caught.value.retry_after == (7 if retryable else 0)
    assert len(far_side.requests) == 1


async def test_without_a_connection_nothing_was_delivered():
    """Nobody listens: surely not delivered."""
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        sender = ReplySender(check_reply_url(f"http://127.0.0.1:{taken.getsockname()[1]}/"), SECRETS)
        with pytest.raises(SendError) as caught:
            await sender.send_text(CHAT, "x", Sending("k"))
    assert caught.value.retryable
    await sender.close()


@pytest.mark.parametrize("url", ["javascript:alert(1)", "data:image/png;base64,AAAA", "file:///etc/passwd", "x.png"])
async def test_media_that_is_not_of_the_web_is_not_sent_as_media(sender, far_side, url):
    """The relay then sends it as a text."""
    with pytest.raises(SendError):
        await sender.send_media(CHAT, Media("image", url), Sending("k"))
    assert far_side.requests == []


@pytest.mark.parametrize(
    ("url", "hosts", "problem"),
    [
        ("", (), "needed"),
        ("http://bot.example/x", (), "https"),
        ("ftp://bot.example/x", (), "https"),
        ("https://u:p@bot.example/x", (), "without user"),
        ("https:///x", (), "https://HOST"),
        ("https://bot.example/x", ("other.example",), "not among"),
        ("https://bot.example:99999999/", (), "no address"),
    ],
)
def test_an_address_replies_may_not_go_to_is_refused(url, hosts, problem):
    """At start, and with what would be right."""
    with pytest.raises(ValueError, match=problem):
        check_reply_url(url, hosts)


@pytest.mark.parametrize(
    "url", ["https://bot.example/x", "http://127.0.0.1:9/x", "http://[::1]:9/", "http://localhost/"]
)
def test_https_and_this_machine_are_allowed(url):
    """With the host among those allowed, in any case."""
    host = check_reply_url(url).host
    assert check_reply_url(url, [host.upper()]).host == host
