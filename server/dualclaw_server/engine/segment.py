"""A segment at work: one claimed run between two terminal events, and everything it can do.

``reason`` and ``act`` are what strategies call; ``finish``, ``fail`` and ``halt`` end it. Rules:

- The checkpoint always says what comes next, and is saved together with what led there: a model answer with
  its calls in one frame, the start of tools in one frame before they run, each result as it comes.
- Every way out leaves the conversation well-formed: each call has exactly one result, the turn is closed by a
  message of the agent, and no step stays open.
- The text of a segment is what ``writer.view`` has folded. Answers of several model calls are set apart by a
  blank line, which is an event like any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property

from dualclaw import ContentPart, Diagnosis, Message, RetryMode, Role, Run, RunState, StepKind, StopReason, ToolCall
from dualclaw.errors import EngineError, diagnosis_code
from dualclaw.events import make_diagnosis, make_done, make_error, make_rewind, make_step
from dualclaw_server.engine.act import Batch
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.checkpoint import CallPhase, Stage
from dualclaw_server.engine.frames import FrameWriter
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.model import ChatModel, ModelError, ModelRequest, ModelResponse, ReasoningDelta, TextDelta
from dualclaw_server.engine.store import RunMessage, Sync
from dualclaw_server.engine.tool import KINDS
from dualclaw_server.engine.trace import Trace

STATES = {
    StopReason.STOP_REASON_CANCELLED: RunState.RUN_STATE_CANCELLED,
    StopReason.STOP_REASON_INTERRUPTED: RunState.RUN_STATE_INTERRUPTED,
}
"""State a run is in after done; every other stop reason means SUCCEEDED."""

_SEPARATOR = "\n\n"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a segment: the run's state after it, and the signals that it answers."""

    state: RunState.ValueType
    signals: Sequence[str]


