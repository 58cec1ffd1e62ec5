"""Tools for a model without tool calls, by text: Thought / Action / Action Input / Observation.

The request gets the tools and the form in its instructions, earlier calls are told in the same form, and the
answer stops before an Observation, which only a tool can give. How the answer is read is in ``written.react_text``,
what holds for every model that writes its calls in ``written.model``. Names and arguments are not judged: the
engine answers a tool nobody knows and arguments that do not fit, and the model can correct itself.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from dualclaw import ToolCall
from dualclaw_server.engine.model import ChatModel, ModelOptions, ModelRequest
from dualclaw_server.models.written.model import WrittenToolsModel
from dualclaw_server.models.written.react_text import ReActReader
from dualclaw_server.models.written.tool_text import BoundTool, describe, sample, tell

_STOPS = ("\nObservation:", "\nObservation：")
_MOST_STOPS = 4  # OpenAI's bound, which most endpoints have taken over

_FORM = """\
You can use these tools:
{tools}

To use a tool, write these three lines and stop:
Thought: why you need it
Action: the name of the tool
Action Input: one JSON object that fits its schema

The result follows after "Observation:". Use tools as often as you need. When you need none, or no more, write:
Thought: what you know
Final Answer: your answer

For example:
Thought: {name} can tell me this.
Action: {name}
Action Input: {arguments}"""
_ANSWER_ONLY = 'Tools are no longer available. Write your answer after "Final Answer:".'
_MUST_CALL = "This time you must use a tool; do not answer yet."
_SCHEMA = 'What follows "Final Answer:" must be one JSON value of this schema and nothing else: {schema}'


class TextToolsModel(WrittenToolsModel):
    """Gives tool calls to a model that has none, by text-style ReAct. Owns the inner model.

    Args:
        inner: the model; it is never given tools.
    """

    def __init__(self, inner: ChatModel) -> None:
        super().__init__(inner, _ReActForm())


class _ReActForm:
    """Thought, Action, Action Input, Observation, Final Answer."""

    def request(
        self, request: ModelRequest, tools: Sequence[BoundTool], *, must_call: bool, images: bool
    ) -> ModelRequest:
        """Return the request with the form in its instructions and the calls told."""
        lines = [request.instructions] if request.instructions else []
        if tools:
            arguments = json.dumps(sample(tools[0].schema), ensure_ascii=False)
            lines.append(_FORM.format(tools=describe(tools), name=tools[0].spec.name, arguments=arguments))
        else:
            lines.append(_ANSWER_ONLY)
        if must_call:
            lines.append(_MUST_CALL)
        if request.options.response_schema is not None:
            lines.append(_SCHEMA.format(schema=request.options.response_schema))
        messages = tell(request.messages, self, images=images)
        return ModelRequest(messages, "\n\n".join(lines), _options(request.options))

    def reader(self, request: ModelRequest, tools: Sequence[BoundTool]) -> ReActReader:
        """Return a reader for one answer."""
        names = frozenset(tool.spec.name for tool in tools)
        return ReActReader(names, single=request.options.parallel_tool_calls is False)

    def answer(self, text: str) -> str:
        """Return an answer: it is told as it is."""
        return text

    def calls(self, thought: str, text: str, calls: Sequence[ToolCall]) -> str:
        """Return actions as the model writes them."""
        lines = [text] if text else []
        if thought:
            lines.append(f"Thought: {thought}")
        for call in calls:
            lines += [f"Action: {call.name}", f"Action Input: {call.args_json or '{}'}"]
        return "\n".join(lines)

    def result(self, call: ToolCall, text: str, *, alone: bool) -> str:
        """Return an observation; of several each names its tool."""
        return f"Observation: {text}" if alone else f"Observation ({call.name}): {text}"


def _options(options: ModelOptions) -> ModelOptions:
    """Return the options with the stops; a schema of the answer would rule out the form, so it is put in words."""
    room = max(0, _MOST_STOPS - len(options.stop))
    return replace(options, response_schema=None, stop=(*options.stop, *_STOPS[:room]))
