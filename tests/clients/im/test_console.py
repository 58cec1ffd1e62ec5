"""The console claw as people use it: a process with a pipe, a file or a terminal."""

import asyncio
import contextlib
import os
import pty
import signal
import sys
from dataclasses import dataclass

import pytest

from dualclaw.errors import EngineError
from dualclaw_clients.im.__main__ import main
from dualclaw_clients.im.app import open_relay
from dualclaw_clients.im.connector import SendError
from dualclaw_clients.im.console import MAX_LINE, ConsoleConnector, LineTooLong, read_lines, visible
from dualclaw_clients.im.settings import RelaySettings
from dualclaw_clients.settings import ImSettings, variables_of


@dataclass
class Ended:
    """How a process ended."""

    code: int
    output: str
    errors: str


def environment(**variables: str) -> dict[str, str]:
    """The environment without settings that a developer may have."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DUALCLAW_", "IM_"))}
    return kept | variables


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dualclaw_clients.im", *arguments]


async def run_program(text: str, *arguments: str, **variables: str) -> Ended:
    """Run the program with a pipe to its end."""
    process = await asyncio.create_subprocess_exec(
        *command("console", *arguments), stdin=-1, stdout=-1, stderr=-1, env=environment(**variables)
    )
    output, errors = await asyncio.wait_for(process.communicate(text.encode()), 100)
    return Ended(process.returncode or 0, output.decode(), errors.decode())


@pytest.fixture
def talk(fake_engine, tmp_path):
    """Lets a console talk in this process: input from a file, output to one; returns the console and the output."""

    async def run(text: bytes, *, state: str = ":memory:", output: int | None = None) -> tuple[ConsoleConnector, str]:
        (tmp_path / "in").write_bytes(text)
        settings = ImSettings(engine=fake_engine.target)
        with (tmp_path / "in").open() as source, (tmp_path / "out").open("w+") as target:
            console = ConsoleConnector(source.fileno(), target.fileno() if output is None else output)
            async with asyncio.timeout(60):
                try:
                    async with open_relay(settings, [console], state=state) as relay:
                        await relay.listen()
                finally:
                    target.seek(0)
                    printed = target.read()
        return console, printed

    return run


async def test_each_piped_line_is_answered_before_the_end(answer, fake_engine):
    """Lines are messages of one conversation; the program ends when all are answered, whatever the gate says."""
    answer("one", 0.2)
    answer("two\nlines")
    answer("三")
    ended = await run_program(
        "first\r\n\nsecond\n第三", DUALCLAW_ENGINE=fake_engine.target, IM_USE_ENGINE_CORE="off", IM_LEGACY_URL=""
    )
    assert (ended.code, ended.output, ended.errors) == (0, "one\ntwo\nlines\n三\n", "")
    requests = [call.request for call in fake_engine.calls_of("Run")]
    assert [request.message.parts[0].text for request in requests] == ["first", "second", "第三"]
    assert [request.conversation_id for request in requests] == ["", *[fake_engine.conversation_id] * 2]
    assert len({request.request_id for request in requests}) == 3
    assert {request.claw for request in requests} == {"im_console"}


async def test_an_engine_out_of_reach_is_one_text_and_exit_code_1(fake_engine):
    """No traceback: what is wrong, and that not everything was answered."""
    await fake_engine.stop()
    ended = await run_program("hi\n", "--engine", fake_engine.target)
    assert (ended.code, ended.errors) == (1, "")
    assert fake_engine.target in ended.output


async def test_a_wrong_setting_is_a_sentence_and_exit_code_2():
    """The variable is named; nobody reads a traceback."""
    ended = await run_program("hi\n", DUALCLAW_ENGINE="nonsense")
    assert (ended.code, ended.output) == (2, "")
    assert "DUALCLAW_ENGINE: must be HOST:PORT" in ended.errors
    assert "Traceback" not in ended.errors


def test_a_state_file_that_cannot_be_is_a_sentence_and_exit_code_2(capsys):
    """The path is named."""
    assert main(["console", "--state", "/dev/null/x"]) == 2
    assert "/dev/null/x" in capsys.readouterr().err


def test_help_and_version_say_what_is_installed_and_what_can_be_set(capsys):
    """Every variable is listed with its meaning; the version is one line; neither starts anything."""
    for arguments in (["--help"], ["--version"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    printed = capsys.readouterr().out
    for name in variables_of(RelaySettings):
        assert f"\n  {name} " in printed
    assert all(field.description for field in RelaySettings.model_fields.values())
    assert printed.splitlines()[-1].startswith("dualclaw-im ")


@pytest.mark.parametrize("arguments", [[], ["console", "--engine"], ["console", "--engine", "nonsense"], ["telex"]])
def test_wrong_arguments_are_a_sentence_and_exit_code_2(arguments, capsys):
    """The usage is shown, with what is wrong."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: dualclaw-im" in capsys.readouterr().err


