"""Options of a call, headers and addresses of the Anthropic API, as a vendor receives them."""

import json
from dataclasses import replace

import pytest

from dualclaw import ContentPart, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelError, ModelOptions, ModelRequest, ToolSpec
from dualclaw_server.models.anthropic.answer import ANSWER_TOOL
from dualclaw_server.models.anthropic.api import AnthropicApi
from dualclaw_server.models.anthropic.dialect import AnthropicDialect

ASKED = ModelRequest([Message(role=Role.ROLE_USER, parts=[ContentPart(text="q")])])
TOOLS = [ToolSpec("f", "does f", ""), ToolSpec("g", "", "")]
SCHEMA = json.dumps({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
CLOSED = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ANSWER_ONLY = {"type": "tool", "name": ANSWER_TOOL, "disable_parallel_tool_use": True}
BUDGET = '{"type":"enabled","budget_tokens":2000}'
ADAPTIVE = '{"type":"adaptive"}'


def body(request=ASKED, tools=(), dialect=None, instructions="", **options):
    """Return the request that is sent for these options."""
    api = AnthropicApi(dialect)
    asked = replace(request, options=ModelOptions(**options), instructions=instructions)
    names = frozenset(tool.name for tool in tools)
    made = api.body(asked, model="m", tools=api.tools(tools) if tools else None, tool_names=names, stream=True)
    return json.loads(made)


def in_a_tool_turn(*reasoning):
    """Return a request in the middle of a call that began with this reasoning."""
    call = ContentPart(tool_call=ToolCall(id="a", name="old", args_json="{}"))
    came = ContentPart(tool_result=ToolResult(call_id="a", parts=[ContentPart(text="r")]))
    thoughts = [ContentPart(reasoning=ReasoningPart(text="t", signature=signature)) for signature in reasoning]
    said = [
        Message(role=Role.ROLE_ASSISTANT, parts=[*thoughts, call]),
        Message(role=Role.ROLE_TOOL, parts=[came]),
    ]
    return ModelRequest([*ASKED.messages, *said])


def test_a_plain_call_has_what_the_api_demands_and_nothing_else() -> None:
    """Model, messages, a bound of the answer; nothing that a model might refuse."""
    assert body() == {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
        "max_tokens": 16_384,
        "stream": True,
    }


def test_system_texts_are_one_and_never_blank() -> None:
    """Instructions and system messages stand beside the messages; a blank text would be refused."""
    system = Message(role=Role.ROLE_SYSTEM, parts=[ContentPart(text="Be kind.")])
    request = ModelRequest([system, *ASKED.messages])
    assert body(request, instructions="Be brief.")["system"] == "Be brief.\n\nBe kind."
    assert "system" not in body(instructions=" \n")


CHOICES = {
    "nothing said": ({}, None),
    "auto": ({"tool_choice": "auto"}, {"type": "auto"}),
    "required": ({"tool_choice": "required"}, {"type": "any"}),
    "none": ({"tool_choice": "none"}, {"type": "none"}),
    "one tool": ({"tool_choice": "g"}, {"type": "tool", "name": "g"}),
    "one at a time": ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
    "one tool at a time": (
        {"tool_choice": "g", "parallel_tool_calls": False},
        {"type": "tool", "name": "g", "disable_parallel_tool_use": True},
    ),
    "parallel": ({"parallel_tool_calls": True}, None),
    "none, one at a time": ({"tool_choice": "none", "parallel_tool_calls": False}, {"type": "none"}),
}


@pytest.mark.parametrize("case", CHOICES)
def test_tool_choices_take_the_form_of_the_api(case: str) -> None:
    """Each choice of the caller has its form; what the caller leaves open is left to the vendor."""
    options, expected = CHOICES[case]
    made = body(tools=TOOLS, **options)
    assert made.get("tool_choice") == expected
    assert [tool["name"] for tool in made["tools"]] == ["f", "g"]


def test_a_model_that_cannot_be_made_to_call_a_tool_is_only_asked() -> None:
    """A demand such a model refuses becomes a free choice."""
    dialect = AnthropicDialect(forced_tools=False)
    assert body(tools=TOOLS, dialect=dialect, tool_choice="required")["tool_choice"] == {"type": "auto"}
    assert body(tools=TOOLS, dialect=dialect, tool_choice="g")["tool_choice"] == {"type": "auto"}


@pytest.mark.parametrize(("tools", "choice"), [((), "required"), ((), "f"), (TOOLS, "unknown")])
def test_a_call_that_cannot_be_made_is_refused(tools, choice: str) -> None:
    """A tool that is not there cannot be demanded; nothing is sent."""
    with pytest.raises(ModelError, match="tool_choice") as raised:
        body(tools=tools, tool_choice=choice)
    assert (raised.value.reason, raised.value.retryable) == ("MODEL_BAD_RESPONSE", False)


def test_tools_that_are_gone_are_named_but_cannot_be_called() -> None:
    """A conversation with calls is refused without tools, so those that were called stand there, closed."""
    made = body(in_a_tool_turn())
    assert made["tools"] == [{"name": "old", "input_schema": {"type": "object"}}]
    assert made["tool_choice"] == {"type": "none"}
    made = body(in_a_tool_turn(), response_schema=SCHEMA)
    assert (made["tool_choice"], made["output_config"]["format"]["type"]) == ({"type": "none"}, "json_schema")


def test_sampling_stays_within_what_the_api_takes() -> None:
    """Temperature ends at 1, goes before top_p, and neither is sent to a model that refuses them."""
    assert body(temperature=1.7)["temperature"] == 1.0
    assert body(top_p=0.5)["top_p"] == 0.5
    both = body(temperature=0.2, top_p=0.5)
    assert (both["temperature"], "top_p" in both) == (0.2, False)
    none = body(temperature=0.2, top_p=0.5, dialect=AnthropicDialect(sampling=False))
    assert none.keys().isdisjoint({"temperature", "top_p"})


def test_stop_texts_and_the_bound_of_the_answer_are_passed_on() -> None:
    """Stop texts keep their form; one the API refuses is refused here, with its reason."""
    made = body(stop=("\nObservation:", "END"), max_output_tokens=50)
    assert (made["stop_sequences"], made["max_tokens"]) == (["\nObservation:", "END"], 50)
    with pytest.raises(ModelError, match="white space"):
        body(stop=("\n\n",))


def test_a_response_schema_is_the_format_of_the_text() -> None:
    """The schema is sent closed, as the API demands, beside the tools the model may still call."""
    made = body(tools=TOOLS, response_schema=SCHEMA)
    assert made["output_config"] == {"format": {"type": "json_schema", "schema": CLOSED}}
    assert [tool["name"] for tool in made["tools"]] == ["f", "g"]
    assert "tool_choice" not in made


SCHEMAS = {
    "bounds become words": (
        {"type": "integer", "minimum": 1, "maximum": 5, "description": "how many"},
        {"type": "integer", "description": "how many; minimum: 1; maximum: 5"},
    ),
    "properties of these names stay": (
        {"type": "object", "properties": {"minimum": {"type": "string", "maxLength": 3}}},
        {
            "type": "object",
            "properties": {"minimum": {"type": "string", "description": "maxLength: 3"}},
            "additionalProperties": False,
        },
    ),
    "formats": ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
    "other formats": ({"type": "string", "format": "isbn"}, {"type": "string", "description": "format: isbn"}),
    "lists": (
        {"type": "array", "items": {"type": "object", "properties": {}}, "minItems": 1, "maxItems": 9},
        {
            "type": "array",
            "items": {"type": "object", "properties": {}, "additionalProperties": False},
            "minItems": 1,
            "description": "maxItems: 9",
        },
    ),
    "choices and definitions": (
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "object", "properties": {}}}},
        {
            "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
            "$defs": {"a": {"type": "object", "properties": {}, "additionalProperties": False}},
        },
    ),
    "free keys": ({"type": "object", "additionalProperties": {"type": "string"}}, None),
    "any object": ({"type": "object"}, None),
    "exactly one of": ({"oneOf": [{"type": "string"}]}, None),
    "anything": (True, None),
}


