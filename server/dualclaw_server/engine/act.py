"""Running the tool calls of one model answer.

Rules

- Every call ends with exactly one result for the model and, for users, one start and one end of its step;
  results go to the model in call order, events as they happen; one failing sibling hides nothing.
- Nothing runs before interceptors have seen the whole batch and every question about it is answered: a batch
  that waits for people has run no tool.
- Nothing runs before the frame that says "started" is committed, and a group of calls starts in one frame; nor
  once the lease on the run is lost.
- What went wrong with a call is told to the model as JSON (code, message, retryable, hint) and to users as a
  diagnosis. It never ends the run.
- A call whose start was saved and whose result was not is settled by its effect class: read and idempotent
  run again (the latter with the same key), reconcile asks the tool's lookup first, once is never run again: the
  model is told that its outcome is unknown, or people settle it (``Tool.unknown_outcome``). The same call made anew
  needs a person's approval then.
- A call that asks people in the middle of its work is suspended; its siblings run to their end and keep their
  results. With the answer it runs again, from its beginning.
- One that ends the run lets the calls at work finish; those that wait are not run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from dualclaw import ContentPart, Message, Role, ToolResult
from dualclaw_server.engine import questions
from dualclaw_server.engine.agent import AgentTool
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.chain import HOOK_GRACE
from dualclaw_server.engine.checkpoint import CallPhase, Stage
from dualclaw_server.engine.clock import set_now
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.interceptor import Observation
from dualclaw_server.engine.invoke import GRACE, Invocation, tool_context
from dualclaw_server.engine.kept import first_handoff, keep_ending, keep_handoff, kept_ending
from dualclaw_server.engine.observations import cut, failure, text_of, traceback_of
from dualclaw_server.engine.outcome import Ask, End, Fail, Outcome, Suspend
from dualclaw_server.engine.parked import Parked, Transferred
from dualclaw_server.engine.review import OUTCOME, notes, review, verdict
from dualclaw_server.engine.steps import THINKING, announce, close_steps_below, leaves_doubt, step, thought
from dualclaw_server.engine.store import Sync
from dualclaw_server.engine.tool import as_parts, contained

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope

log = logging.getLogger(__name__)

_WAITING = CallPhase.CALL_PHASE_WAITING
_STARTED = CallPhase.CALL_PHASE_STARTED
_ENDED = CallPhase.CALL_PHASE_ENDED
_SUSPENDED = CallPhase.CALL_PHASE_SUSPENDED
_UNKNOWN = ("tool.outcome_unknown", "tool.timeout")
"""Codes after which nobody knows whether a call has had its effect."""


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
        self._direct = self._direct_results()
        self._wanted: End | Fail | None = kept_ending(self._trace.checkpoint)
        self._suspended = False

    async def run(self) -> str:
        """Run what has not run yet; returns the answer when a return_direct tool gave one, else "".

        When it gives an answer, the last results wait to be saved with the end of the run.

        Raises:
            Parked: people are asked; everything else is done and saved.
            End, Fail: an interceptor, a tool or a person ends the run.
            Transferred: another agent takes over.
        """
        self._suspended = await self._review()
        waiting: deque[Call] = deque()
        for call in self._calls:
            if call.state.phase == _STARTED:
                await self._recover(call, waiting)
            elif call.open and not self._suspended:
                waiting.append(call)
        running: dict[asyncio.Task[tuple[Observation, Outcome | None]], Call] = {}
        try:
            while (waiting and self._wanted is None) or running:
                if self._wanted is None:
                    await self._start(waiting, running)
                if not running:  # none of the group had budget left
                    continue
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: running[task].state.index):
                    self._take(running.pop(task), *task.result())
        finally:
            await _stop(running)
        if self._suspended and self._wanted is None:
            self._trace.checkpoint.stage = Stage.STAGE_ACT
            self._save_effects()
            raise Parked
        return await self._conclude()

    def close_open(self, text: str = "") -> None:
        """Give every call without a result one that says it was not run, or that its outcome is unknown."""
        for call in self._calls:
            if call.state.phase == _ENDED:
                continue
            summary = (text or self._texts.tool_not_run).format(name=call.name)
            if call.state.HasField("held") or (call.state.phase == _STARTED and leaves_doubt(call.tool)):
                observation = failure("TOOL_OUTCOME_UNKNOWN", self._texts.tool_abandoned.format(name=call.name))
            else:
                observation = failure("TOOL_SKIPPED", summary)
            self._end(call, observation)

    # Before calls run

    async def _review(self) -> bool:
        """End what people have refused, have the rest reviewed; returns whether it must wait for people."""
        if self._wanted is not None:
            return False
        for call in self._calls:
            if call.open and (refused := verdict(self._scope, call)) is not None:
                self._end(call, refused[0])
                if refused[1] is not None:
                    self._want(refused[1])
        calls = [call for call in self._calls if call.open]
        if not calls or self._wanted is not None:
            return False
        found = await review(self._scope, calls)
        if isinstance(found, bool):
            return found
        self._want(found)
        return False

    async def _recover(self, call: Call, waiting: deque[Call]) -> None:
        """Settle a call that was begun by a process that is gone."""
        tool = call.tool
        again = tool is not None and (isinstance(tool, AgentTool) or tool.effect in ("read", "idempotent"))
        if again or call.state.bad_arguments or call.state.HasField("held"):
            waiting.append(call)
            return
        if tool is not None and tool.lookup is not None:
            self._segment.lease.check()
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
            except Exception as error:
                shown = traceback_of(error, self._scope.chain.mask)
                log.error("lookup of tool %s failed; its outcome stays unknown\n%s", tool.name, shown)
        if tool is not None and tool.unknown_outcome == "ask":
            text = self._texts.outcome_unknown_ask.format(name=call.name)
            self._scope.ask_people(Ask(text, allowed=("approve", "respond", "skip"), key=OUTCOME), "engine", call)
            call.state.phase = _SUSPENDED
            self._suspended = self._changed = True
            return
        self._end(call, failure("TOOL_OUTCOME_UNKNOWN", self._texts.tool_outcome_unknown.format(name=call.name)))

    async def _start(
        self, waiting: deque[Call], running: dict[asyncio.Task[tuple[Observation, Outcome | None]], Call]
    ) -> None:
        self._segment.lease.check()  # before the start is saved, which would leave others in doubt whether it ran
        room = self._scope.limits.parallel_tools - len(running)
        group: list[Call] = []
        for call in [waiting.popleft() for _ in range(min(len(waiting), room))]:
            if call.state.phase == _WAITING and not self._scope.count_call():  # others below the same agent were faster
                self._end(call, failure("TOOL_SKIPPED", self._texts.budget_tool_calls, not_done=True))
                continue
            group.append(call)
            if call.state.phase != _STARTED:
                self._begin(call)
            if call.tool is not None and call.tool.effect != "read":
                self._sync = Sync.FULL
        if group or self._changed:
            started = self._save()
            if group:  # calls that run again have no start to save, but must not run before the claim is good
                await asyncio.shield(started)
                self._segment.lease.check()
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
                self._want(wanted)
            case _:
                pass
        self._end(call, observation)

    def _want(self, wanted: End | Fail) -> None:
        if self._wanted is None:
            self._wanted = wanted
            keep_ending(self._trace.checkpoint, wanted)

    def _direct_results(self) -> dict[int, str]:
        """Return the answers of return_direct tools that were saved before, by the index of their step."""
        direct = {call.id: call for call in self._calls if call.tool is not None and call.tool.return_direct}
        found = {}
        for message in self._trace.own_messages() if direct else ():
            for part in message.parts:
                result, call = part.tool_result, direct.get(part.tool_result.call_id)
                if call is not None and not result.is_error:
                    added = len(notes(self._trace.root.checkpoint, call, self._texts))
                    found[call.state.index] = text_of(result.parts[: len(result.parts) - added])
        return found

    async def _conclude(self) -> str:
        """Say how the batch ended."""
        checkpoint = self._trace.checkpoint
        if self._wanted is not None:
            self.close_open(self._texts.ended_early)
        if self._scope.chain:
            self._save_effects()
        outcome = await self._scope.chain.action_end(self._trace, self._calls)
        if self._wanted is None:
            self._scope.obey(outcome)
        else:
            raise self._wanted
        handoff = first_handoff(checkpoint)
        if handoff is not None and handoff.kind == "exit":
            raise End(handoff.target, "exited")
        checkpoint.stage = Stage.STAGE_REASON
        del checkpoint.calls[:]
        if handoff is not None:
            raise Transferred(handoff.target)
        if self._direct:
            return self._direct[min(self._direct)]
        if self._changed:
            self._save()
        return ""

    def _save_effects(self) -> None:
        """Save what calls that may not run again have done; from here on hooks and the store may take long, or fail."""
        if self._sync is Sync.FULL:
            self._save()

    def _save(self) -> asyncio.Future[int]:
        saved = self._segment.save(sync=self._sync)
        self._changed, self._sync = False, Sync.NORMAL
        return saved

    def _end(self, call: Call, observation: Observation) -> None:
        state, tool = call.state, call.tool
        if not state.announced:
            announce(self._scope, call)
        close_steps_below(self._segment, state, tool, self._texts)
        parts, note = cut(observation.parts, self._scope.limits.max_result, self._texts)
        failed = observation.is_error
        if not parts:
            parts = [ContentPart(text=self._texts.empty_result)]
        told = [*parts, *notes(self._trace.root.checkpoint, call, self._texts)]
        result = ToolResult(call_id=call.id, parts=told, is_error=failed, diagnosis=observation.diagnosis)
        message = Message(
            id=new_id(), role=Role.ROLE_TOOL, author=self._scope.agent.name, parts=[ContentPart(tool_result=result)]
        )
        set_now(message.create_time)
        code = observation.diagnosis.code if observation.diagnosis is not None else ""
        if code in _UNKNOWN and tool is not None and tool.effect == "once" and not observation.not_done:
            self._trace.root.checkpoint.unknown_outcomes.append(call.args_hash)
        state.phase = _ENDED
        questions.withdraw(self._trace.root.checkpoint, state)
        state.ClearField("held")
        state.ClearField("child")
        self._changed = True
        self._trace.root.checkpoint.recoveries = 0  # it got further, so it does not take every worker down
        self._segment.put(self._trace.put(state.position, message))
        if tool is not None and tool.effect != "read":
            self._sync = Sync.FULL
        text = "" if failed else text_of(parts)
        if tool is not None and tool.return_direct and not failed:
            self._direct[state.index] = text
        if observation.handoff is not None and not failed:
            keep_handoff(state, observation.handoff)
        diagnosis = observation.diagnosis or note
        if state.call.kind == THINKING:
            shown = text if not failed or diagnosis is None else f"{diagnosis.summary} {diagnosis.detail}".strip()
            self._segment.writer.event(thought(self._scope, shown, state.index, call=call))
        else:
            phase = "fail" if failed else "ok"
            self._segment.writer.event(step(self._scope, call, phase, text, diagnosis))


async def _stop(running: dict[asyncio.Task[tuple[Observation, Outcome | None]], Call]) -> None:
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=2 * GRACE + HOOK_GRACE)
