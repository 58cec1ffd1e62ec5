"""The assembler's table, row by row, with the reported cases by their ids."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dualclaw_server.models.tool_calls import NamelessCallError, OpenCall, ToolCallAssembler, read_index, read_object

F = dict[str, object]


def f(arguments: str = "", *, i: int | None = None, id: str = "", name: str = "") -> F:  # noqa: A002
    return {"arguments": arguments, "index": i, "call_id": id, "name": name}


def assemble(*fragments: F, truncated: bool = False) -> list[tuple[str, str, str | None]]:
    """Return (id, name, arguments or None) with made ids shown as "*"."""
    assembler = ToolCallAssembler(frozenset({"old"}))
    for fragment in fragments:
        assembler.feed(**fragment)  # type: ignore[arg-type]
    found = assembler.finish(truncated=truncated)
    assert len({call.call.id for call in found}) == len(found)
    assert all((call.bad_arguments is None) == bool(call.call.args_json) for call in found)
    return [
        (
            "*" if call.call.id.startswith("call_") and len(call.call.id) == 37 else call.call.id,
            call.call.name,
            call.call.args_json if call.bad_arguments is None else None,
        )
        for call in found
    ]


CASES: dict[str, tuple[list[F], list[tuple[str, str, str | None]]]] = {
    "PS01 no index, empty continuation": ([f("{}", id="c1", name="w"), f("")], [("c1", "w", "{}")]),
    "PS01 no index, real continuation": (
        [f('{"a"', id="c1", name="w"), f(": 1}")],
        [("c1", "w", '{"a": 1}')],
    ),
    "PS02 no index, two ids": (
        [f('{"p":1}', id="c1", name="w"), f('{"p":2}', id="c2", name="w")],
        [("c1", "w", '{"p": 1}'), ("c2", "w", '{"p": 2}')],
    ),
    "PS02 no index, interleaved by id": (
        [f('{"p":', id="c1", name="w"), f('{"p":', id="c2", name="v"), f("1}", id="c1"), f("2}", id="c2")],
        [("c1", "w", '{"p": 1}'), ("c2", "v", '{"p": 2}')],
    ),
    "no index, no id, two names": (
        [f('{"p":1}', name="w"), f('{"p":2}', name="v")],
        [("*", "w", '{"p": 1}'), ("*", "v", '{"p": 2}')],
    ),
    "no index, no id, one name twice": (
        [f('{"p":1}', name="w"), f('{"p":2}', name="w")],
        [("*", "w", '{"p": 1}'), ("*", "w", '{"p": 2}')],
    ),
    "no index, no id, the name repeated on each fragment": (
        [f('{"p"', name="w"), f(":1}", name="w")],
        [("*", "w", '{"p": 1}')],
    ),
    "PS04 wrong index on the tail": (
        [f('{"x":1}', i=0, id="a", name="f"), f("", i=0, id="b", name="f"), f('{"x":2}', i=1)],
        [("a", "f", '{"x": 1}'), ("b", "f", '{"x": 2}')],
    ),
    "PS04 known id beats a wrong index": (
        [
            f('{"x":', i=0, id="a", name="f"),
            f('{"x":', i=1, id="b", name="f"),
            f("1}", i=1, id="a"),
            f("2}", i=0, id="b"),
        ],
        [("a", "f", '{"x": 1}'), ("b", "f", '{"x": 2}')],
    ),
    "all calls at index 0, with ids": (
        [f('{"x":1}', i=0, id="a", name="f"), f('{"x":2}', i=0, id="b", name="f")],
        [("a", "f", '{"x": 1}'), ("b", "f", '{"x": 2}')],
    ),
    "all calls at index 0, without ids": (
        [f('{"x":1}', i=0, name="f"), f('{"x":2}', i=0, name="g")],
        [("*", "f", '{"x": 1}'), ("*", "g", '{"x": 2}')],
    ),
    "a whole call sent twice, without ids": (
        [f('{"x":1}', i=0, name="f"), f('{"x":1}', i=0, name="f")],
        [("*", "f", '{"x": 1}')],
    ),
    "a whole call sent twice, with its id": (
        [f('{"x":1}', i=0, id="a", name="f"), f('{"x":1}', i=0, id="a", name="f")],
        [("a", "f", '{"x": 1}')],
    ),
    "PS05 empty ids on continuations": (
        [f("", i=0, id="c1", name="w"), f('{"city":', i=0), f('"X"}', i=0)],
        [("c1", "w", '{"city": "X"}')],
    ),
    "PS07 late id": ([f(i=0, name="w"), f("{}", i=0, id="call_9")], [("call_9", "w", "{}")]),
    "PS07 late id with the name repeated": (
        [f(i=0, name="w"), f("{}", i=0, id="call_9", name="w")],
        [("call_9", "w", "{}")],
    ),
    "PS07 late id, no index": ([f(name="w"), f('{"a":1}', id="call_9")], [("call_9", "w", '{"a": 1}')]),
    "late id after the arguments": ([f('{"a":1}', i=0, name="w"), f(i=0, id="c9")], [("c9", "w", '{"a": 1}')]),
    "PS08 never an id": ([f('{"a":1}', name="w")], [("*", "w", '{"a": 1}')]),
    "an id that changes with each fragment": (
        [f('{"a"', i=0, id="x1", name="w"), f(":", i=0, id="x2"), f("1}", i=0, id="x3")],
        [("x1", "w", '{"a": 1}')],
    ),
    "PS10 an empty fragment": (
        [f('{"a"', i=0, id="c", name="w"), f(i=0), f(":1}", i=0)],
        [("c", "w", '{"a": 1}')],
    ),
    "PS11 arguments before the name": (
        [f('{"q"', id="a"), f(":1}", id="a"), f(id="a", name="search")],
        [("a", "search", '{"q": 1}')],
    ),
    "PS11 by index": ([f('{"q":1}', i=0), f(i=0, name="search")], [("*", "search", '{"q": 1}')]),
    "two calls with arguments before the names": (
        [f('{"q":1}', i=0, id="a"), f('{"q":2}', i=1, id="b"), f(i=0, name="s"), f(i=1, name="t")],
        [("a", "s", '{"q": 1}'), ("b", "t", '{"q": 2}')],
    ),
    "a repeated name": ([f("", i=0, name="w"), f("{}", i=0, name="w")], [("*", "w", "{}")]),
    "a name in pieces": ([f(i=0, name="get_"), f("{}", i=0, name="time")], [("*", "get_time", "{}")]),
    "a name that grows": ([f(i=0, name="get_"), f("{}", i=0, name="get_time")], [("*", "get_time", "{}")]),
    "two calls that share an id": (
        [f('{"x":1}', i=0, id="a", name="f"), f('{"x":2}', i=1, id="a", name="g")],
        [("a", "f", '{"x": 1}'), ("*", "g", '{"x": 2}')],
    ),
    "an id of the conversation before": ([f("{}", id="old", name="f")], [("*", "f", "{}")]),
    "a placeholder before the arguments": (
        [f("{}", i=0, id="a", name="f"), f('{"x"', i=0), f(":1}", i=0)],
        [("a", "f", '{"x": 1}')],
    ),
    "PS35 no arguments at all": ([f("", i=0, id="a", name="f")], [("a", "f", "{}")]),
    "PS35 blank and null text": (
        [f(" \n", i=0, id="a", name="f"), f("null", i=1, id="b", name="g")],
        [("a", "f", "{}"), ("b", "g", "{}")],
    ),
    "PS37 fragments are joined before they are parsed": (
        [f('{"file_', i=0, id="a", name="f"), f('path":"a"}', i=0)],
        [("a", "f", '{"file_path": "a"}')],
    ),
    "PS40 cut arguments": ([f('{"a": "b', i=0, id="a", name="f")], [("a", "f", None)]),
    "not an object": (
        [f("[1]", i=0, id="a", name="f"), f('"x"', i=1, id="b", name="g")],
        [("a", "f", None), ("b", "g", None)],
    ),
    "two objects in one text": ([f('{"a":1}', i=0, id="a", name="f"), f('{"b":2}', i=0)], [("a", "f", None)]),
    "canonical form": (
        [f('{ "b":1.50,"a" : "\\u4f60", "n":12345678901234567890 }', id="a", name="f")],
        [("a", "f", '{"b": 1.5, "a": "你", "n": 12345678901234567890}')],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_fragments_become_the_right_calls(case: str) -> None:
    """Each row of the table and each reported case gives exactly these calls."""
    fragments, expected = CASES[case]
    assert assemble(*fragments) == expected


def test_a_call_without_a_name_is_an_error() -> None:
    """PS11: arguments whose name never comes are refused, not dropped."""
    with pytest.raises(NamelessCallError):
        assemble(f('{"a":1}', id="a"))


def test_a_cut_answer_runs_nothing_that_may_be_half() -> None:
    """With a finish reason of length the last call's empty arguments are bad, and a nameless one is left out."""
    whole = f('{"x":1}', i=0, id="a", name="f")
    assert assemble(whole, f("", i=1, id="b", name="g"), truncated=True) == [("a", "f", '{"x": 1}'), ("b", "g", None)]
    assert assemble(whole, f('{"y', i=1, id="b"), truncated=True) == [("a", "f", '{"x": 1}')]
    assert assemble(f("", i=0, id="b", name="g"), whole | {"index": 1}, truncated=True)[0] == ("b", "g", "{}")


