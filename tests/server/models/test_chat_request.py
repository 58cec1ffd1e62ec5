"""Our messages as Chat Completions messages, as a vendor receives them."""

import pytest

from dualclaw import ContentPart, Diagnosis, Media, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelOptions, ModelRequest, ToolSpec
from dualclaw_server.models.chat.model import OpenAIChatModel
from dualclaw_server.models.chat.request import tools_json, wire_messages
from dualclaw_server.models.history import NO_RESULT


def text(value: str) -> ContentPart:
    return ContentPart(text=value)


def call(call_id: str, name: str = "f", args: str = "") -> ContentPart:
    return ContentPart(tool_call=ToolCall(id=call_id, name=name, args_json=args))


def result(call_id: str, *parts: ContentPart, **fields: object) -> ContentPart:
    return ContentPart(tool_result=ToolResult(call_id=call_id, parts=parts, **fields))  # type: ignore[arg-type]


def user(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_USER, parts=parts)


def assistant(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_ASSISTANT, parts=parts)


def tool(*parts: ContentPart) -> Message:
    return Message(role=Role.ROLE_TOOL, parts=parts)


def wire(*messages: Message, instructions: str = "") -> list[dict[str, object]]:
    return wire_messages(ModelRequest(messages, instructions))


def sent_call(call_id: str, name: str = "f", args: str = "{}") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": args}}


def test_a_whole_conversation() -> None:
    """Instructions, texts, calls and results take their places; reasoning stays here."""
    assert wire(
        user(text("add")),
        assistant(ContentPart(reasoning=ReasoningPart(text="hm")), text("ok"), call("a", "add", '{"x": 1}')),
        tool(result("a", text("2"), text("done"))),
        assistant(text("It is "), text("2.")),
        instructions="Be brief.",
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "ok", "tool_calls": [sent_call("a", "add", '{"x": 1}')]},
        {"role": "tool", "tool_call_id": "a", "content": "2\ndone"},
        {"role": "assistant", "content": "It is 2."},
    ]


def test_orphans_are_repaired() -> None:
    """A call without result gets one that says so, in call order; a result without call is left out."""
    found = wire(
        user(text("q")),
        tool(result("ghost", text("boo"))),
        assistant(call("a"), call("b")),
        tool(result("b", text("B"))),
        user(text("next")),
    )
    assert found[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [sent_call("a"), sent_call("b")]},
        {"role": "tool", "tool_call_id": "a", "content": NO_RESULT},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "user", "content": "next"},
    ]


def test_results_follow_their_call_wherever_they_stand() -> None:
    """Results that come late, split over messages, or twice, follow their call once and in call order."""
    found = wire(
        assistant(call("a"), call("b")),
        tool(result("b", text("B"))),
        user(text("hurry")),
        tool(result("a", text("A")), result("a", text("A again"))),
    )
    assert [message.get("content") for message in found] == [None, "A", "B", "hurry"]


def test_an_id_used_by_two_turns_keeps_its_results_apart() -> None:
    """Vendors that count ids anew in each answer: each call gets the result that came after it."""
    found = wire(
        assistant(call("f:0")),
        tool(result("f:0", text("first"))),
        assistant(call("f:0")),
        tool(result("f:0", text("second"))),
    )
    assert [message["content"] for message in found if message["role"] == "tool"] == ["first", "second"]


def test_ids_within_a_message_are_unique_and_there() -> None:
    """A repeated or empty id is re-keyed, and its result message names the new id."""
    found = wire(assistant(call("a"), call("a"), call("")), tool(result("a", text("A"))))
    calls = found[0]["tool_calls"]
    assert isinstance(calls, list)
    ids = [made["id"] for made in calls]
    assert len(set(ids)) == 3
    assert all(ids)
    assert [message["tool_call_id"] for message in found[1:]] == ids
    assert [message["content"] for message in found[1:]] == ["A", NO_RESULT, NO_RESULT]


def test_arguments_and_names_are_what_strict_vendors_accept() -> None:
    """Empty or broken arguments become {}; characters no vendor allows become underscores."""
    found = wire(assistant(call("a", "do it.now!", ""), call("b", "", "[1]"), call("c", "x" * 80, "{")))
    calls = found[0]["tool_calls"]
    assert isinstance(calls, list)
    assert [made["function"] for made in calls] == [
        {"name": "do_it_now_", "arguments": "{}"},
        {"name": "unknown", "arguments": "{}"},
        {"name": "x" * 64, "arguments": "{}"},
    ]


def test_errors_and_media_of_results_are_text() -> None:
    """An error without text shows its diagnosis; an image in a result is a note."""
    diagnosis = Diagnosis(code="tool.failed", summary="It broke")
    found = wire(
        assistant(call("a"), call("b")),
        tool(
            result("a", is_error=True, diagnosis=diagnosis),
            result("b", text("see"), ContentPart(image=Media(media_type="image/png", data=b"x", name="p.png"))),
        ),
    )
    assert "It broke" in str(found[1]["content"])
    assert found[2]["content"] == "see\n[image image/png p.png]"


