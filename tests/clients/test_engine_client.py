"""The engine client: starts, refusals, lost streams, deadlines, access and plain reads."""

import asyncio
import time
import uuid
from contextlib import aclosing

import grpc
import pytest
from grpc_health.v1 import health_pb2

from dualclaw import (
    Agent,
    ContentPart,
    Conversation,
    Decision,
    DecisionAction,
    EngineEvent,
    ListConversationsRequest,
    ListMessagesRequest,
    ListRunsRequest,
    Message,
    ResumeRequest,
    Role,
    Run,
    RunRequest,
    RunState,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw.events import make_delta, make_done, make_error
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, NotServed, Reconnect, new_request_id

QUICK = Reconnect(total=60.0, first=0.02, longest=0.1)
DONE = make_done(message_id="m", conversation_id="c", content="Hello")


def question(**fields: str) -> RunRequest:
    return RunRequest(message=Message(role=Role.ROLE_USER, parts=[ContentPart(text="hello")]), **fields)


def text_of(events: list[EngineEvent]) -> str:
    return "".join(event.delta.content for event in events)


async def collect(stream, read: asyncio.Event | None = None) -> list[EngineEvent]:
    """Read a stream to its end; ``read`` is set once there is an event, so that a script can go on then."""
    found = []
    async with asyncio.timeout(60):
        async for event in stream:
            found.append(event)
            if read is not None:
                read.set()
    return found


@pytest.fixture
async def client(fake_engine):
    async with EngineClient(fake_engine.target, reconnect=QUICK) as client:
        yield client


async def test_a_run_gives_its_ids_at_enter_and_its_events_in_order(fake_engine, client):
    """Entering waits for the headers alone; the events follow, and the stream ends after the terminal event."""
    go = asyncio.Event()
    fake_engine.on("Run", [go, make_delta("Hel"), [make_delta("lo"), DONE], 0.2])
    async with client.run(question()) as stream:
        assert (stream.run_id, stream.conversation_id) == (fake_engine.run_id, fake_engine.conversation_id)
        assert stream.last_seq == 0
        go.set()
        events = await collect(stream)
    assert [event.seq for event in events] == [1, 2, 3]
    assert text_of(events) == "Hello"
    assert (stream.last_seq, stream.reconnects) == (3, 0)
    call = fake_engine.calls_of("Run")[0]
    await asyncio.wait_for(call.over.wait(), 60)
    assert not call.left, "a stream read to its end is no cancellation for the server"


async def test_batches_are_what_came_in_one_message(fake_engine, client):
    """A gateway gets the events of one message together, and last_seq moves as they are handed out."""
    fake_engine.on("Run", [make_delta("a"), [make_delta("b"), make_delta("c")], DONE])
    seen = []
    async with client.run(question()) as stream, aclosing(stream.batches()) as batches:
        async for batch in batches:
            seen.append([event.seq for event in batch])
            assert stream.last_seq == batch[-1].seq
    assert seen == [[1], [2, 3], [4]]


async def test_a_segment_says_with_its_last_events_that_no_others_come(fake_engine, client):
    """A gateway ends its response together with them, and need not wait for the status."""
    fake_engine.on("Run", [make_delta("a"), make_delta("b"), DONE])
    found = []
    async with client.run(question()) as stream:
        while events := await stream.next_batch():
            found.append((events[-1].WhichOneof("payload"), stream.ended))
        assert found == [("delta", False), ("delta", False), ("done", True)]
        assert stream.last_seq == 3
        assert await stream.next_batch() == ()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("UNKNOWN_AGENT", "no agent x", {"agent": "x"}), EngineError),
        (EngineError("CONVERSATION_BUSY", "busy", {"run_id": "r9"}), EngineError),
        (FieldError({"message.parts": "is empty"}), FieldError),
        (EngineError("STORE_UNAVAILABLE", "disk full", retry_after=2.0), EngineError),
    ],
)
async def test_a_refused_start_raises_the_engines_own_reason_at_enter(fake_engine, client, error, kind):
    """The reason, text and metadata of a refusal arrive as they were, and the start is not sent again."""
    fake_engine.on("Run", [error])
    with pytest.raises(EngineError) as caught:
        async with client.run(question()):
            pytest.fail("a refused start must not be entered")
    assert type(caught.value) is kind
    assert (caught.value.reason, caught.value.message) == (error.reason, error.message)
    assert dict(error.metadata).items() <= dict(caught.value.metadata).items()
    assert caught.value.retry_after == error.retry_after
    assert len(fake_engine.calls) == 1


