"""Replies as answers to numbered questions: what decides, what does not, and what is asked about."""

import time

import pytest

from dualclaw import DecisionAction, InterruptItem, InterruptKind
from dualclaw_clients.adapters.questions import MAX_ARGS
from dualclaw_clients.im.decisions import Asked, Problem, Unclear, parse_reply

A, Q = InterruptKind.INTERRUPT_KIND_APPROVAL, InterruptKind.INTERRUPT_KIND_QUESTION


def asked(*kinds, number=1, is_open=True, is_read=True, **item):
    """Questions of these kinds, numbered."""
    return [
        Asked(n, "r", InterruptItem(id=f"i{n}", kind=kind, **item), is_open, is_read)
        for n, kind in enumerate(kinds, number)
    ]


def said(text, questions):
    """What a reply decides, in short: (number, action, comment or answer); or the problem and its numbers."""
    found = parse_reply(text, questions)
    if isinstance(found, Unclear):
        return found.problem, *found.numbers
    return found and [
        (a.asked.number, DecisionAction.Name(a.action)[16:].lower(), a.comment or a.response_json) for a in found
    ]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1 ok", [(1, "approve", "")]),
        ("１ 同意", [(1, "approve", "")]),
        ("①同意了！", [(1, "approve", "")]),
        ("#2) NO", [(2, "reject", "")]),
        ("1 同意 2 拒绝 太贵", [(1, "approve", ""), (2, "reject", "太贵")]),
        ("1 ok, 2 no: not this week", [(1, "approve", ""), (2, "reject", "not this week")]),
        ("1、2 同意", [(1, "approve", ""), (2, "approve", "")]),
        ("1 and 2 yes", [(1, "approve", ""), (2, "approve", "")]),
        ("1 ok\n2 no\nbecause\nit is bad", [(1, "approve", ""), (2, "reject", "because\nit is bad")]),
        ("all ok", [(1, "approve", ""), (2, "approve", "")]),
        ("全部拒绝，没预算", [(1, "reject", "没预算"), (2, "reject", "没预算")]),
        ("1 ok, note: ticket TRAVEL-5", [(1, "approve", "ticket TRAVEL-5")]),
        ("1 同意，备注：票号 5\n2 拒绝", [(1, "approve", "票号 5"), (2, "reject", "")]),
        ("1 OK, thanks! 👍🏽", [(1, "approve", "")]),
        ("1 同意，谢谢，麻烦您了\n2 ok ok", [(1, "approve", ""), (2, "approve", "")]),
        ("2 不同意", [(2, "reject", "")]),
        ("2 拒绝太贵", [(2, "reject", "太贵")]),
    ],
)
def test_numbers_with_verdicts_decide(text, meant):
    """Several at once, in both languages and widths, with reasons behind."""
    assert said(text, asked(A, A)) == meant


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1", (Problem.NO_VERDICT, 1)),
        ("1 maybe", (Problem.NO_VERDICT, 1)),
        ("1 ok?", (Problem.NO_VERDICT, 1)),
        ("1 同意书在哪里", (Problem.NO_VERDICT, 1)),
        ("1 不知道", (Problem.NO_VERDICT, 1)),
        ("1 ok, but only half", (Problem.CONDITION, 1)),
        ("1 同意，但是改成 5 元", (Problem.CONDITION, 1)),
        ("1 可以，如果便宜的话", (Problem.CONDITION, 1)),
        ("1 ok 2", (Problem.CONDITION, 1)),
        ("1 ok 2 nah", (Problem.CONDITION, 1)),
        ("1 ok 吗", (Problem.CONDITION, 1)),
        ("1 ok 拒绝", (Problem.CONDITION, 1)),
        ("1 ok\nreject", (Problem.CONDITION, 1)),
        ("1 y n", (Problem.CONDITION, 1)),
        ("1 ok 👎", (Problem.CONDITION, 1)),
        ("1 ok once Bob agrees", (Problem.CONDITION, 1)),
        ("1 ok up to 100", (Problem.CONDITION, 1)),
        ("1 同意 明天执行", (Problem.CONDITION, 1)),
        ("1 ok, note: but only half", (Problem.CONDITION, 1)),
        ("1 ok\nand what is the weather", (Problem.CONDITION, 1)),
        ("all ok except 2", (Problem.CONDITION, 1, 2)),
        ("1 ok, 1 no", (Problem.TWICE, 1)),
        ("all ok, 2 no", (Problem.TWICE, 2)),
        ("1 ok, 7 ok", (Problem.UNKNOWN, 7)),
        ("1 修改 {}", (Problem.EDIT, 1)),
        ("1 改成 5", (Problem.EDIT, 1)),
        ("1 skip", (Problem.NOT_OFFERED, 1)),
        ("ok", (Problem.WHICH, 1, 2)),
    ],
)
def test_what_is_unclear_decides_nothing(text, problem):
    """A condition is no approval, a part that is unclear stops the whole, and nothing is guessed."""
    assert said(text, asked(A, A)) == problem


