"""The strict reader of event streams, and HTTP as it comes over a socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from dualclaw import StopReason
from dualclaw_clients.conformance.http_probe import HttpProbe
from dualclaw_clients.conformance.seen import HttpExchange
from dualclaw_clients.conformance.web_seen import lifted, read_frames

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
FRAME = b'id: 1\ndata: {"type": "delta", "content": "a"}\n\n'


def test_frames_are_read_with_id_data_and_comment() -> None:
    """Ids, data and comments are told apart, and every byte belongs to a frame."""
    frames, faults = read_frames(b": ok\n\n" + FRAME, complete=True)
    assert [(f.comment, f.id, f.data) for f in frames] == [
        (True, None, None),
        (False, "1", b'{"type": "delta", "content": "a"}'),
    ]
    assert b"".join(f.raw for f in frames) == b": ok\n\n" + FRAME
    assert faults == ()


@pytest.mark.parametrize(
    "body",
    [
        b"event: x\n" + FRAME,
        b"data: {}\ndata: {}\n\n",
        b'data: {"a": 1}\r\n\n',
        b"data:{}\n\n",
        b"id: 1\nid: 2\ndata: {}\n\n",
        b"id: 7\n\n",
        b"retry: 10\n\n",
        b": comment\ndata: {}\n\n",
        b"\n\n",
    ],
)
def test_what_is_no_frame_of_the_contract_is_a_fault(body: bytes) -> None:
    """A lenient reader would take these; front-ends that split lines by themselves do not."""
    _, faults = read_frames(body, complete=True)
    assert len(faults) == 1
    assert "frame 1" in faults[0]


def test_half_a_frame_is_a_fault_once_the_body_is_complete() -> None:
    """While the response goes on it is the beginning of the next frame."""
    assert read_frames(FRAME + b"data: {", complete=False)[1] == ()
    assert "in the middle of a frame" in read_frames(FRAME + b"data: {", complete=True)[1][0]


def test_a_done_after_an_interrupt_is_read_as_parked() -> None:
    """stop_reason is not on this wire, and the rules of streams need it."""
    body = (
        b'id: 1\ndata: {"type": "interrupt", "items": [], "seq": 1, "run_id": "r"}\n\n'
        b'id: 2\ndata: {"type": "done", "seq": 2, "run_id": "r"}\n\n'
    )
    events = lifted(HttpExchange("", frames=read_frames(body, complete=True)[0]), 0)
    assert events[-1].done.stop_reason == StopReason.STOP_REASON_INTERRUPTED


def test_an_event_without_envelope_gets_its_place_as_seq() -> None:
    """The original route has no seq, and a second response goes on where the first one ended."""
    frames = read_frames(b'data: {"type": "delta", "content": "a"}\n\n' * 2, complete=True)[0]
    assert [event.seq for event in lifted(HttpExchange("", frames=frames), 3)] == [4, 5]


@contextlib.asynccontextmanager
async def answering(*pieces: bytes, stay: bool = False) -> AsyncIterator[HttpProbe]:
    """Serve the same bytes to every request, piece by piece; ``stay``: the connection stays open."""
    over: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        over.append(done := asyncio.Event())
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if stay:
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield HttpProbe(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=2 if stay else 60)
    finally:
        server.close()
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in over))


async def test_a_chunked_body_is_read_over_its_pieces() -> None:
    """Chunks need not be frames, nor frames chunks."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (FRAME[:10], FRAME[10:] + FRAME))
    async with answering(HEAD + b"transfer-encoding: chunked\r\n\r\n", chunks + b"0\r\n\r\n") as probe:
        seen = await probe.send("GET", "/")
    assert (seen.status, seen.complete, seen.cut, len(seen.frames)) == (200, True, "", 2)


@pytest.mark.parametrize(
    ("head", "body", "told"),
    [
        (b"transfer-encoding: chunked\r\n\r\n", b"5\r\nab", "breaks off"),
        (b"transfer-encoding: chunked\r\n\r\n", b"zz\r\n", "no size of a chunk"),
        (b"transfer-encoding: chunked\r\n\r\n", b"1\r\nab\r\n", "longer than it says"),
        (b"content-length: 99\r\n\r\n", b"short", "breaks off"),
    ],
)
async def test_a_body_that_breaks_http_is_told(head: bytes, body: bytes, told: str) -> None:
    """A response that was cut is no response that ended."""
    async with answering(HEAD + head, body) as probe:
        seen = await probe.send("GET", "/")
    assert not seen.complete
    assert told in seen.cut


async def test_what_is_no_http_has_no_status() -> None:
    """Something else may listen there."""
    async with answering(b"220 mail.example ESMTP\r\n\r\n") as probe:
        seen = await probe.send("GET", "/")
    assert seen.status == 0
    assert "no status line" in seen.cut


async def test_a_response_that_stays_open_is_late() -> None:
    """The kit never waits for ever."""
    async with answering(HEAD + b"content-length: 99\r\n\r\n", stay=True) as probe:
        seen = await probe.send("GET", "/")
    assert (seen.late, seen.complete) == (True, False)
