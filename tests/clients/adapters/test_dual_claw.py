"""The adapters as the two claws use them: exact frames, thinning, counting, closing, and one assembled answer."""

import asyncio
import json
import logging
from contextlib import aclosing

import pytest

from dualclaw import EngineEvent, StepEvent
from dualclaw.events import (
    make_delta,
    make_diagnosis,
    make_done,
    make_error,
    make_interrupt,
    make_reasoning,
    make_rewind,
    make_step,
    to_wire,
)
from dualclaw_clients.adapters import BaseClawAdapter, BufferAdapter, NativeSseAdapter, SseAdapter

TRACE = "0af7651916cd43dd8448eb211c80319c"
META = {"seq": 7, "trace_id": TRACE, "tenant_id": "t1", "claw": "web", "run_id": "r1"}


def with_meta(event: EngineEvent, **changes: object) -> EngineEvent:
    for key, value in {**META, **changes}.items():
        setattr(event, key, value)
    return event


def one_of_each() -> list[EngineEvent]:
    """All seven events, in the order of a run, numbered from 1."""
    diagnosis = make_diagnosis(code="tool.timeout", severity="error", summary="超时", retryable=True)
    events = [
        make_reasoning("想"),
        make_delta("你"),
        make_step("mcp", name="get", server="w", args={"a": 1}, phase="fail", index=0, diagnosis=diagnosis),
        make_rewind("你", reasoning="想"),
        make_interrupt([{"id": "c1", "kind": "approval", "tool_name": "rm"}]),
        make_done(message_id="m", conversation_id="c", content="你"),
        make_error("坏了", diagnosis=diagnosis),
    ]
    return [with_meta(event, seq=number) for number, event in enumerate(events, 1)]


async def all_frames(adapter: SseAdapter | NativeSseAdapter) -> list[str]:
    async with asyncio.timeout(60), aclosing(adapter.frames()) as frames:
        return [frame async for frame in frames]


def queued(adapter: SseAdapter | NativeSseAdapter) -> list[dict[str, object] | None]:
    items = []
    while not adapter.queue.empty():
        items.append(adapter.queue.get_nowait())
    return items


# The base


async def test_an_instance_is_the_on_event_callback() -> None:
    """Calling an adapter is the same as its emit."""
    adapter = SseAdapter()
    await adapter(make_delta("a"))
    await adapter.emit(make_delta("b"))
    assert queued(adapter) == [{"type": "delta", "content": "a"}, {"type": "delta", "content": "b"}]
    assert (adapter.received, adapter.dropped, adapter.failed) == (2, 0, 0)


async def test_missing_envelope_fields_are_filled_and_present_ones_kept() -> None:
    """An event without trace, tenant, claw or seq gets the adapter's and the next number; others keep theirs."""
    adapter = SseAdapter(wire_meta=True, trace_id="T", tenant_id="N", claw="im")
    await adapter(with_meta(make_delta("a")))
    await adapter(make_delta("b"))
    await adapter({"type": "delta", "content": "c", "tenant_id": 12})
    assert [list(wire.items())[2:] for wire in queued(adapter) if wire] == [
        list(META.items()),
        [("seq", 8), ("trace_id", "T"), ("tenant_id", "N"), ("claw", "im")],
        [("seq", 9), ("trace_id", "T"), ("tenant_id", "12"), ("claw", "im")],
    ]


@pytest.mark.parametrize("adapter_type", [SseAdapter, NativeSseAdapter, BufferAdapter, BaseClawAdapter])
async def test_the_event_itself_is_never_changed(adapter_type: type[BaseClawAdapter]) -> None:
    """What an adapter fills in or thins out goes into its own copy, whether it was given an event or a dict."""
    adapter = adapter_type(trace_id="T", tenant_id="N", claw="x")
    events = [*one_of_each(), make_delta("no meta"), make_done(message_id="", conversation_id="")]
    before = [event.SerializeToString(deterministic=True) for event in events]
    wires = [wire for event in events if (wire := to_wire(event)) is not None]
    texts = [json.dumps(wire) for wire in wires]
    for event in (*events, *wires):
        await adapter(event)
    assert [event.SerializeToString(deterministic=True) for event in events] == before
    assert [json.dumps(wire) for wire in wires] == texts
    assert adapter.received == len(events) + len(wires)