@pytest.mark.parametrize("case", SCHEMAS)
def test_schemas_take_the_form_the_api_compiles_or_none(case: str) -> None:
    """What would lose its meaning is asked for through a tool instead, as it is."""
    inner, expected = SCHEMAS[case]
    schema = {"type": "object", "properties": {"it": inner}}
    made = body(response_schema=json.dumps(schema))
    if expected is not None:
        closed = {"type": "object", "properties": {"it": expected}, "additionalProperties": False}
        assert made["output_config"]["format"]["schema"] == closed
        assert "tools" not in made
    else:
        assert "output_config" not in made
        assert (made["tools"][0]["name"], made["tools"][0]["input_schema"]) == (ANSWER_TOOL, schema)
        assert made["tool_choice"] == ANSWER_ONLY


def test_a_vendor_without_the_format_is_asked_through_a_tool() -> None:
    """The answer's tool stands beside the others; one of them must be called, a named one still first."""
    dialect = AnthropicDialect(schema_form="tool")
    made = body(tools=TOOLS, dialect=dialect, response_schema=SCHEMA)
    assert [tool["name"] for tool in made["tools"]] == ["f", "g", ANSWER_TOOL]
    assert made["tool_choice"] == {"type": "any"}
    made = body(tools=TOOLS, dialect=dialect, response_schema=SCHEMA, tool_choice="g")
    assert made["tool_choice"] == {"type": "tool", "name": "g"}
    made = body(tools=TOOLS, dialect=dialect, response_schema=SCHEMA, tool_choice="none")
    assert made["tool_choice"] == ANSWER_ONLY
    with pytest.raises(ModelError, match="schema"):
        body(dialect=replace(dialect, forced_tools=False), response_schema=SCHEMA)
    with pytest.raises(ModelError, match="schema"):
        body(response_schema="[]")


