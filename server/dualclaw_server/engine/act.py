"""Running the tool calls of one model answer.

Rules

- Every call ends with exactly one result for the model and, for users, one start and one end of its step;
  results go to the model in call order, events as they happen; one failing sibling hides nothing.
- Nothing runs before interceptors have seen the whole batch and every question about it is answered: a batch
  that waits for people has run no tool.
- Nothing runs before the frame that says "started" is committed, and a group of calls starts in one frame.
- What went wrong with a call is told to the model as JSON (code, message, retryable, hint) and to users as a
  diagnosis. It never ends the run.
- A call whose start was saved and whose result was not is settled by its effect class: read and idempotent
  run again (the latter with the same key), reconcile asks the tool's lookup first, once is never run again.
  The same call made anew needs a person's approval then.
- A call that asks people in the middle of its work is suspended; its siblings run to their end and keep their
  results. With the answer it runs again, from its beginning.
- One that ends the run lets the calls at work finish; those that wait are not run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualclaw import ContentPart, DecisionAction, Diagnosis, EngineEvent, Message, Role, StepKind, ToolResult
from dualclaw.events import make_diagnosis, make_step
from dualclaw_server.engine import questions
from dualclaw_server.engine.agent import AgentTool
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.checkpoint import CallPhase, CallState, Question, Stage
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.interceptor import Handoff, Observation
from dualclaw_server.engine.invoke import GRACE, Invocation, tool_context
from dualclaw_server.engine.observations import cut, failure, text_of
from dualclaw_server.engine.outcome import Ask, End, Fail, Outcome, Replace, Suspend
from dualclaw_server.engine.parked import Parked, Transferred
from dualclaw_server.engine.store import Sync
from dualclaw_server.engine.tool import as_parts, contained

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope
    from dualclaw_server.engine.segment import Segment
    from dualclaw_server.engine.texts import Texts

log = logging.getLogger(__name__)

_STARTED = CallPhase.CALL_PHASE_STARTED
_ENDED = CallPhase.CALL_PHASE_ENDED
_SUSPENDED = CallPhase.CALL_PHASE_SUSPENDED
_THINKING = StepKind.STEP_KIND_THINKING
_UNKNOWN = ("tool.outcome_unknown", "tool.timeout")
"""Codes after which nobody knows whether a call has had its effect."""
_KIND_NAMES = {number: name.removeprefix("STEP_KIND_").lower() for name, number in StepKind.items()}


class Batch:
    """The calls in a scope's checkpoint."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._segment = scope.segment
        self._trace = scope.trace
        self._texts = scope.texts
        tools = scope.tools_by_name
        self._calls = [Call(scope.trace, state, tools.get(state.call.name)) for state in scope.trace.checkpoint.calls]
        self._changed = False
        self._sync = Sync.NORMAL
        self._direct: dict[int, str] = {}
        self._handoffs: dict[int, Handoff] = {}
        self._wanted: Outcome | None = None
        self._suspended = False

    async def run(self) -> str:
        """Run what has not run yet; returns the answer when a return_direct tool gave one, else "".

        When it gives an answer, the last results wait to be saved with the end of the run.

        Raises:
            Parked: people are asked; everything else is done and saved.
            End, Fail: an interceptor, a tool or a person ends the run.
            Transferred: another agent takes over.
        """
        if any(call.open for call in self._calls):
            await self._review()
        waiting: deque[Call] = deque()
        for call in self._calls:
            if call.state.phase == _STARTED:
                await self._recover(call, waiting)
            elif call.open and not self._decided(call):
                waiting.append(call)
        running: dict[asyncio.Task[tuple[Observation, Outcome | None]], Call] = {}
        try:
            while (waiting and self._wanted is None) or running:
                if self._wanted is None:
                    await self._start(waiting, running)
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: running[task].state.index):
                    self._take(running.pop(task), *task.result())
        finally:
            await _stop(running)
        if self._suspended and self._wanted is None:
            self._trace.checkpoint.stage = Stage.STAGE_ACT
            raise Parked
        return await self._conclude()

    def close_open(self, text: str = "") -> None:
        """Give every call without a result one that says it was not run, or that its outcome is unknown."""
        for call in self._calls:
            if call.state.phase == _ENDED:
                continue
            summary = (text or self._texts.tool_not_run).format(name=call.name)
            if call.state.phase == _STARTED and not (call.tool and call.tool.effect == "read"):
                observation = failure("TOOL_OUTCOME_UNKNOWN", self._texts.tool_abandoned.format(name=call.name))
            else:
                observation = failure("TOOL_SKIPPED", summary)
            close_steps_below(self._segment, call.state, self._texts)
            self._end(call, observation)

    # Before calls run

    async def _review(self) -> None:
        """Have interceptors see the batch, and see that everything people were asked is answered."""
        waiting = [call for call in self._calls if call.open]
        outcome = await self._scope.chain.action_start(self._trace, waiting)
        by_id = {call.id: call for call in waiting}
        match outcome:
            case None:
                pass
            case Replace(value=dict() as args) if args.keys() <= by_id.keys():
                for call_id, changed in args.items():
                    by_id[call_id].change(changed)
            case Suspend():
                for ask in outcome.asks:
                    self._scope.ask_people(ask, outcome.origin, by_id.get(ask.call_id))
            case End():
                self.close_open(self._texts.ended_early)
                raise outcome
            case Fail():
                raise outcome
            case _:
                text = "interceptor %s: on_action_start must replace by arguments of calls, by their id"
                log.error(text, outcome.origin)
        for call in waiting:
            self._gate(call)
        if questions.open_items(self._trace.root.checkpoint) and any(self._waits(call) for call in self._calls):
            raise Parked
        if isinstance(outcome, Suspend):  # about the run itself
            raise Parked

    def _waits(self, call: Call) -> bool:
        asked = questions.newest(self._trace.root.checkpoint, call.id)
        return asked is not None and not asked.HasField("decision")

    def _gate(self, call: Call) -> None:
        """Ask, or ask again, where no answer covers the call as it is now."""
        asked = questions.newest(self._trace.root.checkpoint, call.id)
        if asked is None:
            if call.args_hash in self._trace.root.checkpoint.unknown_outcomes:
                text = self._texts.outcome_unknown_again.format(name=call.name)
                self._scope.ask_people(Ask(text, allowed=("approve", "reject", "skip", "respond")), "engine", call)
        elif not asked.HasField("decision"):
            if asked.item.args_hash != call.args_hash:  # what people see is not what would run
                asked.item.args_hash, asked.item.args_json = call.args_hash, self._scope.shown_args(call)
        elif asked.decision.action in questions.ALLOWING and not questions.allows(asked, call):
            self._scope.ask_again(asked, call)

    def _decided(self, call: Call) -> bool:
        """End a call that people have decided not to run, or have answered themselves."""
        asked = questions.newest(self._trace.root.checkpoint, call.id)
        if asked is None or (call.state.phase == _SUSPENDED and not _refused(asked)):
            return False
        decision = asked.decision
        match decision.action:
            case DecisionAction.DECISION_ACTION_REJECT:
                expired = decision.approver == questions.EXPIRED
                detail = self._texts.approval_expired if expired else self._commented(decision.comment)
                summary = self._texts.tool_rejected.format(name=call.name)
                self._end(call, failure("TOOL_REJECTED", summary, detail=detail, not_done=True))
                if asked.reject_ends_run and self._wanted is None:
                    self._wanted = End(self._texts.rejected.format(name=call.name), "rejected")
            case DecisionAction.DECISION_ACTION_SKIP:
                summary = self._texts.tool_skipped.format(name=call.name)
                detail = self._commented(decision.comment)
                self._end(call, failure("TOOL_SKIPPED", summary, detail=detail, not_done=True))
            case DecisionAction.DECISION_ACTION_RESPOND:
                text = questions.response_text(decision)
                self._end(call, Observation([ContentPart(text=text)] if text else []))
            case _:
                return False
        return True

    def _commented(self, comment: str) -> str:
        return self._texts.comment.format(comment=comment) if comment else ""

    async def _recover(self, call: Call, waiting: deque[Call]) -> None:
        """Settle a call that was begun by a process that is gone."""
        tool = call.tool
        again = tool is not None and (isinstance(tool, AgentTool) or tool.effect in ("read", "idempotent"))
        if again or call.state.bad_arguments:
            waiting.append(call)
            return
        if tool is not None and tool.lookup is not None:
            try:
                with contained():
                    async with asyncio.timeout(tool.timeout):
                        found = await tool.lookup(tool_context(call, self._trace).idempotency_key)
                    parts = None if found is None else as_parts(found)
                if parts is None:
                    waiting.append(call)
                else:
                    self._end(call, Observation(parts))
                return
            except Exception:
                log.exception("lookup of tool %s failed; its outcome stays unknown", tool.name)
        self._end(call, failure("TOOL_OUTCOME_UNKNOWN", self._texts.tool_outcome_unknown.format(name=call.name)))

    async def _start(
        self, waiting: deque[Call], running: dict[asyncio.Task[tuple[Observation, Outcome | None]], Call]
    ) -> None:
        room = self._scope.limits.parallel_tools - len(running)
        group = [waiting.popleft() for _ in range(min(len(waiting), room))]
        for call in group:
            if call.state.phase != _STARTED:
                self._begin(call)
                self._trace.checkpoint.tool_calls += 1
            if call.tool is not None and call.tool.effect != "read":
                self._sync = Sync.FULL
        if group or self._changed:
            started = self._segment.save(sync=self._sync)
            self._changed, self._sync = False, Sync.NORMAL
            if group:  # calls that run again have no start to save, but must not run before the claim is good
                await asyncio.shield(started)
        for call in group:
            invocation = Invocation(self._scope, call)
            running[asyncio.create_task(invocation.run(), name=f"call {call.name}")] = call

    def _begin(self, call: Call) -> None:
        call.state.phase = _STARTED
        self._changed = True
        announce(self._scope, call)

    # After it ran

    def _take(self, call: Call, observation: Observation, wanted: Outcome | None) -> None:
        """Take in what came of a call."""
        match wanted:
            case Suspend() | Parked():
                call.state.phase = _SUSPENDED
                self._suspended = self._changed = True
                if isinstance(wanted, Suspend):
                    for ask in wanted.asks:
                        self._scope.ask_people(ask, wanted.origin or call.name, call)
                return
            case End() | Fail():
                if self._wanted is None:
                    self._wanted = wanted
            case _:
                pass
        self._end(call, observation)

    async def _conclude(self) -> str:
        """Say how the batch ended."""
        self._trace.checkpoint.stage = Stage.STAGE_REASON
        if self._wanted is not None:
            self.close_open(self._texts.ended_early)
        await self._scope.chain.action_end(self._trace, self._calls)
        if self._wanted is not None:
            raise self._wanted
        if self._handoffs:
            handoff = self._handoffs[min(self._handoffs)]
            if handoff.kind == "exit":
                raise End(handoff.target, "exited")
            del self._trace.checkpoint.calls[:]
            raise Transferred(handoff.target)
        if self._direct:
            return self._direct[min(self._direct)]
        del self._trace.checkpoint.calls[:]
        if self._changed:
            self._segment.save(sync=self._sync)
        return ""

    def _end(self, call: Call, observation: Observation) -> None:
        state, tool = call.state, call.tool
        if not state.announced:
            announce(self._scope, call)
        parts, note = cut(observation.parts, self._scope.limits.max_result, self._texts.result_truncated)
        failed = observation.is_error
        if not parts:
            parts = [ContentPart(text=self._texts.empty_result)]
        told = [*parts, *self._notes(call, failed=failed)]
        result = ToolResult(call_id=call.id, parts=told, is_error=failed, diagnosis=observation.diagnosis)
        message = Message(
            id=new_id(), role=Role.ROLE_TOOL, author=self._scope.agent.name, parts=[ContentPart(tool_result=result)]
        )
        message.create_time.GetCurrentTime()
        code = observation.diagnosis.code if observation.diagnosis is not None else ""
        if code in _UNKNOWN and tool is not None and tool.effect == "once" and not observation.not_done:
            self._trace.root.checkpoint.unknown_outcomes.append(call.args_hash)
        state.phase = _ENDED
        state.ClearField("child")
        self._changed = True
        self._segment.put(self._trace.put(state.position, message))
        if tool is not None and tool.effect != "read":
            self._sync = Sync.FULL
        text = "" if failed else text_of(parts)
        if tool is not None and tool.return_direct and not failed:
            self._direct[state.index] = text
        if observation.handoff is not None and not failed:
            self._handoffs[state.index] = observation.handoff
        diagnosis = observation.diagnosis or note
        if state.call.kind == _THINKING:
            shown = text if not failed or diagnosis is None else diagnosis.summary
            self._segment.writer.event(thought(self._scope, shown, state.index))
        else:
            phase = "fail" if failed else "ok"
            self._segment.writer.event(step(self._scope, call, phase, text, diagnosis))

    def _notes(self, call: Call, *, failed: bool) -> list[ContentPart]:
        """Return what the model must know of what people did to its call."""
        asked = questions.newest(self._trace.root.checkpoint, call.id)
        if asked is None or not asked.HasField("decision") or failed:
            return []
        notes = []
        if asked.decision.action == DecisionAction.DECISION_ACTION_EDIT and call.state.original_args_json:
            notes.append(self._texts.edited.format(args=call.state.call.args_json or "{}"))
        if asked.decision.comment and asked.decision.action != DecisionAction.DECISION_ACTION_RESPOND:
            notes.append(self._texts.comment.format(comment=asked.decision.comment))
        return [ContentPart(text=note) for note in notes]


