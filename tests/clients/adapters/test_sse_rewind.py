"""The original route under rewinds, seen by a front-end that only appends and takes done.content at the end."""

import asyncio
import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import EngineEvent
from dualclaw.events import make_delta, make_done, make_error, make_reasoning, make_rewind
from dualclaw.fold import RunView
from dualclaw_clients.adapters import SseAdapter


class OldFrontEnd:
    """Does what today's front-ends do: append, and replace by the content of done."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""

    def take(self, wire: dict[str, object]) -> None:
        match wire["type"]:
            case "delta":
                self.text += str(wire["content"])
            case "reasoning":
                self.reasoning += str(wire["content"])
            case "done":
                self.text = str(wire["content"])
            case other:
                raise AssertionError(other)


def by_encode(adapter: SseAdapter, event: EngineEvent) -> list[dict[str, object]]:
    frames = adapter.encode([event]).decode().split("\n\n")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if frame]


def by_queue(adapter: SseAdapter, event: EngineEvent) -> list[dict[str, object]]:
    asyncio.run(adapter(event))
    wires = []
    while not adapter.queue.empty():
        wire = adapter.queue.get_nowait()
        assert wire is not None
        wires.append(wire)
    return wires


Way = Callable[[SseAdapter, EngineEvent], list[dict[str, object]]]
WAYS = pytest.mark.parametrize("sent", [by_encode, by_queue])


def run(sent: Way, events: Iterable[EngineEvent], adapter: SseAdapter | None = None) -> list[tuple[object, object]]:
    adapter = adapter or SseAdapter()
    wires = [wire for event in events for wire in sent(adapter, event)]
    assert adapter.dropped == adapter.failed == 0
    return [(wire["type"], wire["content"]) for wire in wires]


def done(content: str = "") -> EngineEvent:
    return make_done(message_id="m", conversation_id="c", content=content)


@WAYS
def test_repeated_text_is_swallowed_and_the_rest_sent(sent: Way) -> None:
    """After a rewind to a shorter text the same text again goes out only from where it is new."""
    events = [make_delta("abc"), make_rewind("a"), make_delta("b"), make_delta("cd"), make_delta("e"), done("abcde")]
    assert run(sent, events) == [("delta", "abc"), ("delta", "d"), ("delta", "e"), ("done", "abcde")]


@WAYS
def test_differing_text_leaves_it_to_done(sent: Way) -> None:
    """Once the text differs from what was sent, no delta follows."""
    events = [make_delta("abc"), make_rewind(""), make_delta("x"), make_delta("abc"), done("xabc")]
    assert run(sent, events) == [("delta", "abc"), ("done", "xabc")]


@WAYS
def test_a_rewind_to_more_sends_the_part_beyond_reasoning_first(sent: Way) -> None:
    """A rewind that adds to both texts becomes a reasoning and a delta."""
    events = [make_delta("a"), make_reasoning("r"), make_rewind("ab", reasoning="rs"), make_delta("c")]
    assert run(sent, events)[2:] == [("reasoning", "s"), ("delta", "b"), ("delta", "c")]


@WAYS
def test_reasoning_and_text_follow_the_rule_apart(sent: Way) -> None:
    """Text that differs does not silence the reasoning, nor the other way round."""
    events = [
        make_delta("a"),
        make_reasoning("r"),
        make_rewind("x", reasoning="r"),
        make_reasoning("s"),
        make_delta("y"),
    ]
    assert run(sent, events)[2:] == [("reasoning", "s")]
    events = [make_delta("a"), make_reasoning("r"), make_rewind("a"), make_reasoning("s"), make_delta("b")]
    assert run(sent, events)[2:] == [("delta", "b")]


@WAYS
@pytest.mark.parametrize("end", [done("x"), make_error("broken")], ids=["done", "error"])
def test_a_terminal_event_starts_afresh(sent: Way, end: EngineEvent) -> None:
    """The next segment of a run is not measured by what the last one sent."""
    adapter = SseAdapter()
    for event in (make_delta("abc"), make_reasoning("r"), make_rewind("x", reasoning="y"), end):
        sent(adapter, event)
    assert run(sent, [make_delta("a"), make_reasoning("r"), done("a")], adapter) == [
        ("delta", "a"),
        ("reasoning", "r"),
        ("done", "a"),
    ]


@WAYS
def test_with_wire_meta_a_made_up_delta_carries_the_rewinds_envelope(sent: Way) -> None:
    """The part beyond has the seq and the ids of the rewind that brought it."""
    meta = {"seq": 4, "trace_id": "t", "tenant_id": "n", "claw": "web", "run_id": "r"}
    event = make_rewind("ab", seq=4, trace_id="t", tenant_id="n", claw="web", run_id="r")
    assert sent(SseAdapter(wire_meta=True), event) == [{"type": "delta", "content": "ab", **meta}]


# Few letters and short pieces, so that texts often repeat, agree half way, part, and come together again.
pieces = st.text("ab", max_size=2)
segments = st.lists(
    st.one_of(
        pieces.map(make_delta),
        pieces.map(make_delta),
        pieces.map(make_reasoning),
        st.tuples(st.just("cut"), st.integers(0, 3)),
        st.builds(lambda text, reasoning: make_rewind(text, reasoning=reasoning), pieces, pieces),
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(segments, min_size=1, max_size=3))
def test_an_old_front_end_never_shows_withdrawn_text_twice_and_ends_right(
    runs: list[list[EngineEvent | tuple[str, int]]],
) -> None:
    """Whatever is appended, the text shown is then the run's text; at the end it is done.content."""
    adapter, queue_adapter = SseAdapter(), SseAdapter()
    loop = asyncio.new_event_loop()
    try:
        for moves in runs:
            view, front_end = RunView(), OldFrontEnd()
            for move in moves:
                # A cut keeps a beginning of the text, as an engine does that tries a broken stream again.
                event = (
                    move
                    if isinstance(move, EngineEvent)
                    else make_rewind(view.text[: move[1]], reasoning=view.reasoning[: move[1]])
                )
                view.apply(event)
                wires = by_encode(adapter, event)
                for wire in wires:
                    front_end.take(wire)
                kinds = {wire["type"] for wire in wires}
                assert "delta" not in kinds or front_end.text == view.text
                assert "reasoning" not in kinds or front_end.reasoning == view.reasoning
                if view.text.startswith(front_end.text):
                    assert front_end.text == view.text, "the part beyond was held back"
                if view.reasoning.startswith(front_end.reasoning):
                    assert front_end.reasoning == view.reasoning
                loop.run_until_complete(queue_adapter(event))
                assert [queue_adapter.queue.get_nowait() for _ in range(queue_adapter.queue.qsize())] == wires
            end = done(view.text)
            for wire in by_encode(adapter, end):
                front_end.take(wire)
            loop.run_until_complete(queue_adapter(end))
            queue_adapter.queue.get_nowait()
            assert front_end.text == view.text
    finally:
        loop.close()
    assert adapter.failed == queue_adapter.failed == 0
