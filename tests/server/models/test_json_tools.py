"""Constrained JSON: an endpoint that holds answers to a schema gives tool calls, however its text is cut."""

import json
from collections.abc import Sequence
from dataclasses import replace

import jsonschema
import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw import ContentPart, Message, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelError, ModelOptions, ModelRequest, TextDelta, ToolSpec
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.models.written.choice_text import ChoiceReader
from dualclaw_server.models.written.json_tools import Example, JsonToolsModel
from dualclaw_server.models.written.tool_text import WrittenCall, bind

SEARCH = ToolSpec(
    "search",
    "Finds documents.",
    '{"type": "object", "properties": {"q": {"type": "string", "description": "what"}}, "required": ["q"]}',
)
CLOCK = ToolSpec("clock", "Tells the time.", '{"type": "object", "properties": {}}')

Read = tuple[str, list[tuple[str, str]]]

TEXTS: dict[str, tuple[str, Read]] = {
    "a tool": ('{"tool": "search", "arguments": {"q": "x", "n": 1.0}}', ("", [("search", '{"q": "x", "n": 1.0}')])),
    "an answer": ('{"answer": "It is 42."}', ("It is 42.", [])),
    "an empty answer": ('{"answer": ""}', ("", [])),
    "white space everywhere": (' \n{ "answer"\n:\t"a b" }\n\n', ("a b", [])),
    "escapes": (r'{"answer": "a\"b\\c\/d\ne\t\u00e9\u4f60"}', ('a"b\\c/d\ne\té你', [])),
    "a surrogate pair": (r'{"answer": "x\ud83d\ude00y\uD83D\uDE00"}', ("x😀y😀", [])),
    "half pairs": (r'{"answer": "a\ud83db\ude00c\ud83d\ud83d\ude00\ud83d"}', ("a�b�c�😀�", [])),
    "half a pair elsewhere": (r'{"note": "\ud83d", "answer": "x"}', ("x", [])),
    "plain unicode": ('{"answer": "你好 😀"}', ("你好 😀", [])),
    "a line break inside a string": ('{"answer": "a\nb"}', ("a\nb", [])),
    "a key in escapes": (r'{"\u0061nswer": "yes"}', ("yes", [])),
    "an answer inside the arguments is none": (
        '{"tool": "search", "arguments": {"answer": "no", "x": [{"answer": "no"}]}}',
        ("", [("search", '{"answer": "no", "x": [{"answer": "no"}]}')]),
    ),
    "braces and quotes in strings": (
        r'{"tool": "search", "arguments": {"q": "}\"{,:"}} {"answer": "no"}',
        ("", [("search", r'{"q": "}\"{,:"}')]),
    ),
    "a value that is called answer": ('{"tool": "answer", "arguments": {}}', ("", [("answer", "{}")])),
    "no arguments": ('{"tool": "clock"}', ("", [("clock", "{}")])),
    "null arguments": ('{"tool": "clock", "arguments": null}', ("", [("clock", "{}")])),
    "arguments as text": (r'{"tool": "search", "arguments": "{\"q\": 1}"}', ("", [("search", '{"q": 1}')])),
    "arguments that are no object": ('{"tool": "search", "arguments": [1]}', ("", [("search", "[1]")])),
    "an answer and a tool": (
        '{"answer": "Let me see.", "tool": "clock", "arguments": {}}',
        ("Let me see.", [("clock", "{}")]),
    ),
    "a tool and no answer": ('{"tool": "clock", "arguments": {}, "answer": null}', ("", [("clock", "{}")])),
    "no tool and an answer": ('{"tool": null, "answer": "4"}', ("4", [])),
    "an answer that is no text": ('{"answer": {"a": [1, "é"]}}', ('{"a": [1, "é"]}', [])),
    "the first of two answers": ('{"answer": "a", "answer": "b"}', ("a", [])),
    "fenced": ('```json\n{"answer": "4"}\n```\n', ("4", [])),
    "prose after it": ('{"answer": "4"} That is it. }"{', ("4", [])),
    "no JSON at all": ("It is 42. \n", ("It is 42. \n", [])),
    "nothing": ("", ("", [])),
    "white space": (" \n", (" \n", [])),
    "a list": ('["answer"]', ('["answer"]', [])),
    "another fence": ("```python\n{}\n```", ("```python\n{}\n```", [])),
    "a fence around text": ("```\ntext\n```", ("```\ntext\n```", [])),
    "ticks": ("`{}`", ("`{}`", [])),
}


