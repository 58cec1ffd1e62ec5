"""Running the tool calls of one model answer.

Rules

- Every call ends with exactly one result for the model and, for users, one start and one end of its step;
  results go to the model in call order, events as they happen; one failing sibling hides nothing.
- Nothing runs before the frame that says "started" is committed, and a group of calls starts in one frame.
- What went wrong with a call is told to the model as JSON (code, message, retryable, hint) and to users as a
  diagnosis. It never ends the run.
- A call whose start was saved and whose result was not is settled by its effect class: read and idempotent
  run again (the latter with the same key), reconcile asks the tool's lookup first, once is never run again.
- Calls are tasks of their own. One that ignores its timeout or the run's cancellation is left behind after
  GRACE seconds; its result is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualclaw import ContentPart, Diagnosis, EngineEvent, Message, Role, StepKind, ToolResult
from dualclaw.errors import Reason, diagnosis_code
from dualclaw.events import canonical_json, clean_text, make_diagnosis, make_step, parse_args
from dualclaw_server.engine.checkpoint import CallPhase, CallState, Stage
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.store import Sync
from dualclaw_server.engine.tool import Tool, ToolContext, ToolRaised, as_parts, contained

if TYPE_CHECKING:
    from dualclaw_server.engine.segment import Segment

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds a cancelled call has to come to an end."""
MAX_RESULT = 16_000
"""Characters of a result's text that are kept; of a longer one head and tail, with a note between."""

MAX_DETAIL = 2_000
"""Characters of a tool's own error text that are kept."""
MAX_ADDRESS = 8_192
"""Characters of the address of an image or file that people are shown; a longer one carries its data."""

