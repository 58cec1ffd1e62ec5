"""ask, attach, answer and cancel, as processes against an engine on a real socket."""

import asyncio
import json

import grpc
import pytest

from dualclaw import BusyPolicy, RetryMode, Role, Run, RunState
from dualclaw.errors import EngineError
from dualclaw.events import (
    make_delta,
    make_done,
    make_error,
    make_reasoning,
    make_rewind,
    make_step,
    to_wire,
)


def done(content: str = "", stop_reason: str = "finished"):
    return make_done(message_id="m", conversation_id="c-7", content=content, stop_reason=stop_reason)


async def test_ask_puts_the_answer_on_stdout_and_everything_else_on_stderr(fake_engine, dualclaw):
    """A pipe gets the answer alone; reasoning, steps and the closing line stay beside it; exit code 0."""
    fake_engine.on(
        "Run",
        [
            make_reasoning("let me look"),
            make_step("skill", name="weather", args={"city": "上海"}, phase="start", index=0),
            make_step("skill", name="weather", args={"city": "上海"}, result="22°", phase="ok", index=0),
            make_delta("It is "),
            make_delta("22°."),
            done("It is 22°."),
        ],
    )
    ended = await dualclaw("ask", "--agent", "a1", "--conversation", "c-7", "--model", "m1", "--max-steps", "3",
                           "--retry-mode", "hold", "--on-busy", "queue", "--request-id", "x1",
                           "how", "warm?")  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.out == "It is 22°.\n"
    for expected in ("let me look", '▸ skill weather {"city": "上海"}', "✓ weather: 22°"):
        assert expected in ended.err
    assert ended.err.splitlines()[-1] == f"conversation c-7 · run {fake_engine.run_id} · finished"
    request = fake_engine.calls_of("Run")[0].request
    assert (request.agent, request.conversation_id, request.request_id, request.claw) == ("a1", "c-7", "x1", "cli")
    assert (request.options.model, request.options.max_steps) == ("m1", 3)
    assert request.options.retry_mode == RetryMode.RETRY_MODE_HOLD
    assert request.on_busy == BusyPolicy.BUSY_POLICY_QUEUE
    assert (request.message.role, request.message.parts[0].text) == (Role.ROLE_USER, "how warm?")


async def test_ask_streams_before_the_run_has_ended(fake_engine, dualclaw):
    """The first piece can be read while the engine is still at work."""
    go = asyncio.Event()
    fake_engine.on("Run", [make_delta("first "), go, make_delta("second"), done("first second")])
    process = await dualclaw.start("ask", "hi")
    assert await asyncio.wait_for(process.stdout.readexactly(6), 60) == b"first "
    go.set()
    ended = await dualclaw.finish(process)
    assert (ended.code, ended.out) == (0, "second\n")


async def test_ask_json_writes_one_wire_event_a_line(fake_engine, dualclaw):
    """Each line is to_wire of the event, also where the text would steer a terminal; stdin is the question."""
    fake_engine.on("Run", [make_delta("a\x9b2J\u2028b\n"), done("a\x9b2J\u2028b\n")])
    ended = await dualclaw("ask", "--json", "-", stdin="第一行\nsecond\n".encode())
    assert ended.code == 0, ended.err
    lines = ended.out.split("\n")
    assert lines.pop() == ""
    assert [json.loads(line) for line in lines] == [to_wire(event) for event in fake_engine.log]
    assert "\x9b" not in ended.out
    assert "\u2028" not in ended.out
    assert fake_engine.calls_of("Run")[0].request.message.parts[0].text == "第一行\nsecond"


async def test_an_answer_reaches_a_pipe_exactly(fake_engine, dualclaw):
    """What a program or file receives is the answer's own text; only a screen needs to be protected from it."""
    fake_engine.on("Run", [make_delta("a\u2028b\x1b[1m\u200f\u05e2\n"), done("a\u2028b\x1b[1m\u200f\u05e2\n")])
    ended = await dualclaw("ask", "hi")
    assert ended.out == "a\u2028b\x1b[1m\u200f\u05e2\n"


