"""A record of what agents did, for whom, and who allowed it.

Rules

- One record for each moment: a segment of a run (or of a sub-agent) begins and ends, a model call has ended, a tool
  call begins and ends, people were asked, and people decided. A tool's begin is written before it runs: when it
  cannot be written, the tool does not run (the interceptor is a guard, and the outermost by default).
- No text of the conversation is recorded unless ``bodies`` says so, and arguments of tools only through ``mask``;
  without one there is their hash, which is also what an approval is bound to.
- A decision is recorded once, by the first segment that knows of it, with who decided, what, and the hash of the
  arguments it is for. Questions and decisions of sub-agents are the run's.
- A record is one line of JSON and stands for itself: each says tenant, subject, run, segment, agents, trace and time
  (UTC).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

from dualclaw import DecisionAction, Usage
from dualclaw.errors import diagnosis_code
from dualclaw.events import canonical_json
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import Question
from dualclaw_server.engine.interceptor import Interceptor, ModelCall, ModelNext, Observation
from dualclaw_server.engine.model import ModelChunk, ModelError, ModelResponse, Restart
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.codes import CANCELLED, FAILED, OK, call_code, run_code

Moment = Literal[
    "run.started",
    "run.ended",
    "agent.started",
    "agent.ended",
    "model.called",
    "tool.started",
    "tool.ended",
    "question.asked",
    "question.decided",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One moment. Fields that say nothing are left out of its JSON."""

    time: str
    """RFC 3339, UTC."""
    event: Moment
    tenant: str
    subject: str
    """Who started the run."""
    conversation_id: str
    run_id: str
    segment: int
    agent: str
    """Names of the agents from the root down, with "/" between."""
    trace_id: str
    call_id: str = ""
    name: str = ""
    """Of the tool or model."""
    args_hash: str = ""
    args: object = None
    """Arguments, masked."""
    outcome: str = ""
    """How it began ("started", "resumed", "recovered") or ended ("ok", a diagnosis code, "cancelled", ...)."""
    seconds: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    question_id: str = ""
    asked_by: str = ""
    action: str = ""
    """What was decided: "approve", "reject", "edit", "skip" or "respond"."""
    approver: str = ""
    """Who decided."""
    body: object = None
    """Text of the moment, masked: the question, the answer, the result, the remark."""

    def as_dict(self) -> Mapping[str, object]:
        """Return what it says, as JSON data."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value not in ("", None)}

    def as_json(self) -> str:
        """Return it as one line of JSON."""
        return canonical_json(self.as_dict())


class AuditSink(Protocol):
    """Where records go. Implemented by JsonLinesSink and LogSink."""

    async def write(self, record: AuditRecord) -> None:
        """Store a record; return only once it is stored. Whatever it raises stops what was to be recorded."""


class JsonLinesSink:
    """Appends records to a file, a line each.

    The file is made with mode 0600. It is opened for each record, so it may be renamed away at any time. Several
    processes may write to the same file. A line that a crash has torn is closed before the next one.

    Args:
        path: the file; its folder must exist.
        fsync: True: a record counts as stored once it survives a power loss.

    Raises ValueError when the folder does not exist.
    """

    def __init__(self, path: str | Path, *, fsync: bool = False) -> None:
        self._path = Path(path)
        self._fsync = fsync
        if not self._path.parent.is_dir():
            raise ValueError(f"audit file {self._path.name}: its folder does not exist")

    async def write(self, record: AuditRecord) -> None:
        """Append a record. Raises OSError."""
        await asyncio.to_thread(self._append, f"{record.as_json()}\n".encode())

    def _append(self, line: bytes) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # a line that is being written looks like a torn one
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(file, line) :]
            if self._fsync:
                os.fsync(file)
        finally:
            os.close(file)


class LogSink:
    """Writes records to a logger. Loggers do not say when they fail, so neither does this."""

    def __init__(self, logger: logging.Logger, level: int = logging.INFO) -> None:
        self._logger = logger
        self._level = level

    async def write(self, record: AuditRecord) -> None:
        """Log a record."""
        place = {"run_id": record.run_id, "tenant": record.tenant, "agent": record.agent, "trace_id": record.trace_id}
        self._logger.log(self._level, "%s", record.as_json(), extra=place)


class AuditInterceptor(Interceptor):
    """Records every moment of a run in a sink. A guard: fail-closed, never switched by callers.

    Args:
        sink: where records go.
        mask: takes credentials out of JSON data; without it arguments are recorded as their hash only.
        bodies: True: the texts of questions, answers and results are recorded too.
        timeout: seconds a record may take to be stored.
        clock: the time, aware of its zone.
        order: the outermost by default.

    Raises ValueError for a timeout that is not above 0.
    """

    guard = True

    def __init__(
        self,
        sink: AuditSink,
        *,
        mask: Callable[[object], object] | None = None,
        bodies: bool = False,
        timeout: float = 4.0,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        name: str = "",
        order: int = -1000,
        enabled: bool = True,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled)
        if timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, not {timeout}")
        self._sink = sink
        self._masked = mask
        self._bodies = bodies
        self._timeout = timeout
        self._clock = clock

    async def on_agent_start(self, trace: Trace) -> None:
        """Record the beginning, and what people decided before it."""
        how = "recovered" if trace.recovered else "resumed" if trace.segment > 1 else "started"
        record = self._record(trace, "run.started" if trace.parent is None else "agent.started")
        await self._write(replace(record, outcome=how, body=self._body(trace.user_text)))
        await self._questions(trace)

    async def on_agent_end(self, trace: Trace) -> None:
        """Record what people are asked now, and the end; its tokens are those of the run so far."""
        await self._questions(trace)
        record = self._record(trace, "run.ended" if trace.parent is None else "agent.ended")
        await self._write(replace(_with_tokens(record, trace.usage), outcome=run_code(trace)))

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        """Record an attempt at a model call once it has ended, whatever ended it."""
        began = time.monotonic()
        model = call.model
        recorded = False

        async def ended(outcome: str, usage: Usage | None = None, text: str = "") -> None:
            nonlocal recorded
            if recorded:
                return
            recorded = True
            record = _with_tokens(self._record(call.trace, "model.called"), usage)
            seconds = round(time.monotonic() - began, 3)
            await self._write(replace(record, name=model, outcome=outcome, seconds=seconds, body=self._body(text)))

        try:
            async with aclosing(call_next(call)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, Restart):
                        await ended(diagnosis_code(chunk.error.reason), chunk.error.usage)
                        model, recorded = chunk.model, False
                    elif isinstance(chunk, ModelResponse):
                        await ended(OK, chunk.usage, "".join(part.text for part in chunk.message.parts))
                    yield chunk
        except ModelError as error:
            await ended(diagnosis_code(error.reason), error.usage)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            await ended(CANCELLED)
            raise
        except Exception:
            await ended(FAILED)
            raise

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> None:
        """Record what people decided since."""
        await self._questions(trace)

    async def on_tool_call_start(self, trace: Trace, call: Call) -> None:
        """Record a call before it runs."""
        await self._write(self._call_record(trace, "tool.started", call))

    async def on_tool_call_end(
        self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
    ) -> None:
        """Record what came of it."""
        outcome = call_code(trace, call, observation, error)
        record = self._call_record(trace, "tool.ended", call)
        body = self._body(observation.text)
        await self._write(replace(record, outcome=outcome, seconds=round(duration, 3), body=body))

    # How it works

    async def _questions(self, trace: Trace) -> None:
        """Record questions and decisions that are not recorded yet."""
        for question in trace.questions:
            await self._question(trace, "question.asked", question)
            if question.HasField("decision"):
                await self._question(trace, "question.decided", question)

    async def _question(self, trace: Trace, event: Moment, question: Question) -> None:
        extras, mark = trace.root.extras(self.name), f"{event}/{question.item.id}"
        if mark in extras:
            return
        extras.set(mark, True)  # before it is written, so that a sub-agent at work beside this one leaves it be
        try:
            await self._write(self._question_record(trace, event, question))
        except BaseException:
            extras.delete(mark)
            raise

    def _question_record(self, trace: Trace, event: Moment, question: Question) -> AuditRecord:
        item, decision = question.item, question.decision
        record = replace(
            self._record(trace, event),
            call_id=question.call_id,
            name=item.tool_name,
            args_hash=item.args_hash,
            question_id=item.id,
            asked_by=question.asked_by,
            body=self._body(item.prompt),
        )
        if event == "question.asked":
            return record
        return replace(
            record,
            args_hash=decision.args_hash or item.args_hash,
            action=DecisionAction.Name(decision.action).removeprefix("DECISION_ACTION_").lower(),
            approver=decision.approver,
            body=self._body(decision.comment),
        )

    def _call_record(self, trace: Trace, event: Moment, call: Call) -> AuditRecord:
        args = None if self._masked is None else self._masked(dict(call.args))
        record = self._record(trace, event)
        return replace(record, call_id=call.id, name=call.name, args_hash=call.args_hash, args=args)

    def _body(self, text: str) -> object:
        if not self._bodies or not text:
            return None
        return text if self._masked is None else self._masked(text)

    def _record(self, trace: Trace, event: Moment) -> AuditRecord:
        return AuditRecord(
            time=self._clock().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            event=event,
            tenant=trace.key.tenant,
            subject=trace.subject,
            conversation_id=trace.conversation_id,
            run_id=trace.key.run_id,
            segment=trace.segment,
            agent="/".join(trace.path),
            trace_id=trace.root.checkpoint.trace_id or trace.record.trace_id,
        )

    async def _write(self, record: AuditRecord) -> None:
        async with asyncio.timeout(self._timeout):
            await self._sink.write(record)


def _with_tokens(record: AuditRecord, usage: Usage | None) -> AuditRecord:
    if usage is None:
        return record
    return replace(
        record,
        input_tokens=usage.input_tokens if usage.HasField("input_tokens") else None,
        output_tokens=usage.output_tokens if usage.HasField("output_tokens") else None,
    )
