"""The audit trail: what is recorded, what is not, and that nothing runs unrecorded."""

import asyncio
import json
import logging
import stat
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualclaw import ContentPart, Decision, DecisionAction, InterruptItem, Usage
from dualclaw_server.engine.checkpoint import CallPhase, Checkpoint, Question, Stage
from dualclaw_server.engine.interceptor import EMPTY, ModelCall, Observation
from dualclaw_server.engine.model import ModelChunk, ModelError, Restart, TextDelta
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import End
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.audit import AuditInterceptor, AuditRecord, JsonLinesSink, LogSink

from .traces import TRACE_ID, call_of, make_trace, model_call, prompt_of, response, user

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, timezone(timedelta(hours=2)))
SECRET = '{"key": "hunter2"}'


class ListSink:
    """Keeps records; fails for the events named in ``fails``."""

    def __init__(self, *fails: str) -> None:
        self.records: list[AuditRecord] = []
        self.fails = set(fails)

    async def write(self, record: AuditRecord) -> None:
        if record.event in self.fails:
            raise OSError("no space left")
        self.records.append(record)

    def told(self, *names: str) -> list[tuple[object, ...]]:
        return [tuple(getattr(record, name) for name in ("event", *names)) for record in self.records]


def audit_of(sink: ListSink, *, bodies: bool = False, masked: bool = False) -> AuditInterceptor:
    def mask(value: object) -> object:
        return json.loads(json.dumps(value).replace("hunter2", "***"))

    return AuditInterceptor(sink, mask=mask if masked else None, bodies=bodies, clock=lambda: NOW)


def ask(trace: Trace, question_id: str, call_id: str = "") -> Question:
    item = InterruptItem(id=question_id, tool_name="pay", prompt="Pay?", args_hash="hash")
    question = Question(item=item, call_id=call_id, asked_by="hitl/")
    trace.checkpoint.questions.append(question)
    return trace.checkpoint.questions[-1]


def decide(question: Question, action: str, approver: str = "berta") -> None:
    value = DecisionAction.Value(f"DECISION_ACTION_{action}")
    question.decision.CopyFrom(Decision(action=value, approver=approver, args_hash="edited", comment="fine"))


async def test_a_record_stands_for_itself() -> None:
    """Each says who, what for, where in the run, in which trace and when in UTC; what says nothing is left out."""
    sink, trace = ListSink(), make_trace()
    helper = make_trace(parent=trace, agent="helper")
    await audit_of(sink).on_tool_call_start(helper, call_of(helper, args=SECRET))
    assert sink.records[0].as_dict() == {
        "time": "2026-01-02T01:04:05.678Z",
        "event": "tool.started",
        "tenant": "tenant",
        "subject": "anna",
        "conversation_id": "conversation",
        "run_id": "run",
        "segment": 1,
        "agent": "agent/helper",
        "trace_id": TRACE_ID,
        "call_id": "c1",
        "name": "look",
        "args_hash": call_of(trace, args=SECRET).args_hash,
    }
    assert json.loads(sink.records[0].as_json()) == sink.records[0].as_dict()


async def test_segments_say_how_they_began_and_ended() -> None:
    """Start, resume and recovery are told apart, as are an answer, a question and a segment that was broken off."""
    sink, trace = ListSink(), make_trace()
    audit = audit_of(sink)
    await audit.on_agent_start(trace)
    ask(trace, "q1")
    await audit.on_agent_end(trace)
    decide(trace.checkpoint.questions[0], "APPROVE")
    trace.checkpoint.segment = 2
    await audit.on_agent_start(trace)
    await audit.on_agent_end(trace)
    trace.recovered = True
    await audit.on_agent_start(trace)
    trace.checkpoint.stage = Stage.STAGE_END
    trace.add_usage(Usage(input_tokens=7, output_tokens=0))
    await audit.on_agent_end(trace)
    helper = make_trace(parent=trace, agent="helper")
    await audit.on_agent_start(helper)
    assert [found for found in sink.told("outcome", "segment") if not str(found[0]).startswith("question")] == [
        ("run.started", "started", 1),
        ("run.ended", "interrupted", 1),
        ("run.started", "resumed", 2),
        ("run.ended", "stopped", 2),
        ("run.started", "recovered", 2),
        ("run.ended", "finished", 2),
        ("agent.started", "recovered" if helper.recovered else "resumed", 2),
    ]
    assert (sink.records[-2].input_tokens, sink.records[-2].output_tokens) == (7, 0)


