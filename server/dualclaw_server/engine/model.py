"""What the engine asks of a model: one call in, text and reasoning as they come, one whole message out.

Implemented by the models of ``models``: ``scripted``, the three wire APIs, the router over several of them,
and the ones that give tools to models without tool calls. Nothing is ever bound in place: ``with_tools``
returns a new model, so concurrent requests cannot see each other's tools.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dualclaw import Message, Usage
from dualclaw.errors import EngineError, Reason

FinishReason = Literal["stop", "tool_calls", "length", "content_filter"]
"""Why the model stopped, normalised. "tool_calls" exactly when the message has calls, whatever the vendor says."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model sees it. ``parameters`` is a JSON schema of type object, as JSON text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What one call may vary; None leaves it to the vendor."""

    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends; they are not part of it."""
    tool_choice: str | None = None
    """"auto", "none", "required", or the name of the one tool that must be called."""
    parallel_tool_calls: bool | None = None
    response_schema: str | None = None
    """JSON schema, as JSON text, that the text of the answer must fit (structured output)."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call. ``messages`` are those of the conversation, oldest first; ``instructions`` the system text."""

    messages: Sequence[Message]
    instructions: str = ""
    options: ModelOptions = field(default_factory=ModelOptions)
    prefix: str = ""
    """Beginning of the answer that is shown already: the model goes on from it and gives only what follows.
    Only for models whose ``traits.continues`` is true.
    """
    settled: int = 0
    """How many messages, from the first, are never changed and are given again, the very same objects, by later
    calls: what is made of them may be kept. Whoever gives other messages sets it to 0.
    """


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer, as it arrived; never empty, never cut inside a code point."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More reasoning, as it arrived; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A whole answer.

    ``message`` has role ASSISTANT and its parts in the order the model wrote them; its tool calls have
    canonical ``args_json`` (see the contract) when their arguments are one JSON object; otherwise
    ``args_json`` is empty and ``bad_arguments`` maps the call's id to the raw text. ``id``, ``author`` and
    ``create_time`` are left to the engine. Call ids are never empty and unique within the message.
    """

    message: Message
    finish_reason: FinishReason
    usage: Usage
    """Fields the vendor did not report are absent."""
    bad_arguments: dict[str, str] = field(default_factory=dict)
    model: str = ""
    """Name the vendor gave."""
    request_id: str = ""
    """The vendor's id of the call, for support."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What a model can do, as far as its caller must know."""

    context_window: int = 128_000
    """Tokens of input and output together; a careful figure where it is not known."""
    continues: bool = False
    """True: it can go on from the beginning of an answer (``ModelRequest.prefix``)."""
    images: bool = True
    """False: images must not be sent."""
    native_tools: bool = True
    """False: it has no tool calls of its own."""


class ModelError(EngineError):
    """A model call failed. ``reason`` is MODEL_UNAVAILABLE, MODEL_AUTH, MODEL_OVERLOADED, MODEL_TIMEOUT,
    MODEL_STREAM_BROKEN, MODEL_BAD_RESPONSE or CONTEXT_OVERFLOW; the text names no secret.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        retryable: bool,
        detail: str = "",
        hint: str = "",
        retry_after: float | None = None,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(reason, message, {"hint": hint} if hint else None, retry_after=retry_after)
        self.retryable = retryable
        self.detail = detail
        self.usage = usage
        """Tokens the failed call has cost all the same; None when the vendor did not say."""


@dataclass(frozen=True, slots=True)
class Restart:
    """What came so far is void; the whole answer begins anew, from another model. Given by routers only."""

    model: str
    """Name of the model that answers from here on."""
    error: ModelError
    """Why the one before gave up."""


ModelChunk = TextDelta | ReasoningDelta | Restart | ModelResponse


class ChatModel(Protocol):
    """A model that chats. Safe for any number of calls at once."""

    @property
    def name(self) -> str:
        """Name people choose it by, such as "gpt-4o-mini"."""

    @property
    def traits(self) -> ModelTraits:
        """What it can do."""

    def with_tools(self, tools: Sequence[ToolSpec]) -> ChatModel:
        """Return a new model that may call these tools (none: may call nothing); shares connections with this one."""

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Yield deltas as they arrive and last one ModelResponse. Raises ModelError, also after deltas.

        ModelError.retryable says whether the same call may succeed a moment later; the caller retries, a model
        never does by itself.

        Closing the generator, or cancelling the task that iterates it, ends the call at the vendor at once.
        """

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Return the whole answer without streaming; the same outcome as folding ``stream``."""

    async def aclose(self) -> None:
        """Release connections. The model and all made from it by ``with_tools`` are unusable afterwards."""
