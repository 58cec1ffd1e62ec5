"""``dualclaw conformance``: checks an engine or a web gateway in any language, for people and for CI.

Exit codes: 0 nothing failed; 1 something did; 2 usage; 3 it could not be checked (nothing answers there, the agent is
missing, the key is refused); 130 it was interrupted.
"""

import argparse
import asyncio
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

import grpc

from dualclaw_clients.conformance.catalogue import checks_of
from dualclaw_clients.conformance.check import Check, Target
from dualclaw_clients.conformance.engine_probe import EngineProbe
from dualclaw_clients.conformance.http_probe import HttpProbe
from dualclaw_clients.conformance.playing import play_engine, play_web, scenes_for
from dualclaw_clients.conformance.readiness import Uncheckable, engine_is_ready, gateway_is_ready
from dualclaw_clients.conformance.report import Report, Screen, as_json, as_junit, listing
from dualclaw_clients.conformance.stage import BrokeOff, Cast
from dualclaw_clients.conformance.verdict import Outcome, judge
from dualclaw_clients.settings import check_target

PASSED, FAILED, USAGE, UNCHECKED, INTERRUPTED = 0, 1, 2, 3, 130
RESTART_TIMEOUT: Final = 120.0
"""Seconds the command of ``--restart`` may take."""


def run(args: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Run the command and return its exit code."""
    target: Target = "engine" if args.what == "engine" else args.route
    try:
        checks = _chosen(target, args.only)
        if args.list:
            out.write(listing(target, checks))
            return PASSED
        if not args.address:
            raise ValueError(f"the address is missing: {'HOST:PORT' if target == 'engine' else 'URL'}")
        context = _tls(args)
        probe = _engine_probe(args, context) if target == "engine" else _web_probe(args, context)
        cast = _cast(args, probe.key)
        if args.json == args.junit == "-":
            raise ValueError("--json and --junit cannot both go to stdout")
        stream = err if "-" in (args.json, args.junit) else out
        screen = Screen(stream, terminal=stream.isatty())
    except (ValueError, OSError) as error:
        err.write(f"dualclaw: conformance: {error}\n")
        return USAGE
    screen.begin(f"{target} at {args.address}")
    try:
        report = asyncio.run(_check(args, target, checks, probe, cast, context, screen))
    except Uncheckable as error:
        screen.stop()
        err.write(f"dualclaw: conformance: {error}\n")
        return UNCHECKED
    except KeyboardInterrupt:
        screen.stop()
        err.write("dualclaw: conformance: interrupted; nothing is reported\n")
        return INTERRUPTED
    finally:
        screen.stop()
    screen.show(report)
    try:
        if args.json:
            _write(args.json, as_json(report), out)
        if args.junit:
            _write(args.junit, as_junit(report), out)
    except OSError as error:
        err.write(f"dualclaw: conformance: the report cannot be written: {error}\n")
        return USAGE
    return FAILED if report.count(Outcome.FAILED) else PASSED


def _write(place: str, text: str, out: TextIO) -> None:
    if place == "-":
        out.write(text)
    else:
        Path(place).write_text(text, "utf-8")


def _chosen(target: Target, only: Sequence[str]) -> Sequence[Check]:
    checks = checks_of(target)
    known = {check.id for check in checks}
    if wrong := [id_ for id_ in only if id_.upper() not in known]:
        raise ValueError(f"{target} has no check {', '.join(wrong)}; --list shows what there is")
    wanted = {id_.upper() for id_ in only}
    return [check for check in checks if not wanted or check.id in wanted]


def _key(text: str) -> str:
    """Return a key that was given, or the one in the file that @FILE names. Raises ValueError, OSError."""
    key = Path(text[1:]).read_text("utf-8").strip() if text.startswith("@") else text
    if not key.isascii() or not key.isprintable():
        raise ValueError("a key is of printable ASCII characters, for it travels in a header")
    return key


def _cast(args: argparse.Namespace, key: str) -> Cast:
    restart = getattr(args, "restart", "")
    return Cast(args.agent, key, _key(getattr(args, "other_key", "")), Restart(restart) if restart else None)


def _tls(args: argparse.Namespace) -> ssl.SSLContext | None:
    """Return what TLS needs, read and looked at here so that a wrong file is told before any server is asked."""
    wanted = getattr(args, "tls", False) or args.ca_file or args.cert_file or args.key_file
    if not wanted:
        return None
    if bool(args.cert_file) != bool(args.key_file):
        raise ValueError("--cert-file and --key-file go together")
    context = ssl.create_default_context()
    for name in (args.ca_file, args.cert_file, args.key_file):
        if name:
            Path(name).read_bytes()  # ssl does not say which file is missing
    try:
        if args.ca_file:
            context = ssl.create_default_context(cafile=args.ca_file)
        if args.cert_file:
            context.load_cert_chain(args.cert_file, args.key_file)
    except ssl.SSLError as error:
        raise ValueError(f"--ca-file, --cert-file or --key-file holds no PEM that fits: {error}") from None
    return context


def _engine_probe(args: argparse.Namespace, context: ssl.SSLContext | None) -> EngineProbe:
    credentials = None
    if context is not None:
        context.set_alpn_protocols(["h2"])
        files = [Path(name).read_bytes() if name else None for name in (args.ca_file, args.key_file, args.cert_file)]
        credentials = grpc.ssl_channel_credentials(*files)
    return EngineProbe(check_target(args.address), key=_key(args.key), credentials=credentials, timeout=args.timeout)


def _web_probe(args: argparse.Namespace, context: ssl.SSLContext | None) -> HttpProbe:
    return HttpProbe(args.address, key=_key(args.key), context=context, timeout=args.timeout)


async def _check(
    args: argparse.Namespace,
    target: Target,
    checks: Sequence[Check],
    probe: EngineProbe | HttpProbe,
    cast: Cast,
    context: ssl.SSLContext | None,
    screen: Screen,
) -> Report:
    began = time.monotonic()
    scenes = scenes_for(target, [check.id for check in checks]) if args.only else None
    if isinstance(probe, EngineProbe):
        async with probe:
            await engine_is_ready(probe, args.agent, context)
            evidence = await play_engine(probe, cast, screen.played, scenes)
    else:
        await gateway_is_ready(probe, target, args.agent)
        evidence = await play_web(probe, args.agent, target, screen.played, scenes)
    results = tuple(judge(target, checks, evidence))
    return Report(target, args.address, args.agent, results, time.monotonic() - began)


class Restart:
    """Runs the command that kills the server under test and starts it again."""

    def __init__(self, command: str) -> None:
        self._command = command

    async def __call__(self) -> None:
        """Run it. Raises BrokeOff when it fails."""
        process = await asyncio.create_subprocess_shell(
            self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,  # a server it leaves behind must not hold a pipe open
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(RESTART_TIMEOUT):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            raise BrokeOff(f"--restart did not end within {RESTART_TIMEOUT:g} s") from None
        if code:
            raise BrokeOff(f"--restart ended with exit code {code}")