async def test_decisions_are_recorded_once_with_who_and_for_which_arguments() -> None:
    """Asked and decided, each once over segments, crashes and sub-agents, with approver, action and hash."""
    sink, trace = ListSink(), make_trace()
    audit = audit_of(sink)
    approval, question = ask(trace, "c1", "c1"), ask(trace, "agent/hitl")
    await audit.on_agent_end(trace)
    decide(approval, "EDIT")
    trace = make_trace(checkpoint=Checkpoint.FromString(trace.checkpoint.SerializeToString()))
    await audit.on_agent_start(trace)
    await audit.on_action_start(make_trace(parent=trace, agent="helper"), [])
    decide(trace.checkpoint.questions[1], "SKIP", "expired")
    await audit.on_action_start(trace, [])
    await audit.on_agent_end(trace)
    fields = ("question_id", "call_id", "args_hash", "action", "approver", "asked_by", "body")
    assert [found for found in sink.told(*fields) if str(found[0]).startswith("question")] == [
        ("question.asked", "c1", "c1", "hash", "", "", "hitl/", None),
        ("question.asked", "agent/hitl", "", "hash", "", "", "hitl/", None),
        ("question.decided", "c1", "c1", "edited", "edit", "berta", "hitl/", None),
        ("question.decided", "agent/hitl", "", "edited", "skip", "expired", "hitl/", None),
    ]
    assert question.item.id == "agent/hitl"


async def test_a_question_that_could_not_be_recorded_is_recorded_later() -> None:
    """A sink that fails loses no decision: it comes with the next chance."""
    sink, trace = ListSink("question.decided"), make_trace()
    audit = audit_of(sink)
    decide(ask(trace, "q"), "REJECT")
    with pytest.raises(OSError, match="space"):
        await audit.on_action_start(trace, [])
    sink.fails.clear()
    await audit.on_action_start(trace, [])
    assert sink.told("action") == [("question.asked", ""), ("question.decided", "reject")]


ERROR = failure("TOOL_TIMEOUT", "too slow")


@pytest.mark.parametrize(
    ("observation", "error", "phase", "outcome"),
    [
        (Observation([ContentPart(text="ok")]), None, CallPhase.CALL_PHASE_STARTED, "ok"),
        (Observation(), None, CallPhase.CALL_PHASE_STARTED, "ok"),
        (ERROR, None, CallPhase.CALL_PHASE_STARTED, "tool.timeout"),
        (ERROR, ValueError(), CallPhase.CALL_PHASE_STARTED, "tool.timeout"),
        (Observation(is_error=True), None, CallPhase.CALL_PHASE_STARTED, "failed"),
        (Observation(error=ValueError()), ValueError(), CallPhase.CALL_PHASE_STARTED, "failed"),
        (EMPTY, asyncio.CancelledError(), CallPhase.CALL_PHASE_STARTED, "cancelled"),
        (EMPTY, None, CallPhase.CALL_PHASE_SUSPENDED, "suspended"),
        (EMPTY, None, CallPhase.CALL_PHASE_STARTED, "cancelled"),
    ],
)
async def test_calls_say_how_they_ended(
    observation: Observation, error: BaseException | None, phase: CallPhase.ValueType, outcome: str
) -> None:
    """Success, a diagnosis' code, a failure without one, a cancel and a suspension are told apart."""
    sink, trace = ListSink(), make_trace()
    call = call_of(trace)
    call.state.phase = phase
    await audit_of(sink).on_tool_call_end(trace, call, observation, error, 1.23456)
    assert sink.told("outcome", "seconds", "call_id") == [("tool.ended", outcome, 1.235, "c1")]


async def test_a_call_with_an_open_question_is_suspended() -> None:
    """Also when the phase does not say so yet."""
    sink, trace = ListSink(), make_trace()
    ask(trace, "c1", "c1")
    await audit_of(sink).on_tool_call_end(trace, call_of(trace), EMPTY, None, 0.0)
    assert sink.records[0].outcome == "suspended"


async def model_records(*chunks: ModelChunk | BaseException, stop_after: int = 99) -> ListSink:
    """Have the audit stand around an attempt that gives these chunks, whose reader stops after some."""
    sink, trace = ListSink(), make_trace()

    async def model(call: ModelCall) -> AsyncGenerator[ModelChunk, None]:
        for chunk in chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    with suppress(ModelError, End, ZeroDivisionError, asyncio.CancelledError):
        async with aclosing(audit_of(sink).intercept_stream(model_call(trace), model)) as seen:
            async for _ in seen:
                stop_after -= 1
                if stop_after == 0:
                    break
    return sink


DOWN = ModelError("MODEL_TIMEOUT", "slow", retryable=True, usage=Usage(input_tokens=5))
ANSWER = response("hi", usage=Usage(input_tokens=10, output_tokens=2))


async def test_every_attempt_at_a_model_call_is_recorded_once() -> None:
    """Whatever ends it: an answer, also when its reader leaves with it, a failure, a cancel, a fallback, a bug."""
    fields = ("name", "outcome", "input_tokens", "output_tokens")
    answered = [("model.called", "test-model", "ok", 10, 2)]
    assert (await model_records(TextDelta("hi"), ANSWER)).told(*fields) == answered
    assert (await model_records(TextDelta("hi"), ANSWER, stop_after=2)).told(*fields) == answered
    assert (await model_records(TextDelta("hi"), ANSWER, stop_after=1)).told("outcome") == [
        ("model.called", "cancelled")
    ]
    assert (await model_records(DOWN)).told(*fields) == [("model.called", "test-model", "model.timeout", 5, None)]
    assert (await model_records(asyncio.CancelledError())).told("outcome") == [("model.called", "cancelled")]
    assert (await model_records(ZeroDivisionError())).told("outcome") == [("model.called", "failed")]
    assert (await model_records(End("over"))).told("outcome") == [("model.called", "failed")]
    assert (await model_records(Restart("other", DOWN), ANSWER)).told("name", "outcome") == [
        ("model.called", "test-model", "model.timeout"),
        ("model.called", "other", "ok"),
    ]
    assert all(record.seconds is not None for record in (await model_records(ANSWER)).records)