_STARTED = CallPhase.CALL_PHASE_STARTED
_ENDED = CallPhase.CALL_PHASE_ENDED
_KIND_NAMES = {number: name.removeprefix("STEP_KIND_").lower() for name, number in StepKind.items()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call: its result, or why there is none."""

    parts: Sequence[ContentPart]
    diagnosis: Diagnosis | None = None


class Batch:
    """The calls in the segment's checkpoint."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._trace = segment.trace
        self._texts = segment.agent.texts
        self._calls = segment.trace.checkpoint.calls
        self._changed = False
        self._sync = Sync.NORMAL
        self._direct: dict[int, str] = {}
        self._parsed: dict[int, dict[str, object]] = {}

    async def run(self) -> str:
        """Run what has not run yet; returns the answer when a return_direct tool gave one, else "".

        When it gives an answer, the last results wait to be saved with the end of the run.
        """
        waiting: deque[tuple[CallState, Tool]] = deque()
        for state in self._calls:
            if state.phase == _STARTED:
                await self._recover(state, waiting)
            elif state.phase != _ENDED:
                self._check(state, waiting)
        running: dict[asyncio.Task[Outcome], CallState] = {}
        try:
            while waiting or running:
                await self._start(waiting, running)
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: running[task].index):
                    self._end(running.pop(task), task.result())
        finally:
            await self._stop(running)
        self._trace.checkpoint.stage = Stage.STAGE_REASON
        if self._direct:
            return self._direct[min(self._direct)]
        del self._calls[:]
        if self._changed:
            self._segment.save(sync=self._sync)
        return ""

    def close_open(self) -> None:
        """Give every call without a result one that says it was not run, or that its outcome is unknown."""
        for state in self._calls:
            if state.phase == _ENDED:
                continue
            tool = self._segment.agent.tools_by_name.get(state.call.name)
            if state.phase == _STARTED and not (tool and tool.effect == "read"):
                outcome = self._failure("TOOL_OUTCOME_UNKNOWN", self._texts.tool_abandoned, state)
            else:
                outcome = self._failure("TOOL_SKIPPED", self._texts.tool_not_run, state)
            if state.phase != _STARTED:
                self._begin(state)
            self._end(state, outcome)

    # Before a call runs

    def _check(self, state: CallState, waiting: deque[tuple[CallState, Tool]]) -> None:
        """Have a call wait for its turn, or end it at once when it cannot run."""
        call = state.call
        tool = self._segment.agent.tools_by_name.get(call.name)
        if tool is None:
            names = ", ".join(sorted(self._segment.agent.tools_by_name)) or "none"
            outcome = self._failure("TOOL_UNKNOWN", self._texts.tool_unknown, state, hint=f"Tools there are: {names}")
        elif state.bad_arguments:
            outcome = self._bad_arguments(state, tool, f"not one JSON object: {state.bad_arguments[:500]}")
        elif problem := tool.problem(self._args(state)):
            outcome = self._bad_arguments(state, tool, problem)
        else:
            waiting.append((state, tool))
            return
        self._begin(state)
        self._end(state, outcome)

    async def _recover(self, state: CallState, waiting: deque[tuple[CallState, Tool]]) -> None:
        tool = self._segment.agent.tools_by_name.get(state.call.name)
        if tool is not None and tool.effect in ("read", "idempotent"):
            waiting.append((state, tool))
            return
        if tool is not None and tool.lookup is not None:
            try:
                with contained():
                    async with asyncio.timeout(tool.timeout):
                        found = await tool.lookup(self._context(state).idempotency_key)
                    parts = None if found is None else as_parts(found)
                if parts is None:
                    waiting.append((state, tool))
                else:
                    self._end(state, Outcome(parts))
                return
            except Exception:
                log.exception("lookup of tool %s failed; its outcome stays unknown", tool.name)
        self._end(state, self._failure("TOOL_OUTCOME_UNKNOWN", self._texts.tool_outcome_unknown, state))

    async def _start(
        self, waiting: deque[tuple[CallState, Tool]], running: dict[asyncio.Task[Outcome], CallState]
    ) -> None:
        group = [
            waiting.popleft() for _ in range(min(len(waiting), self._segment.limits.parallel_tools - len(running)))
        ]
        for state, tool in group:
            if state.phase != _STARTED:
                self._begin(state)
                self._trace.checkpoint.tool_calls += 1
            if tool.effect != "read":
                self._sync = Sync.FULL
        if group or self._changed:
            started = self._segment.save(sync=self._sync)
            self._changed, self._sync = False, Sync.NORMAL
            if group:  # calls that run again have no start to save, but must not run before the claim is good
                await asyncio.shield(started)
        for state, tool in group:
            running[asyncio.create_task(self._call(state, tool), name=f"call {tool.name}")] = state

    def _begin(self, state: CallState) -> None:
        state.phase = _STARTED
        self._changed = True
        self._segment.writer.event(self._step(state, "start"))

    # While and after it runs

    async def _call(self, state: CallState, tool: Tool) -> Outcome:
        task = asyncio.create_task(tool.call(parse_args(state.call.args_json), self._context(state)))
        try:
            done, _ = await asyncio.wait({task}, timeout=tool.timeout)
        except asyncio.CancelledError:
            await self._leave(task)
            raise
        if not done:
            await self._leave(task)
            return self._failure(
                "TOOL_TIMEOUT", self._texts.tool_timeout, state, retryable=tool.effect != "once", seconds=tool.timeout
            )
        if task.cancelled():
            return self._failure("TOOL_FAILED", self._texts.tool_failed, state, detail="it cancelled itself")
        error = task.exception()
        if error is None:
            return Outcome(task.result())
        if isinstance(error, ToolRaised):
            return self._failure("TOOL_FAILED", self._texts.tool_failed, state, detail=_said(error))
        log.warning("tool %s raised", tool.name, exc_info=error)
        detail = f"{type(error).__name__}: {_said(error)}"
        return self._failure("TOOL_FAILED", self._texts.tool_failed, state, detail=detail)

    async def _leave(self, task: asyncio.Task[list[ContentPart]]) -> None:
        """Cancel a call's task; when it does not end in time, hold on to it until it does."""
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE)
        if task.done():
            if not task.cancelled():
                task.exception()
            return
        log.warning("a tool ignores its cancellation and is left behind")
        abandoned = self._segment.abandoned
        abandoned.add(task)

        def over(left: asyncio.Task[list[ContentPart]]) -> None:
            abandoned.discard(left)
            if not left.cancelled():
                left.exception()

        task.add_done_callback(over)

    async def _stop(self, running: dict[asyncio.Task[Outcome], CallState]) -> None:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=2 * GRACE)

    def _end(self, state: CallState, outcome: Outcome) -> None:
        parts, note = _cut(outcome.parts, self._texts.result_truncated)
        failed = outcome.diagnosis is not None
        if not parts:
            parts = [ContentPart(text=self._texts.empty_result)]
        result = ToolResult(call_id=state.call.id, parts=parts, is_error=failed, diagnosis=outcome.diagnosis)
        message = Message(
            id=new_id(), role=Role.ROLE_TOOL, author=self._segment.agent.name, parts=[ContentPart(tool_result=result)]
        )
        message.create_time.GetCurrentTime()
        state.phase = _ENDED
        self._changed = True
        self._segment.keep(self._trace.put(state.position, message))
        tool = self._segment.agent.tools_by_name.get(state.call.name)
        if tool is not None and tool.effect != "read":
            self._sync = Sync.FULL
        text = "" if failed else text_of(parts)
        if tool is not None and tool.return_direct and not failed:
            self._direct[state.index] = text
        self._segment.writer.event(self._step(state, "fail" if failed else "ok", text, outcome.diagnosis or note))

    # Values

    def _args(self, state: CallState) -> dict[str, object]:
        args = self._parsed.get(state.index)
        if args is None:
            args = self._parsed[state.index] = parse_args(state.call.args_json)
        return args

    def _context(self, state: CallState) -> ToolContext:
        key, record = self._trace.key, self._trace.record
        identity = "\x00".join((key.tenant, key.run_id, state.call.id))
        return ToolContext(
            tenant=key.tenant,
            subject=record.subject,
            run_id=key.run_id,
            conversation_id=self._trace.conversation_id,
            call_id=state.call.id,
            idempotency_key=hashlib.sha256(identity.encode()).hexdigest()[:32],
            metadata=dict(record.request.metadata),
        )

    def _step(self, state: CallState, phase: str, result: str = "", diagnosis: Diagnosis | None = None) -> EngineEvent:
        call = state.call
        return make_step(
            _KIND_NAMES[call.kind],
            name=call.name,
            server=call.server,
            args=self._args(state),
            result=result,
            phase=phase,
            index=state.index,
            diagnosis=diagnosis,
            node=self._segment.agent.nodes.tools.get(call.name),
            call_id=call.id,
        )

    def _bad_arguments(self, state: CallState, tool: Tool, problem: str) -> Outcome:
        hint = f"Schema of {tool.name}: {tool.parameters_json}"
        return self._failure(
            "TOOL_BAD_ARGUMENTS", self._texts.tool_bad_arguments, state, detail=problem, hint=hint, retryable=True
        )

    def _failure(
        self,
        reason: Reason,
        text: str,
        state: CallState,
        *,
        detail: str = "",
        hint: str = "",
        retryable: bool = False,
        seconds: float = 0.0,
    ) -> Outcome:
        summary = text.format(name=state.call.name, seconds=seconds)
        code = diagnosis_code(reason)
        told = {"code": code, "message": f"{summary} {detail}".strip(), "retryable": retryable, "hint": hint}
        observation = canonical_json({"error": {key: value for key, value in told.items() if value != ""}})
        return Outcome(
            [ContentPart(text=observation)],
            make_diagnosis(code=code, severity="error", summary=summary, detail=detail, hint=hint, retryable=retryable),
        )


