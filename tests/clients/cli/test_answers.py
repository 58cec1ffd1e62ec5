"""What a run asks people: shown with how to answer, answered by options, and asked right there on a terminal."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from dualclaw import DecisionAction, InterruptItem, InterruptKind, RememberScope, Run, RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw.events import make_delta, make_done, make_interrupt, make_step
from dualclaw_clients.cli_answers import args_problem

ACTIONS = [number for number in DecisionAction.values() if number]
APPROVAL = InterruptItem(
    id="call_1",
    kind=InterruptKind.INTERRUPT_KIND_APPROVAL,
    tool_name="rm",
    args_json='{"p": "/"}',
    prompt="Sure?",
    allowed_actions=ACTIONS,
    args_hash="h1",
)
SECOND = InterruptItem(
    id="call 2#2",
    kind=InterruptKind.INTERRUPT_KIND_APPROVAL,
    tool_name="mv",
    prompt="And this?",
    allowed_actions=ACTIONS[:2],
    args_hash="h2",
)
QUESTION = InterruptItem(
    id="call_3",
    kind=InterruptKind.INTERRUPT_KIND_QUESTION,
    prompt="How many?",
    allowed_actions=[DecisionAction.DECISION_ACTION_RESPOND, DecisionAction.DECISION_ACTION_SKIP],
    response_schema_json='{"type": "integer"}',
)


def done(content: str = "", stop_reason: str = "finished"):
    return make_done(message_id="m", conversation_id="c-7", content=content, stop_reason=stop_reason)


@pytest.fixture
def parked(fake_engine):
    """Makes the fake's run one that asks these questions, from its first segment on."""

    def park(*items: InterruptItem) -> None:
        fake_engine.on("Run", [make_interrupt(items), done(stop_reason="interrupted")])
        fake_engine.runs[fake_engine.run_id] = Run(
            id=fake_engine.run_id, interrupts=items, state=RunState.RUN_STATE_INTERRUPTED, last_seq=2
        )

    return park


def decisions(fake_engine, number: int = 0):
    """The decisions of a call of Resume, as far as they say something."""
    request = fake_engine.calls_of("Resume")[number].request
    return [(d.interrupt_id, DecisionAction.Name(d.action)[16:].lower(), d.args_hash) for d in request.decisions]


async def test_questions_exit_5_with_their_id_arguments_answers_and_the_command_that_answers(fake_engine, dualclaw):
    """Nothing has to be looked up: what is asked, what can be said, and a command that can be pasted into a shell."""
    waiting = {"code": "approval.required", "severity": "warning", "summary": "Sure?", "hint": "Approve it"}
    fake_engine.on(
        "Run",
        [
            make_step("skill", name="rm", phase="start", index=0, diagnosis=waiting),
            make_interrupt([APPROVAL, SECOND, QUESTION]),
            done(stop_reason="interrupted"),
        ],
    )
    ended = await dualclaw("ask", "hi")
    assert (ended.code, ended.out) == (5, ""), ended.err
    run = fake_engine.run_id
    assert ended.err.splitlines()[:-1] == [
        "▸ skill rm {}",
        '? approval of rm {"p": "/"}: Sure?',
        "  id:      call_1",
        "  answers: approve | reject | edit --args JSON | skip | respond --response TEXT",
        f"  answer:  dualclaw resume {run} approve --id call_1",
        "? approval of mv {}: And this?",
        "  id:      call 2#2",
        "  answers: approve | reject",
        f"  answer:  dualclaw resume {run} approve --id 'call 2#2'",
        "? question: How many?",
        "  id:      call_3",
        "  answers: respond --response TEXT | skip",
        '  schema:  {"type": "integer"}',
        f"  answer:  dualclaw resume {run} respond --response TEXT --id call_3",
    ]


async def test_the_only_question_that_takes_the_action_needs_no_id(fake_engine, dualclaw, parked):
    """The answer goes to it, bound to the arguments the engine shows, and the next segment is streamed."""
    parked(APPROVAL, QUESTION)
    fake_engine.on("Resume", [make_delta("kept"), done("kept")])
    ended = await dualclaw("resume", fake_engine.run_id, "reject", "--comment", "no", "--request-id", "x")
    assert (ended.code, ended.out) == (0, "kept\n"), ended.err
    request = fake_engine.calls_of("Resume")[0].request
    assert decisions(fake_engine) == [("call_1", "reject", "h1")]
    assert (request.decisions[0].comment, request.request_id) == ("no", "x")