async def test_a_tool_that_cannot_be_recorded_does_not_run() -> None:
    """The failure of the sink is the interceptor's own, it is a guard, so the engine withholds the call."""
    sink, trace = ListSink("tool.started"), make_trace()
    audit = audit_of(sink)
    assert (audit.guard, audit.fail_closed, audit.switchable, audit.order) == (True, True, False, -1000)
    with pytest.raises(OSError, match="space"):
        await audit.on_tool_call_start(trace, call_of(trace))


async def test_a_sink_that_hangs_is_a_sink_that_fails() -> None:
    """A record that is not stored in time stops what it is for."""

    class Hanging:
        async def write(self, record: AuditRecord) -> None:
            await asyncio.Event().wait()

    trace = make_trace()
    with pytest.raises(TimeoutError):
        await AuditInterceptor(Hanging(), timeout=0.01).on_tool_call_start(trace, call_of(trace))
    with pytest.raises(ValueError, match="timeout"):
        AuditInterceptor(Hanging(), timeout=0)


@given(st.booleans(), st.booleans())
async def test_no_text_is_recorded_unless_asked_for_and_none_unmasked(bodies: bool, masked: bool) -> None:
    """Arguments come masked or as hash, bodies only when asked for, and through the mask where there is one."""
    sink = ListSink()
    trace = make_trace(own=[user("question hunter2", message_id="q")])
    audit = audit_of(sink, bodies=bodies, masked=masked)
    await audit.on_agent_start(trace)
    call = call_of(trace, args=SECRET)
    await audit.on_tool_call_start(trace, call)
    await audit.on_tool_call_end(trace, call, Observation([ContentPart(text="result hunter2")]), None, 0.1)

    async def model(inner: ModelCall) -> AsyncGenerator[ModelChunk, None]:
        yield response("answer hunter2")

    async with aclosing(audit.intercept_stream(model_call(trace), model)) as chunks:
        assert len([chunk async for chunk in chunks]) == 1
    prompt_of(trace)
    text = "\n".join(record.as_json() for record in sink.records)
    assert [word in text for word in ("question ", "result ", "answer ")] == [bodies] * 3
    assert ('"args": {"key": "***"}' in text) is masked
    assert ("hunter2" in text) is (bodies and not masked)
    assert text.count(call.args_hash) == 2


# Sinks


def record_of(number: int, name: str = "look") -> AuditRecord:
    return AuditRecord(
        time="t",
        event="tool.started",
        tenant="t",
        subject="s",
        conversation_id="c",
        run_id="r",
        segment=number,
        agent="a",
        trace_id="",
        name=name,
    )


@pytest.mark.parametrize("fsync", [False, True])
async def test_lines_are_appended_whole_by_any_number_of_writers(tmp_path: Path, fsync: bool) -> None:
    """Two sinks on one file, many records at once: each a line, none lost, none mixed; only the owner may read."""
    path = tmp_path / "audit.jsonl"
    sinks = [JsonLinesSink(path, fsync=fsync), JsonLinesSink(str(path))]
    async with asyncio.timeout(60):
        await asyncio.gather(*(sinks[n % 2].write(record_of(n, "名" * 500)) for n in range(40)))
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert sorted(line["segment"] for line in lines) == list(range(40))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    """What a crash left of a line is closed; the record after it is whole. A file renamed away begins anew."""
    path = tmp_path / "audit.jsonl"
    path.write_text('{"torn": ')
    sink = JsonLinesSink(path)
    await sink.write(record_of(1))
    assert [json.loads(line)["segment"] for line in path.read_text().splitlines()[1:]] == [1]
    path.rename(tmp_path / "old.jsonl")
    await sink.write(record_of(2))
    assert json.loads(path.read_text())["segment"] == 2


async def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """At once where the folder is missing, at the record where the file is none."""
    with pytest.raises(ValueError, match="folder does not exist"):
        JsonLinesSink(tmp_path / "missing" / "audit.jsonl")
    with pytest.raises(OSError, match="directory"):
        await JsonLinesSink(tmp_path).write(record_of(1))


async def test_records_can_go_to_a_logger(caplog: pytest.LogCaptureFixture) -> None:
    """The line is the record's JSON, and the log line carries run, tenant and agent."""
    logger = logging.getLogger("test.audit")
    with caplog.at_level(logging.INFO, "test.audit"):
        await LogSink(logger).write(record_of(3))
    (logged,) = caplog.records
    assert json.loads(logged.getMessage())["segment"] == 3
    assert logged.__dict__["run_id"] == "r"
