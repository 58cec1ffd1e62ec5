"""Token estimates: never far too low, additive, counted once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import ContentPart, Media, Message, ReasoningPart, Role
from dualclaw_server.engine.tool import tool
from dualclaw_server.interceptors.tokens import (
    PER_FILE,
    PER_IMAGE,
    PER_MESSAGE,
    TokenCounter,
    message_tokens,
    text_tokens,
    tool_tokens,
)

from .traces import called, image, message, result, user


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("", 0, 0),
        ("The quick brown fox jumps over the lazy dog.", 10, 14),
        ('{"id": 4711, "tags": ["a", "b"], "price": 12.50}', 18, 30),
        ("3f2a9c0b77e14d5f8a6b", 6, 12),
        ("今天天气很好，我们去公园散步吧。", 12, 18),
        ("Zażółć gęślą jaźń", 8, 14),
        ("🙂🙂🙂", 3, 6),
    ],
)
def test_estimates_lie_near_what_tokenizers_say(text: str, least: int, most: int) -> None:
    """Prose, JSON, hex, Chinese, accents and emoji come out at or somewhat above common tokenizers' counts."""
    assert least <= text_tokens(text) <= most


@given(st.text(max_size=300), st.text(max_size=300))
def test_estimates_add_up(one: str, other: str) -> None:
    """Two texts joined cost what they cost apart, but for rounding; so cutting a text makes it cheaper."""
    assert abs(text_tokens(one + other) - text_tokens(one) - text_tokens(other)) <= 1
    assert text_tokens(one) >= (1 if one else 0)


def test_lone_surrogates_are_counted_like_anything_else() -> None:
    """A text that has no UTF-8 form does not break the estimate."""
    assert text_tokens("a\ud83c") >= 1


def test_every_kind_of_part_counts() -> None:
    """Images, files, reasoning, calls and results all take room; sealed reasoning by the size of its seal."""

    def of(part: ContentPart) -> int:
        return message_tokens(message(Role.ROLE_ASSISTANT, part)) - PER_MESSAGE

    assert message_tokens(image()) == PER_MESSAGE + PER_IMAGE
    assert of(ContentPart(file=Media(url="https://example.com/a.pdf", media_type="application/pdf"))) == PER_FILE
    assert of(ContentPart(file=Media(data=b"x" * 3_000_000, media_type="application/pdf"))) == 100_000
    assert of(ContentPart(file=Media(data=b"word " * 400, media_type="text/plain"))) == text_tokens("word " * 400)
    assert of(ContentPart(reasoning=ReasoningPart(text="hm " * 100))) == text_tokens("hm " * 100)
    assert of(ContentPart(reasoning=ReasoningPart(redacted=b"x" * 400))) == 100
    assert message_tokens(called("c", args='{"a": 1}')) > text_tokens('{"a": 1}') + PER_MESSAGE
    assert message_tokens(result("c", "x" * 400)) >= 100
    assert of(ContentPart()) == 0


def test_tools_count_with_their_schemas() -> None:
    """A tool costs its name, description and schema."""

    @tool
    def search(query: str) -> str:
        """Find something."""
        return query

    assert tool_tokens([search]) > text_tokens(search.parameters_json) + text_tokens(search.description)
    assert tool_tokens([search, search]) == 2 * tool_tokens([search])


def test_a_message_is_counted_once() -> None:
    """Counting again looks up; the same id with other content is another message."""
    counter = TokenCounter()
    messages = [user("a" * 100, message_id="1"), user("b" * 100, message_id="2")]
    assert counter.total(messages) == counter.total(messages)
    assert counter.estimates == 2
    edited = user("a" * 400, message_id="1")
    assert counter.of(edited) == message_tokens(edited) > counter.of(messages[0])
    assert counter.estimates == 3


def test_the_memory_of_counts_is_bounded() -> None:
    """Of more messages than are remembered, those not asked for the longest are forgotten."""
    counter = TokenCounter(remembered=2)
    one, two, three = (user(text) for text in "123")
    for item in (one, two, one, three, one):
        counter.of(item)
    assert counter.estimates == 3
    counter.of(two)
    assert counter.estimates == 4
    with pytest.raises(ValueError, match="at least 1"):
        TokenCounter(remembered=0)


@settings(max_examples=50)
@given(st.lists(st.text(max_size=50), max_size=8))
def test_counts_depend_on_content_alone(texts: list[str]) -> None:
    """A remembered count is the count of a fresh estimate, whatever was counted before."""
    counter = TokenCounter(remembered=3)
    messages: list[Message] = [user(text.encode("utf-8", "replace").decode()) for text in texts]
    assert [counter.of(m) for m in (*messages, *messages)] == [message_tokens(m) for m in (*messages, *messages)]
