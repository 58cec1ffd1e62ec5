"""Text-style ReAct: a model without tool calls, behind a real endpoint, gets them; however its text is cut."""

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
from google.protobuf.json_format import MessageToDict

from dualclaw import ContentPart, Media, Message, ReasoningPart, Role, ToolCall, ToolResult, Usage
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.model import (
    ChatModel,
    ModelChunk,
    ModelError,
    ModelOptions,
    ModelRequest,
    ModelTraits,
    ReasoningDelta,
    Restart,
    TextDelta,
    ToolSpec,
)
from dualclaw_server.models.router import RouterModel
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.models.written.json_tools import JsonToolsModel
from dualclaw_server.models.written.model import WrittenToolsModel
from dualclaw_server.models.written.text_tools import TextToolsModel
from dualclaw_server.tools.assistant import calculate
from tests.server.conftest import ask

SEARCH = ToolSpec(
    "search",
    "Finds documents.",
    '{"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}',
)
CLOCK = ToolSpec("clock", "Tells the time.", '{"type": "object", "properties": {}}')


def writes(kit, *pieces: str, finish: str = "stop", usage: bool = True):
    """Return a vendor's script that streams the pieces as deltas, one write each."""
    chunks = [kit.chunk(piece) for piece in pieces]
    chunks.append(kit.chunk(finish=finish))
    if usage:
        chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}})
    return kit.streams(*chunks)


def user(text: str) -> Message:
    return Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])


def result(call_id: str, text: str, **fields: bool) -> ContentPart:
    return ContentPart(tool_result=ToolResult(call_id=call_id, parts=[ContentPart(text=text)], **fields))


async def test_an_action_comes_out_as_a_tool_call(kit, vendor) -> None:
    """Behind a real endpoint: reasoning, the call with an id, finish reason, usage; the answer stops at Observation."""
    text = 'Thought: look\nAction: search\nAction Input: {"q": "x"}'
    async with vendor(writes(kit, *text)) as served, kit.model_at(served) as inner:
        model = TextToolsModel(inner).with_tools([SEARCH, CLOCK])
        outcome = await kit.play(model)
    response = outcome.response
    assert (outcome.text, outcome.reasoning) == ("", "look")
    ((call_id, name, arguments),) = outcome.calls
    assert (name, arguments) == ("search", '{"q": "x"}')
    assert call_id
    assert response.finish_reason == "tool_calls"
    assert MessageToDict(response.usage, preserving_proto_field_name=True) == {"input_tokens": 5, "output_tokens": 7}
    assert (response.model, response.request_id, response.bad_arguments) == ("m-1", "c-1", {})
    assert response.message.role == Role.ROLE_ASSISTANT
    sent = served.asked[0].json
    assert "tools" not in sent
    assert sent["stop"] == ["\nObservation:", "\nObservation："]
    instructions = sent["messages"][0]
    assert instructions["role"] == "system"
    for needed in ("- search: Finds documents.", '"required":["q"]', "- clock:", 'Action Input: {"q": "..."}'):
        assert needed in instructions["content"]
    assert sent["messages"][1:] == [{"role": "user", "content": "hi"}]


async def test_streaming_and_not_give_the_same(kit, vendor) -> None:
    """``generate`` reads the whole text exactly as the stream did."""
    text = "Let me see.\nThought: look\nAction: fly\nAction Input: {'q'}\nAction: clock"

    async def script(connection, asked) -> None:
        message = {"role": "assistant", "content": text}
        whole = json.dumps({"id": "c-1", "model": "m-1", "choices": [{"message": message, "finish_reason": "stop"}]})
        streamed = writes(kit, *text, usage=False)
        await (streamed if asked.json["stream"] else kit.answers(200, whole.encode()))(connection, asked)

    async with vendor(script) as served, kit.model_at(served) as inner:
        model = TextToolsModel(inner).with_tools([SEARCH, CLOCK])
        streamed = (await kit.play(model)).response
        whole = await model.generate(kit.asking())
    assert [part.WhichOneof("part") for part in whole.message.parts] == ["text", "reasoning", "tool_call", "tool_call"]
    assert list(whole.bad_arguments.values()) == list(streamed.bad_arguments.values()) == ["{'q'}"]
    for response in (whole, streamed):
        for part in response.message.parts:
            part.tool_call.ClearField("id")
    assert replace(whole, bad_arguments={}) == replace(streamed, bad_arguments={})


