"""``dualclaw run show|retry|release|purge``, as processes."""

import asyncio
import json
import os
from collections.abc import AsyncIterator

import pytest

from dualclaw import (
    Error,
    FrameInfo,
    InspectRunResponse,
    InterruptItem,
    InterruptKind,
    OpenCall,
    Phase,
    PurgeRunRequest,
    ReleaseRunRequest,
    RetryRunRequest,
    Run,
    RunState,
)
from dualclaw.errors import EngineError
from dualclaw_clients.engine_client import EngineClient, NotServed
from tests.clients.cli.conftest import CommandLine
from tests.clients.cli.operator_engine import OperatorEngine

RUNNING, PARKED = RunState.RUN_STATE_RUNNING, RunState.RUN_STATE_INTERRUPTED
SUCCEEDED = RunState.RUN_STATE_SUCCEEDED


@pytest.fixture
async def operators() -> AsyncIterator[OperatorEngine]:
    """An engine for operators that does what the test says."""
    engine = OperatorEngine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def line(operators: OperatorEngine) -> CommandLine:
    """The command line with that engine."""
    return CommandLine(operators.target)


def at_work() -> InspectRunResponse:
    """A run in its second hands, in the middle of a batch of calls."""
    shown = InspectRunResponse(
        run=Run(id="r-1", agent="assistant", conversation_id="c-1", claw="web", state=RUNNING, last_seq=7),
        epoch=2,
        version=5,
        segment=1,
        kept_from_seq=1,
        worker="host-b",
        deliveries=2,
        recoveries=1,
        unread_signals=["cancel"],
        frames=[
            FrameInfo(first_seq=1, event_count=6, epoch=1, state=RUNNING, size=300),
            FrameInfo(first_seq=7, event_count=0, epoch=2, state=RUNNING, durable=True),
            FrameInfo(first_seq=7, event_count=1, epoch=2, state=RUNNING, durable=True, size=90),
        ],
        open_calls=[
            OpenCall(call_id="c1", tool_name="search", phase=Phase.PHASE_OK),
            OpenCall(call_id="c2", tool_name="pay\x1b[2J", phase=Phase.PHASE_START),
            OpenCall(call_id="c3", tool_name="tell"),
        ],
    )
    shown.ready_time.FromSeconds(1_800_000_000)
    return shown


async def test_a_run_is_shown_with_its_owner_log_calls_and_frames(operators: OperatorEngine, line: CommandLine) -> None:
    """All there is to know in one look; frames and calls are lines with tabs, a hostile name stays one."""
    operators.shown = at_work()
    ended = await line("run", "show", "r-1")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "run r-1: running",
        "  agent:        assistant",
        "  conversation: c-1",
        "  asked by:     web",
        "  at work:      host-b, its lease ends 2027-01-15T08:00:00+00:00",
        "  log:          events 1 to 7; 5 frames in all",
        "  claims:       epoch 2, segment 1, delivered 2 times, this segment was taken over once",
        "  unread:       cancel",
        "calls of the unfinished message:",
        "c1\tsearch\tended well",
        "c2\tpay␛[2J\tbegun",
        "c3\ttell\tnot started",
        "frames, oldest first:",
        "1-6\t1\trunning\ttext\t300",
        "none\t2\trunning\tdurable\t0",
        "7\t2\trunning\tdurable\t90",
    ]
    screen = (await line.on_terminal("run", "show", "r-1")).out
    for heading in ("call", "phase", "events", "epoch", "bytes"):
        assert heading in screen


async def test_a_parked_run_is_shown_with_its_questions_and_its_timers(
    operators: OperatorEngine, line: CommandLine
) -> None:
    """Who could be asked, how it is answered, and when it goes on by itself."""
    item = InterruptItem(id="q", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="pay", prompt="Pay?")
    operators.shown = InspectRunResponse(run=Run(id="r-1", state=PARKED, interrupts=[item], last_seq=3))
    operators.shown.kept_from_seq = 1
    operators.shown.timer_times.add().FromSeconds(1_800_000_000)
    out = (await line("run", "show", "r-1")).out
    assert "  at work:      nobody; it waits for people\n" in out
    assert "  woken at:     2027-01-15T08:00:00+00:00\n" in out
    assert "? approval of pay {}: Pay?\n" in out


async def test_a_question_is_shown_as_it_is_whatever_stands_in_it(operators: OperatorEngine, line: CommandLine) -> None:
    """Spaces and hidden signs of arguments are seen, a prompt cannot pose as our lines, a time may be out of range."""
    item = InterruptItem(
        id="q", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="rm",
        args_json='{"p": "a  b\u200bc\u202ed\u00a0e"}', prompt="Sure?\n  answer:  dualclaw resume other approve",
    )  # fmt: skip
    item.expire_time.seconds = 10**15
    operators.shown = InspectRunResponse(run=Run(id="r-1", state=PARKED, interrupts=[item], last_seq=3))
    ended = await line("run", "show", "r-1")
    assert ended.err == ""
    assert '? approval of rm {"p": "a  b\\u200bc\\u202ed\u00a0e"}: Sure?\n  |   answer:  dualclaw' in ended.out
    assert "  expires: 1000000000000000 s after 1970\n" in ended.out
    as_json = await line("run", "show", "r-1", "--json")
    assert (as_json.code, as_json.out) == (3, "")
    assert as_json.err.startswith("dualclaw: what the engine answered has no JSON form: ")


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (InspectRunResponse(run=Run(state=SUCCEEDED, last_seq=9), kept_from_seq=10), "no events of 9, those before"),
        (InspectRunResponse(run=Run(state=RUNNING), kept_from_seq=1), "no events yet"),
        (
            InspectRunResponse(run=Run(state=RUNNING, error=Error(message="its saved state\x07 is bad"))),
            "state␇ is bad",
        ),
    ],
)
async def test_what_is_gone_or_broken_is_said(
    operators: OperatorEngine, line: CommandLine, shown: InspectRunResponse, said: str
) -> None:
    """A compacted log, a run that has done nothing yet, saved state that cannot be read."""
    operators.shown = shown
    ended = await line("run", "show", "r-1")
    assert ended.code == 0
    assert said in ended.out


