"""The scripted model: which turn it plays, how it plays it, and what it says about a wrong file."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw import ContentPart, Message, Role, ToolResult
from dualclaw_server.engine.model import ModelRequest, ModelTraits, ReasoningDelta, TextDelta, ToolSpec
from dualclaw_server.models import ScriptedModel, ScriptError, model_from_spec

TOOL = ToolSpec("calculate", "", '{"type": "object"}')


def script(*turns: dict[str, object]) -> ScriptedModel:
    return ScriptedModel.parse(json.dumps({"name": "s", "turns": turns}))


def user(text: str, message_id: str = "u") -> Message:
    return Message(id=message_id, role=Role.ROLE_USER, parts=[ContentPart(text=text)])


def tool(call_id: str, text: str) -> Message:
    part = ContentPart(tool_result=ToolResult(call_id=call_id, parts=[ContentPart(text=text)]))
    return Message(role=Role.ROLE_TOOL, parts=[part])


async def test_the_first_turn_that_fits_is_played(kit) -> None:
    """Each key of ``when`` decides, all given must fit, and order settles the rest."""
    model = script(
        {"when": {"user": "^ping$", "step": 1, "tool_result": "4\\d"}, "say": [{"text": "forties {{result}}"}]},
        {"when": {"step": 1}, "say": [{"text": "second"}]},
        {"when": {"tools": "other"}, "say": [{"text": "other is bound"}]},
        {"when": {"tools": True}, "say": [{"text": "bound"}]},
        {"when": {"system": "pirate"}, "say": [{"text": "arr"}]},
        {"when": {"user": "ping", "step": 0}, "say": [{"text": "pong"}]},
        {"say": [{"text": "else: {{user}}"}]},
    )
    answer = Message(role=Role.ROLE_ASSISTANT)

    async def text_of(*messages: Message, system: str = "", tools: tuple[ToolSpec, ...] = ()) -> str:
        return (await kit.play(model.with_tools(tools), ModelRequest(messages, system))).text

    assert await text_of(user("ping")) == "pong"
    assert await text_of(user("what")) == "else: what"
    assert await text_of(user("ping"), answer, tool("c", "42")) == "forties 42"
    assert await text_of(user("ping"), answer, tool("c", "52")) == "second"
    assert await text_of(user("old"), answer, tool("c", "42"), user("ping")) == "pong"
    assert await text_of(user("ping"), tools=(TOOL,)) == "bound"
    assert await text_of(user("ping"), tools=(TOOL, ToolSpec("other", "", "{}"))) == "other is bound"
    assert await text_of(user("what"), system="be a pirate") == "arr"


async def test_no_turn_is_an_error_that_says_which_exist(kit) -> None:
    """A request that nothing fits ends as MODEL_BAD_RESPONSE with the turns in its detail."""
    outcome = await kit.play(script({"when": {"user": "ping"}, "say": []}))
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", False)
    assert 'turns[0] {"user": "ping"}' in outcome.error.detail


async def test_items_are_played_in_order_and_in_pieces(kit) -> None:
    """Texts are cut by code points; calls, usage and finish reason arrive in the response."""
    model = script(
        {
            "say": [
                {"reasoning": "thinking", "chunk": 5},
                {"text": "你好😀!", "chunk": 2},
                {"call": "f", "args": {"b": [1, "{{user}}"], "a": 1.5}},
                {"text": "bye"},
                {"usage": {"input_tokens": 3, "output_tokens": 0}, "finish": "length"},
            ]
        }
    )
    outcome = await kit.play(model, kit.asking("x"))
    assert outcome.deltas == [
        ReasoningDelta("think"),
        ReasoningDelta("ing"),
        TextDelta("你好"),
        TextDelta("😀!"),
        TextDelta("bye"),
    ]
    response = outcome.response
    assert [part.WhichOneof("part") for part in response.message.parts] == ["reasoning", "text", "tool_call", "text"]
    assert outcome.calls[0][1:] == ("f", '{"b": [1, "x"], "a": 1.5}')
    assert response.finish_reason == "tool_calls"
    assert MessageToDict(response.usage, preserving_proto_field_name=True) == {"input_tokens": 3, "output_tokens": 0}
    assert response == await model.generate(kit.asking("x"))
    only = await kit.play(script({"say": [{"text": "t"}, {"finish": "length"}]}))
    assert only.response.finish_reason == "length"


async def test_broken_arguments_and_shared_ids_reach_the_engine(kit) -> None:
    """raw_args goes through the same assembler as a vendor's text; an id used twice is re-keyed."""
    model = script(
        {
            "say": [
                {"call": "f", "raw_args": '{"x": {{user}}', "id": "a"},
                {"call": "g", "raw_args": '{"x":{{user}}}', "id": "a"},
            ]
        }
    )
    outcome = await kit.play(model, kit.asking("7"))
    assert outcome.response.bad_arguments == {"a": '{"x": 7'}
    assert [call[2] for call in outcome.calls] == ["", '{"x": 7}']
    assert len({call[0] for call in outcome.calls}) == 2