async def test_a_rewind_restarts_the_answer_in_a_pipe(fake_engine, dualclaw):
    """What was written stays, a line says that it no longer holds, and the right text follows whole."""
    fake_engine.on("Run", [make_delta("The cat"), make_rewind("The "), make_delta("dog"), done("The dog")])
    ended = await dualclaw("ask", "hi")
    assert ended.out == "The cat\n[the answer is restarted]\nThe dog\n"


async def test_a_terminal_shows_steps_and_text_on_lines_of_their_own_and_no_foreign_escapes(fake_engine, dualclaw):
    """On one screen nothing is garbled, and a title or clear-screen sequence of a model is shown, not obeyed."""
    fake_engine.on(
        "Run",
        [
            make_reasoning("hm"),
            make_delta("one\x1b]0;pwned\x07"),
            make_step("mcp", server="files\x1b[2J", name="read", args={"p": "\x1b[1A"}, phase="start", index=0),
            make_delta("two"),
            done("one\x1b]0;pwned\x07two"),
        ],
    )
    ended = await dualclaw.on_terminal("ask", "hi")
    assert ended.code == 0
    plain = ended.out.replace("\r\n", "\n")
    assert "\none␛]0;pwned␇\n" in plain
    assert "\x1b]0;" not in plain
    assert "\x1b[2J" not in plain
    assert "\x1b[1A" not in plain
    assert "files␛[2J/read" in plain
    assert "\ntwo\n" in plain
    assert "\x1b[2mhm" in plain, "reasoning is dim on a terminal"


async def test_a_failed_run_exits_1_with_its_text(fake_engine, dualclaw):
    """The diagnosis with its hint is on stderr, the text so far on stdout."""
    diagnosis = {"code": "model.auth", "severity": "error", "summary": "the key is refused", "hint": "set a key"}
    fake_engine.on("Run", [make_delta("so far"), make_error("the key is refused", diagnosis=diagnosis)])
    ended = await dualclaw("ask", "hi")
    assert (ended.code, ended.out) == (1, "so far\n")
    assert ended.err.startswith("✗ the key is refused\n  hint: set a key\n")
    assert ended.err.splitlines()[-1].endswith("· failed")


async def test_a_diagnosis_is_laid_out_in_one_language_and_says_its_cause_once(fake_engine, dualclaw):
    """Summary, detail and hint have a line each; a detail that the summary holds already is left out."""
    told = {"code": "model.unavailable", "severity": "error", "summary": "no endpoint: refused", "hint": "start it"}
    fake_engine.on("Run", [make_error("no endpoint: refused", diagnosis={**told, "detail": "refused"})])
    ended = await dualclaw("ask", "hi")
    assert ended.err.splitlines()[:-1] == ["✗ no endpoint: refused", "  hint: start it"]
    fake_engine.on("Run", [make_error("x", diagnosis={**told, "detail": "port 9\x1b[2J"})])
    ended = await dualclaw("ask", "hi")
    ended = await dualclaw("ask", "hi")
    assert ended.err.splitlines()[:-1] == ["✗ no endpoint: refused", "  port 9␛[2J", "  hint: start it"]
    fake_engine.on("Run", [make_error("bare")])
    ended = await dualclaw("ask", "hi")
    ended = await dualclaw("ask", "hi")
    assert ended.err.splitlines()[:-1] == ["✗ bare"]


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        ("price failed.", "✗ price failed."),
        ("The tool price timed out.", "✗ The tool price timed out."),
        ("prices are unknown", "✗ price: prices are unknown"),
        ("out of reach", "✗ price: out of reach"),
    ],
)
async def test_a_failed_tool_is_named_once(fake_engine, dualclaw, summary, shown):
    """One cross and one name, whether or not the diagnosis has the name in it."""
    diagnosis = {"code": "tool.failed", "severity": "error", "summary": summary, "detail": "503", "hint": "wait"}
    fake_engine.on("Run", [make_step("skill", name="price", phase="fail", index=0, diagnosis=diagnosis), done("")])
    ended = await dualclaw("ask", "hi")
    assert ended.err.splitlines()[:-1] == [shown, "  503", "  hint: wait"]


