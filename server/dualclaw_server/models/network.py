"""One POST on its way: over the network by aiohttp, or through a transport of httpx that somebody gave.

Rules and their reasons:

- URL, headers and timeouts are made once; what a request adds is its body and what it accepts. httpx would make all
  of them anew, with its own models of request and response, at more than aiohttp itself costs.
- A read hands over all that is there, without a generator in between.
- What a vendor compresses although it was asked not to goes through httpx, which knows the codings.
"""

from collections.abc import Mapping
from typing import Protocol

import aiohttp
import httpx
import yarl
from httpx_aiohttp import AiohttpTransport
from httpx_aiohttp.transport import AiohttpResponseStream
from multidict import CIMultiDict


class Response(Protocol):
    """An answer whose headers are there. Close it."""

    status: int
    headers: Mapping[str, str]

    async def read(self) -> bytes:
        """Return all bytes that are there, waiting for at least one; none at the end."""

    def over(self) -> bool:
        """Return whether it is known that nothing follows."""

    async def close(self) -> None:
        """Close it, and with it the connection unless it was read to the end."""


class Network:
    """The way over the network, as httpx knows it: its proxy, its TLS, its connections.

    Args:
        way: the transport, whose connections are used; closing it is its owner's.
        url: what is asked.
        headers: of every request.
        connect: seconds until a connection must stand.
    """

    def __init__(self, way: AiohttpTransport, url: httpx.URL, headers: Mapping[str, str], connect: float) -> None:
        self._way = way
        self._url = yarl.URL(str(url))
        self._headers = CIMultiDict(headers)
        self._timeout = aiohttp.ClientTimeout(sock_connect=connect, connect=connect)
        proxy = way.proxy
        self._proxy = str(proxy.url) if proxy is not None else None
        self._proxy_auth = aiohttp.BasicAuth(*proxy.auth) if proxy is not None and proxy.auth else None
        self._proxy_headers = proxy.headers if proxy is not None else None

    async def post(self, body: bytes, accept: str) -> Response:
        """Send a request and return its answer once the headers are there. Raises what aiohttp raises."""
        session = self._way.client
        if not isinstance(session, aiohttp.ClientSession):
            session = self._way.client = self._way.get_client()
        headers = self._headers.copy()
        headers["accept"] = accept
        answer = await session.post(
            self._url,
            data=body,
            headers=headers,
            allow_redirects=False,
            auto_decompress=False,
            timeout=self._timeout,
            proxy=self._proxy,
            proxy_auth=self._proxy_auth,
            proxy_headers=self._proxy_headers,
        )
        if answer.headers.get("content-encoding", "identity").strip().lower() in ("", "identity"):
            return _Plain(answer)
        return Given(httpx.Response(answer.status, headers=answer.raw_headers, stream=AiohttpResponseStream(answer)))


class _Plain:
    """An answer of aiohttp, read as it came."""

    __slots__ = ("_response", "headers", "over", "read", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.read = response.content.readany
        self.over = response.content.at_eof

    async def close(self) -> None:
        """Give the connection back, or close it."""
        self._response.release()
        await self._response.wait_for_close()


class Given:
    """An answer of httpx: from a transport that was given, or one that must be decompressed."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = response.aiter_bytes()
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def read(self) -> bytes:
        """Return the next bytes; none at the end."""
        async for chunk in self._chunks:
            if chunk:
                return chunk
        return b""

    def over(self) -> bool:
        """Return False: httpx does not say before it is read."""
        return False

    async def close(self) -> None:
        """Close it."""
        await self._response.aclose()
