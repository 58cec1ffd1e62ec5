"""Which examples the local model is shown."""

import json

import jsonschema
import pytest

from dualclaw_server.engine.model import ToolSpec
from dualclaw_server.models.local.examples import SHOWN, Turn, examples_for, first_sentence, turns_of
from dualclaw_server.models.written.tool_text import BoundTool, bind
from dualclaw_server.tools.assistant import calculate, current_time
from dualclaw_server.tools.feedback import feedback_tool

TOOLS = bind([calculate.spec, current_time.spec, feedback_tool().spec])


def tool(name: str, description: str = "Do it.", **properties: object) -> BoundTool:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return bind([ToolSpec(name, description, json.dumps(schema))])[0]


@pytest.mark.parametrize(
    ("question", "nearest"),
    [
        ("What is 17 * 23?", "calculate"),
        ("What time is it in Oslo?", "current_time"),
        ("Hello", ""),
        ("", ""),
    ],
)
def test_the_example_most_like_the_question_comes_last(question: str, nearest: str) -> None:
    """A small model does what it has seen last; a question like no other is answered without a tool."""
    shown = examples_for(question, TOOLS)
    assert len(shown) == SHOWN
    assert shown[-1].tool == nearest or question == ""
    assert any(not turn.tool for turn in shown)


def test_a_number_is_like_any_other() -> None:
    """Which digits a question has does not change what is shown."""
    assert examples_for("What is 17 * 23?", TOOLS) == examples_for("What is 4 * 5.5?", TOOLS)


def test_an_answer_without_a_tool_is_always_among_them() -> None:
    """Also where every one of the nearest uses a tool."""
    shown = examples_for("What is 6 * 7? Add 250 and 38. Compute (8 - 2) * 9", TOOLS)
    assert [turn for turn in shown if not turn.tool]


@pytest.mark.parametrize("bound", TOOLS, ids=lambda bound: bound.spec.name)
def test_shipped_examples_are_calls_the_tools_take(bound: BoundTool) -> None:
    """What the model is shown is valid for the schema of the tool that ships."""
    turns = turns_of(bound)
    assert turns
    for turn in turns:
        jsonschema.validate(turn.arguments, json.loads(bound.spec.parameters))
        assert turn.result
        assert turn.answer


def test_a_tool_of_the_same_name_with_other_parameters_is_not_shown_the_shipped_ones() -> None:
    """Somebody's own ``calculate`` takes something else; its example is made of its own schema."""
    (turn,) = turns_of(tool("calculate", "Calculate a price.", article={"type": "string"}))
    assert turn.arguments.keys() == {"article"}


def test_a_tool_nobody_has_heard_of_gets_an_example_that_fits_its_schema() -> None:
    """Its texts stand in what is asked, or are what its description gives as an example."""
    properties = {
        "article": {"type": "string"},
        "color": {"type": "string", "description": 'A color, such as "red".'},
        "size": {"type": "string", "enum": ["S", "L"]},
        "count": {"type": "integer"},
    }
    bound = tool("stock", "Tell how many there are. Slow.", **properties)
    (turn,) = turns_of(bound)
    jsonschema.validate(turn.arguments, json.loads(bound.spec.parameters))
    assert turn.arguments["color"] == "red"
    assert turn.ask.startswith("Tell how many there are.")
    assert "Slow" not in turn.ask
    assert all(str(value) in turn.ask for value in turn.arguments.values())
    assert examples_for("Tell how many there are of A7", [bound])[-1] == turn


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("One. Two.", "One."),
        ("Only 3.5 of them", "Only 3.5 of them"),
        ("第一句。第二句。", "第一句。"),
        ("broken\n  over lines. Two", "broken over lines."),
        ("", ""),
    ],
)
def test_the_first_sentence_of_a_description(text: str, first: str) -> None:
    """White space is one blank; a number's point ends nothing."""
    assert first_sentence(text) == first


def test_a_tool_without_a_description_has_an_example_all_the_same() -> None:
    """It is asked for by its name."""
    assert turns_of(tool("sync", ""))[0] == Turn("Use sync.", "The result is: 12", "sync", {}, "12")
