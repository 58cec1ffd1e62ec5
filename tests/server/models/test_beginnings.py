"""Beginnings of conversations that are kept: requests are the same bytes with them, and memory has a bound."""

import copy
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import ContentPart, Media, Message, ReasoningPart, Role, ToolCall, ToolResult
from dualclaw_server.engine.model import ModelRequest
from dualclaw_server.models.anthropic.api import AnthropicApi
from dualclaw_server.models.anthropic.dialect import AnthropicDialect
from dualclaw_server.models.api import Api
from dualclaw_server.models.beginnings import NOTHING, SHORTEST, Beginnings
from dualclaw_server.models.chat.api import ChatApi
from dualclaw_server.models.chat.dialect import ChatDialect
from dualclaw_server.models.history import call_ids, without_images
from dualclaw_server.models.responses.api import ResponsesApi

USER, ASSISTANT, TOOL, SYSTEM = Role.ROLE_USER, Role.ROLE_ASSISTANT, Role.ROLE_TOOL, Role.ROLE_SYSTEM
TOOLS = frozenset({"f"})
APIS: dict[str, Api] = {
    "chat": ChatApi(),
    "chat, short ids": ChatApi(ChatDialect(longest_call_id=9, exact_call_id=True)),
    "chat, reasoning of the turn": ChatApi(ChatDialect(reasoning_back="turn")),
    "chat, reasoning of all calls": ChatApi(ChatDialect(reasoning_back="calls")),
    "responses": ResponsesApi(),
    "anthropic": AnthropicApi(),
    "anthropic, cached": AnthropicApi(AnthropicDialect(cache=True)),
    "anthropic, thinking": AnthropicApi(AnthropicDialect(thinking='{"type":"enabled","budget_tokens":1024}')),
}


def said(role: Role.ValueType, *texts: str) -> Message:
    return Message(role=role, parts=[ContentPart(text=text) for text in texts])


def asks(*ids: str, name: str = "f", text: str = "") -> Message:
    parts = [ContentPart(reasoning=ReasoningPart(text="hm", signature="chat:"))]
    parts += [ContentPart(text=text)] if text else []
    calls = [ContentPart(tool_call=ToolCall(id=call_id, name=name, args_json='{"a":1}')) for call_id in ids]
    return Message(role=ASSISTANT, parts=[*parts, *calls])


def gets(call_id: str, text: str = "result") -> Message:
    result = ToolResult(call_id=call_id, parts=[ContentPart(text=text)])
    return Message(role=TOOL, parts=[ContentPart(tool_result=result)])


def turn(number: int) -> list[Message]:
    """Return a turn of five messages as the engine has them."""
    one, two = f"call_{number}_0", f"call_{number}_1"
    return [said(USER, f"q{number}"), asks(one, two), gets(one), gets(two), said(ASSISTANT, f"a{number}")]


def beginnings_of(api: Api, **more: int) -> Beginnings:
    return Beginnings(api.items, api.call_ids, list, **more)


def body_of(api: Api, messages: Sequence[Message], kept: Beginnings | None, settled: int, **more: object) -> bytes:
    """Return the body of a request, with or without kept beginnings."""
    beginning = kept.of(messages, settled, TOOLS) if kept is not None else NOTHING
    request = ModelRequest(messages[len(beginning.messages) :], "instructions", **more)  # type: ignore[arg-type]
    return api.body(request, model="m", tools=None, tool_names=TOOLS, stream=True, beginning=beginning)


@pytest.mark.parametrize("name", APIS)
def test_a_conversation_that_grows_is_sent_as_if_nothing_were_kept(name: str) -> None:
    """Turn after turn the bytes are the same, and the older turns come from what was kept."""
    api, messages = APIS[name], list[Message]()
    kept = beginnings_of(api)
    for number in range(20):
        settled = len(messages)
        messages += turn(number)[:-1]
        for end in (settled + 1, len(messages)):
            assert body_of(api, messages[:end], kept, settled) == body_of(api, messages[:end], None, 0)
        messages += turn(number)[-1:]
    beginning = kept.of(messages, len(messages) - 5, TOOLS)
    assert len(beginning.messages) == len(messages) - 5
    assert beginning.call_ids == call_ids(messages[:-5])


PIECES = st.sampled_from(["", " ", "text", "\U0001f600 more"])
IDS = st.sampled_from(["a", "b", "a b", "", "call_" + "x" * 70])
MESSAGES = st.one_of(
    st.builds(said, st.sampled_from([USER, ASSISTANT, SYSTEM]), PIECES),
    st.builds(said, st.sampled_from([USER, ASSISTANT]), PIECES, PIECES),
    st.builds(lambda ids, name, text: asks(*ids, name=name, text=text), st.lists(IDS, max_size=3),
              st.sampled_from(["f", "other tool"]), PIECES),
    st.builds(gets, IDS, PIECES),
    st.builds(lambda: Message(role=USER, parts=[ContentPart(image=Media(url="http://x/y.png"))])),
)  # fmt: skip
BLOCKS = st.one_of(st.lists(MESSAGES, max_size=4), st.integers(0, 9).map(turn))


