"""The options of a call, and what else stands beside the messages, as fields of a request of the Anthropic API.

Rules and their reasons:

- The API demands a bound of the answer. With a budget for thinking, the budget comes on top of it: thinking counts.
- Temperature goes to 1 here, not to 2. With thinking, neither it nor top_p may be changed; newer models refuse
  them always (``sampling``), and some refuse both at once, so temperature goes first.
- A model that thinks cannot be made to call a tool, cannot go on from the beginning of an answer, and cannot,
  with a budget, go on from calls that were made without thinking. What the caller asks for goes first: thinking
  is left out of that call.
- A conversation with calls is refused without tools. Where there are none any more, the ones that were called
  are named, and may not be called.
- A schema the API cannot compile, or a vendor without the format, gets it as the arguments of a tool that must be
  called; the answer folds them back into text.
"""

from collections.abc import Sequence

import msgspec

from dualclaw_server.engine.model import ModelOptions, ModelRequest
from dualclaw_server.models.anthropic.answer import ANSWER_TOOL
from dualclaw_server.models.anthropic.dialect import AnthropicDialect
from dualclaw_server.models.anthropic.request import resumes_without_thinking, used_tools
from dualclaw_server.models.anthropic.schema import closed_schema
from dualclaw_server.models.schema import read_schema
from dualclaw_server.models.sending import check_tool_choice, refusal

Wire = dict[str, object]

_FORCED = ("any", "tool")


def wire_options(
    request: ModelRequest,
    messages: Sequence[Wire],
    *,
    tools: msgspec.Raw | None,
    tool_names: frozenset[str],
    dialect: AnthropicDialect,
    called: Sequence[str] = (),
) -> Wire:
    """Return all fields but the model, the system text and the messages.

    Args:
        request: the call.
        messages: as they are sent.
        tools: as they are sent; None: none.
        tool_names: their names.
        dialect: what this vendor varies.
        called: names of tools that are called in messages before these.

    Raises:
        ModelError: MODEL_BAD_RESPONSE, an option cannot be expressed.
    """
    options = request.options
    made: Wire = {}
    sent: object = tools
    choice = _choice(options, tool_names, dialect)
    if options.response_schema is not None:
        schema = read_schema(options.response_schema)
        closed = closed_schema(schema) if dialect.schema_form == "format" else None
        if closed is not None:
            made["output_config"] = {"format": {"type": "json_schema", "schema": closed}}
        else:
            choice = _answer_choice(choice, tool_names, dialect)
            own = msgspec.json.decode(tools, type=list[msgspec.Raw]) if tools is not None else []
            sent = [*own, _answer_tool(schema)]
    if sent is None and (names := dict.fromkeys([*called, *used_tools(messages)])):
        sent = [{"name": name, "input_schema": {"type": "object"}} for name in names]
        choice = {"type": "none"}
    if sent is not None:
        made["tools"] = sent
        if choice is not None:
            made["tool_choice"] = choice
    forced = choice is not None and choice["type"] in _FORCED
    thinking = _thinking(dialect, forced=forced or bool(request.prefix.strip()), messages=messages)
    budget = 0
    if thinking is not None:
        made["thinking"] = thinking
        reported = thinking.get("budget_tokens")
        budget = reported if isinstance(reported, int) else 0
    elif dialect.sampling:
        made |= _sampling(options)
    made["max_tokens"] = (options.max_output_tokens or dialect.max_tokens) + budget
    if options.stop:
        made["stop_sequences"] = _stops(options.stop)
    return made


def _choice(options: ModelOptions, tool_names: frozenset[str], dialect: AnthropicDialect) -> Wire | None:
    check_tool_choice(options, tool_names)
    choice = options.tool_choice
    if choice == "none":
        return {"type": "none"}
    made: Wire | None = None
    if choice == "auto":
        made = {"type": "auto"}
    elif choice is not None:
        made = {"type": "any"} if choice == "required" else {"type": "tool", "name": choice}
        made = made if dialect.forced_tools else {"type": "auto"}
    if options.parallel_tool_calls is False and tool_names:
        made = {**(made or {"type": "auto"}), "disable_parallel_tool_use": True}
    return made


def _answer_choice(choice: Wire | None, tool_names: frozenset[str], dialect: AnthropicDialect) -> Wire:
    """Return the choice that makes the model call a tool: one of its own, where it may, or the answer's."""
    if not dialect.forced_tools:
        raise refusal("this model takes neither the response schema nor a demand to call a tool")
    if choice is not None and choice["type"] == "tool":
        return choice
    if tool_names and (choice is None or choice["type"] != "none"):
        return {**(choice or {}), "type": "any"}
    return {"type": "tool", "name": ANSWER_TOOL, "disable_parallel_tool_use": True}


def _answer_tool(schema: Wire) -> Wire:
    described = "Gives the final answer. Call it once, with the whole answer."
    return {"name": ANSWER_TOOL, "description": described, "input_schema": {"type": "object", **schema}}


def _thinking(dialect: AnthropicDialect, *, forced: bool, messages: Sequence[Wire]) -> Wire | None:
    if not dialect.thinking or forced:
        return None
    thinking = msgspec.json.decode(dialect.thinking, type=Wire)
    if thinking.get("type") == "enabled" and resumes_without_thinking(messages):
        return None
    return thinking


def _sampling(options: ModelOptions) -> Wire:
    if options.temperature is not None:
        return {"temperature": min(options.temperature, 1.0)}
    return {} if options.top_p is None else {"top_p": options.top_p}


def _stops(stops: Sequence[str]) -> list[str]:
    blank = [stop for stop in stops if not stop.strip()]
    if blank:
        raise refusal(f"this vendor takes no stop text that is only white space ({blank[0]!r})")
    return list(stops)