def read(pieces: Sequence[str], finish: str = "stop", *, structured: bool = False) -> Read:
    """Return what a reader makes of the pieces; its deltas must be its blocks' text."""
    reader = ChoiceReader(structured=structured)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + list(reader.end(finish))
    text = "".join(delta.text for delta in deltas)
    assert all(isinstance(delta, TextDelta) and delta.text for delta in deltas)
    blocks = reader.blocks()
    assert "".join(block.text for block in blocks if isinstance(block, ContentPart)) == text
    return text, [(block.name, block.arguments) for block in blocks if isinstance(block, WrittenCall)]


@pytest.mark.parametrize("name", TEXTS)
def test_a_choice_reads_the_same_however_it_is_cut(name: str) -> None:
    """Whole, in two pieces cut at every place, in three, and character by character, it reads as the table says."""
    text, expected = TEXTS[name]
    assert read([text]) == expected
    assert read(list(text)) == expected
    for first in range(len(text) + 1):
        assert read([text[:first], text[first:]]) == expected, first
        for second in range(first, len(text) + 1, 3):
            assert read([text[:first], text[first:second], text[second:]]) == expected, (first, second)


def test_the_answer_is_shown_as_it_is_written() -> None:
    """Every character shows at once; only an escape waits for its end, and half of a pair for the other."""
    reader = ChoiceReader()
    assert reader.feed('{"answer": "') == []
    assert [delta.text for delta in reader.feed("It is")] == ["It is"]
    shown = [
        "".join(delta.text for delta in reader.feed(piece)) for piece in ["\\", 'n"'[0], "4", r"\ud83", "d", r"\u"]
    ]
    assert shown == ["", "\n", "4", "", "", ""]
    assert [delta.text for delta in reader.feed("de00!")] == ["😀!"]
    assert reader.feed('"}') == []
    assert reader.end("stop") == []


BROKEN = {
    '{"answer": "4"': "was cut off",
    '{"answer": "4': "was cut off",
    '{"tool": "search", "arguments": {"q": "x"': "was cut off",
    '{"answer": "a" "b"}': "broken",
    r'{"answer": "a\x"}': "broken",
    "{answer: 4}": "broken",
    "{": "was cut off",
    "{}": 'neither "tool" nor "answer"',
    '{"name": "search", "parameters": {}}': 'neither "tool" nor "answer"',
    '{"tool": ""}': 'neither "tool" nor "answer"',
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_choice_is_a_typed_failure_however_it_is_cut(text: str) -> None:
    """Neither run nor shown as text: MODEL_BAD_RESPONSE, which another attempt may cure, with the text as detail."""
    for cut in range(len(text) + 1):
        with pytest.raises(ModelError) as failed:
            read([text[:cut], text[cut:]])
        error = failed.value
        assert (error.reason, error.retryable, error.detail) == ("MODEL_BAD_RESPONSE", True, text)
        assert BROKEN[text] in error.message


def test_an_answer_stands_when_its_tokens_ran_out_but_a_call_does_not() -> None:
    """With finish reason "length" half an answer is an answer; half a call is broken all the same."""
    for text, expected in (('{"answer": "It is', "It is"), (r'{"answer": "a\ud83d', "a�"), ('{"answer": "', "")):
        assert read(list(text), "length") == (expected, [])
    assert read(list('{"answer": "It is'), "content_filter") == ("It is", [])
    assert read(list('{"tool": "sea'), "content_filter") == ("", [])
    for text in ('{"tool": "search", "arguments": {"q": "x', '{"to', "{"):
        with pytest.raises(ModelError, match="cut off"):
            read(list(text), "length")


def test_a_structured_answer_is_given_as_its_json() -> None:
    """What must fit a schema is a JSON value, a string included, and is given whole."""
    for answer in ('{"a": [1, "é"]}', '"text"', "null", "4"):
        text = f'{{"answer": {answer}}}'
        assert read(list(text), structured=True) == (answer, [])


def writes(kit, *pieces: str, finish: str = "stop"):
    """Return a vendor's script that streams the pieces as deltas, one write each."""
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
    return kit.streams(*(kit.chunk(piece) for piece in pieces), kit.chunk(finish=finish), usage)


def user(text: str) -> Message:
    return Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])


