"""Who may talk to the gateway at all: hosts, origins, the caller's token.

A gateway on loopback is reachable by every page its user's browser has open. Two rules close that door:
its Host must be a loopback name (a foreign name that resolves to 127.0.0.1 is DNS rebinding), and a request
that changes something must not come from a foreign origin. Beyond loopback a deployment decides its host
names itself (``hosts``); the origin rule holds everywhere, because an engine without keys trusts any caller.

The gateway has no key of its own for callers: their bearer token goes to the engine unchanged, and a caller
without one is what the engine says it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import Scope, Send

from dualclaw.errors import EngineError
from dualclaw_clients.web.replies import EXTRA_HEADERS, HttpRefusal, send_empty, send_error

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})
_DECIDING = (b"host", b"origin", b"authorization")
_BASE_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"authorization, content-type, last-event-id"),
    (b"access-control-max-age", b"600"),
)


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """What is let in.

    Args:
        hosts: host names served, without port; empty: any. ``loopback_policy`` has those of loopback.
        origins: foreign origins that may call from a browser, such as "https://chat.example"; "*" is not one.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()


def policy_for(listen_host: str, origins: Iterable[str] = ()) -> AccessPolicy:
    """Return the policy of a gateway that listens on this address: on loopback only loopback names are served."""
    names = LOOPBACK_NAMES | {listen_host.lower()} if _is_loopback(listen_host) else frozenset[str]()
    return AccessPolicy(hosts=names, origins=frozenset(origin.rstrip("/").lower() for origin in origins))


class Access:
    """Refuses foreign hosts and origins and answers CORS preflights.

    It adds no layer to ``send``: headers for the response are left in the scope, where the one place that
    starts responses picks them up, so frames of a stream pass through nothing here.
    """

    def __init__(self, policy: AccessPolicy) -> None:
        self._policy = policy

    async def admits(self, scope: Scope, send: Send) -> bool:
        """Check one request; False when it has been answered here."""
        policy = self._policy
        headers = dict(scope["headers"])
        extra = list(_BASE_HEADERS)
        scope[EXTRA_HEADERS] = extra
        if len(headers) < len(scope["headers"]) and (twice := _given_twice(scope)):
            hint = "Send it once; a proxy before the gateway may have added another."
            await send_error(scope, send, HttpRefusal(400, "INVALID_REQUEST", f"{twice} is given twice", hint=hint))
            return False
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if policy.hosts and _without_port(host) not in policy.hosts:
            hint = (
                f"Call it by one of {', '.join(sorted(policy.hosts))}; "
                "to be served under other names it must listen beyond loopback (DUALCLAW_WEB_LISTEN)."
            )
            refusal = HttpRefusal(403, "PERMISSION_DENIED", f"host {host!r} is not served here", hint=hint)
            await send_error(scope, send, refusal)
            return False
        if policy.origins:
            extra.append((b"vary", b"origin"))
        raw_origin = headers.get(b"origin")
        if raw_origin is not None:
            origin = raw_origin.decode("latin-1").lower()
            allowed = origin in policy.origins
            if allowed:
                extra.append((b"access-control-allow-origin", raw_origin))
                extra.append((b"access-control-expose-headers", b"x-run-id, retry-after"))
            if scope["method"] == "OPTIONS" and allowed:
                await send_empty(scope, send, 204, _PREFLIGHT)
                return False
            own = _authority(origin) == host or headers.get(b"sec-fetch-site") == b"same-origin"
            if scope["method"] not in READING and not allowed and not own:
                message = f"pages of origin {origin!r} may not change anything here"
                hint = "Open the page at the gateway's own address, or name the origin in DUALCLAW_WEB_ORIGINS."
                await send_error(scope, send, HttpRefusal(403, "PERMISSION_DENIED", message, hint=hint))
                return False
        return True


def bearer_token(scope: Scope) -> str:
    """Return the caller's bearer token, "" when there is none.

    Raises:
        EngineError: UNAUTHENTICATED for another scheme or a token that cannot be one.
    """
    for name, value in scope["headers"]:
        if name == b"authorization":
            text: str = value.decode("latin-1")
            scheme, _, token = text.partition(" ")
            token = token.strip()
            if scheme.lower() != "bearer" or not token or not (token.isascii() and token.isprintable()):
                raise EngineError("UNAUTHENTICATED", "the Authorization header must be 'Bearer <token>'")
            return token
    return ""


def _given_twice(scope: Scope) -> str:
    """Return the name of a header that decides who may call and has two values, of which others may trust the other."""
    names = [name for name, _ in scope["headers"]]
    return next((name.decode() for name in _DECIDING if names.count(name) > 1), "")


def _authority(origin: str) -> str | None:
    """Return the host and port of an origin; None if it has none ("null"), or is no origin at all."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name; only the system knows where it leads
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
