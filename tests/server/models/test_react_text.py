"""The reader of Thought / Action / Observation: what it makes of a text, however that is cut."""

from collections.abc import Sequence

import pytest

from dualclaw_server.engine.model import ReasoningDelta, TextDelta
from dualclaw_server.models.written.react_text import ReActReader
from dualclaw_server.models.written.tool_text import WrittenCall

Read = tuple[str, str, list[tuple[str, str]]]

TEXTS: dict[str, tuple[str, Read]] = {
    "a plain reply is the answer": (
        "Paris.\n\nIt lies on the Seine. \n",
        ("Paris.\n\nIt lies on the Seine. \n", "", []),
    ),
    "nothing at all": ("", ("", "", [])),
    "white space alone": (" \n\n ", (" \n\n ", "", [])),
    "thought and action": (
        'Thought: I look it up.\nAction: search\nAction Input: {"q": "x"}\n',
        ("", "I look it up.", [("search", '{"q": "x"}')]),
    ),
    "thought and answer": (
        "Thought: I know.\n\nFinal Answer: It is 42.\n\nAction: is a word here.\nThought: too",
        ("It is 42.\n\nAction: is a word here.\nThought: too", "I know.", []),
    ),
    "text before the action": (
        'Let me see.\n\nAction: search\nAction Input: {"q": "x"}',
        ("Let me see.", "", [("search", '{"q": "x"}')]),
    ),
    "text before the answer": ("Let me see.\nFinal Answer: 42", ("Let me see.\n\n42", "", [])),
    "several actions": (
        'Thought: a\nAction: search\nAction Input: {"q": 1}\nThought: b\nAction: clock\nAction Input: {}\n',
        ("", "a\nb", [("search", '{"q": 1}'), ("clock", "{}")]),
    ),
    "an imagined observation": (
        'Action: search\nAction Input: {"q": 1}\nObservation: found\nThought: good\nFinal Answer: yes',
        ("", "", [("search", '{"q": 1}')]),
    ),
    "an imagined answer": (
        'Action: search\nAction Input: {"q": 1}\nFinal Answer: yes',
        ("", "", [("search", '{"q": 1}')]),
    ),
    "an observation before any action is text": (
        "What I saw:\nObservation: it rains.",
        ("What I saw:\nObservation: it rains.", "", []),
    ),
    "full-width colons": (
        'Thought：查一下\nAction：search\nAction Input：{"q": "天气"}\nObservation：晴',
        ("", "查一下", [("search", '{"q": "天气"}')]),
    ),
    "chinese markers": (
        '思考：查一下\n行动：search\n行动输入：{"q": "天气"}\n观察：晴',
        ("", "查一下", [("search", '{"q": "天气"}')]),
    ),
    "a chinese answer": ("思考: 知道了\n最终答案: 晴天", ("晴天", "知道了", [])),
    "bold markers": (
        '**Thought:** hm\n**Action**: `search`\n**Action Input:** {"q": 1}',
        ("", "hm", [("search", '{"q": 1}')]),
    ),
    "a bold answer keeps its own stars": ("**Final Answer:** **42**", ("**42**", "", [])),
    "markers in the middle of a line": (
        "I write Thought: or Action: search whenever\nI like, as in Final Answer: 1",
        ("I write Thought: or Action: search whenever\nI like, as in Final Answer: 1", "", []),
    ),
    "markers in a code fence": (
        "Like this:\n```\nAction: search\nAction Input: {}\n```\nFinal Answer: ok",
        ("Like this:\n```\nAction: search\nAction Input: {}\n```\n\nok", "", []),
    ),
    "a deeply indented marker": ("So:\n    Action: search\n", ("So:\n    Action: search\n", "", [])),
    "a marker of a marker's line": (
        "Thought: Action: search is best\nFinal Answer: Thought: x",
        ("Thought: x", "Action: search is best", []),
    ),
    "a word that begins like a marker": (
        "Thoughts: none\nAct\nActions speak\nFinal",
        ("Thoughts: none\nAct\nActions speak\nFinal", "", []),
    ),
    "lower case is no marker": ("action: deploy\nthought: x", ("action: deploy\nthought: x", "", [])),
    "fenced input": (
        'Action: search\nAction Input:\n```json\n{\n  "q": "a ``` b"\n}\n```\nThat is all.',
        ("", "", [("search", '{"q": "a ``` b"}')]),
    ),
    "input on one fenced line": ('Action: search\nAction Input: ```{"q": 1}```', ("", "", [("search", '{"q": 1}')])),
    "prose after the input": (
        'Action: search\nAction Input: {"q": 1} and now I wait\nfor it',
        ("", "", [("search", '{"q": 1}')]),
    ),
    "a line break inside a string": (
        'Action: search\nAction Input: {"q": "a\nb"}',
        ("", "", [("search", '{"q": "a\\nb"}')]),
    ),
    "input under the action": ('Action: search\n{"q": 1}', ("", "", [("search", '{"q": 1}')])),
    "no input": ("Action: clock\n", ("", "", [("clock", "")])),
    "single quotes are not guessed": (
        "Action: search\nAction Input: {'q': 1}",
        ("", "", [("search", "{'q': 1}")]),
    ),
    "bare words are not guessed": ("Action: search\nAction Input: Paris", ("", "", [("search", "Paris")])),
    "two objects are not guessed": (
        'Action: search\nAction Input: {"q": 1} {"q": 2}',
        ("", "", [("search", '{"q": 1} {"q": 2}')]),
    ),
    "an unknown tool passes": ("Action: fly\nAction Input: {}", ("", "", [("fly", "{}")])),
    "an unknown tool of several words passes with its input": (
        "Action: fly away\nAction Input: {}",
        ("", "", [("fly away", "{}")]),
    ),
    "a sentence is no action": (
        "Minutes:\nAction: Bob will call\nAction: Ann writes\nDone.",
        ("Minutes:\nAction: Bob will call\nAction: Ann writes\nDone.", "", []),
    ),
    "a sentence in a thought": (
        "Thought: so\nAction: I just answer\nFinal Answer: 1",
        ("1", "so\nAction: I just answer", []),
    ),
    "no action by name": (
        "Thought: easy\nAction: None\nAction Input: None\nFinal Answer: 4",
        ("4", "easy", []),
    ),
    "a marker right under the answer's": ("Final Answer:\nAction: buy milk", ("Action: buy milk", "", [])),
    "an input without an action": ("Action Input: {}", ("Action Input: {}", "", [])),
    "a thought alone is the answer too": ("Thought: It is 42.", ("It is 42.", "It is 42.", [])),
    "the last thought alone is the answer": (
        "Hm.\nThought: It is 42.",
        ("Hm.", "It is 42.", []),
    ),
}


