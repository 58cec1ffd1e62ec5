"""The command ``dualclaw-server``: reads the settings, serves until it is told to stop.

``dualclaw-server record`` is another command, in ``record``.

Exit codes: 0 after a drain, 1 when it cannot start or its worker failed, 2 for wrong settings.
"""

import argparse
import asyncio
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence

from dualclaw_server import record
from dualclaw_server.app import LINGER, StartError, make_parts, part_problems, serve
from dualclaw_server.interceptors.masking import Masker
from dualclaw_server.servicers.logs import Redactor, start_logging
from dualclaw_server.settings import SettingsError, described_settings, read_settings

_log = logging.getLogger("dualclaw_server")

try:
    import uvloop
except ImportError:  # not made for this platform
    _new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    _new_loop = uvloop.new_event_loop


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or record one answer; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] == "record":
        return record.main(arguments[1:], os.environ)
    options = _parser().parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # so that DUALCLAW_AGENTS finds a module beside you, as `python -m` would
    try:
        settings, warnings = read_settings(os.environ, vars(options))
    except SettingsError as error:
        return _refuse(error.warnings, error.problems + (part_problems(error.rest) if error.rest else []))
    redactor = Redactor(settings.secrets, Masker().text)
    start_logging(sys.stderr, redactor)
    try:
        parts = make_parts(settings)
    except SettingsError as error:
        return _refuse(warnings, error.problems)
    for warning in warnings:
        _log.warning("%s", warning)
    try:
        _run(serve(settings, parts, redactor, _announce))
    except StartError as error:
        sys.stderr.write(f"dualclaw-server: {redactor.text(str(error))}\n")
        return 1
    except Exception:
        _log.exception("the server failed")
        return 1
    return 0


def _refuse(warnings: Sequence[str], problems: Sequence[str]) -> int:
    """Say all that is wrong, then what may be; returns the exit code."""
    for line in (*problems, *(f"warning: {warning}" for warning in warnings)):
        sys.stderr.write(f"dualclaw-server: {line}\n")
    return 2


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
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the epilog has its own lines
        description="The dualclaw engine: runs agents and serves them by gRPC. Settings are environment variables;\n"
        "the options stand in for the ones they name.\n"
        "`dualclaw-server record --help` tells how to record a model's answer for tests.",
        epilog="\n".join(
            [
                "environment variables, with their defaults; an empty one counts as not set:",
                *(f"  {name} ({default})\n      {text}" for name, default, text in described_settings()),
                "  Other OTEL_* names keep their standard meaning for the export of spans.",
            ]
        ),
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
