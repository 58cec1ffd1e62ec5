"""Runs in NATS JetStream: the store for more than one machine. Needs the extra ``nats``."""

from dualclaw_server.stores.nats.address import Address, parse_address
from dualclaw_server.stores.nats.setup import NotDurable
from dualclaw_server.stores.nats.store import NatsStore

__all__ = ["Address", "NatsStore", "NotDurable", "parse_address"]
