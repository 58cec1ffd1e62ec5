"""The command ``dualclaw-server``: reads the settings, serves until it is told to stop.

Exit codes: 0 after a drain, 1 when it cannot start or its worker failed, 2 for wrong settings.
"""

import argparse
import asyncio
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence

from dualclaw_server.app import LINGER, StartError, make_parts, serve
from dualclaw_server.servicers.logs import Redactor, start_logging
from dualclaw_server.settings import SettingsError, read_settings

_log = logging.getLogger("dualclaw_server")

try:
    import uvloop
except ImportError:  # not made for this platform
    _new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    _new_loop = uvloop.new_event_loop


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    options = _parser().parse_args(argv)
    sys.path.insert(0, os.getcwd())  # so that DUALCLAW_AGENTS finds a module beside you, as `python -m` would
    try:
        settings, warnings = read_settings(os.environ, vars(options))
        redactor = Redactor([settings.model_api_key.get_secret_value()])
        start_logging(sys.stderr, redactor)
        for warning in warnings:
            _log.warning("%s", warning)
        parts = make_parts(settings)
    except SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"dualclaw-server: {problem}\n")
        return 2
    try:
        _run(serve(settings, parts, redactor, _announce))
    except StartError as error:
        sys.stderr.write(f"dualclaw-server: {redactor.text(str(error))}\n")
        return 1
    except Exception:
        _log.exception("the server failed")
        return 1
    return 0


def _run(main: Coroutine[None, None, None]) -> None:
    """Run to the end, as ``asyncio.run`` does; but a tool that ignores its cancellation does not keep the process."""
    loop = _new_loop()
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main)
    finally:
        try:
            loop.run_until_complete(_end_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=LINGER)
        for task in left:
            _log.error("task %s ignores its cancellation; the process ends without it", task.get_name())


def _announce(address: str) -> None:
    sys.stdout.write(f"dualclaw-server listening on {address}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualclaw-server",
        description="The dualclaw engine: runs agents and serves them by gRPC. Settings are environment variables "
        "DUALCLAW_*; the options below stand in for the ones they name.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    parser.add_argument("--listen", metavar="HOST:PORT", help="DUALCLAW_LISTEN (127.0.0.1:50051)")
    parser.add_argument("--store", metavar="URL", help="DUALCLAW_STORE (sqlite:dualclaw.db)")
    parser.add_argument("--model", metavar="SPEC", help="DUALCLAW_MODEL (scripted)")
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("dualclaw")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