async def test_a_chosen_tool_comes_out_as_a_tool_call(kit, vendor) -> None:
    """Behind a real endpoint: the call with an id, finish reason, usage; the request holds schema and examples."""
    text = '{"tool": "search", "arguments": {"q": "x"}}'
    async with vendor(writes(kit, *text)) as served, kit.model_at(served) as inner:
        outcome = await kit.play(JsonToolsModel(inner).with_tools([SEARCH, CLOCK]))
    response = outcome.response
    assert outcome.text == ""
    ((call_id, name, arguments),) = outcome.calls
    assert (name, arguments, bool(call_id)) == ("search", '{"q": "x"}', True)
    assert response.finish_reason == "tool_calls"
    assert MessageToDict(response.usage, preserving_proto_field_name=True) == {"input_tokens": 5, "output_tokens": 7}
    assert (response.model, response.request_id, response.message.role) == ("m-1", "c-1", Role.ROLE_ASSISTANT)
    sent = served.asked[0].json
    assert "tools" not in sent
    assert sent["response_format"]["type"] == "json_schema"
    schema = sent["response_format"]["json_schema"]["schema"]
    argument = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    assert [branch["properties"] for branch in schema["oneOf"]] == [
        {"tool": {"const": "search"}, "arguments": {**argument, "additionalProperties": False}},
        {
            "tool": {"const": "clock"},
            "arguments": {"type": "object", "properties": {}, "additionalProperties": False},
        },
        {"answer": {"type": "string"}},
    ]
    for branch in schema["oneOf"]:
        assert branch["required"] == list(branch["properties"])
        assert branch["additionalProperties"] is False
    system, *turns = sent["messages"]
    assert "- search: Finds documents." in system["content"]
    assert '"description":"what"' in system["content"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 3 + ["user"]
    for turn in turns[1::2]:
        jsonschema.validate(json.loads(turn["content"]), schema)
    assert turns[-1]["content"] == "hi"


async def test_an_answer_streams_out_of_its_json(kit, vendor) -> None:
    """The endpoint's pieces become pieces of the answer's text; streaming and not give the same message."""
    pieces = ['{"ans', 'wer": "He', "llo,\\", "nwor", 'ld"', "}"]

    async def script(connection, asked) -> None:
        message = {"role": "assistant", "content": "".join(pieces)}
        whole = json.dumps({"id": "c-1", "model": "m-1", "choices": [{"message": message, "finish_reason": "stop"}]})
        streamed = kit.streams(*(kit.chunk(piece) for piece in pieces), kit.chunk(finish="stop"))
        await (streamed if asked.json["stream"] else kit.answers(200, whole.encode()))(connection, asked)

    async with vendor(script) as served, kit.model_at(served) as inner:
        model = JsonToolsModel(inner).with_tools([SEARCH])
        outcome = await kit.play(model)
        assert outcome.text == "Hello,\nworld"
        assert outcome.response == await model.generate(kit.asking())
    assert outcome.response.finish_reason == "stop"
    assert [part.text for part in outcome.response.message.parts] == ["Hello,\nworld"]


async def test_a_broken_choice_ends_the_call_after_what_was_shown(kit, vendor) -> None:
    """The text shown stays shown, the failure is typed and retryable, and says what the call has cost."""
    async with vendor(writes(kit, '{"answer": "Hel', "lo")) as served, kit.model_at(served) as inner:
        outcome = await kit.play(JsonToolsModel(inner).with_tools([SEARCH]))
    assert outcome.text == "Hello"
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", True)
    assert outcome.error.usage.output_tokens == 7


async def test_arguments_that_are_no_object_are_bad(kit, vendor) -> None:
    """Where no schema was held to, the call comes out with its raw arguments, and nobody may run it."""
    async with vendor(writes(kit, '{"tool": "search", "arguments": "x"}')) as served, kit.model_at(served) as inner:
        outcome = await kit.play(JsonToolsModel(inner).with_tools([SEARCH]))
    ((call_id, _, arguments),) = outcome.calls
    assert arguments == ""
    assert outcome.response.bad_arguments == {call_id: "x"}


async def test_without_tools_nothing_is_changed(kit, vendor) -> None:
    """No tools and no calls: the request goes as it is, its own schema included, and JSON is text."""
    text = '{"answer": "x"}'
    async with vendor(writes(kit, *text)) as served, kit.model_at(served) as inner:
        request = replace(kit.asking(), options=ModelOptions(response_schema='{"type": "object"}'))
        outcome = await kit.play(JsonToolsModel(inner), request)
    assert outcome.text == text
    sent = served.asked[0].json
    assert sent["messages"] == [{"role": "user", "content": "hi"}]
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}


