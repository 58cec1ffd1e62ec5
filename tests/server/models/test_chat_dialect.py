"""What vendors of Chat Completions vary, as they receive it: prefill, reasoning, options, ids."""

import json

import pytest

from dualclaw import ContentPart, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelError, ModelOptions, ModelRequest, ModelTraits, ToolSpec
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.chat.dialect import DEFAULT_DIALECT, OPENAI_DIALECT, ChatDialect, dialect_of
from dualclaw_server.models.chat.request import wire_messages
from dualclaw_server.models.history import mark
from dualclaw_server.models.schema import fits_strict_mode

TOOLS = [ToolSpec("add", "", '{"type": "object"}'), ToolSpec("sub", "", "")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def user(text: str) -> Message:
    return Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])


def reasoned(text: str, signature: str, **fields: object) -> ContentPart:
    return ContentPart(reasoning=ReasoningPart(text=text, signature=signature, **fields))  # type: ignore[arg-type]


def asked(reasoning: ContentPart | None, call_id: str, text: str = "") -> list[Message]:
    parts = [reasoning] if reasoning else []
    parts += [ContentPart(text=text)] if text else []
    done = ToolResult(call_id=call_id, parts=[ContentPart(text="R")])
    return [
        Message(role=Role.ROLE_ASSISTANT, parts=[*parts, ContentPart(tool_call=ToolCall(id=call_id, name="f"))]),
        Message(role=Role.ROLE_TOOL, parts=[ContentPart(tool_result=done)]),
    ]


def body(
    options: ModelOptions, dialect: ChatDialect = DEFAULT_DIALECT, tools: list[ToolSpec] = TOOLS
) -> dict[str, object]:
    api = ChatApi(dialect)
    made = api.body(
        ModelRequest([user("hi")], options=options),
        model="m",
        tools=api.tools(tools) if tools else None,
        tool_names=frozenset(tool.name for tool in tools),
        stream=False,
    )
    value = json.loads(made)
    assert isinstance(value, dict)
    return value


PREFILLS = {
    "plain": {"role": "assistant", "content": "Once "},
    "prefix": {"role": "assistant", "content": "Once ", "prefix": True},
    "partial": {"role": "assistant", "content": "Once ", "partial": True},
}


@pytest.mark.parametrize("form", PREFILLS)
def test_the_beginning_of_the_answer_is_the_last_message(form: str) -> None:
    """Each vendor's way of going on from it."""
    dialect = ChatDialect(prefill=form)  # type: ignore[arg-type]
    assert wire_messages(ModelRequest([user("hi")], prefix="Once "), dialect=dialect)[1:] == [PREFILLS[form]]


def test_a_beginning_is_refused_where_the_vendor_would_repeat_it() -> None:
    """Rather an error than the same words twice."""
    with pytest.raises(ModelError, match="cannot go on") as caught:
        wire_messages(ModelRequest([user("hi")], prefix="Once "))
    assert (caught.value.reason, caught.value.retryable) == ("MODEL_BAD_RESPONSE", False)


def test_the_reasoning_of_the_current_turn_goes_back() -> None:
    """Of "turn": since the last user message, with calls, our own; nothing else."""
    conversation = [
        user("a"),
        *asked(reasoned("old", mark("chat", "")), "1"),
        user("b"),
        *asked(reasoned("new", mark("chat", "")), "2", "so"),
        *asked(reasoned("foreign", mark("anthropic", "S")), "3"),
        *asked(reasoned("nobody's", ""), "4"),
    ]
    made = wire_messages(ModelRequest(conversation), dialect=ChatDialect(reasoning_back="turn"))
    answers = [message for message in made if message["role"] == "assistant"]
    assert [message.get("reasoning_content") for message in answers] == [None, "new", None, None]
    assert answers[1]["content"] == "so"


def test_every_message_with_calls_has_reasoning_where_the_vendor_checks_it() -> None:
    """Of "calls": however old; a blank stands for what is not ours; answers without calls have none."""
    answer = Message(
        role=Role.ROLE_ASSISTANT, parts=[reasoned("final", mark("chat", "")), ContentPart(text="It is so.")]
    )
    conversation = [
        user("a"),
        *asked(reasoned("old", mark("chat", "")), "1"),
        answer,
        user("b"),
        *asked(reasoned("foreign", mark("responses", "S")), "2"),
        *asked(None, "3"),
    ]
    made = wire_messages(ModelRequest(conversation), dialect=ChatDialect(reasoning_back="calls"))
    answers = [message for message in made if message["role"] == "assistant"]
    assert [message.get("reasoning_content") for message in answers] == ["old", None, " ", " "]


