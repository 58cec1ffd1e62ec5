"""The state of one agent at work: what is saved of it, and the messages its model is given.

Wholly inside the checkpoint and the messages beside it, so that whoever claims the run after a crash has the
same trace. A run has one trace at its root and one below it for every sub-agent that a call runs; counters of
steps, calls and context are each trace's own, while indexes, places, questions and session values are the
root's. Nothing here knows how events are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from dualclaw import Message, Role, RunOptions, Usage
from dualclaw_server.engine.checkpoint import Checkpoint, Question, RunRecord
from dualclaw_server.engine.history import History, calls_of
from dualclaw_server.engine.model import ChatModel, ModelRequest, ModelResponse
from dualclaw_server.engine.session import Values
from dualclaw_server.engine.store import Loaded, RunKey, RunMessage

if TYPE_CHECKING:
    from dualclaw_server.engine.agent import Limits

_INT32_MAX = 2**31 - 1
ASIDE = "history edit"
"""Scope of messages that only the model is given: kept with the run, never part of the conversation."""


class Services(Protocol):
    """What a trace can reach outside of its own state. Implemented by ``scope.Scope``."""

    async def ask(self, request: ModelRequest, model: ChatModel | None) -> ModelResponse:
        """Make a model call beside the conversation."""

    async def recall(self, name: str) -> bytes | None:
        """Return a value kept for the tenant."""

    async def keep(self, name: str, value: bytes) -> None:
        """Keep a value for the tenant."""

    async def review_plan(self, steps: Sequence[str]) -> Sequence[str]:
        """Have the agent's interceptors see a plan."""


