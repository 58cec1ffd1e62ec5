"""The HTTP side: JSON-RPC, the agent cards, ``/healthz``, and who may come in.

JSON-RPC is at ``/``, the default agent's card at ``/.well-known/agent-card.json``, another agent's at
``/agents/NAME/.well-known/agent-card.json``. Callers are programs. A browser's page is none: a request with a foreign
Origin is refused, and on loopback so is a foreign Host, because every page its user opens can reach loopback, and an
engine without keys trusts whoever calls.
"""

import logging
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from a2a.server.context import ServerCallContext
from a2a.server.routes import DefaultServerCallContextBuilder, create_jsonrpc_routes
from a2a.server.routes.agent_card_routes import create_agent_card_routes
from a2a.types.a2a_pb2 import AgentCard
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualclaw import Agent
from dualclaw.errors import EngineError
from dualclaw_clients.a2a.card import Addresses, agent_card, find_agent
from dualclaw_clients.a2a.refusals import Refused
from dualclaw_clients.a2a.tasks import BEARER_STATE, EngineTasks
from dualclaw_clients.engine_client import EngineClient

LOG = logging.getLogger(__name__)

CARD_AGE: Final = 60.0
"""Seconds a public card is kept before the engine is asked again."""
REFUSED_CODE: Final = -32000
"""JSON-RPC code of what the transport refuses; its HTTP status and ``data`` say more."""
STREAM_GRACE: Final = 2.0
"""Seconds an event stream gets to say why it ends when the server shuts down."""
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_MAX_CARDS: Final = 256


class Cards:
    """Public cards, made of what the engine tells the claw's own key; an agent it tells nothing of gets a bare one."""

    def __init__(self, engine: EngineClient, addresses: Addresses, version: str, *, agent: str, key: str) -> None:
        self._engine = engine
        self._addresses = addresses
        self._version = version
        self._agent = agent
        self._key = key
        self._kept: dict[str, tuple[float, AgentCard]] = {}

    async def card(self, name: str = "") -> AgentCard:
        """Return an agent's card; empty: the default one's.

        Raises:
            HTTPException: 404, the engine has no such agent.
        """
        until, kept = self._kept.get(name, (0.0, None))
        now = time.monotonic()
        if kept is not None and now < until:
            return kept
        try:
            agent = await find_agent(self._engine, name or self._agent, token=self._key)
        except EngineError as error:
            if error.reason == "UNKNOWN_AGENT" and name:
                raise HTTPException(404, "there is no such agent") from None
            LOG.warning("the public card is bare, because the engine told nothing of its agent: %s", error.message)
            if kept is not None:
                return kept
            return agent_card(
                Agent(name=name or self._agent or "dualclaw"), self._addresses, self._version, tenant=name
            )
        found = agent_card(agent, self._addresses, self._version, tenant=name)
        if len(self._kept) >= _MAX_CARDS:
            self._kept.clear()
        self._kept[name] = (now + CARD_AGE, found)
        return found


class CallContexts(DefaultServerCallContextBuilder):
    """Gives each call the bearer key of its request."""

    def build(self, request: Request) -> ServerCallContext:
        """Return the context of a request; raises Refused for credentials that are no bearer key."""
        context = super().build(request)
        context.state[BEARER_STATE] = bearer_of(request.headers.getlist("authorization"))
        return context


def bearer_of(authorization: Sequence[str]) -> str:
    """Return the bearer key of ``authorization`` headers; "" when there is none.

    Raises:
        Refused: another scheme, several, or a key that cannot be one.
    """
    if not authorization:
        return ""
    scheme, _, key = authorization[0].partition(" ")
    key = key.strip()
    if len(authorization) > 1 or scheme.lower() != "bearer" or not key or not (key.isascii() and key.isprintable()):
        raise Refused(EngineError("UNAUTHENTICATED", "the authorization must be 'Bearer KEY'"))
    return key


def http_app(tasks: EngineTasks, cards: Cards, *, max_body: int, loopback: bool) -> ASGIApp:
    """Return the ASGI application.

    Args:
        tasks: answers the calls.
        cards: the agents' cards.
        max_body: longest request in bytes.
        loopback: it listens on loopback only, so only loopback names are served.
    """

    async def card(request: Request) -> Response:
        found = await cards.card(request.path_params.get("agent", ""))
        (route,) = create_agent_card_routes(found, cache_control=f"public, max-age={CARD_AGE:.0f}")
        return await route.endpoint(request)  # type: ignore[no-any-return]  # starlette's endpoints are untyped

    async def health(request: Request) -> Response:
        return PlainTextResponse("leaving\n", 503) if tasks.is_leaving else PlainTextResponse("ok\n")

    routes: list[BaseRoute] = [
        Route("/.well-known/agent-card.json", card),
        Route("/agents/{agent:path}/.well-known/agent-card.json", card),
        Route("/healthz", health),
        *create_jsonrpc_routes(tasks, "/", CallContexts(), shutdown_grace_period=STREAM_GRACE),
    ]
    app = Starlette(routes=routes, exception_handlers={Refused: _tell_refusal})
    return Door(app, max_body=max_body, names=_LOOPBACK_NAMES if loopback else frozenset())


async def _tell_refusal(request: Request, refused: Exception) -> Response:
    """Answer a refused JSON-RPC call: an error object, under the HTTP status that says what kind of refusal it is."""
    if not isinstance(refused, Refused):
        raise refused
    body = await request.json()  # read before; starlette keeps it
    given = body.get("id") if isinstance(body, dict) else None
    call = given if isinstance(given, str | int) and not isinstance(given, bool) else None
    details = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": refused.error.reason,
        "domain": "dualclaw",
        "metadata": {"hint": refused.error.hint},
    }
    error = {"code": REFUSED_CODE, "message": refused.detail, "data": [details]}
    return JSONResponse({"jsonrpc": "2.0", "id": call, "error": error}, refused.status_code, refused.headers)


class Door:
    """ASGI layer before everything: Host, Origin, and the length of bodies."""

    def __init__(self, app: ASGIApp, *, max_body: int, names: frozenset[str]) -> None:
        self._app = app
        self._max_body = max_body
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and hand it on."""
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", "").lower(), headers.get(b"origin", "").lower()
        if self._names and _without_port(host) not in self._names:
            problem = f"host {host!r} is not served here"
        elif origin and urlsplit(origin).netloc != host:
            problem = f"pages of origin {origin!r} may not call this"
        else:
            await self._app(scope, self._limited(receive), send)
            return
        await JSONResponse({"error": problem}, 403)(scope, receive, send)

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise HTTPException(413, f"the request has more than {self._max_body} bytes")
            return message

        return limited


def _without_port(host: str) -> str:
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
