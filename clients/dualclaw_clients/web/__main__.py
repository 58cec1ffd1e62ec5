"""``dualclaw-web``: the gateway between browsers and an engine.

On SIGTERM or Ctrl-C it takes no new connection, ends open streams at once and exits; the runs go on in the engine
and clients follow them again from their last event.

Exit codes: 0 after that, 1 when it cannot listen, 2 for wrong arguments or settings.
"""

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Collection, Sequence
from types import FrameType

import uvicorn

from dualclaw_clients.command_line import checked, installed_version, settings_help
from dualclaw_clients.http_heads import HEAD_TIMEOUT
from dualclaw_clients.settings import (
    SettingsError,
    WebSettings,
    check_listen,
    check_target,
    load_settings,
    unknown_names,
)
from dualclaw_clients.web.access import policy_for
from dualclaw_clients.web.app import WebApp
from dualclaw_clients.web.heads import BoundedHeads
from dualclaw_clients.web.listen import ListenError, open_sockets

LOG = logging.getLogger("dualclaw.web")

GRACE = 10
"""Seconds that plain requests may take to finish once the gateway shuts down."""


class Gateway(uvicorn.Server):
    """The HTTP server of one gateway.

    ``told`` has an entry once a signal came before the server could take it; it then ends at once. ``head_timeout``
    is how many seconds a connection may take to bring the head of a request.
    """

    def __init__(
        self, app: WebApp, host: str, port: int, told: Collection[int] = (), *, head_timeout: float = HEAD_TIMEOUT
    ) -> None:
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=BoundedHeads.within(head_timeout),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,  # nothing here depends on who a proxy says the client is
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self._app = app
        self._told = told
        self._sockets: list[socket.socket] = []
        self.address = ""
        """Where it listens, as a URL; known once it has started."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; raises ListenError when that is not possible."""
        self._sockets = sockets or await open_sockets(self.config.host, self.config.port)
        await super().startup(self._sockets)
        self.should_exit = self.should_exit or bool(self._told)
        host, port = self._sockets[0].getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        sys.stdout.write(f"dualclaw-web listening on {self.address}\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the open streams, which would last as long as their runs, then wait for what is left."""
        self._app.close_streams()
        await super().shutdown(self._sockets)


async def serve(settings: WebSettings, told: Collection[int] = ()) -> None:
    """Serve until told to stop; raises ListenError when it cannot listen."""
    host, _, port = settings.web_listen.rpartition(":")
    policy = policy_for(host, settings.web_origins)
    if not policy.hosts:
        LOG.warning(
            "%s can be reached from other machines: any Host is served there, by plain HTTP. Put a proxy with TLS "
            "before it, and give the engine a DUALCLAW_KEYS_FILE.",
            settings.web_listen,
        )
    # Callers bring their keys; one of the gateway's own could only ever be lent to somebody.
    async with settings.connect(own_key=False) as engine:
        app = WebApp(engine, policy=policy, body_limit=settings.web_max_body)
        await Gateway(app, host.strip("[]"), int(port), told).serve()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway with the settings of the environment; returns the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for warning in unknown_names():
        LOG.warning("%s", warning)
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    # For the time before uvicorn takes the signals over, and for what comes after: uvicorn raises the one that
    # ended it once more when it is done. By then everything is in good order, and the default handlers would break
    # off what is left to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    try:
        settings = load_settings(WebSettings, {"web_listen": options.listen, "engine": options.engine})
        # What was loaded stays. A collection that walked through it would stop every stream for tens of milliseconds.
        gc.collect()
        gc.freeze()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings, told))
            return 0
    except SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"dualclaw-web: {problem}\n")
        return 2
    except ListenError as error:
        sys.stderr.write(f"dualclaw-web: cannot listen on {settings.web_listen} (DUALCLAW_WEB_LISTEN): {error}\n")
        return 1


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415  # not there on Windows
    except ImportError:
        return None
    return uvloop.Loop


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualclaw-web",
        description="The gateway between browsers and a dualclaw engine: the chat page, and the API it uses.\n"
        "The options stand in for the variables they name.",
        epilog=settings_help(WebSettings, without={"api_key"})
        + "\n\nDUALCLAW_API_KEY is not used: every caller brings a key of its own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed_version()}")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", type=checked(check_listen), help="DUALCLAW_WEB_LISTEN (127.0.0.1:8080)"
    )
    parser.add_argument(
        "--engine", metavar="HOST:PORT", type=checked(check_target), help="DUALCLAW_ENGINE (127.0.0.1:50051)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
