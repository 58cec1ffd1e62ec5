"""A server of the sweep: the product's own wiring, with failpoints around the store, the model and the agents.

It reads the product's settings and names of its own: ``FAILPOINT``, ``FAILPOINT_TRACE`` and ``FAILPOINT_FREEZE`` (see
``failpoints``), ``CHAOS_GATE`` (a file without which it claims nothing), ``CHAOS_DELAY`` (seconds by which appends are
late) and ``CHAOS_PACE`` (see ``make_agents``).
"""

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import uvloop

from dualclaw_server.app import make_parts, serve
from dualclaw_server.engine.store import RunStore
from dualclaw_server.servicers.logs import Redactor, start_logging
from dualclaw_server.settings import read_settings
from dualclaw_server.stores import store_from_url

from .failing_parts import FailpointModel, make_agents
from .failing_store import FailpointStore
from .failpoints import Failpoint
from .ledger import Ledger


def main(environ: Mapping[str, str], announce: Callable[[str], None]) -> None:
    """Serve from the folder that is the working directory until SIGTERM, or until the failpoint is reached."""
    settings, _ = read_settings(environ)
    scheme, _, file = settings.store.partition(":")
    failpoint = Failpoint(
        environ.get("FAILPOINT", ""),
        Path("fired"),
        trace="FAILPOINT_TRACE" in environ,
        freeze="FAILPOINT_FREEZE" in environ,
        file=Path(file) if scheme == "sqlite" else None,
    )
    redactor = Redactor()
    start_logging(sys.stderr, redactor)
    parts = make_parts(settings)
    gate = environ.get("CHAOS_GATE")
    # One NATS server will do here: it is killed no less than three would be.
    real = store_from_url(settings.store, lease=settings.lease, accept_loss=True)
    delay = float(environ.get("CHAOS_DELAY", "0"))
    store = FailpointStore(real, failpoint, Path(gate) if gate else None, delay)
    agents = make_agents(failpoint, Ledger(Path("effects")), pace=float(environ.get("CHAOS_PACE", "0")))
    parts = dataclasses.replace(
        parts, store=cast("RunStore", store), model=FailpointModel(parts.model, failpoint), agents=agents
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, parts, redactor, announce))