def read(pieces: Sequence[str], tools: Sequence[str] = ("search", "clock")) -> tuple[Read, ReActReader]:
    """Return what a reader makes of the pieces: from its deltas, and the calls of its blocks."""
    reader = ReActReader(frozenset(tools))
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + list(reader.end("stop"))
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls = [(block.name, block.arguments) for block in reader.blocks() if isinstance(block, WrittenCall)]
    parts = [block for block in reader.blocks() if not isinstance(block, WrittenCall)]
    assert "".join(part.text for part in parts) == text
    assert "".join(part.reasoning.text for part in parts) == reasoning
    return (text, reasoning, calls), reader


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_reads_the_same_however_it_is_cut(name: str) -> None:
    """Whole, in two pieces cut at every place, in three, and character by character, it reads as the table says."""
    text, expected = TEXTS[name]
    assert read([text])[0] == expected
    assert read(list(text))[0] == expected
    for first in range(len(text) + 1):
        assert read([text[:first], text[first:]])[0] == expected, first
        for second in range(first, len(text) + 1, 3):
            assert read([text[:first], text[first:second], text[second:]])[0] == expected, (first, second)


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    """Each character shows as soon as no marker can come of it, and white space with what follows it."""
    reader = ReActReader(frozenset({"search"}))
    shown = [("".join(delta.text for delta in reader.feed(piece))) for piece in "Fin day\nAct"]
    assert shown == ["", "", "", "Fin ", "d", "a", "y", "", "", "", ""]
    assert [delta.text for delta in reader.feed("s")] == ["\nActs"]
    assert [delta.text for delta in reader.feed("\nFinal Answer: 4")] == ["\n\n4"]
    assert [delta.text for delta in reader.feed("\nAct")] == ["\nAct"]


def test_a_thought_that_was_cut_off_is_no_answer() -> None:
    """When the tokens ran out in a thought, there is no answer to show."""
    reader = ReActReader(frozenset({"search"}))
    reader.feed("Thought: I think")
    assert reader.end("length") == []
