"""The floor of a gateway: a raw ASGI application that asks the floor of an engine and sends its text as the peers do.

The question goes on as it came, without being decoded, and each message is a frame of bare text. No routing, no checks,
no adapters, no reconnection. ``BENCH_FLOOR`` is the address of that server.
"""

import gc
import os
from typing import Any

import grpc
import msgspec

from tests.bench.floor import METHOD, YOUNG

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class _Question(msgspec.Struct):
    content: msgspec.Raw


_read_question = msgspec.json.Decoder(_Question).decode


class FloorGateway:
    """The application; its channel opens with the first request, for it belongs to the loop that serves."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one request."""
        self._ask = self._ask or self._start()
        question = _read_question((await receive())["body"]).content
        call = self._ask(bytes(question))
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while (text := await call.read()) is not grpc.aio.EOF:
            await send({"type": "http.response.body", "body": b"data: " + text + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _start(self) -> "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]":
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        ask = grpc.aio.insecure_channel(self._address).unary_stream(METHOD)
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG)
        return ask


app = FloorGateway(os.environ.get("BENCH_FLOOR", ""))
