"""Looks at what an engine is made of before it starts, or while something is wrong.

Each look returns a finding: what was looked at, how it is, and what to do if it is not well. Looking does what a start
would do and nothing more: a store is opened (a missing file is made, an older one brought up to date) and closed, a
model is asked one word.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dualclaw import ContentPart, Message, Role
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.model import ChatModel, ModelOptions, ModelRequest
from dualclaw_server.engine.store import Full, RunStore, StoreError

Level = Literal["ok", "warn", "fail"]

STORE_TIMEOUT = 60.0
"""Seconds a store may take to open; an older file is brought up to date in it."""
MODEL_TIMEOUT = 60.0
"""Seconds a model may take for one word."""
LITTLE_ROOM = 1 << 30
"""Bytes of free disk below which a warning is given."""
_NO_ROOM = 16 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    text: str
    hint: str = ""
    """What to do about it; empty when all is well."""


async def of_store(store: RunStore, name: str) -> Finding:
    """Open a store and close it again."""
    try:
        async with asyncio.timeout(STORE_TIMEOUT):
            await store.open()
            await store.close()
    except TimeoutError:
        hint = "Look at the disk or the network under it; another process may hold its lock."
        return Finding("fail", "store", f"{name} did not open within {STORE_TIMEOUT:g} s", hint)
    except Full:
        return Finding("fail", "store", f"{name} has no room", "Make room, then start again; nothing is lost.")
    except (StoreError, OSError) as error:
        hint = "See `When something is wrong` in docs/operations.md; DUALCLAW_STORE names the store."
        return Finding("fail", "store", f"{name} cannot be opened: {error or type(error).__name__}", hint)
    return Finding("ok", "store", f"{name} can be opened")


def of_disk(file: str) -> Finding:
    """Look at the room where a store's file is, or will be."""
    try:
        place = Path(file).expanduser().absolute()
        folder = next(each for each in place.parents if each.exists())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        hint = "Correct DUALCLAW_STORE, or the rights of its folder."
        return Finding("fail", "disk", f"{file} cannot be looked at: {error.strerror}", hint)
    text = f"{free / (1 << 20):,.0f} MiB free"
    if free >= LITTLE_ROOM:
        return Finding("ok", "disk", text)
    level: Level = "warn" if free >= _NO_ROOM else "fail"
    return Finding(level, "disk", text, "Make room, or lower DUALCLAW_RETENTION; a full disk stops every run.")


async def of_model(model: ChatModel) -> Finding:
    """Ask a model for one word."""
    message = Message(id="m", role=Role.ROLE_USER, parts=[ContentPart(text="Say OK.")])
    request = ModelRequest(messages=[message], options=ModelOptions(max_output_tokens=16))
    try:
        async with asyncio.timeout(MODEL_TIMEOUT):
            await model.generate(request)
    except TimeoutError:
        hint = "Look at the endpoint and the network; DUALCLAW_MODEL_BASE_URL names the endpoint."
        return Finding("fail", "model", f"{model.name} did not answer within {MODEL_TIMEOUT:g} s", hint)
    except EngineError as error:
        hint = error.hint or "Check DUALCLAW_MODEL, its key and its address."
        return Finding("fail", "model", f"{model.name}: {error.message} ({error.reason})", hint)
    return Finding("ok", "model", f"{model.name} answers")


def of_certificate(cert: Path, key: Path | None) -> Finding:
    """Try a server's certificate and key together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        hint = "DUALCLAW_TLS_CERT must be a PEM chain, DUALCLAW_TLS_KEY the PEM key of its first certificate."
        return Finding("fail", "tls", f"certificate and key cannot be used together: {error}", hint)
    return Finding("ok", "tls", "certificate and key fit each other")


def of_agents(agents: Sequence[Agent]) -> Finding:
    """Say which agents there are, the default first."""
    names = ", ".join(f"{agent.name} ({len(agent.tools)} tools)" for agent in agents)
    return Finding("ok", "agents", names)
