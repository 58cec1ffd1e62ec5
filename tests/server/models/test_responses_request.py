"""Our messages as input items of the Responses API, as a vendor receives them."""

import json

import pytest

from dualclaw import ContentPart, Diagnosis, Media, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelError, ModelOptions, ModelRequest, ToolSpec
from dualclaw_server.models.history import NO_RESULT, mark
from dualclaw_server.models.responses.api import ResponsesApi
from dualclaw_server.models.responses.dialect import ResponsesDialect
from dualclaw_server.models.responses.model import ResponsesModel
from dualclaw_server.models.responses.request import input_items

TOOLS = [ToolSpec("add", "Adds.", '{"type": "object", "properties": {"x": {"type": "integer"}}}')]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def text(value: str) -> ContentPart:
    return ContentPart(text=value)


def call(call_id: str, name: str = "add", args: str = "") -> ContentPart:
    return ContentPart(tool_call=ToolCall(id=call_id, name=name, args_json=args))


def result(call_id: str, *parts: ContentPart, **fields: object) -> ContentPart:
    return ContentPart(tool_result=ToolResult(call_id=call_id, parts=parts, **fields))  # type: ignore[arg-type]


def sealed(identity: str, said: str = "", data: bytes = b"SEAL", api: str = "responses") -> ContentPart:
    part = ReasoningPart(text=said, redacted=data, id=identity, signature=mark(api, "summary"))  # type: ignore[arg-type]
    return ContentPart(reasoning=part)


def raw(said: str, identity: str = "r") -> ContentPart:
    return ContentPart(reasoning=ReasoningPart(text=said, id=identity, signature=mark("responses", "content")))


def user(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_USER, parts=parts)


def assistant(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_ASSISTANT, parts=parts)


def tool(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_TOOL, parts=parts)


def items(*messages: Message, dialect: ResponsesDialect | None = None) -> list[dict[str, object]]:
    return input_items(ModelRequest(messages), dialect=dialect or ResponsesDialect())


def body(
    request: ModelRequest,
    dialect: ResponsesDialect | None = None,
    *,
    model: str = "gpt-5",
    tools: list[ToolSpec] = TOOLS,
) -> dict[str, object]:
    api = ResponsesApi(dialect)
    made = api.body(
        request,
        model=model,
        tools=api.tools(tools) if tools else None,
        tool_names=frozenset(tool.name for tool in tools),
        stream=True,
    )
    value = json.loads(made)
    assert isinstance(value, dict)
    return value


def test_a_whole_conversation_in_the_order_the_model_wrote_it() -> None:
    """Reasoning before what it led to, texts and calls in their places, then the results in call order."""
    assert items(
        user(text("add")),
        assistant(
            sealed("rs_1", "sum"), text("Let me."), sealed("rs_2"), call("a", args='{"x": 1}'), call("b"), text("!")
        ),
        tool(result("b", text("B"))),
        tool(result("a", text("2"), text("done"))),
        assistant(text("It is 2.")),
        user(text("thanks")),
    ) == [
        {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "sum"}],
            "id": "rs_1",
            "encrypted_content": "SEAL",
        },
        {"role": "assistant", "content": "Let me."},
        {"type": "reasoning", "summary": [], "id": "rs_2", "encrypted_content": "SEAL"},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{}"},
        {"role": "assistant", "content": "!"},
        {"type": "function_call_output", "call_id": "a", "output": "2\ndone"},
        {"type": "function_call_output", "call_id": "b", "output": "B"},
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": [{"type": "input_text", "text": "thanks"}]},
    ]


def test_orphans_are_repaired() -> None:
    """A call without result gets one that says so; a result without call is left out."""
    found = items(user(text("q")), tool(result("ghost", text("boo"))), assistant(call("a")), user(text("next")))
    assert found[1:3] == [
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": NO_RESULT},
    ]
    assert len(found) == 4


