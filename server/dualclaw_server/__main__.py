"""The command ``dualclaw-server``: reads the settings, serves until it is told to stop.

``dualclaw-server record`` is another command, in ``record``; ``dualclaw-server doctor`` looks at everything a start
needs (``engine.checkup``) and starts nothing.

Exit codes: 0 after a drain, 1 when it cannot start, its worker failed or doctor found a fault, 2 for wrong settings.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence

from dualclaw_server import record
from dualclaw_server.app import LINGER, Parts, make_parts, part_problems, serve
from dualclaw_server.engine import checkup
from dualclaw_server.engine.checkup import Finding
from dualclaw_server.interceptors.masking import Masker
from dualclaw_server.servicers.listening import StartError, check_free
from dualclaw_server.servicers.logs import Redactor, start_logging
from dualclaw_server.settings import (
    Settings,
    SettingsError,
    described_settings,
    is_loopback,
    read_settings,
    split_address,
)
from dualclaw_server.workers import WORKER_OF, Supervisor, bind_to_supervisor

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
    doctor = arguments[:1] == ["doctor"]
    options = _parser(doctor=doctor).parse_args(arguments[1:] if doctor else arguments)
    worker_of = None if doctor else vars(options).pop("worker_of")
    sys.path.insert(0, os.getcwd())  # so that DUALCLAW_AGENTS finds a module beside you, as `python -m` would
    if doctor:
        return _doctor(options)
    try:
        settings, warnings = read_settings(os.environ, vars(options))
    except SettingsError as error:
        return _refuse(error.warnings, error.problems + (part_problems(error.rest) if error.rest else []))
    redactor = Redactor(settings.secrets, Masker().text)
    start_logging(sys.stderr, redactor)
    if settings.workers > 1 and worker_of is None:
        return _supervise(settings, vars(options), redactor)
    announce = _announce if worker_of is None else bind_to_supervisor(worker_of)
    try:
        parts = make_parts(settings)
    except SettingsError as error:
        return _refuse(warnings, error.problems)
    for warning in warnings:
        _log.warning("%s", warning)
    _allow_files()
    try:
        _run(serve(settings, parts, redactor, announce))
    except StartError as error:
        sys.stderr.write(f"dualclaw-server: {redactor.text(str(error))}\n")
        return 1
    except Exception:
        _log.exception("the server failed")
        return 1
    return 0


def _supervise(settings: Settings, options: Mapping[str, str | None], redactor: Redactor) -> int:
    """Have workers serve; returns the exit code."""
    given = {name: value for name, value in options.items() if value is not None and name != "listen"}
    line = [part for name, value in given.items() for part in (f"--{name}", value)]
    try:
        return asyncio.run(Supervisor(settings.workers, settings.listen, line).serve(_announce))
    except StartError as error:
        sys.stderr.write(f"dualclaw-server: {redactor.text(str(error))}\n")
        return 1


def _doctor(options: argparse.Namespace) -> int:
    """Show how everything is that a start needs; returns the exit code."""
    given = vars(options)
    as_json, asks_model = given.pop("json"), not given.pop("no_model")
    redact, failed, parts = Redactor((), Masker().text).text, False, None

    def show(finding: Finding) -> None:
        nonlocal failed
        failed = failed or finding.level == "fail"
        text, hint = redact(finding.text), redact(finding.hint)
        line = f"{finding.level.upper():5} {finding.what:10} {text}" + (f"\n{'':16} -> {hint}" if hint else "")
        if as_json:
            shown = {"level": finding.level, "what": finding.what, "text": text, "hint": hint}
            line = json.dumps(shown, ensure_ascii=False)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    problems: Sequence[str] = ()
    try:
        settings, warnings = read_settings(os.environ, given)
        settings = settings.model_copy(update={"otlp_endpoint": "", "otlp_metrics_endpoint": ""})  # nothing is traced
        redact = Redactor(settings.secrets, Masker().text).text
        parts = make_parts(settings)
    except SettingsError as error:
        warnings = [*error.warnings]
        problems = error.problems + (part_problems(error.rest) if error.rest else [])
    for warning in warnings:
        show(Finding("warn", "settings", warning, "Correct the name, or remove the variable."))
    for problem in problems:
        show(Finding("fail", "settings", problem, "Correct it; `dualclaw-server --help` lists the settings."))
    if parts is not None:
        _run(_examine(settings, parts, show, asks_model=asks_model))
    return 1 if failed else 0


async def _examine(settings: Settings, parts: Parts, show: Callable[[Finding], None], *, asks_model: bool) -> None:
    keys = len(parts.access.keys)
    if settings.keys_file is not None:
        show(Finding("ok", "access", f"{keys} keys of {len({key.caller.tenant for key in parts.access.keys})} tenants"))
    elif is_loopback(settings.listen):
        show(Finding("ok", "access", "no keys file: everybody on this machine may do everything"))
    else:
        hint = "Set DUALCLAW_KEYS_FILE."
        show(Finding("warn", "access", f"no keys file: whoever reaches {settings.listen} may ask", hint))
    if settings.tls_cert is None and not is_loopback(settings.listen):
        hint = "Set DUALCLAW_TLS_CERT and DUALCLAW_TLS_KEY, or let a proxy encrypt."
        show(Finding("warn", "tls", f"what is said at {settings.listen} is not encrypted", hint))
    elif settings.tls_cert is not None:
        show(checkup.of_certificate(settings.tls_cert, settings.tls_key))
    try:
        await check_free(settings.listen, *split_address(settings.listen))
        show(Finding("ok", "address", f"{settings.listen} can be had"))
    except StartError as error:
        hint = "If an engine runs here already, that is it: `dualclaw doctor` asks it. Else set DUALCLAW_LISTEN."
        show(Finding("warn", "address", str(error), hint))
    show(checkup.of_agents(parts.agents))
    if settings.store.startswith("sqlite:"):
        show(checkup.of_disk(settings.store.removeprefix("sqlite:")))
    show(await checkup.of_store(parts.store, settings.shown_store))
    try:
        if asks_model:
            show(await checkup.of_model(parts.model))
    finally:
        await parts.model.aclose()


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


def _allow_files() -> None:
    """Take as many open files as this process may have: a run needs a socket, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems say "unlimited" and mean less
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(address: str) -> None:
    sys.stdout.write(f"dualclaw-server listening on {address}\n")
    sys.stdout.flush()


def _parser(*, doctor: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualclaw-server doctor" if doctor else "dualclaw-server",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # the epilog has its own lines
        description="The dualclaw engine: runs agents and serves them by gRPC. Settings are environment variables;\n"
        "the options stand in for the ones they name.\n"
        "`dualclaw-server record --help` tells how to record a model's answer for tests,\n"
        "`dualclaw-server doctor` says what is wrong without serving: it opens the store as a start would and\n"
        "asks the model one word.",
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
    parser.add_argument("--role", metavar="ROLE", help="DUALCLAW_ROLE (all): all, api or worker")
    parser.add_argument("--store", metavar="URL", help="DUALCLAW_STORE (sqlite:dualclaw.db)")
    parser.add_argument("--model", metavar="SPEC", help="DUALCLAW_MODEL (auto)")
    parser.add_argument("--workers", metavar="N", help="DUALCLAW_WORKERS (1): processes that share the address")
    if doctor:
        parser.add_argument("--json", action="store_true", help="one JSON object a line")
        parser.add_argument("--no-model", action="store_true", help="do not ask the model")
    else:
        parser.add_argument(WORKER_OF, type=int, help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("dualclaw")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
