"""The sliding window: what never happens to a history, whatever it looks like."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dualclaw import Message, Role
from dualclaw_server.interceptors.groups import groups_of
from dualclaw_server.interceptors.summary import COMPRESSION_TEXTS
from dualclaw_server.interceptors.tokens import TokenCounter, message_tokens
from dualclaw_server.interceptors.window import FLOOR, PROTECTED_FLOOR, cut_text, shrink

from .traces import (
    called,
    histories,
    result,
    said,
    user,
)

MARKER = COMPRESSION_TEXTS["en"].cut


def calls_with_results(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Places of every call and its result, found by looking for each result's newest call before it."""
    return [
        (owners[-1], place)
        for place, item in enumerate(messages)
        for part in item.parts
        if part.WhichOneof("part") == "tool_result"
        and (
            owners := [
                earlier
                for earlier in range(place)
                if messages[earlier].role == Role.ROLE_ASSISTANT
                and any(p.tool_call.id == part.tool_result.call_id for p in messages[earlier].parts)
            ]
        )
    ]


def newest_group_with_calls(messages: Sequence[Message]) -> set[str]:
    groups = [group for group in groups_of(messages) if group.has_calls]
    newest = max(groups, key=lambda group: group.places[-1], default=None)
    return set() if newest is None else {messages[place].id for place in newest.places}


@settings(max_examples=300, deadline=None)
@given(histories(), st.integers(0, 3_000), st.one_of(st.none(), st.integers(1, 10)), st.integers(0, 13))
def test_shrinking_keeps_its_promises_for_any_history(
    messages: list[Message], tokens: int, count: int | None, question: int
) -> None:
    """Calls stay with results, the newest stay, order stays; it fits, or only what never goes is left, at its floor."""
    protected = {f"m{question}"}
    counter = TokenCounter()

    def again(history: Sequence[Message]) -> tuple[Message, ...]:
        return shrink(history, counter, tokens=tokens, count=count, protected=protected, marker=MARKER).kept

    window = shrink(messages, counter, tokens=tokens, count=count, protected=protected, marker=MARKER)
    kept = [item.id for item in window.kept]
    ids = [item.id for item in messages]

    assert kept == [i for i in ids if i in set(kept)]
    assert [item.id for item in window.gone] == [i for i in ids if i not in set(kept)]
    for owner, place in calls_with_results(messages):
        assert (ids[owner] in kept) == (ids[place] in kept)
    for group in groups_of(messages):
        assert len({messages[place].id in kept for place in group.places}) == 1
    assert newest_group_with_calls(messages) <= set(kept)
    assert ids[-1:] == kept[-1:]
    assert {item.id for item in messages if item.role == Role.ROLE_SYSTEM} <= set(kept)
    assert protected & set(ids) <= set(kept)
    assert window.tokens == counter.total(window.kept) == sum(map(message_tokens, window.kept))

    if window.tokens > tokens or (count is not None and len(kept) > count):
        groups = groups_of(window.kept)
        newest = max(groups, key=lambda group: group.places[-1])
        for group in groups:
            members = [window.kept[place] for place in group.places]
            assert (
                group is newest
                or newest_group_with_calls(messages) & {m.id for m in members}
                or any(m.role == Role.ROLE_SYSTEM or m.id in protected for m in members)
            )
    if window.tokens > tokens:
        for item in window.kept:
            floor = PROTECTED_FLOOR if item.role == Role.ROLE_SYSTEM or item.id in protected else FLOOR
            assert all(len(part.text) <= floor for part in item.parts)
    assert again(window.kept) == window.kept
    assert again(messages) == window.kept


def test_what_fits_is_left_alone() -> None:
    """Nothing is copied, cut or dropped below the limits."""
    messages = [user("a"), called("c"), result("c", "b" * 5_000), said("d")]
    window = shrink(messages, TokenCounter(), tokens=10_000, count=4, marker=MARKER)
    assert all(one is other for one, other in zip(window.kept, messages, strict=True))
    assert (window.gone, window.cut) == ((), 0)


def test_the_question_and_the_operator_are_cut_last() -> None:
    """When cutting the newest result is enough, the question keeps every word; else it is cut too, to its floor."""
    question, found = user("q" * 8_000, message_id="q"), result("c", "r" * 80_000, message_id="r")
    messages = [question, called("c", message_id="c"), found]
    roomy = shrink(messages, TokenCounter(), tokens=6_000, protected={"q"}, marker=MARKER)
    assert roomy.kept[0] is question
    assert roomy.cut == 1
    assert roomy.tokens <= 6_000
    tight = shrink(messages, TokenCounter(), tokens=10, protected={"q"}, marker=MARKER)
    assert PROTECTED_FLOOR - 5 <= len(tight.kept[0].parts[0].text) <= PROTECTED_FLOOR
    assert FLOOR - 5 <= len(tight.kept[2].parts[0].tool_result.parts[0].text) <= FLOOR
    assert tight.kept[1].parts[0].tool_call.id == tight.kept[2].parts[0].tool_result.call_id == "c"


@given(st.text(max_size=400), st.integers(60, 300))
def test_cut_text_keeps_head_and_tail_within_the_limit(text: str, limit: int) -> None:
    """A cut text is no longer than the limit, marker included, and begins and ends as the whole one does."""
    cut = cut_text(text, limit, MARKER)
    assert len(cut) <= max(limit, 0) or cut == text
    if len(text) <= limit:
        assert cut is text
    else:
        head, _, tail = cut.partition("\n[")
        assert text.startswith(head)
        assert text.endswith(cut.rpartition("left out]\n")[2])
        assert tail


def test_a_long_history_is_counted_once_and_then_looked_up() -> None:
    """10,000 messages cost 10,000 estimates; the next calls only those of what is new."""
    messages = [m for n in range(3_334) for m in (user(f"{n}"), called(f"c{n}"), result(f"c{n}", "x" * 200))]
    counter = TokenCounter()
    window = shrink(messages, counter, tokens=5_000, marker=MARKER)
    assert counter.estimates == len(messages) - 0
    assert window.tokens <= 5_000
    shrink([*messages, user("new")], counter, tokens=5_000, marker=MARKER)
    assert counter.estimates == len(messages) + 1
