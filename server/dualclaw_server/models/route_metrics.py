"""Counts what routers do, by OpenTelemetry: ``aiflow_llm_route_total`` with labels model, outcome and reason.

Only the metrics API is used: without an SDK in the process counting costs a call that does nothing.
"""

from typing import Literal

from opentelemetry.metrics import Meter, get_meter

from dualclaw.errors import Reason
from dualclaw_server.models.router import Outcome

COUNTER = "aiflow_llm_route_total"


class RouteMetrics:
    """A ``RouteObserver`` that counts attempts.

    Args:
        meter: where the counter lives; None: that of the process's meter provider.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._counter = (meter or get_meter("dualclaw_server")).create_counter(
            COUNTER, unit="1", description="Attempts at models, by how they ended and why."
        )

    def __call__(self, model: str, outcome: Outcome, reason: Reason | Literal[""]) -> None:
        """Count an attempt; ``reason`` is empty when it was ok."""
        self._counter.add(1, {"model": model, "outcome": outcome, "reason": reason})