@pytest.mark.parametrize(
    "loss",
    [
        "cut",
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        EngineError("SLOW_CLIENT", "too slow"),
    ],
    ids=str,
)
async def test_a_stream_lost_in_the_middle_goes_on_without_loss_or_double(fake_engine, client, loss):
    """After any status but OK the client attaches behind the last event it holds."""
    read = asyncio.Event()
    fake_engine.on("Run", [make_delta("Hel"), read, loss, make_delta("lo"), DONE])
    async with client.run(question()) as stream:
        events = await collect(stream, read)
    assert [event.seq for event in events] == [1, 2, 3]
    assert text_of(events) == "Hello"
    attach = fake_engine.calls_of("Attach")[0].request
    assert (attach.run_id, attach.after_seq, attach.wait) == (fake_engine.run_id, 1, False)
    assert stream.reconnects == 1


async def test_repeated_events_are_dropped_also_inside_a_message(fake_engine, client):
    """An engine that sends a seq again, alone or mixed with new ones, shows each event once."""
    fake_engine.on(
        "Run",
        [
            make_delta("a"),
            make_delta("a", seq=1),
            [make_delta("a", seq=1), make_delta("b", seq=2)],
            [make_delta("b", seq=2), make_delta("c", seq=3)],
            make_done(message_id="m", conversation_id="c", seq=4),
        ],
    )
    async with client.run(question()) as stream:
        events = await collect(stream)
    assert [event.seq for event in events] == [1, 2, 3, 4]
    assert text_of(events) == "abc"


async def test_a_gap_is_filled_by_attaching(fake_engine, client):
    """A seq that is missing counts as a loss: the events in between are fetched, not skipped."""
    full = [make_delta(text, seq=i) for i, text in enumerate("abcd", start=1)]
    fake_engine.log = [*full, make_done(message_id="m", conversation_id="c", seq=5)]
    fake_engine.on("Run", [[full[0], full[3]], make_done(message_id="m", conversation_id="c", seq=5)])
    async with client.run(question()) as stream:
        events = await collect(stream)
    assert text_of(events) == "abcd"
    assert fake_engine.calls_of("Attach")[0].request.after_seq == 1


async def test_a_gap_that_stays_is_the_engines_fault(fake_engine, client):
    """When attaching gives the same gap the stream raises instead of asking for ever."""
    fake_engine.on("Run", [make_delta("a", seq=1), make_delta("c", seq=3), "hang"])
    fake_engine.on("Attach", [make_delta("c", seq=3)])
    with pytest.raises(EngineError, match="left out event 2") as caught:
        async with client.run(question()) as stream:
            await collect(stream)
    assert caught.value.reason == "INTERNAL"
    assert len(fake_engine.calls_of("Attach")) == 1


async def test_a_segment_without_an_end_is_attached_once_and_then_reported(fake_engine, client):
    """OK before the terminal event is no end: one attach looks for more, then the stream raises."""
    fake_engine.on("Run", [make_delta("a")])
    with pytest.raises(EngineError, match="before the end of the segment") as caught:
        async with client.run(question()) as stream:
            await collect(stream)
    assert caught.value.metadata["last_seq"] == "1"
    assert len(fake_engine.calls_of("Attach")) == 1


