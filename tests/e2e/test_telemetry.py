"""What a server tells a collector: spans of rpcs and agents, and how models were routed."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from dualclaw import ContentPart, Message, Role, RunRequest
from dualclaw_clients.engine_client import EngineClient

from .process import Launcher

AGENTS = """
from dualclaw_server.engine.agent import Agent
from dualclaw_server.interceptors import TracingInterceptor

AGENT = Agent("traced", interceptors=[TracingInterceptor()])
"""


class Collector:
    """Keeps the names of spans and the points of counters."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, bytes]] = []
        self.counts: dict[tuple[str, str, str], int] = {}

    def of_traces(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [(span.name, span.trace_id) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_metrics(self, request, context):
        for resource in request.resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in metric.sum.data_points:
                    labels = {label.key: label.value.string_value for label in point.attributes}
                    place = (metric.name, labels.get("model", ""), labels.get("outcome", ""))
                    self.counts[place] = point.as_int
        return metrics_service_pb2.ExportMetricsServiceResponse()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(self, request, context):  # noqa: N802 - the name of the rpc
        return self._collector.of_traces(request, context)


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(self, request, context):  # noqa: N802 - the name of the rpc
        return self._collector.of_metrics(request, context)


@pytest.fixture
async def collector() -> AsyncIterator[tuple[str, Collector]]:
    kept, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(kept), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(kept), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"http://127.0.0.1:{port}", kept
    await server.stop(0)


async def test_a_server_exports_spans_and_route_counts_of_a_run(
    launch: Launcher, connect: Callable[[str], EngineClient], write_script, collector, tmp_path
) -> None:
    """A model that is down and the fallback to another are counted apart; rpc, agent and model are in one trace."""
    address, kept = collector
    (tmp_path / "traced.py").write_text(AGENTS, "utf-8")
    script = write_script({"say": [{"text": "from the second"}]})
    engine = launch(
        "dualclaw_server",
        DUALCLAW_MODEL=f"custom:first@http://127.0.0.1:9/v1,{script}",
        DUALCLAW_AGENTS="traced:AGENT",
        PYTHONPATH=str(tmp_path),
        OTEL_EXPORTER_OTLP_ENDPOINT=address,
        OTEL_EXPORTER_OTLP_INSECURE="true",
    )
    client = connect(engine.address)
    message = Message(role=Role.ROLE_USER, parts=[ContentPart(text="hi")])
    async with client.run(RunRequest(message=message)) as stream:
        events = [event async for event in stream]
    assert events[-1].done.content == "from the second"
    await asyncio.to_thread(engine.stop)
    routes = {place[1:]: count for place, count in kept.counts.items() if place[0] == "aiflow_llm_route_total"}
    assert routes[("custom:first", "fallback")] == 1
    assert sum(count for (_, outcome), count in routes.items() if outcome == "ok") == 1
    trace_id = bytes.fromhex(events[0].trace_id)
    names = {name for name, found in kept.spans if found == trace_id}
    assert any("Run" in name for name in names)
    assert any("invoke_agent" in name for name in names)
    assert any("chat" in name for name in names)
