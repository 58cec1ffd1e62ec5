"""MCP over Streamable HTTP: the SDK's transport on a client with bounds and the server's headers.

A body that is not an event stream is read whole by the SDK; here it ends at ``max_message`` bytes. Compression is
not asked for and not taken: a small body can stand for an endless one. What a server refuses with is remembered,
since the SDK tells a refusal (401, 403) and a fault by the same words.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from dualclaw_server.tools.mcp_spec import Spec


class Endpoint:
    """A server's address, and the last status that was an error there."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._refused = 0

    @asynccontextmanager
    async def transport(self) -> AsyncGenerator[TransportStreams]:
        """Speak to the server while the context lasts."""
        spec = self._spec
        # Calls are bounded where they are made; a response stream may be silent for as long as one may take.
        timeout = httpx2.Timeout(spec.connect_timeout, read=spec.max_time + spec.hold_time)
        async with (
            httpx2.AsyncClient(
                headers={"accept-encoding": "identity", **spec.headers},
                timeout=timeout,
                event_hooks={"response": [self._on_response]},
            ) as client,
            streamable_http_client(spec.url, http_client=client, max_sse_event_size=spec.max_message) as streams,
        ):
            yield streams

    def last_words(self) -> str:
        """Return how it refused the last request it refused; empty: it did not."""
        return f"it answers with HTTP status {self._refused}" if self._refused else ""

    async def _on_response(self, response: httpx2.Response) -> None:
        if response.status_code >= 400 and response.status_code not in (404, 405):
            self._refused = response.status_code
        if not isinstance(response.stream, httpx2.AsyncByteStream):
            return
        kind = response.headers.get("content-type", "").lower()
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            response.stream = _Bounded(response.stream, 0)
        elif not kind.startswith("text/event-stream"):
            response.stream = _Bounded(response.stream, self._spec.max_message)


class _Bounded(httpx2.AsyncByteStream):
    """A body that fails once it has grown too large."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._limit:
                raise httpx2.StreamError(f"the body is larger than {self._limit} bytes, or compressed unasked")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
