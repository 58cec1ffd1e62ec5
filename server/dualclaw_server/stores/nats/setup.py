"""Start-up: the streams, and the refusal of servers that could lose what they have acknowledged.

Rules:
- Only what is missing is made. The settings of streams that are there are the operator's; they are checked.
- A stream of one replica, or servers that do not sync each write, can lose acknowledged messages when power or a
  machine is lost. They are refused, unless the operator accepts that. How servers sync can be seen at their
  monitoring addresses only, not by clients: unknown counts as lazy, unless the operator says ``sync=always``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Final

import msgspec
from nats.aio.client import Client

from dualclaw_server.engine.store import StoreError
from dualclaw_server.stores.nats.address import Address
from dualclaw_server.stores.nats.layout import Subjects
from dualclaw_server.stores.nats.link import ApiError, Link

log = logging.getLogger(__name__)

OLDEST: Final = (2, 12)
"""Oldest server: atomic batches and scheduled messages came with it."""
_EXISTS: Final = 10058
_MISSING: Final = 10059
_NO_JETSTREAM: Final = frozenset({10039, 10076})


class NotDurable(StoreError):
    """JetStream could lose acknowledged data."""


class _Config(msgspec.Struct):
    num_replicas: int = 1
    storage: str = "file"
    discard: str = "old"
    max_age: int = 0
    max_bytes: int = -1
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    allow_direct: bool = False
    allow_atomic: bool = False
    allow_rollup_hdrs: bool = False
    allow_msg_schedules: bool = False
    subjects: list[str] = []


class _Info(msgspec.Struct):
    config: _Config


def check_version(client: Client) -> None:
    """Refuse a server that is too old. Raises StoreError."""
    version = client.connected_server_version
    if (version.major, version.minor) < OLDEST:
        raise StoreError(
            f"this NATS server is {version.major}.{version.minor}.{version.patch}; atomic batches and scheduled"
            f" messages need {OLDEST[0]}.{OLDEST[1]} or newer"
        )


async def prepare(link: Link, address: Address, *, accept_loss: bool) -> int:
    """Make the streams ready; returns their replicas.

    Raises:
        NotDurable: they could lose acknowledged data and ``accept_loss`` is False.
        StoreError: they cannot be used; the text says why.
    """
    check_version(link.client)
    subjects = link.subjects
    main = await _ensure(link, subjects.stream, _main_config(subjects, address))
    timers = await _ensure(link, subjects.timers_stream, _timers_config(subjects, address))
    _check_settings(subjects.stream, main)
    if not timers.allow_msg_schedules:
        raise StoreError(f"the stream {subjects.timers_stream} must have allow_msg_schedules")
    replicas = min(main.num_replicas, timers.num_replicas)
    faults = []
    if replicas < 3:
        faults.append(f"the stream {subjects.stream} has {replicas} of the 3 replicas that survive the loss of one")
    if fault := await _sync_fault(address):
        faults.append(fault)
    if faults:
        text = " and ".join(faults)
        if not accept_loss:
            raise NotDurable(
                f"{text}: acknowledged runs could be lost. Use three servers with sync_interval: always (and say so:"
                " ?sync=always, or ?monitor=http://HOST:8222), or set DUALCLAW_ACCEPT_LOSS=1"
            )
        log.warning("accepted: %s; acknowledged runs could be lost", text)
    return replicas


def _main_config(subjects: Subjects, address: Address) -> dict[str, object]:
    return {
        "name": subjects.stream,
        "description": "dualclaw: runs and conversations",
        "subjects": [subjects.all],
        "retention": "limits",
        "storage": "file",
        "num_replicas": address.replicas,
        "discard": "new",
        "max_bytes": address.max_bytes or -1,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_rollup_hdrs": True,
        "republish": {"src": subjects.live_source, "dest": subjects.live_target},
    }


def _timers_config(subjects: Subjects, address: Address) -> dict[str, object]:
    return {
        "name": subjects.timers_stream,
        "description": "dualclaw: timers",
        "subjects": [subjects.timers, subjects.due],
        "retention": "workqueue",
        "storage": "file",
        "num_replicas": address.replicas,
        "allow_rollup_hdrs": True,
        "allow_msg_schedules": True,
    }


async def _ensure(link: Link, name: str, config: Mapping[str, object]) -> _Config:
    """Return a stream's settings; it is made when it is missing."""
    try:
        data = await link.call(f"STREAM.INFO.{name}", {})
    except ApiError as error:
        if error.code in _NO_JETSTREAM:
            raise StoreError("this NATS server, or account, has no JetStream") from error
        if error.code != _MISSING:
            raise StoreError(f"the stream {name} cannot be looked at: {error}") from error
        try:
            data = await link.call(f"STREAM.CREATE.{name}", config)
        except ApiError as refused:
            if refused.code != _EXISTS:
                raise StoreError(f"the stream {name} cannot be made: {refused}") from refused
            data = await link.call(f"STREAM.INFO.{name}", {})
    return msgspec.json.decode(data, type=_Info).config


def _check_settings(name: str, config: _Config) -> None:
    """Refuse a stream that would drop or forget what must stay."""
    right = {
        "discard: new": config.discard == "new",
        "allow_direct": config.allow_direct,
        "allow_atomic": config.allow_atomic,
        "allow_rollup_hdrs": config.allow_rollup_hdrs,
        "max_age 0": config.max_age == 0,
        "no max_msgs_per_subject": config.max_msgs_per_subject <= 0,
        "storage: file": config.storage == "file",
    }
    wrong = [setting for setting, holds in right.items() if not holds]
    if wrong:
        raise StoreError(f"the stream {name} is not as a store needs it; it must have {', '.join(wrong)}")


async def _sync_fault(address: Address) -> str:
    """Return what is wrong with the way the servers sync; empty when nothing is."""
    if address.sync == "always":
        return ""
    if not address.monitors:
        return "whether its servers sync each write is unknown"
    for monitor in address.monitors:
        try:
            lazy = not await asyncio.to_thread(_syncs_always, monitor)
        except (OSError, ValueError) as error:
            return f"{monitor} does not say how its server syncs ({error})"
        if lazy:
            return f"the server at {monitor} does not have sync_interval: always"
    return ""


def _syncs_always(monitor: str) -> bool:
    """Ask a server's monitoring address; blocks."""
    try:
        with urllib.request.urlopen(f"{monitor}/jsz?config=1", timeout=5) as reply:  # noqa: S310 - http by the parser
            answer = json.load(reply)
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from error
    config = answer.get("config") if isinstance(answer, dict) else None
    return isinstance(config, dict) and config.get("sync_always") is True