async def test_a_warning_beside_a_result_is_a_line_of_its_own(fake_engine, dualclaw):
    """The result stays; the warning follows with its hint, in the words of this program."""
    warning = {"code": "tool.slow", "severity": "warning", "summary": "took long", "hint": "ask less"}
    step = make_step("skill", name="price", phase="ok", result="5", index=0, diagnosis=warning)
    fake_engine.on("Run", [step, done("")])
    ended = await dualclaw("ask", "hi")
    assert ended.err.splitlines()[:-1] == ["✓ price: 5", "! took long", "  hint: ask less"]


async def test_an_answer_to_an_older_engine_exits_3_and_says_so(fake_engine, dualclaw):
    """An engine that does not serve Resume is neither broken nor a wrong address; trying again is not advised."""
    fake_engine.on("Resume", [grpc.StatusCode.UNIMPLEMENTED])
    ended = await dualclaw("resume", "r-1", "approve", "--id", "i")
    assert (ended.code, ended.out) == (3, "")
    assert f"refused: the engine at {fake_engine.target} does not serve Resume" in ended.err
    for misleading in ("no dualclaw engine", "INTERNAL", "Try again"):
        assert misleading not in ended.err


async def test_a_refusal_exits_3_and_says_what_to_do(fake_engine, dualclaw):
    """A busy conversation names the run and both ways on; nothing is on stdout and no traceback anywhere."""
    fake_engine.on("Run", [EngineError("CONVERSATION_BUSY", "a run is active", {"run_id": "r-9"})])
    ended = await dualclaw("ask", "hi")
    assert (ended.code, ended.out) == (3, "")
    assert "refused: a run is active (CONVERSATION_BUSY)" in ended.err
    assert "dualclaw attach r-9" in ended.err
    assert "Traceback" not in ended.err


async def test_no_engine_exits_4_and_says_how_to_start_one(fake_engine, dualclaw):
    """The address asked is in the text; --engine wins over the environment."""
    await fake_engine.stop()
    ended = await dualclaw("--engine", fake_engine.target, "ask", "hi")
    assert (ended.code, ended.out) == (4, "")
    assert f"no engine answers at {fake_engine.target}; start it with `dualclaw-server`" in ended.err


async def test_ctrl_c_cancels_the_run_and_shows_the_rest(fake_engine, dualclaw):
    """The first press asks the engine to end; what it still says is shown; exit code 130."""
    fake_engine.on("Run", [make_delta("so "), fake_engine.cancelled, make_delta("far"), done("so far", "cancelled")])
    process = await dualclaw.start("ask", "hi")
    await asyncio.wait_for(process.stdout.readexactly(3), 60)
    dualclaw.press_ctrl_c(process)
    ended = await dualclaw.finish(process)
    assert (ended.code, ended.out) == (130, "far\n"), ended.err
    assert fake_engine.calls_of("Cancel")[0].request.run_id == fake_engine.run_id
    assert ended.err.splitlines()[-1].endswith("· cancelled")
    assert "not cancelled" not in ended.err


async def test_a_second_ctrl_c_quits_at_once(fake_engine, dualclaw):
    """An engine that does not end the run cannot hold the terminal; the way back to the run is shown."""
    fake_engine.on("Run", [make_delta("so "), "hang"])
    process = await dualclaw.start("ask", "hi")
    await asyncio.wait_for(process.stdout.readexactly(3), 60)
    dualclaw.press_ctrl_c(process)
    await fake_engine.wait_for_call("Cancel")
    dualclaw.press_ctrl_c(process)
    ended = await dualclaw.finish(process)
    assert ended.code == 130
    assert f"dualclaw attach {fake_engine.run_id}" in ended.err
    assert "Traceback" not in ended.err


async def test_ctrl_c_leaves_an_attached_run_alone(fake_engine, dualclaw):
    """Whoever looks on does not end what others have started."""
    fake_engine.on("Attach", [make_delta("a", seq=1), "hang"])
    process = await dualclaw.start("attach", fake_engine.run_id)
    await asyncio.wait_for(process.stdout.readexactly(1), 60)
    dualclaw.press_ctrl_c(process)
    ended = await dualclaw.finish(process)
    assert ended.code == 130
    assert fake_engine.calls_of("Cancel") == []


