"""What a task asks, and what the message that answers it means: no guess ever approves anything."""

import json

import pytest
from a2a.types.a2a_pb2 import Part

from dualclaw import DecisionAction, InterruptItem, InterruptKind, RememberScope
from dualclaw_clients.a2a.parts import data_part, data_value
from dualclaw_clients.a2a.questions import Unclear, question_parts, read_answer

APPROVE, REJECT = DecisionAction.DECISION_ACTION_APPROVE, DecisionAction.DECISION_ACTION_REJECT
EDIT, SKIP, RESPOND = (
    DecisionAction.DECISION_ACTION_EDIT,
    DecisionAction.DECISION_ACTION_SKIP,
    DecisionAction.DECISION_ACTION_RESPOND,
)


def approval(name: str = "pay-a", args: str = '{"to": "a"}') -> InterruptItem:
    return InterruptItem(
        id=name, kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="pay", args_json=args, prompt="Run pay?",
        allowed_actions=[APPROVE, REJECT, EDIT, SKIP],
    )  # fmt: skip


def question(name: str = "ask-1") -> InterruptItem:
    return InterruptItem(
        id=name, kind=InterruptKind.INTERRUPT_KIND_QUESTION, prompt="Which?", allowed_actions=[RESPOND, SKIP]
    )


def read(text: str, *items: InterruptItem, ever: int = 1, data: object = None):
    parts = [Part(text=text)] if text else []
    parts += [data_part(data)] if data is not None else []
    known = [item.id for item in items] + [f"old-{number}" for number in range(ever - len(items))]
    return [(d.interrupt_id, d.action, d.response_json, d.comment) for d in read_answer(parts, items, known)]


@pytest.mark.parametrize(
    ("text", "action", "comment"),
    [
        ("approve pay-a", APPROVE, ""), ("  OK:  pay-a ", APPROVE, ""), ("yes", APPROVE, ""),
        ("Approved.", APPROVE, ""),
        ("reject pay-a too much", REJECT, "too much"), ("no pay-a: never", REJECT, "never"), ("reject", REJECT, ""),
        ("skip pay-a", SKIP, ""),
    ],
)  # fmt: skip
def test_words_answer_the_approval_they_name(text, action, comment):
    """The word, the id, and for a refusal the reason; alone where it can mean nothing else."""
    assert read(text, approval()) == [("pay-a", action, "", comment)]


@pytest.mark.parametrize(
    "text", ["approve pay-a if cheap", "approve pay-b", "approve", "sure", "", "edit pay-a", "answer pay-a x"]
)
def test_what_is_not_clear_approves_nothing(text):
    """A condition, another id, a word alone after an earlier question, words that mean nothing: all are asked again."""
    with pytest.raises(Unclear):
        read(text, approval(), ever=2)


def test_a_word_alone_is_too_little_for_two_questions():
    """It could mean either; refusing is unclear as well."""
    for text in ("yes", "reject"):
        with pytest.raises(Unclear, match="the id of the question"):
            read(text, approval("a"), approval("b"), ever=2)


def test_an_id_that_begins_another_does_not_catch_it():
    """The longest id counts, and a longer unknown one is none."""
    assert read("approve pay-a", approval("pay"), approval("pay-a"), ever=2) == [("pay-a", APPROVE, "", "")]
    with pytest.raises(Unclear):
        read("approve pay-ab", approval("pay-a"))


def test_several_answers_stand_a_line_each_or_not_at_all():
    """All lines are answers, each to another question; otherwise nothing is carried out."""
    both = [approval("a"), approval("b")]
    assert read("approve a\n\nreject b why", *both, ever=2) == [("a", APPROVE, "", ""), ("b", REJECT, "", "why")]
    for text in ("approve a\nand something", "approve a\nreject a"):
        with pytest.raises(Unclear):
            read(text, *both, ever=2)


@pytest.mark.parametrize("text", ["yes", "no", "approve", "blue", "approve it\nthen go on"])
def test_any_words_answer_the_one_question(text):
    """Words that would approve elsewhere are an answer like any other here."""
    assert read(text, question()) == [("ask-1", RESPOND, json.dumps(text), "")]


