"""Stores that keep runs and conversations, and the choice of one by its address."""

from pathlib import Path

from dualclaw_server.engine.store import RunStore
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.stores.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "store_from_url"]


def store_from_url(url: str) -> RunStore:
    """Return the store an address names: ``memory:``, or ``sqlite:PATH`` (relative or absolute), not yet open.

    Raises:
        ValueError: it names no store; the text says which forms there are.
    """
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory" and not rest:
        return MemoryStore()
    if colon and scheme == "sqlite" and rest and "\0" not in rest:
        return SqliteStore(Path(rest).expanduser())
    if scheme == "nats":
        raise ValueError(f"{url!r}: the store nats:// comes with a later release; use memory: or sqlite:PATH")
    raise ValueError(f"{url!r} names no store: use memory: (gone with the process) or sqlite:PATH (one file)")
