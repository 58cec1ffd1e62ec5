"""How answers reach a run that asked: by Resume, or by the next message of the conversation.

Rules

- Everything in a call is taken or nothing; of two that answer the same question one is second and learns it.
- An answer is checked against the question as it is shown, and taken only in the state it was checked in.
- While it takes in an answer to one of several questions, a run is at work for a moment; answers to the others wait
  for it to ask again.
- A message answers the open question of its conversation if there is exactly one. It never approves anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from dualclaw import Decision, DecisionAction, Message, ResumeRequest, RunRequest, RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.checkpoint import ResumeSignal, Signal, load_checkpoint, load_record
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.resume import check_edits, checked_decisions, message_as_response, only_question
from dualclaw_server.engine.store import FINAL, Answers, Created, Head, RunKey, RunStore
from dualclaw_server.engine.trace import Trace

_PARKING = 5.0
"""Seconds an answer waits for a run that is about to ask again."""
_NEVER_ASKED = ""
"""An id no question has."""


class Answering:
    """Takes answers to runs that asked.

    Args:
        store: where the runs are.
        agents: by name, for the schemas of the tools whose arguments are edited.
    """

    def __init__(self, store: RunStore, agents: Mapping[str, Agent]) -> None:
        self._store = store
        self._agents = agents

    async def resume(self, caller: Caller, request: ResumeRequest, trace: TraceParent) -> Created:
        """Store answers and history edits; see ``Runner.resume``."""
        key = RunKey(caller.tenant, request.run_id)
        fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
        resume = ResumeSignal(
            history_edits=request.history_edits,
            trace_id=trace.trace_id,
            parent_span_id=trace.span_id,
            subject=caller.subject,
        )
        ids = [decision.interrupt_id for decision in request.decisions]
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _PARKING
        while True:
            head = await self._store.head(key)
            del resume.decisions[:]
            try:
                resume.decisions.extend(checked_decisions(caller, request, head.run.interrupts, self._agents))
                if request.history_edits:
                    check_edits(caller, request.history_edits, await self._trace(key))
            except FieldError:
                known = await self._replay(key, request.request_id, fingerprint)
                if known is None:
                    raise
                return known
            unchecked = not {item.id for item in head.run.interrupts}.issuperset(ids)
            try:
                return await self._answer(key, resume, request.request_id, fingerprint, refuse=unchecked)
            except EngineError as error:
                if not await self._asks_again(key, ids, error, give_up - loop.time()):
                    raise

    async def active(self, caller: Caller, conversation_id: str) -> Head | None:
        """Return where the active run of a conversation stands; None: it has just ended."""
        conversation = await self._store.get_conversation(caller.tenant, conversation_id)
        if not conversation.active_run_id:
            return None
        return await self._store.head(RunKey(caller.tenant, conversation.active_run_id))

    async def by_message(
        self, caller: Caller, head: Head | None, request: RunRequest, fingerprint: str, trace: TraceParent
    ) -> Created | None:
        """Take a message as the answer to the one question its conversation's active run asks; None: there is none.

        Raises FieldError when the message does not fit the question.
        """
        if head is None or head.state != RunState.RUN_STATE_INTERRUPTED:
            return None
        item = only_question(head.run.interrupts)
        if item is None:
            return None
        decision = Decision(
            interrupt_id=item.id,
            action=DecisionAction.DECISION_ACTION_RESPOND,
            response_json=message_as_response(text_in(request.message), item),
            approver=caller.subject,
        )
        resume = ResumeSignal(
            decisions=[decision], trace_id=trace.trace_id, parent_span_id=trace.span_id, subject=caller.subject
        )
        try:
            return await self._answer(head.key, resume, request.request_id, fingerprint)
        except EngineError as error:
            if error.reason in ("ALREADY_ANSWERED", "RUN_NOT_INTERRUPTED", "UNKNOWN_INTERRUPT"):
                return None  # somebody was faster; the message is one like any other
            raise

    async def _answer(
        self, key: RunKey, resume: ResumeSignal, request_id: str, fingerprint: str, *, refuse: bool = False
    ) -> Created:
        """Have the store take answers. With ``refuse`` it only says why not: what could not be checked against its
        question must not be taken, should the run ask it a moment later.
        """
        ids = [decision.interrupt_id for decision in resume.decisions]
        return await self._store.answer(
            Answers(
                key=key,
                interrupt_ids=(*ids, _NEVER_ASKED) if refuse else tuple(ids),
                signal_id=f"resume:{new_id()}",
                signal=Signal(resume=resume).SerializeToString(),
                request_id=request_id,
                fingerprint=fingerprint,
            )
        )

    async def _replay(self, key: RunKey, request_id: str, fingerprint: str) -> Created | None:
        """Return the segment that this very request has begun before; None: it has not.

        What was right then may be wrong by now, such as the edit of a message that it has removed itself.
        """
        if not request_id:
            return None
        try:
            return await self._answer(key, ResumeSignal(), request_id, fingerprint, refuse=True)
        except EngineError as error:
            if error.reason in ("RUN_NOT_INTERRUPTED", "UNKNOWN_INTERRUPT"):
                return None
            raise

    async def _asks_again(self, key: RunKey, ids: Sequence[str], error: EngineError, seconds: float) -> bool:
        """Tell whether answers that were refused may be given again now, because the run asks these questions.

        Raises ALREADY_ANSWERED for a question that time has answered.
        """
        if error.reason not in ("RUN_NOT_INTERRUPTED", "UNKNOWN_INTERRUPT") or not ids or seconds <= 0:
            return False
        if error.metadata.get("interrupt_id") == _NEVER_ASKED:
            return True
        loaded = await self._store.load(key)
        asked = {question.item.id: question for question in load_checkpoint(loaded.checkpoint).questions}
        for name in ids:
            if name in asked and asked[name].HasField("decision"):
                text = f"question {name[:100]!r} has its answer already"
                raise EngineError("ALREADY_ANSWERED", text, {"interrupt_id": name}) from None
        if loaded.head.state in FINAL or not asked.keys() >= set(ids):
            return False
        if loaded.head.state == RunState.RUN_STATE_RUNNING:
            await self._end_of_segment(loaded.head, seconds)
        return True

    async def _end_of_segment(self, head: Head, seconds: float) -> None:
        try:
            async with (
                asyncio.timeout(seconds),
                aclosing(self._store.follow(head.key, head.last_seq)) as batches,
            ):
                async for frames in batches:
                    if any(frame.ends_segment for frame in frames):
                        return
        except TimeoutError:
            return

    async def _trace(self, key: RunKey) -> Trace:
        """Return a run's trace as it was saved last."""
        loaded = await self._store.load(key)
        history = await self._store.history(key.tenant, loaded.head.conversation_id, key.run_id)
        return Trace.of_run(loaded, load_record(loaded.record), load_checkpoint(loaded.checkpoint), history)


def busy(error: EngineError, head: Head | None) -> EngineError:
    """Return the refusal of a busy conversation with what its active run asks people: their ids, as a JSON list."""
    if head is None or not head.run.interrupts:
        return error
    ids = [item.id for item in head.run.interrupts]
    metadata = {"run_id": head.key.run_id, "interrupts": json.dumps(ids, ensure_ascii=False)}
    return EngineError(error.reason, f"{error.message}, which waits for people to answer", metadata)


def text_in(message: Message) -> str:
    """Return the text of a message, its parts in lines."""
    return "\n".join(part.text for part in message.parts if part.WhichOneof("part") == "text")
