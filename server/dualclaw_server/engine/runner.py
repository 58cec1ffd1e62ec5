"""The runner: what callers ask of the engine. It accepts runs, has them worked on, cancels them.

Nobody iterates a runner. ``start`` stores a run and returns; a worker claims it, maybe the one of this process,
maybe that of the next after a crash; whoever wants to see it follows its log in the store.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import dualclaw
from dualclaw import (
    BusyPolicy,
    InterceptorInfo,
    Message,
    ResumeRequest,
    Role,
    Run,
    RunRequest,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.answering import Answering, busy
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.checkpoint import FORMAT, CancelSignal, RunRecord, Signal
from dualclaw_server.engine.clock import set_now
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.presence import PATIENCE, Presence
from dualclaw_server.engine.segment import read_switches, switches_name
from dualclaw_server.engine.store import FINAL, Created, NewRun, RunKey, RunStore
from dualclaw_server.engine.worker import RETRY, Worker

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
        retry: seconds before a run that cannot be worked on now is taken up again.
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
        retry: float = RETRY,
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
        self._answering = Answering(store, self._agents)
        self._presence = Presence(store, self._cancel_abandoned, patience)
        self._draining = False
        self._worker = Worker(
            store,
            self._agents,
            model,
            name=worker or new_id(),
            capacity=capacity,
            retry=retry,
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
                    if item.switchable:
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

    async def start(
        self, caller: Caller, request: RunRequest, trace: TraceParent, *, may_answer: bool = True
    ) -> Created:
        """Store a new run, or find the one its request_id already made.

        In a conversation whose run waits for an answer the message is that answer, if ``may_answer``.

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
        set_now(accepted.message.create_time)
        record = RunRecord(
            format=FORMAT,
            request=accepted,
            subject=caller.subject,
            roles=sorted(caller.roles),
            trace_id=trace.trace_id,
            parent_span_id=trace.span_id,
        )
        replaced = CancelSignal(reason="replaced by another run", subject=caller.subject, trace_id=trace.trace_id)
        new = NewRun(
            key=key,
            conversation_id=accepted.conversation_id,
            new_conversation=not request.conversation_id,
            title=_title(accepted.message),
            request_id=request.request_id,
            fingerprint=fingerprint,
            record=record.SerializeToString(),
            run=Run(id=key.run_id, conversation_id=accepted.conversation_id, agent=agent.name, claw=request.claw),
            message=accepted.message,
            on_busy=request.on_busy,
            replace_signal=Signal(cancel=replaced).SerializeToString(),
        )
        if request.on_busy == BusyPolicy.BUSY_POLICY_REPLACE:
            return await self.store.create(new)
        try:  # as if it could not wait: a known request_id comes first, then an open question, then the queue
            return await self.store.create(dataclasses.replace(new, on_busy=BusyPolicy.BUSY_POLICY_REJECT))
        except EngineError as error:
            if error.reason != "CONVERSATION_BUSY":
                raise
            head = await self._answering.active(caller, accepted.conversation_id)
            if may_answer:
                answered = await self._answering.by_message(caller, head, accepted, fingerprint, trace)
                if answered is not None:
                    return answered
            if request.on_busy != BusyPolicy.BUSY_POLICY_QUEUE:
                raise busy(error, head) from None
        return await self.store.create(new)

    async def resume(self, caller: Caller, request: ResumeRequest, trace: TraceParent) -> Created:
        """Store answers to a run that asked, all of them or none, and have it go on.

        Raises:
            EngineError: UNKNOWN_RUN, REQUEST_ID_REUSED, ALREADY_ANSWERED, UNKNOWN_INTERRUPT, RUN_NOT_INTERRUPTED,
                PERMISSION_DENIED; FieldError for answers that do not fit their questions.
        """
        if self._draining:
            raise EngineError("OVERLOADED", "This engine is shutting down; ask another one.", retry_after=1.0)
        return await self._answering.resume(caller, request, trace)

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
        return self._presence.attached(key, policy)

    async def serve(self) -> None:
        """Claim and work on runs until drained or cancelled."""
        await self._worker.serve()

    async def drain(self, grace: float) -> None:
        """Start and claim no more, give runs ``grace`` seconds to end, then put the rest back for another process."""
        self._draining = True
        await self._worker.drain(grace)
        self._presence.close()

    # How it works

    async def _signal_cancel(self, key: RunKey, signal: CancelSignal) -> None:
        await self.store.signal(key, Signal(cancel=signal).SerializeToString(), "cancel")

    async def _cancel_abandoned(self, key: RunKey) -> None:
        await self._signal_cancel(key, CancelSignal(reason="nobody is attached any more", subject="engine"))

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


def _title(message: Message) -> str:
    text = next((part.text for part in message.parts if part.WhichOneof("part") == "text" and part.text.strip()), "")
    line = text.strip().partition("\n")[0].strip()
    return line if len(line) <= _TITLE else line[: _TITLE - 1] + "…"