DETAILS = [
    {"type": "reasoning.text", "text": "think", "format": "f-1", "index": 0, "signature": "S"},
    {"type": "reasoning.summary", "summary": "sum", "format": "f-1", "index": 1, "id": "r2"},
    {"type": "reasoning.encrypted", "data": "SEAL", "format": None, "index": 2, "id": "r3"},
]


async def test_reasoning_details_go_back_unchanged_and_in_order(kit, vendor) -> None:
    """What OpenRouter streams in pieces comes back as whole blocks, every field of them, before the calls' results."""
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}
    pieces = [
        [{**DETAILS[0], "text": "th", "signature": ""}],
        [{**DETAILS[0], "text": "ink", "signature": None}],
        [{"type": "reasoning.text", "index": 0, "signature": "S"}],
        DETAILS[1:],
    ]
    events = [kit.chunk(reasoning_details=piece) for piece in pieces]
    script = kit.streams(*events, kit.call_chunk(call), kit.chunk(finish="tool_calls"))
    dialect = ChatDialect(reasoning_back="details")
    async with vendor(script) as served, kit.model_at(served, dialect=dialect) as model:
        first = await kit.play(model)
        again = await kit.play(model, ModelRequest([user("hi"), first.response.message]))
    assert again.error is None
    sent = served.asked[1].json["messages"]
    assert sent[1]["reasoning_details"] == DETAILS
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]


async def test_reasoning_details_of_a_whole_answer_go_back_unchanged(kit, vendor) -> None:
    """An answer that was not streamed has text and signature in one block."""
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    message = {"content": None, "reasoning_details": DETAILS, "tool_calls": [call]}
    whole = {"id": "c", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    script = kit.answers(200, json.dumps(whole).encode())
    dialect = ChatDialect(reasoning_back="details")
    async with vendor(script) as served, kit.model_at(served, dialect=dialect) as model:
        first = await model.generate(kit.asking())
        await model.generate(ModelRequest([user("hi"), first.message]))
    assert served.asked[1].json["messages"][1]["reasoning_details"] == DETAILS


def test_details_of_another_api_and_reasoning_without_details_stay_here() -> None:
    """Neither a foreign signature nor plain text is a detail."""
    conversation = [
        user("a"),
        *asked(reasoned("x", mark("anthropic", '{"type":"reasoning.text"}')), "1"),
        *asked(reasoned("y", mark("chat", "")), "2"),
    ]
    made = wire_messages(ModelRequest(conversation), dialect=ChatDialect(reasoning_back="details"))
    assert not any("reasoning_details" in message for message in made)


def test_signatures_of_calls_go_back_where_the_vendor_knows_them() -> None:
    """Gemini's own, to Gemini only; other vendors never see the field."""
    parts = [
        ContentPart(tool_call=ToolCall(id="a", name="f", signature=mark("chat", "S"))),
        ContentPart(tool_call=ToolCall(id="b", name="f", signature=mark("anthropic", "T"))),
    ]
    request = ModelRequest([Message(role=Role.ROLE_ASSISTANT, parts=parts)])
    first, second = wire_messages(request, dialect=ChatDialect(call_signatures=True))[0]["tool_calls"]  # type: ignore[misc]
    assert first["extra_content"] == {"google": {"thought_signature": "S"}}  # type: ignore[has-type]
    assert "extra_content" not in second  # type: ignore[has-type]
    assert "extra_content" not in json.dumps(wire_messages(request))


def test_ids_are_what_the_vendor_takes() -> None:
    """Nine letters and digits for Mistral, in the call and in its result alike."""
    dialect = ChatDialect(longest_call_id=9, exact_call_id=True)
    made = wire_messages(ModelRequest(asked(None, "call_0123456789abcdef")), dialect=dialect)
    (sent,) = made[0]["tool_calls"]  # type: ignore[misc]
    assert len(sent["id"]) == 9  # type: ignore[has-type]
    assert sent["id"].isalnum()  # type: ignore[has-type]
    assert made[1]["tool_call_id"] == sent["id"]  # type: ignore[has-type]


def test_answers_in_a_row_are_one_message() -> None:
    """Templates that insist on turns refuse two assistant messages in a row."""
    parts = [Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(text=text)]) for text in "ab"]
    assert wire_messages(ModelRequest([user("q"), *parts]))[1:] == [{"role": "assistant", "content": "a\n\nb"}]