async def test_an_imagined_observation_ends_the_call_at_the_vendor(kit, vendor) -> None:
    """What the model imagines is not read: the connection is closed, the call stands, its usage is unknown."""
    closed = asyncio.get_running_loop().create_future()

    async def script(connection, asked) -> None:
        text = 'Action: search\nAction Input: {"q": 1}\nObservation: found it\nFinal Answer: 1'
        await connection.send(kit.SSE_HEAD + kit.event_bytes(kit.chunk(text), done=False))
        closed.set_result(await connection.closed_by_peer())

    async with vendor(script) as served, kit.model_at(served) as inner:
        outcome = await kit.play(TextToolsModel(inner).with_tools([SEARCH]))
        assert await asyncio.wait_for(closed, 60)
    assert outcome.text == ""
    assert [call[1:] for call in outcome.calls] == [("search", '{"q": 1}')]
    assert outcome.response.finish_reason == "tool_calls"
    assert outcome.response.usage == Usage()


async def test_half_a_call_is_never_runnable(kit, vendor) -> None:
    """When it was cut off inside the arguments, or before them, the call is bad; complete ones before it stand."""
    cases = (
        ('Action: search\nAction Input: {"q": "x', '{"q": "x', "length"),
        ("Action: sear", "", "length"),
        ("Action: clock", "", "content_filter"),
    )
    for text, bad, finish in cases:
        whole = 'Action: search\nAction Input: {"q": 1}\n' + text
        async with vendor(writes(kit, whole, finish=finish)) as served, kit.model_at(served) as inner:
            outcome = await kit.play(TextToolsModel(inner).with_tools([SEARCH]))
        first, second = outcome.calls
        assert first[2] == '{"q": 1}'
        assert outcome.response.bad_arguments == {second[0]: bad}


async def test_an_action_without_a_name_is_a_typed_failure(kit, vendor) -> None:
    """Nobody can run it and nobody can answer it; asking again may help. What it cost is known."""
    for before in ("", "Action: clock\nAction Input: {}\n"):
        async with vendor(writes(kit, before + "Action:\nAction Input: {}")) as served, kit.model_at(served) as inner:
            outcome = await kit.play(TextToolsModel(inner).with_tools([SEARCH]))
        assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", True)
        assert outcome.error.usage.output_tokens == 7


async def test_a_router_inside_begins_anew_with_its_next_model(kit) -> None:
    """When an inner router goes on with another model, what was read before is void and says so."""
    first = {"turns": [{"say": [{"text": "Thought: a\nAction: search\nAct"}, {"fail": "MODEL_OVERLOADED"}]}]}

    async def chunks(second: str) -> list[ModelChunk]:
        scripts = (first, {"name": "b", "turns": [{"say": [{"text": second}]}]})
        model = TextToolsModel(RouterModel([ScriptedModel.parse(json.dumps(script)) for script in scripts]))
        async with aclosing(model.with_tools([SEARCH]).stream(kit.asking())) as stream:
            return [chunk async for chunk in stream]

    thought, restart, answer, response = await chunks("Final Answer: 1")
    assert (thought, answer) == (ReasoningDelta("a"), TextDelta("1"))
    assert isinstance(restart, Restart)
    assert [part.text for part in response.message.parts] == ["1"]
    *_, response = await chunks("Action: clock\nObservation: noon")
    assert [part.tool_call.name for part in response.message.parts] == ["clock"]


