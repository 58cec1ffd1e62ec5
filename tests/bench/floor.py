"""The floor of an engine: the least that a process can do which asks a model for a run and passes its text on.

A bare ``grpc.aio`` server under uvloop. For each call it asks the provider what the tool scenario asks, two
completions, the second with two results that are always the same, and writes what text comes. No agent, no tools, no
checks, no store, no limits, no traces, no errors of its own, no wait with a bound.

What experts would do to save CPU it does, for else it would be no floor:

- Requests are joined from bytes made before. They go over aiohttp's connections, which are what the transport
  ``httpx-aiohttp`` of httpx has, past httpx: its own requests and responses would cost as much again.
- What one read returns is one message, of the bare text: the contract's message would have to be made and parsed.
- Then no more is read for as long as the engine of a busy process holds text back, and all streams wait for the same
  ticks, so text that comes soon after costs no message of its own, and wake-ups are shared.
- The garbage collector leaves alone what the start has made, and looks less often.

One method, ``/bench.Floor/Stream``: the request is the question as JSON, the response its answer in pieces.

Run as ``python -m tests.bench.floor``; ``BENCH_PROVIDER`` is where completions are asked for. It prints its address.
"""

import asyncio
import gc
import os
import sys
from typing import Any

import aiohttp
import grpc
import msgspec
import uvloop
import yarl

METHOD = "/bench.Floor/Stream"
TICK = 0.020
"""Seconds between two ticks; a message goes out one or two of them after the one before, as in a busy engine."""
YOUNG = 10_000
"""New objects after which the garbage collector looks at them, as in the engine."""

_HEADERS = {"accept": "text/event-stream", "authorization": "Bearer none", "content-type": "application/json"}
_ENDED = b"data: [DONE]"


def _tool(name: str, description: str) -> dict[str, object]:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": city}}


def _requests() -> tuple[bytes, bytes, bytes]:
    """Return what stands before the question, and what behind it in the first request and in the second."""
    arguments = '{"city": "Shanghai"}'
    functions = [{"name": name, "arguments": arguments} for name in ("weather", "population")]
    calls = [{"id": f"call_{n}", "type": "function", "function": each} for n, each in enumerate(functions)]
    results = ("Shanghai: 21 degrees, sunny", "Shanghai: 24 million")
    later: list[dict[str, object]] = [{"role": "assistant", "content": None, "tool_calls": calls}]
    later += [{"role": "tool", "tool_call_id": f"call_{n}", "content": text} for n, text in enumerate(results)]
    body = {
        "model": "bench",
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            _tool("weather", "Tell the weather of a city."),
            _tool("population", "Tell how many people live in a city."),
        ],
        "messages": [{"role": "system", "content": "You are a helpful assistant. Use the tools."}],
    }
    before = msgspec.json.encode(body).removesuffix(b"]}") + b',{"role":"user","content":'
    return before, b"}]}", b"}," + msgspec.json.encode(later)[1:] + b"}"


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice]


_read_chunk = msgspec.json.Decoder(_Chunk).decode
BEFORE, ASKED, RESULTS = _requests()
"""A request is BEFORE, the question as JSON, and ASKED; behind the tools' results it ends with RESULTS instead."""


class Floor:
    """The service.

    Args:
        session: what requests are sent with.
        provider: base URL of the completions.
    """

    def __init__(self, session: aiohttp.ClientSession, provider: str) -> None:
        self._post = session.post
        self._url = yarl.URL(f"{provider}/chat/completions")
        self._time = asyncio.get_running_loop().time

    async def stream(self, question: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Answer a question. A completion without text is one that called the tools."""
        before = BEFORE + question
        if not await self._complete(before + ASKED, context):
            await self._complete(before + RESULTS, context)

    async def _complete(self, body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bool:
        """Write the text of a completion; returns whether there was any."""
        wrote, rest = False, b""
        async with self._post(self._url, data=body, headers=_HEADERS, allow_redirects=False) as response:
            content = response.content
            while data := await content.readany():
                whole, _, rest = (rest + data).rpartition(b"\n\n")
                if text := _text(whole):
                    wrote = True
                    await context.write(text.encode())
                if content.at_eof():
                    break
                if text:
                    await asyncio.sleep(2 * TICK - self._time() % TICK)
        return wrote


def _text(events: bytes) -> str:
    return "".join(
        choice.delta.content or ""
        for event in events.split(b"\n\n")
        if event and event != _ENDED
        for choice in _read_chunk(event[6:]).choices
    )


async def main() -> None:
    """Serve until the process is ended."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3600),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(),
        auto_decompress=False,
        skip_auto_headers=("accept-encoding", "user-agent"),
    )
    server = grpc.aio.server()
    floor = Floor(session, os.environ["BENCH_PROVIDER"])
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Stream": grpc.unary_stream_rpc_method_handler(floor.stream)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Floor", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)
    sys.stdout.write(f"floor listening on 127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
