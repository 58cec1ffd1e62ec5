"""What operators do with single runs: look inside, take one from a process, ask again, purge.

Every method is for the role operator alone and reaches the runs of the caller's tenant only; a run of another
tenant does not exist. Rules:

- A look inside must work for every run there is, above all for a broken one. Saved state that this engine cannot
  read is told in the answer and never refuses it.
- A run that is asked again acts for whom the first one acted for, with those roles: the rights of an operator must
  not reach a tool because a user's question was repeated.
- Asking again answers nothing. ``Runner.start`` takes a message for the answer to the one question that a parked run
  of the conversation asks, which the words of another run are not; so such a conversation is refused as busy.
- Each change leaves a line in the log that says who did it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterator, Sequence
from typing import Protocol

from dualclaw import (
    BusyPolicy,
    Error,
    FrameInfo,
    InspectRunResponse,
    OpenCall,
    Phase,
    ReleaseRunResponse,
    Run,
    RunRequest,
    RunState,
)
from dualclaw.errors import EngineError
from dualclaw.events import make_diagnosis, make_error
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.checkpoint import (
    CallPhase,
    CallState,
    Checkpoint,
    UnreadableState,
    load_checkpoint,
    load_record,
)
from dualclaw_server.engine.store import FINAL, Created, Head, Inspection, Loaded, RunKey, RunStore

log = logging.getLogger(__name__)

_TOLD_OF_START = frozenset({CallPhase.CALL_PHASE_STARTED, CallPhase.CALL_PHASE_SUSPENDED})


class Start(Protocol):
    """``Runner.start``."""

    def __call__(
        self, caller: Caller, request: RunRequest, trace: TraceParent, *, may_answer: bool
    ) -> Awaitable[Created]:
        """Store a new run; with ``may_answer`` false it is CONVERSATION_BUSY where a run waits for an answer."""


class Operators:
    """The use cases behind OperatorService.

    Args:
        store: where the runs are.
        start: starts a run, for those that are asked again.
    """

    def __init__(self, store: RunStore, start: Start) -> None:
        self._store = store
        self._start = start

    async def inspect(self, caller: Caller, run_id: str) -> InspectRunResponse:
        """Return where a run stands, who works on it and what is stored of it.

        Raises:
            EngineError: PERMISSION_DENIED, UNKNOWN_RUN.
        """
        key = _key(caller, run_id, "Looking inside a run")
        found = await self._store.inspect(key)
        answer = _stored(found)
        try:
            load_record(found.record)
            checkpoint = load_checkpoint(found.checkpoint)
        except UnreadableState as problem:
            answer.run.error.CopyFrom(_unreadable(problem))
            return answer
        answer.segment, answer.recoveries = checkpoint.segment, checkpoint.recoveries
        failed = await self._failed_calls(key, checkpoint)
        answer.open_calls.extend(_open_calls(checkpoint.calls, failed))
        return answer

    async def release(self, caller: Caller, run_id: str, trace: TraceParent) -> ReleaseRunResponse:
        """Take a run from whoever works on it and have it delivered anew at once.

        Raises:
            EngineError: PERMISSION_DENIED, UNKNOWN_RUN.
        """
        key = _key(caller, run_id, "Releasing a run")
        released = await self._store.release(key)
        if released:
            _tell("run released", caller, key, trace)
        return ReleaseRunResponse(run=(await self._store.head(key)).run, released=released)

    async def retry(self, caller: Caller, run_id: str, request_id: str, trace: TraceParent) -> Run:
        """Ask the question of a final run again, in the same conversation, and return the new run.

        Raises:
            EngineError: PERMISSION_DENIED, UNKNOWN_RUN, RUN_NOT_FINAL, CONVERSATION_BUSY, and what ``Runner.start``
                refuses; INTERNAL when the run's record cannot be read.
        """
        key = _key(caller, run_id, "Asking a run's question again")
        _check_final(await self._store.head(key), "asked again")
        loaded = await self._store.load(key)
        try:
            record = load_record(loaded.record)
        except UnreadableState as problem:
            raise EngineError(
                "INTERNAL", f"Run {run_id} cannot be asked again: {problem}.", {"run_id": run_id}
            ) from None
        request = _again(record.request, request_id)
        first = Caller(caller.tenant, record.subject, frozenset(record.roles))
        created = await self._start(first, request, trace, may_answer=False)
        if not created.existing:
            _tell("run asked again", caller, key, trace)
        return created.head.run

    async def purge(self, caller: Caller, run_id: str, trace: TraceParent) -> None:
        """Purge the log, checkpoint and record of a final run; its messages stay with the conversation.

        Raises:
            EngineError: PERMISSION_DENIED, UNKNOWN_RUN, RUN_NOT_FINAL.
        """
        key = _key(caller, run_id, "Purging a run")
        _check_final(await self._store.head(key), "purged")  # final is for ever, so it still is when it is deleted
        await self._store.delete(key)
        _tell("run purged", caller, key, trace)

    async def _failed_calls(self, key: RunKey, checkpoint: Checkpoint) -> frozenset[str]:
        """Return the ids of calls whose saved result is an error."""
        if not any(state.phase == CallPhase.CALL_PHASE_ENDED for state in _every(checkpoint.calls)):
            return frozenset()
        try:
            loaded: Loaded = await self._store.load(key)
        except EngineError:  # purged between the two reads; what was read first still tells more than a refusal
            return frozenset()
        results = (part.tool_result for item in loaded.messages for part in item.message.parts)
        return frozenset(result.call_id for result in results if result.is_error)


def _key(caller: Caller, run_id: str, what: str) -> RunKey:
    if "operator" not in caller.roles:
        raise EngineError("PERMISSION_DENIED", f"{what} needs the role operator.")
    return RunKey(caller.tenant, run_id)


def _check_final(head: Head, what: str) -> None:
    if head.state not in FINAL:
        state = RunState.Name(head.state).removeprefix("RUN_STATE_")
        raise EngineError(
            "RUN_NOT_FINAL",
            f"Run {head.key.run_id} is {state}; only a run at its end can be {what}.",
            {"run_id": head.key.run_id, "state": state},
        )


def _stored(found: Inspection) -> InspectRunResponse:
    """Return what the store itself knows of a run."""
    head = found.head
    answer = InspectRunResponse(
        run=head.run,
        epoch=head.epoch,
        version=head.version,
        kept_from_seq=head.kept_from,
        worker=found.worker,
        deliveries=found.deliveries,
        unread_signals=[signal.signal_id for signal in found.unread],
        frames=[
            FrameInfo(
                first_seq=frame.first_seq,
                event_count=frame.count,
                epoch=frame.epoch,
                state=frame.state,
                durable=frame.durable,
                size=frame.size,
            )
            for frame in found.frames
        ],
    )
    if found.waiting:
        answer.ready_time.FromMicroseconds(round(found.ready_time * 1e6))
    for at in found.timers:
        answer.timer_times.add().FromMicroseconds(round(at * 1e6))
    return answer


def _unreadable(problem: UnreadableState) -> Error:
    text = f"Its saved state cannot be read: {problem}."
    diagnosis = make_diagnosis(
        code="internal",
        severity="error",
        summary=text,
        hint="The run is left as it is for an engine that can read it; start the newest one there is.",
    )
    return make_error(text, diagnosis=diagnosis).error


def _every(calls: Sequence[CallState]) -> Iterator[CallState]:
    """Yield calls, those of a sub-agent after the call that runs it."""
    for state in calls:
        yield state
        yield from _every(state.child.calls)


def _open_calls(calls: Sequence[CallState], failed: frozenset[str]) -> Iterator[OpenCall]:
    for state in _every(calls):
        phase = Phase.PHASE_UNSPECIFIED
        if state.phase == CallPhase.CALL_PHASE_ENDED:
            phase = Phase.PHASE_FAIL if state.call.id in failed else Phase.PHASE_OK
        elif state.phase in _TOLD_OF_START or state.announced:
            phase = Phase.PHASE_START
        yield OpenCall(call_id=state.call.id, tool_name=state.call.name, phase=phase)


def _again(first: RunRequest, request_id: str) -> RunRequest:
    """Return a request to be asked anew when nothing else is active.

    The engine gives its message a new id; the old one stays in what a request_id is compared by, so that an id that
    was used to ask another run again, or for the first run itself, is REQUEST_ID_REUSED.
    """
    request = RunRequest()
    request.CopyFrom(first)
    request.request_id = request_id
    request.on_busy = BusyPolicy.BUSY_POLICY_REJECT
    return request


def _tell(what: str, caller: Caller, key: RunKey, trace: TraceParent) -> None:
    extra = {"run_id": key.run_id, "tenant": key.tenant, "trace_id": trace.trace_id}
    log.warning("%s by the operator %s", what, caller.subject, extra=extra)
