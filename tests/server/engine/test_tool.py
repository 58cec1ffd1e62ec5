"""Tools: schema from the signature, validation, and what a result becomes."""

import asyncio
import dataclasses
import json
import threading
from typing import Annotated, Literal

import msgspec
import pytest

from dualclaw_server.engine.checkpoint import Checkpoint, RunRecord
from dualclaw_server.engine.store import RunKey
from dualclaw_server.engine.tool import Tool, ToolContext, ToolOutput, as_parts, tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.tools.assistant import calculate, current_time

TRACE = Trace(RunKey("t", "r"), RunRecord(), Checkpoint(), (), ())
CONTEXT = ToolContext("t", "s", "r", "c", "call", "key", {"a": "b"}, TRACE)


@dataclasses.dataclass
class Place:
    city: str
    country: str = "DE"


@tool(effect="read", timeout=3)
def weather(
    place: Place, days: Annotated[int, msgspec.Meta(ge=1, le=7)] = 1, unit: Literal["C", "F"] = "C"
) -> dict[str, object]:
    """Tell the weather of the
    coming days.

    Args:
        place: Where, as precisely
            as it is known.
        days: How many days.
        unit: Celsius or Fahrenheit.
    """
    return {"city": place.city, "days": days, "unit": unit}


def test_schema_comes_from_signature_and_docstring() -> None:
    """Types, defaults, descriptions and required parameters are told to the model; unknown ones are refused."""
    schema = json.loads(weather.parameters_json)
    assert weather.name == "weather"
    assert weather.description == "Tell the weather of the coming days."
    assert schema["required"] == ["place"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["place"] == {
        "$ref": "#/$defs/Place",
        "description": "Where, as precisely as it is known.",
    }
    assert schema["properties"]["days"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 7,
        "description": "How many days.",
        "default": 1,
    }
    assert schema["properties"]["unit"] == {
        "enum": ["C", "F"],
        "default": "C",
        "description": "Celsius or Fahrenheit.",
    }


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ({}, "'place' is a required property"),
        ({"place": {"city": 5}}, "place/city: 5 is not of type 'string'"),
        ({"place": {"city": "x"}, "days": 9}, "days: 9 is greater than the maximum of 7"),
        ({"place": {"city": "x"}, "colour": 1}, "'colour' was unexpected"),
        ({"place": {"city": "x"}, "unit": "K"}, "unit: 'K' is not one of ['C', 'F']"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args: dict[str, object], part: str) -> None:
    """The problem says where and what."""
    assert part in weather.problem(args)


async def test_any_object_is_a_type_as_good_as_any() -> None:
    """``dict[str, object]`` takes every JSON object and refuses what is none."""

    @tool
    async def note(details: dict[str, object]) -> str:
        """Note."""
        return repr(details)

    assert note.problem({"details": {"deep": [1, None, {"x": 0.5}]}}) == ""
    assert "details" in note.problem({"details": [1]})
    args = {"details": {"deep": [1, None]}}
    assert (await note.call(args, CONTEXT)).parts[0].text == repr(args["details"])


async def test_values_arrive_as_their_python_types() -> None:
    """JSON data is converted to the types of the signature before the function sees it."""
    assert weather.problem({"place": {"city": "Köln"}, "days": 2}) == ""
    parts = (await weather.call({"place": {"city": "Köln"}, "days": 2}, CONTEXT)).parts
    assert parts[0].text == '{"city": "Köln", "days": 2, "unit": "C"}'


async def test_context_is_given_and_hidden_from_the_schema() -> None:
    """A parameter of type ToolContext is filled in by the engine and cannot be set by the model."""

    @tool
    async def who(context: ToolContext) -> str:
        return f"{context.tenant}/{context.idempotency_key}"

    assert "context" not in json.loads(who.parameters_json)["properties"]
    assert (await who.call({}, CONTEXT)).parts[0].text == "t/key"


async def test_plain_functions_run_beside_the_event_loop() -> None:
    """A def tool runs in a daemon thread, so it neither blocks the loop nor keeps the process alive."""
    seen: list[threading.Thread] = []

    @tool
    def slow() -> str:
        seen.append(threading.current_thread())
        return "done"

    assert (await slow.call({}, CONTEXT)).parts[0].text == "done"
    assert seen[0] is not threading.main_thread()
    assert seen[0].daemon


async def test_plain_functions_raise_into_the_call() -> None:
    """An exception of the thread reaches whoever awaits the call, StopIteration included."""

    @tool
    def broken() -> str:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(broken.call({}, CONTEXT), 60)


@pytest.mark.parametrize(
    ("result", "text"),
    [("x", "x"), (5, "5"), ([1, "é"], '[1, "é"]'), (Place("B"), '{"city": "B", "country": "DE"}'), (True, "true")],
)
def test_results_become_text(result: object, text: str) -> None:
    """Text stays as it is, other data becomes canonical JSON."""
    assert [part.text for part in as_parts(result)] == [text]


def test_results_without_a_text_form_are_errors_of_the_call() -> None:
    """An object that is neither text nor JSON is refused at this border, before it could reach a checkpoint."""
    with pytest.raises(TypeError):
        as_parts(object())
    assert as_parts(None) == as_parts("") == []
    assert as_parts(ToolOutput([])) == []


def test_lone_surrogates_never_get_through() -> None:
    """A result that is no valid Unicode is mended instead of breaking the message."""
    assert as_parts("a\ud800b")[0].text == "a\ufffdb"


def test_unusable_tools_are_refused_when_made() -> None:
    """Names, types, timeouts and schemas that cannot work are named at once."""

    def untyped(value):  # type: ignore[no-untyped-def]
        return value

    def many(*values: int) -> int:
        return sum(values)

    with pytest.raises(ValueError, match="parameter value needs a type"):
        tool(untyped)
    with pytest.raises(ValueError, match="parameter values must be one a caller can name"):
        tool(many)
    with pytest.raises(ValueError, match="use 1 to 64"):
        tool(name="no spaces")(lambda: 1)
    with pytest.raises(ValueError, match="needs a lookup"):
        tool(name="t", effect="reconcile")(lambda: 1)
    with pytest.raises(ValueError, match="above 0"):
        tool(name="t", timeout=0)(lambda: 1)
    with pytest.raises(ValueError, match="no JSON schema"):
        Tool("t", "", {"type": "nonsense"}, lambda: 1)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("17 * 23", "391"),
        ("2 ** 100", str(2**100)),
        ("-(3 - 5) / 4", "0.5"),
        ("7 // 2 % 2", "1"),
        ("1e3 + .5", "1000.5"),
    ],
)
async def test_calculator_calculates(expression: str, result: str) -> None:
    """The shipped calculator is exact for integers and knows its operators."""
    assert (await calculate.call({"expression": expression}, CONTEXT)).parts[0].text == result


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "larger than"),
        ("__import__('os')", "only numbers"),
        ("True + 1", "only numbers"),
        ("1 +", "no arithmetic expression"),
        ("(" * 300, "no arithmetic expression|too many nested"),
        ("1+" * 400 + "1", "longer than"),
        ("2 ** -1.5j", "only numbers"),
    ],
)
async def test_calculator_refuses_what_is_no_arithmetic(expression: str, problem: str) -> None:
    """Everything else, huge powers included, is an error with its reason, at once."""
    with pytest.raises(Exception, match=problem):
        await calculate.call({"expression": expression}, CONTEXT)


async def test_clock_knows_zones() -> None:
    """The shipped clock tells zones apart and names one it does not know."""
    assert (await current_time.call({}, CONTEXT)).parts[0].text.endswith("+00:00")
    assert (await current_time.call({"timezone": "Asia/Shanghai"}, CONTEXT)).parts[0].text.endswith("+08:00")
    for zone in ("Mars/Base", "../etc/passwd"):
        with pytest.raises(Exception, match="no time zone"):
            await current_time.call({"timezone": zone}, CONTEXT)
