"""The chat page: a few files read once at start, served with a policy that lets nothing else run.

There is no build step and no foreign resource. The content security policy allows only the files below and
calls to this gateway, so even markup that found its way from a model's answer into the page could not run, load
or send anything.
"""

import hashlib
from importlib import resources

from starlette.types import Receive, Scope, Send

from dualclaw_clients.web.replies import send_body, send_empty

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


class PageFile:
    """An endpoint that serves one file of the page, with an ETag."""

    def __init__(self, name: str) -> None:
        self._body = (resources.files("dualclaw_clients.web") / "page" / name).read_bytes()
        self._type = _TYPES[name[name.rindex(".") :]]
        self._etag = b'"%s"' % hashlib.sha256(self._body).hexdigest()[:20].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET the file, or 304 when the browser has this version."""
        headers = (*_HEADERS, (b"etag", self._etag))
        if dict(scope["headers"]).get(b"if-none-match") == self._etag:
            await send_empty(scope, send, 304, headers)
        else:
            await send_body(scope, send, 200, self._body, self._type, headers)


def page_files() -> dict[str, PageFile]:
    """Return the page's endpoints by path."""
    folder = resources.files("dualclaw_clients.web") / "page"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name[entry.name.rfind(".") :] in _TYPES)
    return {"/" if name == "index.html" else f"/page/{name}": PageFile(name) for name in names}