async def test_ctrl_c_ends_at_once_although_a_read_is_blocked(fake_engine, answer):
    """The thread that waits for the next line does not keep the program alive."""
    answer("ok")
    process = await asyncio.create_subprocess_exec(
        *command("console", "--engine", fake_engine.target), stdin=-1, stdout=-1, stderr=-1, env=environment()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hi\n")
    await process.stdin.drain()
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ok\n"
    await asyncio.sleep(0.2)  # until it waits for the next line
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 130
    _, errors = await process.communicate()
    assert errors == b""


async def test_no_input_is_no_error(talk):
    """An empty file ends the console at once."""
    console, printed = await talk(b"")
    assert (printed, console.unanswered) == ("", 0)


async def test_a_state_file_keeps_the_conversation(talk, answer, fake_engine, tmp_path):
    """With a state file the next start goes on where the last ended; without one it begins anew."""
    answer("ok")
    await talk(b"one\n", state=str(tmp_path / "s"))
    await talk(b"two\n", state=str(tmp_path / "s"))
    await talk(b"three\n")
    conversations = [call.request.conversation_id for call in fake_engine.calls_of("Run")]
    assert conversations == ["", fake_engine.conversation_id, ""]


async def test_media_is_printed_as_kind_and_address(talk, answer):
    """A terminal shows no image, so it shows where it is."""
    answer('<img src="https://example.com/a.png">')
    _, printed = await talk(b"draw\n")
    assert printed == "[image] https://example.com/a.png\n"


async def test_a_refusal_does_not_end_the_console(talk, fake_engine, answer):
    """The next line is tried; that one went unanswered is counted for the exit code."""
    fake_engine.on("Run", [EngineError("QUOTA_EXCEEDED", "too many")])
    answer("ok")
    console, printed = await talk(b"one\ntwo\n")
    assert console.unanswered == 1
    assert "too many" in printed
    assert printed.endswith("ok\n")


async def test_a_line_without_end_is_refused(talk, answer, fake_engine):
    """A file that is no text is not read into memory; the line before it is answered."""
    answer("ok")
    with pytest.raises(LineTooLong, match="longer than"):
        await talk(b"hi\n" + b"x" * 2 * MAX_LINE)
    assert len(fake_engine.calls_of("Run")) == 1


async def test_a_reader_that_is_gone_ends_the_console(talk, fake_engine, answer):
    """Behind ``head`` no further question is asked that nobody will see answered."""
    answer("ok")
    read, write = os.pipe()
    os.close(read)
    try:
        with pytest.raises(SendError, match="standard output"):
            await talk(b"one\ntwo\nthree\n", output=write)
    finally:
        os.close(write)
    assert len(fake_engine.calls_of("Run")) == 1


async def test_a_terminal_gets_a_prompt_and_no_control_characters(fake_engine, answer):
    """An answer cannot retitle or clear the reader's terminal; a person sees when it is their turn."""
    answer("a\x1b]0;title\x07b\x9b2J\r\nc\td")
    control, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *command("console", "--engine", fake_engine.target), stdin=terminal, stdout=terminal, env=environment()
    )
    os.close(terminal)
    try:
        shown = await _read_until(control, "> ")
        os.write(control, b"hi\n")
        shown += await _read_until(control, "> ")
        os.write(control, b"\x04")
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        os.close(control)
    assert shown.replace("\r\n", "\n") == "> hi\na␛]0;title␇b\ufffd2J\nc\td\n> "


async def _read_until(fd: int, end: str) -> str:
    data = b""
    async with asyncio.timeout(60):
        while not data.decode(errors="replace").endswith(end):
            data += await asyncio.to_thread(os.read, fd, 4096)
    return data.decode()


def test_visible_leaves_ordinary_text_alone():
    """Only control characters are pictured; line feeds and tabs stay, a lone CR cannot overwrite a line."""
    assert visible("中文 é 😀\n\tx\r\n") == "中文 é 😀\n\tx\n"
    assert visible("safe\rrm\x00\x7f\x85") == "safe␍rm␀␡\ufffd"


async def test_a_character_cut_by_two_reads_is_whole():
    """Bytes arrive as they like; lines are made of characters, and only LF ends one."""
    read, write = os.pipe()
    data = "中\u2028文\r\nz".encode()
    lines = []

    async def feed() -> None:
        for byte in data:
            os.write(write, bytes([byte]))
            await asyncio.sleep(0.01)  # until it has been read
        os.write(write, b"\xff")
        os.close(write)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group, contextlib.aclosing(read_lines(read)) as stream:
        group.create_task(feed())
        lines.extend([line async for line in stream])
    os.close(read)
    assert lines == ["中\u2028文", "z\ufffd"]


async def test_unreadable_input_is_an_error():
    """A closed descriptor ends reading with the system's error instead of silence."""
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    async with contextlib.aclosing(read_lines(read)) as stream:
        with pytest.raises(OSError, match="descriptor"):
            await anext(stream)
