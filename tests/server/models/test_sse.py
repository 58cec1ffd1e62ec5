"""The event reader: every rule of its head, for every way of cutting the bytes."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw_server.models.sse import EventTooLargeError, ServerEvent, SSEReader

CASES = {
    "LF": (b"data: a\n\ndata: b\n\n", ["a", "b"]),
    "CRLF": (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
    "CR": (b"data: a\r\rdata: b\r\r", ["a", "b"]),
    "mixed ends": (b"data: a\n\r\ndata: b\r\n\ndata: c\r\n\r", ["a", "b", "c"]),
    "PS17 CRLF between reads": (b"data: a\r\ndata: b\r\n\r\n", ["a\nb"]),
    "PS13 comment and blank line": (b"id: 7\ndata: x\n\n: ping\n\ndata: y\n\n", ["x", "y"]),
    "comment only": (b": ping\n\n:\n\n", []),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
    "a second byte order mark is data": (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\ndata: c\n\n", ["a", "c"]),
    "empty data": (b"data:\n\ndata\n\ndata: \n\n", []),
    "event without data": (b"event: ping\n\ndata: a\n\n", ["a"]),
    "several data lines": (b"data: a\ndata:\ndata: b\n\n", ["a\n\nb"]),
    "only one space is taken": (b"data:  a\ndata:b\n\n", [" a\nb"]),
    "PS16 other line separators are text": (
        "data: a\u2028b\u2029c\u0085d\x0be\x0cf\n\n".encode(),
        ["a\u2028b\u2029c\u0085d\x0be\x0cf"],
    ),
    "code points of every length": ("data: é你😀\n\n".encode(), ["é你😀"]),
    "bytes that are not UTF-8": (b"data: a\xffb\n\n", ["a\ufffdb"]),
    "unknown fields": (b"retry: 5\nfoo: bar\ndatax: no\ndata: a\n\n", ["a"]),
    "end without blank line": (b"data: a\n\ndata: [DONE]", ["a", "[DONE]"]),
    "end after one line end": (b"data: a\r\n", ["a"]),
    "nothing": (b"", []),
    "half a byte order mark": (b"\xef\xbb", []),
}


def read(pieces: list[bytes]) -> list[ServerEvent]:
    reader = SSEReader()
    events = [event for piece in pieces for event in reader.feed(piece)]
    return events + reader.finish()


@pytest.mark.parametrize("case", CASES)
def test_events_are_right_whole_and_byte_by_byte(case: str) -> None:
    """Each rule holds for the bytes in one read, in reads of one byte, and cut once at every place."""
    data, expected = CASES[case]
    assert [event.data for event in read([data])] == expected
    assert [event.data for event in read([data[i : i + 1] for i in range(len(data))])] == expected
    for at in range(len(data) + 1):
        assert [event.data for event in read([data[:at], b"", data[at:]])] == expected


def test_name_and_last_id_come_with_the_event() -> None:
    """The name belongs to one event; the id stays until another comes; an id with NUL is ignored."""
    events = read([b"event: error\nid: 1\ndata: a\n\ndata: b\n\nid: x\0y\ndata: c\n\n"])
    assert events == [ServerEvent("a", "error", "1"), ServerEvent("b", "", "1"), ServerEvent("c", "", "1")]


def test_one_read_hands_over_everything_that_is_buffered() -> None:
    """A read with many events gives all of them, and no event waits for the next read."""
    reader = SSEReader()
    assert [event.data for event in reader.feed(b"data: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4")] == ["1", "2", "3"]
    assert [event.data for event in reader.feed(b"\r\r")] == ["4"]


ENDS = [b"\r", b"\n", b"\r\n"]
ATOMS = [*ENDS, b"data:", b"data: ", b": c", b"event: e", b"id: 1", b"x", b"\xef\xbb\xbf", b"\xe2\x80\xa8"]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same_events(data: st.DataObject) -> None:
    """Random streams of tricky pieces, cut anywhere, read like the whole."""
    stream = b"".join(data.draw(st.lists(st.sampled_from(ATOMS), max_size=40)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(pieces) == read([stream])


def test_an_event_past_the_bound_is_a_typed_error() -> None:
    """One endless line and endless short data lines both stop at the bound, not at the end of memory."""
    with pytest.raises(EventTooLargeError, match="1000 bytes"):
        read_bounded([b"data: " + b"x" * 400] * 3)
    with pytest.raises(EventTooLargeError):
        read_bounded([b"data: x\n"] * 600)
    with pytest.raises(EventTooLargeError):
        read_bounded([b": comment without end"] * 100)


def read_bounded(pieces: list[bytes]) -> None:
    reader = SSEReader(max_event_bytes=1000)
    for piece in pieces:
        reader.feed(piece)


def test_a_long_stream_of_small_events_is_not_bounded() -> None:
    """The bound is for one event, not for the stream; a comment of legal size may come any number of times."""
    reader = SSEReader(max_event_bytes=100)
    count = sum(len(reader.feed(b": " + b"k" * 80 + b"\n\ndata: " + b"x" * 80 + b"\n\n")) for _ in range(50))
    assert count == 50


def test_megabytes_in_small_pieces_take_linear_time() -> None:
    """Twice the size of one event in 64-byte reads takes about twice the time, not four times."""

    def seconds(size: int) -> float:
        reader = SSEReader(max_event_bytes=2 * size)
        piece = b"x" * 64
        start = time.process_time()
        reader.feed(b"data: ")
        for _ in range(size // 64):
            reader.feed(piece)
        assert len(reader.feed(b"\n\n")[0].data) == size // 64 * 64
        return time.process_time() - start

    small = min(seconds(1 << 20) for _ in range(3))
    large = min(seconds(1 << 22) for _ in range(3))
    assert large < 10 * small
