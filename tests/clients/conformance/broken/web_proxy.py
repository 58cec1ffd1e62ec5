"""Our web gateway behind a layer that lies in exactly one way; its hooks say which."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from dualclaw_clients.engine_client import EngineClient
from dualclaw_clients.web.access import policy_for
from dualclaw_clients.web.app import WebApp

HEARTBEAT = 0.3


@dataclass
class Reply:
    """One request and its reply, for hooks to read and to keep their state in."""

    method: str
    path: str
    headers: dict[str, str]
    query: str
    body: bytes
    scenario: str = ""
    status: int = 0
    events: int = 0
    """Frames with data so far."""
    wires: list[dict[str, object]] = field(default_factory=list)


class HonestWeb:
    """Hooks that change nothing."""

    def request(self, reply: Reply) -> None:
        """Change headers, query or body of the request."""

    def head(self, reply: Reply, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers of the reply; ``reply.status`` may be changed."""
        return headers

    def frame(self, reply: Reply, frame: bytes, wire: dict[str, object] | None) -> bytes:
        """Return what is sent in place of a frame; ``wire`` is its JSON, None for a comment."""
        return frame

    def content(self, reply: Reply, body: bytes) -> bytes:
        """Return the body of a reply that is no stream."""
        return body

    def holds_head(self, reply: Reply) -> bool:
        """Say whether the head waits for the first frame with data."""
        return False


class BrokenGateway:
    """The layer, as an ASGI application in front of another one."""

    def __init__(self, app: WebApp, hooks: HonestWeb) -> None:
        self._app = app
        self._hooks = hooks
        self._scenarios: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        reply = Reply(scope["method"], scope["path"], headers, query, body, _scenario(body))
        self._hooks.request(reply)
        reply.headers["content-length"] = str(len(reply.body))
        inner = {
            **scope,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in reply.headers.items()],
            "query_string": reply.query.encode(),
        }
        unread = [{"type": "http.request", "body": reply.body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(inner, replay, _Sender(reply, self._hooks, send, self._scenarios))


class _Sender:
    def __init__(self, reply: Reply, hooks: HonestWeb, send: Send, scenarios: dict[str, str]) -> None:
        self._reply = reply
        self._hooks = hooks
        self._send = send
        self._scenarios = scenarios
        self._held: list[Message] = []
        self._streams = False

    async def __call__(self, message: Message) -> None:
        reply = self._reply
        if message["type"] == "http.response.start":
            headers = {name.decode(): value.decode() for name, value in message["headers"]}
            reply.status = message["status"]
            run_id = headers.get("x-run-id", "")
            reply.scenario = self._scenarios.setdefault(run_id, reply.scenario) if run_id else reply.scenario
            self._streams = headers.get("content-type", "").startswith("text/event-stream")
            headers = self._hooks.head(reply, headers)
            self._held.append(
                {**message, "status": reply.status, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
            )
        else:
            body = message.get("body", b"")
            if self._streams:
                body = b"".join(self._frame(part + b"\n\n") for part in body.split(b"\n\n") if part)
            else:
                body = self._hooks.content(reply, body)
            self._held.append({**message, "body": body})
        if not (self._streams and self._hooks.holds_head(reply)) or reply.events or not message.get("more_body", True):
            while self._held:
                await self._send(self._held.pop(0))

    def _frame(self, frame: bytes) -> bytes:
        data = next((line[6:] for line in frame.split(b"\n") if line.startswith(b"data: ")), None)
        wire = None if data is None else json.loads(data)
        if wire is not None:
            self._reply.events += 1
            self._reply.wires.append(json.loads(json.dumps(wire)))
        return self._hooks.frame(self._reply, frame, wire)


def _scenario(body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        found = json.loads(body)
        text = found["content"] if "content" in found else found["message"]["parts"][0]["text"]
        return str(text).removeprefix("conformance: ")
    return ""


@contextlib.asynccontextmanager
async def served(engine: str, hooks: HonestWeb, certificate: Path | None = None) -> AsyncIterator[str]:
    """Serve a gateway that lies, on a free port; gives its address. ``certificate``: PEM file with its key."""
    async with EngineClient(engine) as client:
        app = BrokenGateway(WebApp(client, policy=policy_for("127.0.0.1"), heartbeat=HEARTBEAT), hooks)
        config = uvicorn.Config(
            app, port=0, log_level="critical", lifespan="off", access_log=False, ws="none", ssl_certfile=certificate
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(100):
                while not server.started:  # noqa: ASYNC110  # uvicorn has a flag and no event
                    await asyncio.sleep(0.01)
            place = "http://127.0.0.1" if certificate is None else "https://localhost"
            yield f"{place}:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.wait_for(serving, 20)