def test_thinking_is_asked_for_and_its_budget_comes_on_top() -> None:
    """The bound of the answer leaves room for the thinking; sampling is the model's own then."""
    made = body(dialect=AnthropicDialect(thinking=BUDGET), max_output_tokens=100, temperature=0.1)
    assert (made["thinking"], made["max_tokens"]) == ({"type": "enabled", "budget_tokens": 2000}, 2100)
    assert "temperature" not in made
    made = body(dialect=AnthropicDialect(thinking=ADAPTIVE), max_output_tokens=100)
    assert (made["thinking"], made["max_tokens"]) == ({"type": "adaptive"}, 100)
    with pytest.raises(ValueError, match="thinking"):
        AnthropicApi(AnthropicDialect(thinking="on"))


def test_thinking_gives_way_to_what_it_cannot_go_with() -> None:
    """A demanded call, the beginning of an answer, and with a budget a turn that began without thinking."""
    dialect = AnthropicDialect(thinking=BUDGET)
    made = body(tools=TOOLS, dialect=dialect, tool_choice="required", temperature=0.1)
    assert ("thinking" in made, made["temperature"]) == (False, 0.1)
    assert "thinking" in body(tools=TOOLS, dialect=dialect, tool_choice="auto")
    assert "thinking" not in body(replace(ASKED, prefix="The"), dialect=dialect)
    assert "thinking" not in body(in_a_tool_turn("responses:S"), dialect=dialect)
    assert "thinking" in body(in_a_tool_turn("anthropic:S"), dialect=dialect)
    assert "thinking" in body(in_a_tool_turn(), dialect=AnthropicDialect(thinking=ADAPTIVE))


def test_caching_is_asked_for_up_to_the_end_of_the_conversation() -> None:
    """Breakpoints stand behind the system text and behind the last user turn, and nowhere unless wanted."""
    made = body(in_a_tool_turn(), dialect=AnthropicDialect(cache=True), instructions="Be brief.")
    mark = {"type": "ephemeral"}
    assert made["system"] == [{"type": "text", "text": "Be brief.", "cache_control": mark}]
    blocks = [block for message in made["messages"] for block in message["content"]]
    assert [block.get("cache_control") for block in blocks] == [None, None, mark]
    assert "cache_control" not in json.dumps(body(in_a_tool_turn(), instructions="Be brief."))


async def test_headers_and_path_are_the_vendors(kit, vendor, claude) -> None:
    """Key, version and betas of Anthropic's own; a bearer token for gateways; path and body of Vertex."""
    answer = kit.answers(200, b'{"type":"message","content":[],"stop_reason":"end_turn"}')
    async with vendor(answer) as served:
        for dialect in (
            AnthropicDialect(betas=("a-1", "b-2")),
            AnthropicDialect(key_header="authorization", version=""),
            AnthropicDialect(path=":streamRawPredict", key_header="authorization", body_version="vertex-2023-10-16"),
        ):
            async with claude.model_at(served, dialect) as model:
                await model.generate(kit.asking())
    own, gateway, vertex = served.asked
    assert own.line == "POST /v1/messages HTTP/1.1"
    assert (own.headers["x-api-key"], own.headers["anthropic-version"]) == (claude.KEY, "2023-06-01")
    assert own.headers["anthropic-beta"] == "a-1,b-2"
    assert "authorization" not in own.headers
    assert gateway.headers["authorization"] == f"Bearer {claude.KEY}"
    assert gateway.headers.keys().isdisjoint({"x-api-key", "anthropic-version", "anthropic-beta"})
    assert vertex.line == "POST /v1:streamRawPredict HTTP/1.1"
    assert (vertex.json["anthropic_version"], "model" in vertex.json) == ("vertex-2023-10-16", False)


def test_no_key_is_no_header() -> None:
    """A gateway without keys gets none."""
    assert AnthropicApi().headers("") == {"anthropic-version": "2023-06-01"}
    assert AnthropicApi(AnthropicDialect(key_header="authorization", version="")).headers("") == {}
