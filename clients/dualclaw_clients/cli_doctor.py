"""What is configured, what can be reached and what is missing, from where this client stands.

- Each finding says what was looked at, how it is, and what to do if it is not well. Nothing is changed anywhere.
- One look builds on the one before: where nothing listens, nobody is asked for a role.
- A key is never shown, and no part of one.
"""

import asyncio
import os
import platform
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dualclaw import ListAgentsRequest, ListConversationsRequest, ListRunsRequest
from dualclaw.errors import EngineError
from dualclaw_clients.cli_render import Terminal, safe_json, safe_line
from dualclaw_clients.command_line import installed_version
from dualclaw_clients.engine_client import EngineClient, EngineUnreachable, NotServed
from dualclaw_clients.settings import ClientSettings

Level = Literal["ok", "warn", "fail"]
_STYLES = {"ok": "", "warn": "yellow", "fail": "red"}
CONNECT_TIMEOUT = 5.0
"""Seconds for a connection to stand."""
SLOW = 1.0
"""Seconds beyond which an answer is called slow."""
_NO_RUN = "doctor-asks-for-no-run"
"""Id no run has: what the engine says of it tells the caller's role, and nothing else happens."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    text: str
    hint: str = ""
    """What to do about it; empty when all is well."""


class Report:
    """Shows findings as they come; ``failed`` tells whether one is in the way."""

    def __init__(self, terminal: Terminal, *, as_json: bool) -> None:
        self._terminal = terminal
        self._json = as_json
        self.failed = False

    def add(self, finding: Finding) -> None:
        """Show a finding."""
        self.failed = self.failed or finding.level == "fail"
        if self._json:
            shown = {"level": finding.level, "what": finding.what, "text": finding.text, "hint": finding.hint}
            self._terminal.print(safe_json(shown))
            return
        self._terminal.print(f"{finding.level.upper():5} {finding.what:14} {safe_line(finding.text)}")
        if finding.hint:
            self._terminal.print(f"{'':20} -> {safe_line(finding.hint)}")


def of_installation(warnings: Sequence[str]) -> list[Finding]:
    """Return what can be said before any setting is right."""
    version = f"dualclaw {installed_version()}, Python {platform.python_version()}, {platform.system()}"
    return [
        Finding("ok", "client", version),
        *(Finding("warn", "settings", text, "Correct the name, or remove the variable.") for text in warnings),
    ]


def of_settings(problems: Sequence[str]) -> list[Finding]:
    """Return settings that cannot be used."""
    return [
        Finding("fail", "settings", problem, "Correct it; `dualclaw --help` lists the names.") for problem in problems
    ]


async def examine(client: EngineClient, settings: ClientSettings) -> AsyncGenerator[Finding, None]:
    """Yield what is found on the way to the engine and in it, the nearest first."""
    has_key = bool(settings.api_key.get_secret_value())
    encrypted = _is_encrypted(settings)
    context: ssl.SSLContext | None = None
    if encrypted:
        try:
            context = _tls_context(settings)
        except (OSError, ValueError) as error:
            hint = "DUALCLAW_ENGINE_CA_FILE, _CERT_FILE and _KEY_FILE must be PEM, certificate and key a pair."
            yield Finding("fail", "tls", f"the certificates cannot be used: {error}", hint)
            return
    yield Finding("ok", "engine", f"{client.target}, {'by TLS' if encrypted else 'without TLS'}")
    yield _key(client.target, has_key=has_key, encrypted=encrypted)
    if (trouble := await _network(client.target, context)) is not None:
        yield trouble
        return
    async with aclosing(_answers(client, has_key=has_key, encrypted=encrypted)) as findings:
        async for finding in findings:
            yield finding


async def _answers(client: EngineClient, *, has_key: bool, encrypted: bool) -> AsyncGenerator[Finding, None]:
    begun = time.monotonic()
    try:
        await client.list_runs(ListRunsRequest(page_size=1))
    except EngineUnreachable as error:
        other = "without TLS: unset DUALCLAW_ENGINE_TLS" if encrypted else "by TLS: set DUALCLAW_ENGINE_TLS=1"
        detail = error.metadata.get("detail", error.message)
        hint = f"Something listens there. If it is an engine, it may want to be spoken to {other}, or it is overloaded."
        yield Finding("fail", "connection", detail, hint)
        return
    except EngineError as error:
        yield _refusal(error, has_key=has_key)
        return
    took = time.monotonic() - begun
    slow = took > SLOW
    hint = "Look at the load of the engine and of its store." if slow else ""
    yield Finding("warn" if slow else "ok", "connection", f"it answers, in {took * 1000:.0f} ms", hint)
    if await client.check():
        yield Finding("ok", "health", "it takes calls")
    else:
        hint = "It starts or drains; new runs are refused until it says it serves. Its log has the reason."
        yield Finding("fail", "health", "it does not call itself healthy", hint)
    yield await _role(client)
    yield await _agents(client)
    yield await _conversations(client)


def _key(target: str, *, has_key: bool, encrypted: bool) -> Finding:
    if not has_key:
        return Finding("ok", "key", "none is sent; fine with an engine that has no keys file")
    if not encrypted and not _is_here(target):
        hint = "Set DUALCLAW_ENGINE_TLS=1, or DUALCLAW_ENGINE_CA_FILE for an authority of your own."
        return Finding("warn", "key", "it is sent without encryption to another machine", hint)
    return Finding("ok", "key", "one is sent")


async def _network(target: str, context: ssl.SSLContext | None) -> Finding | None:
    """Return what keeps a connection from standing; None: nothing, or only gRPC knows the way to such an address."""
    host, _, port = target.rpartition(":")
    if not port.isdigit() or target.startswith(("unix", "dns:", "ipv4:", "ipv6:", "xds:")):
        return None
    host = host.strip("[]")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, writer = await asyncio.open_connection(
                host, int(port), ssl=context, server_hostname=host if context else None
            )
    except TimeoutError:
        hint = "A firewall, or a machine that is off; check DUALCLAW_ENGINE."
        return Finding("fail", "connection", f"{target} does not answer within {CONNECT_TIMEOUT:g} s", hint)
    except socket.gaierror as error:
        return Finding("fail", "connection", f"{host}: {error.strerror}", "Check the name in DUALCLAW_ENGINE.")
    except ssl.SSLCertVerificationError as error:
        hint = "Trust the authority that signed it by DUALCLAW_ENGINE_CA_FILE, or use the name it was made for."
        return Finding("fail", "tls", f"the engine's certificate is not accepted: {error.verify_message}", hint)
    except ssl.SSLError as error:
        hint = "The engine may not speak TLS there (unset DUALCLAW_ENGINE_TLS), or want a certificate of this client."
        return Finding("fail", "tls", f"no encrypted connection: {error.reason or error}", hint)
    except OSError as error:
        hint = "Start it with `dualclaw-server`, or set DUALCLAW_ENGINE to where it is."
        why = f": {os.strerror(error.errno)}" if error.errno else ""
        return Finding("fail", "connection", f"nothing answers at {target}{why}", hint)
    writer.close()
    try:
        async with asyncio.timeout(1):
            await writer.wait_closed()
    except (OSError, TimeoutError):  # what became of a connection that was only a trial does not matter
        pass
    return None


def _refusal(error: EngineError, *, has_key: bool) -> Finding:
    hint = error.hint
    if error.reason == "UNAUTHENTICATED":
        hint = (
            "The engine's keys file has no such key; set DUALCLAW_API_KEY to one it has."
            if has_key
            else "Set DUALCLAW_API_KEY; whoever runs the engine gives you a key."
        )
    if error.metadata.get("grpc_code") == "UNIMPLEMENTED":
        hint = (
            "Check the address. A process with DUALCLAW_ROLE=worker answers health only; ask one with role api or all."
        )
    what = "access" if error.reason in ("UNAUTHENTICATED", "PERMISSION_DENIED") else "engine"
    return Finding("fail", what, f"{error.message} ({error.reason})", hint)


async def _role(client: EngineClient) -> Finding:
    try:
        await client.inspect_run(_NO_RUN)
    except NotServed:
        hint = "It is older than this client; `dualclaw run` needs a newer one."
        return Finding("warn", "role", "the engine has no service for operators", hint)
    except EngineError as error:
        if error.reason == "UNKNOWN_RUN":
            return Finding("ok", "role", "user and operator")
        if error.reason == "PERMISSION_DENIED":
            return Finding("ok", "role", "user; `dualclaw run` and `dualclaw interceptor` need an operator's key")
        return Finding("warn", "role", f"{error.message} ({error.reason})", error.hint)
    return Finding("warn", "role", f"the engine shows a run {_NO_RUN!r} that nobody made", "Is it a dualclaw engine?")


async def _agents(client: EngineClient) -> Finding:
    try:
        found = (await client.list_agents(ListAgentsRequest(page_size=500))).agents
    except EngineError as error:
        return _skew("agents", error)
    if not found:
        return Finding("fail", "agents", "there is none", "Set DUALCLAW_AGENTS where the engine runs.")
    return Finding("ok", "agents", f"{found[0].name} by default" + "".join(f", {agent.name}" for agent in found[1:]))


async def _conversations(client: EngineClient) -> Finding:
    try:
        await client.list_conversations(ListConversationsRequest(page_size=1))
    except EngineError as error:
        return _skew("conversations", error)
    return Finding("ok", "conversations", "they can be read")


def _skew(what: str, error: EngineError) -> Finding:
    if error.metadata.get("grpc_code") == "UNIMPLEMENTED":
        hint = "Engine and client are of different versions; bring the older one up to date."
        return Finding("warn", what, "the engine does not serve them", hint)
    return Finding("fail", what, f"{error.message} ({error.reason})", error.hint)


def _is_encrypted(settings: ClientSettings) -> bool:
    files = (settings.engine_ca_file, settings.engine_cert_file)
    return settings.engine_tls or any(file is not None for file in files)


def _tls_context(settings: ClientSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=_path(settings.engine_ca_file))
    context.set_alpn_protocols(["h2"])
    if settings.engine_cert_file is not None:
        context.load_cert_chain(settings.engine_cert_file, settings.engine_key_file)
    return context


def _path(file: Path | None) -> str | None:
    return None if file is None else str(file)


def _is_here(target: str) -> bool:
    return target.startswith("unix") or target.rpartition(":")[0] in {"127.0.0.1", "localhost", "[::1]"}
