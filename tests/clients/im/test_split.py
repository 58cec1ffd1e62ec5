"""Splitting answers for platforms: nothing is lost, nothing is hurt, nothing is too long."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualclaw_clients.im.connector import Limit, Unit
from dualclaw_clients.im.split import SMALLEST_LIMIT, size_of, split_text

# Each is one grapheme cluster by construction, whatever stands beside it.
CLUSTERS = [
    "a", "好", "é", "e\u0301", "n\u0303\u0323", "😀", "👍🏽", "👨\u200d👩\u200d👧\u200d👦", "❤\ufe0f", "🇩🇪",
    "क\u094dषि", "1\ufe0f\u20e3", "\r\n", "\n", " ", "\t", "한", "𝒳", "\u2028", "」", "-",
]  # fmt: skip
FENCES = ["```\n", "```python\n", "~~~~\n", "  ```\n", "\n```\n", "````md\n", "``` x`y\n", "\n~~~\n", "```"]
limits = st.builds(Limit, st.integers(SMALLEST_LIMIT, 80), st.sampled_from(Unit))
pieces = st.lists(st.sampled_from(CLUSTERS + FENCES), max_size=120)
BIGGEST = 25
"""Bytes of the longest cluster above: below four times this a part with fence lines might have to cut one."""


@given(st.one_of(st.text(max_size=300), pieces.map("".join)), limits)
def test_parts_are_within_the_limit_and_their_bodies_are_the_text(text, limit):
    """Whatever the text, every part fits with its fence lines, and the slices joined are the text."""
    parts = split_text(text, limit)
    assert "".join(part.body for part in parts) == text
    assert all(0 < size_of(part.text, limit.unit) <= limit.size for part in parts)
    assert all(part.body for part in parts)


unbroken = st.lists(st.sampled_from([cluster for cluster in CLUSTERS if not cluster.isspace()]), max_size=200)


@given(st.one_of(pieces, unbroken), st.builds(Limit, st.integers(4 * BIGGEST, 200), st.sampled_from(Unit)))
def test_no_cut_is_inside_a_character_as_people_see_it(clusters, limit):
    """Accents, emoji sequences, flags, surrogate pairs and CR LF stay whole."""
    text, borders = "", {0}
    for cluster in clusters:
        # A fence is several clusters; it is cut only between characters of ASCII.
        borders |= {len(text) + offset for offset in range(1, len(cluster))} if cluster in FENCES else set()
        text += cluster
        borders.add(len(text))
    offset = 0
    for part in split_text(text, limit):
        assert offset in borders, f"cut inside a cluster at {offset} of {text!r}"
        offset += len(part.body)


@given(pieces.map("".join), limits)
def test_head_and_tail_are_the_fence_lines_of_one_cut(text, limit):
    """A part opens a block again exactly when the part before closed it; only fence lines are ever added."""
    parts = split_text(text, limit)
    for before, after in itertools.pairwise(parts):
        assert bool(before.tail) == bool(after.head)
        if before.tail:
            mark = before.tail.removeprefix("\n")
            assert mark.strip()[:3] in {"```", "~~~"}
            assert after.head.startswith(mark)
            assert after.head.endswith("\n")
            assert before.tail.startswith("\n") == (not before.body.endswith("\n"))
    if parts:
        assert (parts[0].head, parts[-1].tail) == ("", "")


def test_a_chinese_answer_is_cut_by_bytes_not_by_characters():
    """700 characters of three bytes need two messages of 2,048 bytes, and no character is broken."""
    parts = split_text("字" * 700, Limit(2048, Unit.BYTES))
    assert [len(part.text) for part in parts] == [682, 18]


def test_an_emoji_at_the_last_byte_goes_to_the_next_part():
    """An emoji of four bytes that begins at byte 2,047 is sent whole."""
    parts = split_text("a" * 2046 + "😀b", Limit(2048, Unit.BYTES))
    assert [part.text for part in parts] == ["a" * 2046, "😀b"]


@pytest.mark.parametrize("count", [2048, 2049, 4096])
def test_emoji_count_two_where_utf16_units_count(count):
    """A limit of 4,096 UTF-16 units takes 2,048 emoji."""
    parts = split_text("😀" * count, Limit(4096, Unit.UTF16))
    assert [len(part.text) for part in parts] == [2048] * (count // 2048) + [1] * (count % 2048)


def test_a_short_text_is_one_part_and_an_empty_one_none():
    """Nothing is split that fits, nothing is sent for nothing; an open block is left as the answer has it."""
    assert [part.text for part in split_text("```\nabc", Limit(20, Unit.CHARACTERS))] == ["```\nabc"]
    assert split_text("", Limit(20, Unit.CHARACTERS)) == []


def test_lines_are_kept_whole_where_they_fit():
    """The cut is at the last line end, not in the middle of a word."""
    parts = split_text("one two three\nfour five\nsix seven eight nine", Limit(26, Unit.CHARACTERS))
    assert [part.text for part in parts] == ["one two three\nfour five\n", "six seven eight nine"]


def test_a_long_line_is_cut_behind_a_space():
    """Without a line end in reach, words stay whole."""
    parts = split_text("alpha beta gamma delta epsilon zeta", Limit(20, Unit.CHARACTERS))
    assert [part.text for part in parts] == ["alpha beta gamma ", "delta epsilon zeta"]


def test_a_code_block_is_closed_and_opened_again_with_its_language():
    """Each part of a long block is a block of its own; a reader sees code in all of them."""
    code = "".join(f"line {number}\n" for number in range(6))
    parts = split_text(f"See:\n```python\n{code}```\nEnd", Limit(50, Unit.CHARACTERS))
    assert [part.text for part in parts] == [
        "See:\n```python\nline 0\nline 1\nline 2\nline 3\n```",
        "```python\nline 4\nline 5\n```\nEnd",
    ]


def test_the_cut_is_before_a_block_rather_than_inside_it():
    """A block that fits into one part goes there whole."""
    text = "Some words come first here.\n```\na = 1\nb = 2\nc = 3\n```\n"
    parts = split_text(text, Limit(45, Unit.CHARACTERS))
    assert [part.text for part in parts] == ["Some words come first here.\n", "```\na = 1\nb = 2\nc = 3\n```\n"]


def test_no_part_is_a_code_block_without_code():
    """When the closing line just does not fit, a line of code goes along with it to the next part."""
    text = "Words before it.\n```\naaaaaa\nbbbbbb\n```\nmore words\n"
    limit = Limit(len("Words before it.\n```\naaaaaa\nbbbbbb\n```"), Unit.CHARACTERS)
    parts = split_text(text, limit)
    assert [part.text for part in parts] == [
        "Words before it.\n```\naaaaaa\n```",
        "```\nbbbbbb\n```\nmore words\n",
    ]


@pytest.mark.parametrize("cluster", [cluster for cluster in CLUSTERS if len(cluster) > 1])
@pytest.mark.parametrize("unit", Unit)
def test_a_row_of_the_same_cluster_is_cut_between_them(cluster, unit):
    """Flags, families and accented letters without a space between them stay whole at every cut."""
    parts = split_text(cluster * 100, Limit(31, unit))
    assert len(parts) > 1
    assert all(part.text == cluster * (len(part.text) // len(cluster)) for part in parts)


def test_a_fence_too_long_for_a_part_is_plain_text():
    """A fence line of half a part or more is not repeated: there would be no room for anything else."""
    parts = split_text("`" * 40 + "\n" + "x" * 60, Limit(48, Unit.CHARACTERS))
    assert all(part.head == part.tail == "" for part in parts)


def test_a_cluster_longer_than_a_part_is_cut_between_code_points():
    """A letter under a thousand accents is still sent, since losing it would be worse."""
    text = "e" + "\u0301" * 1000
    parts = split_text(text, Limit(64, Unit.BYTES))
    assert "".join(part.text for part in parts) == text
    assert max(len(part.text.encode()) for part in parts) <= 64


def test_a_limit_that_cannot_hold_anything_is_refused():
    """A limit below the smallest is a mistake of the connector."""
    with pytest.raises(ValueError, match="too small"):
        split_text("abc", Limit(SMALLEST_LIMIT - 1, Unit.BYTES))
