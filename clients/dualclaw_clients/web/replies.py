"""Answers that are not streams: JSON, errors and the one table from a failure to its HTTP status.

Every error body is ``{"error": {"reason", "message", "hint", "metadata", "fields"?}}``: ``reason`` is a name of
ErrorReason, ``hint`` says what to do ("" when nothing can be said), ``fields`` is there when a request was malformed
and maps each wrong field to what is wrong.

One failure has no reason of its own in the contract: no engine answers the gateway. It goes by the reason of its gRPC
code (UNAVAILABLE, so STORE_UNAVAILABLE and 503), and what tells it apart is ``metadata.engine`` = "unreachable" and
its words, which are the gateway's. The engine's address stays in the gateway's log; callers have no use for it.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import orjson
from google.protobuf import json_format
from google.protobuf.message import Message as ProtoMessage
from starlette.types import Scope, Send

from dualclaw.errors import EngineError, FieldError, Reason
from dualclaw.status import code_of
from dualclaw_clients.engine_client import EngineUnreachable

LOG = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]

EXTRA_HEADERS = "dualclaw.headers"
"""Key of the ASGI scope under which the access layer leaves headers that every response carries."""

BEGUN = "dualclaw.begun"
"""Key of the ASGI scope that is set once the response has begun: no other answer is possible then."""

HTTP_STATUS: Mapping[str, int] = MappingProxyType(
    {
        "CANCELLED": 499,
        "INVALID_ARGUMENT": 400,
        "DEADLINE_EXCEEDED": 504,
        "NOT_FOUND": 404,
        "ALREADY_EXISTS": 409,
        "PERMISSION_DENIED": 403,
        "RESOURCE_EXHAUSTED": 429,
        "FAILED_PRECONDITION": 409,
        "ABORTED": 409,
        "OUT_OF_RANGE": 416,
        "UNIMPLEMENTED": 501,
        "UNAVAILABLE": 503,
        "UNAUTHENTICATED": 401,
    }
)
"""gRPC code name -> HTTP status; a code that is not here is 500."""

GONE: frozenset[Reason] = frozenset({"LOG_COMPACTED"})
"""Reasons that are 410 whatever their code: what was asked for existed and will not come back."""

DEFAULT_RETRY_AFTER = 1.0
"""Seconds told with 429 when the engine names none."""


class HttpRefusal(EngineError):
    """A request refused for something only HTTP knows (a method, a size, an origin), with its status.

    ``hint`` is its own: what the reason says in general is about calls of the engine and would mislead here.
    """

    def __init__(self, status: int, reason: Reason, message: str, *, hint: str, headers: Headers = ()) -> None:
        super().__init__(reason, message, {"hint": hint})
        self.status = status
        self.headers = tuple(headers)


def internal_error() -> HttpRefusal:
    """Return what callers are told of a mistake of the gateway's own; what it was stands in its log."""
    return HttpRefusal(500, "INTERNAL", "the gateway failed", hint="The gateway's log has the cause; please report it.")


def http_status(error: EngineError) -> int:
    """Return the HTTP status of a failure."""
    if isinstance(error, HttpRefusal):
        return error.status
    if error.reason in GONE:
        return 410
    # The code a status came with says more than the reason it was mapped to when the peer is no engine of ours.
    return HTTP_STATUS.get(error.metadata.get("grpc_code") or code_of(error.reason).name, 500)


def told(error: EngineError) -> EngineError:
    """Return a failure as callers are told it: as it is, but "no engine answers" in words that are true for them."""
    if not isinstance(error, EngineUnreachable):
        return error
    LOG.warning("%s", error.message)
    where = {name: error.metadata[name] for name in ("run_id", "last_seq") if name in error.metadata}
    hint = (
        "Try again in a moment, a start with the same request_id. If it stays: is dualclaw-server running, and does "
        "DUALCLAW_ENGINE of the gateway name it? The gateway's log has the address."
    )
    metadata = {**where, "engine": "unreachable", "grpc_code": "UNAVAILABLE", "hint": hint}
    return EngineError(error.reason, "the gateway cannot reach its engine", metadata, retry_after=error.retry_after)


async def send_body(
    scope: Scope, send: Send, status: int, body: bytes, content_type: bytes, headers: Headers = ()
) -> None:
    """Send a whole response."""
    scope[BEGUN] = True
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *headers,
                *scope.get(EXTRA_HEADERS, ()),
            ],
        }
    )
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def send_empty(scope: Scope, send: Send, status: int, headers: Headers = ()) -> None:
    """Send a response without a body (204)."""
    scope[BEGUN] = True
    start = [*headers, *scope.get(EXTRA_HEADERS, ())]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": b""})


async def send_message(scope: Scope, send: Send, message: ProtoMessage) -> None:
    """Send a message as protobuf JSON with the field names of the proto files.

    Fields without presence are always there, so 0 and "" are seen as such; an optional field that is
    absent means "unknown".
    """
    value = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    await send_body(scope, send, 200, orjson.dumps(value), b"application/json", ((b"cache-control", b"no-store"),))


async def send_error(scope: Scope, send: Send, error: EngineError) -> None:
    """Send a failure as JSON under its HTTP status."""
    error = told(error)
    status = http_status(error)
    content: dict[str, object] = {
        "reason": error.reason,
        "message": error.message,
        "hint": error.hint,
        "metadata": {name: text for name, text in error.metadata.items() if name != "hint"},
    }
    if isinstance(error, FieldError):
        content["fields"] = dict(error.fields)
    headers: list[tuple[bytes, bytes]] = [(b"cache-control", b"no-store")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    wait = error.retry_after if error.retry_after is not None else DEFAULT_RETRY_AFTER if status == 429 else None
    if wait is not None and status in {429, 503}:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait))))
    if isinstance(error, HttpRefusal):
        headers.extend(error.headers)
    body = orjson.dumps({"error": content})
    await send_body(scope, send, status, body, b"application/json", headers)
