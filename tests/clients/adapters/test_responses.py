"""Typed words as responses: what a question's schema makes of them."""

import json

import pytest

from dualclaw_clients.adapters.responses import response_json_of


@pytest.mark.parametrize(
    ("text", "schema", "response"),
    [
        ("2", '{"enum": ["market", "store"]}', "store"),
        ("STORE", '{"enum": ["market", "store"]}', "store"),
        ("Ok", '{"enum": ["OK", "Ok"]}', "Ok"),
        ("2", '{"enum": ["1", "2"]}', "2"),
        ("2", '{"enum": [5, 2]}', 2),
        ("1", '{"enum": ["a", 1]}', 1),
        ("bakery", '{"anyOf": [{"enum": ["market"]}, {"type": "string"}]}', "bakery"),
        ("1", '{"anyOf": [{"enum": ["market"]}, {"type": "string"}]}', "market"),
        ("12", '{"anyOf": [{"enum": ["market"]}, {"type": "string"}]}', "12"),
        ("7", '{"anyOf": [{"enum": ["market"]}, {"type": "integer"}]}', 7),
        ("7", '{"anyOf": [{"type": "object"}, {"type": "integer"}]}', 7),
        ('{"n": 7}', '{"anyOf": [{"type": "object"}, {"type": "integer"}]}', {"n": 7}),
        ("7", '{"type": "integer"}', 7),
        ("7", '{"type": ["string", "null"]}', "7"),
        ("null", '{"type": ["integer", "null"]}', None),
        ("seven", '{"type": "integer"}', "seven"),
        ("7", '{"type": "string"}', "7"),
        ("7", "", "7"),
        ("7", "[]", "7"),
        ("true", "true", "true"),
        ("x", "no json", "x"),
        ("x", '{"anyOf": 3, "enum": 4}', "x"),
        ("[" * 100_000, '{"type": "array"}', "[" * 100_000),
    ],
)
def test_typed_words_are_a_choice_or_text_or_what_the_schema_wants(text: str, schema: str, response: object) -> None:
    """The same as the engine reads of a plain message; what fits nothing is left to it to refuse."""
    assert json.loads(response_json_of(text, schema)) == response


def test_json_goes_out_as_it_was_typed() -> None:
    """Numbers beyond what a float holds are not read and printed again."""
    assert response_json_of("1.10", '{"type": "number"}') == "1.10"
    assert response_json_of("你好", "") == '"你好"'