async def _stop(running: dict[asyncio.Task[tuple[Observation, Outcome | None]], Call]) -> None:
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=3 * GRACE)


def _refused(asked: Question) -> bool:
    return asked.decision.action in (
        DecisionAction.DECISION_ACTION_REJECT,
        DecisionAction.DECISION_ACTION_SKIP,
        DecisionAction.DECISION_ACTION_RESPOND,
    )


# Steps


def announce(scope: Scope, call: Call, diagnosis: Diagnosis | None = None) -> None:
    """Tell people that a call has begun, or waits for them; a thought has no beginning."""
    if call.state.call.kind == _THINKING or (call.state.announced and diagnosis is None):
        return
    call.state.announced = True
    scope.segment.writer.event(step(scope, call, "start", "", diagnosis))


def step(scope: Scope, call: Call, phase: str, result: str = "", diagnosis: Diagnosis | None = None) -> EngineEvent:
    """Return the event of a call's step, with nothing in it that must not be shown."""
    state = call.state
    return make_step(
        _KIND_NAMES[state.call.kind],
        name=call.name,
        server=state.call.server,
        args=scope.chain.mask(dict(call.args)),
        result=result,
        phase=phase,
        index=state.index,
        diagnosis=_masked(scope, diagnosis) if diagnosis is not None else None,
        node=scope.agent.nodes.tools.get(call.name),
        call_id=call.id,
        parent_call_id=scope.trace.call_id,
    )


