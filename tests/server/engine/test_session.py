"""Values of a run: typed, copied, and refused at once when they could not be saved."""

import math
from dataclasses import dataclass

import pytest

from dualclaw_server.engine.session import MAX_VALUE, Values


@dataclass
class Basket:
    """What a shop would keep."""

    items: list[str]
    total: float = 0.0


def test_a_value_is_a_copy() -> None:
    """What is changed after it was set, or after it was got, changes nothing here."""
    values = Values({})
    basket = Basket(["apple"])
    values.set("basket", basket)
    basket.items.append("pear")
    got = values.get_as("basket", Basket, Basket([]))
    got.items.append("plum")
    assert values.get_as("basket", Basket, Basket([])) == Basket(["apple"])
    assert values.get("basket") == {"items": ["apple"], "total": 0.0}


def loop() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [object(), math.nan, [math.inf], {"f": open}, loop(), [10**5000]])
def test_what_cannot_be_saved_is_refused_when_it_is_set(value: object) -> None:
    """The error names the value; the one before stays."""
    values = Values({"x": "1"})
    with pytest.raises(TypeError, match="value 'x' cannot be saved"):
        values.set("x", value)
    assert values.get("x") == 1


def test_names_and_sizes_are_bounded() -> None:
    """An empty name and a value beyond the limit are refused, saying what the limit is."""
    values = Values({})
    with pytest.raises(ValueError, match="a value needs a name"):
        values.set("", 1)
    with pytest.raises(ValueError, match=f"at most {MAX_VALUE} can be saved"):
        values.set("big", "x" * MAX_VALUE)
    assert list(values) == []


def test_a_value_of_another_type_is_refused() -> None:
    """The error says where it does not fit, whatever kind of type was asked for."""
    values = Values({})
    values.set("basket", {"items": [1]})
    with pytest.raises(TypeError, match=r"value 'basket' is no Basket: .* at `\$.items\[0\]`"):
        values.get_as("basket", Basket, Basket([]))
    with pytest.raises(TypeError, match="value 'basket' is no"):
        values.get_as("basket", list[int], [])
    assert values.get_as("unknown", int, 7) == 7


def test_text_of_any_kind_survives() -> None:
    """Names and texts in every script come back; half a surrogate pair becomes a replacement character."""
    values = Values({})
    values.set("名", {"k": "🙂 é \x00", "half": "\ud800"})
    assert values.get("名") == {"k": "🙂 é \x00", "half": "�"}


def test_prefixes_keep_owners_apart() -> None:
    """Two owners of one table see their own names only."""
    texts: dict[str, str] = {}
    mine, yours = Values(texts, "mine/"), Values(texts, "yours/")
    mine.set("a", 1)
    yours.set("a", 2)
    yours.set("b", 3)
    mine.delete("a")
    mine.delete("never there")
    assert (list(mine), list(yours)) == ([], ["a", "b"])
    assert "a" in yours
    assert "a" not in mine
