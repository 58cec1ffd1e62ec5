"""The service that answered before the engine: POST ``{platform, chat_id, user_id, message_id, text}`` -> ``{text}``.

A repeat after a crash carries the same message_id, so the old service can tell. It is not trusted: its answer is
bounded in time and size, and what it says about its failures does not reach the chat.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, cast

import httpx

from dualclaw_clients.im.connector import MessageKey
from dualclaw_clients.im.gate import GateError, LegacyError

TIMEOUT = 120.0
MAX_BYTES = 4 * 1024 * 1024


class LegacyClient:
    """The service that answered before; one connection pool, use it as an async context manager.

    Args:
        url: where to POST.
        timeout: seconds the whole answer may take.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        try:
            self._url = httpx.URL(url.strip())
        except httpx.InvalidURL as error:
            raise GateError(f"IM_LEGACY_URL is not an address: {error}") from error
        if self._url.scheme not in {"http", "https"} or not self._url.host:
            raise GateError("IM_LEGACY_URL must be a full http:// or https:// address")
        self._timeout = timeout
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=min(10.0, timeout)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def answer(self, key: MessageKey, user_id: str, text: str) -> str:
        """Return the old service's answer; empty: it has nothing to say.

        Raises:
            LegacyError: unreachable, too slow, refused, or not the agreed shape.
        """
        body = {
            "platform": key.chat.platform,
            "chat_id": key.chat.chat_id,
            "user_id": user_id,
            "message_id": key.message_id,
            "text": text,
        }
        try:
            async with asyncio.timeout(self._timeout), self._http.stream("POST", self._url, json=body) as response:
                if not response.is_success:
                    raise LegacyError(f"it answered HTTP {response.status_code}")
                raw = bytearray()
                async with contextlib.aclosing(cast("AsyncGenerator[bytes, None]", response.aiter_bytes())) as chunks:
                    async for chunk in chunks:
                        raw += chunk
                        if len(raw) > MAX_BYTES:
                            raise LegacyError(f"its answer is longer than {MAX_BYTES} bytes")
        except (TimeoutError, httpx.TimeoutException) as error:
            raise LegacyError(f"no answer within {self._timeout:g} seconds") from error
        except httpx.HTTPError as error:
            raise LegacyError(f"it cannot be reached ({type(error).__name__})") from error
        return _text_of(bytes(raw))


def _text_of(raw: bytes) -> str:
    try:
        answer: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise LegacyError("its answer is not JSON") from error
    text = answer.get("text") if isinstance(answer, dict) else None
    if not isinstance(text, str):
        raise LegacyError('its answer is not {"text": ...}')
    return text