@pytest.mark.parametrize(
    "text", ["hello", "1st of May", "1.5 m", "10:30", "3个苹果", "", " \n", "all", "allow me", "😀"]
)
def test_what_does_not_look_like_an_answer_is_none(text):
    """It goes to the agent as the message it is."""
    assert said(text, asked(A, A)) is None


def test_without_questions_numbers_are_words():
    """Nothing was asked here, so "1 ok" answers what the agent said in its own words."""
    assert said("1 ok", []) is None
    assert said("7 ok", asked(A, is_open=False)) is None


def test_a_verdict_alone_is_taken_for_the_only_question_if_it_was_read():
    """Who says ok twice approves once: the second ok came before the next question was shown."""
    assert said("同意。", asked(A)) == [(1, "approve", "")]
    assert said("ok", asked(A, is_read=False)) == (Problem.UNREAD, 1)
    assert said("all ok", asked(A, is_read=False)) == (Problem.UNREAD, 1)
    assert said("ok", asked(A, is_open=False)) is None
    assert said("no thanks", asked(A)) is None
    assert said("ok", asked(Q)) is None
    assert said("ok", asked(A, Q)) == (Problem.WHICH, 1, 2)


def test_a_number_that_was_guessed_decides_nothing():
    """Numbers rise by one, so a second reply can name a question that the run had yet to ask."""
    questions = [*asked(A), *asked(A, number=2, is_read=False)]
    assert said("2 ok", questions) == (Problem.UNREAD, 2)
    assert said("1,2 ok", questions) == (Problem.UNREAD, 2)
    assert said("1 ok", questions) == [(1, "approve", "")]


def test_all_decides_nothing_beside_a_question_that_stays_open():
    """Both are fine: to "tea or coffee?" that is an answer to the question and no approval of what waits beside it."""
    for text in ("都行", "都可以", "all ok", "all no"):
        assert said(text, asked(A, Q)) == (Problem.WHICH, 1, 2)
    assert said("all ok, 2 tea", asked(A, Q)) == [(1, "approve", ""), (2, "respond", '"tea"')]


def test_a_number_that_has_its_answer_is_said_so():
    """An old number stays what it was, and what is new has another."""
    questions = [*asked(A, is_open=False), *asked(A, number=2)]
    assert said("1 ok", questions) == (Problem.CLOSED, 1)
    assert said("2 ok", questions) == [(2, "approve", "")]


def test_questions_take_the_words_behind_their_number():
    """Verdict words are words there; the rest of the line belongs to the answer, and further lines."""
    questions = asked(A, Q, allowed_actions=[1, 2, 4, 5])
    assert said("2 tomorrow, 3 people", questions) == [(2, "respond", '"tomorrow, 3 people"')]
    assert said("2 no", questions) == [(2, "respond", '"no"')]
    assert said("2 1 ok", questions) == [(2, "respond", '"1 ok"')]
    assert said("2 跳过", questions) == [(2, "skip", "")]
    assert said("1 ok, 2 明天\n下午", questions) == [(1, "approve", ""), (2, "respond", '"明天\\n下午"')]
    assert said("2", questions) is None
    assert said("1 回答: 已经做了", questions) == [(1, "respond", '"已经做了"')]
    assert said("1 回答", questions) == (Problem.NO_TEXT, 1)


def test_what_was_not_shown_whole_cannot_be_approved_and_can_be_refused():
    """Whatever stands behind the cut was never read."""
    questions = asked(A, args_json="x" * (MAX_ARGS + 1))
    assert said("1 ok", questions) == (Problem.NOT_WHOLE, 1)
    assert said("all ok", questions) == (Problem.NOT_WHOLE, 1)
    assert said("1 no", questions) == [(1, "reject", "")]


def test_reading_a_hostile_reply_is_quick():
    """Nothing in it makes the parser walk the same text again and again."""
    started = time.monotonic()
    for text in (
        "1 " * 2000,
        "1" + " " * 3990 + "x",
        "1 ok " + "2 " * 1900,
        "1 ok, all " * 390,
        "1 ok," * 790,
        "1" * 4000,
        "1 ok " + "谢谢" * 1900 + "x",
        "1 ok " + " ,\n" * 1300 + "x",
    ):
        parse_reply(text, asked(A, A))
    parse_reply("1 ok " * 1_000_000, asked(A, A))
    assert time.monotonic() - started < 10
