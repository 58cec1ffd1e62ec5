"""The examples a small model is shown, and which of them for which question.

A model of this size does what the nearest thing it has seen does. So it is not shown the same turns every time, but
those most like the question, the most alike last. With the same few turns for every question it chose the right
tool for about half of them, with the nearest ones for nearly all.

Rules:

- Alike are texts that share words and neighbouring words, rare ones counting more; any number is like any other.
- ``examples.json`` has turns for the tools that ship, by name. They are shown only where they fit the tool that has
  the name now. Any other tool gets a turn made up of its description and its schema.
- There is always an answer without a tool among those shown, so that it is seen to be possible.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final

import msgspec

from dualclaw_server.models.written.tool_text import BoundTool, Schema, sample

SHOWN: Final = 4
"""Examples for one question; more cost time and make it no better."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_WORD = re.compile(r"[^\W\d_]+|0|[-+*/%()^:?!]")
_SUCH_AS = re.compile(r'such as "([^"]+)"')
_VALUES: Final = ("blue", "north", "A7", "spring")
"""Stand for texts in turns that are made up; each stands in what is asked too, for that is where texts come from."""


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One example: what is asked, and what is done about it."""

    ask: str
    answer: str
    tool: str = ""
    """Empty: it is answered right away."""
    arguments: dict[str, object] = {}
    result: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tools: dict[str, list[Turn]]
    plain: list[Turn]


def examples_for(question: str, tools: Sequence[BoundTool]) -> list[Turn]:
    """Return the turns to show before a question, the one most like it last."""
    turns = [*_plain(), *(turn for tool in tools for turn in turns_of(tool))]
    wanted = _features(question)
    every = [_features(turn.ask) for turn in turns]
    weights = _weights(every)
    order = sorted(range(len(turns)), key=lambda at: (-_likeness(wanted, every[at], weights), at))
    chosen = order[:SHOWN]
    if not any(turns[at].tool == "" for at in chosen):
        chosen[-1] = next(at for at in order if turns[at].tool == "")
    return [turns[at] for at in reversed(chosen)]


def turns_of(tool: BoundTool) -> list[Turn]:
    """Return the examples of a tool: those that ship and fit its schema, else one made up."""
    properties = _object(tool.schema.get("properties"))
    required = tool.schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    shipped = _file().tools.get(tool.spec.name, [])
    fitting = [turn for turn in shipped if needed <= turn.arguments.keys() <= properties.keys()]
    return [msgspec.structs.replace(turn, tool=tool.spec.name) for turn in fitting] or [_made_up(tool, properties)]


def first_sentence(text: str) -> str:
    """Return the first sentence of a description, which says what a tool is for."""
    line = " ".join(text.split())
    return re.split(r"(?<=[.!?])\s|(?<=[。！？])", line, maxsplit=1)[0]


def _made_up(tool: BoundTool, properties: Mapping[str, object]) -> Turn:
    told = _object(_object(json.loads(tool.spec.parameters or "{}")).get("properties"))
    arguments = sample(tool.schema)
    values: dict[str, object] = dict(arguments) if isinstance(arguments, dict) else {}
    for number, name in enumerate(values):
        if _object(properties.get(name)).get("type") == "string" and "enum" not in _object(properties.get(name)):
            said = _SUCH_AS.search(str(_object(told.get(name)).get("description", "")))
            values[name] = said[1] if said else _VALUES[number % len(_VALUES)]
    asked = ", ".join(f"{name}: {value}" for name, value in values.items())
    ask = " ".join(filter(None, [first_sentence(tool.spec.description) or f"Use {tool.spec.name}.", asked]))
    return Turn(ask, "The result is: 12", tool.spec.name, values, "12")


@cache
def _file() -> _File:
    return msgspec.json.decode((files(__package__) / "examples.json").read_bytes(), type=_File)


def _plain() -> Sequence[Turn]:
    return _file().plain


def _features(text: str) -> frozenset[str]:
    words = _WORD.findall(_NUMBER.sub("0", text.casefold()))
    return frozenset(words) | {f"{one} {other}" for one, other in zip(["^", *words], [*words, "$"], strict=True)}


def _weights(texts: Iterable[frozenset[str]]) -> Mapping[str, float]:
    counts = Counter(feature for text in texts for feature in text)
    return {feature: math.log(1 + counts.total() / (1 + count)) for feature, count in counts.items()}


def _likeness(one: frozenset[str], other: frozenset[str], weights: Mapping[str, float]) -> float:
    """Return 0 for nothing in common, more for more; long texts are not alike just for being long."""
    most = max(weights.values(), default=1.0)
    size = math.prod(sum(weights.get(feature, most) for feature in text) for text in (one, other))
    return sum(weights[feature] for feature in one & other) / math.sqrt(size or 1.0)


def _object(value: object) -> Schema:
    return value if isinstance(value, dict) else {}
