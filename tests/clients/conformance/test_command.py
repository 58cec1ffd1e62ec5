"""``dualclaw conformance`` as people and CI call it: what it says, what it writes, how it ends."""

# ruff: noqa: S314  # the XML is our own

import asyncio
import io
import json
import shlex
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET  # of our own reports
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from dualclaw_clients.cli import main
from dualclaw_clients.cli_parser import make_parser
from dualclaw_clients.conformance import command
from dualclaw_clients.conformance.catalogue import BY_ID, checks_of
from dualclaw_clients.conformance.plays import PLAYS
from dualclaw_clients.conformance.report import Report, Screen, as_json, as_junit
from dualclaw_clients.conformance.verdict import Outcome, Result
from tests.toolchains import require

from .broken.engine_proxy import EngineProxy, Honest
from .broken.event_hooks import altered, longer_done
from .broken.web_proxy import HonestWeb, served
from .conftest import KEY, OTHER_KEY, GoodEngine


async def as_process(engine: GoodEngine, *args: str) -> tuple[int, str, str]:
    """Run the command as people do; returns exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dualclaw_clients.cli", "conformance", *args),
        env=engine.environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(500):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def conformance(*args: str) -> tuple[int, str, str]:
    """Run the command in a thread of this process, which takes a tenth of the time."""
    out, err = io.StringIO(), io.StringIO()
    parsed = make_parser().parse_args(["conformance", *args])
    code = await asyncio.to_thread(command.run, parsed, out, err)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.timeout(600)
async def test_our_engine_passes_every_check_over_a_crash(good_engine: GoodEngine, tmp_path: Path) -> None:
    """With two keys and a way to restart it nothing is left unchecked, and both reports say the same."""
    junit, report = tmp_path / "junit.xml", tmp_path / "report.json"
    code, out, err = await as_process(
        good_engine,
        *("engine", good_engine.address, "--key", KEY, "--other-key", OTHER_KEY, "--timeout", "100"),
        *("--restart", good_engine.restart_command, "--junit", str(junit), "--json", str(report)),
    )
    count = len(checks_of("engine"))
    assert f"{count} passed, 0 failed, 0 not checked" in out, out + err
    assert code == 0
    found = json.loads(report.read_text("utf-8"))
    assert found["summary"] == {"passed": count, "failed": 0, "not_checked": 0}
    suite = ET.fromstring(junit.read_text("utf-8"))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (str(count), "0", "0")
    assert "\x1b" not in out


async def test_what_cannot_be_checked_is_never_called_passed(good_engine: GoodEngine) -> None:
    """Without --other-key and --restart those checks are "not checked", with the option that is missing."""
    only = ("T1", "T2", "T3", "K1", "K2", "K3")
    code, out, err = await conformance("engine", good_engine.address, "--key", KEY, "--only", *only)
    assert code == 0, out + err
    assert out.count("not checked ") == len(only)
    assert out.count("it needs --other-key") == out.count("it needs --restart") == 3
    assert "0 passed, 0 failed, 6 not checked" in out


async def test_a_check_that_fails_says_what_was_expected_and_what_was_seen(
    good_engine: GoodEngine, tmp_path: Path
) -> None:
    """The text has the rule, the contract's place and the event; CI gets exit code 1 and a failure in the report."""
    junit = tmp_path / "junit.xml"
    async with EngineProxy(good_engine.address, altered("tool", longer_done)()) as proxy:
        args = ("engine", proxy.target, "--key", KEY, "--only", "r5", "R6", "--junit", str(junit))
        code, out, err = await conformance(*args)
    assert code == 1, err
    assert "failed      R5" in out
    assert BY_ID["R5"].text in out
    assert "Contract 1.9, Done.content." in out
    assert "tool/start, event" in out
    assert "went well.!" in out
    assert "1 passed, 1 failed, 0 not checked" in out
    failure = ET.fromstring(junit.read_text("utf-8")).find(".//failure")
    assert failure is not None
    assert "Done.content" in (failure.text or "")


