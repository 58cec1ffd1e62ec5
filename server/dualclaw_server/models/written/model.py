"""The driver of models that write their tool calls as text: ``text_tools`` and ``json_tools`` say in which form.

It is a model around a model, so every strategy works with it. Rules and their reasons:

- The inner model is never given tools, nor options that speak of them: the request says it all in words, or by a
  schema of the answer, and earlier calls are told (``written.tool_text``).
- The stream is read as it arrives; the message at the end is read anew out of the inner model's, because that
  has the parts which no delta carries (signatures). Both give the same, for every cutting of the text.
- Calls go through the assembler that vendors' calls go through: ids of their own, arguments one JSON object or
  bad, a call whose text was cut off never runnable.
- Where the reader has seen all that counts, the inner call is ended at once. Its usage is not known then, which
  costs less than the rest of what the model would write.
- Without tools, and without calls in the conversation, nothing is changed at all. With calls but no tools any
  more (the last answer of a run) the conversation is told, and nothing is a call.
"""

import copy
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import groupby
from typing import Protocol, Self

from dualclaw import ContentPart, Message, ReasoningPart, Role, Usage
from dualclaw_server.engine.model import (
    ChatModel,
    FinishReason,
    ModelChunk,
    ModelError,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    ReasoningDelta,
    Restart,
    TextDelta,
    ToolSpec,
)
from dualclaw_server.models.sending import check_tool_choice
from dualclaw_server.models.tool_calls import ToolCallAssembler
from dualclaw_server.models.written.tool_text import BoundTool, WrittenCall, bind, has_calls


class Reader(Protocol):
    """Reads one message. Implemented by ``ReActReader`` and ``ChoiceReader``."""

    @property
    def cut(self) -> bool:
        """Everything that counts has been read."""

    def feed(self, piece: str) -> Sequence[TextDelta | ReasoningDelta]:
        """Take the next piece of the text; return what is sure by then."""

    def add(self, part: ContentPart) -> None:
        """Take a part that is no text; it keeps its place."""

    def end(self, finish: FinishReason) -> Sequence[TextDelta | ReasoningDelta]:
        """Give back what was held; the message is over."""

    def blocks(self) -> Sequence[ContentPart | WrittenCall]:
        """Return what the message holds, in order. Raises ModelError: it cannot be read."""


class Form(Protocol):
    """The form calls are written in. Keeps no state of a call. Implemented by ``text_tools`` and ``json_tools``."""

    def request(
        self, request: ModelRequest, tools: Sequence[BoundTool], *, must_call: bool, images: bool
    ) -> ModelRequest:
        """Return the request for the inner model; its options that speak of tools are replaced by the driver.

        Args:
            request: the request as it was made.
            tools: what may be called; none: only the conversation is told.
            must_call: one of them must be.
            images: whether images of results may be sent.
        """

    def reader(self, request: ModelRequest, tools: Sequence[BoundTool]) -> Reader:
        """Return a reader for one answer to the request as it was made."""


