"""``dualclaw-a2a``: serves the engine's agents to other agents, by A2A 1.0 over JSON-RPC and gRPC.

On SIGTERM or Ctrl-C it calls itself unhealthy, ends open streams at once, lets other calls finish within the grace
time and exits; tasks go on in the engine, and callers subscribe to them again.

Exit codes: 0 after that, 1 when it cannot listen or its packages are missing, 2 for wrong arguments or settings.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from dualclaw_clients.a2a.settings import A2aSettings
from dualclaw_clients.command_line import checked, installed_version, lacking, settings_help
from dualclaw_clients.settings import SettingsError, check_listen, check_target, load_settings, unknown_names

try:
    from dualclaw_clients.a2a.server import ListenError, open_claw
except ModuleNotFoundError as missing:
    sys.exit(lacking("dualclaw-a2a", "a2a", missing))

LOG = logging.getLogger("dualclaw.a2a")


async def serve(settings: A2aSettings) -> None:
    """Serve until a signal says to stop; raises ListenError and SettingsError."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    async with open_claw(settings) as claw:
        sys.stdout.write(
            f"dualclaw-a2a listening on {claw.addresses.json_rpc} and, for gRPC, on {claw.addresses.grpc}\n"
        )
        sys.stdout.flush()
        await told.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the claw with the settings of the environment; returns the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for warning in unknown_names():
        LOG.warning("%s", warning)
    given = {"a2a_listen": options.listen, "a2a_grpc_listen": options.grpc_listen, "engine": options.engine}
    try:
        asyncio.run(serve(load_settings(A2aSettings, given)))
    except SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"dualclaw-a2a: {problem}\n")
        return 2
    except ListenError as error:
        sys.stderr.write(f"dualclaw-a2a: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualclaw-a2a",
        description="Serves the agents of a dualclaw engine to other agents, by the Agent2Agent protocol 1.0.\n"
        "The options stand in for the variables they name.",
        epilog=settings_help(A2aSettings)
        + "\n\nDUALCLAW_API_KEY only reads the public card; every caller brings a key of its own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed_version()}")
    listen = checked(check_listen)
    parser.add_argument("--listen", metavar="HOST:PORT", type=listen, help="DUALCLAW_A2A_LISTEN (127.0.0.1:8100)")
    parser.add_argument(
        "--grpc-listen", metavar="HOST:PORT", type=listen, help="DUALCLAW_A2A_GRPC_LISTEN (127.0.0.1:8101)"
    )
    parser.add_argument(
        "--engine", metavar="HOST:PORT", type=checked(check_target), help="DUALCLAW_ENGINE (127.0.0.1:50051)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