async def test_call_ids_follow_from_the_conversation(kit) -> None:
    """The same request gives the same ids in any process; over a conversation they are unique."""
    turn = {"say": [{"call": "f"}, {"call": "f"}]}
    messages = [user("go")]
    seen: set[str] = set()
    for round_number in range(4):
        first = await kit.play(script(turn), ModelRequest(messages))
        again = await kit.play(script(turn), ModelRequest(messages))
        assert first.calls == again.calls
        ids = {call[0] for call in first.calls}
        assert len(ids) == 2
        assert not ids & seen
        seen |= ids
        messages += [first.response.message, *(tool(call_id, "ok") for call_id in sorted(ids))]
        if round_number % 2:
            messages.append(user("go"))


async def test_a_call_id_that_is_taken_is_made_another(kit) -> None:
    """Where the made id is in the conversation already, which a rewritten history can bring about, it changes."""
    model = script({"say": [{"call": "f"}]})
    before = Message(role=Role.ROLE_ASSISTANT)
    ((made, _, _),) = (await kit.play(model, ModelRequest([before, user("go")]))).calls
    before.parts.add().tool_call.id = made
    ((other, _, _),) = (await kit.play(model, ModelRequest([before, user("go")]))).calls
    assert other == f"{made}_2"


async def test_placeholders_are_explicit_and_not_looked_at_again(kit) -> None:
    """Only the documented forms are replaced; what a user writes is never expanded."""
    model = script(
        {
            "when": {"user": "(?P<word>\\S+)$"},
            "say": [{"text": "{{user}}|{{match:word}}|{{result}}|{{result:f}}|{x} {{other}} {{}} {{{user}}}"}],
        }
    )
    call = {"id": "c1", "name": "f"}
    messages = [
        user("say {{result}}"),
        Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(tool_call=call)]),  # type: ignore[arg-type]
        tool("c1", "F"),
        tool("c2", "other"),
    ]
    outcome = await kit.play(model, ModelRequest(messages))
    assert outcome.text == "say {{result}}|{{result}}|other|F|{x} {{other}} {{}} {say {{result}}}"


async def test_failures_are_typed_and_come_after_what_was_said(kit) -> None:
    """A scripted failure has its reason, text, and wait; retryable follows from the reason unless given."""
    model = script(
        {
            "when": {"user": "a"},
            "say": [{"text": "part"}, {"fail": "MODEL_OVERLOADED", "message": "busy", "retry_after": 2, "after": 0.05}],
        },
        {"when": {"user": "b"}, "say": [{"fail": "MODEL_AUTH"}]},
        {"say": [{"fail": "MODEL_UNAVAILABLE", "retryable": False}]},
    )
    start = time.monotonic()
    first = await kit.play(model, kit.asking("a"))
    assert time.monotonic() - start >= 0.05
    assert (first.text, first.error.reason, first.error.message, first.error.retryable, first.error.retry_after) == (
        "part",
        "MODEL_OVERLOADED",
        "busy",
        True,
        2,
    )
    assert not (await kit.play(model, kit.asking("b"))).error.retryable
    assert not (await kit.play(model, kit.asking("c"))).error.retryable


async def test_hang_lasts_until_cancelled(kit) -> None:
    """A hanging turn shows what came before and ends at once when cancelled."""
    with pytest.raises(TimeoutError):
        await kit.play(script({"say": [{"text": "x"}, {"hang": True}]}), within=0.1)


async def test_delays_are_kept_between_deltas(kit) -> None:
    """Four pieces with a delay of 20 ms take at least 60 ms."""
    start = time.monotonic()
    await kit.play(script({"say": [{"text": "abcd", "chunk": 1, "delay": 0.02}]}))
    assert time.monotonic() - start >= 0.06


