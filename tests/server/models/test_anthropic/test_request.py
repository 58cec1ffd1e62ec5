"""Our messages as messages of the Anthropic API, as a strict vendor receives them."""

import base64
import json

import msgspec
import pytest

from dualclaw import ContentPart, Diagnosis, Media, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelRequest, ToolSpec
from dualclaw_server.models.anthropic.dialect import AnthropicDialect
from dualclaw_server.models.anthropic.request import GO_ON, LEFT_OUT, tools_json, wire_messages
from dualclaw_server.models.history import NO_RESULT

PNG = b"\x89PNG\r\n\x1a\nrest"


def text(value: str) -> ContentPart:
    return ContentPart(text=value)


def call(call_id: str, name: str = "f", args: str = "") -> ContentPart:
    return ContentPart(tool_call=ToolCall(id=call_id, name=name, args_json=args))


def thought(value: str = "", signature: str = "", redacted: bytes = b"") -> ContentPart:
    return ContentPart(reasoning=ReasoningPart(text=value, signature=signature, redacted=redacted))


def result(call_id: str, *parts: ContentPart, **fields: object) -> ContentPart:
    return ContentPart(tool_result=ToolResult(call_id=call_id, parts=parts, **fields))  # type: ignore[arg-type]


def user(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_USER, parts=parts)


def assistant(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_ASSISTANT, parts=parts)


def tool(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_TOOL, parts=parts)


def wire(*messages: Message, prefix: str = "", dialect: AnthropicDialect | None = None) -> list[dict[str, object]]:
    """Return the messages as they are sent, read back from their JSON."""
    request = ModelRequest(messages, prefix=prefix)
    made = wire_messages(request, frozenset({"tool.with.dots"}), dialect or AnthropicDialect())
    found = json.loads(msgspec.json.encode(made))
    assert isinstance(found, list)
    return found


def said(value: str) -> dict[str, object]:
    return {"type": "text", "text": value}


def use(call_id: str, name: str = "f", **arguments: object) -> dict[str, object]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def came(call_id: str, *content: dict[str, object], error: bool = False) -> dict[str, object]:
    made: dict[str, object] = {"type": "tool_result", "tool_use_id": call_id}
    return made | ({"content": list(content)} if content else {}) | ({"is_error": True} if error else {})


def test_a_whole_conversation() -> None:
    """Thinking, texts, calls and results take their places in turns that alternate."""
    assert wire(
        user(text("add")),
        assistant(thought("hm", "anthropic:S"), text("ok"), call("a", "add", '{"x": 1}'), call("b")),
        tool(result("b", text("two"))),
        tool(result("a", text("one"), text("more"))),
        assistant(text("Done.")),
        user(text("thanks")),
    ) == [
        {"role": "user", "content": [said("add")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "S"},
                said("ok"),
                use("a", "add", x=1),
                use("b"),
            ],
        },
        {"role": "user", "content": [came("a", said("one"), said("more")), came("b", said("two"))]},
        {"role": "assistant", "content": [said("Done.")]},
        {"role": "user", "content": [said("thanks")]},
    ]


