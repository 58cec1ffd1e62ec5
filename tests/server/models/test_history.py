"""Conversations as any vendor accepts them: whose reasoning it is, results, ids, turns."""

import pytest

from dualclaw import ContentPart, Media, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelRequest
from dualclaw_server.models.history import (
    AssistantTurn,
    CallIds,
    UserTurn,
    call_ids,
    mark,
    results,
    signature_for,
    system_text,
    turns,
    without_images,
)
from dualclaw_server.models.vendors import shipped_vendors


def text(value: str) -> ContentPart:
    return ContentPart(text=value)


def call(call_id: str) -> ContentPart:
    return ContentPart(tool_call=ToolCall(id=call_id, name="f"))


def result(call_id: str, said: str) -> ContentPart:
    return ContentPart(tool_result=ToolResult(call_id=call_id, parts=[text(said)]))


def said(role: Role.ValueType, *parts: ContentPart) -> Message:
    return Message(role=role, parts=parts)


USER, ASSISTANT, TOOL, SYSTEM = Role.ROLE_USER, Role.ROLE_ASSISTANT, Role.ROLE_TOOL, Role.ROLE_SYSTEM


@pytest.mark.parametrize("signature", ["", "abc", "a:b", "chat:x"])
def test_a_signature_comes_back_to_its_own_api_only(signature: str) -> None:
    """Whatever it holds, the API that made it gets it unchanged, and no other one does."""
    part = ReasoningPart(signature=mark("responses", signature))
    assert signature_for("responses", part) == signature
    assert signature_for("chat", part) is None
    assert signature_for("anthropic", part) is None


@pytest.mark.parametrize("stored", ["", "abc", "other:abc"])
def test_a_part_without_a_mark_is_nobodys(stored: str) -> None:
    """What no API has marked goes to none, rather than to all."""
    assert signature_for("chat", ReasoningPart(signature=stored)) is None
    assert signature_for("anthropic", ToolCall(signature=stored)) is None


def test_ids_of_all_calls_are_found() -> None:
    """Ids of calls, not of results."""
    messages = [said(ASSISTANT, call("a"), call("b")), said(TOOL, result("c", "C"))]
    assert call_ids(messages) == {"a", "b"}


def test_results_belong_to_the_newest_call_before_them() -> None:
    """An id used twice keeps its results apart; the first result counts; one before its call is nobody's."""
    messages = [
        said(TOOL, result("a", "early")),
        said(ASSISTANT, call("a")),
        said(TOOL, result("a", "one"), result("a", "again")),
        said(ASSISTANT, call("a")),
        said(TOOL, result("a", "two")),
    ]
    found = results(messages)
    assert {key: value.parts[0].text for key, value in found.items()} == {(1, "a"): "one", (3, "a"): "two"}


def test_a_conversation_comes_in_turns() -> None:
    """Users in a row are one turn; answers of nothing but reasoning are none; a call carries its result."""
    thought = ContentPart(reasoning=ReasoningPart(text="hm"))
    made = turns(
        [
            said(USER, text("a"), text("")),
            said(ASSISTANT, thought),
            said(USER, text("b")),
            said(USER),
            said(ASSISTANT, thought, text("c"), call("x"), call("y")),
            said(TOOL, result("y", "Y"), result("ghost", "boo")),
            said(ASSISTANT, text(" ")),
        ]
    )
    assert [type(turn) for turn in made] == [UserTurn, AssistantTurn]
    first, second = made
    assert isinstance(first, UserTurn)
    assert isinstance(second, AssistantTurn)
    assert [part.text for part in first.parts] == ["a", "b"]
    assert (second.text, len(second.parts)) == ("c", 4)
    assert [(sent.id, sent.result is None) for sent in second.calls] == [("x", True), ("y", False)]


def test_the_latest_turns_are_those_after_the_last_user() -> None:
    """In the middle of its tool calls a model has to get its reasoning back; later it must not."""
    made = turns(
        [
            said(USER, text("a")),
            said(ASSISTANT, call("1")),
            said(USER, text("b")),
            said(ASSISTANT, call("2")),
            said(ASSISTANT, call("3")),
        ]
    )
    assert [turn.latest for turn in made if isinstance(turn, AssistantTurn)] == [False, True, True]


RULES = {
    "plain": CallIds(12),
    "short": CallIds(9, "short"),
    "any": CallIds(12, "any"),
}


@pytest.mark.parametrize("rule", RULES)
def test_call_ids_fit_the_vendor(rule: str) -> None:
    """Too long, forbidden, empty and repeated ids are made anew, all different, and the same each time."""
    ids = RULES[rule]
    messages = [
        said(ASSISTANT, call("functions.f:0"), call("x" * 80), call(""), call("ok"), call("ok")),
        said(ASSISTANT, call("functions.f:0"), call("é"), call("ok"), call("abcdefghi")),
    ]
    made = [sent.id for turn in turns(messages, ids) if isinstance(turn, AssistantTurn) for sent in turn.calls]
    assert len(set(made)) == len(made) == 9
    assert all(map(ids.fits, made))
    assert "abcdefghi" in made
    again = [sent.id for turn in turns(messages, ids) if isinstance(turn, AssistantTurn) for sent in turn.calls]
    assert again == made


def test_ids_that_fit_are_sent_as_they_are() -> None:
    """Some models want their own ids back, dots and colons included."""
    (turn,) = turns([said(ASSISTANT, call("functions.f:0"))], CallIds(64, "any"))
    assert isinstance(turn, AssistantTurn)
    assert turn.calls[0].id == "functions.f:0"


def test_the_system_text_is_one() -> None:
    """Instructions first, then what stands in the conversation."""
    request = ModelRequest([said(USER, text("a")), said(SYSTEM, text("S1"), text("")), said(SYSTEM, text("S2"))], "I")
    assert system_text(request) == "I\n\nS1\n\nS2"
    assert system_text(ModelRequest([])) == ""


def test_without_images_notes_stand_in_their_place() -> None:
    """Images of users and of results become notes, files stay, and the conversation itself is not changed."""
    image = ContentPart(image=Media(media_type="image/png", data=b"x", name="p.png"))
    scan = ContentPart(file=Media(media_type="image/jpeg", url="https://example.invalid/a.jpg"))
    pdf = ContentPart(file=Media(media_type="application/pdf", data=b"x"))
    messages = [
        said(USER, text("look"), image, scan, pdf),
        said(TOOL, ContentPart(tool_result=ToolResult(call_id="a", parts=[image]))),
    ]
    made = without_images(messages)
    assert [part.text for part in made[0].parts] == ["look", "[image image/png p.png]", "[image image/jpeg]", ""]
    assert made[0].parts[3] == pdf
    assert made[1].parts[0].tool_result.parts[0].text == "[image image/png p.png]"
    assert messages[0].parts[1] == image


@pytest.mark.parametrize(
    ("vendor", "signature"), [("openrouter", "chat:{}"), ("openai-responses", "responses:content")]
)
def test_sealed_reasoning_that_is_no_text_is_sent_all_the_same(vendor: str, signature: str) -> None:
    """An edited history may hold any bytes; the request is made, and what cannot be text is replaced."""
    reasoning = ReasoningPart(redacted=b"ab\xff", signature=signature)
    answer = Message(role=Role.ROLE_ASSISTANT, parts=[ContentPart(reasoning=reasoning), ContentPart(text="x")])
    api = shipped_vendors()[vendor].api_of("m")
    body = api.body(ModelRequest([answer]), model="m", tools=None, tool_names=frozenset(), stream=True)
    assert "ab\ufffd" in body.decode()
