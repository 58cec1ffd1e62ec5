"""The router: an ordered list of models, of which the first that answers is used.

Rules and their reasons:

- Whatever may be this vendor's own trouble goes to the next model, a refused key or request included: another
  vendor has another key and may take the request. It never retries; retrying the whole list is the caller's.
- A conversation that is too long goes only to a later model with a larger window. Without one that is the error,
  unless an earlier model may be back in a moment; the caller shortens the conversation or tries again.
- A model that fails in the middle of its answer is replaced too: the caller gets a Restart and then the whole
  answer of the next one, so a beginning that was to be continued (``prefix``) is not given on.
- Each model has its circuit, so one that is down costs nothing. It is asked again by the first call after its
  cooldown, in its old place.
- Cancelling ends everything at once; nothing falls over.
- Of several failures the caller gets the one it can do most about, and a text that names them all.
"""

import copy
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Final, Literal, Protocol

from dualclaw import Usage
from dualclaw.errors import Reason
from dualclaw_server.engine.model import (
    ChatModel,
    ModelChunk,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    Restart,
    ToolSpec,
)
from dualclaw_server.models.breaker import Breaker, BreakerPolicy, CircuitOpenError, GuardedModel
from dualclaw_server.models.usage import MOST_TOKENS

USUAL_POLICY: Final = BreakerPolicy()
FALLS_OVER: Final[frozenset[Reason]] = frozenset(
    {
        "MODEL_UNAVAILABLE",
        "MODEL_OVERLOADED",
        "MODEL_TIMEOUT",
        "MODEL_STREAM_BROKEN",
        "MODEL_BAD_RESPONSE",
        "MODEL_AUTH",
    }
)
"""Failures that any next model may help with; CONTEXT_OVERFLOW has a rule of its own."""

Outcome = Literal["ok", "failed", "fallback", "open"]
"""How an attempt at a model ended.

"ok": it answered. "fallback": it failed, and the next model took over. "failed": it failed, and no other took
over. "open": its circuit was open, so it was not asked, whatever came next.
"""


class RouteObserver(Protocol):
    """Is told once of every attempt at a model, except cancelled ones. Implemented by ``RouteMetrics``."""

    def __call__(self, model: str, outcome: Outcome, reason: Reason | Literal[""]) -> None:
        """Note an attempt; ``reason`` is empty when it was ok. Must neither block nor raise."""


def ignore_route(model: str, outcome: Outcome, reason: Reason | Literal[""]) -> None:
    """Note nothing."""


class RouterModel:
    """Several models as one, tried in their order; or a single one, guarded and counted.

    Args:
        models: the models, best first.
        labels: what errors, counts and Restarts call them, in their order; empty: their names.
        breaker: when the circuits open that are put around models without one; None: none are.
        observe: is told of every attempt.
        name: what it is chosen by; empty: the models' names, separated by commas.

    Raises:
        ValueError: there is no model, or not a label for each.
    """

    def __init__(
        self,
        models: Sequence[ChatModel],
        *,
        labels: Sequence[str] = (),
        breaker: BreakerPolicy | None = USUAL_POLICY,
        observe: RouteObserver = ignore_route,
        name: str = "",
    ) -> None:
        if not models:
            raise ValueError("a router needs at least one model")
        if labels and len(labels) != len(models):
            raise ValueError(f"a router needs a label for each model: {len(models)}, not {len(labels)}")
        self._labels = tuple(labels or (model.name for model in models))
        self._models = [_guarded(model, label, breaker) for model, label in zip(models, self._labels, strict=True)]
        self._observe = observe
        self._name = name or ",".join(model.name for model in models)

    @property
    def name(self) -> str:
        """The name it was given, or those of its models."""
        return self._name

    @property
    def traits(self) -> ModelTraits:
        """What every one of the models can do.

        Only the first is ever given a beginning to go on from, so that one alone decides ``continues``.
        """
        all_traits = [model.traits for model in self._models]
        return ModelTraits(
            context_window=min(traits.context_window for traits in all_traits),
            continues=all_traits[0].continues,
            images=all(traits.images for traits in all_traits),
            native_tools=all(traits.native_tools for traits in all_traits),
        )

    def with_tools(self, tools: Sequence[ToolSpec]) -> "RouterModel":
        """Return a router over the same models, each with these tools, on the same circuits."""
        made = copy.copy(self)
        made._models = [model.with_tools(tools) for model in self._models]
        return made

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Yield what the first model yields; when one fails, a Restart and what the next one yields.

        Raises:
            ModelError: all have failed. Its usage is that of the last failure; the Restarts have the others.
        """
        route = _Route(self._models, self._labels, self._observe)
        while True:
            try:
                async with aclosing(route.model.stream(request)) as chunks:
                    async for chunk in chunks:
                        if isinstance(chunk, ModelResponse):
                            route.answered()
                        yield chunk
                return
            except ModelError as error:
                route.failed(error)
            yield Restart(route.label, route.errors[-1])
            request = replace(request, prefix="")

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Return the answer of the first model that has one; its usage includes what failed attempts have cost.

        There is no Restart here to say that an answer is whole, so only models that continue are asked to.

        Raises:
            ModelError: all have failed.
        """
        route = _Route(self._models, self._labels, self._observe, continuing=bool(request.prefix))
        while True:
            try:
                response = await route.model.generate(request)
            except ModelError as error:
                route.failed(error)
            else:
                route.answered()
                return replace(response, usage=_sum([response.usage, *(error.usage for error in route.errors)]))

    async def aclose(self) -> None:
        """Close all models, also when closing one of them fails."""
        async with AsyncExitStack() as stack:
            for model in self._models:
                stack.push_async_callback(model.aclose)


