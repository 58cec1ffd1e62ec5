"""Start-up: the streams, and the refusal of servers that could lose what they have acknowledged.

Rules:
- Only what is missing is made, and nothing by a start that is refused. The settings of streams that are there are the
  operator's; they are checked.
- A stream of one replica, or servers that do not sync each write, can lose acknowledged messages when power or a
  machine is lost. They are refused, unless the operator accepts that. How servers sync can be seen at their
  monitoring addresses only, not by clients: unknown counts as lazy, unless the operator says ``sync=always``.
- A server in no cluster keeps one copy. Where loss is accepted and nobody has said how many there shall be, it will do.
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
REPLICAS: Final = 3
"""Copies that survive the loss of one machine."""
_RIGHT: Final = (
    "Use three servers with sync_interval: always (and say so: ?sync=always, or ?monitor=http://HOST:8222), or set"
    " DUALCLAW_ACCEPT_LOSS=1"
)
_EXISTS: Final = 10058
_MISSING: Final = 10059
_NO_CLUSTER: Final = 10074
_NO_JETSTREAM: Final = frozenset({10039, 10076})


class NotDurable(StoreError):
    """JetStream could lose acknowledged data."""


class _Alone(Exception):
    """The server is in no cluster."""


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
    main, timers = await _find(link, subjects.stream), await _find(link, subjects.timers_stream)
    asked = address.replicas or REPLICAS
    there = [config.num_replicas for config in (main, timers) if config is not None]
    # Before anything is made: what a refused start had made would be there, as it is, at the next one.
    await _check_durable(subjects.stream, min([asked, *there]), address, accept_loss=accept_loss)
    try:
        main = main or await _make(link, _main_config(subjects, address, asked))
        timers = timers or await _make(link, _timers_config(subjects, asked))
    except _Alone as error:
        if not accept_loss:
            raise NotDurable(f"{error}: acknowledged runs could be lost. {_RIGHT}") from None
        if address.replicas is not None:
            raise StoreError(f"{error}. Say ?replicas=1, or start it in a cluster") from None
        log.warning("accepted: %s; acknowledged runs could be lost", error)
        main = main or await _make(link, _main_config(subjects, address, 1))
        timers = timers or await _make(link, _timers_config(subjects, 1))
    _check_settings(subjects.stream, main)
    if not timers.allow_msg_schedules:
        raise StoreError(f"the stream {subjects.timers_stream} must have allow_msg_schedules")
    return min(main.num_replicas, timers.num_replicas)


async def _check_durable(name: str, replicas: int, address: Address, *, accept_loss: bool) -> None:
    """Refuse, or warn of, what could lose acknowledged data. Raises NotDurable."""
    faults = []
    if replicas < REPLICAS:
        faults.append(f"the stream {name} has {replicas} of the {REPLICAS} replicas that survive the loss of one")
    if fault := await _sync_fault(address):
        faults.append(fault)
    if faults:
        text = " and ".join(faults)
        if not accept_loss:
            raise NotDurable(f"{text}: acknowledged runs could be lost. {_RIGHT}")
        log.warning("accepted: %s; acknowledged runs could be lost", text)


def _main_config(subjects: Subjects, address: Address, replicas: int) -> dict[str, object]:
    return {
        "name": subjects.stream,
        "description": "dualclaw: runs and conversations",
        "subjects": [subjects.all],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "discard": "new",
        "max_bytes": address.max_bytes or -1,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_rollup_hdrs": True,
        "republish": {"src": subjects.live_source, "dest": subjects.live_target},
    }


def _timers_config(subjects: Subjects, replicas: int) -> dict[str, object]:
    return {
        "name": subjects.timers_stream,
        "description": "dualclaw: timers",
        "subjects": [subjects.timers, subjects.due],
        "retention": "workqueue",
        "storage": "file",
        "num_replicas": replicas,
        "allow_rollup_hdrs": True,
        "allow_msg_schedules": True,
    }


async def _find(link: Link, name: str) -> _Config | None:
    """Return a stream's settings; None when it is missing."""
    try:
        data = await link.call(f"STREAM.INFO.{name}", {})
    except ApiError as error:
        if error.code in _NO_JETSTREAM:
            raise StoreError("this NATS server, or account, has no JetStream") from error
        if error.code == _MISSING:
            return None
        raise StoreError(f"the stream {name} cannot be looked at: {error}") from error
    return msgspec.json.decode(data, type=_Info).config


async def _make(link: Link, config: Mapping[str, object]) -> _Config:
    """Make a stream, unless another process was faster; returns its settings. Raises _Alone."""
    name = config["name"]
    try:
        data = await link.call(f"STREAM.CREATE.{name}", config)
    except ApiError as refused:
        if refused.code == _NO_CLUSTER:
            raise _Alone(
                f"this NATS server stands alone and cannot keep {config['num_replicas']} replicas of {name}"
            ) from refused
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