def test_results_come_together_and_before_what_the_user_says() -> None:
    """Results that stand apart, late or behind a user's text still come first in one message (AL05)."""
    messages = wire(
        user(text("go")),
        assistant(call("a"), call("b")),
        tool(result("a", text("1"))),
        user(text("and now?")),
        tool(result("b", text("2"))),
        user(text("well?")),
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[2]["content"] == [came("a", said("1")), came("b", said("2")), said("and now?"), said("well?")]


def test_each_call_has_exactly_one_result() -> None:
    """A call without a result gets one that says so, a second result and an orphan are left out (AL07)."""
    messages = wire(
        user(text("go")),
        tool(result("ghost", text("?"))),
        assistant(call("a"), call("b")),
        tool(result("a", text("1"))),
        tool(result("a", text("again"))),
    )
    assert messages[2]["content"] == [came("a", said("1")), came("b", said(NO_RESULT), error=True)]
    assert len(messages) == 3


def test_call_ids_are_what_the_api_takes_and_unique() -> None:
    """Ids of other vendors are changed where they must be, with their results, and always to the same."""
    history = (
        user(text("go")),
        assistant(call("functions.get:0"), call("")),
        tool(result("functions.get:0", text("1"))),
        assistant(call("call_0")),
        tool(result("call_0", text("2"))),
        assistant(call("call_0")),
        tool(result("call_0", text("3"))),
    )
    messages = wire(*history)
    calls = [block for message in messages for block in message["content"] if block["type"] == "tool_use"]  # type: ignore[attr-defined]
    results = [block for message in messages for block in message["content"] if block["type"] == "tool_result"]  # type: ignore[attr-defined]
    ids = [block["id"] for block in calls]
    assert len(set(ids)) == 4
    assert all(identity and identity.replace("_", "").replace("-", "").isalnum() for identity in ids)
    assert [block["tool_use_id"] for block in results] == ids
    assert [block["content"][0]["text"] for block in results] == ["1", NO_RESULT, "2", "3"]
    assert wire(*history) == messages


THOUGHTS = {
    "signed here": (thought("t", "anthropic:S"), {"type": "thinking", "thinking": "t", "signature": "S"}),
    "a signature alone": (thought("", "anthropic:S"), {"type": "thinking", "thinking": "", "signature": "S"}),
    "redacted": (thought(redacted=b"SEAL", signature="anthropic:"), {"type": "redacted_thinking", "data": "SEAL"}),
    "white space kept": (thought(" t\n", "anthropic:S"), {"type": "thinking", "thinking": " t\n", "signature": "S"}),
    "unsigned": (thought("t", "anthropic:"), None),
    "another API's": (thought("t", "responses:S"), None),
    "another API's sealed": (thought(redacted=b"SEAL", signature="responses:"), None),
    "nobody's": (thought("t"), None),
}


@pytest.mark.parametrize("case", THOUGHTS)
def test_thinking_goes_back_unchanged_to_the_api_that_signed_it_only(case: str) -> None:
    """Blocks of this API return as they came, whatever else is reasoning stays here."""
    part, expected = THOUGHTS[case]
    content = wire(user(text("q")), assistant(part, text("a")), user(text("q2")))[1]["content"]
    assert content == [*([expected] if expected else []), said("a")]


def test_unsigned_thinking_goes_back_where_the_vendor_wants_it() -> None:
    """Other vendors of this API sign nothing and want their thinking all the same; an empty one never goes."""
    dialect = AnthropicDialect(unsigned_thinking=True)
    parts = [thought("t", "anthropic:"), thought("", "anthropic:"), thought("x", "chat:"), text("a")]
    content = wire(user(text("q")), assistant(*parts), user(text("q2")), dialect=dialect)[1]["content"]
    assert content == [{"type": "thinking", "thinking": "t"}, said("a")]


def test_an_answer_that_broke_off_in_thinking_loses_it() -> None:
    """A message cannot end with thinking; one that is nothing else is left out, and the users' turns meet."""
    signed = thought("t", "anthropic:S")
    assert wire(user(text("a")), assistant(signed), user(text("b"))) == [
        {"role": "user", "content": [said("a"), said("b")]}
    ]
    assert wire(user(text("a")), assistant(text("x"), signed), user(text("b")))[1]["content"] == [said("x")]


def test_no_block_of_text_is_blank() -> None:
    """Blank texts of users, models and tools are left out; so are messages that would be empty."""
    messages = wire(
        user(text("go"), text(" ")),
        assistant(text("\n\n"), call("a")),
        tool(result("a", text(""), text("\n"))),
        assistant(text(" ")),
        user(text("\t")),
    )
    assert messages == [
        {"role": "user", "content": [said("go")]},
        {"role": "assistant", "content": [use("a")]},
        {"role": "user", "content": [came("a")]},
    ]


def test_failed_results_say_so_and_why() -> None:
    """is_error is passed on; a failed result is never without a text."""
    diagnosis = Diagnosis(summary="The disk is full.")
    messages = wire(
        user(text("go")),
        assistant(call("a"), call("b"), call("c")),
        tool(
            result("a", text("no"), is_error=True),
            result("b", is_error=True, diagnosis=diagnosis),
            result("c", text(" "), is_error=True),
        ),
    )
    first, second, third = messages[2]["content"]  # type: ignore[misc]
    assert first == came("a", said("no"), error=True)
    for failed, why in ((second, "The disk is full."), (third, "The tool failed.")):
        assert failed["is_error"]
        assert why in failed["content"][0]["text"]


def test_turns_begin_and_end_with_the_user() -> None:
    """A conversation that begins or ends with the model, or is empty, gets a short user text there."""
    assert wire(assistant(text("hi"))) == [
        {"role": "user", "content": [said(LEFT_OUT)]},
        {"role": "assistant", "content": [said("hi")]},
        {"role": "user", "content": [said(GO_ON)]},
    ]
    assert wire() == [{"role": "user", "content": [said(GO_ON)]}]


def test_answers_in_a_row_become_one_turn() -> None:
    """Two answers without anything between them are one message of the API."""
    messages = wire(user(text("q")), assistant(text("a")), assistant(text("b")), user(text("r")))
    assert messages[1] == {"role": "assistant", "content": [said("a"), said("b")]}


def test_the_beginning_of_an_answer_stands_last_without_white_space_behind() -> None:
    """The prefix is the last message; a blank one is none."""
    assert wire(user(text("q")), prefix="The answer \n")[1:] == [{"role": "assistant", "content": [said("The answer")]}]
    assert wire(user(text("q")), prefix=" ") == [{"role": "user", "content": [said("q")]}]


def test_names_and_arguments_are_what_the_api_takes() -> None:
    """Invented names and arguments that are no object are made harmless; names of given tools stay."""
    blocks = wire(
        user(text("q")),
        assistant(call("a", "tool.with.dots"), call("b", "no such tool!"), call("c", "f", "[1]"), call("d", "f", "{")),
    )[1]["content"]
    assert blocks == [use("a", "tool.with.dots"), use("b", "no_such_tool_"), use("c"), use("d")]


def encoded(media_type: str, data: bytes) -> dict[str, object]:
    return {"type": "base64", "media_type": media_type, "data": base64.b64encode(data).decode()}


PDF = b"%PDF-1.7 rest"
MEDIA = {
    "png": (Media(media_type="image/png", data=PNG), {"type": "image", "source": encoded("image/png", PNG)}),
    "declared wrong": (Media(media_type="image/jpg", data=PNG), {"type": "image", "source": encoded("image/png", PNG)}),
    "not declared": (Media(data=b"GIF89a"), {"type": "image", "source": encoded("image/gif", b"GIF89a")}),
    "webp": (Media(data=b"RIFF....WEBP"), {"type": "image", "source": encoded("image/webp", b"RIFF....WEBP")}),
    "another RIFF": (Media(data=b"RIFF....WAVE", name="a.wav"), said("[image a.wav]")),
    "svg": (Media(media_type="image/svg+xml", data=b"<svg/>", name="x.svg"), said("[image image/svg+xml x.svg]")),
    "empty": (Media(media_type="image/png"), said("[image image/png]")),
    "no bytes": (Media(media_type="image/png", data=b""), said("[image image/png]")),
    "url": (Media(url="https://h/x.png"), {"type": "image", "source": {"type": "url", "url": "https://h/x.png"}}),
    "data url": (
        Media(url=f"data:image/png;base64,{base64.b64encode(PNG).decode()}"),
        {"type": "image", "source": encoded("image/png", PNG)},
    ),
    "broken data url": (Media(url="data:image/png;base64,?"), said("[image]")),
    "file url": (Media(url="file:///etc/passwd", media_type="image/png"), said("[image image/png]")),
    "pdf": (
        Media(media_type="application/pdf", data=PDF, name="a.pdf"),
        {"type": "document", "source": encoded("application/pdf", PDF), "title": "a.pdf"},
    ),
    "pdf by url": (
        Media(media_type="application/pdf", url="https://h/a.pdf"),
        {"type": "document", "source": {"type": "url", "url": "https://h/a.pdf"}},
    ),
    "text": (Media(media_type="text/plain", data=b"hello", name="a.txt"), said("[image text/plain a.txt]\nhello")),
    "another url": (
        Media(media_type="video/mp4", url="https://h/a.mp4"),
        said("[image video/mp4] https://h/a.mp4"),
    ),
}


@pytest.mark.parametrize("case", MEDIA)
def test_media_are_sent_in_the_forms_the_api_takes(case: str) -> None:
    """Images and documents by what their bytes are, anything else as a note; alike for users and results."""
    media, expected = MEDIA[case]
    part = ContentPart(image=media)
    messages = wire(user(text("see"), part), assistant(call("a")), tool(result("a", text("this"), part)))
    assert messages[0]["content"] == [said("see"), expected]
    assert messages[2]["content"] == [came("a", said("this"), expected)]


def test_lone_surrogates_and_newer_parts_do_no_harm() -> None:
    """What cannot be said in UTF-8 cannot stop a request; a part that is newer than this code is skipped."""
    assert wire(user(text("q"), ContentPart()), prefix="a\ud800b")[1]["content"] == [said("a\ufffdb")]


def test_tools_are_described_as_the_api_wants_them() -> None:
    """A schema always has a type, a blank description is none, and a schema that is no object is refused."""
    specs = [
        ToolSpec("a", "does a", '{"type":"object","properties":{"x":{"type":"integer"}}}'),
        ToolSpec("b", " ", '{"properties":{}}'),
        ToolSpec("c", "", ""),
    ]
    assert json.loads(bytes(tools_json(specs))) == [
        {
            "name": "a",
            "description": "does a",
            "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
        {"name": "b", "input_schema": {"type": "object", "properties": {}}},
        {"name": "c", "input_schema": {"type": "object", "properties": {}}},
    ]
    with pytest.raises(ValueError, match="'d'"):
        tools_json([ToolSpec("d", "", "[]")])
