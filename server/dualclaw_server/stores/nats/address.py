"""The address of a NATS store, and the connections it opens.

    nats://[LOGIN@]HOST[:PORT][,HOST[:PORT]...][/NAME][?SETTING=VALUE&...]

LOGIN is USER:PASSWORD or a token. ``tls://`` asks for TLS. NAME is the stream, ``DUALCLAW`` by default. Settings:

    replicas=3        copies of the stream when it is made; what is there already is never changed. Not said, it is 1
                      where a server stands alone and DUALCLAW_ACCEPT_LOSS=1
    max_bytes=0       size of the stream at which new messages are refused; 0: the account's limit
    max_running=1000  runs in hand at once in the whole cluster, for each pool
    lease=30          seconds a run stays with a process that shows no sign of life
    patience=30       seconds an election or a lost connection may take
    sync=always       the operator's word that every server has sync_interval: always
    monitor=URL       monitoring address of a server, to ask it for that; may be repeated
    creds=PATH        file with the user's JWT and key; may also stand in the environment, see settings
    ca=PATH cert=PATH key=PATH      for TLS
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import nats.errors
from nats.aio.client import Client

from dualclaw_server.engine.store import Unavailable
from dualclaw_server.stores.records import LEASE

log = logging.getLogger(__name__)

_FORM = "nats://[LOGIN@]HOST[:PORT][,HOST...][/NAME][?replicas=3&...]"
_CONNECT_TIMEOUT = 5
_RECONNECT_WAIT = 1
_PING = 5
"""Seconds after which a server that says nothing is asked; after two of these it counts as gone."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the servers are and how the store is to be."""

    servers: tuple[str, ...]
    name: str = "DUALCLAW"
    replicas: int | None = None
    """None: 3, or 1 where a server stands alone and loss is accepted."""
    max_bytes: int = 0
    max_running: int = 1000
    lease: float | None = None
    """None: what the store is told."""
    patience: float = 30.0
    sync: str = ""
    monitors: tuple[str, ...] = ()
    creds: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    tls: bool = False

    async def connect(self, label: str) -> Client:
        """Return a new connection, on the running event loop. Raises Unavailable.

        It reconnects by itself for as long as it is not closed, and buffers nothing meanwhile.
        """
        client = Client()
        try:
            # Without a bound it would try for ever: it never gives up, not even the first time.
            async with asyncio.timeout(self.patience):
                await client.connect(
                    list(self.servers),
                    name=f"dualclaw {label}",
                    connect_timeout=_CONNECT_TIMEOUT,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT,
                    ping_interval=_PING,
                    max_outstanding_pings=2,
                    pending_size=0,
                    error_cb=_log,
                    user_credentials=str(self.creds) if self.creds else None,
                    tls=self._context(),
                )
        except BaseException as error:
            await client.close()
            if isinstance(error, nats.errors.Error | OSError | TimeoutError):
                raise Unavailable(
                    f"no NATS server of {self.shown} answers: {str(error) or type(error).__name__}"
                ) from error
            raise
        return client

    @property
    def shown(self) -> str:
        """The servers without what may be a secret."""
        return ", ".join(server.rpartition("@")[2].rpartition("//")[2] for server in self.servers)

    def _context(self) -> ssl.SSLContext | None:
        if not (self.tls or self.ca or self.cert):
            return None
        context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        if self.cert:
            context.load_cert_chain(str(self.cert), str(self.key) if self.key else None)
        return context


async def _log(error: Exception) -> None:
    """Tell what no call is told: missing permissions, above all. A server that is away is told by the calls."""
    level = logging.WARNING if isinstance(error, nats.errors.Error) else logging.DEBUG
    log.log(level, "NATS: %s", str(error) or type(error).__name__)


def parse_address(url: str) -> Address:
    """Return the address a URL names.

    Raises:
        ValueError: it is none; the text says what is wrong, without the password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("nats", "tls") or not parts.netloc:
        raise ValueError(f"a NATS store is named by {_FORM}")
    servers = _servers(parts.scheme, parts.netloc)
    name = unquote(parts.path.strip("/")) or "DUALCLAW"
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii() or len(name) > 100:
        raise ValueError(f"the stream's name {name!r} may have letters, digits, - and _ only")
    values: dict[str, str] = {}
    monitors = []
    for setting, value in parse_qsl(parts.query, keep_blank_values=True):
        if setting == "monitor":
            monitors.append(_monitor(value))
        elif setting in values:
            raise ValueError(f"the setting {setting} is there twice")
        else:
            values[setting] = value
    paths = {one: Path(values.pop(one)).expanduser() for one in ("creds", "ca", "cert", "key") if one in values}
    sync = values.pop("sync", "")
    if sync not in ("", "always"):
        raise ValueError(f"sync={sync}: the only word a store can take for it is always")
    address = Address(
        servers,
        name,
        replicas=_number(values, "replicas", 3, (1, 3, 5)) if "replicas" in values else None,
        max_bytes=_number(values, "max_bytes", 0),
        max_running=_number(values, "max_running", 1000),
        lease=_seconds(values, "lease", LEASE, least=1.0) if "lease" in values else None,
        patience=_seconds(values, "patience", 30.0, least=1.0),
        sync=sync,
        monitors=tuple(monitors),
        creds=paths.get("creds"),
        ca=paths.get("ca"),
        cert=paths.get("cert"),
        key=paths.get("key"),
        tls=parts.scheme == "tls",
    )
    if values:
        raise ValueError(f"a NATS store has no setting {', '.join(sorted(values))}")
    return address


def _servers(scheme: str, netloc: str) -> tuple[str, ...]:
    """Return the server addresses; a name and password at the first one count for all."""
    login, at, hosts = netloc.rpartition("@")
    servers = []
    for host in hosts.split(","):
        try:
            port = urlsplit(f"//{host}").port
        except ValueError:
            raise ValueError(f"{host!r} is no HOST or HOST:PORT") from None
        if not urlsplit(f"//{host}").hostname:
            raise ValueError(f"{host!r} is no HOST or HOST:PORT")
        servers.append(f"{scheme}://{login}{at}{host}{'' if port else ':4222'}")
    return tuple(servers)


def _monitor(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"monitor={url}: a monitoring address is http://HOST:8222")
    return url.rstrip("/")


def _number(values: dict[str, str], name: str, default: int, allowed: tuple[int, ...] = ()) -> int:
    text = values.pop(name, str(default))
    if not (text.isascii() and text.isdigit()) or (allowed and int(text) not in allowed):
        right = f"one of {', '.join(map(str, allowed))}" if allowed else "a whole number"
        raise ValueError(f"{name}={text}: it must be {right}")
    return int(text)


def _seconds(values: dict[str, str], name: str, default: float, *, least: float) -> float:
    text = values.pop(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 86_400:
        raise ValueError(f"{name}={text}: it must be seconds, {least:g} at least")
    return seconds