async def test_without_tools_nothing_is_changed(kit, vendor) -> None:
    """No tools and no calls: the request goes as it is, markers are text, and the inner model's traits hold."""
    text = "Thought: x\nAction: search"
    async with vendor(writes(kit, *text)) as served, kit.model_at(served) as inner:
        model = TextToolsModel(inner)
        for made in (model, model.with_tools([SEARCH]).with_tools([])):
            outcome = await kit.play(made, replace(kit.asking(), options=ModelOptions(stop=("END",))))
            assert (outcome.text, outcome.reasoning, outcome.calls) == (text, "", [])
            assert served.asked[-1].json["messages"] == [{"role": "user", "content": "hi"}]
            assert served.asked[-1].json["stop"] == ["END"]
        assert model.name == inner.name == "m"


CALL = ToolCall(id="c1", name="search", args_json='{"q": "x"}')
CONVERSATION = [
    Message(role=Role.ROLE_SYSTEM, parts=[ContentPart(text="Be brief.")]),
    user("first"),
    Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(text="One.")]),
    user("second"),
    Message(
        role=Role.ROLE_ASSISTANT,
        parts=[
            ContentPart(reasoning=ReasoningPart(text="sealed elsewhere", signature="anthropic:s")),
            ContentPart(reasoning=ReasoningPart(text="look", signature="text:thought")),
            ContentPart(text="Let me see."),
            ContentPart(tool_call=CALL),
        ],
    ),
    Message(role=Role.ROLE_TOOL, parts=[result("c1", "found"), result("nobody", "orphan")]),
]


async def test_history_is_told_in_the_same_form(kit, vendor) -> None:
    """Calls become Action lines, results Observations in user turns; sealed reasoning is left out."""
    async with vendor(writes(kit, "Final Answer: ok")) as served, kit.model_at(served) as inner:
        outcome = await kit.play(TextToolsModel(inner).with_tools([SEARCH]), ModelRequest(CONVERSATION, "You help."))
    assert outcome.text == "ok"
    system, *rest = served.asked[0].json["messages"]
    assert "You help." in system["content"]
    assert "Be brief." in system["content"]
    assert rest == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "second"},
        {
            "role": "assistant",
            "content": 'Let me see.\nThought: look\nAction: search\nAction Input: {"q": "x"}',
        },
        {"role": "user", "content": "Observation: found"},
    ]


async def test_every_call_of_a_turn_has_its_observation(kit, vendor) -> None:
    """Several results stand in call order under their tools' names; a missing one is said to be missing."""
    calls = [CALL, ToolCall(id="c2", name="clock"), ToolCall(id="c3", name="clock")]
    failed = ToolResult(call_id="c2", is_error=True)
    failed.diagnosis.summary = "The clock stands."
    messages = [
        user("go"),
        Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(tool_call=call) for call in calls]),
        Message(role=Role.ROLE_TOOL, parts=[ContentPart(tool_result=failed)]),
        Message(role=Role.ROLE_TOOL, parts=[result("c1", "found")]),
    ]
    async with vendor(writes(kit, "ok")) as served, kit.model_at(served) as inner:
        await kit.play(TextToolsModel(inner).with_tools([SEARCH]), ModelRequest(messages))
    _, _, told, seen = served.asked[0].json["messages"]
    assert told["content"].splitlines()[2:] == ["Action: clock", "Action Input: {}"] * 2
    lines = [line for line in seen["content"].splitlines() if line]
    assert lines[0] == "Observation (search): found"
    assert lines[1].startswith("Observation (clock): ")
    assert "The clock stands." in lines[1]
    assert lines[-1] == "Observation (clock): No result: this call was not completed."


