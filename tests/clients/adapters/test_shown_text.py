"""What an append-only front-end is still sent after a rewind, case by case."""

import pytest

from dualclaw_clients.adapters.shown_text import ShownText

Moves = list[tuple[str, str, str | None]]

CASES: dict[str, Moves] = {
    "in step: every piece as it comes, empty ones too": [("+", "ab", "ab"), ("+", "", ""), ("+", "c", "c")],
    "cut back, then the same text again": [
        ("+", "abcd", "abcd"),
        ("=", "a", None),
        ("+", "b", None),
        ("+", "", None),
        ("+", "cd", None),
        ("+", "", ""),
        ("+", "ef", "ef"),
    ],
    "a piece that goes past what is shown: only the part beyond": [
        ("+", "abcd", "abcd"),
        ("=", "ab", None),
        ("+", "cdef", "ef"),
        ("+", "g", "g"),
    ],
    "differing text: nothing more": [
        ("+", "abcd", "abcd"),
        ("=", "ab", None),
        ("+", "cx", None),
        ("+", "d", None),
        ("+", "abcd", None),
    ],
    "differing text that later looks right": [
        ("+", "abcd", "abcd"),
        ("=", "ab", None),
        ("+", "x", None),
        ("+", "cde", None),
    ],
    "a piece that begins right and ends differently": [("+", "abcd", "abcd"), ("=", "", None), ("+", "abXdef", None)],
    "rewind to other text": [("+", "abc", "abc"), ("=", "x", None), ("+", "abc", None)],
    "rewind to a longer text: the part beyond at once": [("+", "ab", "ab"), ("=", "abcd", "cd"), ("+", "e", "e")],
    "rewind to the same text": [("+", "ab", "ab"), ("=", "ab", None), ("+", "c", "c")],
    "rewind before any text": [
        ("=", "ab", "ab"),
        ("+", "c", "c"),
        ("=", "", None),
        ("+", "abc", None),
        ("+", "d", "d"),
    ],
    "several rewinds: apart and together again": [
        ("+", "abc", "abc"),
        ("=", "x", None),
        ("+", "y", None),
        ("=", "ab", None),
        ("+", "c", None),
        ("+", "d", "d"),
        ("=", "abcdef", "ef"),
        ("=", "abcde", None),
        ("=", "abcdefg", "g"),
        ("+", "h", "h"),
    ],
    "compared with what is shown, not with the last rewind": [
        ("+", "hello world", "hello world"),
        ("=", "hello", None),
        ("+", " w", None),
        ("=", "hell", None),
        ("+", "o world!", "!"),
    ],
    "characters beyond the BMP": [("+", "a😀", "a😀"), ("=", "a", None), ("+", "😀", None), ("+", "b", "b")],
    "line ends are kept": [("+", "a\r\n", "a\r\n"), ("=", "a\r", None), ("+", "\n\rb", "\rb")],
}


@pytest.mark.parametrize("moves", CASES.values(), ids=CASES.keys())
def test_sent_after_rewinds(moves: Moves) -> None:
    """Pieces (+) and rewinds (=) lead to exactly these sends."""
    shown = ShownText()
    assert [shown.append(text) if move == "+" else shown.rewind(text) for move, text, _ in moves] == [
        sent for *_, sent in moves
    ]


def test_after_a_loss_nothing_is_sent_again() -> None:
    """What is shown is unknown then, so not even a rewind brings the two together."""
    shown = ShownText()
    shown.append("a")
    shown.lose()
    assert [shown.append("b"), shown.rewind("a"), shown.append("c"), shown.rewind("")] == [None] * 4
