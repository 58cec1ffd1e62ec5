"""Wires a relay from settings: state file, engine, gate and the service before the engine."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from dualclaw_clients.im.connector import Connector
from dualclaw_clients.im.gate import Gate
from dualclaw_clients.im.relay import Relay, RelayLimits
from dualclaw_clients.im.state import RelayState
from dualclaw_clients.settings import ImSettings

if TYPE_CHECKING:
    from dualclaw_clients.im.legacy import LegacyClient


@contextlib.asynccontextmanager
async def open_relay(
    settings: ImSettings,
    connectors: Sequence[Connector],
    *,
    state: str,
    engine: str = "",
    agent: str = "",
    limits: RelayLimits | None = None,
) -> AsyncGenerator[Relay, None]:
    """Open a relay and everything it needs; what a relay before it left unanswered is taken up at once.

    Args:
        settings: the engine's address and key, and the gate.
        connectors: the platforms to carry.
        state: path of the state file, or ":memory:".
        engine: address of the engine; empty: that of the settings.
        agent: name of the agent to ask; empty: the engine's default.
        limits: what bounds the relay.

    Raises:
        GateError: somebody's messages would be answered by nobody.
        SettingsError: a certificate cannot be read.
        StateError: the state file cannot be used.
    """
    gate = Gate.parse(settings.use_engine_core)
    legacy: LegacyClient | None = None
    async with contextlib.AsyncExitStack() as stack:
        if any(connector.gated for connector in connectors):
            gate.require_legacy(settings.legacy_url)
            if settings.legacy_url:
                legacy = await stack.enter_async_context(_legacy_client(settings.legacy_url))
        client = await stack.enter_async_context(settings.connect(engine))
        memory = await stack.enter_async_context(await RelayState.open(state))
        relay = Relay(memory, client, connectors, gate=gate, legacy=legacy, agent=agent, limits=limits)
        yield await stack.enter_async_context(relay)


def _legacy_client(url: str) -> "LegacyClient":
    # Here, because httpx is slow to import and most starts, the console's among them, do not need it.
    from dualclaw_clients.im.legacy import LegacyClient  # noqa: PLC0415

    return LegacyClient(url)