class Segment:
    """One segment of one run, from its claim to its terminal event."""

    def __init__(
        self,
        agent: Agent,
        model: ChatModel,
        trace: Trace,
        writer: FrameWriter,
        run: Run,
        abandoned: set[asyncio.Task[list[ContentPart]]],
    ) -> None:
        """``run`` is the public record as stored; ``abandoned`` holds on to tools that ignore cancellation."""
        self.agent = agent
        self.trace = trace
        self.writer = writer
        self.limits: Limits = agent.limits
        if trace.options.max_steps:
            self.limits = replace(self.limits, max_steps=min(trace.options.max_steps, self.limits.max_steps))
        self._model = model
        self._run = run
        self._partial: list[str] = []
        self._unsaved: list[RunMessage] = []
        self.abandoned = abandoned
        self._message_id = ""

    @cached_property
    def _model_with_tools(self) -> ChatModel:
        # Made at its first use, inside the strategy, so that tools a model refuses fail the run with an event.
        return self._model.with_tools([tool.spec for tool in self.agent.tools]) if self.agent.tools else self._model

    # What strategies call

    async def reason(self, *, tools: bool, extra_instructions: str = "") -> bool:
        """Call the model, show its answer as it comes, save it. Returns True when it asks for calls.

        Without ``tools`` it can ask for none: calls it invents are left out. Raises ModelError.
        """
        trace, checkpoint = self.trace, self.trace.checkpoint
        if self._unsaved:
            self.save()
        instructions = "\n\n".join(text for text in (self.agent.instructions, extra_instructions) if text)
        model = self._model_with_tools if tools else self._model
        response = await self._stream(model, ModelRequest(trace.context(), instructions))
        message, bad_arguments = self._adopt(response, tools=tools)
        checkpoint.model_calls += 1
        trace.add_usage(response.usage)
        self._partial.clear()
        self._message_id = message.id if message.parts else ""
        for part in message.parts:
            if part.WhichOneof("part") == "reasoning" and part.reasoning.text:
                node = self.agent.nodes.models.get(self._model.name)
                self.writer.event(
                    make_step("thinking", text=part.reasoning.text, index=checkpoint.next_index, node=node)
                )
                checkpoint.next_index += 1
        if message.parts:
            self._unsaved.append(trace.put(trace.reserve(), message))
        calls = [part.tool_call for part in message.parts if part.WhichOneof("part") == "tool_call"]
        if not calls:
            checkpoint.stage = Stage.STAGE_END
            return False
        checkpoint.stage = Stage.STAGE_ACT
        first = trace.reserve(len(calls))
        for offset, call in enumerate(calls):
            checkpoint.calls.add(
                call=call,
                phase=CallPhase.CALL_PHASE_WAITING,
                index=checkpoint.next_index,
                position=first + offset,
                bad_arguments=bad_arguments.get(call.id, ""),
            )
            checkpoint.next_index += 1
        self.save()
        return True

    async def act(self) -> bool:
        """Run the calls of the batch. Returns True when one of them is the answer (return_direct)."""
        answer = await Batch(self).run()
        if not answer:
            return False
        self._show(answer)
        self._message_id = self._close_turn(answer)
        return True

    async def last_answer(self) -> None:
        """Make the one tool-less call that gives an answer after the last step; without text, say so."""
        before = len(self.writer.shown())
        await self.reason(tools=False, extra_instructions=self.agent.texts.last_answer)
        if not self.writer.shown()[before:].strip():
            self._show(self.agent.texts.step_limit)
            self._message_id = self._close_turn(self.agent.texts.step_limit)

    def over_budget(self) -> str:
        """Return why no further call may run, for people; empty while there is budget."""
        checkpoint = self.trace.checkpoint
        if self.trace.tokens > self.limits.max_tokens:
            return self.agent.texts.budget_tokens
        waiting = sum(state.phase == CallPhase.CALL_PHASE_WAITING for state in checkpoint.calls)
        if checkpoint.tool_calls + waiting > self.limits.max_tool_calls:
            return self.agent.texts.budget_tool_calls
        return ""

    def skip_calls(self, reason: str) -> None:
        """Give every open call a result that says it was not run, and close the turn with ``reason``."""
        Batch(self).close_open()
        self._show(reason)
        self._message_id = self._close_turn(reason)

    # What batches use

    def save(self, *, sync: Sync = Sync.NORMAL, end: Ending | None = None) -> asyncio.Future[int]:
        """Save the checkpoint and everything unsaved in one frame, with all events that wait."""
        messages, self._unsaved = self._unsaved, []
        checkpoint = self.trace.checkpoint.SerializeToString()
        if end is None:
            return self.writer.commit(checkpoint=checkpoint, messages=messages, sync=sync)
        return self.writer.commit(
            checkpoint=checkpoint,
            messages=messages,
            signals=end.signals,
            run=self._run,
            state=end.state,
            ends_segment=True,
            sync=sync,
        )

    def keep(self, message: RunMessage) -> None:
        """Have a message saved with the next frame."""
        self._unsaved.append(message)

    # How it ends

    async def finish(self, stop_reason: StopReason.ValueType, signals: Sequence[str] = ()) -> None:
        """End the segment with done; a run that finished with nothing to read has failed."""
        writer, trace = self.writer, self.trace
        if stop_reason == StopReason.STOP_REASON_FINISHED and not self._answered():
            text = f"Model {self._model.name} gave an empty answer."
            await self.fail(ModelError("MODEL_BAD_RESPONSE", text, retryable=True), signals)
            return
        if trace.own_messages()[-1].role != Role.ROLE_ASSISTANT:
            self._close_turn(self.agent.texts.no_answer)
        content, view = writer.shown(), writer.view
        writer.event(
            make_done(
                message_id=self._message_id,
                conversation_id=trace.conversation_id,
                content=content,
                process_steps=view.process_steps,
                used_skills=view.used_skills,
                used_mcp=view.used_mcp,
                usage=trace.usage,
                stop_reason=StopReason.Name(stop_reason).removeprefix("STOP_REASON_").lower(),
            )
        )
        self._run.stop_reason = stop_reason
        await self._end(STATES.get(stop_reason, RunState.RUN_STATE_SUCCEEDED), signals)

    async def fail(self, error: EngineError, signals: Sequence[str] = ()) -> None:
        """End the run with error; what was shown stays, in the stream and in the conversation."""
        self._abandon(self.agent.texts.failed)
        diagnosis = diagnosis_of(error)
        self.writer.event(make_error(error.message, diagnosis=diagnosis))
        self._run.error.message = error.message
        self._run.error.diagnosis.CopyFrom(diagnosis)
        place = {"run_id": self.trace.key.run_id, "tenant": self.trace.key.tenant, "agent": self.agent.name}
        trace_id = self.trace.checkpoint.trace_id
        log.warning("run failed: %s", error.reason, extra={"trace_id": trace_id, "reason": error.reason, **place})
        await self._end(RunState.RUN_STATE_FAILED, signals)

    async def halt(self, stop_reason: StopReason.ValueType, note: str, signals: Sequence[str] = ()) -> None:
        """End a run whose work was stopped in the middle (cancel, wall time): partial text is kept and saved."""
        self._abandon(note)
        await self.finish(stop_reason, signals)

    def rewind(self, text: str, reasoning: str, reason: str, attempt: int) -> None:
        """Tell clients that the segment's text is now exactly this."""
        self.writer.event(make_rewind(text, reasoning=reasoning, reason=reason, attempt=attempt))

    # How it works

    async def _stream(self, model: ChatModel, request: ModelRequest) -> ModelResponse:
        writer = self.writer
        hold = self.trace.options.retry_mode == RetryMode.RETRY_MODE_HOLD
        held: list[TextDelta | ReasoningDelta] = []
        shown = writer.shown()
        apart = bool(shown) and not shown.endswith("\n")
        response: ModelResponse | None = None
        async with aclosing(model.stream(request)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, ModelResponse):
                    response = chunk
                    break
                if hold:
                    held.append(chunk)
                    continue
                apart = self._pass_on(chunk, apart)
                if writer.congested:
                    await writer.room()
        if response is None:
            raise ModelError("MODEL_BAD_RESPONSE", f"Model {model.name} ended without an answer.", retryable=True)
        for chunk in held:
            apart = self._pass_on(chunk, apart)
        return response

    def _pass_on(self, chunk: TextDelta | ReasoningDelta, apart: bool) -> bool:
        """Write a chunk; returns whether text still has to be set apart from what came before."""
        if isinstance(chunk, ReasoningDelta):
            self.writer.reasoning(chunk.text)
            return apart
        if apart:
            self.writer.text(_SEPARATOR)
        self.writer.text(chunk.text)
        self._partial.append(chunk.text)
        return False

    def _adopt(self, response: ModelResponse, *, tools: bool) -> tuple[Message, dict[str, str]]:
        """Make the model's message one of the conversation: ids, author, time; call ids new to the conversation.

        Returns it with the raw arguments of the calls whose arguments are no JSON object.
        """
        message = Message(id=new_id(), role=Role.ROLE_ASSISTANT, author=self.agent.name)
        message.create_time.GetCurrentTime()
        used = set(self.trace.call_ids()) if tools else set()
        bad_arguments: dict[str, str] = {}
        for part in response.message.parts:
            if part.WhichOneof("part") != "tool_call":
                message.parts.append(part)
            elif tools:
                call = self._adopt_call(part.tool_call, used)
                message.parts.append(ContentPart(tool_call=call))
                if part.tool_call.id in response.bad_arguments:
                    bad_arguments[call.id] = response.bad_arguments[part.tool_call.id]
        return message, bad_arguments

    def _adopt_call(self, call: ToolCall, used: set[str]) -> ToolCall:
        adopted = ToolCall()
        adopted.CopyFrom(call)
        if not call.id or call.id in used:
            adopted.id = f"call_{new_id()}"
        used.add(adopted.id)
        tool = self.agent.tools_by_name.get(call.name)
        adopted.kind = KINDS[tool.kind] if tool else StepKind.STEP_KIND_SKILL
        adopted.server = tool.server if tool else ""
        return adopted

    def _answered(self) -> bool:
        """Tell whether there is text to read, or media in the last message."""
        parts = self.trace.own_messages()[-1].parts
        return bool(self.writer.shown().strip()) or any(part.WhichOneof("part") in ("image", "file") for part in parts)

    def _show(self, text: str) -> None:
        shown = self.writer.shown()
        if shown and not shown.endswith("\n"):
            self.writer.text(_SEPARATOR)
        self.writer.text(text)

    def _close_turn(self, text: str) -> str:
        """Add the agent's own closing message to the conversation and return its id."""
        message = Message(id=new_id(), role=Role.ROLE_ASSISTANT, author=self.agent.name, parts=[ContentPart(text=text)])
        message.create_time.GetCurrentTime()
        self._unsaved.append(self.trace.put(self.trace.reserve(), message))
        return message.id

    def _abandon(self, note: str) -> None:
        """Make an unfinished turn well-formed: keep partial text, give open calls a result, close the turn."""
        Batch(self).close_open()
        partial = "".join(self._partial)
        self._partial.clear()
        messages = self.trace.own_messages()
        if partial:
            self._message_id = self._close_turn(partial)
        elif not messages or messages[-1].role != Role.ROLE_ASSISTANT:
            self._close_turn(note)

    async def _end(self, state: RunState.ValueType, signals: Sequence[str]) -> None:
        self.trace.checkpoint.stage = Stage.STAGE_END
        del self.trace.checkpoint.calls[:]
        if self.trace.usage is not None:
            self._run.usage.CopyFrom(self.trace.usage)
        await asyncio.shield(self.save(sync=Sync.FULL, end=Ending(state, signals)))

    def seconds_left(self) -> float:
        """Seconds of wall time the run has left; at most its whole limit, should the clock have jumped back."""
        used = time.time() - self.trace.checkpoint.start_time.ToMilliseconds() / 1000
        return self.limits.wall_time - max(0.0, used)


def diagnosis_of(error: EngineError) -> Diagnosis:
    """Return an error as a diagnosis for users."""
    detail, retryable = (error.detail, error.retryable) if isinstance(error, ModelError) else ("", False)
    return make_diagnosis(
        code=diagnosis_code(error.reason),
        severity="error",
        summary=error.message,
        detail=detail,
        hint=error.hint,
        retryable=retryable,
    )