async def test_several_questions_need_an_id_or_all(fake_engine, dualclaw, parked):
    """What might be meant is listed and nothing is answered; --all answers those that take the action, and no other."""
    parked(APPROVAL, SECOND, QUESTION)
    fake_engine.on("Resume", [make_interrupt([QUESTION]), done(stop_reason="interrupted")])
    ended = await dualclaw("resume", fake_engine.run_id, "approve")
    assert (ended.code, ended.out) == (2, "")
    assert "2 open questions take approve: name one by --id, or use --all" in ended.err
    assert "--id call_1" in ended.err
    assert fake_engine.calls_of("Resume") == []
    ended = await dualclaw("resume", fake_engine.run_id, "approve", "--all", "--remember", "conversation")
    assert ended.code == 5, ended.err
    assert decisions(fake_engine, -1) == [("call_1", "approve", "h1"), ("call 2#2", "approve", "h2")]
    remembered = {d.remember for d in fake_engine.calls_of("Resume")[-1].request.decisions}
    assert remembered == {RememberScope.REMEMBER_SCOPE_CONVERSATION}
    assert "--id call_3" in ended.err


async def test_edit_is_for_one_question_only(fake_engine, dualclaw, parked):
    """The same arguments for two calls are never what is meant."""
    parked(APPROVAL, InterruptItem(id="x", tool_name="rm", allowed_actions=ACTIONS))
    ended = await dualclaw("resume", fake_engine.run_id, "edit", "--all", "--args", "{}")
    assert ended.code == 2
    assert "edit answers one question: name it by --id" in ended.err
    assert fake_engine.calls_of("Resume") == []


async def test_ids_arguments_responses_and_history_edits_are_passed_on_as_given(fake_engine, dualclaw):
    """Text becomes a JSON string, JSON stays as it is, an id given twice is answered once."""
    fake_engine.on("Resume", [done()])
    args = '{"n": 9007199254740993, "s": "上海"}'
    await dualclaw("resume", "r-1", "edit", "--id", "a", "--args", args)
    await dualclaw("resume", "r-1", "respond", "--id", "a", "--id", "a", "--response", 'say "yes"')
    await dualclaw("resume", "r-1", "respond", "--id", "a", "--response-json", '{"n": 1}')
    edit = {"append": {"role": "ROLE_SYSTEM", "parts": [{"text": "be brief"}]}}
    ended = await dualclaw("resume", "r-1", "--history-edit", json.dumps(edit), "--history-edit",
                           '{"remove_message_id": "m-1"}')  # fmt: skip
    assert ended.code == 0, ended.err
    edited, worded, given, history = (call.request for call in fake_engine.calls_of("Resume"))
    assert edited.decisions[0].args_json == args
    assert [d.response_json for d in worded.decisions] == ['"say \\"yes\\""']
    assert given.decisions[0].response_json == '{"n": 1}'
    assert (len(history.decisions), history.history_edits[0].append.parts[0].text) == (0, "be brief")
    assert history.history_edits[1].remove_message_id == "m-1"
    assert fake_engine.calls_of("GetRun") == []


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (EngineError("ALREADY_ANSWERED", "question 'a' has its answer already"), "dualclaw attach"),
        (EngineError("UNKNOWN_INTERRUPT", "the run asks no question 'a'"), "GetRun names the questions"),
        (FieldError({"decisions[0].args_json": "must be one object"}), "decisions[0].args_json: must be one object"),
    ],
)
async def test_a_refused_answer_exits_3_with_the_engines_words(fake_engine, dualclaw, refusal, told):
    """What was wrong and what can be done is on stderr; nothing was answered."""
    fake_engine.on("Resume", [refusal])
    ended = await dualclaw("resume", "r-1", "approve", "--id", "a")
    assert (ended.code, ended.out) == (3, "")
    assert f"({refusal.reason})" in ended.err
    assert told in ended.err or refusal.hint in ended.err


