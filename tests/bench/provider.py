"""A fast fake of a provider's chat completions, in a process of its own: what is measured is never its CPU.

What it streams is said by the user's text, so every framework asks for it the same way: ``bench tokens=50 pace=10``.
The first completion of a run calls two tools side by side, their arguments split over chunks; the completion after the
tool results streams so many tokens of mixed Chinese and ASCII, the first at once and then one every ``pace``
milliseconds (0: all at once). ``mixed`` behind it makes every second token one of reasoning, so that no two can be
merged. All bytes are made once, before they are asked for.

A request whose body is ``release`` has every answer that is still being written end at once, without the tokens that
were to come.

Which completion it is, the last messages say: a conversation holds the tool results of earlier turns too.

Run as ``python -m tests.bench.provider``; it prints its address.
"""

import asyncio
import contextlib
import functools
import json
import re
import sys

import uvloop

TOKENS = ("你好", " the", "世界", " answer", "，", " is", "四十", " two", "。", " and")
_QUESTION = b"bench tokens="
_RESULT = b'"tool_call_id"'
_WANTED = re.compile(_QUESTION + rb"(\d+) pace=(\d+)( mixed)?")
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"
_RELEASE = b"release"
_RELEASED = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_LONG = 0.5
"""Seconds between tokens from which on an answer can be released; below it waiting shall cost as little as it can."""
_UNASKED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


def text_of(tokens: int) -> str:
    """Return the text that so many tokens make."""
    return "".join(TOKENS[number % len(TOKENS)] for number in range(tokens))


def _chunk(delta: dict[str, object], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "bench", "choices": [choice]}
    return _frame(json.dumps(body, ensure_ascii=False))


def _frame(data: str) -> bytes:
    line = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


def _usage() -> bytes:
    counts = {"prompt_tokens": 20, "completion_tokens": 20, "total_tokens": 40}
    body = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "bench",
        "choices": [],
        "usage": counts,
    }
    return _frame(json.dumps(body))


def _calls() -> list[bytes]:
    def call(index: int, **function: str) -> dict[str, object]:
        first = {"id": f"call_{index}", "type": "function"} if "name" in function else {}
        return {"tool_calls": [{"index": index, **first, "function": function}]}

    parts = [_chunk({"role": "assistant", "content": None})]
    for index, name in enumerate(("weather", "population")):
        parts.append(_chunk(call(index, name=name, arguments="")))
        parts += [_chunk(call(index, arguments=piece)) for piece in ('{"ci', 'ty": "Shang', 'hai"}')]
    return [*parts, _chunk({}, "tool_calls"), _usage(), _frame("[DONE]")]


CALLS = b"".join(_calls())


@functools.cache
def _answer(tokens: int, *, mixed: bool) -> tuple[bytes, ...]:
    names = ("content", "reasoning_content" if mixed else "content")
    words = (_chunk({names[number % 2]: TOKENS[number % len(TOKENS)]}) for number in range(tokens))
    return (*words, _chunk({}, "stop") + _usage() + _frame("[DONE]") + _END)


class _Release:
    """Tells the answers that are being written to end at once."""

    def __init__(self) -> None:
        self.given = asyncio.Event()

    def give(self) -> None:
        """Release those there are; later ones take their time again."""
        self.given.set()
        self.given = asyncio.Event()


class _Connection(asyncio.Protocol):
    def __init__(self, release: _Release) -> None:
        self._release = release
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._playing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a TCP server

    def connection_lost(self, exc: Exception | None) -> None:
        if self._playing is not None:
            self._playing.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or length is None or len(rest) < int(length[1]):
            return
        body, self._buffer = rest[: int(length[1])], rest[int(length[1]) :]
        assert self._transport is not None
        if body == _RELEASE:
            self._release.give()
            self._transport.write(_RELEASED)
            self._transport.close()
            return
        asked = body.rfind(_QUESTION)
        wanted = _WANTED.search(body, max(asked, 0))
        if wanted is None:
            self._transport.write(_UNASKED)
            return
        if body.rfind(_RESULT) < asked:
            self._transport.write(_HEAD + CALLS + _END)
            return
        tokens, pace = int(wanted[1]), int(wanted[2])
        parts = _answer(tokens, mixed=wanted[3] is not None)
        if pace:
            self._playing = asyncio.create_task(self._play(parts, pace / 1000))
        else:
            self._transport.write(_HEAD + b"".join(parts))

    async def _play(self, parts: tuple[bytes, ...], pace: float) -> None:
        assert self._transport is not None
        self._transport.write(_HEAD)
        clock = asyncio.get_running_loop()
        due, released = clock.time(), self._release.given
        for part in parts:
            if (wait := due - clock.time()) > _LONG:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(released.wait(), wait)
            elif wait > 0:
                await asyncio.sleep(wait)
            if released.is_set():
                self._transport.write(parts[-1])
                return
            self._transport.write(part)
            due += pace


async def main() -> None:
    """Serve until the process is ended."""
    release = _Release()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(release), "127.0.0.1", 0, backlog=4096)
    host, port = server.sockets[0].getsockname()[:2]
    sys.stdout.write(f"provider listening on http://{host}:{port}/v1\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