async def test_a_shown_run_is_one_object_as_json(operators: OperatorEngine, line: CommandLine) -> None:
    """Programs get everything under the contract's names."""
    operators.shown = at_work()
    (text,) = (await line("run", "show", "r-1", "--json")).out.splitlines()
    found = json.loads(text)
    assert (found["worker"], found["run"]["id"], len(found["frames"])) == ("host-b", "r-1", 3)
    assert found["open_calls"][1] == {"call_id": "c2", "tool_name": "pay\x1b[2J", "phase": "PHASE_START"}


async def test_a_retry_says_which_run_it_made(operators: OperatorEngine, line: CommandLine) -> None:
    """Its id is on stdout, how to follow it on stderr; the key that makes it idempotent is passed on, or made."""
    operators.run = Run(id="r-2", state=RUNNING)
    ended = await line("run", "retry", "r-1", "--request-id", "x")
    assert (ended.code, ended.out) == (0, "run r-2: running\n")
    assert "dualclaw attach r-2" in ended.err
    ended = await line("run", "retry", "r-1", "--json")
    assert json.loads(ended.out) == {"id": "r-2", "state": "RUN_STATE_RUNNING"}
    first, second = operators.calls
    assert first == RetryRunRequest(run_id="r-1", request_id="x")
    assert isinstance(second, RetryRunRequest)
    assert second.request_id not in ("", "x")


@pytest.mark.parametrize(("released", "said"), [(True, "the next free worker takes it"), (False, "nothing was done")])
async def test_a_release_says_whether_there_was_anything_to_take(
    operators: OperatorEngine, line: CommandLine, released: bool, said: str
) -> None:
    """Both are no error."""
    operators.run, operators.released = Run(id="r-1", state=RUNNING), released
    ended = await line("run", "release", "r-1")
    assert (ended.code, operators.calls) == (0, [ReleaseRunRequest(run_id="r-1")])
    assert said in ended.out


async def test_a_purge_without_anybody_to_ask_needs_yes(operators: OperatorEngine, line: CommandLine) -> None:
    """In a script it is said twice or not done."""
    ended = await line("run", "purge", "r-1")
    assert (ended.code, operators.calls) == (2, [])
    assert "--yes" in ended.err
    ended = await line("run", "purge", "r-1", "--yes")
    assert (ended.code, ended.out) == (0, "run r-1: purged\n")
    assert operators.calls == [PurgeRunRequest(run_id="r-1")]


@pytest.mark.parametrize(("typed", "code", "asked"), [("yes\n", 0, 1), ("y\n", 1, 0), ("\n", 1, 0), ("\x04", 1, 0)])
async def test_a_purge_at_a_terminal_asks_and_takes_only_yes(
    operators: OperatorEngine, line: CommandLine, typed: str, code: int, asked: int
) -> None:
    """Anything else, and the end of input, purges nothing."""
    master, slave = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *line.command("run", "purge", "r-1"), stdin=slave, stdout=slave, stderr=slave, env=line.env
    )
    os.close(slave)
    screen = ""
    try:
        async with asyncio.timeout(100):
            while "Type yes to go on: " not in screen:
                screen += (await asyncio.to_thread(os.read, master, 65_536)).decode()
            os.write(master, typed.encode())
            assert await process.wait() == code
    finally:
        if process.returncode is None:
            process.kill()
        os.close(master)
    assert len(operators.calls) == asked
    assert "run r-1" in screen


@pytest.mark.parametrize("verb", ["show", "retry", "release", "purge"])
async def test_a_refusal_is_a_line_with_what_to_do(operators: OperatorEngine, line: CommandLine, verb: str) -> None:
    """The engine's words, its reason and its hint; exit code 3."""
    operators.refusal = EngineError("RUN_NOT_FINAL", "Run r-1 is RUNNING.", {"run_id": "r-1", "state": "RUNNING"})
    ended = await line("run", verb, "r-1", *(["--yes"] if verb == "purge" else []))
    assert (ended.code, ended.out) == (3, "")
    assert ended.err == (
        "dualclaw: refused: Run r-1 is RUNNING. (RUN_NOT_FINAL)\n  Cancel the run, or wait until it has ended.\n"
    )


async def test_an_engine_without_the_service_is_named_as_older(fake_engine) -> None:
    """The four calls say which rpc is missing, and that nothing was changed."""
    async with EngineClient(fake_engine.target) as client:
        for call, rpc in (
            (client.inspect_run("r"), "InspectRun"),
            (client.release_run("r"), "ReleaseRun"),
            (client.retry_run("r"), "RetryRun"),
            (client.purge_run("r"), "PurgeRun"),
        ):
            with pytest.raises(NotServed, match=rpc):
                await call
