"""The gateway's ASGI application: which path is answered by what.

Starlette matches paths; everything behind it is plain ASGI, so a frame passes from the engine's stream to the
server's ``send`` without a framework layer in between.

Routes: ``POST /messages/stream`` (original); ``/v1/runs...`` (native); ``/v1/conversations...``, ``/v1/agents...``
(JSON); ``GET /`` (the page); ``GET /healthz`` (the gateway is up; says nothing of the engine).
"""

import logging
from collections.abc import Mapping
from typing import Protocol

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from dualclaw.errors import EngineError
from dualclaw_clients.engine_client import EngineClient
from dualclaw_clients.web.access import Access, AccessPolicy
from dualclaw_clients.web.bodies import ClientLeft
from dualclaw_clients.web.native import NativeRoutes
from dualclaw_clients.web.original import OriginalRoute
from dualclaw_clients.web.page import page_files
from dualclaw_clients.web.replies import BEGUN, HttpRefusal, internal_error, send_body, send_error
from dualclaw_clients.web.resources import Resources
from dualclaw_clients.web.streams import Streams

LOG = logging.getLogger(__name__)

BODY_LIMIT = 1024 * 1024


class Endpoint(Protocol):
    """Answers one method of one path; may raise EngineError or ClientLeft before the response has begun."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""


class WebApp:
    """The gateway as an ASGI application.

    Args:
        engine: the connection to the engine; without a key of its own, callers bring theirs.
        policy: which hosts and origins are let in.
        body_limit: largest request body in bytes.
        heartbeat: seconds of silence after which a native stream gets a heartbeat comment.
        stall: seconds after which a client that has stopped reading is given up.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        policy: AccessPolicy | None = None,
        body_limit: int = BODY_LIMIT,
        heartbeat: float = 15.0,
        stall: float = 60.0,
    ) -> None:
        self.streams = Streams(heartbeat=heartbeat, stall=stall)
        native = NativeRoutes(engine, self.streams, body_limit)
        read = Resources(engine)
        paths: dict[str, dict[str, Endpoint]] = {
            "/messages/stream": {"POST": OriginalRoute(engine, self.streams, body_limit)},
            "/v1/runs": {"GET": read.list_runs, "POST": native.start},
            "/v1/runs/{run_id}": {"GET": read.get_run},
            "/v1/runs/{run_id}/events": {"GET": native.events},
            "/v1/runs/{run_id}/resume": {"POST": native.resume},
            "/v1/runs/{run_id}/cancel": {"POST": native.cancel},
            "/v1/conversations": {"GET": read.list_conversations},
            "/v1/conversations/{conversation_id}": {"GET": read.get_conversation, "DELETE": read.delete_conversation},
            "/v1/conversations/{conversation_id}/messages": {"GET": read.list_messages},
            "/v1/agents": {"GET": read.list_agents},
            "/v1/agents/{agent}": {"GET": read.get_agent},
            "/healthz": {"GET": _healthy},
            **{path: {"GET": file, "HEAD": file} for path, file in page_files().items()},
        }
        routes = [Route(path, _Methods(endpoints)) for path, endpoints in paths.items()]
        self._app = Access(Router(routes, redirect_slashes=False, default=_Methods({})), policy or AccessPolicy())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._app(scope, receive, send)

    def close_streams(self) -> None:
        """End every open stream at once, as on SIGTERM; the runs go on and clients may follow them elsewhere."""
        self.streams.close()


class _Methods:
    """The endpoints of one path, and the one place where a failure before the response becomes JSON."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = endpoints
        self._allow = ", ".join(endpoints).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["method"])
        try:
            if endpoint is None:
                raise self._refusal(scope)
            await endpoint(scope, receive, send)
        except EngineError as error:
            await send_error(scope, send, error)
        except ClientLeft:
            LOG.debug("client left before its request was complete: %s", scope["path"])
        except Exception:
            if scope.get(BEGUN):  # the server breaks the response off, which clients take for lost
                raise
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            await send_error(scope, send, internal_error())

    def _refusal(self, scope: Scope) -> HttpRefusal:
        if not self._endpoints:
            hint = "The page is at /, the API under /v1/runs, /v1/conversations and /v1/agents; check the path."
            return HttpRefusal(404, "INVALID_REQUEST", f"there is nothing at {scope['path']}", hint=hint)
        message = f"{scope['method']} is not possible at {scope['path']}"
        allowed = self._allow.decode()
        return HttpRefusal(405, "INVALID_REQUEST", message, hint=f"Use {allowed}.", headers=((b"allow", self._allow),))


async def _healthy(scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(scope, send, 200, b'{"status":"ok"}', b"application/json", ((b"cache-control", b"no-store"),))
