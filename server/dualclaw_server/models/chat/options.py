"""The options of a call as fields of a Chat Completions request.

What a vendor does not know is left out where the answer is right without it (``parallel_tool_calls``), put another
way where that says the same (``tool_choice``), and else refused: a call that had to be made must not silently not
be made.
"""

import msgspec

from dualclaw_server.engine.model import ModelOptions
from dualclaw_server.models.chat.dialect import ChatDialect
from dualclaw_server.models.schema import fits_strict_mode, read_schema
from dualclaw_server.models.sending import check_tool_choice, refusal

Wire = dict[str, object]


def wire_options(
    options: ModelOptions, tools: msgspec.Raw | None, tool_names: frozenset[str], dialect: ChatDialect
) -> Wire:
    """Return the fields for the options and the tools.

    Raises:
        ModelError: MODEL_BAD_RESPONSE, the vendor or the tools at hand cannot do what an option asks.
    """
    made: Wire = {}
    if tools is not None or options.tool_choice not in (None, "auto", "none"):
        made |= _tools(options, tools, tool_names, dialect)
    if options.temperature is not None:
        made["temperature"] = options.temperature
    if options.top_p is not None:
        made["top_p"] = options.top_p
    if options.max_output_tokens is not None:
        made[dialect.max_tokens_field] = options.max_output_tokens
    if options.stop:
        made["stop"] = list(options.stop)
    if options.response_schema is not None and dialect.schema_form is not None:
        schema = read_schema(options.response_schema)
        strict = fits_strict_mode(schema) if dialect.schema_strict is None else dialect.schema_strict
        described = {"name": "answer", "schema": schema, "strict": strict}
        named = dialect.schema_form == "json_schema"
        made["response_format"] = {"type": dialect.schema_form, **({"json_schema": described} if named else {})}
    return made


def schema_text(options: ModelOptions, dialect: ChatDialect) -> str:
    """Return what the instructions must say about the response schema, or empty where the vendor is given it."""
    if options.response_schema is None or dialect.schema_form == "json_schema":
        return ""
    schema = msgspec.json.encode(read_schema(options.response_schema)).decode()
    return f"Answer with nothing but one JSON object that fits this JSON schema: {schema}"


def _tools(options: ModelOptions, tools: msgspec.Raw | None, tool_names: frozenset[str], dialect: ChatDialect) -> Wire:
    check_tool_choice(options, tool_names)
    choice, known = options.tool_choice, dialect.tool_choices
    made: Wire = {"tools": tools}
    if options.parallel_tool_calls is not None and dialect.parallel_tool_calls:
        made["parallel_tool_calls"] = options.parallel_tool_calls
    if choice is None or choice == "auto":
        if choice in known:
            made["tool_choice"] = choice
    elif choice == "none":
        if "none" not in known:
            return {}
        made["tool_choice"] = choice
    elif choice == "required" and "required" in known:
        made["tool_choice"] = choice
    elif "named" in known and (choice != "required" or len(tool_names) == 1):
        name = next(iter(tool_names)) if choice == "required" else choice
        made["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif choice != "required" and "required" in known and tools is not None:
        made |= {"tools": _only(tools, choice), "tool_choice": "required"}
    else:
        raise refusal(f"this vendor cannot be made to call a tool (tool_choice {choice!r})")
    return made


def _only(tools: msgspec.Raw, name: str) -> list[dict[str, object]]:
    found = msgspec.json.decode(tools, type=list[dict[str, object]])
    return [tool for tool in found if isinstance(tool["function"], dict) and tool["function"].get("name") == name]