async def test_a_start_whose_answer_was_lost_is_sent_again_under_the_same_request_id(fake_engine, client):
    """Nothing is known of the first attempt, so the second one carries its request_id: one run, not two."""
    fake_engine.on("Run", ["cut"])
    fake_engine.on("Run", [make_delta("Hello"), DONE])
    async with client.run(question()) as stream:
        events = await collect(stream)
    assert text_of(events) == "Hello"
    first, second = (call.request for call in fake_engine.calls_of("Run"))
    assert first == second
    assert uuid.UUID(first.request_id).version == 7


async def test_a_resume_lost_before_its_first_event_is_repeated_and_not_attached(fake_engine, client):
    """Only the engine knows where the segment begins; an attach after 0 would tell the old segments again."""
    fake_engine.log = [make_delta("old", seq=1), make_done(message_id="m", conversation_id="c", seq=2)]
    answer = [make_delta("new", seq=3), make_done(message_id="m", conversation_id="c", seq=4)]
    entered = asyncio.Event()
    fake_engine.on("Resume", ["headers", entered, "cut", answer])
    fake_engine.on("Resume", [answer])
    request = ResumeRequest(
        run_id=fake_engine.run_id,
        decisions=[Decision(interrupt_id="call_1", action=DecisionAction.DECISION_ACTION_APPROVE)],
    )
    async with client.resume(request) as stream:
        entered.set()
        events = await collect(stream)
    assert text_of(events) == "new"
    assert [event.seq for event in events] == [3, 4]
    assert fake_engine.calls_of("Attach") == []
    assert not request.request_id, "the caller's message is not changed"


async def test_a_segment_ends_at_its_own_end_although_the_attach_would_go_on(fake_engine, client):
    """After a loss the attach spans later segments; the stream of a run stops where its segment does."""
    fake_engine.log = [
        make_delta("one", seq=1),
        make_done(message_id="m", conversation_id="c", seq=2, stop_reason="interrupted"),
        make_delta("two", seq=3),
        make_done(message_id="m", conversation_id="c", seq=4),
    ]
    read = asyncio.Event()
    fake_engine.on("Run", [fake_engine.log[0], read, "cut"])
    async with client.run(question()) as stream:
        events = await collect(stream, read)
    assert [event.seq for event in events] == [1, 2]


async def test_an_attach_goes_over_segments_and_ends_where_the_engine_ends_it(fake_engine, client):
    """A terminal event in the middle of an attach is not its end, and a loss keeps ``wait``."""
    fake_engine.log = [
        make_delta("one", seq=1),
        make_done(message_id="m", conversation_id="c", seq=2, stop_reason="interrupted"),
        make_delta("two", seq=3),
        make_done(message_id="m", conversation_id="c", seq=4),
    ]
    read = asyncio.Event()
    fake_engine.on("Attach", [fake_engine.log[:2], read, "cut"])
    fake_engine.on("Attach", [fake_engine.log[2:]])
    async with client.attach(fake_engine.run_id, wait=True) as stream:
        events = await collect(stream, read)
    assert text_of(events) == "onetwo"
    again = fake_engine.calls_of("Attach")[1].request
    assert (again.after_seq, again.wait) == (2, True)


async def test_an_attach_behind_the_last_event_is_empty_and_ok(fake_engine, client):
    """A finished run has nothing more to say."""
    fake_engine.log = [make_done(message_id="m", conversation_id="c", seq=1)]
    async with client.attach(fake_engine.run_id, after_seq=1) as stream:
        assert await collect(stream) == []
        assert stream.last_seq == 1


async def test_an_attach_to_a_silent_run_enters_without_waiting_for_an_event(fake_engine, client):
    """The headers are enough to know that the engine has accepted it."""
    fake_engine.on("Attach", ["headers", "hang"])
    async with asyncio.timeout(60), client.attach(fake_engine.run_id, wait=True):
        pass