def test_all_options_take_their_places() -> None:
    """Names of the fields, and nothing that was not asked for."""
    options = ModelOptions(
        temperature=0.0,
        top_p=0.5,
        max_output_tokens=9,
        stop=("END",),
        tool_choice="add",
        parallel_tool_calls=False,
        response_schema=json.dumps(SCHEMA),
    )
    made = body(options, OPENAI_DIALECT)
    assert made.pop("tools")
    assert made == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "temperature": 0.0,
        "top_p": 0.5,
        "max_completion_tokens": 9,
        "stop": ["END"],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
    }
    assert body(ModelOptions(), tools=[]).keys() == {"model", "messages", "stream"}


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_words_of_tool_choice_are_sent_as_they_are(choice: str) -> None:
    """To a vendor that knows them all."""
    assert body(ModelOptions(tool_choice=choice))["tool_choice"] == choice


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_without_tools_nothing_is_said_about_them(choice: str | None) -> None:
    """Vendors refuse tool_choice and parallel_tool_calls without tools."""
    made = body(ModelOptions(tool_choice=choice, parallel_tool_calls=True), tools=[])
    assert made.keys() == {"model", "messages", "stream"}


@pytest.mark.parametrize(
    ("choice", "tools"), [("required", []), ("add", []), ("mul", TOOLS)], ids=["required", "named", "unknown"]
)
def test_a_call_that_no_tool_can_meet_is_refused(choice: str, tools: list[ToolSpec]) -> None:
    """The error names what was asked for and what there is."""
    with pytest.raises(ModelError, match=f"'{choice}'.*these tools: {'add, sub' if tools else 'none'}"):
        body(ModelOptions(tool_choice=choice), tools=tools)


def test_a_vendor_without_named_choice_gets_the_one_tool_alone() -> None:
    """It must call some tool, and there is only one."""
    made = body(ModelOptions(tool_choice="sub"), ChatDialect(tool_choices=("auto", "required")))
    assert made["tool_choice"] == "required"
    assert [tool["function"]["name"] for tool in made["tools"]] == ["sub"]  # type: ignore[attr-defined]


def test_a_vendor_without_required_gets_the_name_if_there_is_one() -> None:
    """One tool can be named; of several none can be picked, which is refused."""
    dialect = ChatDialect(tool_choices=("auto", "named"))
    made = body(ModelOptions(tool_choice="required"), dialect, TOOLS[:1])
    assert made["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    with pytest.raises(ModelError, match="cannot be made to call a tool"):
        body(ModelOptions(tool_choice="required"), dialect)
    with pytest.raises(ModelError, match="cannot be made to call a tool"):
        body(ModelOptions(tool_choice="add"), ChatDialect(tool_choices=("auto",)))


def test_a_vendor_without_none_gets_no_tools_instead() -> None:
    """What it does not see it cannot call."""
    made = body(ModelOptions(tool_choice="none"), ChatDialect(tool_choices=("auto",)))
    assert made.keys() == {"model", "messages", "stream"}


def test_options_a_vendor_refuses_are_left_out() -> None:
    """Where the answer is right without them."""
    options = ModelOptions(parallel_tool_calls=True, tool_choice="auto")
    made = body(options, ChatDialect(parallel_tool_calls=False, tool_choices=()))
    assert "parallel_tool_calls" not in made
    assert "tool_choice" not in made


FORMS = {
    "json_schema": "json_schema",
    "json_object": "json_object",
    None: None,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_schema_is_asked_for_in_the_vendors_way(form: str | None) -> None:
    """As the format, or as any JSON object with the schema in the instructions, or in these alone."""
    dialect = ChatDialect(schema_form=form)  # type: ignore[arg-type]
    made = body(ModelOptions(response_schema=json.dumps(SCHEMA)), dialect, [])
    told = json.dumps(made["messages"])
    if form is None:
        assert "response_format" not in made
    else:
        assert made["response_format"]["type"] == form  # type: ignore[index]
    assert ("additionalProperties" in told) == (form != "json_schema")


def test_a_schema_that_is_none_is_refused() -> None:
    """The error says what is wrong."""
    for schema in ("[]", "{", "1"):
        with pytest.raises(ModelError, match="response schema is no JSON object"):
            body(ModelOptions(response_schema=schema))


def test_strictness_is_the_dialects() -> None:
    """Never and always win over what the schema would bear."""
    loose = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}})
    for strict, schema, expected in ((None, loose, False), (True, loose, True), (False, json.dumps(SCHEMA), False)):
        made = body(ModelOptions(response_schema=schema), ChatDialect(schema_strict=strict))
        assert made["response_format"]["json_schema"]["strict"] is expected  # type: ignore[index]