class Trace:
    """One agent in one run, as strategies, interceptors and tools see it."""

    def __init__(
        self,
        key: RunKey,
        record: RunRecord,
        checkpoint: Checkpoint,
        history: Sequence[Message],
        messages: Sequence[RunMessage],
        *,
        agent: str = "",
        parent: Trace | None = None,
        call_id: str = "",
    ) -> None:
        """``history`` are the messages before, ``messages`` the agent's own by position.

        A sub-agent has a ``parent``, and the ``call_id`` that runs it.
        """
        self.key = key
        self.record = record
        self.checkpoint = checkpoint
        self.agent = agent or record.request.agent
        """Name of the agent."""
        self.parent = parent
        self.call_id = call_id
        """The call this sub-agent works for; empty at the root."""
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.recovered = False
        """True: this segment was begun before, by a process that is gone."""
        self.ending = ""
        """How the agent ended, for its end hooks: a stop reason in lower case, "transferred", "put_back" (it has not:
        another worker goes on with the run), or the code of a diagnosis ("model.timeout").
        """
        self.context_window: int = parent.context_window if parent is not None else 128_000
        """Tokens that the model of this run can take, input and output together."""
        self.services: Services | None = parent.services if parent is not None else None
        """What is around the agent; None before it is opened and once it has ended."""
        self.limits: Limits | None = None
        """Limits of the agent in this segment; None until its shape is made."""
        self.mask: Callable[[object], object] = _as_it_is
        """Makes JSON data such as people may see it, by every interceptor of the agent."""
        self._history = history if isinstance(history, History) else History(history)
        self._own = {item.position: item.message for item in messages}
        self._asides = {item.position for item in messages if item.scope == ASIDE}
        self._call_ids: set[str] | None = None
        root = self.root.checkpoint
        root.next_position = max([root.next_position, *(position + 1 for position in self._own)])
        if parent is not None:
            self.root.call_ids().update(*map(calls_of, self._own.values()))

    @classmethod
    def of_run(cls, loaded: Loaded, record: RunRecord, checkpoint: Checkpoint, history: Sequence[Message]) -> Trace:
        """Return the trace at the root of a stored run."""
        own = [message for message in loaded.messages if message.scope in ("", ASIDE)]
        return cls(loaded.head.key, record, checkpoint, history, own, agent=checkpoint.agent)

    # Who and what

    @property
    def root(self) -> Trace:
        """The trace at the run's root; this one if it is that."""
        return self if self.parent is None else self.parent.root

    @property
    def conversation_id(self) -> str:
        """Id of the conversation."""
        return self.record.request.conversation_id

    @property
    def options(self) -> RunOptions:
        """What the caller asked of this run."""
        return self.record.request.options

    @property
    def subject(self) -> str:
        """Who started the run."""
        return self.record.subject

    @property
    def roles(self) -> frozenset[str]:
        """Roles of who started the run."""
        return frozenset(self.record.roles)

    @property
    def path(self) -> tuple[str, ...]:
        """Names of the agents from the root down to this one."""
        return (*self.parent.path, self.agent) if self.parent is not None else (self.agent,)

    def line(self) -> Iterator[Trace]:
        """Yield this agent's trace and those above it, the root last."""
        trace: Trace | None = self
        while trace is not None:
            yield trace
            trace = trace.parent

    @property
    def segment(self) -> int:
        """Number of the segment, from 1."""
        return self.root.checkpoint.segment

    @property
    def user_text(self) -> str:
        """Text of the question: the caller's, or what the sub-agent was asked."""
        message = self._own[min(self._own)] if self.parent is not None and self._own else self.record.request.message
        return "\n".join(part.text for part in message.parts if part.WhichOneof("part") == "text")

    # Values

    @property
    def session(self) -> Values:
        """Values of the whole run, shared by its agents and tools on purpose only."""
        return Values(self.root.checkpoint.session)

    def extras(self, name: str) -> Values:
        """Return the state of one interceptor in this run; ``name`` is the interceptor's."""
        return Values(self.checkpoint.extras, f"{name}/")

    async def recall(self, name: str) -> bytes | None:
        """Return a small value kept for the tenant over runs; None: there is none."""
        return await self._reach().recall(name)

    async def keep(self, name: str, value: bytes) -> None:
        """Keep a small value for the tenant over runs; the last writer wins."""
        await self._reach().keep(name, value)

    async def ask(self, request: ModelRequest, model: ChatModel | None = None) -> ModelResponse:
        """Make a model call beside the conversation, such as a summary; it counts in usage and limits.

        It passes ``intercept_call`` of every interceptor and is not retried. Raises ModelError.
        """
        return await self._reach().ask(request, model)

    async def review_plan(self, steps: Sequence[str]) -> Sequence[str]:
        """Have ``on_plan`` of every interceptor see a plan; returns it as they corrected it.

        Raises Outcome when one of them wants the call, or the run, to stop.
        """
        return await self._reach().review_plan(steps)

    def _reach(self) -> Services:
        if self.services is None:
            raise RuntimeError("a trace that belongs to no segment at work can reach nothing")
        return self.services

    # Messages

    @property
    def settled(self) -> int:
        """How many messages of the context, from its first, the conversation's next run is given again."""
        return 0 if self.checkpoint.HasField("context") else len(self._history)

    def context(self) -> list[Message]:
        """Return what the next model call gets: all messages in order, or what the context was rewritten to."""
        if not self.checkpoint.HasField("context"):
            return [*self._history, *(self._own[position] for position in sorted(self._own))]
        view = self.checkpoint.context
        known = {message.id: message for message in (*self._history, *self._own.values())}
        chosen = [
            item.message if item.WhichOneof("item") == "message" else known[item.message_id]
            for item in view.items
            if item.WhichOneof("item") == "message" or item.message_id in known
        ]
        later = sorted(position for position in self._own if position >= view.next_position)
        return [*chosen, *(self._own[position] for position in later)]

    def rewrite_context(self, messages: Sequence[Message]) -> None:
        """Have exactly these messages, and whatever comes later, given to the model from now on.

        Messages of the conversation are kept by their id; a message without an id, or with one that is not
        theirs or whose content differs, is kept as it is. The transcript is never changed.
        """
        known = {message.id: message for message in (*self._history, *self._own.values())}
        places = {message.id: position for position, message in self._own.items()}
        view = self.checkpoint.context
        view.Clear()
        view.next_position = self.root.checkpoint.next_position
        for state in self.checkpoint.calls:  # their results have reserved places and are still to come
            if state.position not in self._own:
                view.next_position = min(view.next_position, state.position)
        for message in messages:
            if not message.id or known.get(message.id) != message:
                view.items.add(message=message)
            elif places.get(message.id, -1) < view.next_position:  # else it follows by itself
                view.items.add(message_id=message.id)
        self.checkpoint.context.SetInParent()

    def own_messages(self) -> list[Message]:
        """Return the agent's own messages of this run in order, what it was asked first."""
        return [self._own[position] for position in sorted(self._own) if position not in self._asides]

    def said(self) -> str:
        """Return the text of everything the agent has said in this run, a blank line between answers."""
        written = (message for message in self.own_messages() if message.role == Role.ROLE_ASSISTANT)
        texts = ("".join(p.text for p in message.parts if p.WhichOneof("part") == "text") for message in written)
        return "\n\n".join(filter(None, texts))

    def place_of(self, message_id: str) -> int:
        """Return where one of the agent's own messages stands. Raises KeyError."""
        return {message.id: position for position, message in self._own.items()}[message_id]

    def call_ids(self) -> set[str]:
        """Return every tool call id that is taken in this run and its conversation."""
        root = self.root
        if root._call_ids is None:
            root._call_ids = set(root._history.call_ids).union(*map(calls_of, root._own.values()))
        return root._call_ids

    def take_call_ids(self, messages: Iterable[Message]) -> None:
        """Count the calls in messages of sub-agents among those whose ids are taken."""
        self.call_ids().update(*map(calls_of, messages))

    def reserve(self, count: int = 1) -> int:
        """Reserve places for ``count`` messages and return the first."""
        root = self.root.checkpoint
        first = root.next_position
        root.next_position += count
        return first

    def next_index(self) -> int:
        """Take the next index for a step."""
        root = self.root.checkpoint
        index = root.next_index
        root.next_index += 1
        return index

    def put(self, position: int, message: Message) -> RunMessage:
        """Put a message at a reserved place; returns it as the store takes it."""
        self._own[position] = message
        if self.root._call_ids is not None:
            self.root._call_ids |= calls_of(message)
        return RunMessage(position, message, self.call_id)

    def put_aside(self, message: Message) -> RunMessage:
        """Have the model given a message after all there are, and after the results that are still to come."""
        position = self.reserve()
        self._own[position] = message
        self._asides.add(position)
        return RunMessage(position, message, ASIDE)

    # People

    @property
    def questions(self) -> Sequence[Question]:
        """Everything people were asked in this run, in order."""
        return self.root.checkpoint.questions

    def answer_to(self, asked_by: str, key: str = "") -> Question | None:
        """Return the answered question that an interceptor asked about this agent's run under ``key``; None: none yet.

        Each call of a sub-agent is a run of its own here.
        """
        for question in reversed(self.root.checkpoint.questions):
            mine = question.call_id == self.call_id and not question.HasField("index")
            if mine and question.asked_by == f"{asked_by}/{key}" and question.HasField("decision"):
                return question
        return None

    # Counters

    @property
    def model_calls(self) -> int:
        """Model calls made by this agent."""
        return self.checkpoint.model_calls

    @property
    def tool_calls(self) -> int:
        """Tool calls made by this agent and those below it."""
        return self.checkpoint.tool_calls

    def add_usage(self, usage: Usage) -> None:
        """Add a call's usage to this agent's and to those above it; a field stays absent until some call reports it."""
        for trace in self.line():
            total = trace.checkpoint.usage
            for field, value in usage.ListFields():
                setattr(total, field.name, min(_INT32_MAX, getattr(total, field.name) + value))

    @property
    def usage(self) -> Usage | None:
        """Tokens used so far, sub-agents included; None when no model reported any."""
        return self.checkpoint.usage if self.checkpoint.HasField("usage") else None

    @property
    def tokens(self) -> int:
        """Input and output tokens reported so far, sub-agents included."""
        return self.checkpoint.usage.input_tokens + self.checkpoint.usage.output_tokens


def _as_it_is(value: object) -> object:
    return value
