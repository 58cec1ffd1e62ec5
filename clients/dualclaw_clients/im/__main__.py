"""``dualclaw-im``: starts the IM claw, with the connectors of DUALCLAW_IM_CONNECTORS or as a console.

As a service it ends on SIGTERM or Ctrl-C: it takes no more messages, gives the answers under way some time, and
leaves the rest in its state file for the next start.

Exit codes: 0 every message was answered, or the service was told to end; 1 a message was not, or the input or output
broke, or it cannot listen; 2 wrong arguments or settings; 130 a console ended by Ctrl-C.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from dualclaw_clients.command_line import checked, installed_version, settings_help
from dualclaw_clients.im.app import ListenError, open_connectors, open_relay
from dualclaw_clients.im.connector import SendError
from dualclaw_clients.im.console import ConsoleConnector, LineTooLong
from dualclaw_clients.im.delivery import SendLimits
from dualclaw_clients.im.gate import GateError
from dualclaw_clients.im.relay import Relay, RelayLimits
from dualclaw_clients.im.settings import RelaySettings
from dualclaw_clients.im.state import StateError
from dualclaw_clients.im.texts import TEXTS
from dualclaw_clients.settings import SettingsError, check_target, load_settings, unknown_names, variables_of

_STDIN, _STDOUT = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = load_settings(RelaySettings)
        if options.connector is None and not settings.im_connectors:
            parser.error("name a connector: `dualclaw-im console`, or DUALCLAW_IM_CONNECTORS=webhook,console")
        own = set(variables_of(RelaySettings))
        for warning in unknown_names():
            if warning.partition(" ")[0] not in own:
                _say(f"warning: {warning}")
        if options.connector is None:
            logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
            settings.check_service()
            return asyncio.run(_serve(settings))
        logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
        return asyncio.run(_console(settings, options.engine or "", options.state, options.agent, options.chat))
    except KeyboardInterrupt:
        return 130
    except (SettingsError, GateError, StateError, ValueError) as error:
        _say(*str(error).splitlines())
        return 2
    except (SendError, LineTooLong, ListenError, OSError) as error:
        _say(str(error))
        return 1


async def _console(settings: RelaySettings, engine: str, state: str, agent: str, chat: str) -> int:
    console = _console_connector(chat)
    place = state or settings.im_state or ":memory:"
    limits = replace(_limits(settings), reach=0)  # whoever has mistyped the address is told at once
    texts = TEXTS[settings.im_language]
    async with open_relay(
        settings, [console], state=place, engine=engine, agent=agent, limits=limits, texts=texts
    ) as relay:
        await relay.listen()
        await relay.drain()
    return 1 if console.unanswered else 0


async def _serve(settings: RelaySettings) -> int:
    texts = TEXTS[settings.im_language]
    async with open_connectors(settings, lambda: _console_connector("console")) as connectors:
        state = settings.im_state or ":memory:"
        async with open_relay(settings, connectors, state=state, limits=_limits(settings), texts=texts) as relay:
            await _listen_until_told(relay)
    return 0


async def _listen_until_told(relay: Relay) -> None:
    """Listen until every connector has ended or a signal says so."""
    loop = asyncio.get_running_loop()
    listening = asyncio.ensure_future(relay.listen())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, listening.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):  # by the signal; nobody else has this task
            await listening
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _console_connector(chat: str) -> ConsoleConnector:
    on_terminal = os.isatty(_STDIN) and os.isatty(_STDOUT)
    return ConsoleConnector(_STDIN, _STDOUT, chat_id=chat, prompt="> " if on_terminal else "")


def _limits(settings: RelaySettings) -> RelayLimits:
    return RelayLimits(send=SendLimits(resend=settings.im_after_send == "resend"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualclaw-im",
        description="Carries chats to a dualclaw engine, by the connectors of DUALCLAW_IM_CONNECTORS.",
        epilog=settings_help(RelaySettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed_version()}")
    commands = parser.add_subparsers(title="connectors", dest="connector", metavar="console")
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
