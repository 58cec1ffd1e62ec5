"""How the load client asks each kind of server for one answer, and what it notes meanwhile.

engine     our engine by gRPC, through the contract's stub
original   our gateway's original route, whose frames are JSON
peer       a peer's route, whose frames are bare text
raw        the raw gRPC server
raw-http   the raw gateway before it

Every answer is checked: its text must be what the provider said, so nobody is fast by leaving something out.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
import orjson

from dualclaw import ContentPart, EngineEvent, Message, Role, RunRequest, RunResponse
from dualclaw.rpc import EngineServiceAsyncStub
from tests.bench.provider import TOKENS, text_of
from tests.bench.raw import METHOD

LONGEST_LINE = 64 << 20
_ROUND = len(text_of(len(TOKENS)))
_OPTIONS = (("grpc.max_receive_message_length", 256 << 20), ("grpc.use_local_subchannel_pool", 1))


class WrongAnswer(Exception):
    """A server did not say what the provider had said."""


@dataclass(frozen=True)
class Ask:
    """What one answer shall be: so many tokens, one every ``pace`` milliseconds."""

    tokens: int
    pace: int = 0
    mixed: bool = False
    conversation: str = ""
    held: bool = False
    """True when it is to be released, and its text may then end anywhere."""

    @property
    def text(self) -> str:
        """The question that makes the provider answer so."""
        return f"bench tokens={self.tokens} pace={self.pace}{' mixed' if self.mixed else ''}"


@dataclass
class Progress:
    """What has come of one answer so far."""

    ask: Ask
    noticed: Callable[[], None]
    """Called after each piece of text."""
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    """Seconds from the question to the first text; 0 before."""
    events: int = 0
    """Pieces of text."""
    size: int = 0
    """Characters of text."""
    conversation: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        """The tokens that the text so far is made of, to within one."""
        return self.size * len(TOKENS) / _ROUND

    def add(self, text: str) -> None:
        """Note a piece of text."""
        if not self.events:
            self.first = time.perf_counter() - self.begun
        self.events += 1
        self.size += len(text)
        self.pieces.append(text)
        self.noticed()

    def check(self) -> None:
        """Raise WrongAnswer unless the whole text has come."""
        text, whole = "".join(self.pieces), text_of(self.ask.tokens)
        if text != whole and not (self.ask.held and text and whole.startswith(text)):
            raise WrongAnswer(f"asked for {self.ask.tokens} tokens, got {len(text)} characters: {text[:80]!r}")


class Sources:
    """The servers by kind and address; connections by gRPC are kept, as clients keep them."""

    def __init__(self) -> None:
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close()

    async def answer(self, kind: str, address: str, progress: Progress, channel: int = 0) -> None:
        """Ask for one answer and note what comes, to its end. Raises WrongAnswer."""
        match kind:
            case "engine":
                await self._engine(self.channel(address, channel), progress)
            case "raw":
                await self._raw(address, progress)
            case "original" | "peer" | "raw-http":
                await _http(kind, address, progress)
            case _:
                raise ValueError(f"no such kind of server: {kind}")
        progress.check()

    def channel(self, address: str, number: int = 0) -> grpc.aio.Channel:
        """Return a channel to an address; each number has a connection of its own."""
        if (address, number) not in self._channels:
            self._channels[address, number] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return self._channels[address, number]

    async def _engine(self, channel: grpc.aio.Channel, progress: Progress) -> None:
        message = Message(role=Role.ROLE_USER, parts=[ContentPart(text=progress.ask.text)])
        request = RunRequest(message=message, conversation_id=progress.ask.conversation, claw="bench")
        ended = False
        async for response in EngineServiceAsyncStub(channel).Run(request):
            for event in response.events:
                ended = _note(event, progress)
        if not ended:
            raise WrongAnswer("the stream ended without a terminal event")

    async def _raw(self, address: str, progress: Progress) -> None:
        method: grpc.aio.UnaryStreamMultiCallable[bytes, RunResponse]
        method = self.channel(address).unary_stream(METHOD, response_deserializer=RunResponse.FromString)
        async for response in method(f"{progress.ask.tokens} {progress.ask.pace}".encode()):
            for event in response.events:
                progress.add(event.delta.content)


def _note(event: EngineEvent, progress: Progress) -> bool:
    """Note an event; True when it is terminal."""
    match event.WhichOneof("payload"):
        case "delta":
            progress.add(event.delta.content)
        case "reasoning":
            progress.add(event.reasoning.content)
        case "done":
            progress.conversation = event.done.conversation_id
            return True
        case "error":
            raise WrongAnswer(f"the run failed: {event.error.message}")
        case _:
            pass
    return False


async def _http(kind: str, url: str, progress: Progress) -> None:
    """POST the question and read the frames, each on a line of its own."""
    body = orjson.dumps({"content": progress.ask.text})
    if kind == "raw-http":
        body = f"{progress.ask.tokens} {progress.ask.pace}".encode()
    async with aclosing(_post(url, body)) as lines:
        async for line in lines:
            if line.startswith(b"data: "):
                _note_frame(kind, line[6:-1], progress)


async def release(provider: str) -> None:
    """Have the provider end every answer it is writing."""
    async with aclosing(_post(provider, b"release")) as lines:
        async for _ in lines:
            pass


async def _post(url: str, body: bytes) -> AsyncGenerator[bytes, None]:
    """POST to ``http://HOST:PORT/PATH`` and yield the lines after that of the status. Raises WrongAnswer unless 200."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.rpartition(":")
    head = f"POST /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection(name, int(port), limit=LONGEST_LINE)
    try:
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        status = await reader.readline()
        if status.split()[1:2] != [b"200"]:
            raise WrongAnswer(f"{url} answered {status.decode('latin-1').strip()}")
        while line := await reader.readline():
            yield line
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _note_frame(kind: str, data: bytes, progress: Progress) -> None:
    if kind == "peer":
        progress.add(data.decode())
        return
    frame = orjson.loads(data)
    if frame["type"] == "delta":
        progress.add(frame["content"])
    elif frame["type"] == "error":
        raise WrongAnswer(f"the run failed: {frame['message']}")