def thought(scope: Scope, text: str, index: int) -> EngineEvent:
    """Return the event of a thinking step."""
    node = scope.agent.nodes.models.get(scope.model.name)
    return make_step("thinking", text=text, index=index, node=node, parent_call_id=scope.trace.call_id)


def _masked(scope: Scope, diagnosis: Diagnosis) -> Diagnosis:
    texts = (diagnosis.summary, diagnosis.detail, diagnosis.hint)
    masked = tuple(scope.chain.mask(text) for text in texts)
    if masked == texts:
        return diagnosis
    made = Diagnosis()
    made.CopyFrom(diagnosis)
    made.summary, made.detail, made.hint = masked
    return made


def close_steps_below(segment: Segment, state: CallState, texts: Texts) -> None:
    """End every step that a sub-agent of a call has left open."""
    if not state.HasField("child"):
        return
    below: Sequence[CallState] = state.child.calls
    for inner in below:
        close_steps_below(segment, inner, texts)
        if inner.phase == _ENDED or not inner.announced or inner.call.kind == _THINKING:
            continue
        summary = texts.tool_not_run.format(name=inner.call.name)
        segment.writer.event(
            make_step(
                _KIND_NAMES[inner.call.kind],
                name=inner.call.name,
                server=inner.call.server,
                phase="fail",
                index=inner.index,
                diagnosis=make_diagnosis(code="tool.skipped", severity="error", summary=summary),
                call_id=inner.call.id,
                parent_call_id=state.call.id,
            )
        )
        inner.phase = _ENDED
