import asyncio
import contextlib
from collections.abc import AsyncIterable

import grpc
import pytest

from dualclaw import AttachRequest, EngineEvent, GetRunRequest, RunResponse
from dualclaw.errors import EngineError
from dualclaw.status import error_from_rpc
from dualclaw_server.engine.store import RunKey
from tests.server.servicers.conftest import (
    PARKED,
    RUNNING,
    SUCCEEDED,
    TIMEOUT,
    Bench,
    Serve,
    delta,
    done,
    question,
    until,
)


async def seqs_of(call: AsyncIterable[RunResponse]) -> list[int]:
    """Return the seq of every event of a stream that must end well."""
    async with asyncio.timeout(TIMEOUT):
        return [event.seq async for message in call for event in message.events]


async def error_of(call: AsyncIterable[RunResponse], got: list[EngineEvent] | None = None) -> EngineError:
    """Return what a stream ends with; the events before it are added to ``got``."""
    try:
        async for message in call:
            if got is not None:
                got += message.events
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    raise AssertionError("the stream ended with OK")


async def write_parked(bench: Bench, key: RunKey) -> None:
    """Events 1 to 3: a segment that ends parked."""
    await bench.runs.write(key, delta("a"))
    await bench.runs.write(key, delta("b"), done(stop_reason="interrupted"), state=PARKED)


async def write_rest(bench: Bench, key: RunKey) -> None:
    """Events 4 and 5: the segment after it, which is the last."""
    await bench.runs.write(key, delta("c"))
    await bench.runs.write(key, done(), state=SUCCEEDED)


async def test_run_names_run_and_conversation_at_once_while_the_run_is_silent(bench: Bench) -> None:
    """A client learns what to attach to before the first event exists."""
    call = bench.engine.Run(question())
    async with asyncio.timeout(TIMEOUT):
        metadata = dict(await call.initial_metadata())
    run = (await bench.engine.GetRun(GetRunRequest(run_id=metadata["dualclaw-run-id"]))).run
    assert metadata["dualclaw-conversation-id"] == run.conversation_id
    call.cancel()


async def test_run_streams_live_events_up_to_the_end_of_its_segment(bench: Bench) -> None:
    """Stored and live frames arrive in order; the next segment is not part of the stream."""
    call = bench.engine.Run(question())
    key = RunKey("default", dict(await call.initial_metadata())["dualclaw-run-id"])
    await bench.runs.write(key, delta("a"))
    messages = aiter(call)
    assert [event.seq for event in (await anext(messages)).events] == [1]
    await bench.runs.write(key, delta("b"), done(stop_reason="interrupted"), state=PARKED)
    await write_rest(bench, key)
    assert await seqs_of(messages) == [2, 3]
    assert await call.code() == grpc.StatusCode.OK


async def test_the_same_request_id_streams_the_segment_again_from_its_first_event(bench: Bench) -> None:
    """A client that lost the reply gets the same events, bytes for bytes, and no second run."""
    first = bench.engine.Run(question(request_id="r1"))
    key = RunKey("default", dict(await first.initial_metadata())["dualclaw-run-id"])
    await write_parked(bench, key)
    await write_rest(bench, key)
    seen = [event async for message in first for event in message.events]
    again = [event async for message in bench.engine.Run(question(request_id="r1")) for event in message.events]
    assert again == seen
    assert [event.seq for event in seen] == [1, 2, 3]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("wait", [False, True])
async def test_attach_gives_exactly_the_events_after_a_position(bench: Bench, after: int, *, wait: bool) -> None:
    """Over all segments, inside a frame too; at the end of a final run it is an empty stream and OK."""
    key = await bench.new_run()
    await write_parked(bench, key)
    await write_rest(bench, key)
    call = bench.engine.Attach(AttachRequest(run_id=key.run_id, after_seq=after, wait=wait))
    assert await seqs_of(call) == list(range(after + 1, 6))


async def test_attach_beyond_the_end_is_out_of_range_and_names_the_end(bench: Bench) -> None:
    """A client that is ahead of the log, as after a power loss, learns where the log ends."""
    key = await bench.new_run()
    await bench.runs.write(key, delta("a"))
    error = await error_of(bench.engine.Attach(AttachRequest(run_id=key.run_id, after_seq=2)))
    assert (error.reason, error.metadata["last_seq"]) == ("AFTER_SEQ_OUT_OF_RANGE", "1")
    assert error.metadata["grpc_code"] == "OUT_OF_RANGE"


async def test_attach_without_wait_ends_where_the_run_is_parked(bench: Bench) -> None:
    """The stream of a parked run ends after its last event, and is empty for one who has them all."""
    key = await bench.new_run()
    await write_parked(bench, key)
    assert await seqs_of(bench.engine.Attach(AttachRequest(run_id=key.run_id))) == [1, 2, 3]
    assert await seqs_of(bench.engine.Attach(AttachRequest(run_id=key.run_id, after_seq=3))) == []


async def test_attach_with_wait_stays_over_a_parked_phase_until_the_run_is_final(bench: Bench) -> None:
    """A client that waits sees the next segment without attaching again."""
    key = await bench.new_run()
    await write_parked(bench, key)
    call = bench.engine.Attach(AttachRequest(run_id=key.run_id, after_seq=3, wait=True))
    reading = asyncio.create_task(seqs_of(call))
    await asyncio.sleep(0.1)
    assert not reading.done()
    await write_rest(bench, key)
    assert await reading == [4, 5]


async def test_attach_follows_a_parked_run_that_works_again(bench: Bench) -> None:
    """A terminal event that has a later segment does not end the stream, even before that segment's first event."""
    key = await bench.new_run()
    await write_parked(bench, key)
    await bench.runs.write(key, state=RUNNING)
    reading = asyncio.create_task(seqs_of(bench.engine.Attach(AttachRequest(run_id=key.run_id, after_seq=1))))
    await asyncio.sleep(0.1)
    assert not reading.done()
    await write_rest(bench, key)
    assert await reading == [2, 3, 4, 5]


