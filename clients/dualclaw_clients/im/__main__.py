"""``dualclaw-im``: starts the IM claw.

Exit codes: 0 every message was answered; 1 a message was not, or the input or output broke; 2 wrong arguments
or settings; 130 ended by Ctrl-C.
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from dualclaw_clients.command_line import checked, installed_version, settings_help
from dualclaw_clients.im.app import open_relay
from dualclaw_clients.im.connector import SendError
from dualclaw_clients.im.console import ConsoleConnector, LineTooLong
from dualclaw_clients.im.gate import GateError
from dualclaw_clients.im.relay import RelayLimits
from dualclaw_clients.im.state import StateError
from dualclaw_clients.settings import ImSettings, SettingsError, check_target, load_settings, unknown_names

_STDIN, _STDOUT = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = load_settings(ImSettings)
        for warning in unknown_names():
            _say(f"warning: {warning}")
        return asyncio.run(_console(settings, options.engine or "", options.state, options.agent, options.chat))
    except KeyboardInterrupt:
        return 130
    except (SettingsError, GateError, StateError, ValueError) as error:
        _say(*str(error).splitlines())
        return 2
    except (SendError, LineTooLong, OSError) as error:
        _say(str(error))
        return 1


async def _console(settings: ImSettings, engine: str, state: str, agent: str, chat: str) -> int:
    on_terminal = os.isatty(_STDIN) and os.isatty(_STDOUT)
    console = ConsoleConnector(_STDIN, _STDOUT, chat_id=chat, prompt="> " if on_terminal else "")
    place = state or settings.im_state or ":memory:"
    limits = RelayLimits(reach=0)  # whoever has mistyped the address is told at once
    async with open_relay(settings, [console], state=place, engine=engine, agent=agent, limits=limits) as relay:
        await relay.listen()
        await relay.drain()
    return 1 if console.unanswered else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualclaw-im", description="Carries chats to a dualclaw engine.", epilog=settings_help(ImSettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed_version()}")
    commands = parser.add_subparsers(title="connectors", dest="connector", required=True)
    console = commands.add_parser(
        "console",
        help="talk on this terminal, or through a pipe: each line is a message",
        description="Each line of standard input is a message; its answer goes to standard output. "
        "IM_USE_ENGINE_CORE does not matter here.",
    )
    console.add_argument(
        "--engine", type=checked(check_target), metavar="HOST:PORT", help="the engine (default: DUALCLAW_ENGINE)"
    )
    console.add_argument(
        "--state",
        default="",
        metavar="PATH",
        help="file that remembers conversations over restarts (default: DUALCLAW_IM_STATE, else memory)",
    )
    console.add_argument("--agent", default="", metavar="NAME", help="the agent to ask (default: the engine's)")
    console.add_argument(
        "--chat", default="console", metavar="NAME", help="name of this chat; the same name goes on with it"
    )
    return parser


def _say(*lines: str) -> None:
    for line in lines:
        print(f"dualclaw-im: {line}", file=sys.stderr)  # noqa: T201  # the program's own words to its user


if __name__ == "__main__":
    sys.exit(main())