async def test_a_refused_reattach_raises_its_reason(fake_engine, client):
    """A run that is gone when the stream is taken up again is an error, not a silence."""
    read = asyncio.Event()
    fake_engine.on("Run", [make_delta("a"), read, "cut"])
    fake_engine.on("Attach", [EngineError("LOG_COMPACTED", "gone")])
    with pytest.raises(EngineError) as caught:
        async with client.run(question()) as stream:
            await collect(stream, read)
    assert caught.value.reason == "LOG_COMPACTED"
    assert len(fake_engine.calls_of("Attach")) == 1


@pytest.mark.parametrize("events_before", [0, 1])
async def test_an_attach_refused_after_its_headers_raises_at_once(fake_engine, client, events_before):
    """A refusal is one wherever it stands before the first message; trying it again would never end otherwise."""
    read, entered = asyncio.Event(), asyncio.Event()
    if events_before:
        fake_engine.on("Attach", [make_delta("a", seq=4), read, "cut"])
    fake_engine.on("Attach", ["headers", entered, EngineError("AFTER_SEQ_OUT_OF_RANGE", "beyond the end")])

    async def follow() -> None:
        async with client.attach(fake_engine.run_id, after_seq=3, wait=True) as stream:
            entered.set()
            await collect(stream, read)

    with pytest.raises(EngineError) as caught:
        await follow()
    assert caught.value.reason == "AFTER_SEQ_OUT_OF_RANGE"
    assert len(fake_engine.calls_of("Attach")) == 1 + events_before


async def test_a_reattach_told_to_come_later_does(fake_engine, client):
    """An overloaded engine's RetryInfo is heeded and the stream goes on afterwards."""
    read = asyncio.Event()
    fake_engine.on("Run", [make_delta("Hel"), read, "cut", make_delta("lo"), DONE])
    fake_engine.on("Attach", [EngineError("OVERLOADED", "later", retry_after=0.3)])
    fake_engine.on("Attach", [[make_delta("lo", seq=2), make_done(message_id="m", conversation_id="c", seq=3)]])
    started = time.monotonic()
    async with client.run(question()) as stream:
        events = await collect(stream, read)
    assert text_of(events) == "Hello"
    assert time.monotonic() - started >= 0.3


async def test_a_restarted_engine_is_found_again(fake_engine, client):
    """While nobody listens the client keeps trying; the stream goes on when the port is open again."""
    fake_engine.on("Run", [make_delta("Hel"), "hang", make_delta("lo"), DONE])
    async with client.run(question()) as stream:
        first = await asyncio.wait_for(anext(stream), 60)
        await fake_engine.stop()
        rest = asyncio.ensure_future(collect(stream))
        await asyncio.sleep(0.4)
        assert not rest.done()
        await fake_engine.start()
        assert text_of([first, *await rest]) == "Hello"


async def test_trouble_without_end_raises_with_the_place_to_go_on_from(fake_engine):
    """When the time for taking up a stream is over the error names the run and the last event."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    impatient = EngineClient(fake_engine.target, reconnect=Reconnect(total=0.5, first=0.02))
    async with impatient as client, client.run(question()) as stream:
        await asyncio.wait_for(anext(stream), 60)
        await fake_engine.stop()
        with pytest.raises(EngineUnreachable, match=r"not taken up again within 0\.5 s") as caught:
            await collect(stream)
    assert caught.value.metadata["run_id"] == fake_engine.run_id
    assert caught.value.metadata["last_seq"] == "1"


async def test_a_start_waits_for_an_engine_that_was_there_before(fake_engine, client):
    """A restart of the engine fails nobody's question: the start is sent when the port is open again, once."""
    fake_engine.on("Run", [DONE])
    fake_engine.on("Run", [DONE])
    async with client.run(question()) as stream:
        await collect(stream)
    await fake_engine.stop()

    async def ask():
        async with client.run(question()) as stream:
            return await collect(stream)

    asking = asyncio.ensure_future(ask())
    await asyncio.sleep(0.4)
    assert not asking.done()
    await fake_engine.start()
    assert [event.WhichOneof("payload") for event in await asyncio.wait_for(asking, 60)] == ["done"]
    assert len(fake_engine.calls_of("Run")) == 2