def test_images_and_files_of_users_are_sent() -> None:
    """Bytes become data addresses, addresses stay, text files are text, other files are file parts."""
    found = wire(
        user(
            text("look"),
            ContentPart(image=Media(media_type="image/png", data=b"\x01\x02")),
            ContentPart(file=Media(media_type="image/jpeg", url="https://example.invalid/a.jpg")),
            ContentPart(image=Media(data=b"\xff\xd8\xff")),
            ContentPart(file=Media(media_type="text/csv", data="a,é".encode(), name="t.csv")),
            ContentPart(file=Media(media_type="application/pdf", data=b"%PDF", name="d.pdf")),
            ContentPart(file=Media(media_type="video/mp4", url="https://example.invalid/v.mp4")),
        )
    )
    assert found == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AQI="}},
                {"type": "image_url", "image_url": {"url": "https://example.invalid/a.jpg"}},
                {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/"}},
                {"type": "text", "text": "[file text/csv t.csv]\na,é"},
                {"type": "file", "file": {"filename": "d.pdf", "file_data": "data:application/pdf;base64,JVBERg=="}},
                {"type": "text", "text": "[file video/mp4] https://example.invalid/v.mp4"},
            ],
        }
    ]


def test_system_messages_join_the_instructions_at_the_head() -> None:
    """One system message, first, whatever stands in the conversation."""
    found = wire(
        user(text("a")), Message(role=Role.ROLE_SYSTEM, parts=[text("Summary")]), assistant(text("b")), instructions="I"
    )
    assert [(message["role"], message["content"]) for message in found] == [
        ("system", "I\n\nSummary"),
        ("user", "a"),
        ("assistant", "b"),
    ]


def test_empty_messages_go_and_user_turns_merge() -> None:
    """Messages with nothing to send are left out; users' messages in a row become one."""
    image = ContentPart(image=Media(media_type="image/png", url="https://example.invalid/a.png"))
    found = wire(
        user(text("a")),
        assistant(ContentPart(reasoning=ReasoningPart(text="only"))),
        user(text("b")),
        user(),
        user(image),
        assistant(text("  ")),
    )
    assert found == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a\n\nb"},
                {"type": "image_url", "image_url": {"url": "https://example.invalid/a.png"}},
            ],
        }
    ]


def test_parameters_that_are_no_object_are_refused() -> None:
    """A tool's schema must be a JSON object; the error names the tool."""
    for parameters in ("[1]", "{", "1"):
        with pytest.raises(ValueError, match="'bad'"):
            tools_json([ToolSpec("bad", "", parameters)])


async def test_the_request_as_the_vendor_sees_it(kit, vendor) -> None:
    """Path, headers, options, stream options and tools arrive; tools belong to the model made with them."""
    spec = ToolSpec("add", "Adds.", '{"type": "object", "properties": {"x": {"type": "integer"}}}')
    script = kit.streams(kit.chunk("ok"), kit.chunk(finish="stop"))
    async with vendor(script) as served, kit.model_at(served, " sk-test-key\n", headers={"X-Team": "t"}) as plain:
        bound = plain.with_tools([spec])
        options = ModelOptions(temperature=0.5, max_output_tokens=7)
        await kit.play(bound, ModelRequest([user(text("hi"))], options=options))
        await kit.play(plain)
        await kit.play(bound.with_tools([]))
    first, second, third = served.asked
    assert first.line == "POST /v1/chat/completions HTTP/1.1"
    assert first.headers["authorization"] == "Bearer sk-test-key"
    assert (first.headers["x-team"], first.headers["accept"]) == ("t", "text/event-stream")
    assert first.json == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "add",
                    "description": "Adds.",
                    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
                },
            }
        ],
        "temperature": 0.5,
        "max_tokens": 7,
    }
    assert "tools" not in second.json
    assert "tools" not in third.json


async def test_no_key_sends_no_header_and_a_query_is_kept(kit, vendor) -> None:
    """Local servers get no authorization; a base URL may carry a query and the full path."""
    script = kit.streams(kit.chunk("ok"), kit.chunk(finish="stop"))
    async with vendor(script) as served:
        for base in (f"{served.url}/?api-version=1", f"{served.url}/chat/completions?api-version=1"):
            model = OpenAIChatModel("m", base)
            await kit.play(model)
            await model.aclose()
    assert {asked.line for asked in served.asked} == {"POST /v1/chat/completions?api-version=1 HTTP/1.1"}
    assert all("authorization" not in asked.headers for asked in served.asked)
