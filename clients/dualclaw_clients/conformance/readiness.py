"""Whether a server can be checked at all, found out before the first scene.

What cannot be checked is no failure of a check: a person has to start, name or offer something first, and is told
what. A server that has just been started gets some seconds to listen.
"""

import asyncio
import ssl
import time
from typing import Final

from dualclaw import ContentPart, Message, Role, RunRequest
from dualclaw_clients.conformance.check import Target
from dualclaw_clients.conformance.engine_probe import EngineProbe
from dualclaw_clients.conformance.greeting import Answer, greet
from dualclaw_clients.conformance.http_probe import HttpProbe
from dualclaw_clients.conformance.plays import PLAYS
from dualclaw_clients.conformance.seen import HttpExchange
from dualclaw_clients.conformance.web_seen import parse

PATIENCE: Final = 10.0
"""Seconds a server has to begin to listen; fewer if a call may take fewer."""
AT_ONCE: Final = 2.0
"""Seconds a server that runs already needs at most, before it is asked what is wrong."""
_NEXT_TRY: Final = 0.25


class Uncheckable(Exception):
    """The server cannot be checked, and what to do about it."""


async def engine_is_ready(probe: EngineProbe, agent: str, context: ssl.SSLContext | None) -> None:
    """Raise Uncheckable if nothing can be found out about an engine. ``context``: of TLS, as the probe's own."""
    patience = min(PATIENCE, probe.timeout)
    if context is not None and (answer := await _greeted(probe.target, context)).tls_fails:
        raise Uncheckable(f"no engine answers at {probe.target}: {answer.text}")  # gRPC would fill stderr meanwhile
    if not await probe.is_there(min(AT_ONCE, patience / 2)):
        answer = await _greeted(probe.target, context)
        if answer.lasting or not await probe.is_there(patience):
            raise Uncheckable(f"no engine answers at {probe.target}: {answer.text}")
    hello = Message(role=Role.ROLE_USER, parts=[ContentPart(text="conformance: text")])
    seen = await probe.stream(RunRequest(agent=agent, message=hello))
    if seen.late and not seen.events:
        raise Uncheckable(
            f"the server at {probe.target} takes a call, and no event came within {probe.timeout:g} s (--timeout)"
        )
    status = seen.status
    if seen.events or status is None or status.code == "OK":
        return
    match status.reason or status.code:
        case "UNKNOWN_AGENT":
            raise Uncheckable(_offer(agent))
        case "UNAUTHENTICATED" | "PERMISSION_DENIED":
            raise Uncheckable(f"the server refuses the key: {status.text[:200]} (--key KEY or --key @FILE)")
        case "UNIMPLEMENTED":
            raise Uncheckable(f"what answers at {probe.target} does not serve dualclaw.v1.EngineService")
        case "UNAVAILABLE" | "STORE_UNAVAILABLE":
            raise Uncheckable(f"the server at {probe.target} takes no calls: {status.text[:200]}")
        case _:
            return  # something is wrong with it, which the checks will say


async def _greeted(target: str, context: ssl.SSLContext | None) -> Answer:
    host, _, port = target.rpartition(":")
    if not port.isdigit() or (":" in host and not host.startswith("[")):
        return Answer("no connection comes about")  # one of gRPC's own names, such as unix:PATH
    return await greet(host.strip("[]"), int(port), context)


async def gateway_is_ready(probe: HttpProbe, target: Target, agent: str) -> None:
    """Raise Uncheckable if nothing can be found out about a gateway."""
    message = {"role": "ROLE_USER", "parts": [{"text": "conformance: text"}]}
    native = target == "native"
    path = "/v1/runs" if native else "/messages/stream"
    body = {"agent": agent, "message": message} if native else {"agent": agent, "content": "conformance: text"}
    seen = await _first_response(probe, path, body)
    where = f"{probe.url.rstrip('/')}{path}"
    if not seen.status:
        told = f"nothing came within {probe.timeout:g} s" if seen.late else seen.cut
        hint = "" if probe.url.startswith("https:") else " (is it https://?)"
        raise Uncheckable(f"what listens at {probe.url} speaks no HTTP: {told}{hint}")
    if seen.status in {401, 403}:
        raise Uncheckable(f"the gateway refuses the key: {seen.body[:200]!r} (--key KEY or --key @FILE)")
    frame = parse(seen.frames[0]) if seen.frames else None
    diagnosis = frame.get("diagnosis") if frame else None
    code = diagnosis.get("code") if isinstance(diagnosis, dict) else ""
    if b"UNKNOWN_AGENT" in seen.body or code == "unknown.agent":
        raise Uncheckable(_offer(agent))
    if code == "unauthenticated":
        raise Uncheckable("the gateway refuses the key (--key KEY or --key @FILE)")
    if code == "store.unavailable" or seen.status in {502, 503, 504}:
        raise Uncheckable(f"the gateway at {probe.url} answers, but not the engine behind it")
    if seen.status in {404, 405, 501} or 300 <= seen.status < 400:
        told = f"status {seen.status}" + (f" to {place!r}" if (place := seen.headers.get("location")) else "")
        raise Uncheckable(f"there is no {target} route at {where}, but {told}; --route names the other one")
    kind = seen.headers.get("content-type", "")
    if seen.status == 200 and not seen.frames and b"data: " not in seen.body and "event-stream" not in kind:
        raise Uncheckable(f"{where} answers with {kind or 'no content-type'} and no event stream; is this the gateway?")


async def _first_response(probe: HttpProbe, path: str, body: object) -> HttpExchange:
    until = time.monotonic() + min(PATIENCE, probe.timeout)
    while True:
        try:
            return await probe.send("POST", path, body)
        except ConnectionRefusedError as error:
            if time.monotonic() > until:
                raise Uncheckable(f"nothing answers at {probe.url}: {error.strerror or error}") from None
        except OSError as error:
            raise Uncheckable(f"nothing answers at {probe.url}: {error or 'no connection in time'}") from None
        await asyncio.sleep(_NEXT_TRY)


def _offer(agent: str) -> str:
    first = (
        f"the server has no agent {agent!r}. The kit talks to an agent that plays these scenarios; offer one by that "
        "name, or name yours by --agent (of ours: DUALCLAW_AGENTS=examples.conformance:AGENTS dualclaw-server)."
    )
    lines = [
        first,
        'The message "conformance: NAME" names the scenario:',
        *(f"  {name:10}{play.text}" for name, play in PLAYS.items()),
    ]
    return "\n".join(lines)
