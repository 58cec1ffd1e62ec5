"""Wires a relay from settings: state file, engine, gate, the service before the engine, and the connectors.

ListenError   a connector cannot listen at its address
"""

import contextlib
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from dualclaw_clients.im.connector import Connector
from dualclaw_clients.im.gate import Gate
from dualclaw_clients.im.relay import Relay, RelayLimits
from dualclaw_clients.im.settings import RelaySettings
from dualclaw_clients.im.state import RelayState
from dualclaw_clients.im.texts import ZH, Texts
from dualclaw_clients.settings import ImSettings

if TYPE_CHECKING:
    from dualclaw_clients.im.legacy import LegacyClient


class ListenError(Exception):
    """A connector cannot listen at its address."""


@contextlib.asynccontextmanager
async def open_connectors(
    settings: RelaySettings, console: Callable[[], Connector]
) -> AsyncGenerator[list[Connector], None]:
    """Open the connectors that settings name, and say where they listen.

    Args:
        settings: checked by ``check_service``.
        console: makes the console connector, if it is named.

    Raises:
        ListenError: an address cannot be listened at.
    """
    async with contextlib.AsyncExitStack() as stack:
        connectors: list[Connector] = []
        if "console" in settings.im_connectors:
            connectors.append(console())
        if "webhook" in settings.im_connectors:
            connectors.append(await _open_webhook(settings, stack))
        yield connectors


async def _open_webhook(settings: RelaySettings, stack: contextlib.AsyncExitStack) -> Connector:
    # Here, because the console needs neither server nor HTTP client, and both are slow to import.
    from dualclaw_clients.im.webhook import WebhookConnector  # noqa: PLC0415
    from dualclaw_clients.im.webhook_reply import ReplySender, check_reply_url  # noqa: PLC0415

    host, _, port = settings.im_webhook_listen.rpartition(":")
    host = host.strip("[]")
    try:
        listening = socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        place = f"{settings.im_webhook_listen} (DUALCLAW_IM_WEBHOOK_LISTEN)"
        raise ListenError(f"cannot listen on {place}: {error.strerror or error}") from None
    stack.callback(listening.close)
    secrets = settings.webhook_secrets()
    url = check_reply_url(settings.im_webhook_reply_url, settings.im_webhook_reply_hosts)
    replies = ReplySender(url, secrets)
    stack.push_async_callback(replies.close)
    connector = WebhookConnector(
        [listening],
        replies,
        bot=settings.im_webhook_name,
        secrets=secrets,
        tenant=settings.im_webhook_tenant,
        approvers=settings.im_webhook_approvers,
        limit=settings.im_webhook_limit,
        max_body=settings.im_webhook_max_body,
        window=settings.im_webhook_window,
    )
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/webhook/{settings.im_webhook_name}"
    out = sys.stderr if "console" in settings.im_connectors else sys.stdout  # which is the console's then
    out.write(f"dualclaw-im listening on {address}\n")
    out.flush()
    return connector


@contextlib.asynccontextmanager
async def open_relay(
    settings: ImSettings,
    connectors: Sequence[Connector],
    *,
    state: str,
    engine: str = "",
    agent: str = "",
    limits: RelayLimits | None = None,
    texts: Texts = ZH,
) -> AsyncGenerator[Relay, None]:
    """Open a relay and everything it needs; what a relay before it left unanswered is taken up at once.

    Args:
        settings: the engine's address and key, and the gate.
        connectors: the platforms to carry.
        state: path of the state file, or ":memory:".
        engine: address of the engine; empty: that of the settings.
        agent: name of the agent to ask; empty: the engine's default.
        limits: what bounds the relay.
        texts: the language of the relay's own words.

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
        relay = Relay(memory, client, connectors, gate=gate, legacy=legacy, agent=agent, limits=limits, texts=texts)
        yield await stack.enter_async_context(relay)


def _legacy_client(url: str) -> "LegacyClient":
    # Here, because httpx is slow to import and most starts, the console's among them, do not need it.
    from dualclaw_clients.im.legacy import LegacyClient  # noqa: PLC0415

    return LegacyClient(url)