async def test_a_run_that_waits_for_nothing_is_a_refusal(fake_engine, dualclaw):
    """The state the run is in is named, and no answer is sent."""
    fake_engine.runs["r-1"] = Run(id="r-1", state=RunState.RUN_STATE_SUCCEEDED)
    ended = await dualclaw("resume", "r-1", "approve")
    assert (ended.code, ended.out) == (3, "")
    assert "run r-1 waits for no answer, it is succeeded (RUN_NOT_INTERRUPTED)" in ended.err
    assert fake_engine.calls_of("Resume") == []


async def test_a_conversation_that_waits_for_an_approval_shows_it(fake_engine, dualclaw, parked):
    """A question asked meanwhile is refused with what must be decided first, and how."""
    parked(APPROVAL)
    fake_engine.on("Run", [EngineError("CONVERSATION_BUSY", "a run is active", {"run_id": fake_engine.run_id})])
    await dualclaw("ask", "hi")
    ended = await dualclaw("ask", "--conversation", "c-7", "hi again")
    assert (ended.code, ended.out) == (3, "")
    assert f"dualclaw resume {fake_engine.run_id} approve --id call_1" in ended.err


class Screen:
    """The program on a pseudo terminal, and somebody who reads and types."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self.text = ""
        self._master = master
        self._read = 0

    async def wait_for(self, text: str) -> None:
        """Read until the screen shows this after what was waited for before."""
        async with asyncio.timeout(60):
            while text not in self.text[self._read :]:
                data = await asyncio.to_thread(os.read, self._master, 65_536)
                self.text += data.decode()
        self._read = self.text.index(text, self._read) + len(text)

    async def type(self, prompt: str, line: str) -> None:
        """Wait for a prompt and type a line."""
        await self.wait_for(prompt)
        os.write(self._master, line.encode())

    async def code(self) -> int:
        """Read what is left; returns the exit code."""
        async with asyncio.timeout(60):
            rest = asyncio.to_thread(_read_all, self._master)
            self.text += (await rest).decode()
            return await self.process.wait()


def _read_all(fd: int) -> bytes:
    pieces = []
    while True:
        try:
            pieces.append(os.read(fd, 65_536))
        except OSError:  # EIO: the last process has closed the terminal
            return b"".join(pieces)


@pytest.fixture
def on_screen(dualclaw) -> Callable[..., object]:
    """Opens the program with stdin, stdout and stderr on one terminal."""

    @asynccontextmanager
    async def open_one(*args: str) -> AsyncIterator[Screen]:
        master, slave = os.openpty()
        process = await asyncio.create_subprocess_exec(
            *dualclaw.command(*args), stdin=slave, stdout=slave, stderr=slave, env=dualclaw.env, start_new_session=True
        )
        os.close(slave)
        try:
            yield Screen(process, master)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(master)

    return open_one


async def test_a_terminal_asks_right_there_and_goes_on(fake_engine, on_screen, parked):
    """Each question in turn, with what its answer needs; one call of Resume, bound to what was shown."""
    parked(APPROVAL, SECOND, QUESTION)
    fake_engine.on("Resume", [make_delta("all done"), done("all done")])
    async with on_screen("ask", "hi") as screen:
        await screen.type("(1 of 3)", "")
        await screen.type("[a]pprove [r]eject [e]dit [s]kip [w]rite the result yourself (empty: later): ", "e\n")
        await screen.type("one JSON object (empty: back): ", "[1]\n")
        await screen.type("not one object such as {}", "")
        await screen.type("one JSON object (empty: back): ", '{"p": "/tmp/上海"}\n')
        await screen.type("[a]pprove [r]eject (empty: later): ", "what\n")
        await screen.type("[a]pprove [r]eject (empty: later): ", "reject\n")
        await screen.type("why (may be empty): ", "too much\n")
        await screen.type("your answer (empty: later, /skip to leave it unanswered): ", "12\n")
        assert await screen.code() == 0, screen.text
    assert "all done" in screen.text
    assert "dualclaw resume" not in screen.text
    assert decisions(fake_engine) == [("call_1", "edit", "h1"), ("call 2#2", "reject", "h2"), ("call_3", "respond", "")]
    first, second, third = fake_engine.calls_of("Resume")[0].request.decisions
    assert (first.args_json, second.comment, third.response_json) == ('{"p": "/tmp/上海"}', "too much", "12")


async def test_what_is_left_open_is_not_asked_again_and_exits_5(fake_engine, on_screen, parked):
    """An empty line is no answer: the others are given, and the rest is shown with the command that answers it."""
    parked(APPROVAL, SECOND)
    fake_engine.on("Resume", [make_interrupt([SECOND]), done(stop_reason="interrupted")])
    async with on_screen("ask", "hi") as screen:
        await screen.type("(empty: later): ", "a\n")
        await screen.type("(empty: later): ", "\n")
        assert await screen.code() == 5, screen.text
    assert f"dualclaw resume {fake_engine.run_id} approve --id 'call 2#2'" in screen.text
    assert decisions(fake_engine) == [("call_1", "approve", "h1")]


async def test_what_was_typed_before_a_question_is_no_answer(fake_engine, on_screen):
    """A line meant for something else, typed while the answer streamed, approves nothing."""
    go = asyncio.Event()
    fake_engine.on("Run", [make_delta("wait"), go, make_interrupt([APPROVAL]), done("wait", "interrupted")])
    async with on_screen("ask", "hi") as screen:
        await screen.type("wait", "approve\n")
        await screen.wait_for("approve")
        go.set()
        await screen.type("(empty: later): ", "\n")
        assert await screen.code() == 5, screen.text
    assert fake_engine.calls_of("Resume") == []


async def test_long_arguments_are_edited_in_the_persons_editor(fake_engine, on_screen, dualclaw, parked, tmp_path):
    """It gets them laid out; what it leaves is checked like what is typed, and an editor that fails sends nothing."""
    editor = tmp_path / "editor.py"
    seen = tmp_path / "seen"
    editor.write_text(
        "import json, pathlib, sys\n"
        "seen, file = map(pathlib.Path, sys.argv[1:])\n"
        "with seen.open('a') as out:\n"
        "    out.write(json.dumps(file.read_text()) + '\\n')\n"
        "turn = len(seen.read_text().splitlines())\n"
        "sys.exit(3) if turn == 1 else file.write_text('[1]' if turn == 2 else '{\"p\": 9007199254740993}')\n"
    )
    dualclaw.env |= {"VISUAL": f"{sys.executable} {editor} {seen}"}
    parked(APPROVAL)
    fake_engine.on("Resume", [done("ok")])
    async with on_screen("ask", "hi") as screen:
        await screen.type("(empty: later): ", "e\n")
        await screen.type("(empty: back, /edit: in your editor): ", "/edit\n")
        await screen.wait_for("the editor ended with exit code 3")
        await screen.type("(empty: later): ", "e\n")
        await screen.type("/edit: in your editor): ", "/edit\n")
        await screen.wait_for("not one object")
        await screen.type("/edit: in your editor): ", "/edit\n")
        assert await screen.code() == 0, screen.text
    assert fake_engine.calls_of("Resume")[0].request.decisions[0].args_json == '{"p": 9007199254740993}'
    laid_out = '{\n  "p": "/"\n}\n'
    assert [json.loads(line) for line in seen.read_text().splitlines()] == [laid_out, laid_out, "[\n  1\n]\n"]


async def test_an_answer_to_an_expired_question_is_told_as_that(fake_engine, on_screen):
    """Nobody was faster: the time was over. The run is followed all the same."""
    late = InterruptItem()
    late.CopyFrom(APPROVAL)
    late.expire_time.FromSeconds(1)
    fake_engine.on("Run", [make_interrupt([late]), done(stop_reason="interrupted")])
    fake_engine.on("Resume", [EngineError("ALREADY_ANSWERED", "it has its answer")])
    fake_engine.on("Attach", [make_delta("went on", seq=3), done("went on")])
    async with on_screen("ask", "hi") as screen:
        await screen.type("(empty: later): ", "a\n")
        await screen.wait_for("the question has expired")
        assert await screen.code() == 0, screen.text


async def test_different_answers_are_given_together(fake_engine, dualclaw):
    """Each --decision is a whole answer; short and full names of actions are taken, and all go in one call."""
    fake_engine.on("Resume", [done("ok")])
    first = {"interrupt_id": "a", "action": "edit", "args_json": '{"n": 1}', "args_hash": "h"}
    second = {"interruptId": "b", "action": "DECISION_ACTION_REJECT", "comment": "no"}
    ended = await dualclaw("resume", "r-1", "--decision", json.dumps(first), "--decision", json.dumps(second))
    assert ended.code == 0, ended.err
    assert decisions(fake_engine) == [("a", "edit", "h"), ("b", "reject", "")]


async def test_an_answer_that_does_not_fit_is_asked_for_again(fake_engine, on_screen, parked):
    """The engine's objection is shown with its field, and the person may correct it."""
    parked(APPROVAL)
    fake_engine.on("Resume", [FieldError({"decisions[0].args_json": "'p' is a required property"})])
    fake_engine.on("Resume", [done("ok")])
    async with on_screen("ask", "hi") as screen:
        await screen.type("(empty: later): ", "e\n")
        await screen.type("(empty: back): ", "{}\n")
        await screen.wait_for("'p' is a required property")
        await screen.type("(empty: later): ", "a\n")
        assert await screen.code() == 0, screen.text
    assert decisions(fake_engine, 1) == [("call_1", "approve", "h1")]