class WrittenToolsModel:
    """Gives tool calls to a model that has none. Owns the inner model.

    Args:
        inner: the model; it is never given tools.
        form: how calls are written.
    """

    def __init__(self, inner: ChatModel, form: Form) -> None:
        self._inner = inner
        self._form = form
        self._tools: tuple[BoundTool, ...] = ()

    @property
    def name(self) -> str:
        """The inner model's name."""
        return self._inner.name

    @property
    def traits(self) -> ModelTraits:
        """The inner model's, but that it has tool calls; with tools it does not continue: what is shown of its
        answer was read out of another text.
        """
        inner = self._inner.traits
        return replace(inner, native_tools=True, continues=inner.continues and not self._tools)

    def with_tools(self, tools: Sequence[ToolSpec]) -> Self:
        """Return a new model that may call these tools; it shares the inner one.

        Raises:
            ValueError: a tool's parameters are not a JSON object.
        """
        made = copy.copy(self)
        made._tools = bind(tools)
        return made

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        """Yield deltas as soon as it is sure what they are, and last the ModelResponse. Raises ModelError."""
        tools, asked = self._asked(request)
        if tools is None:
            async with aclosing(self._inner.stream(asked)) as plain:
                async for chunk in plain:
                    yield chunk
            return
        reader = self._form.reader(request, tools)
        said: list[TextDelta | ReasoningDelta] = []
        response: ModelResponse | None = None
        async with aclosing(self._inner.stream(asked)) as stream:
            async for chunk in stream:
                match chunk:
                    case TextDelta():
                        said.append(chunk)
                        for delta in reader.feed(chunk.text):
                            yield delta
                        if reader.cut:
                            break
                    case ReasoningDelta():
                        said.append(chunk)
                        yield chunk
                    case Restart():
                        reader = self._form.reader(request, tools)
                        said.clear()
                        yield chunk
                    case ModelResponse():
                        response = chunk
        response = response or ModelResponse(_message(said), "stop", Usage())
        for delta in reader.end(response.finish_reason):
            yield delta
        yield self._read(request, tools, response)

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Return the whole answer, asked for in one piece. Raises ModelError."""
        tools, asked = self._asked(request)
        response = await self._inner.generate(asked)
        return response if tools is None else self._read(request, tools, response)

    async def aclose(self) -> None:
        """Close the inner model."""
        await self._inner.aclose()

    def _asked(self, request: ModelRequest) -> tuple[Sequence[BoundTool] | None, ModelRequest]:
        """Return the tools this request leaves and the request for the inner model; None: it answers as it is."""
        tools, must_call = _demanded(request, self._tools)
        if tools or has_calls(request.messages):
            made = self._form.request(request, tools, must_call=must_call, images=self._inner.traits.images)
            options = replace(made.options, tool_choice=None, parallel_tool_calls=None)
            return tools, replace(made, options=options, prefix="")
        if request.options.tool_choice is None and request.options.parallel_tool_calls is None:
            return None, request
        return None, replace(request, options=replace(request.options, tool_choice=None, parallel_tool_calls=None))

    def _read(self, request: ModelRequest, tools: Sequence[BoundTool], response: ModelResponse) -> ModelResponse:
        """Return the inner model's response with its text read."""
        reader = self._form.reader(request, tools)
        for part in response.message.parts:
            if part.WhichOneof("part") == "text":
                reader.feed(part.text)
            else:
                reader.add(part)
        finish = response.finish_reason
        reader.end(finish)
        cut = finish in ("length", "content_filter")
        try:
            blocks = reader.blocks()
            written = [block for block in blocks if isinstance(block, WrittenCall)]
            if cut and written and not written[-1].name:
                written.pop()
            if not all(call.name for call in written):
                raise ModelError("MODEL_BAD_RESPONSE", "The model wrote a tool call without a name.", retryable=True)
        except ModelError as error:
            error.usage = error.usage or response.usage
            raise
        assembler = ToolCallAssembler()
        for number, call in enumerate(written):
            assembler.feed(index=number, name=call.name, arguments=call.arguments)
        calls = assembler.finish(truncated=cut)
        remaining = iter(calls)
        parts: list[ContentPart] = []
        for block in blocks:
            if not isinstance(block, WrittenCall):
                parts.append(block)
            elif (made := next(remaining, None)) is not None:
                parts.append(ContentPart(tool_call=made.call))
        bad = {made.call.id: made.bad_arguments for made in calls if made.bad_arguments is not None}
        return replace(
            response,
            message=Message(role=Role.ROLE_ASSISTANT, parts=parts),
            finish_reason="tool_calls" if calls else finish,
            bad_arguments={**response.bad_arguments, **bad},
        )


def _demanded(request: ModelRequest, tools: Sequence[BoundTool]) -> tuple[Sequence[BoundTool], bool]:
    """Return the tools that the request's tool choice leaves, and whether one of them must be called.

    Raises:
        ModelError: MODEL_BAD_RESPONSE, the tools at hand cannot meet the choice.
    """
    choice = request.options.tool_choice
    check_tool_choice(request.options, frozenset(tool.spec.name for tool in tools))
    match choice:
        case None | "auto":
            return tools, False
        case "none":
            return (), False
        case "required":
            return tools, True
    return [tool for tool in tools if tool.spec.name == choice], True


def _message(said: Iterable[TextDelta | ReasoningDelta]) -> Message:
    """Return the message of an answer that was ended before its response."""
    message = Message(role=Role.ROLE_ASSISTANT)
    for kind, deltas in groupby(said, type):
        text = "".join(delta.text for delta in deltas)
        part = ContentPart(text=text) if kind is TextDelta else ContentPart(reasoning=ReasoningPart(text=text))
        message.parts.append(part)
    return message
