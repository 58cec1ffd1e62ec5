"""Traces and metrics: spans of the rpcs, the trace a call belongs to, and where both go.

Spans are made by opentelemetry-instrumentation-grpc. Its interceptor iterates a streaming handler and keeps
its span current meanwhile; our handlers therefore yield nothing and write to the call themselves
(servicers/streams.py), so that no span is ever current over a ``yield`` to somebody else's task.

The rpcs' provider is passed explicitly. A server process also makes the providers its own global ones
(``app.serve``), so that interceptors and counters, which only know the API, find them. Without an OTLP endpoint
there is no SDK at work, and none is imported, for it would take a third of a second of every start: a call then
belongs to the trace its caller named, or to a new random one.
"""

# ruff: noqa: PLC0415  # see above

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import grpc
from opentelemetry import trace

from dualclaw_server.engine.caller import TraceParent
from dualclaw_server.engine.ids import new_trace_id

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

# W3C Trace Context, level 1: version-traceid-parentid-flags; a later version may append to it.
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_UNTRACED: Final = (
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)


def exporting_provider(service_name: str) -> "TracerProvider":
    """Return a provider that sends spans to the OTLP endpoint the standard ``OTEL_*`` names describe."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def exporting_meters(service_name: str) -> "MeterProvider":
    """Return a provider that sends metrics to the OTLP endpoint the standard ``OTEL_*`` names describe."""
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create({SERVICE_NAME: service_name})
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)


def tracing_interceptor(provider: trace.TracerProvider) -> grpc.aio.ServerInterceptor:
    """Return the interceptor that gives every rpc a span; health checks and reflection get none."""
    from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters

    untraced = filters.any_of(*(filters.service_name(name) for name in _UNTRACED))
    make: Callable[..., grpc.aio.ServerInterceptor] = aio_server_interceptor  # the package has no type hints
    return make(tracer_provider=provider, filter_=filters.negate(untraced))


def trace_parent(metadata: Iterable[tuple[str, str | bytes]]) -> TraceParent:
    """Return the trace a call belongs to: its own span's, else the one its caller names, else a new one."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        return TraceParent(trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id))
    named = [value for key, value in metadata if key == "traceparent"]
    if len(named) == 1 and isinstance(named[0], str):
        parent = parse_traceparent(named[0])
        if parent is not None:
            return parent
    return TraceParent(new_trace_id())


def parse_traceparent(value: str) -> TraceParent | None:
    """Return what a W3C ``traceparent`` names; None when it is malformed, which the standard says to ignore."""
    match = _TRACEPARENT.fullmatch(value.strip())
    if match is None:
        return None
    version, trace_id, span_id, _, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceParent(trace_id, span_id)