def _said(error: BaseException) -> str:
    """Return an error's own text, whatever its ``__str__`` does."""
    try:
        return clean_text(str(error))[:MAX_DETAIL]
    except Exception as worse:
        return f"(its text cannot be had: {type(worse).__name__})"


def text_of(parts: Sequence[ContentPart]) -> str:
    """Return parts as text for people; images and files by their address or name."""
    lines = []
    for part in parts:
        kind = part.WhichOneof("part")
        if kind == "text":
            lines.append(part.text)
        elif kind in ("image", "file"):
            media = part.image if kind == "image" else part.file
            shown = media.url if len(media.url) <= MAX_ADDRESS else ""
            lines.append(shown or f"[{media.name or media.media_type or kind}]")
    return "\n".join(lines)


def _cut(parts: Sequence[ContentPart], note: str) -> tuple[list[ContentPart], Diagnosis | None]:
    """Return parts with over-long texts cut to head and tail, and the diagnosis that says so."""
    kept: list[ContentPart] = []
    missing, room = 0, MAX_RESULT
    for part in parts:
        surplus = len(part.text) - room if part.WhichOneof("part") == "text" else 0
        if surplus <= 0:
            kept.append(part)
            room -= len(part.text)
            continue
        missing += surplus
        head, tail = part.text[: room * 3 // 4], part.text[len(part.text) - room // 4 :]
        if room:
            kept.append(ContentPart(text=f"{head}\n{note.format(count=surplus)}\n{tail}"))
        room = 0
    if not missing:
        return kept, None
    summary = note.format(count=missing)
    return kept, make_diagnosis(code="result.truncated", severity="info", summary=summary)