async def test_images_of_results_are_sent_where_they_can_be() -> None:
    """A model that sees gets the image beside its observation; one that does not gets a note."""
    image = ContentPart(image=Media(media_type="image/png", data=b"\x89PNG", name="plot"))
    messages = [
        user("go"),
        Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(tool_call=CALL)]),
        Message(role=Role.ROLE_TOOL, parts=[ContentPart(tool_result=ToolResult(call_id="c1", parts=[image]))]),
    ]
    for sees, kinds in ((True, ["text", "image"]), (False, ["text"])):
        script = {"traits": {"images": sees}, "turns": [{"say": []}]}
        model = TextToolsModel(ScriptedModel.parse(json.dumps(script))).with_tools([SEARCH])
        _, asked = model._asked(ModelRequest(messages))
        assert [part.WhichOneof("part") for part in asked.messages[-1].parts] == kinds
    assert asked.messages[-1].parts[0].text == "Observation: [image image/png plot]"


async def test_the_last_answer_of_a_run_has_calls_behind_it_but_none_before_it(kit, vendor) -> None:
    """With calls in the conversation and no tools any more, the form is told and no action is a call."""
    text = "Thought: done\nFinal Answer: 42\nAction: search"
    async with vendor(writes(kit, *text)) as served, kit.model_at(served) as inner:
        outcome = await kit.play(TextToolsModel(inner), ModelRequest(CONVERSATION))
        assert (outcome.text, outcome.reasoning, outcome.calls) == ("42\nAction: search", "done", [])
        assert "Tools are no longer available" in served.asked[0].json["messages"][0]["content"]
        assert served.asked[0].json["messages"][-1]["content"] == "Observation: found"
    async with vendor(writes(kit, "Action: search\nAction Input: {}")) as served, kit.model_at(served) as inner:
        outcome = await kit.play(TextToolsModel(inner), ModelRequest(CONVERSATION))
    assert (outcome.text, outcome.calls) == ("Action: search\nAction Input: {}", [])


async def test_options_that_speak_of_tools_are_put_in_words(kit, vendor) -> None:
    """tool_choice, parallel_tool_calls and response_schema shape the instructions; the vendor never sees them."""
    async with vendor(writes(kit, "Action: clock\nAction: search")) as served, kit.model_at(served) as inner:
        model = TextToolsModel(inner).with_tools([SEARCH, CLOCK])

        async def asked(**options: object) -> tuple[str, list[str]]:
            outcome = await kit.play(model, replace(kit.asking(), options=ModelOptions(**options)))
            sent = served.asked[-1].json
            assert not {"tools", "tool_choice", "parallel_tool_calls", "response_format"} & set(sent)
            assert outcome.error is None
            return sent["messages"][0]["content"], [call[1] for call in outcome.calls]

        text, calls = await asked(temperature=0.0)
        assert calls == ["clock", "search"]
        assert "must use a tool" not in text
        text, calls = await asked(parallel_tool_calls=False)
        assert calls == ["clock"]
        text, _ = await asked(tool_choice="required")
        assert "must use a tool" in text
        text, _ = await asked(tool_choice="clock")
        assert ("- clock" in text, "- search" in text, "must use a tool" in text) == (True, False, True)
        text, calls = await asked(tool_choice="none")
        assert (text, calls) == ("hi", [])
        text, _ = await asked(response_schema='{"type": "number"}')
        assert '{"type": "number"}' in text
        outcome = await kit.play(model, replace(kit.asking(), options=ModelOptions(tool_choice="fly")))
    assert (outcome.error.reason, outcome.error.retryable) == ("MODEL_BAD_RESPONSE", False)
    assert "'fly'" in outcome.error.message
    assert "clock, search" in outcome.error.message


async def test_reasoning_of_the_inner_model_keeps_its_place(kit) -> None:
    """What the inner model gives as reasoning is passed on at once and stands before what was written after it."""
    script = {"turns": [{"say": [{"reasoning": "deep"}, {"text": "Thought: flat\nFinal Answer: 1", "chunk": 3}]}]}
    model = TextToolsModel(ScriptedModel.parse(json.dumps(script))).with_tools([SEARCH])
    outcome = await kit.play(model)
    assert (outcome.reasoning, outcome.text) == ("deepflat", "1")
    parts = outcome.response.message.parts
    assert [(part.reasoning.text, part.reasoning.signature, part.text) for part in parts] == [
        ("deep", "", ""),
        ("flat", "text:thought", ""),
        ("", "", "1"),
    ]


