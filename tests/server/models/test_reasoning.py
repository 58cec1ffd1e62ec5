"""Inline think blocks, however they are cut."""

import itertools

import pytest

from dualclaw_server.models.reasoning import ThinkSplitter

CASES = {
    "PS31 a block and an answer": ("<think>secret</think>ANSWER", "secret", "ANSWER"),
    "PS31 a look-alike in the text": ("a < b <thread>", "", "a < b <thread>"),
    "PS31 a look-alike at the start": ("<think-tank> is a word", "", "<think-tank> is a word"),
    "white space around the tags": (" \n<think>\nwhy so\n</think>\n\nBecause", "why so", "Because"),
    "a block later on is text": ("Use <think>x</think> here", "", "Use <think>x</think> here"),
    "a look-alike inside the block": ("<think>a </thinker> b < c</think>d", "a </thinker> b < c", "d"),
    "never closed": ("<think>half a th", "half a th", ""),
    "never closed, with a possible tag": ("<think>x </thi", "x </thi", ""),
    "an empty block": ("<think></think>yes", "", "yes"),
    "only half a tag": ("<thi", "", "<thi"),
    "white space only": ("  ", "", "  "),
    "plain text keeps its white space": ("\n\n hello \n", "", "\n\n hello \n"),
    "a second block is text": ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
}


def split(pieces: list[str]) -> tuple[str, str]:
    splitter = ThinkSplitter()
    found = [*(splitter.feed(piece) for piece in pieces), splitter.flush()]
    return "".join(reasoning for reasoning, _ in found), "".join(text for _, text in found)


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_split_whole_and_at_every_pair_of_cuts(case: str) -> None:
    """Each case gives the same for the whole, for single characters, and for every two cuts."""
    text, reasoning, rest = CASES[case]
    assert split([text]) == (reasoning, rest)
    assert split(list(text)) == (reasoning, rest)
    for a, b in itertools.combinations(range(len(text) + 1), 2):
        assert split([text[:a], text[a:b], text[b:]]) == (reasoning, rest)


def test_text_is_not_held_back() -> None:
    """PS32: once the text has begun every piece comes out at once, also one that looks like a tag."""
    splitter = ThinkSplitter()
    assert splitter.feed("a") == ("", "a")
    assert splitter.feed("<thi") == ("", "<thi")


def test_only_a_possible_tag_is_held_in_the_block() -> None:
    """Reasoning streams too: what cannot be the closing tag comes out at once."""
    splitter = ThinkSplitter()
    assert splitter.feed("<think>one <") == ("one", "")
    assert splitter.feed("b two</th") == (" <b two", "")