async def test_attach_shows_a_run_from_the_position_asked_for(fake_engine, dualclaw):
    """Only what comes after is shown, the whole text of the end does not repeat it, and the flags are passed on."""
    fake_engine.log = [
        make_delta("Hel", seq=1),
        make_delta("lo", seq=2),
        make_done(message_id="m", conversation_id="c-7", content="Hello", seq=3),
    ]
    ended = await dualclaw("attach", fake_engine.run_id, "--after", "1", "--wait")
    assert (ended.code, ended.out) == (0, "lo\n"), ended.err
    request = fake_engine.calls_of("Attach")[0].request
    assert (request.run_id, request.after_seq, request.wait) == (fake_engine.run_id, 1, True)


async def test_a_lost_stream_is_taken_up_without_a_trace_in_the_answer(fake_engine, dualclaw):
    """The network breaks in mid-answer; the output is as if it had not."""
    read = asyncio.Event()
    fake_engine.on("Run", [make_delta("Hel"), read, "cut", make_delta("lo"), done("Hello")])
    process = await dualclaw.start("ask", "hi")
    assert await asyncio.wait_for(process.stdout.readexactly(3), 60) == b"Hel"
    read.set()
    ended = await dualclaw.finish(process)
    assert (ended.code, ended.out) == (0, "lo\n"), ended.err


async def test_a_reader_that_leaves_is_no_reason_for_a_traceback(fake_engine, dualclaw):
    """``dualclaw ask ... | head`` ends quietly."""
    go = asyncio.Event()
    fake_engine.on("Run", [make_delta("x\n"), go, *[make_delta("y" * 1000 + "\n")] * 200, done("never compared")])
    process = await dualclaw.start("ask", "hi")
    await asyncio.wait_for(process.stdout.readline(), 60)
    process.stdout._transport.close()
    go.set()
    err = await asyncio.wait_for(process.stderr.read(), 60)
    assert await asyncio.wait_for(process.wait(), 60) == 141
    assert err == b""


async def test_cancel_prints_the_state_the_run_is_in(fake_engine, dualclaw):
    """The reason is passed on; an unknown run is a refusal."""
    fake_engine.runs["r-1"] = Run(id="r-1", state=RunState.RUN_STATE_RUNNING)
    ended = await dualclaw("cancel", "r-1", "--reason", "enough")
    assert (ended.code, ended.out) == (0, "run r-1: running\n")
    assert fake_engine.calls_of("Cancel")[0].request.reason == "enough"
    fake_engine.refuse["Cancel"] = EngineError("UNKNOWN_RUN", "no run r-2")
    ended = await dualclaw("cancel", "r-2")
    assert (ended.code, ended.out) == (3, "")
    assert "no run r-2 (UNKNOWN_RUN)" in ended.err
    assert "Check the id" in ended.err, "the engine's hint"


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-"])
@pytest.mark.parametrize("args", [("ask", "hi"), ("run", "purge", "r")])
async def test_a_stream_that_was_closed_at_start_is_no_reason_for_a_traceback(fake_engine, dualclaw, args, redirection):
    """Services and cron start programs so: there is nothing to read, or nobody to write to."""
    fake_engine.on("Run", [make_delta("hi"), done("hi")])
    ended = await dualclaw.redirected(redirection, *args)
    assert ended.code == (0 if args[0] == "ask" else 2)
    assert "Traceback" not in ended.err
    assert ended.out == ("hi\n" if args[0] == "ask" and redirection != ">&-" else "")


async def test_an_output_that_takes_no_more_is_a_line_and_no_traceback(fake_engine, dualclaw):
    """A full disk, say; also where the answer would have been written at the very end."""
    fake_engine.on("Run", [make_delta("hi"), done("hi")])
    for args in (("ask", "hi"), ("doctor",)):
        ended = await dualclaw.redirected(">/dev/full", *args)
        assert ended.code == 2
        assert ended.err.splitlines()[-1].startswith("dualclaw: the input cannot be read or the output not written: ")