async def test_json_to_stdout_is_nothing_but_json(good_engine: GoodEngine) -> None:
    """What people read goes to stderr then, so that a pipe gets one object."""
    code, out, err = await as_process(
        good_engine, "engine", good_engine.address, "--key", KEY, "--only", "R1", "--json", "-"
    )
    assert code == 0, err
    found = json.loads(out)
    assert set(found) == {"target", "address", "agent", "version", "seconds", "summary", "checks"}
    assert (found["target"], found["address"], found["agent"]) == ("engine", good_engine.address, "conformance")
    assert [(check["id"], check["outcome"]) for check in found["checks"]] == [("R1", "passed")]
    assert "1 passed" in err


@pytest.mark.parametrize("what", ["engine", "web"])
async def test_an_interrupt_ends_it_with_130_and_a_line(good_engine: GoodEngine, what: str) -> None:
    """Ctrl-C is no failed check, and nobody gets a traceback or half a report."""
    async with stranger(None) as silent:
        place = silent if what == "engine" else f"http://{silent}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dualclaw_clients.cli", "conformance", what, place, "--timeout", "90"),
            env=good_engine.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(100):
            await silent.greeted.wait()
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    assert (process.returncode, out) == (130, b""), err
    assert err == b"dualclaw: conformance: interrupted; nothing is reported\n"


class Place(str):
    """An address, and whether somebody has come there."""

    greeted: asyncio.Event


STRANGERS = {
    "MUTE": None,
    "SHUT": b"",
    "PAGE": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\nhello",
    "AWAY": b"HTTP/1.1 302 Found\r\nlocation: /login\r\ncontent-length: 0\r\n\r\n",
    "DOWN": b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
}
"""What servers say that are none of ours, whatever they are asked; None: nothing, and they hold the connection."""