def test_the_raw_text_of_bad_arguments_is_kept() -> None:
    """Whoever tells the model what was wrong needs the text as it was."""
    assembler = ToolCallAssembler()
    assembler.feed(index=0, call_id="a", name="f", arguments='{"a": ')
    assembler.feed(index=0, arguments="b")
    assert assembler.finish()[0].bad_arguments == '{"a": b'


def test_every_cut_of_the_arguments_gives_the_same_call() -> None:
    """Arguments cut at every pair of places, with the name repeated or not, are one call."""
    text = json.dumps({"a": {"b": "}"}, "c": [{}, "{"]})
    for at in range(len(text) + 1):
        for name in ("", "f"):
            found = assemble(f(text[:at], i=0, id="a", name="f"), f(text[at:], i=0, name=name))
            assert found == [("a", "f", text)]


PIECES = st.lists(
    st.sampled_from(["{", "}", "[", "]", '"', "\\", ":", ",", '"a"', " ", "\n", "1", "x", '{"a":1}', '"}'])
)


@given(PIECES)
@example(['{"a', "\\", '"}', '":{}', "}"])
@example(["{}", " ", "{}"])
@example([" {", "]", "}"])
def test_a_call_is_complete_exactly_when_its_arguments_are_one_object(pieces: list[str]) -> None:
    """Asked after each fragment, in time that is linear over all of them, it says what reading the whole text says."""
    call = OpenCall(name="f")
    for number in range(len(pieces)):
        call.add(pieces[number])
        assert call.complete() is (read_object("".join(pieces[: number + 1])) is not None)


@pytest.mark.parametrize("value", ["9" * 5000, "3.5", "²", "-1", "", 1.5, True, None, [], {}])
def test_what_is_no_place_is_none(value: object) -> None:
    """Whatever a vendor sends as an index, reading it raises nothing."""
    assert read_index(value) is None
    assert (read_index("12"), read_index(12)) == (12, 12)