@pytest.mark.parametrize(
    "junk", [{"type": "later"}, {"content": "no type"}, {"type": 3}, {}, {"type": "step", "step": {"type": "new"}}]
)
@pytest.mark.parametrize("adapter_type", [SseAdapter, NativeSseAdapter, BufferAdapter])
async def test_a_dict_of_unknown_type_is_dropped_with_a_warning(
    adapter_type: type[BaseClawAdapter], junk: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Unknown dicts are counted and warned of, and nothing else happens."""
    adapter = adapter_type()
    with caplog.at_level(logging.WARNING):
        await adapter(junk)
    assert (adapter.received, adapter.dropped, adapter.failed) == (1, 1, 0)
    assert "unknown type" in caplog.text


@pytest.mark.parametrize("adapter_type", [SseAdapter, NativeSseAdapter, BufferAdapter])
async def test_an_event_newer_than_this_code_is_skipped_and_counted(
    adapter_type: type[BaseClawAdapter], caplog: pytest.LogCaptureFixture
) -> None:
    """A payload or step kind unknown here counts as dropped, with one warning per adapter and not per event."""
    adapter = adapter_type()
    newer_payload = EngineEvent.FromString(with_meta(EngineEvent()).SerializeToString() + bytes.fromhex("a206 00"))
    newer_step = with_meta(EngineEvent(step=StepEvent()), seq=8)
    with caplog.at_level(logging.WARNING):
        for event in (newer_payload, newer_step, newer_payload):
            await adapter(event)
    assert (adapter.received, adapter.dropped, adapter.failed) == (3, 3, 0)
    assert len(caplog.records) == 1
    if not isinstance(adapter, BufferAdapter):
        assert adapter.queue.empty()
        assert adapter.encode([newer_payload]) == b""
        assert (adapter.received, adapter.dropped) == (4, 4)


class BrokenQueue(asyncio.Queue[dict[str, object] | None]):
    """A channel that is gone: whatever is put raises."""

    def put_nowait(self, item: dict[str, object] | None) -> None:
        raise ConnectionError("closed")


@pytest.mark.parametrize("adapter_type", [SseAdapter, NativeSseAdapter])
async def test_a_broken_queue_never_reaches_the_engine(
    adapter_type: type[SseAdapter] | type[NativeSseAdapter], caplog: pytest.LogCaptureFixture
) -> None:
    """Exceptions of the channel are counted, logged loudly once, and go no further; close survives them too."""
    adapter = adapter_type(BrokenQueue())
    with caplog.at_level(logging.WARNING):
        for event in one_of_each()[:3]:
            await adapter(event)
        await adapter.close()
    # The original route sends no text after a loss, so its delta is no second failure.
    assert (adapter.received, adapter.failed) == (3, 2 if adapter_type is SseAdapter else 3)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


async def test_a_deliver_that_raises_is_counted_and_cancellation_passes() -> None:
    """An own adapter may raise anything; only cancellation goes through, because the caller asked for it."""

    class Faulty(BaseClawAdapter):
        async def deliver(self, event: EngineEvent) -> bool:
            raise asyncio.CancelledError if event.delta.content == "cancel" else KeyError("x")

    adapter = Faulty()
    await adapter(make_delta("a"))
    assert (adapter.received, adapter.dropped, adapter.failed) == (1, 0, 1)
    with pytest.raises(asyncio.CancelledError):
        await adapter(make_delta("cancel"))


async def test_an_emit_of_a_subclass_that_raises_never_reaches_the_engine() -> None:
    """The callback is what the engine calls, so it is as quiet around an emit that somebody has written anew."""

    class Faulty(BaseClawAdapter):
        async def emit(self, event: EngineEvent | dict[str, object]) -> None:
            raise asyncio.CancelledError if event == {} else KeyError("x")

    adapter = Faulty()
    await adapter(make_delta("a"))
    assert adapter.failed == 1
    with pytest.raises(asyncio.CancelledError):
        await adapter({})


async def test_a_seq_at_the_end_of_its_range_is_not_counted_past_it() -> None:
    """After the highest 32-bit seq an event without one still goes out."""
    adapter = NativeSseAdapter()
    await adapter(make_delta("a", seq=2**31 - 1))
    await adapter(make_delta("b"))
    assert [wire["content"] for wire in queued(adapter) if wire] == ["a", "b"]
    assert adapter.failed == 0


# The original SSE route


def test_a_frame_is_byte_for_byte_what_front_ends_always_got() -> None:
    """The frame of the contract's example is exactly 46 bytes."""
    frame = SseAdapter.frame({"type": "delta", "content": "你好"})
    assert frame == 'data: {"type": "delta", "content": "你好"}\n\n'
    assert len(frame.encode()) == 46
    assert SseAdapter().encode([with_meta(make_delta("你好"))]) == frame.encode()


def test_frame_serialises_only() -> None:
    """Thinning is not frame's work: a whole wire dict stays whole."""
    wire = {"type": "delta", "content": "a", **META}
    assert json.loads(SseAdapter.frame(wire).removeprefix("data: ")) == wire


async def test_the_original_route_thins_the_envelope_but_keeps_trace_id_on_terminal_events() -> None:
    """No seq, tenant, claw or run id goes out; the trace id only on done and error; interrupt and rewind not at all."""
    adapter = SseAdapter()
    for event in one_of_each():
        await adapter(event)
    wires = [wire for wire in queued(adapter) if wire]
    assert [wire["type"] for wire in wires] == ["reasoning", "delta", "step", "done", "error"]
    for wire in wires:
        assert not {"seq", "tenant_id", "claw", "run_id"} & wire.keys()
        assert wire.get("trace_id") == (TRACE if wire["type"] in ("done", "error") else None)
    assert adapter.dropped == 0


async def test_a_terminal_event_without_a_trace_id_gets_the_adapters() -> None:
    """The one handle for support is there even if the producer sent none."""
    adapter = SseAdapter(trace_id="T")
    await adapter({"type": "error", "message": "x"})
    assert queued(adapter) == [{"type": "error", "message": "x", "trace_id": "T"}]
    assert adapter.encode([{"type": "error", "message": "x"}]).endswith(b'"trace_id": "T"}\n\n')


async def test_wire_meta_keeps_all_envelope_keys() -> None:
    """With wire_meta every frame carries what to_wire wrote."""
    adapter = SseAdapter(wire_meta=True)
    events = [event for event in one_of_each() if event.WhichOneof("payload") not in ("rewind", "interrupt")]
    for event in events:
        await adapter(event)
    assert queued(adapter) == [to_wire(event) for event in events]
    assert SseAdapter(wire_meta=True).encode([events[1]]) == SseAdapter.frame(to_wire(events[1]) or {}).encode()


async def test_the_given_queue_holds_wire_dicts_and_is_used() -> None:
    """A caller's queue gets the dicts; frames() reads from it."""
    queue: asyncio.Queue[dict[str, object] | None] = asyncio.Queue()
    adapter = SseAdapter(queue)
    assert adapter.queue is queue
    await adapter(make_delta("a"))
    assert queue.qsize() == 1
    await adapter.close()
    assert await all_frames(adapter) == ['data: {"type": "delta", "content": "a"}\n\n']


async def test_only_close_ends_the_frames() -> None:
    """Terminal events end no stream: another segment may follow; close does, once, after what is queued."""
    adapter = SseAdapter()
    for event in one_of_each():
        await adapter(event)
    assert None not in queued(adapter)
    await adapter(make_delta("last"))
    await asyncio.gather(adapter.close(), adapter.close())
    await adapter.close()
    assert queued(adapter) == [{"type": "delta", "content": "last"}, None]
    assert await all_frames(adapter) == []


async def test_events_after_close_are_dropped() -> None:
    """Nothing comes after the sentinel."""
    adapter = SseAdapter()
    await adapter.close()
    await adapter(make_delta("late"))
    assert queued(adapter) == [None]
    assert (adapter.received, adapter.dropped, adapter.failed) == (1, 1, 0)


async def test_frames_wait_for_events_that_come_later() -> None:
    """A reader that is faster than the run gets each frame as it comes."""
    adapter = SseAdapter()
    reader = asyncio.create_task(all_frames(adapter))
    for piece in "abc":
        await asyncio.sleep(0)
        await adapter(make_delta(piece))
    await adapter.close()
    assert len(await reader) == 3


async def test_a_bounded_queue_slows_the_producer_and_loses_nothing() -> None:
    """Emit waits for room, and close for its sentinel."""
    adapter = SseAdapter(asyncio.Queue(maxsize=1))

    async def produce() -> None:
        for number in range(20):
            await adapter(make_delta(str(number)))
        await adapter.close()

    producer = asyncio.create_task(produce())
    await asyncio.sleep(0.01)
    assert adapter.received == 2
    frames = await all_frames(adapter)
    await producer
    assert frames == [SseAdapter.frame({"type": "delta", "content": str(number)}) for number in range(20)]


async def test_a_reader_that_is_gone_holds_nobody_up() -> None:
    """With a full queue an event waits only so long, then it is lost; closing ends too, also for a late reader."""

    class Impatient(SseAdapter):
        put_timeout = 0.01

    adapter = Impatient(asyncio.Queue(maxsize=1))
    async with asyncio.timeout(60):
        for event in (make_delta("a"), make_step("kb", name="k", index=0), make_delta("c")):
            await adapter(event)
        await adapter.close()
    assert (adapter.received, adapter.failed) == (3, 1)
    assert await all_frames(adapter) == [SseAdapter.frame({"type": "delta", "content": "a"})]


async def test_a_frame_that_cannot_be_serialised_is_skipped() -> None:
    """JSON's exceptions stay inside: the frame counts as failed, the stream goes on."""
    adapter = SseAdapter()
    adapter.queue.put_nowait({"type": "step", "step": object()})
    await adapter(make_done(message_id="m", conversation_id="c"))
    await adapter.close()
    frames = await all_frames(adapter)
    assert len(frames) == 1
    assert '"done"' in frames[0]
    assert adapter.failed == 1


async def test_an_event_given_up_while_it_waits_leaves_no_gap_in_the_text() -> None:
    """When a piece is lost, nothing is appended after the gap; done brings the whole text."""
    adapter = SseAdapter(asyncio.Queue(maxsize=1))
    await adapter(make_delta("a"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await adapter(make_delta("b"))
    assert queued(adapter) == [{"type": "delta", "content": "a"}]
    await adapter(make_delta("c"))
    await adapter(make_rewind("a"))
    await adapter(make_done(message_id="m", conversation_id="c", content="abc"))
    assert [(wire["type"], wire["content"]) for wire in queued(adapter) if wire] == [("done", "abc")]
    await adapter(make_delta("next"))
    assert queued(adapter) == [{"type": "delta", "content": "next"}]


async def test_old_producer_dicts_come_out_as_today() -> None:
    """Dicts of the five original types pass through the original route unchanged, integer ids as text."""
    old: list[dict[str, object]] = [
        {"type": "reasoning", "content": "想"},
        {"type": "delta", "content": "你好"},
        {"type": "step", "step": {"type": "mcp", "server": "s", "name": "n", "args": {"id": 2**60}, "result": ""}},
        {"type": "step", "step": {"type": "kb", "name": "n", "args": {}, "result": "r"}, "index": 0},
        {"type": "error", "message": "x"},
        {
            "type": "done",
            "message_id": "9",
            "conversation_id": "8",
            "content": "你好",
            "process_steps": [{"type": "thinking", "text": "想"}],
            "used_skills": [],
            "used_mcp": ["n"],
            "generating": False,
        },
    ]
    adapter = SseAdapter()
    for event in old:
        await adapter(event)
    assert queued(adapter) == old
    assert SseAdapter().encode(old) == "".join(map(SseAdapter.frame, old)).encode()
    await adapter({**old[-1], "message_id": 9, "conversation_id": 8})
    assert queued(adapter) == [old[-1]]


# The native SSE route


async def test_the_native_route_carries_all_seven_events_whole() -> None:
    """Every event has its id line, one data line with all keys, and no event line."""
    adapter = NativeSseAdapter()
    events = one_of_each()
    for event in events:
        await adapter(event)
    await adapter.close()
    frames = await all_frames(adapter)
    assert len(frames) == len(events) == 7
    for event, frame in zip(events, frames, strict=True):
        id_line, data, *rest = frame.split("\n")
        assert id_line == f"id: {event.seq}"
        assert json.loads(data.removeprefix("data: ")) == to_wire(event)
        assert rest == ["", ""]


async def test_encode_and_the_queue_give_the_same_bytes() -> None:
    """The two ways to use an adapter differ in nothing a client could see."""
    events = [
        *one_of_each(),
        make_delta("no meta\u2028"),
        make_reasoning(""),
        with_meta(make_delta("x"), run_id="\u2029"),
    ]
    for make in (
        lambda: SseAdapter(trace_id="T"),
        lambda: SseAdapter(wire_meta=True, tenant_id="N"),
        lambda: NativeSseAdapter(trace_id="T", tenant_id="\u0085"),
    ):
        by_queue, by_encode = make(), make()
        for event in events:
            await by_queue(event)
        await by_queue.close()
        assert "".join(await all_frames(by_queue)).encode() == by_encode.encode(events)
        assert (by_encode.received, by_encode.dropped, by_encode.failed) == (len(events), 0, 0)


def test_encode_never_raises() -> None:
    """An event that cannot be encoded is counted and left out; those after it still come."""
    for adapter in (SseAdapter(trace_id="\ud800"), NativeSseAdapter(trace_id="\ud800")):
        frames = adapter.encode([make_error("x"), {"type": "nothing"}, make_error("y", trace_id="t")])
        assert frames.count(b"\n\n") == 1
        assert b'"message": "y"' in frames
        assert (adapter.received, adapter.dropped, adapter.failed) == (3, 1, 1)


# IM


async def test_the_same_run_reads_the_same_in_both_claws() -> None:
    """One stream of events: what the web shows at the end is what IM sends."""
    web, im = SseAdapter(), BufferAdapter()
    for event in (
        make_delta("半"),
        make_rewind(""),
        make_delta("全"),
        make_delta("文"),
        make_done(message_id="m", conversation_id="c", content="全文"),
    ):
        await web(event)
        await im(event)
    assert [wire["content"] for wire in queued(web) if wire][-1] == im.assemble() == "全文"


async def test_the_buffer_takes_old_producer_dicts() -> None:
    """An older producer's dicts assemble like events."""
    adapter = BufferAdapter()
    await adapter({"type": "delta", "content": "半"})
    await adapter({"type": "done", "message_id": 1, "conversation_id": 2, "content": "<img src='https://x/y.png'>"})
    assert adapter.assemble() == {"__media__": True, "media_type": "image", "url": "https://x/y.png"}
    assert (adapter.received, adapter.dropped, adapter.failed) == (2, 0, 0)


def test_claws_are_named_as_metrics_expect() -> None:
    """Each adapter has its channel's name, and connectors set their own."""
    assert [SseAdapter().claw, NativeSseAdapter().claw, BufferAdapter().claw] == ["web", "web", "im"]
    assert BufferAdapter(claw="im_wecom").claw == "im_wecom"
    assert BaseClawAdapter(claw="x", trace_id="t", tenant_id="n").claw == "x"
