"""The runner: what callers ask of the engine. It accepts runs, has them worked on, cancels them.

Nobody iterates a runner. ``start`` stores a run and returns; a worker claims it, maybe the one of this process,
maybe that of the next after a crash; whoever wants to see it follows its log in the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import dualclaw
from dualclaw import (
    BusyPolicy,
    Decision,
    DecisionAction,
    DisconnectPolicy,
    InterceptorInfo,
    Message,
    ResumeRequest,
    Role,
    Run,
    RunRequest,
    RunState,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.checkpoint import FORMAT, CancelSignal, ResumeSignal, RunRecord, Signal
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.presence import PATIENCE, Presence
from dualclaw_server.engine.resume import check_edits, checked_decisions, message_as_response, only_question
from dualclaw_server.engine.segment import read_switches, switches_name
from dualclaw_server.engine.store import FINAL, Answers, Created, NewRun, RunKey, RunStore, StoreError
from dualclaw_server.engine.worker import Worker

log = logging.getLogger(__name__)

_TITLE = 80
"""Characters of a conversation's title."""


class Runner:
    """Starts, works on and cancels runs.

    Args:
        store: opened by whoever made it.
        agents: at least one; the first is the default.
        model: the engine's own model, for agents that name none.
        worker: name of this process in claims.
        capacity: runs worked on at once; more wait in the store.
        patience: seconds without a reader after which a run with on_disconnect CANCEL is cancelled.
    """

    def __init__(
        self,
        store: RunStore,
        agents: Sequence[Agent],
        *,
        model: ChatModel,
        worker: str = "",
        capacity: int = 1_000,
        patience: float = PATIENCE,
    ) -> None:
        if not agents:
            raise ValueError("an engine needs at least one agent")
        names = [agent.name for agent in agents]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"agent names must differ, repeated: {', '.join(sorted(repeated))}")
        self.store = store
        self._agents: Mapping[str, Agent] = {agent.name: agent for agent in agents}
        self._default = agents[0]
        self._model = model
        self._presence = Presence(self._on_abandoned, patience)
        self._side_tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._worker = Worker(
            store,
            self._agents,
            model,
            name=worker or new_id(),
            capacity=capacity,
            begun=self._presence.begun,
            ended=self._presence.forget,
        )

    # What callers ask

    async def agents_info(self, caller: Caller) -> Sequence[dualclaw.Agent]:
        """Return the public records of the agents as they are for a tenant, the default first."""
        infos = []
        for agent in self._agents.values():
            info = dualclaw.Agent()
            info.CopyFrom(agent.info)
            if not info.models:
                info.models.append(self._model.name)
            if agent.interceptors:
                stored = await self.store.get(caller.tenant, switches_name(agent.name))
                switches = read_switches(stored[0] if stored is not None else b"")
                for item in info.interceptors:
                    item.enabled = switches.get(item.name, item.enabled)
            infos.append(info)
        return infos

    async def set_interceptor_enabled(
        self, caller: Caller, agent_name: str, name: str, *, enabled: bool
    ) -> InterceptorInfo:
        """Switch an interceptor of an agent for a tenant, for every segment that begins from now on.

        Raises:
            EngineError: PERMISSION_DENIED, UNKNOWN_AGENT, NOT_SWITCHABLE.
        """
        if "operator" not in caller.roles:
            raise EngineError("PERMISSION_DENIED", "Switching an interceptor needs the role operator.")
        agent = self._agent(agent_name)
        self._check_switchable(agent, name)
        key = caller.tenant, switches_name(agent.name)
        while True:
            stored = await self.store.get(*key)
            switches = read_switches(stored[0] if stored is not None else b"")
            switches[name] = enabled
            value = json.dumps(switches).encode()
            if await self.store.put(*key, value, stored[1] if stored is not None else 0) is not None:
                break
        info = next(item for item in agent.info.interceptors if item.name == name)
        return InterceptorInfo(name=name, order=info.order, enabled=enabled, switchable=info.switchable)

    async def start(self, caller: Caller, request: RunRequest, trace: TraceParent) -> Created:
        """Store a new run, or find the one its request_id already made.

        Raises:
            EngineError: UNKNOWN_AGENT, UNKNOWN_CONVERSATION, CONVERSATION_BUSY, REQUEST_ID_REUSED, OVERLOADED,
                NOT_SWITCHABLE; FieldError for options the agent does not allow.
        """
        if self._draining:
            raise EngineError("OVERLOADED", "This engine is shutting down; ask another one.", retry_after=1.0)
        agent = self._agent(request.agent)
        self._check_options(agent, request)
        fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
        key = RunKey(caller.tenant, new_id())
        accepted = RunRequest()
        accepted.CopyFrom(request)
        accepted.agent = agent.name
        accepted.conversation_id = request.conversation_id or new_id()
        accepted.message.id = new_id()
        accepted.message.role = Role.ROLE_USER
        accepted.message.create_time.GetCurrentTime()
        record = RunRecord(
            format=FORMAT,
            request=accepted,
            subject=caller.subject,
            roles=sorted(caller.roles),
            trace_id=trace.trace_id,
            parent_span_id=trace.span_id,
        )
        replaced = CancelSignal(reason="replaced by another run", subject=caller.subject, trace_id=trace.trace_id)
        if request.conversation_id and request.on_busy == BusyPolicy.BUSY_POLICY_QUEUE:
            answered = await self._answer_question(caller, accepted, fingerprint, trace)
            if answered is not None:
                return answered
        try:
            return await self.store.create(
                NewRun(
                    key=key,
                    conversation_id=accepted.conversation_id,
                    new_conversation=not request.conversation_id,
                    title=_title(accepted.message),
                    request_id=request.request_id,
                    fingerprint=fingerprint,
                    record=record.SerializeToString(),
                    run=Run(
                        id=key.run_id, conversation_id=accepted.conversation_id, agent=agent.name, claw=request.claw
                    ),
                    message=accepted.message,
                    on_busy=request.on_busy,
                    replace_signal=Signal(cancel=replaced).SerializeToString(),
                )
            )
        except EngineError as error:
            if error.reason != "CONVERSATION_BUSY":
                raise
            answered = await self._answer_question(caller, accepted, fingerprint, trace)
            if answered is None:
                raise
            return answered

    async def resume(self, caller: Caller, request: ResumeRequest, trace: TraceParent) -> Created:
        """Store answers to a run that asked, all of them or none, and have it go on.

        Raises:
            EngineError: UNKNOWN_RUN, REQUEST_ID_REUSED, ALREADY_ANSWERED, UNKNOWN_INTERRUPT, RUN_NOT_INTERRUPTED,
                PERMISSION_DENIED; FieldError for answers that do not fit their questions.
        """
        if self._draining:
            raise EngineError("OVERLOADED", "This engine is shutting down; ask another one.", retry_after=1.0)
        key = RunKey(caller.tenant, request.run_id)
        head = await self.store.head(key)
        decisions = checked_decisions(caller, request, head.run.interrupts, self._agents)
        if request.history_edits:
            loaded = await self.store.load(key)
            history = await self.store.history(caller.tenant, head.conversation_id, key.run_id)
            own = [item.message for item in loaded.messages if not item.scope]
            check_edits(caller, request.history_edits, {message.id: message for message in (*history, *own)})
        fingerprint = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
        resume = ResumeSignal(
            decisions=decisions,
            history_edits=request.history_edits,
            trace_id=trace.trace_id,
            parent_span_id=trace.span_id,
            subject=caller.subject,
        )
        return await self._answer(key, resume, request.request_id, fingerprint)

    async def cancel(self, caller: Caller, run_id: str, reason: str, trace: TraceParent) -> Run:
        """Store the wish that a run ends and return the run as it is then. Raises EngineError UNKNOWN_RUN."""
        key = RunKey(caller.tenant, run_id)
        head = await self.store.head(key)
        if head.state in FINAL:
            return head.run
        await self._signal_cancel(key, CancelSignal(reason=reason, subject=caller.subject, trace_id=trace.trace_id))
        return (await self.store.head(key)).run

    def attached(self, key: RunKey, *, starter: RunRequest | None = None) -> AbstractContextManager[None]:
        """Count a reader of a run while it is inside; ``starter`` is the request of the one who started it."""
        policy = starter.options.on_disconnect if starter is not None else None
        return self._presence.attached(key, cancel_when_alone=policy == DisconnectPolicy.DISCONNECT_POLICY_CANCEL)

    async def serve(self) -> None:
        """Claim and work on runs until drained or cancelled."""
        await self._worker.serve()

    async def drain(self, grace: float) -> None:
        """Start and claim no more, give runs ``grace`` seconds to end, then put the rest back for another process."""
        self._draining = True
        await self._worker.drain(grace)
        self._presence.close()
        for task in self._side_tasks:
            task.cancel()

    # How it works

    async def _answer(self, key: RunKey, resume: ResumeSignal, request_id: str, fingerprint: str) -> Created:
        return await self.store.answer(
            Answers(
                key=key,
                interrupt_ids=tuple(decision.interrupt_id for decision in resume.decisions),
                signal_id=f"resume:{new_id()}",
                signal=Signal(resume=resume).SerializeToString(),
                request_id=request_id,
                fingerprint=fingerprint,
            )
        )

    async def _answer_question(
        self, caller: Caller, request: RunRequest, fingerprint: str, trace: TraceParent
    ) -> Created | None:
        """Take a message as the answer to the one open question of its conversation; None: there is none."""
        if request.on_busy == BusyPolicy.BUSY_POLICY_REPLACE:
            return None
        conversation = await self.store.get_conversation(caller.tenant, request.conversation_id)
        if not conversation.active_run_id:
            return None
        head = await self.store.head(RunKey(caller.tenant, conversation.active_run_id))
        item = only_question(head.run.interrupts)
        if head.state != RunState.RUN_STATE_INTERRUPTED or item is None:
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

    async def _signal_cancel(self, key: RunKey, signal: CancelSignal) -> None:
        await self.store.signal(key, Signal(cancel=signal).SerializeToString(), "cancel")

    def _on_abandoned(self, key: RunKey) -> None:
        async def cancel() -> None:
            try:
                await self._signal_cancel(key, CancelSignal(reason="nobody is attached any more", subject="engine"))
            except EngineError:  # deleted meanwhile
                return
            except StoreError as error:
                log.warning("run %s, which nobody reads, cannot be cancelled: %r", key.run_id, error)
                self._presence.begun(key)  # so that it is tried again

        task = asyncio.create_task(cancel(), name="cancel a run nobody reads")
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)

    def _agent(self, name: str) -> Agent:
        agent = self._agents.get(name) if name else self._default
        if agent is None:
            raise EngineError(
                "UNKNOWN_AGENT", f"No agent is named {name[:100]!r}; there are: {', '.join(self._agents)}."
            )
        return agent

    def _check_options(self, agent: Agent, request: RunRequest) -> None:
        options, wrong = request.options, dict[str, str]()
        if options.max_steps > agent.limits.max_steps:
            wrong["options.max_steps"] = f"can only lower the agent's limit of {agent.limits.max_steps}"
        models = list(agent.models_by_name) or [self._model.name]
        if options.model and options.model not in models:
            wrong["options.model"] = f"must be one of {', '.join(models)}"
        if wrong:
            raise FieldError(wrong)
        for name in options.interceptors:
            self._check_switchable(agent, name)

    def _check_switchable(self, agent: Agent, name: str) -> None:
        switchable = [item.name for item in agent.interceptors if item.switchable]
        if name not in switchable:
            there_are = (
                f"switchable ones: {', '.join(switchable)}" if switchable else "it has none that can be switched"
            )
            raise EngineError(
                "NOT_SWITCHABLE", f"Interceptor {name[:100]!r} of agent {agent.name} cannot be switched; {there_are}."
            )


def text_in(message: Message) -> str:
    """Return the text of a message, its parts in lines."""
    return "\n".join(part.text for part in message.parts if part.WhichOneof("part") == "text")


def _title(message: Message) -> str:
    text = next((part.text for part in message.parts if part.WhichOneof("part") == "text" and part.text.strip()), "")
    line = text.strip().partition("\n")[0].strip()
    return line if len(line) <= _TITLE else line[: _TITLE - 1] + "…"