class _Route:
    """Where one call stands in the list."""

    def __init__(
        self, models: Sequence[ChatModel], labels: Sequence[str], observe: RouteObserver, *, continuing: bool = False
    ) -> None:
        self._models = models
        self._labels = labels
        self._observe = observe
        self._continuing = continuing
        self._position = 0
        self._tried: list[str] = []
        self.errors: list[ModelError] = []

    @property
    def model(self) -> ChatModel:
        """The model to ask."""
        return self._models[self._position]

    @property
    def label(self) -> str:
        """What it is called."""
        return self._labels[self._position]

    def answered(self) -> None:
        """Note that the model answered."""
        self._observe(self.label, "ok", "")

    def failed(self, error: ModelError) -> None:
        """Go on to the next model that may help.

        Raises:
            ModelError: there is none.
        """
        self._tried.append(self.label)
        self.errors.append(error)
        following = self._following(error)
        refused = isinstance(error, CircuitOpenError)
        outcome: Outcome = "open" if refused else "failed" if following is None else "fallback"
        self._observe(self.label, outcome, error.reason)
        if following is None:
            raise self._verdict() from None
        self._position = following

    def _following(self, error: ModelError) -> int | None:
        overflow = error.reason == "CONTEXT_OVERFLOW"
        if not overflow and error.reason not in FALLS_OVER:
            return None
        window = self.model.traits.context_window
        for place in range(self._position + 1, len(self._models)):
            traits = self._models[place].traits
            if (traits.context_window > window or not overflow) and (traits.continues or not self._continuing):
                return place
        return None

    def _verdict(self) -> ModelError:
        """Return the failure the caller can do most about; of equals, the first model's."""
        if len(self.errors) == 1:
            return self.errors[0]
        best = min(self.errors, key=_hopelessness)
        told = [f"{label}: {error.message}" for label, error in zip(self._tried, self.errors, strict=True)]
        waits = [error.retry_after for error in self.errors if error.retryable]
        known = [wait for wait in waits if wait is not None]
        return ModelError(
            best.reason,
            f"No model of {len(told)} could answer. {' '.join(told)}",
            retryable=best.retryable,
            detail=best.detail,
            hint=best.hint,
            # Trying again makes sense as soon as any of them may be back.
            retry_after=min(known) if known and len(known) == len(waits) else None,
            usage=self.errors[-1].usage,
        )


def _hopelessness(error: ModelError) -> int:
    if error.retryable:
        return 1 if isinstance(error, CircuitOpenError) else 0
    return 2 if error.reason == "CONTEXT_OVERFLOW" else 3


def _guarded(model: ChatModel, label: str, policy: BreakerPolicy | None) -> ChatModel:
    if policy is None or isinstance(model, GuardedModel):
        return model
    return GuardedModel(model, Breaker(label, policy))


def _sum(usages: Sequence[Usage | None]) -> Usage:
    """Add usages up; a field stays absent until one reports it."""
    total = Usage()
    for usage in usages:
        for field, value in usage.ListFields() if usage is not None else ():
            setattr(total, field.name, min(getattr(total, field.name) + value, MOST_TOKENS))
    return total