@pytest.mark.parametrize("start", [0.0, 0.3])
async def test_the_wait_of_a_start_is_bounded(fake_engine, start):
    """An engine that stays away is told of after ``Reconnect.start`` seconds; 0: at once."""
    fake_engine.on("Run", [DONE])
    async with EngineClient(fake_engine.target, reconnect=Reconnect(start=start, first=0.02, longest=0.02)) as client:
        async with client.run(question()) as stream:
            await collect(stream)
        await fake_engine.stop()
        began = time.monotonic()
        with pytest.raises(EngineUnreachable, match="no engine answers"):
            async with client.run(question()):
                pass
        assert time.monotonic() - began > start / 2


async def test_no_engine_at_the_address_says_so_at_once(fake_engine):
    """A first connection that is refused is not tried again: the person is told what to do."""
    await fake_engine.stop()
    patient = Reconnect(total=600, start=600)
    async with EngineClient(fake_engine.target, reconnect=patient) as client:
        with pytest.raises(EngineUnreachable) as caught:
            async with asyncio.timeout(60), client.run(question()):
                pass
        with pytest.raises(EngineUnreachable):
            await client.get_run("r")
    expected = f"no engine answers at {fake_engine.target}; start it with `dualclaw-server` or set DUALCLAW_ENGINE"
    assert caught.value.message == expected


async def test_a_failed_run_is_an_error_event_and_not_an_exception(fake_engine, client):
    """The run failed, the call did not."""
    fake_engine.on("Run", [make_delta("a"), make_error("the model is gone")])
    async with client.run(question()) as stream:
        events = await collect(stream)
    assert events[-1].error.message == "the model is gone"


async def test_the_deadline_covers_the_whole_stream(fake_engine, client):
    """Reconnections do not start the time anew; the server sees what is left of it."""
    read = asyncio.Event()
    fake_engine.on("Run", [make_delta("a"), read, 0.3, "cut"])
    fake_engine.on("Attach", ["headers", "hang"])
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"did not end within 4 s") as caught:
        async with client.run(question(), timeout=4.0) as stream:
            await collect(stream, read)
    assert 3.9 <= time.monotonic() - started < 60
    assert caught.value.metadata["grpc_code"] == "DEADLINE_EXCEEDED"
    assert caught.value.metadata["last_seq"] == "1"
    run, attach = fake_engine.calls_of("Run")[0], fake_engine.calls_of("Attach")[0]
    assert 0 < run.time_remaining <= 4.0
    assert attach.time_remaining < 3.75


async def test_the_deadline_covers_a_start_nobody_answers(fake_engine, client):
    """An engine that accepts the connection and then says nothing does not hold its caller."""
    fake_engine.on("Run", ["no-headers", "hang"])
    with pytest.raises(EngineError, match=r"did not end within 3 s"):
        async with client.run(question(), timeout=3.0):
            pass
    assert len(fake_engine.calls) == 1