@settings(max_examples=100, deadline=None)
@given(st.lists(BLOCKS, min_size=1, max_size=10), st.sampled_from(list(APIS)), st.booleans())
def test_no_conversation_is_sent_otherwise_for_being_kept(
    blocks: list[list[Message]], name: str, has_prefix: bool
) -> None:
    """Also one that is no good conversation: open calls, ids used twice, late results, blanks, system texts."""
    api, messages = APIS[name], [message for number in range(10, 14) for message in turn(number)]
    kept = beginnings_of(api)
    more = {"prefix": "So"} if has_prefix and name.startswith("anthropic") else {}
    for block in blocks:
        settled = len(messages)
        messages += block
        assert body_of(api, messages, kept, settled, **more) == body_of(api, messages, None, 0, **more)


@pytest.mark.parametrize("name", APIS)
def test_an_id_that_was_sent_in_a_beginning_is_not_sent_again(name: str) -> None:
    """A vendor that counts its calls from 0 in every turn gets ids that are unique, the same with and without."""
    api, messages = APIS[name], list[Message]()
    kept = beginnings_of(api)
    for number in range(8):
        settled = len(messages)
        messages += turn(0)
        body = body_of(api, messages, kept, settled)
        assert body == body_of(api, messages, None, 0), number
    sent = kept.of(messages, 35, TOOLS).sent_ids
    assert len(sent) == 2 * 7


def test_other_objects_are_not_taken_for_those_that_were_kept() -> None:
    """A history that was edited, cut or read anew is translated anew; only the very same messages are not."""
    api, messages = APIS["chat"], [message for number in range(10) for message in turn(number)]
    kept = beginnings_of(api)
    body_of(api, messages, kept, len(messages))
    edited = list(messages)
    edited[6] = said(USER, "edited")
    for other in (edited, messages[:20], messages[5:], copy.deepcopy(messages)):
        assert body_of(api, other, kept, len(other)) == body_of(api, other, None, 0)
    assert b"edited" in body_of(api, edited, kept, len(edited))


def test_only_what_is_settled_is_kept() -> None:
    """Nothing is kept of messages that may change, nor of short conversations."""
    kept = beginnings_of(APIS["chat"])
    messages = [message for number in range(10) for message in turn(number)]
    assert kept.of(messages, 0, TOOLS) is NOTHING
    assert kept.of(messages, SHORTEST - 1, TOOLS) is NOTHING
    assert kept.size == 0
    assert 20 <= len(kept.of(messages, 22, TOOLS).messages) <= 22


def test_tools_of_other_names_have_beginnings_of_their_own() -> None:
    """A name that the vendor would not take is sent as it is where it is a tool's."""
    api = APIS["chat"]
    kept = beginnings_of(api)
    messages = [said(USER, "q"), asks("a", name="my tool"), gets("a"), said(ASSISTANT, "done")] * 6
    for names in (frozenset({"my tool"}), frozenset[str]()):
        pieces = b"".join(kept.of(messages, len(messages), names).pieces)
        assert (b'"my tool"' in pieces) is bool(names)


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    """However many conversations there are, what they take stays under the bound; the last used is still there."""
    api = APIS["chat"]
    conversations = [[message for number in range(10) for message in turn(number)] for _ in range(30)]
    first = beginnings_of(api)
    first.of(conversations[0], 50, TOOLS)
    kept = beginnings_of(api, most_bytes=3 * first.size)
    for messages in conversations:
        kept.of(messages, 50, TOOLS)
        assert 0 < kept.size <= 3 * first.size
    last = kept.of(conversations[-1], 50, TOOLS)
    assert kept.of(conversations[-1], 50, TOOLS) is last


def test_pictures_become_notes_in_beginnings_too() -> None:
    """A model that must not be sent images gets none from what is kept."""
    api = APIS["chat"]
    kept = Beginnings(api.items, api.call_ids, without_images)
    picture = ContentPart(image=Media(data=b"\x89PNG", media_type="image/png"))
    messages = [Message(role=USER, parts=[picture]), said(ASSISTANT, "nice")] * 10
    pieces = msgspec.json.decode(b"[%b]" % b",".join(kept.of(messages, len(messages), TOOLS).pieces))
    assert pieces[0] == {"role": "user", "content": "[image image/png]"}
