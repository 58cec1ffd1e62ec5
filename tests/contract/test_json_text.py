"""Canonical JSON text, its never-failing reader, and clean text."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualclaw.events import canonical_json, clean_text, parse_args

# Time says nothing here: the machine may be busy with other things.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

SURROGATES = st.characters(codec=None, categories=("Cs",))
ANY_TEXT = st.text(st.one_of(st.characters(codec=None), SURROGATES))
SCALARS = st.none() | st.booleans() | st.integers(-(10**60), 10**60) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    SCALARS | st.text(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("", ""),
        ("plain", "plain"),
        ("你好 🍸 \u2028\x00", "你好 🍸 \u2028\x00"),
        ("\ud800", "\ufffd"),
        ("\udfff\ud800", "\ufffd\ufffd"),
        ("\ud83c\udf78", "🍸"),
        ("\ud83c\ud83c\udf78\udf78", "\ufffd🍸\ufffd"),
        ("a\ud83c", "a\ufffd"),
        ("\ud83cx\udf78", "\ufffdx\ufffd"),
    ],
)
def test_lone_surrogates_are_replaced_and_pairs_joined(text: str, clean: str) -> None:
    """One U+FFFD for each half that is alone; a pair of halves is the character they stand for."""
    assert clean_text(text) == clean


@calm
@given(ANY_TEXT)
def test_clean_text_can_always_be_encoded(text: str) -> None:
    """Whatever comes in, what goes out is valid Unicode, and cleaning it again changes nothing."""
    clean = clean_text(text)
    clean.encode()
    assert clean_text(clean) == clean
    assert len(clean) <= len(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "{}"),
        ({"a": [], "b": {}, "c": ""}, '{"a": [], "b": {}, "c": ""}'),
        ({"z": 1, "a": 2}, '{"z": 1, "a": 2}'),
        ([1e16, 1e-7, 1.0, 0.1, -0.0], "[1e+16, 1e-07, 1.0, 0.1, -0.0]"),
        ([2**64, -(2**200)], f"[{2**64}, -{2**200}]"),
        ([True, False, None], "[true, false, null]"),
        ([math.nan, math.inf, -math.inf], "[null, null, null]"),
        ([10**4000 - 1, 10**4000, -(10**4000)], "[" + "9" * 4000 + ", null, null]"),
        ('\x00\x1f\x7f"\\/\b\f\n\r\t', '"\\u0000\\u001f\x7f\\"\\\\/\\b\\f\\n\\r\\t"'),
        ("你好\u2028\u2029\u0085🍸", '"你好\u2028\u2029\u0085🍸"'),
        (("a", ("b",)), '["a", ["b"]]'),
        ({1: "a", 2.5: "b", False: "c", None: "d"}, '{"1": "a", "2.5": "b", "false": "c", "null": "d"}'),
        ({"1": "a", 1: "b"}, '{"1": "b"}'),
        (dict(zip("\ud800\udfff", (1, 2), strict=True)), '{"\ufffd": 2}'),
    ],
)
def test_canonical_text_is_exact(value: object, text: str) -> None:
    """Separators, escapes, key order and numbers are fixed, because other languages copy the text."""
    assert canonical_json(value) == text


@pytest.mark.parametrize("value", [{1, 2}, b"a", object(), {"a": [b"x"]}, {(1,): 2}])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    """A value without JSON form is named by its type."""
    with pytest.raises(ValueError, match=r"of type (set|bytes|object|tuple) has no JSON form"):
        canonical_json(value)


def test_value_that_contains_itself_is_refused() -> None:
    """A cycle ends with an error, while the same object twice is no cycle."""
    cycle: dict[str, object] = {}
    cycle["a"] = [cycle]
    with pytest.raises(ValueError, match="contains itself"):
        canonical_json(cycle)
    twice = [1]
    assert canonical_json({"a": twice, "b": twice}) == '{"a": [1], "b": [1]}'


@pytest.mark.parametrize("levels", [101, 5_000, 30_000])
def test_deep_nesting_is_printed_without_recursion(levels: int) -> None:
    """The writer has no limit of its own, and the text is what a reader of any depth would expect."""
    value: object = {}
    for level in range(levels):
        value = {"k": value, "n": [level]} if level % 2 else [value, "x"]
    text = canonical_json(value)
    assert text.count("[") + text.count("{") == levels + 1 + levels // 2
    if levels < 200:
        assert text == json.dumps(value, ensure_ascii=False)
    assert parse_args(text) == {}


@pytest.mark.parametrize(("levels", "kept"), [(100, True), (101, False), (100_000, False)])
def test_nesting_is_read_to_a_depth_of_100(levels: int, kept: bool) -> None:
    """The outermost object counts as one; what is deeper reads as {} and never as an error."""
    for opening, closing in (('{"a": ', "}"), ("[", "]")):
        inner = opening * (levels - 1) + "1" + closing * (levels - 1)
        assert bool(parse_args('{"a": ' + inner + "}")) is kept


def test_brackets_in_strings_are_no_nesting() -> None:
    """Only real nesting counts, also behind escaped quotes."""
    text = json.dumps({"a": '"[{\\' * 500, "b": ["]" * 500]})
    assert parse_args(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", "}", "null", "[]", "1", '"a"', "{} {}", "{'a': 1}", '{"a": 1,}', '{"a" 1}', "{a: 1}", '{"a": "\n"}',
     '{"a": 01}', '{"a": .5}', '{"a": +1}', '{"a": undefined}', "\ufeff{}", '{"a": "\\x"}', '{"a": "\\ud83"}',
     "[" * 100_000, '{"a": ' * 100_000, '{"' + "\\\"" * 100_000, '"' * 100_001],
)  # fmt: skip
def test_text_that_is_no_object_reads_as_empty(text: str) -> None:
    """The reader has no error, and takes linear time for what looks worst."""
    assert parse_args(text) == {}


def test_numbers_are_exact_or_null() -> None:
    """Integers keep every digit up to 4,000; what no double can hold is null."""
    nines = "9" * 4000
    found = parse_args(
        f'{{"a": 9007199254740993, "b": {nines}, "c": -{nines}, "d": {nines}9, "e": -{nines}9, "f": 1e999, '
        f'"g": -1e999, "h": NaN, "i": Infinity, "j": -Infinity, "k": 0.{nines}9, "l": 1.0, "m": 1, '
        f'"n": 1e{"0" * 4000}1}}'
    )
    assert found["a"] == 9007199254740993
    assert found["b"] == int(nines)
    assert found["c"] == -int(nines)
    assert [found[key] for key in "defghijkn"] == [None] * 9
    assert isinstance(found["l"], float)
    assert isinstance(found["m"], int)


def test_last_of_duplicate_keys_wins() -> None:
    """As in every JSON reader of the three languages."""
    assert parse_args('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}') == {"a": 3, "b": {"c": 2}}


def test_escaped_surrogates_are_cleaned() -> None:
    """A lone half that hides in an escape does not cross either, in a value or in a key."""
    found = parse_args('{"\\ud800": ["\\udfff", {"\\uDFFF": "\\ud83c\\udf78"}]}')
    assert found == {"\ufffd": ["\ufffd", {"\ufffd": "🍸"}]}
    assert parse_args('{"a": "\ud800"}') == {"a": "\ufffd"}


@calm
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_what_was_written_is_read_back(value: dict[str, object]) -> None:
    """Reading canonical text gives the value again, with its types and the order of its keys."""
    text = canonical_json(value)
    assert text == json.dumps(value, ensure_ascii=False)
    assert repr(parse_args(text)) == repr(value)
    assert canonical_json(parse_args(text)) == text


@calm
@given(ANY_TEXT)
def test_reader_never_fails(text: str) -> None:
    """Any text at all reads as some object."""
    assert isinstance(parse_args(text), dict)
    assert isinstance(parse_args('{"a": "' + text + '"}'), dict)