async def test_leaving_the_stream_ends_the_call_at_once(fake_engine, client):
    """The server's handler is cancelled within a moment, also while nothing is being sent."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    async with client.run(question()) as stream:
        await asyncio.wait_for(anext(stream), 60)
        left = time.monotonic()
    assert time.monotonic() - left < 60
    call = fake_engine.calls_of("Run")[0]
    await asyncio.wait_for(call.over.wait(), 60)
    assert call.left


async def test_cancelling_the_reader_cancels_and_nothing_else_happens(fake_engine, client):
    """A CancelledError goes through, the call ends, and no attach is made behind the caller's back."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    got = asyncio.Event()

    async def read() -> None:
        async with client.run(question()) as stream:
            async for _ in stream:
                got.set()

    task = asyncio.ensure_future(read())
    await asyncio.wait_for(got.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    await asyncio.wait_for(fake_engine.calls_of("Run")[0].over.wait(), 60)
    assert fake_engine.calls_of("Attach") == []


async def test_closing_the_stream_from_another_task_ends_the_iteration(fake_engine, client):
    """A stop button: whoever reads sees the end, not an error, and nothing is attached again."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    async with client.run(question()) as stream:
        read = asyncio.Event()
        reader = asyncio.ensure_future(collect(stream, read))
        await asyncio.wait_for(read.wait(), 60)
        await stream.close()
        assert text_of(await asyncio.wait_for(reader, 60)) == "a"
    assert fake_engine.calls_of("Attach") == []


async def test_closing_the_client_fails_open_streams_and_later_calls(fake_engine):
    """A reader of a closed client gets an error it can name, not a cancellation it did not ask for."""
    fake_engine.on("Run", [make_delta("a"), "hang"])
    client = EngineClient(fake_engine.target, reconnect=QUICK)
    async with client.run(question()) as stream:
        read = asyncio.Event()
        reader = asyncio.ensure_future(collect(stream, read))
        await asyncio.wait_for(read.wait(), 60)
        await client.close()
        with pytest.raises(EngineUnreachable, match="closed"):
            await asyncio.wait_for(reader, 60)
    with pytest.raises(EngineUnreachable, match="closed"):
        await client.get_run("r")


async def test_access_metadata_goes_with_every_call(fake_engine):
    """Key, tenant, subject and the hook's pairs are sent; a call's own token wins, an empty one sends none."""
    read = asyncio.Event()
    fake_engine.on("Run", [make_delta("a"), read, "cut", DONE])
    fake_engine.on("Run", [make_delta("a"), DONE])
    fake_engine.runs["r"] = Run(id="r")
    trace = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    async with EngineClient(
        fake_engine.target, token="k1", tenant="t1", subject="anna", metadata=lambda: [trace], reconnect=QUICK
    ) as client:
        async with client.run(question(), token="k2") as stream:
            await collect(stream, read)
        await client.get_run("r")
        await client.get_run("r", token="")
        async with client.acting_for(tenant="t2", subject="ben").run(question()) as stream:
            await collect(stream)
    run, attach, read, open_read, other = fake_engine.calls[:5]
    for call, key in ((run, "Bearer k2"), (attach, "Bearer k2"), (read, "Bearer k1")):
        assert call.metadata["authorization"] == key
        assert (call.metadata["dualclaw-tenant"], call.metadata["dualclaw-subject"]) == ("t1", "anna")
        assert call.metadata["traceparent"] == trace[1]
    assert "authorization" not in open_read.metadata
    assert (other.metadata["dualclaw-tenant"], other.metadata["dualclaw-subject"]) == ("t2", "ben")


async def test_a_token_that_cannot_be_a_header_is_refused_here(client):
    """A forwarded key with a line break must not become a second header, nor a crash of the transport."""
    for token in ("a\nb", "schlüssel", " geheim"):
        with pytest.raises(EngineError) as caught:
            await client.get_run("r", token=token)
        assert caught.value.reason == "UNAUTHENTICATED"
        assert token not in caught.value.message


def test_a_subject_that_cannot_be_a_header_is_refused():
    """The same for the person acted for."""
    with pytest.raises(FieldError, match="dualclaw-subject"):
        EngineClient("127.0.0.1:1", subject="李")


async def test_a_message_beyond_grpcs_own_limit_arrives(fake_engine, client):
    """A tool result of 5 MB in one event does not kill the stream (gRPC's default limit is 4 MiB)."""
    fake_engine.on("Run", [make_delta("x" * 5_000_000), DONE])
    async with client.run(question()) as stream:
        events = await collect(stream)
    assert len(events[0].delta.content) == 5_000_000


async def test_an_engine_that_sends_no_run_id_header_is_understood_all_the_same(fake_engine, client):
    """A foreign engine without our headers: the run's id comes from its first event."""
    fake_engine.on("Run", ["no-headers", make_delta("Hel"), make_delta("lo"), DONE])
    async with client.run(question()) as stream:
        assert stream.run_id == fake_engine.run_id
        assert text_of(await collect(stream)) == "Hello"


async def test_a_server_that_is_no_engine_is_named_as_such():
    """Another gRPC service at the address is told apart from a fault of the engine."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with EngineClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(EngineError, match="no dualclaw engine") as caught:
                async with client.run(question()):
                    pass
            assert "DUALCLAW_ENGINE" in caught.value.hint
            assert not await client.check()
    finally:
        await server.stop(None)


async def test_an_engine_without_an_optional_rpc_is_still_an_engine(fake_engine, client):
    """A Resume that is not served is told by name with the engine's own words, and not as a fault to try again."""
    fake_engine.on("Resume", [grpc.StatusCode.UNIMPLEMENTED])
    with pytest.raises(NotServed, match="does not serve Resume; it says: a status of the script") as caught:
        async with client.resume(ResumeRequest(run_id="r")):
            pass
    assert (caught.value.reason, caught.value.metadata["grpc_code"]) == ("INTERNAL", "UNIMPLEMENTED")
    assert "Try again" not in caught.value.hint
    assert len(fake_engine.calls) == 1


async def test_check_follows_the_engines_own_word(fake_engine, client):
    """SERVING is True; NOT_SERVING (it drains) and an engine that is gone are False."""
    assert await client.check()
    await fake_engine.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not await client.check()
    await fake_engine.stop()
    assert not await client.check()


async def test_plain_calls_ask_and_answer(fake_engine, client):
    """Every unary call carries its request and returns what the engine said, or raises its reason."""
    fake_engine.runs["r1"] = Run(id="r1", state=RunState.RUN_STATE_RUNNING, conversation_id="c1")
    fake_engine.conversations["c1"] = Conversation(id="c1", title="Hi")
    fake_engine.messages["c1"] = [Message(id="m1"), Message(id="m2")]
    fake_engine.agents["assistant"] = Agent(name="assistant")
    assert (await client.get_run("r1")).conversation_id == "c1"
    assert (await client.cancel("r1", "enough")).id == "r1"
    assert fake_engine.calls_of("Cancel")[0].request.reason == "enough"
    listed = await client.list_runs(ListRunsRequest(states=[RunState.RUN_STATE_FAILED]))
    assert list(listed.runs) == []
    assert [run.id for run in (await client.list_runs(ListRunsRequest())).runs] == ["r1"]
    assert (await client.list_conversations(ListConversationsRequest())).conversations[0].title == "Hi"
    assert (await client.get_conversation("c1")).title == "Hi"
    page = await client.list_messages(ListMessagesRequest(conversation_id="c1", page_size=1))
    assert ([m.id for m in page.messages], page.next_page_token) == (["m1"], "1")
    assert (await client.list_agents()).agents[0].name == "assistant"
    assert (await client.get_agent("assistant")).name == "assistant"
    assert not (await client.set_interceptor_enabled("assistant", "hitl", False)).enabled
    await client.delete_conversation("c1")
    for call, reason in (
        (client.get_run("x"), "UNKNOWN_RUN"),
        (client.get_conversation("c1"), "UNKNOWN_CONVERSATION"),
        (client.get_agent("x"), "UNKNOWN_AGENT"),
    ):
        with pytest.raises(EngineError) as caught:
            await call
        assert caught.value.reason == reason


def test_request_ids_are_uuid7_in_order_of_time():
    """A later id sorts behind an earlier one and no two are equal."""
    first = new_request_id()
    time.sleep(0.003)
    before = time.time()
    second = new_request_id()
    after = time.time()
    assert first < second
    assert uuid.UUID(second).version == 7
    assert uuid.UUID(second).variant == uuid.RFC_4122
    assert int(before * 1000) <= uuid.UUID(second).int >> 80 <= after * 1000
