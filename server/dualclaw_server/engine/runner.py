"""The runner: what callers ask of the engine. It accepts runs, has them worked on, cancels them.

Nobody iterates a runner. ``start`` stores a run and returns; a worker claims it, maybe the one of this process,
maybe that of the next after a crash; whoever wants to see it follows its log in the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import dualclaw
from dualclaw import DisconnectPolicy, Message, Role, Run, RunRequest
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.caller import Caller, TraceParent
from dualclaw_server.engine.checkpoint import FORMAT, CancelSignal, RunRecord, Signal
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.presence import PATIENCE, Presence
from dualclaw_server.engine.store import FINAL, Created, NewRun, RunKey, RunStore, StoreError
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

    def agents_info(self) -> Sequence[dualclaw.Agent]:
        """Return the public records of the agents, the default first."""
        infos = []
        for agent in self._agents.values():
            info = dualclaw.Agent()
            info.CopyFrom(agent.info)
            if not info.models:
                info.models.append(self._model.name)
            infos.append(info)
        return infos

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
        return await self.store.create(
            NewRun(
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
        )

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
            raise EngineError("NOT_SWITCHABLE", f"Agent {agent.name} has no interceptor {name[:100]!r} to switch.")


def _title(message: Message) -> str:
    text = next((part.text for part in message.parts if part.WhichOneof("part") == "text" and part.text.strip()), "")
    line = text.strip().partition("\n")[0].strip()
    return line if len(line) <= _TITLE else line[: _TITLE - 1] + "…"