async def test_who_was_slower_is_told_and_sees_how_it_goes_on(fake_engine, on_screen, parked):
    """Answered in another channel meanwhile: no error, the run is followed from where it was."""
    parked(APPROVAL)
    fake_engine.on("Resume", [EngineError("ALREADY_ANSWERED", "it has its answer")])
    fake_engine.on("Attach", [make_delta("by another", seq=3), done("by another")])
    async with on_screen("ask", "hi") as screen:
        await screen.type("(empty: later): ", "a\n")
        await screen.wait_for("somebody else has answered")
        await screen.wait_for("by another")
        assert await screen.code() == 0, screen.text
    request = fake_engine.calls_of("Attach")[0].request
    assert (request.run_id, request.after_seq, request.wait) == (fake_engine.run_id, 2, True)


async def test_ctrl_c_at_a_question_leaves_the_run_waiting(fake_engine, on_screen, parked):
    """Exit code 130, no answer, no cancel; the way back is on the screen."""
    parked(APPROVAL)
    async with on_screen("ask", "hi") as screen:
        await screen.wait_for("(empty: later): ")
        screen.process.send_signal(signal.SIGINT)
        assert await screen.code() == 130
    assert f"dualclaw resume {fake_engine.run_id}" in screen.text
    assert "Traceback" not in screen.text
    assert fake_engine.calls_of("Resume") == fake_engine.calls_of("Cancel") == []