def test_a_question_beside_an_approval_is_answered_without_approving():
    """Free words are the question's; the approval stays open until it is named."""
    assert read("blue", question(), approval(), ever=2) == [("ask-1", RESPOND, '"blue"', "")]
    assert read("answer ask-1 blue\napprove pay-a", question(), approval(), ever=2) == [
        ("ask-1", RESPOND, '"blue"', ""),
        ("pay-a", APPROVE, "", ""),
    ]


def test_two_questions_need_to_be_named():
    """Free words could answer either."""
    with pytest.raises(Unclear):
        read("blue", question("a"), question("b"), ever=2)


def test_data_answers_the_one_question_as_it_is():
    """A form's answer goes to the engine as JSON; whole numbers stay whole."""
    assert read("", question(), data={"n": 3, "w": "你"}) == [("ask-1", RESPOND, '{"n": 3, "w": "你"}', "")]
    with pytest.raises(Unclear):
        read("and words", question(), data={"n": 3})


def test_decisions_as_data_carry_everything_a_decision_has():
    """Arguments, hash, comment and how long it holds; exact arguments go as JSON text."""
    entry = {
        "interrupt_id": "pay-a", "action": "edit", "args_json": '{"id": 12345678901234567890}', "comment": "c",
        "args_hash": "h", "remember": "conversation",
    }  # fmt: skip
    (decision,) = read_answer([data_part({"decisions": [entry]})], [approval()], {"pay-a"})
    assert decision.action == EDIT
    assert decision.args_json == '{"id": 12345678901234567890}'
    assert (decision.comment, decision.args_hash) == ("c", "h")
    assert decision.remember == RememberScope.REMEMBER_SCOPE_CONVERSATION


@pytest.mark.parametrize(
    ("decisions", "named"),
    [
        ([], "must be a list"), ("x", "must be a list"), ([1], r"decisions\[0\] must be an object"),
        ([{"interrupt_id": "z", "action": "approve"}], "must be one of pay-a"),
        ([{"interrupt_id": "pay-a"}], "action must be one of approve"),
        ([{"interrupt_id": "pay-a", "action": ["approve"]}], "action must be one of"),
        ([{"interrupt_id": "pay-a", "action": "approve", "force": True}], "has force"),
        ([{"interrupt_id": "pay-a", "action": "approve", "comment": 1}], "comment must be text"),
        ([{"interrupt_id": "pay-a", "action": "approve", "remember": "ever"}], "remember must be one of"),
        ([{"interrupt_id": "pay-a", "action": "edit", "args": {}, "args_json": "{}"}], "args and args_json"),
        ([{"interrupt_id": "pay-a", "action": "approve"}] * 2, "two answers"),
    ],
)  # fmt: skip
def test_wrong_data_is_named_and_carries_nothing_out(decisions, named):
    """Every mistake says where it is and what would be right."""
    with pytest.raises(Unclear, match=named):
        read("", approval(), data={"decisions": decisions})


def test_what_is_asked_can_be_read_by_people_and_programs():
    """Arguments come whole and exact; characters that hide or turn text are shown as escapes to people."""
    text, data = question_parts([approval(args='{"to": "a\u202eb", "n": 12345678901234567890}'), question()])
    assert "a\\u202eb" in text.text
    assert "12345678901234567890" in text.text
    for words in ("`approve pay-a`", "`reject pay-a WHY`", "`answer ask-1 TEXT`"):
        assert words in text.text
    value = data_value(data)
    assert value["questions"][0]["args_json"] == '{"to": "a\u202eb", "n": 12345678901234567890}'
    assert value["questions"][0]["allowed_actions"] == ["approve", "reject", "edit", "skip"]
    decisions = read_answer([data_part(value["answer_with"])], [approval(), question()], set())
    assert [decision.interrupt_id for decision in decisions] == ["pay-a", "ask-1"]
