"""The gateway's ASGI application: which path is answered by what.

A table matches paths, and everything behind it is plain ASGI, so a frame passes from the engine's stream to the
server's ``send`` without a framework layer in between.

Routes: ``POST /messages/stream`` (original); ``/v1/runs...`` (native); ``/v1/conversations...``, ``/v1/agents...``
(JSON); ``GET /`` (the page); ``GET /healthz`` (the gateway is up; says nothing of the engine).
"""

import logging
from typing import Protocol

from starlette.routing import compile_path
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
        self._access = Access(policy or AccessPolicy())
        self._fixed = {path: endpoints for path, endpoints in paths.items() if "{" not in path}
        self._patterns = [(compile_path(path)[0], endpoints) for path, endpoints in paths.items() if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; the one place where a failure before the response becomes JSON."""
        if scope["type"] != "http" or not await self._access.admits(scope, send):
            return
        try:
            await self._endpoint(scope)(scope, receive, send)
        except EngineError as error:
            await send_error(scope, send, error)
        except ClientLeft:
            LOG.debug("client left before its request was complete: %s", scope["path"])
        except Exception:
            if scope.get(BEGUN):  # the server breaks the response off, which clients take for lost
                raise
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            await send_error(scope, send, internal_error())

    def close_streams(self) -> None:
        """End every open stream at once, as on SIGTERM; the runs go on and clients may follow them elsewhere."""
        self.streams.close()

    def _endpoint(self, scope: Scope) -> Endpoint:
        """Return what answers a request; raises HttpRefusal for a path or a method there is not."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        endpoints = self._fixed.get(path)
        if endpoints is None:
            for pattern, found in self._patterns:
                if (match := pattern.match(path)) is not None:
                    scope["path_params"], endpoints = match.groupdict(), found
                    break
            else:
                hint = "The page is at /, the API under /v1/runs, /v1/conversations and /v1/agents; check the path."
                raise HttpRefusal(404, "INVALID_REQUEST", f"there is nothing at {scope['path']}", hint=hint)
        endpoint = endpoints.get(scope["method"])
        if endpoint is None:
            message = f"{scope['method']} is not possible at {scope['path']}"
            allowed = ", ".join(endpoints)
            headers = ((b"allow", allowed.encode()),)
            raise HttpRefusal(405, "INVALID_REQUEST", message, hint=f"Use {allowed}.", headers=headers)
        return endpoint


async def _healthy(scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(scope, send, 200, b'{"status":"ok"}', b"application/json", ((b"cache-control", b"no-store"),))