def closed(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


STRICT: dict[str, tuple[dict[str, object], bool]] = {
    "closed": (closed(a={"type": "string"}), True),
    "nested": (closed(a=closed(b={"type": ["string", "null"]}), c={"type": "array", "items": closed()}), True),
    "choices": (closed(a={"anyOf": [closed(), {"type": "null"}]}), True),
    "definitions": ({**closed(a={"$ref": "#/$defs/n"}), "$defs": {"n": closed(x={"const": 1})}}, True),
    "optional property": ({**closed(a={}), "required": []}, False),
    "open": ({"type": "object", "properties": {}}, False),
    "open inside": (closed(a={"type": "object"}), False),
    "open in a list": (closed(a={"type": "array", "items": {"type": "object"}}), False),
    "open in a choice": (closed(a={"anyOf": [{"type": "object"}]}), False),
    "open definition": ({**closed(), "$defs": {"n": {"type": "object"}}}, False),
    "keyword it does not know": (closed(a={"type": "string", "minLength": 1}), False),
    "format it does not know": (closed(a={"type": "string", "format": "uri"}), False),
    "no object": ({"type": "array", "items": {"type": "string"}}, False),
    "choice at the root": ({**closed(), "anyOf": [closed()]}, False),
    "boolean schema": (closed(a=True), False),
}


@pytest.mark.parametrize("case", STRICT)
def test_strict_mode_is_asked_for_exactly_when_the_schema_fits(case: str) -> None:
    """OpenAI refuses the rest with a 400."""
    schema, expected = STRICT[case]
    assert fits_strict_mode(schema) is expected


def test_openais_hosts_have_their_own_dialect() -> None:
    """Others that only look alike do not."""
    assert dialect_of("https://api.openai.com/v1") is OPENAI_DIALECT
    assert dialect_of("https://x.openai.azure.com/openai") is OPENAI_DIALECT
    assert dialect_of("https://notapi.openai.com.example/v1") is DEFAULT_DIALECT
    assert dialect_of("http://127.0.0.1:1/v1") is DEFAULT_DIALECT


async def test_the_key_goes_where_the_vendor_looks_for_it(kit, vendor) -> None:
    """Azure wants a header of its own and no bearer token; no header without a key."""
    script = kit.streams(kit.chunk("ok"), kit.chunk(finish="stop"))
    async with vendor(script) as served:
        for key in (" k-secret ", ""):
            async with kit.model_at(served, key, dialect=ChatDialect(key_header="api-key")) as model:
                await kit.play(model)
    assert [asked.headers.get("api-key") for asked in served.asked] == ["k-secret", None]
    assert not any("authorization" in asked.headers for asked in served.asked)


async def test_traits_follow_the_dialect_and_images_stay_away_from_models_without_eyes(kit, vendor) -> None:
    """A model continues where its dialect can; one without images gets notes."""
    script = kit.streams(kit.chunk("ok"), kit.chunk(finish="stop"), done=True)
    picture = Message(role=Role.ROLE_USER, parts=[ContentPart(text="see")])
    picture.parts.add().image.url = "https://example.invalid/a.png"
    async with (
        vendor(script) as served,
        kit.model_at(served, dialect=ChatDialect(prefill="plain")) as continuing,
        kit.model_at(served, traits=ModelTraits(images=False)) as blind,
    ):
        assert continuing.traits.continues
        assert not blind.with_tools([]).traits.images
        await kit.play(blind, ModelRequest([picture]))
    assert served.asked[0].json["messages"] == [{"role": "user", "content": "see\n\n[image]"}]


async def test_a_vendor_that_refuses_stream_options_gets_none(kit, vendor) -> None:
    """The usage may be missing then; the call works."""
    script = kit.streams(kit.chunk("ok"), kit.chunk(finish="stop"))
    async with vendor(script) as served, kit.model_at(served, dialect=ChatDialect(stream_usage=False)) as model:
        await kit.play(model)
    assert "stream_options" not in served.asked[0].json
