"""The least an engine can do on this stack: ask the provider for what a run needs, and pass its text on.

For each call it makes the two requests of the tool scenario, with the HTTP client that the engine uses, and writes
what one read brings as one message; for 20 ms after a message it does not even read. No agent, no tools, no store, no
limits, no checks, no retries, no trace, and nothing of it survives anything. With the raw gateway before it (its method
is the raw server's) it shows how near to the goals anything written in Python with ``grpc.aio`` and aiohttp can come.

Run as ``python -m tests.bench.floor``, with the provider's address in ``BENCH_PROVIDER``; it prints its own.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc
import msgspec
import uvloop
import yarl

from dualclaw import RunResponse
from tests.bench.raw import message, serve

_CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": '{"city": "Shanghai"}'}}
    for number, name in enumerate(("weather", "population"))
]
_RESULTS = [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in _CALLS]
_FRAME = 0.020
"""Seconds for which text is gathered, as the engine may."""
_DONE = b"data: [DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Chunk).decode


class Floor:
    """The service."""

    def __init__(self, session: aiohttp.ClientSession, provider: str) -> None:
        self._session = session
        self._url = yarl.URL(f"{provider}/chat/completions")
        self._response = RunResponse.FromString(message("text"))

    async def stream(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Make both completions and write the text of the second."""
        tokens, pace = request.decode().split()
        question = {"role": "user", "content": f"bench tokens={tokens} pace={pace}"}
        await self._complete([question], _drop)
        answer = {"role": "assistant", "content": None, "tool_calls": _CALLS}

        async def write(text: str) -> None:
            self._response.events[0].delta.content = text
            await context.write(self._response.SerializeToString())
            await asyncio.sleep(_FRAME)

        await self._complete([question, answer, *_RESULTS], write)

    async def _complete(self, messages: list[dict[str, Any]], write: Callable[[str], Awaitable[None]]) -> None:
        body = msgspec.json.encode({"model": "bench", "messages": messages, "stream": True})
        rest = b""
        async with self._session.post(self._url, data=body) as response:
            while data := await response.content.readany():
                *frames, rest = (rest + data).split(b"\n\n")
                if text := "".join(map(_text, frames)):
                    await write(text)


def _text(frame: bytes) -> str:
    """Return the text of a frame."""
    if frame == _DONE:
        return ""
    return "".join(choice.delta.content or "" for choice in _decode(frame[6:]).choices)


async def _drop(text: str) -> None:
    """Write nothing."""


async def main() -> None:
    """Serve until the process is ended."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(), auto_decompress=False
    ) as session:
        await serve("floor", Floor(session, os.environ["BENCH_PROVIDER"]).stream)


if __name__ == "__main__":
    uvloop.run(main())