async def test_a_long_text_without_delay_can_be_cancelled(kit) -> None:
    """Even a turn of many pieces lets the loop run between them."""
    task = asyncio.create_task(kit.play(script({"say": [{"text": "x" * 200_000, "chunk": 1}]})))
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_script_says_what_its_model_can_do() -> None:
    """The traits of the file are the model's; what it does not say has the default; tools do not change them."""
    text = '{"traits": {"context_window": 8000, "continues": true, "images": false}, "turns": [{"say": []}]}'
    model = ScriptedModel.parse(text)
    assert model.traits == ModelTraits(context_window=8000, continues=True, images=False, native_tools=True)
    assert model.with_tools([TOOL]).traits == model.traits
    assert script({"say": []}).traits == ModelTraits()


def continuing(*turns: dict[str, object]) -> ScriptedModel:
    return ScriptedModel.parse(json.dumps({"traits": {"continues": True}, "turns": turns}))


def after(prefix: str) -> ModelRequest:
    return ModelRequest([user("go")], prefix=prefix)


async def test_a_continued_answer_is_only_what_follows(kit) -> None:
    """From a prefix anywhere in the text, what was played before its end is not played again; the rest is."""
    say = [
        {"reasoning": "hm"},
        {"text": "Hello, "},
        {"fail": "MODEL_STREAM_BROKEN"},
        {"text": "wor"},
        {"reasoning": "more"},
        {"text": "ld"},
        {"call": "f"},
    ]
    model = continuing({"say": say})
    whole = "Hello, world"
    for length in range(8, len(whole) + 1):
        outcome = await kit.play(model, after(whole[:length]))
        assert outcome.text == whole[length:]
        assert outcome.reasoning == ("more" if length <= len("Hello, wor") else "")
        assert [call[1] for call in outcome.calls] == ["f"]
        assert "".join(part.text for part in outcome.response.message.parts) == outcome.text
    broken = await kit.play(model, after("Hello"))
    assert (broken.text, broken.error.reason) == (", ", "MODEL_STREAM_BROKEN")


async def test_a_prefix_the_text_does_not_start_with_is_followed_by_the_whole_turn(kit) -> None:
    """A script may answer a prefix with a turn of its own, chosen by ``when.prefix``."""
    model = continuing({"when": {"prefix": "lo$"}, "say": [{"text": " there"}]}, {"say": [{"text": "Hello"}]})
    assert (await kit.play(model, after("Hello"))).text == " there"
    assert (await kit.play(model, after("Hel"))).text == "lo"
    assert (await kit.play(model, after(""))).text == "Hello"


async def test_a_model_that_does_not_continue_gives_the_whole_answer(kit) -> None:
    """Without the trait the prefix is ignored."""
    assert (await kit.play(script({"say": [{"text": "Hello"}]}), after("Hel"))).text == "Hello"