CONVERSATION = [
    user("first"),
    Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(text='One "é".')]),
    user("second"),
    Message(
        role=Role.ROLE_ASSISTANT,
        parts=[ContentPart(tool_call=ToolCall(id="c1", name="search", args_json='{"q": "x"}'))],
    ),
    Message(
        role=Role.ROLE_TOOL,
        parts=[ContentPart(tool_result=ToolResult(call_id="c1", parts=[ContentPart(text="found")]))],
    ),
]
TOLD = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": '{"answer": "One \\"é\\"."}'},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": '{"tool": "search", "arguments": {"q": "x"}}'},
    {"role": "user", "content": "Result of search: found"},
]


async def test_history_is_told_in_the_same_json_behind_the_examples(kit, vendor) -> None:
    """What the model reads of itself is what it is to write; given examples stand in place of those made up."""
    examples = [Example("17 * 23?", '{"tool": "calc", "arguments": {}}'), Example("Thanks!", '{"answer": "Welcome."}')]
    async with vendor(writes(kit, '{"answer": "ok"}')) as served, kit.model_at(served) as inner:
        for made in (examples, []):
            model = JsonToolsModel(inner, made).with_tools([SEARCH])
            outcome = await kit.play(model, ModelRequest(CONVERSATION, "You help."))
            assert outcome.text == "ok"
            system, *turns = served.asked[-1].json["messages"]
            assert system["content"].startswith("You help.")
            assert turns[-5:] == TOLD
            assert [(turn["content"]) for turn in turns[:-5]] == [
                text for example in made for text in (example.ask, example.reply)
            ]


async def test_the_last_answer_of_a_run_has_no_tool_to_choose(kit, vendor) -> None:
    """With calls in the conversation and no tools any more, the schema leaves an answer and nothing else."""
    async with vendor(writes(kit, '{"answer": "42"}')) as served, kit.model_at(served) as inner:
        outcome = await kit.play(JsonToolsModel(inner), ModelRequest(CONVERSATION))
    assert (outcome.text, outcome.calls) == ("42", [])
    sent = served.asked[0].json
    assert sent["messages"][1:] == TOLD
    assert list(sent["response_format"]["json_schema"]["schema"]["properties"]) == ["answer"]


async def test_a_tool_choice_is_a_choice_of_branches(kit, vendor) -> None:
    """Required leaves out the answer, a name all tools but one, none everything; the vendor sees no such option."""
    async with vendor(writes(kit, '{"tool": "clock", "arguments": {}}')) as served, kit.model_at(served) as inner:
        model = JsonToolsModel(inner).with_tools([SEARCH, CLOCK])

        async def branches(**options: object) -> list[object]:
            await kit.play(model, replace(kit.asking(), options=ModelOptions(**options)))
            sent = served.asked[-1].json
            assert not {"tools", "tool_choice", "parallel_tool_calls"} & set(sent)
            if "response_format" not in sent:
                return []
            schema = sent["response_format"]["json_schema"]["schema"]
            found = [branch["properties"] for branch in schema.get("oneOf", [schema])]
            return [properties.get("tool", {"const": "-"})["const"] for properties in found]

        assert await branches(parallel_tool_calls=True) == ["search", "clock", "-"]
        assert await branches(tool_choice="required") == ["search", "clock"]
        assert await branches(tool_choice="clock") == ["clock"]
        assert await branches(tool_choice="none") == []
        outcome = await kit.play(model, replace(kit.asking(), options=ModelOptions(tool_choice="fly")))
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", False)


