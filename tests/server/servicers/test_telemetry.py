import pytest

from dualclaw_server.engine.caller import TraceParent
from dualclaw_server.servicers.telemetry import parse_traceparent, trace_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("value", [f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"01-{TRACE}-{SPAN}-01-later"])
def test_a_w3c_traceparent_is_followed(value: str) -> None:
    """Trace and span come from the header, sampled or not, of this and later versions of the standard."""
    assert parse_traceparent(value) == TraceParent(TRACE, SPAN)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "junk",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_a_malformed_traceparent_is_ignored(value: str) -> None:
    """The standard says to start a new trace instead; the new one is valid and never all zero."""
    assert parse_traceparent(value) is None
    made = trace_parent([("traceparent", value)])
    assert len(made.trace_id) == 32
    assert int(made.trace_id, 16) != 0
    assert made.span_id == ""


def test_calls_without_a_trace_get_different_ones() -> None:
    """Two calls that name no trace do not end up in the same one."""
    assert trace_parent([]) != trace_parent([])
