"""What the local model is asked, as text."""

import json

from dualclaw import ContentPart, Message, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelOptions, ModelRequest, ToolSpec
from dualclaw_server.models.local.form import LONGEST_TEXT, MOST_CALLS, LocalForm
from dualclaw_server.models.written.tool_text import bind
from dualclaw_server.tools.assistant import calculate, current_time

TOOLS = bind([calculate.spec, current_time.spec])


def user(text: str) -> Message:
    return Message(role=Role.ROLE_USER, parts=[ContentPart(text=text)])


def used(number: int, *, failed: bool = False) -> list[Message]:
    """A call with its result."""
    call = ToolCall(id=f"c{number}", name="calculate", args_json='{"expression":"1+1"}')
    result = ToolResult(call_id=call.id, parts=[ContentPart(text="2")], is_error=failed)
    return [
        Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(tool_call=call)]),
        Message(role=Role.ROLE_TOOL, parts=[ContentPart(tool_result=result)]),
    ]


def asked(*messages: Message, options: ModelOptions | None = None, must_call: bool = False) -> ModelRequest:
    request = ModelRequest(messages, "Be kind.", options or ModelOptions())
    return LocalForm().request(request, TOOLS, must_call=must_call, images=False)


def schema_of(request: ModelRequest) -> dict[str, object]:
    made = json.loads(request.options.response_schema or "")
    assert isinstance(made, dict)
    return made


def branches(request: ModelRequest) -> list[str]:
    """What may be chosen."""
    schema = schema_of(request)
    each = schema.get("oneOf", [schema])
    assert isinstance(each, list)
    return [one["properties"].get("tool", {"const": "(answer)"})["const"] for one in each]


def test_it_is_offered_every_tool_and_an_answer() -> None:
    """The agent's instructions come first, a tool is a name and a sentence, and the question is last."""
    request = asked(user("What is 2 + 2?"))
    assert branches(request) == ["calculate", "current_time", "(answer)"]
    assert request.instructions.startswith("Be kind.")
    assert "calculate: Calculate an arithmetic expression exactly." in request.instructions
    assert "properties" not in request.instructions
    assert request.messages[-1].parts[0].text == "What is 2 + 2?"


def test_the_examples_are_whole_turns_before_the_conversation() -> None:
    """Each call is followed by its result and an answer, in the JSON that is wanted of the model."""
    told = asked(user("What is 2 + 2?")).messages[:-1]
    roles = [message.role for message in told]
    assert roles == [Role.ROLE_USER, Role.ROLE_ASSISTANT] * (len(told) // 2)
    for message in told[1::2]:
        assert json.loads(message.parts[0].text).keys() in ({"tool", "arguments"}, {"answer"})
    assert "answer" in json.loads(told[-1].parts[0].text)


def test_what_was_said_before_comes_first_and_without_its_calls() -> None:
    """The examples must stand nearest to the question; an earlier call would be the nearest example of all."""
    alone = asked(user("What is 2 + 2?"))
    before = [user("Hello!"), *used(1), Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(text="Hi.")])]
    told = asked(*before, user("What is 2 + 2?"))
    assert [message.parts[0].text for message in told.messages[:2]] == ["Hello!", '{"answer": "Hi."}']
    assert told.messages[2:] == alone.messages


def test_after_a_few_calls_only_an_answer_is_left() -> None:
    """Calls for an earlier question do not count."""
    calls = [message for number in range(MOST_CALLS) for message in used(number, failed=True)]
    assert branches(asked(user("a"), *calls)) == ["(answer)"]
    assert "(answer)" not in branches(asked(user("a"), *calls, must_call=True))
    assert "calculate" in branches(asked(user("a"), *calls, user("b")))
    assert "calculate" in branches(asked(user("a"), *calls[:-2]))


def test_once_a_tool_has_given_a_result_only_an_answer_is_left() -> None:
    """A call that failed may be corrected, one that must be made may be made; and the text of the request stays."""
    assert branches(asked(user("a"), *used(1))) == ["(answer)"]
    assert "calculate" in branches(asked(user("a"), *used(1, failed=True)))
    assert "calculate" in branches(asked(user("a"), *used(1), must_call=True))
    assert "calculate" in branches(asked(user("a"), *used(1), user("b")))
    before, after = asked(user("a")), asked(user("a"), *used(1))
    assert after.instructions == before.instructions
    assert after.messages[: len(before.messages)] == before.messages


def test_texts_of_arguments_are_bounded_and_choices_left_alone() -> None:
    """At any depth; a bound in the schema itself is not one a tool could miss, for it is checked there again."""
    schema = {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"type": "string"}},
            "one": {"type": "string", "enum": ["a"]},
        },
    }
    request = ModelRequest([user("x")])
    bound = bind([ToolSpec("t", "", json.dumps(schema))])
    made = LocalForm().request(request, bound, must_call=True, images=False)
    arguments = json.loads(made.options.response_schema or "")["properties"]["arguments"]["properties"]
    assert arguments["list"]["items"] == {"type": "string", "maxLength": LONGEST_TEXT}
    assert arguments["one"] == {"type": "string", "enum": ["a"]}


def test_an_answer_in_a_form_of_its_own_is_held_to_it() -> None:
    """A response schema of the caller's bounds the answer, beside the tools."""
    wanted = ModelOptions(response_schema='{"type":"object","properties":{"n":{"type":"integer"}}}')
    each = schema_of(asked(user("x"), options=wanted))["oneOf"]
    assert isinstance(each, list)
    assert each[-1]["properties"]["answer"] == {"type": "object", "properties": {"n": {"type": "integer"}}}