async def test_reasoning_in_the_middle_of_a_thought_parts_neither_text_nor_answer(kit) -> None:
    """What was shown is what the message holds, also where a thought that became the answer was interrupted."""
    say = [{"text": "Thought: a "}, {"reasoning": "deep"}, {"text": "b"}]
    model = TextToolsModel(ScriptedModel.parse(json.dumps({"turns": [{"say": say}]}))).with_tools([SEARCH])
    outcome = await kit.play(model)
    parts = outcome.response.message.parts
    assert "".join(part.text for part in parts) == outcome.text == "a b"
    assert "".join(part.reasoning.text for part in parts) == outcome.reasoning


async def test_a_failure_of_the_inner_model_is_passed_on_after_what_was_shown(kit) -> None:
    """The typed error arrives unchanged and what was told apart before it was shown."""
    script = {"turns": [{"say": [{"text": "Thought: x\nFinal Answer: par"}, {"fail": "MODEL_STREAM_BROKEN"}]}]}
    model = TextToolsModel(ScriptedModel.parse(json.dumps(script))).with_tools([SEARCH])
    outcome = await kit.play(model)
    assert (outcome.text, outcome.reasoning, outcome.error.reason) == ("par", "x", "MODEL_STREAM_BROKEN")
    with pytest.raises(ModelError):
        await model.generate(kit.asking())


def test_traits_say_that_tools_are_there_and_a_read_text_cannot_be_continued() -> None:
    """Wrapped it has tools; it continues only while its text is given as it is."""
    script = {"traits": {"continues": True, "native_tools": False, "context_window": 9}, "turns": [{"say": []}]}
    model = TextToolsModel(ScriptedModel.parse(json.dumps(script)))
    assert model.traits == ModelTraits(context_window=9, continues=True)
    assert model.with_tools([SEARCH]).traits == ModelTraits(context_window=9, continues=False)


def test_wrong_schemas_are_refused_when_tools_are_bound() -> None:
    """As with any model, parameters that are no JSON object are a ValueError that names the tool."""
    model = TextToolsModel(ScriptedModel.shipped())
    for parameters in ("[]", "{"):
        with pytest.raises(ValueError, match="tool 'bad' are not"):
            model.with_tools([ToolSpec("bad", "", parameters)])


WRITTEN: dict[str, tuple[Callable[[ChatModel], WrittenToolsModel], str, str, str]] = {
    "text": (
        TextToolsModel,
        'Thought: exact is better\nAction: calculate\nAction Input: {"expression": "17 * 23"}\nObservation: 1',
        "^Observation: 391$",
        "Thought: got it\nFinal Answer: It is 391.",
    ),
    "json": (
        JsonToolsModel,
        '{"tool": "calculate", "arguments": {"expression": "17 * 23"}}',
        "^Result of calculate: 391$",
        '{"answer": "It is 391."}',
    ),
}


@pytest.mark.parametrize("form", WRITTEN)
async def test_an_agent_works_with_a_model_that_writes_its_calls(server, form: str) -> None:
    """In a whole engine: the tool runs, its result goes back in words, and only the answer is streamed as text."""
    wrapper, call, result_told, answer = WRITTEN[form]
    turns = [
        {"when": {"user": result_told, "tools": False}, "say": [{"text": answer, "chunk": 3}]},
        {"when": {"user": "17", "tools": False}, "say": [{"text": call, "chunk": 5}]},
    ]
    model = wrapper(ScriptedModel.parse(json.dumps({"name": "plain", "turns": turns})))
    agent = Agent(name="assistant", tools=[calculate], models=[model])
    async with server(agents=[agent]) as served:
        events = [event async for message in served.engine.Run(ask("17 * 23?")) for event in message.events]
    assert events[-1].done.content == "It is 391."
    assert "".join(event.delta.content for event in events) == "It is 391."
    assert [event.step.step.result for event in events if event.step.step.name == "calculate"][-1] == "391"
