"""The client under OpenTelemetry's own instrumentation of gRPC, which replaces the calls it works with."""

import asyncio

import pytest
from opentelemetry.instrumentation.grpc import GrpcAioInstrumentorClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dualclaw import ContentPart, Message, RunRequest
from dualclaw.errors import EngineError
from dualclaw.events import make_delta, make_done
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, Reconnect

QUESTION = RunRequest(message=Message(parts=[ContentPart(text="hi")]))


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = GrpcAioInstrumentorClient()
    instrumentor.instrument(tracer_provider=provider)
    yield exporter
    instrumentor.uninstrument()
    provider.shutdown()


def ended(spans) -> list[tuple[str, int]]:
    """Rpc and gRPC code of every span that has ended, in order; empties the list."""
    found = [(s.name.rpartition("/")[2], s.attributes["rpc.grpc.status_code"]) for s in spans.get_finished_spans()]
    spans.clear()
    return found


async def test_every_call_has_one_span_that_ends_however_the_call_ends(fake_engine, spans):
    """Read to the end, lost, refused, left in the middle, left unread and closed by another task: each ends once."""
    done = make_done(message_id="m", conversation_id="c")
    async with EngineClient(fake_engine.target, reconnect=Reconnect(total=60.0, first=0.02)) as client:
        read = asyncio.Event()
        fake_engine.on("Run", [make_delta("Hel"), read, "cut", make_delta("lo"), done])
        fake_engine.on("Run", [EngineError("UNKNOWN_AGENT", "no such agent")])
        fake_engine.on("Run", [make_delta("a"), "hang"])
        seqs = []
        async with client.run(QUESTION) as stream:
            async for event in stream:
                seqs.append(event.seq)
                read.set()
        assert seqs == [1, 2, 3]
        first, *failed, last = ended(spans)
        assert (first, last) == (("Run", 14), ("Attach", 0))
        assert set(failed) <= {("Attach", 14)}, "an attempt at the connection that was cut may fail once more"
        with pytest.raises(EngineError, match="no such agent"):
            async with client.run(QUESTION):
                pass
        assert ended(spans) == [("Run", 5)]
        async with client.run(QUESTION) as stream:
            await asyncio.wait_for(anext(stream), 60)
        assert [name for name, _ in ended(spans)] == ["Run"]
        fake_engine.on("Attach", ["headers", "hang"])
        async with client.attach(fake_engine.run_id):
            pass
        assert [name for name, _ in ended(spans)] == ["Attach"]
        async with client.attach(fake_engine.run_id) as stream:
            reader = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0.1)
            await stream.close()
            assert await asyncio.wait_for(reader, 60) is None
        assert [name for name, _ in ended(spans)] == ["Attach"]
    await fake_engine.stop()
    async with EngineClient(fake_engine.target) as client:
        with pytest.raises(EngineUnreachable):
            await client.get_run("r")
    assert ended(spans) == [("GetRun", 14)]