async def test_a_structured_answer_is_one_branch_of_the_choice(kit, vendor) -> None:
    """response_schema becomes the answer's schema, references put in place; the text is the JSON of the value."""
    wanted = {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "number"}}}
    async with vendor(writes(kit, '{"answer": [1, 2]}')) as served, kit.model_at(served) as inner:
        model = JsonToolsModel(inner).with_tools([SEARCH])
        request = replace(kit.asking(), options=ModelOptions(response_schema=json.dumps(wanted)))
        outcome = await kit.play(model, request)
        branch = served.asked[0].json["response_format"]["json_schema"]["schema"]["oneOf"][-1]
        assert branch["properties"] == {"answer": {"type": "array", "items": {"type": "number"}}}
        assert outcome.text == "[1, 2]"
        bad = await kit.play(model, replace(kit.asking(), options=ModelOptions(response_schema="[")))
    assert (bad.error.reason, bad.error.retryable) == ("MODEL_BAD_RESPONSE", False)


SCHEMAS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "descriptions are left out": (
        {"type": "object", "title": "T", "properties": {"a": {"type": "string", "description": "d", "pattern": "x"}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
    ),
    "definitions stand in place": (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A%"}}, "$defs": {"A%": {"enum": [1, 2]}}},
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False},
    ),
    "a property may be called like a keyword": (
        {"properties": {"$ref": {"type": "string"}, "title": {"type": "number"}}},
        {
            "type": "object",
            "properties": {"$ref": {"type": "string"}, "title": {"type": "number"}},
            "additionalProperties": False,
        },
    ),
    "recursion becomes anything": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {
            "type": "object",
            "properties": {"next": {"type": "object", "properties": {"next": {}}, "additionalProperties": False}},
            "additionalProperties": False,
        },
    ),
    "what leads nowhere becomes anything": (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}, "b": {"$ref": "http://x/y"}, "c": True}},
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False},
    ),
    "alternatives and lists": (
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"type": "array", "items": {"const": 1}}, {"type": "null"}]}},
        },
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"type": "array", "items": {"const": 1}}, {"type": "null"}]}},
            "additionalProperties": False,
        },
    ),
    "all of them": (
        {"allOf": [{"type": "object", "properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]},
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"], "additionalProperties": False},
    ),
    "an open object stays open": ({"type": "object"}, {"type": "object"}),
    "a map keeps its values": (
        {"type": "object", "additionalProperties": {"type": "number", "title": "x"}},
        {"type": "object", "additionalProperties": {"type": "number"}},
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_hold_nothing_but_what_bounds_a_value(name: str) -> None:
    """A tool's schema as a constraint: flat, without references, descriptions and patterns."""
    schema, expected = SCHEMAS[name]
    (tool,) = bind([ToolSpec("t", "", json.dumps(schema))])
    assert tool.schema == expected
    jsonschema.Draft202012Validator.check_schema(tool.schema)


def test_a_schema_that_explodes_is_bounded() -> None:
    """Definitions that double thirty times do not become a billion nodes."""
    definitions = {
        f"d{n}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2}} for n in range(30)
    }
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    (tool,) = bind([ToolSpec("t", "", json.dumps(schema))])
    assert len(json.dumps(tool.schema)) < 200_000


def test_examples_that_are_no_choice_are_refused() -> None:
    """An example teaches the form, so one in another form is a mistake, named with what would be right."""
    for reply in ("hello", "{}", '{"name": "x"}'):
        with pytest.raises(ValueError, match=r'must be \{"tool": NAME'):
            JsonToolsModel(ScriptedModel.shipped(), [Example("x", reply)])
