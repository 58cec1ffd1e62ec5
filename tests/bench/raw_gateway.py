"""The least a gateway can do: a raw ASGI application that reads a raw ``grpc.aio`` stream and sends its text as SSE.

It parses each message, as every client must, and sends one frame of the original route for each event. No routing, no
checks, no adapters, no reconnection. Its body is the raw server's request; ``BENCH_RAW`` is that server's address.
"""

import os
from typing import Any

import grpc
import orjson

from dualclaw import RunResponse
from tests.bench.raw import METHOD

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class RawGateway:
    """The application; its channel opens with the first request, for it belongs to the loop that serves."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one request."""
        assert scope["type"] == "http"
        self._channel = self._channel or grpc.aio.insecure_channel(self._address)
        method: grpc.aio.UnaryStreamMultiCallable[bytes, RunResponse]
        method = self._channel.unary_stream(METHOD, response_deserializer=RunResponse.FromString)
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for response in method(body):
            frames = [
                b'data: {"type": "delta", "content": ' + orjson.dumps(event.delta.content) + b"}\n\n"
                for event in response.events
            ]
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


app = RawGateway(os.environ.get("BENCH_RAW", ""))
