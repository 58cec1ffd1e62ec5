"""The kit against servers that are no servers: whatever comes, every check gets an outcome and nothing is raised."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from dualclaw import AttachResponse, EngineEvent, GetRunResponse, Run, RunRequest, RunResponse, RunState
from dualclaw_clients.conformance.catalogue import checks_of
from dualclaw_clients.conformance.check import Target
from dualclaw_clients.conformance.engine_probe import MOST_BYTES, EngineProbe
from dualclaw_clients.conformance.http_probe import HttpProbe
from dualclaw_clients.conformance.playing import SCENES, play_engine, play_web, scene_limit
from dualclaw_clients.conformance.stage import BrokeOff, Cast
from dualclaw_clients.conformance.verdict import Outcome, judge

TIMEOUT = 2.0
PLAYED = set(SCENES) - {"leave-cancel", "sizes"}
RUN = Run(id="r", conversation_id="c", state=RunState.RUN_STATE_INTERRUPTED)
EVENT = EngineEvent(seq=1, run_id="r")
INTERRUPT = EngineEvent(seq=1, run_id="r")
INTERRUPT.interrupt.items.add(id="pay-a")
STRANGE = EngineEvent(seq=-5, run_id="r")
STRANGE.step.step.kind = 99  # type: ignore[assignment]
STRANGE.step.step.phase = 99  # type: ignore[assignment]
STRANGE_DONE = EngineEvent(seq=2**31 - 1, run_id="r")
STRANGE_DONE.done.stop_reason = 99  # type: ignore[assignment]
STRANGE_DONE.done.process_steps.add(kind=99)  # type: ignore[arg-type]


class Monotonous(grpc.GenericRpcHandler):
    """Gives every streaming call the same messages and every other one the same answer."""

    def __init__(self, messages: Sequence[bytes], answer: bytes, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        self._messages = messages
        self._answer = answer
        self._code = code

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        if details.method.rpartition("/")[2] in {"Run", "Resume", "Attach"}:
            return grpc.unary_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._unary)

    async def _stream(self, _: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> AsyncIterator[bytes]:
        for message in self._messages:
            yield message
        if self._code is not grpc.StatusCode.OK:
            await context.abort(self._code, "no")

    async def _unary(self, _: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        if self._code is not grpc.StatusCode.OK:
            await context.abort(self._code, "no")
        return self._answer


def messages(*events: EngineEvent) -> list[bytes]:
    return [RunResponse(events=[event]).SerializeToString() for event in events]


@pytest.mark.parametrize(
    "handler",
    [
        Monotonous([], b""),
        Monotonous([b"\xff\xff\xff"], b"\xff\xff"),
        Monotonous(messages(EngineEvent()), b""),
        Monotonous(messages(EVENT) * 30, GetRunResponse(run=RUN).SerializeToString()),
        Monotonous(messages(INTERRUPT) * 30, GetRunResponse(run=RUN).SerializeToString()),
        Monotonous(messages(STRANGE, STRANGE_DONE) * 9, GetRunResponse(run=Run(state=99)).SerializeToString()),  # type: ignore[arg-type]
        Monotonous([AttachResponse().SerializeToString()], b"", grpc.StatusCode.UNKNOWN),
        Monotonous(messages(EVENT) * 3, b"", grpc.StatusCode.DATA_LOSS),
        Monotonous([], b"", grpc.StatusCode.UNIMPLEMENTED),
    ],
    ids=[
        "nothing",
        "garbage",
        "no payload",
        "endless",
        "questions",
        "strange",
        "unknown",
        "data loss",
        "unimplemented",
    ],
)
async def test_an_engine_that_talks_nonsense_gets_a_report(handler: Monotonous) -> None:
    """Each check is failed or not checked, and hardly any passes; the kit itself never breaks."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with EngineProbe(f"127.0.0.1:{port}", key="a", timeout=TIMEOUT) as probe:
            cast = Cast("conformance", "a", "b", _nothing)
            evidence = await play_engine(probe, cast, lambda *_: None, PLAYED)
    finally:
        await server.stop(grace=None)
    results = list(judge("engine", checks_of("engine"), evidence))
    assert len(results) == len(checks_of("engine"))
    outcomes = {result.check.id: result.outcome for result in results}
    assert outcomes["S1"] is Outcome.FAILED
    assert sum(outcome is Outcome.PASSED for outcome in outcomes.values()) < len(outcomes) / 3