async def test_a_client_that_catches_up_gets_many_events_in_few_messages(bench: Bench) -> None:
    """Frames are joined up to a quarter of a MiB; nothing is lost, repeated or out of order."""
    key = await bench.new_run()
    for _ in range(40):
        await bench.runs.write(key, delta("x" * 20_000))
    await bench.runs.write(key, done(), state=SUCCEEDED)
    messages = [message async for message in bench.engine.Attach(AttachRequest(run_id=key.run_id))]
    assert [event.seq for message in messages for event in message.events] == list(range(1, 42))
    assert 4 <= len(messages) <= 10
    assert max(message.ByteSize() for message in messages) <= 262_144


async def test_a_frame_larger_than_the_limit_goes_out_whole(bench: Bench) -> None:
    """One big event, above the default limit of 4 MiB of gRPC clients too, reaches a client that allows it."""
    key = await bench.new_run()
    await bench.runs.write(key, delta("x" * 5_000_000))
    await bench.runs.write(key, done(), state=SUCCEEDED)
    options = [("grpc.max_receive_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(bench.server.address, options=options) as channel:
        call = type(bench.engine)(channel).Attach(AttachRequest(run_id=key.run_id))
        assert await seqs_of(call) == [1, 2]


async def test_a_client_that_does_not_read_is_let_go_and_may_attach_again(serve: Serve) -> None:
    """The log is the buffer: memory stays bounded, the follower is closed, the reason is SLOW_CLIENT."""
    options = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
    async with serve(patience=3, client_options=options) as bench:
        key = await bench.new_run()
        for _ in range(200):
            await bench.runs.write(key, delta("x" * 100_000))
        call = bench.engine.Attach(AttachRequest(run_id=key.run_id))
        await call.initial_metadata()
        await until(lambda: bench.runs.store.followed == 1)
        await until(lambda: not bench.runs.readers[key] and not bench.runs.store.following)
        got: list[EngineEvent] = []
        error = await error_of(call, got)
        assert (error.reason, error.metadata["grpc_code"]) == ("SLOW_CLIENT", "RESOURCE_EXHAUSTED")
        assert 0 < len(got) < 200
        await bench.runs.write(key, done(), state=SUCCEEDED)
        rest = bench.engine.Attach(AttachRequest(run_id=key.run_id, after_seq=got[-1].seq))
        assert await seqs_of(rest) == list(range(len(got) + 1, 202))


async def test_a_client_that_reads_slowly_but_steadily_is_kept(serve: Serve) -> None:
    """What counts is progress with one message, not how long the whole stream takes."""
    async with serve(patience=3) as bench:
        key = await bench.new_run()
        for _ in range(6):
            await bench.runs.write(key, delta("x" * 300_000))
        await bench.runs.write(key, done(), state=SUCCEEDED)
        got = []
        async for message in bench.engine.Attach(AttachRequest(run_id=key.run_id)):
            got += [event.seq for event in message.events]
            await asyncio.sleep(0.7)
        assert got == list(range(1, 8))


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_a_client_that_leaves_is_noticed_while_the_run_is_silent(serve: Serve, how: str) -> None:
    """Presence is given up and the follower closed within a moment, whatever way the client goes."""
    async with serve() as bench:
        key = await bench.new_run()
        channel = grpc.aio.insecure_channel(bench.server.address)
        timeout = 3 if how == "deadline" else None
        call = type(bench.engine)(channel).Attach(AttachRequest(run_id=key.run_id), timeout=timeout)
        await call.initial_metadata()
        await until(lambda: bench.runs.store.followed == 1)
        assert how == "deadline" or bench.runs.readers[key] == 1
        if how == "cancel":
            call.cancel()
        elif how == "close":
            await channel.close()
        else:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
        await until(lambda: not (bench.runs.readers[key] or bench.runs.store.following or bench.server.open_calls))
        await channel.close()


async def test_a_stopping_server_sends_what_is_committed_and_says_attach_again(serve: Serve) -> None:
    """A stream of a run that goes on elsewhere ends UNAVAILABLE, without losing an event."""
    async with serve() as bench:
        key = await bench.new_run()
        await bench.runs.write(key, delta("a"))
        call = bench.engine.Attach(AttachRequest(run_id=key.run_id))
        messages = aiter(call)
        assert [event.seq for event in (await anext(messages)).events] == [1]
        bench.runs.store.on_time.clear()  # what is committed now has not been noticed when the stream is ended
        await bench.runs.write(key, delta("b"))
        await bench.runs.write(key, delta("c"))
        draining = asyncio.create_task(bench.server.drain(0))
        rest: list[EngineEvent] = []
        error = await error_of(messages, rest)
        assert [event.seq for event in rest] == [2, 3]
        assert (error.reason, error.metadata["grpc_code"]) == ("STORE_UNAVAILABLE", "UNAVAILABLE")
        assert "attach again" in error.message
        async with asyncio.timeout(TIMEOUT):
            await draining


async def test_a_stopping_server_still_ends_the_stream_of_a_run_that_ended(serve: Serve) -> None:
    """The last frames of a run that finished within the grace time reach its client, with status OK."""
    async with serve() as bench:
        key = await bench.new_run()
        call = bench.engine.Attach(AttachRequest(run_id=key.run_id))
        await call.initial_metadata()
        await bench.runs.write(key, delta("a"), done(), state=SUCCEEDED)
        await bench.server.drain(0)
        assert await seqs_of(call) == [1, 2]
        assert await call.code() == grpc.StatusCode.OK
