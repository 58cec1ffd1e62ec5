"""Sends replies of the webhook connector: signed POSTs to the one address that was configured.

- The address comes from the settings and from nowhere else, least of all from a message; redirects are not followed.
- https, except on this machine; the host must be among those that are allowed.
- Only what was surely not delivered is tried again: no connection, 429, 503. Any other trouble may have come after
  the other side took the reply, which then has the mark ``unknown_after_send``. ``Idempotency-Key`` is the same for
  every try of a part, in every process, so the other side can drop what it has.
"""

import contextlib
import ipaddress
import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Final, cast

import httpx

from dualclaw_clients.im.connector import ChatKey, Media, SendError, Sending
from dualclaw_clients.im.signature import SIGNATURE_HEADER, TIMESTAMP_HEADER, sign

MAX_ANSWER: Final = 64 * 1024
"""Bytes of an answer that are read, and thrown away, to keep the connection."""
_MEDIA_SCHEMES = frozenset({"http", "https"})


def check_reply_url(url: str, hosts: Sequence[str] = ()) -> httpx.URL:
    """Return an address replies may go to. Raises ValueError that says what is wrong with it."""
    if not url.strip():
        raise ValueError("is needed: the address replies are POSTed to")
    try:
        parsed = httpx.URL(url.strip())
    except (httpx.InvalidURL, ValueError):
        raise ValueError("is no address") from None
    if parsed.port is not None and not 0 < parsed.port < 65_536:
        raise ValueError("is no address: the port must be 1 to 65535")
    if parsed.scheme not in {"http", "https"} or not parsed.host or parsed.userinfo:
        raise ValueError("must be https://HOST/..., without user and password")
    if parsed.scheme == "http" and not _is_loopback(parsed.host):
        raise ValueError("must be https; http is for this machine only")
    if hosts and parsed.host.lower() not in {host.lower() for host in hosts}:
        raise ValueError(f"the host {parsed.host} is not among DUALCLAW_IM_WEBHOOK_REPLY_HOSTS")
    return parsed


class ReplySender:
    """POSTs replies; one connection pool. Close it.

    Args:
        url: a checked address.
        secrets: the first one signs.
        timeout: seconds one POST may take; below what the relay gives a part.
    """

    def __init__(self, url: httpx.URL, secrets: Sequence[str], *, timeout: float = 20.0) -> None:
        self._url = url
        self._secret = secrets[0]
        # A proxy that the environment names has no business on the way to this machine.
        self._http = httpx.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=not _is_loopback(url.host))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def send_text(self, chat: ChatKey, text: str, sending: Sending) -> None:
        """POST a text. Raises SendError."""
        await self._post({"bot": chat.bot, "chat_id": chat.chat_id, "type": "text", "text": text}, sending)

    async def send_media(self, chat: ChatKey, media: Media, sending: Sending) -> None:
        """POST an image or a video as such. Raises SendError, also for an address that is none of the web."""
        if media.url.partition(":")[0].lower() not in _MEDIA_SCHEMES:
            raise SendError("the address of the media is not one of http or https")
        body = {"bot": chat.bot, "chat_id": chat.chat_id, "type": media.media_type, "url": media.url}
        await self._post(body, sending)

    async def _post(self, reply: dict[str, str], sending: Sending) -> None:
        body = json.dumps(reply, ensure_ascii=False).encode()
        timestamp = int(time.time())
        headers = {
            "content-type": "application/json; charset=utf-8",
            "idempotency-key": sending.key,
            TIMESTAMP_HEADER: str(timestamp),
            SIGNATURE_HEADER: sign(self._secret, timestamp, body),
        }
        if sending.repeated:
            headers["dualclaw-repeat"] = "unknown_after_send"
        try:
            async with self._http.stream("POST", self._url, content=body, headers=headers) as response:
                _judge(response)
                await _drain(response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise SendError(f"no connection ({type(error).__name__})", retryable=True) from error
        except httpx.HTTPError as error:
            raise SendError(f"no answer ({type(error).__name__})", unknown=True) from error


def _judge(response: httpx.Response) -> None:
    """Raise SendError unless the other side says it has the reply."""
    status = response.status_code
    if response.is_success:
        return
    after = response.headers.get("retry-after", "")
    wait = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0
    if status in {429, 503}:
        raise SendError(f"HTTP {status}", retryable=True, retry_after=wait)
    raise SendError(f"HTTP {status}", unknown=status >= 500)


async def _drain(response: httpx.Response) -> None:
    """Read a short answer to its end. The reply has been taken by now, whatever becomes of the answer."""
    read = 0
    with contextlib.suppress(httpx.HTTPError):
        async with contextlib.aclosing(cast("AsyncGenerator[bytes, None]", response.aiter_raw())) as chunks:
            async for chunk in chunks:
                read += len(chunk)
                if read > MAX_ANSWER:
                    return


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