async def _nothing() -> None:
    pass


CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def response(body: bytes, content_type: str = "text/event-stream", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    over: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over.append(done := asyncio.Event())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in over))


class Endless(grpc.GenericRpcHandler):
    """Streams for ever, as fast as it can."""

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        return grpc.unary_stream_rpc_method_handler(self._stream)

    async def _stream(self, _: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> AsyncIterator[bytes]:
        event = EngineEvent(run_id="r")
        event.delta.content = "x" * 100_000
        message = RunResponse(events=[event]).SerializeToString()
        while True:
            yield message


async def test_a_stream_without_end_is_left_long_before_memory_is() -> None:
    """What is kept of it is bounded, and a fault says why it was left."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Endless(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with EngineProbe(f"127.0.0.1:{port}", timeout=60) as probe:
            seen = await probe.stream(RunRequest())
    finally:
        await server.stop(grace=None)
    assert seen.late
    assert sum(event.ByteSize() for event in seen.events) <= MOST_BYTES
    assert "for it has no end" in seen.faults[0]


async def test_a_body_without_end_is_left_long_before_memory_is() -> None:
    """What is kept of it is bounded, and it is said why it was left."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"data: " + b"x" * 10_000 + b"\n\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        seen = await HttpProbe(url, timeout=60).send("GET", "/")
    finally:
        server.close()
    assert not seen.complete
    assert "for it has no end" in seen.cut


async def ask_for_ever(probe: HttpProbe) -> None:
    async with scene_limit(probe.timeout, pauses=0), asyncio.timeout(60):
        while True:
            await probe.send("GET", "/")


async def test_a_server_that_never_answers_does_not_hold_a_scene_for_every_call() -> None:
    """A scene is broken off after some time-outs; its check is not checked then, with the reason."""
    holding: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        holding.append(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BrokeOff, match=r"more than 0\.3 s"):
            await ask_for_ever(HttpProbe(url, timeout=0.1))
    finally:
        server.close()
        for writer in holding:
            writer.transport.abort()


@pytest.mark.parametrize("route", ["native", "original"])
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        response(b""),
        response(b"data: \xff\xfe\n\n"),
        response(b'data: {"type": [1], "seq": {}, "step": 5, "run_id": 7}\n\n' * 3),
        response(b'id: 1\ndata: {"type": "delta", "content": 5, "seq": "x", "run_id": "r"}\n\n' * 20),
        response(b'data: {"type": "step", "step": {"type": "mcp", "args": []}}\n\ndata: [1]\n\n'),
        response(b'data: {"type": "done", "process_steps": [1, {}], "used_mcp": {}, "conversation_id": "c"}\n\n'),
        response(b'data: {"type": "error", "diagnosis": "bad"}\n\n'),
        response(b'data: {"type": "delta", "content": "a"}\n\n', "text/plain"),
        response(b"{", "application/json", "404 Not Found"),
        response(b'{"error": []}', "application/json", "400 Bad Request"),
        response(b"", "text/plain", "204 No Content"),
        response(b"data: {}\n\n")[:-3],
        response(b"data: " + b"[" * 200_000 + b"\n\n"),
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: many\r\n\r\ndata: {}\n\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: -5\r\n\r\ndata: {}\n\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99999999999999\r\n\r\ndata: {}\n\n",
        CHUNKED + b"-5\r\ndata: {}\n\n",
        CHUNKED + b"ffffffffffff\r\ndata: {}\n\n",
        CHUNKED + b"1" * 100_000,
        CHUNKED + b"a\r\ndata: {}\n\nmore\r\n0\r\n\r\n",
    ],
)
async def test_a_gateway_that_talks_nonsense_gets_a_report(route: Target, answer: bytes) -> None:
    """Each check is failed or not checked, and hardly any passes; the kit itself never breaks."""
    async with answering(answer) as url:
        evidence = await play_web(HttpProbe(url, timeout=TIMEOUT), "conformance", route, lambda *_: None)
    results = list(judge(route, checks_of(route), evidence))
    outcomes = {result.check.id: result.outcome for result in results}
    assert set(outcomes) == {check.id for check in checks_of(route)}
    assert Outcome.FAILED in {outcomes["S1"], outcomes["H1"]}
    assert sum(outcome is Outcome.PASSED for outcome in outcomes.values()) < len(outcomes) / 2