def test_reasoning_that_the_vendor_would_refuse_stays_here() -> None:
    """Another API's, nobody's, unsealed, and such that nothing follows."""
    found = items(
        user(text("q")),
        assistant(
            sealed("s", api="anthropic"),
            sealed("c", api="chat"),
            ContentPart(reasoning=ReasoningPart(text="n", redacted=b"X")),
            raw("thought"),
            text("a"),
            sealed("rs_last"),
        ),
        assistant(sealed("rs_only")),
    )
    assert found[1:] == [{"role": "assistant", "content": "a"}]


def test_reasoning_goes_back_as_text_where_the_vendor_has_no_sealed_form() -> None:
    """Raw text as content, summaries as summary; sealed items stay sealed."""
    dialect = ResponsesDialect(reasoning_text_back=True, reasoning_ids=False)
    found = items(
        user(text("q")), assistant(raw("hm"), sealed("rs", "s", b""), sealed("rs"), call("a")), dialect=dialect
    )
    assert found[1:4] == [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "SEAL"},
    ]


def test_content_stays_away_where_the_sealed_form_goes() -> None:
    """OpenAI refuses an item with both."""
    both = ReasoningPart(text="raw", redacted=b"SEAL", id="rs", signature=mark("responses", "content"))
    dialect = ResponsesDialect(reasoning_text_back=True)
    found = items(assistant(ContentPart(reasoning=both), text("a")), dialect=dialect)
    assert found[0] == {"type": "reasoning", "summary": [], "id": "rs", "encrypted_content": "SEAL"}


def test_images_and_files_are_sent() -> None:
    """Bytes become data addresses, addresses stay, text files are text, other files are file parts."""
    (found,) = items(
        user(
            text("look"),
            ContentPart(image=Media(media_type="image/png", data=b"\x01\x02")),
            ContentPart(image=Media(url="https://example.invalid/a.jpg")),
            ContentPart(file=Media(media_type="text/csv", data=b"a,b", name="t.csv")),
            ContentPart(file=Media(media_type="application/pdf", data=b"%PDF", name="d.pdf")),
            ContentPart(file=Media(media_type="video/mp4", url="https://example.invalid/v.mp4")),
            ContentPart(image=Media(name="lost.png")),
        )
    )
    assert found["content"] == [
        {"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": "data:image/png;base64,AQI="},
        {"type": "input_image", "image_url": "https://example.invalid/a.jpg"},
        {"type": "input_text", "text": "[file text/csv t.csv]\na,b"},
        {"type": "input_file", "filename": "d.pdf", "file_data": "data:application/pdf;base64,JVBERg=="},
        {"type": "input_text", "text": "[file video/mp4] https://example.invalid/v.mp4"},
        {"type": "input_text", "text": "[image lost.png]"},
    ]


def test_images_of_results_are_sent_where_the_vendor_takes_them() -> None:
    """Else a note stands in their place; errors without text show their diagnosis."""
    picture = ContentPart(image=Media(media_type="image/png", data=b"x", name="p.png"))
    conversation = [
        assistant(call("a"), call("b")),
        tool(
            result("a", text("see"), picture),
            result("b", is_error=True, diagnosis=Diagnosis(code="tool.failed", summary="It broke")),
        ),
    ]
    outputs = [item["output"] for item in items(*conversation) if "output" in item]
    assert outputs[0] == [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "data:image/png;base64,eA=="},
    ]
    assert "It broke" in str(outputs[1])
    noted = [item["output"] for item in items(*conversation, dialect=ResponsesDialect(images_in_results=False))[2:]]
    assert noted[0] == "see\n[image image/png p.png]"


