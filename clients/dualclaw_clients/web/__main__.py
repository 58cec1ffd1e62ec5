"""``dualclaw-web``: the gateway between browsers and an engine.

On SIGTERM or Ctrl-C it takes no new connection, ends open streams at once and exits; the runs go on in the engine
and clients follow them again from their last event.
"""

import asyncio
import logging
import signal
import socket
import sys
from types import FrameType

import uvicorn

from dualclaw_clients.settings import SettingsError, WebSettings, load_settings, unknown_names
from dualclaw_clients.web.access import policy_for
from dualclaw_clients.web.app import WebApp

LOG = logging.getLogger("dualclaw.web")

GRACE = 10
"""Seconds that plain requests may take to finish once the gateway shuts down."""


class Gateway(uvicorn.Server):
    """The HTTP server of one gateway."""

    def __init__(self, app: WebApp, host: str, port: int) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self._app = app
        self.address = ""
        """Where it listens, as a URL; known once it has started."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            sys.stdout.write(f"dualclaw-web listening on {self.address}\n")
            sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the open streams, which would last as long as their runs, then wait for what is left."""
        self._app.close_streams()
        await super().shutdown(sockets)


async def serve(settings: WebSettings) -> None:
    """Serve until told to stop; raises SystemExit when it cannot listen."""
    host, _, port = settings.web_listen.rpartition(":")
    policy = policy_for(host, settings.web_origins)
    async with settings.connect() as engine:
        gateway = Gateway(WebApp(engine, policy=policy, body_limit=settings.web_max_body), host.strip("[]"), int(port))
        await gateway.serve()


def main() -> int:
    """Run the gateway with the settings of the environment; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for warning in unknown_names():
        LOG.warning("%s", warning)
    # uvicorn raises the signal that ended it once more when it is done. By then everything is in good order, and
    # the default handlers would break off what comes after it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _already_handled)
    try:
        settings = load_settings(WebSettings)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings))
            return 0
    except SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"dualclaw-web: {problem}\n")
        return 2


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  # not there on Windows
    except ImportError:
        return None
    return uvloop.Loop


def _already_handled(number: int, frame: FrameType | None) -> None:
    """Take a signal that needs nothing more."""


if __name__ == "__main__":
    raise SystemExit(main())
