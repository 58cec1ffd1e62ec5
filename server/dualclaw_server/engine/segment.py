"""A segment at work: one claimed run between two terminal events, its log and its end.

``scope`` is what the agent does in it; this is what is written of it. Rules:

- The checkpoint always says what comes next, and is saved together with what led there: a model answer with
  its calls in one frame, the start of tools in one frame before they run, each result as it comes.
- Every way out leaves the conversation well-formed: each call has exactly one result, the turn is closed by a
  message of the agent, and no step stays open. Only a run that waits for people keeps its calls open.
- The text of a segment is what ``writer.view`` has folded. Answers of several model calls are set apart by a
  blank line, which is an event like any other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualclaw import ContentPart, Diagnosis, Message, Role, Run, RunState, StopReason
from dualclaw.errors import EngineError, diagnosis_code
from dualclaw.events import make_diagnosis, make_done, make_error, make_interrupt
from dualclaw_server.engine import questions
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.agreement import Shown, Withdraw
from dualclaw_server.engine.checkpoint import Stage
from dualclaw_server.engine.clock import set_now
from dualclaw_server.engine.frames import FrameWriter
from dualclaw_server.engine.handoff import keep_output
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.lease import Lease
from dualclaw_server.engine.model import ChatModel, ModelError
from dualclaw_server.engine.outcome import End, stop_name
from dualclaw_server.engine.reason import SEPARATOR
from dualclaw_server.engine.steps import masked
from dualclaw_server.engine.store import RunMessage, RunStore, Sync
from dualclaw_server.engine.texts import Texts
from dualclaw_server.engine.tool import ToolOutput
from dualclaw_server.engine.trace import Trace

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope

STATES = {
    StopReason.STOP_REASON_CANCELLED: RunState.RUN_STATE_CANCELLED,
    StopReason.STOP_REASON_INTERRUPTED: RunState.RUN_STATE_INTERRUPTED,
}
"""State a run is in after done; every other stop reason means SUCCEEDED."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a segment: the run's state after it."""

    state: RunState.ValueType