def test_ids_names_and_arguments_are_what_the_vendor_accepts() -> None:
    """Long, repeated and odd ids are made anew, and results name them; broken arguments become {}."""
    found = items(assistant(call("x" * 80, "a b", "[1]"), call("f:0"), call("f:0")), tool(result("x" * 80, text("X"))))
    calls, outputs = found[:3], found[3:]
    ids = [item["call_id"] for item in calls]
    assert len(set(ids)) == 3
    assert all(isinstance(call_id, str) and len(call_id) <= 64 and ":" not in call_id for call_id in ids)
    assert [item["call_id"] for item in outputs] == ids
    assert outputs[0]["output"] == "X"
    assert (calls[0]["name"], calls[0]["arguments"]) == ("a_b", "{}")


def test_everything_asked_for_takes_its_place() -> None:
    """Fields, instructions, tools, options, structured output; and nothing is stored."""
    options = ModelOptions(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=99,
        tool_choice="add",
        parallel_tool_calls=False,
        response_schema=json.dumps(SCHEMA),
    )
    system = Message(role=Role.ROLE_SYSTEM, parts=[text("Summary")])
    assert body(ModelRequest([user(text("hi")), system], "Be brief.", options)) == {
        "model": "gpt-5",
        "store": False,
        "stream": True,
        "instructions": "Be brief.\n\nSummary",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "include": ["reasoning.encrypted_content"],
        "tools": [
            {
                "type": "function",
                "name": "add",
                "description": "Adds.",
                "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
                "strict": False,
            }
        ],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 99,
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}},
    }


def test_nothing_is_sent_that_was_not_asked_for() -> None:
    """The least request."""
    made = body(ModelRequest([user(text("hi"))], options=ModelOptions(tool_choice="auto")), tools=[])
    assert made.keys() == {"model", "store", "stream", "input", "include"}


def test_models_that_do_not_reason_are_not_asked_for_sealed_reasoning() -> None:
    """They refuse the whole request; so do vendors without it."""
    request = ModelRequest([user(text("hi"))])
    assert "include" not in body(request, model="gpt-4o-mini")
    assert "include" not in body(request, ResponsesDialect(encrypted_reasoning=False))
    assert body(request, ResponsesDialect(reasoning_summary="auto"))["reasoning"] == {"summary": "auto"}


REFUSED = {
    "stop": (ModelRequest([], options=ModelOptions(stop=("END",))), "no stop texts"),
    "prefix": (ModelRequest([], prefix="Once"), "cannot go on"),
    "unknown tool": (ModelRequest([], options=ModelOptions(tool_choice="mul")), "these tools: add"),
    "schema": (ModelRequest([], options=ModelOptions(response_schema="[]")), "no JSON object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_api_cannot_do_is_refused_rather_than_ignored(case: str) -> None:
    """The error says what, and that trying again does not help."""
    request, words = REFUSED[case]
    with pytest.raises(ModelError, match=words) as caught:
        body(request)
    assert (caught.value.reason, caught.value.retryable) == ("MODEL_BAD_RESPONSE", False)


def test_parameters_that_are_no_object_are_refused() -> None:
    """The error names the tool."""
    with pytest.raises(ValueError, match="'bad'"):
        ResponsesApi().tools([ToolSpec("bad", "", "[1]")])


async def test_the_request_as_the_vendor_sees_it(kit, vendor) -> None:
    """Path and headers of both ways to call; Azure's key goes where Azure looks for it."""
    whole = {"object": "response", "status": "completed", "output": []}
    script = kit.answers(200, json.dumps(whole).encode())
    async with vendor(script) as served:
        for dialect in (None, ResponsesDialect(key_header="api-key")):
            model = ResponsesModel("gpt-5", served.url, "k-secret", dialect=dialect)
            await model.generate(kit.asking())
            await kit.play(model)
            await model.aclose()
    assert {asked.line for asked in served.asked} == {"POST /v1/responses HTTP/1.1"}
    assert [asked.headers.get("authorization") for asked in served.asked] == ["Bearer k-secret"] * 2 + [None] * 2
    assert [asked.headers.get("api-key") for asked in served.asked] == [None] * 2 + ["k-secret"] * 2
    assert [asked.json["stream"] for asked in served.asked] == [False, True, False, True]