async def test_resume_without_an_action_asks_on_a_terminal(fake_engine, on_screen, parked):
    """The way back to a run that was left: its open questions are shown and asked; end of input leaves them open."""
    parked(QUESTION)
    fake_engine.on("Resume", [done("12")])
    async with on_screen("resume", fake_engine.run_id) as screen:
        await screen.wait_for("? question: How many?")
        await screen.type("unanswered): ", "\x04")
        assert await screen.code() == 5, screen.text
    async with on_screen("resume", fake_engine.run_id) as screen:
        await screen.type("unanswered): ", "/skip\n")
        assert await screen.code() == 0, screen.text
    assert decisions(fake_engine) == [("call_3", "skip", "")]


async def test_no_input_never_asks(fake_engine, on_screen, parked):
    """For scripts that happen to have a terminal."""
    parked(APPROVAL)
    async with on_screen("ask", "--no-input", "hi") as screen:
        assert await screen.code() == 5
    assert "(empty: later)" not in screen.text
    assert "--id call_1" in screen.text


def test_arguments_are_one_object():
    """What is wrong is said before anything is sent."""
    assert args_problem('{"a": 1}') == ""
    assert "not one object" in args_problem("[]")
    assert "not JSON" in args_problem("{")
    assert "not JSON" in args_problem("[" * 100_000)