class Segment:
    """One segment of one run, from its claim to its terminal event."""

    def __init__(
        self,
        store: RunStore,
        agents: Mapping[str, Agent],
        model: ChatModel,
        trace: Trace,
        writer: FrameWriter,
        run: Run,
        *,
        lease: Lease,
        below: dict[str, list[RunMessage]],
        abandoned: set[asyncio.Task[ToolOutput]],
    ) -> None:
        """``trace`` is the run's root, ``run`` the public record as stored, ``model`` the engine's own.

        ``below`` are messages of sub-agents by the call they work for; ``abandoned`` holds on to tools that ignore
        cancellation.
        """
        self.scope: Scope
        """The agent in control at work; set by whoever opens it, before the segment can end."""
        self.agents = agents
        self.trace = trace
        self.writer = writer
        self.lease = lease
        self.abandoned = abandoned
        self.message_id = ""
        """The message that done names."""
        self.showing: Shown | None = None
        """The answer that is being shown and not saved yet."""
        self.stopping = ""
        """Why the agent is being stopped from outside: "cancelled", "budget_exceeded", "put_back" (another worker goes
        on with the run); empty: it is not.
        """
        self.signals: list[str] = []
        """Signals from the inbox that the next frame has taken in."""
        self._store = store
        self._model = model
        self._run = run
        self._below = below
        self._unsaved: list[RunMessage] = []

    @property
    def agent(self) -> Agent:
        """The agent in control."""
        return self.agents[self.trace.agent]

    @property
    def texts(self) -> Texts:
        """The engine's words in the agent's language."""
        return self.agent.texts

    # What scopes use

    def model_of(self, agent: Agent, trace: Trace) -> ChatModel:
        """Return the model an agent uses in this run; the caller's choice is for the agent that was asked."""
        chosen = trace.options.model if trace.agent == trace.record.request.agent else ""
        models = agent.models_by_name
        return models.get(chosen) or next(iter(models.values()), self._model)

    async def switches(self, agent: Agent) -> Mapping[str, bool]:
        """Return which interceptors of an agent operators and this run's caller have on.

        It stays what the agent found first in this segment, also after a crash.
        """
        found = self.trace.checkpoint.switches
        names = {item.name: f"{agent.name}/{item.name}" for item in agent.interceptors if item.switchable}
        if any(key not in found for key in names.values()):
            stored = await self._store.get(self.trace.key.tenant, switches_name(agent.name))
            wanted = {**read_switches(stored[0] if stored is not None else b""), **self.trace.options.interceptors}
            for item in agent.interceptors:
                if item.switchable:
                    found[names[item.name]] = wanted.get(item.name, item.enabled)
            self.save()
        return {name: found[key] for name, key in names.items()}

    def messages_of(self, call_id: str) -> Sequence[RunMessage]:
        """Return the messages of the sub-agent that works for a call."""
        return self._below.get(call_id, ())

    async def recall(self, name: str) -> bytes | None:
        """Return a value kept for the tenant."""
        found = await self._store.get(self.trace.key.tenant, f"kept/{name}")
        return found[0] if found is not None else None

    async def keep_value(self, name: str, value: bytes) -> None:
        """Keep a value for the tenant; the last writer wins."""
        key = self.trace.key.tenant, f"kept/{name}"
        while True:
            found = await self._store.get(*key)
            if await self._store.put(*key, value, found[1] if found is not None else 0) is not None:
                return

    def put(self, message: RunMessage) -> None:
        """Have a message saved with the next frame."""
        self._unsaved.append(message)
        if message.scope:
            self._below.setdefault(message.scope, []).append(message)

    def flush(self) -> None:
        """Save messages that wait, if there are any."""
        if self._unsaved:
            self.save()

    def save(self, *, sync: Sync = Sync.NORMAL, end: Ending | None = None) -> asyncio.Future[int]:
        """Save the checkpoint and everything unsaved in one frame, with all events that wait."""
        messages, self._unsaved = self._unsaved, []
        signals, self.signals = self.signals, []
        checkpoint = self.trace.checkpoint.SerializeToString()
        if end is None:
            return self.writer.commit(checkpoint=checkpoint, messages=messages, signals=signals, sync=sync)
        return self.writer.commit(
            checkpoint=checkpoint,
            messages=messages,
            signals=signals,
            run=self._run,
            state=end.state,
            ends_segment=True,
            sync=sync,
        )

    def claim(self) -> asyncio.Future[int]:
        """Take over the log: from this frame on nobody else can write it. The run asks nothing any more."""
        del self._run.interrupts[:]
        self._run.ClearField("stop_reason")
        return self.writer.commit(checkpoint=self.trace.checkpoint.SerializeToString(), run=self._run, sync=Sync.FULL)

    def show(self, text: str) -> None:
        """Show words of the engine's own, set apart from what was shown before."""
        shown = self.writer.shown()
        if shown and text and not shown.endswith("\n"):
            self.writer.text(SEPARATOR)
        if text:
            self.writer.text(text)

    def answered(self, message_id: str) -> None:
        """The answer being shown is about to be saved under this id; empty: it says nothing."""
        self.showing = None
        self.message_id = message_id

    def replace_answer(self, text: str) -> None:
        """Have clients see another text instead of the answer that was just shown."""
        if self.showing is None:
            return
        for action in self.showing.replace(text):
            if isinstance(action, Withdraw):
                self.rewind(action.text, action.reasoning, "an interceptor replaced the answer", 0)
            else:
                self.writer.text(action.text)

    def close_turn(self, trace: Trace, text: str) -> str:
        """Add an agent's own closing message to its conversation and return its id."""
        message = Message(id=new_id(), role=Role.ROLE_ASSISTANT, author=trace.agent, parts=[ContentPart(text=text)])
        set_now(message.create_time)
        self.put(trace.put(trace.reserve(), message))
        return message.id

    # How it ends

    async def finish(self, stop_reason: StopReason.ValueType) -> None:
        """End the segment with done; a run that finished with nothing to read has failed."""
        writer, trace = self.writer, self.trace
        if stop_reason == StopReason.STOP_REASON_FINISHED and not self._answered():
            name = self.model_of(self.agent, trace).name
            await self.fail(ModelError("MODEL_BAD_RESPONSE", f"Model {name} gave an empty answer.", retryable=True))
            return
        if trace.own_messages()[-1].role != Role.ROLE_ASSISTANT:
            self.close_turn(trace, self.texts.no_answer)
        if self.agent.output_key:
            keep_output(trace, self.agent.output_key, writer.shown(), self.texts)
        self._write_done(stop_reason)
        self._run.stop_reason = stop_reason
        await self._end(STATES.get(stop_reason, RunState.RUN_STATE_SUCCEEDED))

    async def end(self, end: End) -> None:
        """End the run because an interceptor, a tool or a person wants it."""
        self._close_open(self.texts.ended_early)
        self._keep_partial()
        text = self.scope.chain.mask(end.text)  # a tool may have said it
        if text:
            self.show(text)
            self.message_id = self.close_turn(self.trace, text)
        await self.finish(end.stop_reason)

    async def fail(self, error: EngineError) -> None:
        """End the run with error; what was shown stays, in the stream and in the conversation."""
        self._abandon(self.texts.failed)
        await self._fail(masked(self.scope, diagnosis_of(error)), error)

    async def fail_plainly(self, error: EngineError) -> None:
        """End the run with an error of the engine's own and nothing else, when closing its turn is what fails."""
        await self._fail(diagnosis_of(error), error)

    async def _fail(self, diagnosis: Diagnosis, error: EngineError) -> None:
        self.writer.event(make_error(diagnosis.summary, diagnosis=diagnosis))
        self._run.error.message = diagnosis.summary
        self._run.error.diagnosis.CopyFrom(diagnosis)
        place = {"run_id": self.trace.key.run_id, "tenant": self.trace.key.tenant, "agent": self.trace.agent}
        trace_id = self.trace.checkpoint.trace_id
        log.warning("run failed: %s", error.reason, extra={"trace_id": trace_id, "reason": error.reason, **place})
        await self._end(RunState.RUN_STATE_FAILED)

    async def halt(self, stop_reason: StopReason.ValueType, note: str) -> None:
        """End a run whose work was stopped in the middle (cancel, wall time): partial text is kept and saved."""
        self._abandon(note)
        await self.finish(stop_reason)

    async def park(self) -> None:
        """Ask people: end the segment with interrupt and done, and keep everything as it is until they answer."""
        self._keep_partial()
        items = questions.open_items(self.trace.checkpoint)
        expiry = questions.next_expiry(self.trace.checkpoint)
        if expiry is not None:  # before the frame: a timer too many does nothing, one too few would wait for ever
            await self._store.wake(self.trace.key, expiry)
        set_now(self.trace.checkpoint.park_time)
        self.writer.event(make_interrupt(items))
        self._write_done(StopReason.STOP_REASON_INTERRUPTED)
        self._run.stop_reason = StopReason.STOP_REASON_INTERRUPTED
        del self._run.interrupts[:]
        self._run.interrupts.extend(items)
        await self._commit_end(RunState.RUN_STATE_INTERRUPTED)

    def close(self) -> None:
        """Write nothing more, and undo what would be a cycle: a run's memory is free when its segment ends."""
        self.writer.close()
        self.trace.services = None
        del self.scope

    def rewind(self, text: str, reasoning: str, reason: str, attempt: int) -> None:
        """Tell clients that the segment's text is now exactly this."""
        self.writer.rewind(text, reasoning, reason=reason, attempt=attempt)

    def seconds_left(self) -> float:
        """Seconds of wall time the run has left; at most its whole limit, should the clock have jumped back."""
        used = time.time() - self.trace.checkpoint.start_time.ToMilliseconds() / 1000
        return self.scope.limits.wall_time - max(0.0, used)

    # How it works

    def _write_done(self, stop_reason: StopReason.ValueType) -> None:
        content, view = self.writer.shown(), self.writer.view
        self.writer.event(
            make_done(
                message_id=self.message_id,
                conversation_id=self.trace.conversation_id,
                content=content,
                process_steps=view.process_steps,
                used_skills=view.used_skills,
                used_mcp=view.used_mcp,
                usage=self.trace.usage,
                stop_reason=stop_name(stop_reason),
            )
        )

    def _answered(self) -> bool:
        """Tell whether there is text to read, or media in the last message."""
        parts = self.trace.own_messages()[-1].parts
        return bool(self.writer.shown().strip()) or any(part.WhichOneof("part") in ("image", "file") for part in parts)

    def _keep_partial(self) -> bool:
        """Save the text of an answer that was not finished as a message of its own."""
        partial = self.showing.text if self.showing is not None else ""
        self.showing = None
        if partial:
            self.message_id = self.close_turn(self.trace, partial)
        return bool(partial)

    def _close_open(self, text: str = "") -> None:
        """Give every call without a result one."""
        if self.trace.checkpoint.calls:
            self.scope.close_calls(text)

    def _abandon(self, note: str) -> None:
        """Make an unfinished turn well-formed: keep partial text, give open calls a result, close the turn."""
        self._close_open()
        if self._keep_partial():
            return
        messages = self.trace.own_messages()
        if not messages or messages[-1].role != Role.ROLE_ASSISTANT:
            self.close_turn(self.trace, note)

    async def _end(self, state: RunState.ValueType) -> None:
        self.trace.checkpoint.stage = Stage.STAGE_END
        del self.trace.checkpoint.calls[:]
        await self._commit_end(state)

    async def _commit_end(self, state: RunState.ValueType) -> None:
        if self.trace.usage is not None:
            self._run.usage.CopyFrom(self.trace.usage)
        await asyncio.shield(self.save(sync=Sync.FULL, end=Ending(state)))


def switches_name(agent: str) -> str:
    """Return the name of the setting that holds an agent's switched interceptors."""
    return f"switches/{agent}"


def read_switches(data: bytes) -> dict[str, bool]:
    """Return the switches that a setting holds."""
    found = json.loads(data) if data else {}
    return {name: on for name, on in found.items() if isinstance(on, bool)}


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