WRONG = {
    '{"traits": [], "turns": [{"say": []}]}': "traits must be an object",
    '{"traits": {"vision": true}, "turns": [{"say": []}]}': "traits.vision is unknown; known are context_window",
    '{"traits": {"images": 1}, "turns": [{"say": []}]}': "traits.images must be true or false",
    '{"traits": {"context_window": true}, "turns": [{"say": []}]}': "traits.context_window must be a whole number",
    "[]": "must be an object",
    '{"turns": []}': "turns must be a list with at least one turn",
    '{"turns": [{"say": [{"txt": "x"}]}]}': "turns[0].say[0] must be an object with one of text",
    '{"turns": [{"when": {"usr": "x"}, "say": []}]}': "turns[0].when.usr is unknown",
    '{"turns": [{"when": {"user": "("}, "say": []}]}': "turns[0].when.user is no regular expression",
    '{"turns": [{"when": {"step": -1}, "say": []}]}': "turns[0].when.step must be a whole number",
    '{"turns": [{"when": {"tools": 1}, "say": []}]}': "turns[0].when.tools must be true, false or a tool's name",
    '{"turns": [{"say": [{"text": 1}]}]}': "turns[0].say[0].text must be a text",
    '{"turns": [{"say": [{"text": "x", "delay": -1}]}]}': "turns[0].say[0].delay must be seconds",
    '{"turns": [{"say": [{"text": "x", "chunk": 1.5}]}]}': "turns[0].say[0].chunk must be a whole number",
    '{"turns": [{"say": [{"text": "x", "call": "f"}]}]}': "turns[0].say[0] must be an object with one of",
    '{"turns": [{"say": [{"call": "f", "args": {}, "raw_args": ""}]}]}': "turns[0].say[0] has args and raw_args",
    '{"turns": [{"say": [{"call": "f", "args": []}]}]}': "turns[0].say[0].args must be an object",
    '{"turns": [{"say": [{"call": ""}]}]}': "turns[0].say[0].call must name a tool",
    '{"turns": [{"say": [{"fail": "OOPS"}]}]}': "turns[0].say[0].fail must be one of",
    '{"turns": [{"say": [{"hang": false}]}]}': "turns[0].say[0].hang must be true",
    '{"turns": [{"say": [{"usage": {"tokens": 1}}]}]}': "turns[0].say[0].usage.tokens is unknown",
    '{"turns": [{"say": [{"usage": {"input_tokens": -1}}]}]}': "turns[0].say[0].usage.input_tokens must be",
    '{"turns": [{"say": [{"finish": "done"}]}]}': "turns[0].say[0].finish must be one of",
    '{"turns": [{"when": {"user": "(?P<a>x)"}, "say": [{"text": "{{match:b}}"}]}]}': "{{match:b}} names no group",
    "{": "is not JSON",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_script_is_refused_with_the_place(text: str) -> None:
    """Each mistake is a ScriptError that names where it is."""
    with pytest.raises(ScriptError) as refused:
        ScriptedModel.parse(text)
    assert WRONG[text] in str(refused.value)


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    """Two mistakes in two turns are both in the error, behind the file's name."""
    file = tmp_path / "s.json"
    file.write_text('{"turns": [{"say": [{"text": 1}]}, {"say": 2}]}')
    with pytest.raises(ScriptError) as refused:
        ScriptedModel.load(file)
    assert refused.value.problems == ("turns[0].say[0].text must be a text", "turns[1].say must be a list")
    assert str(refused.value).startswith(str(file))
    with pytest.raises(ScriptError, match="cannot be read"):
        ScriptedModel.load(tmp_path / "missing.json")


ASKED = {
    "What is 17 * 23?": ("calculate", '{"expression": "17 * 23"}'),
    "Please compute (1+2)*3.5 for me": ("calculate", '{"expression": "(1+2)*3.5"}'),
    "-2**3 + 4 = ?": ("calculate", '{"expression": "-2**3 + 4"}'),
    "What time is it?": ("current_time", "{}"),
    "现在几点": ("current_time", "{}"),
    "What time is it in Europe/Berlin?": ("current_time", '{"timezone": "Europe/Berlin"}'),
}


@pytest.mark.parametrize("question", ASKED)
async def test_the_shipped_script_uses_the_demo_tools(kit, question: str) -> None:
    """It reasons, calls the right tool, and answers with what the tool said."""
    model = model_from_spec("scripted").with_tools([TOOL])
    first = await kit.play(model, kit.asking(question))
    assert first.reasoning
    assert [call[1:] for call in first.calls] == [ASKED[question]]
    messages = [*kit.asking(question).messages, first.response.message, tool(first.calls[0][0], "391")]
    second = await kit.play(model, ModelRequest(messages))
    assert "391" in second.text
    assert second.calls == []


async def test_the_shipped_script_says_honestly_what_it_is(kit) -> None:
    """Anything else, or no tools at all, gets an answer that names the settings of a real model."""
    for model in (model_from_spec("scripted"), model_from_spec("scripted").with_tools([TOOL])):
        text = (await kit.play(model, kit.asking("Tell me a joke"))).text
        assert "scripted model" in text
        for setting in ("DUALCLAW_MODEL=openai:NAME", "DUALCLAW_MODEL_BASE_URL", "DUALCLAW_MODEL_API_KEY"):
            assert setting in text


def test_specs_name_scripts(tmp_path: Path) -> None:
    """``scripted:FILE`` plays that file, ``scripted`` alone the one of the demo agent; a wrong file is refused."""
    file = tmp_path / "s.json"
    file.write_text('{"name": "mine", "turns": [{"say": []}]}')
    assert model_from_spec(f"scripted:{file}").name == "mine"
    assert model_from_spec("scripted").name == "scripted-assistant"
    with pytest.raises(ValueError, match="cannot be read"):
        model_from_spec(f"scripted:{tmp_path / 'missing.json'}")
