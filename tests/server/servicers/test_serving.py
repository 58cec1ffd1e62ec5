import asyncio

import grpc
import pytest

from dualclaw import AttachRequest
from tests.server.servicers.conftest import SUCCEEDED, TIMEOUT, Serve, delta, done, question, until


async def test_a_drain_waits_for_calls_and_their_cleanup(serve: Serve) -> None:
    """A call still in the engine when the server stops gets its answer; the server is not gone before it."""
    async with serve() as bench:
        bench.runs.before_start.clear()
        call = bench.engine.Run(question())
        reading = asyncio.create_task(call.read())
        await until(lambda: bool(bench.runs.started))
        bench.runs.failure = ZeroDivisionError()
        draining = asyncio.create_task(bench.server.drain(0))
        await asyncio.sleep(0.2)
        assert not draining.done()
        bench.runs.before_start.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        async with asyncio.timeout(TIMEOUT):
            await draining
        assert bench.server.open_calls == 0


async def test_clients_may_ping_a_silent_stream(serve: Serve) -> None:
    """Pings at the allowed pace keep a silent call alive; the server does not answer with too_many_pings."""
    options = [("grpc.keepalive_time_ms", 1_000), ("grpc.http2.max_pings_without_data", 0)]
    async with serve(min_ping_interval=0.2, client_options=options) as bench:
        key = await bench.new_run()
        call = bench.engine.Attach(AttachRequest(run_id=key.run_id))
        await call.initial_metadata()
        await asyncio.sleep(4.7)  # gRPC forgives the first pings
        await bench.runs.write(key, delta("a"), done(), state=SUCCEEDED)
        assert [event.seq async for message in call for event in message.events] == [1, 2]
