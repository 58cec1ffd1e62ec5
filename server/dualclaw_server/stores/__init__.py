"""Stores that keep runs and conversations, and the choice of one by its address."""

from pathlib import Path

from dualclaw_server.engine.store import RunStore
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.stores.records import LEASE
from dualclaw_server.stores.sqlite import SqliteStore
from dualclaw_server.stores.sqlite_leases import MAX_STALL

__all__ = ["MemoryStore", "SqliteStore", "store_from_url"]


def store_from_url(
    url: str, *, lease: float = LEASE, max_stall: float = MAX_STALL, accept_loss: bool = False
) -> RunStore:
    """Return the store an address names: ``memory:``, ``sqlite:PATH`` (relative or absolute), or ``nats://HOST,...``
    (see ``stores.nats.address``), not yet open.

    Args:
        url: the address.
        lease: seconds a run stays with a process that shows no sign of life.
        max_stall: seconds without a tick of the event loop after which a process gives up its runs: more than the
            longest time a tool may block it.
        accept_loss: whether NATS servers that could lose acknowledged data will do.

    Raises:
        ValueError: it names no store; the text says which forms there are.
    """
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory" and not rest:
        return MemoryStore()
    if colon and scheme == "sqlite" and rest and "\0" not in rest:
        return SqliteStore(Path(rest).expanduser(), lease=lease, max_stall=max_stall)
    if scheme in ("nats", "tls"):
        # Not above: the package it needs is an extra.
        try:
            from dualclaw_server.stores.nats import NatsStore, parse_address  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ValueError(f"a NATS store needs the package of {error.name}: install dualclaw[nats]") from error
        return NatsStore(parse_address(url), accept_loss=accept_loss, lease=lease, max_stall=max_stall)
    raise ValueError(
        f"{url!r} names no store: use memory: (gone with the process), sqlite:PATH (one file) or nats://HOST (servers)"
    )
