"""The arguments of ``dualclaw conformance``. Imports nothing heavy: every start of the command line comes by here."""

import argparse

AGENT = "conformance"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``conformance engine`` and ``conformance web`` to a command line."""
    text = "Check whether a server in any language keeps the contract."
    what = commands.add_parser("conformance", help=text, description=text).add_subparsers(
        dest="what", required=True, metavar="engine|web"
    )
    engine = what.add_parser(
        "engine",
        help="check an engine over gRPC",
        description="Check an engine over gRPC. It needs an agent that plays the kit's scenarios; without one, this "
        "says what to offer. Exit codes: 0 nothing failed, 1 something did, 2 usage, 3 it could not be checked.",
    )
    _add_common(engine, "HOST:PORT")
    engine.add_argument("--tls", action="store_true", help="TLS with the system's authorities")
    engine.add_argument("--other-key", default="", metavar="KEY", help="key of another tenant: adds the checks of both")
    engine.add_argument(
        "--restart", default="", metavar="CMD",
        help="shell command that kills the server and starts it again: adds the checks of a crash",
    )  # fmt: skip
    web = what.add_parser(
        "web",
        help="check a web gateway over HTTP",
        description="Check a web gateway over HTTP, by its native or its original route. Exit codes as of engine.",
    )
    _add_common(web, "URL")
    web.add_argument("--route", choices=("native", "original"), default="native", help="which route (native)")


def _add_common(parser: argparse.ArgumentParser, address: str) -> None:
    parser.add_argument("address", nargs="?", default="", metavar=address, help="where the server listens")
    parser.add_argument("--agent", default=AGENT, metavar="NAME", help=f"agent that plays the scenarios ({AGENT})")
    parser.add_argument("--key", default="", metavar="KEY", help="API key, or @FILE that holds it")
    parser.add_argument("--ca-file", default="", metavar="FILE", help="authorities to trust, as PEM; implies TLS")
    parser.add_argument("--cert-file", default="", metavar="FILE", help="own certificate for mutual TLS, as PEM")
    parser.add_argument("--key-file", default="", metavar="FILE", help="its key")
    parser.add_argument(
        "--timeout", type=_seconds, default=30.0, metavar="S", help="seconds any one call may take (30)"
    )
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="ID", help="only these checks")
    parser.add_argument("--list", action="store_true", help="list the checks with their texts, and end")
    parser.add_argument("--junit", default="", metavar="FILE", help="write a JUnit XML report; - for stdout")
    parser.add_argument("--json", default="", metavar="FILE", help="write a JSON report; - for stdout")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3_600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 3600")
    return seconds
