"""Interceptors: one class, every moment of a run.

Rules, kept by ``chain`` and each tested:

- One order for every hook: start hooks by ``order`` (ties: as the agent lists them), end hooks reversed, around
  hooks with the lowest ``order`` outermost. Order and ``enabled`` are read once per segment, so no start is
  without its end; ``enabled`` covers every hook.
- A hook acts by what it returns (``outcome``): None goes on; Replace, Suspend, End and Fail also stop the
  interceptors after it in that hook. Around hooks, and others whose return value is taken, raise them. Only guards
  are not stopped by a Replace: what was put in place of a thing is what they have to check.
- An outcome that a hook cannot have (``REPLACES``) is a failure of the interceptor, like an exception.
- Whoever was called at a start is called at its end, also after a failure, a suspension or a cancel; at the end
  hooks of a call that was suspended the observation is empty.
- An exception is the interceptor's own failure, a CancelledError too when nobody cancelled the run. ``fail_closed``
  False: it is logged and the run goes on as if the hook were not there. True: nothing passes unchecked - the call
  fails, or, outside of calls, the run. ``before_agent`` is always closed. End hooks that take too long have failed.
- The ModelResponse is the answer, deltas are its preview: where they differ in the end, clients get a rewind.
- Instances are shared by all runs and hold no state of any: ``trace.extras(name)`` does, and is saved with it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dualclaw import ContentPart, Diagnosis, Message
from dualclaw_server.engine.model import (
    ChatModel,
    ModelChunk,
    ModelError,
    ModelOptions,
    ModelRequest,
    ModelResponse,
)
from dualclaw_server.engine.outcome import End, Fail, Outcome, Replace, Suspend
from dualclaw_server.engine.tool import Tool, ToolContext

if TYPE_CHECKING:
    from dualclaw_server.engine.agent import Limits
    from dualclaw_server.engine.call import Call
    from dualclaw_server.engine.strategy import Strategy
    from dualclaw_server.engine.trace import Trace

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The shape of one segment: what ``before_agent`` may change for this run only (``dataclasses.replace``)."""

    instructions: str
    tools: tuple[Tool, ...]
    model: ChatModel
    limits: Limits
    strategy: Strategy | None
    """None: chosen by the tools there are in the end, ReAct or Chat."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(self.tools))
        for tool in self.tools:
            if not isinstance(tool, Tool):
                raise TypeError(f"tools of a run are Tools, not {type(tool).__name__}")


@dataclass(slots=True)
class Prompt:
    """What the next model call gets. Hooks change it in place; it is of this call only, its messages are copies.

    For a change that stays, use ``trace.rewrite_context`` too.
    """

    messages: list[Message]
    instructions: str
    tools: list[Tool]
    """Tools the model is told of; a call of one that is left out here is still run."""
    options: ModelOptions = field(default_factory=ModelOptions)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model call on its way through the interceptors."""

    trace: Trace
    model: str
    request: ModelRequest
    attempt: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call on its way through the interceptors."""

    trace: Trace
    call: Call
    tool: Tool
    args: Mapping[str, object]
    """What the tool is given."""
    context: ToolContext
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a result does besides being one."""

    kind: str
    """"transfer": another agent takes over; "exit": the run ends with ``target`` as its answer."""
    target: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What came of a call: its result, or why there is none."""

    parts: Sequence[ContentPart] = ()
    diagnosis: Diagnosis | None = None
    """Of an error, or a note beside a result."""
    is_error: bool = False
    error: BaseException | None = None
    """The exception behind it; never saved."""
    handoff: Handoff | None = None
    not_done: bool = False
    """True: it is certain that nothing happened."""

    @property
    def text(self) -> str:
        """All text of it."""
        return "\n".join(part.text for part in self.parts if part.WhichOneof("part") == "text")


EMPTY = Observation()
"""What end hooks of a suspended or cancelled call are given."""

ModelNext = Callable[[ModelCall], AsyncGenerator[ModelChunk, None]]
AnswerNext = Callable[[ModelCall], Awaitable[ModelResponse]]
ToolNext = Callable[[ToolRequest], Awaitable[Observation]]


class Interceptor:
    """Sees and changes everything that happens in a run. Override what you need; every hook does nothing.

    Args:
        name: unique within an agent; empty: made from the class ("HitlInterceptor" is "hitl").
        order: lower is outer and earlier.
        enabled: False: off until it is switched on.
        switchable: True: callers may switch it per run, operators for good.
        fail_closed: True: its own failure lets nothing pass; see above.

    Raises:
        ValueError: the name cannot be used, or a guard was declared switchable.
    """

    guard = False
    """True for classes that protect something: always fail-closed, never switchable by callers."""

    def __init__(
        self,
        *,
        name: str = "",
        order: int = 0,
        enabled: bool = True,
        switchable: bool = False,
        fail_closed: bool = False,
    ) -> None:
        self.name = name or _snake(type(self).__name__)
        self.order = order
        self.enabled = enabled
        self.switchable = switchable
        self.fail_closed = fail_closed or self.guard
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"interceptor name {self.name!r}: use 1 to 64 of letters, digits, _ . and -")
        if switchable and self.guard:
            raise ValueError(f"interceptor {self.name} protects something, so it is never switchable")

    async def aclose(self) -> None:
        """Release what all runs share (connections, files), once no run is at work any more."""

    # The run

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        """Return the shape of this run; called on every start and resume. A failure here fails the run."""
        return config

    async def on_agent_start(self, trace: Trace) -> Outcome | None:
        """A segment begins: a start, a resume, or (``trace.recovered``) the same one again after a crash."""

    async def on_agent_end(self, trace: Trace) -> None:
        """The segment ends, whatever happened. It can be failed (raise Fail), nothing else."""

    def mask(self, value: object) -> object:
        """Return JSON data (text, or a tree with texts) as events, spans and logs may show it; never fails."""
        return value

    def needs_approval(self, tool: Tool) -> bool:
        """Tell whether people may be asked before a tool runs; for what is shown of an agent."""
        return False

    # The model

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        """A model call is next. ``prompt`` may be changed; Replace takes a whole Prompt."""

    async def on_prepare(self, trace: Trace, options: ModelOptions, prompt: Prompt) -> Outcome | None:
        """The request of an attempt is built. Replace takes ModelOptions; more system text goes into ``prompt``."""

    async def intercept_stream(self, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
        """Stand around a model call that streams; the last chunk is a ModelResponse.

        ``call_next`` may be called again; when something was yielded before, yield a Restart first.
        """
        async with aclosing(call_next(call)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def intercept_call(self, call: ModelCall, call_next: AnswerNext) -> ModelResponse:
        """Stand around a model call that does not stream; unless overridden, ``intercept_stream`` does."""

        async def one_piece(inner: ModelCall) -> AsyncGenerator[ModelChunk, None]:
            yield await call_next(inner)

        async with aclosing(self.intercept_stream(call, one_piece)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, ModelResponse):
                    return chunk
        raise ModelError("MODEL_BAD_RESPONSE", f"Interceptor {self.name} gave no answer.", retryable=False)

    async def on_reason_retry(self, trace: Trace, error: ModelError, attempt: int, prompt: Prompt) -> bool:
        """Attempt ``attempt`` (from 1) failed. True: prompt or context was changed, so assemble and try again,
        also after an error that is not transient (CONTEXT_OVERFLOW).
        """
        return False

    async def on_reason_end(
        self, trace: Trace, response: ModelResponse, message: Message, duration: float
    ) -> Outcome | None:
        """The model has answered; ``message`` is what is saved. Replace takes a Message. ``duration`` in seconds.

        After a suspension it is called again for the same answer.
        """

    # Tools

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        """A batch of calls is next and none has run. Arguments may be changed (``call.change``); Replace takes new
        arguments of calls, by their id.
        """

    async def on_plan(self, trace: Trace, plan: Sequence[str]) -> Outcome | None:
        """The plan is being made or revised. Replace takes the corrected steps."""

    async def on_tool_call_start(self, trace: Trace, call: Call) -> Outcome | None:
        """A call is next. Replace takes an Observation: the tool is not run."""

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        """Stand around a tool. ``call_next`` may be called again: everything further in runs again.

        Other arguments go in with ``dataclasses.replace``; a call that people approved is approved anew then.
        """
        return await call_next(request)

    async def on_tool_call_end(
        self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
    ) -> Outcome | None:
        """A call has ended, one way or another. Replace takes an Observation. ``duration`` in seconds.

        After a suspension here it is called again with the same observation; the tool is not run again.
        """

    async def on_action_end(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        """The batch is done; not called when it was suspended, and again after a suspension here."""

    # Deprecated names, still called, with a DeprecationWarning at the agent's construction

    async def on_thought(self, trace: Trace, thought: str) -> Outcome | None:
        """Deprecated: use on_reason_end."""

    async def on_action(self, trace: Trace, name: str, args: Mapping[str, object]) -> Outcome | None:
        """Deprecated: use on_tool_call_start."""

    async def on_observation(self, trace: Trace, name: str, observation: str) -> Outcome | None:
        """Deprecated: use on_tool_call_end."""


HOOKS: tuple[str, ...] = tuple(name for name in vars(Interceptor) if name.startswith(("before_", "on_", "intercept_")))
"""Every hook there is."""

DEPRECATED: Mapping[str, str] = {
    "on_thought": "on_reason_end",
    "on_action": "on_tool_call_start",
    "on_observation": "on_tool_call_end",
}
"""Old names and what took their place."""

REPLACES: Mapping[str, type[object]] = {
    "on_reason_start": Prompt,
    "on_prepare": ModelOptions,
    "on_reason_end": Message,
    "on_action_start": Mapping,
    "on_plan": Sequence,
    "on_tool_call_start": Observation,
    "on_tool_call_end": Observation,
    "intercept_stream": ModelResponse,
    "intercept_call": ModelResponse,
    "intercept_tool": Observation,
}
"""What the value of a Replace must be; hooks that are not listed have nothing to replace."""


def outcome_problem(hook: str, outcome: object) -> str:
    """Return why a hook cannot want this; empty when it can."""
    if not isinstance(outcome, Replace | Suspend | End | Fail):
        return f"{hook} must return an outcome or None, not {type(outcome).__name__}"
    if hook == "on_agent_end" and not isinstance(outcome, Fail):
        return f"{hook} can want nothing but Fail: the segment ends"
    if isinstance(outcome, Replace):
        kind = REPLACES.get(DEPRECATED.get(hook, hook))
        if kind is None:
            return f"{hook} has nothing to replace"
        if not isinstance(outcome.value, kind):
            return f"{hook} is replaced by a {kind.__name__}, not {type(outcome.value).__name__}"
    return ""


def _snake(name: str) -> str:
    short = name.removesuffix("Interceptor") or name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", short).lower()