@asynccontextmanager
async def stranger(answer: bytes | None) -> AsyncIterator[Place]:
    """Serve one of them; gives its HOST:PORT."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        place.greeted.set()
        with suppress(OSError):
            if answer is not None:
                await reader.read(65_536)  # a connection that is closed with unread bytes is reset
                writer.write(answer)
                await writer.drain()
                writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    place = Place(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    place.greeted = asyncio.Event()
    try:
        yield place
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


async def test_both_routes_of_our_gateway_pass_by_the_command(good_engine: GoodEngine) -> None:
    """The original route needs no option but its name; what only the native one has is not asked of it."""
    async with served(good_engine.address, HonestWeb()) as url:
        for route in ("native", "original"):
            code, out, err = await conformance("web", url, "--route", route, "--key", KEY)
            assert code == 0, out + err
            assert f"{len(checks_of(route))} passed, 0 failed" in out  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("engine", "127.0.0.1:9", "--timeout", "1"), "no engine answers at 127.0.0.1:9: nothing listens there"),
        (("engine", "no.such.host.invalid:1", "--timeout", "1"), "no engine answers at no.such.host.invalid:1"),
        (("engine", "GATE", "--timeout", "1"), "it speaks HTTP/1.1 and no gRPC"),
        (("engine", "MUTE", "--timeout", "1"), "takes the connection and says nothing"),
        (("engine", "SHUT", "--timeout", "1"), "closes the connection (is it TLS?"),
        (("engine", "ENGINE", "--tls"), "TLS fails: wrong version number (is it plain text?"),
        (("web", "http://MUTE", "--timeout", "1"), "speaks no HTTP: nothing came within 1 s (is it https://?)"),
        (("web", "http://SHUT"), "speaks no HTTP: there is no response: the connection ends after 0 bytes"),
        (("web", "http://ENGINE"), "speaks no HTTP"),
        (("web", "http://PAGE"), "answers with text/html and no event stream; is this the gateway?"),
        (("web", "http://AWAY"), "no native route at http://AWAY/v1/runs, but status 302 to '/login'"),
        (("web", "http://DOWN", "--route", "original"), "answers, but not the engine behind it"),
        (("engine", "ENGINE", "--key", KEY, "--agent", "nobody"), "approvals one message calls"),
        (("engine", "ENGINE", "--key", "wrong"), "refuses the key"),
        (("web", "http://127.0.0.1:9", "--timeout", "1"), "nothing answers at http://127.0.0.1:9"),
        (("web", "GATEWAY", "--key", KEY, "--agent", "nobody"), "the server has no agent 'nobody'"),
        (("web", "GATEWAY", "--key", KEY, "--agent", "nobody", "--route", "original"), "has no agent 'nobody'"),
        (("web", "GATEWAY", "--key", "wrong"), "refuses the key"),
        (("web", "GATEWAY", "--key", "wrong", "--route", "original"), "refuses the key"),
        (("web", "GATEWAY/nowhere", "--key", KEY), "there is no native route at"),
    ],
)
async def test_a_server_that_cannot_be_checked_ends_with_3_and_says_why(
    good_engine: GoodEngine, args: tuple[str, ...], told: str
) -> None:
    """That is no failed check, and a person learns what to do about it."""
    places = {"ENGINE": good_engine.address}
    async with AsyncExitStack() as servers:
        for name, answer in STRANGERS.items():
            places[name] = await servers.enter_async_context(stranger(answer))
        places["GATEWAY"] = await servers.enter_async_context(served(good_engine.address, HonestWeb()))
        places["GATE"] = places["GATEWAY"].removeprefix("http://")
        filled = list(args)
        for name, place in sorted(places.items(), key=lambda pair: -len(pair[0])):
            filled = [arg.replace(name, place) for arg in filled]
            told = told.replace(name, place)
        code, out, err = await conformance(*filled)
    assert (code, out) == (3, ""), err
    assert told in err


async def test_the_agent_to_offer_is_told_with_every_scenario(good_engine: GoodEngine) -> None:
    """Somebody with a server in another language can write the agent from this text."""
    args = ("engine", good_engine.address, "--key", KEY, "--agent", "nobody")
    _, _, err = await conformance(*args)
    assert [name for name, play in PLAYS.items() if play.text not in err] == []


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("engine",), "HOST:PORT"),
        (("engine", "nowhere"), "HOST:PORT"),
        (("engine", "h:1", "--only", "R1", "X9"), "no check X9"),
        (("engine", "h:1", "--only", "H1"), "no check H1"),
        (("engine", "h:1", "--json", "-", "--junit", "-"), "cannot both go to stdout"),
        (("engine", "h:1", "--key", "@/nowhere/key"), "/nowhere/key"),
        (("engine", "h:1", "--other-key", "@/nowhere/key"), "/nowhere/key"),
        (("engine", "h:1", "--key", "ключ"), "printable ASCII"),
        (("engine", "h:1", "--cert-file", "/dev/null"), "--cert-file and --key-file go together"),
        (("engine", "h:1", "--cert-file", "/dev/null", "--key-file", "/dev/null"), "no PEM that fits"),
        (("web", "https://h", "--ca-file", "/nowhere/ca"), "/nowhere/ca"),
        (("web", "ftp://h"), "http://HOST:PORT"),
    ],
)
async def test_wrong_usage_ends_with_2_before_any_server_is_asked(args: tuple[str, ...], told: str) -> None:
    """The text names what is wrong."""
    code, out, err = await conformance(*args)
    assert (code, out) == (2, "")
    assert told in err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("engine", "h:1", "--timeout", "0"), "number of seconds"),
        (("web", "http://h", "--route", "other"), "original"),
        (("gateway", "http://h"), "engine"),
    ],
)
def test_wrong_arguments_are_a_usage_error(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], told: str
) -> None:
    """They are refused as those of every other command."""
    assert main(["conformance", *args]) == 2
    assert told in capsys.readouterr().err


async def test_the_key_may_be_in_a_file(good_engine: GoodEngine, tmp_path: Path) -> None:
    """Others on the machine can read command lines."""
    (tmp_path / "key").write_text(f"{KEY}\n")
    args = ("engine", good_engine.address, "--key", f"@{tmp_path / 'key'}", "--only", "R1")
    code, out, err = await conformance(*args)
    assert (code, "1 passed" in out) == (0, True), err


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for localhost with its key, in one file, which is its own authority."""
    place = tmp_path / "localhost.pem"
    public = tmp_path / "public.pem"
    command_line = f"{require('openssl')} req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -days 2"
    command_line += f" -addext subjectAltName=DNS:localhost -keyout {place} -out {public}"
    done = subprocess.run(shlex.split(command_line), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    with place.open("a") as file:
        file.write(public.read_text())
    return place


async def test_an_engine_is_reached_over_mutual_tls(good_engine: GoodEngine, certificate: Path) -> None:
    """The own certificate is shown and the authority trusted; without them the text thinks of TLS."""
    pem = await asyncio.to_thread(certificate.read_bytes)
    credentials = grpc.ssl_server_credentials([(pem, pem)], pem, require_client_auth=True)
    name = str(certificate)
    async with EngineProxy(good_engine.address, Honest(), credentials) as proxy:
        args = ("engine", proxy.target, "--key", KEY, "--only", "R1")
        with_all = await conformance(*args, "--ca-file", name, "--cert-file", name, "--key-file", name)
        without = await conformance(*args, "--timeout", "1")
    assert with_all[0] == 0, with_all
    assert without[0] == 3
    assert "--tls" in without[2]


async def test_a_gateway_is_reached_over_https(good_engine: GoodEngine, certificate: Path) -> None:
    """With its authority it is checked; without, the certificate is refused and that is said."""
    async with served(good_engine.address, HonestWeb(), certificate) as url:
        args = ("web", url, "--key", KEY, "--route", "original")
        code, out, err = await conformance(*args, "--ca-file", str(certificate))
        refused = await conformance(*args)
    assert code == 0, out + err
    assert refused[0] == 3
    assert "certificate" in refused[2]


async def test_list_needs_no_server() -> None:
    """Every check is told with its text."""
    code, out, _ = await conformance("web", "--route", "original", "--list")
    assert code == 0
    assert [check.id for check in checks_of("original") if check.text not in out] == []


async def test_a_restart_that_fails_leaves_the_crash_unchecked(good_engine: GoodEngine) -> None:
    """It is said what the command did, and the server is not blamed."""
    async with EngineProxy(good_engine.address, Honest()) as proxy:
        args = ("engine", proxy.target, "--key", KEY, "--only", "K1", "--restart", "exit 7")
        code, out, err = await conformance(*args)
    assert code == 0, err
    assert "--restart ended with exit code 7" in out


def report_of(*results: Result) -> Report:
    """Return a report of some results."""
    return Report("engine", "h:1", "conformance", results)


FAILED = Result(BY_ID["R2"], Outcome.FAILED, ("tool/start: done is expected; seen \x1b[31m\x00 nothing",), more=3)
IMPLIED = Result(BY_ID["R3"], Outcome.FAILED, ("approve/start: parked is expected; seen nothing",))


def test_a_terminal_gets_a_table_and_no_control_characters_of_the_server() -> None:
    """Texts of a server could move the cursor or rename the window."""
    out = io.StringIO()
    screen = Screen(out, terminal=True)
    screen.begin("engine at h:1")
    screen.played("text", 1, 2)
    screen.show(report_of(FAILED, IMPLIED, Result(BY_ID["T1"], Outcome.NOT_CHECKED, why="it needs --other-key")))
    text = out.getvalue()
    assert "\x1b[31m\x00" not in text
    assert "and 3 more" in text
    assert "May be a consequence of R2." in text
    assert "0 passed, 2 failed, 1 not checked" in text


def test_the_log_of_a_job_gets_lines_of_progress() -> None:
    """Where no terminal is a line tells now and then how far it is, and not each scene."""
    often, seldom = io.StringIO(), io.StringIO()
    for out, every in ((often, 0.0), (seldom, 60.0)):
        screen = Screen(out, terminal=False, line_every=every)
        screen.begin("engine at h:1")
        screen.played("text", 1, 2)
        screen.stop()
    assert (often.getvalue(), seldom.getvalue()) == ("1 of 2 scenes played\n", "")


def test_reports_for_machines_survive_what_a_server_says() -> None:
    """XML has no form for control characters, and JSON names what may be why."""
    report = report_of(FAILED, IMPLIED, Result(BY_ID["T1"], Outcome.NOT_CHECKED, why="it needs \x07 --other-key"))
    assert ET.fromstring(as_junit(report)).find(".//failure") is not None
    found = json.loads(as_json(report))
    assert found["summary"] == {"passed": 0, "failed": 2, "not_checked": 1}
    assert [check["outcome"] for check in found["checks"]] == ["failed", "failed", "not_checked"]
    assert [check["may_be_because_of"] for check in found["checks"]] == [["R3"], ["R2"], []]
    assert {key: type(value).__name__ for key, value in found["checks"][0].items()} == {
        "id": "str",
        "title": "str",
        "outcome": "str",
        "faults": "list",
        "more_faults": "int",
        "why": "str",
        "contract": "str",
        "place": "str",
        "may_be_because_of": "list",
    }
