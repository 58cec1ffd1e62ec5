"""Open questions as text, for channels without buttons: numbered, each with the words that answer it.

A reply is the question's number, then a word of ``ANSWER_WORDS`` (and what that word needs) or, for a question,
the answer itself: ``1 同意``, ``1 修改 {"city": "上海"}``, ``2 明天下午``. A single question takes any message for its
answer. Whoever reads replies takes the words from here.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from dualclaw import DecisionAction, InterruptItem, InterruptKind

ANSWER_WORDS: Final[Mapping[DecisionAction.ValueType, str]] = MappingProxyType(
    {
        DecisionAction.DECISION_ACTION_APPROVE: "同意",
        DecisionAction.DECISION_ACTION_REJECT: "拒绝",
        DecisionAction.DECISION_ACTION_EDIT: "修改",
        DecisionAction.DECISION_ACTION_SKIP: "跳过",
        DecisionAction.DECISION_ACTION_RESPOND: "回答",
    }
)
"""The word that stands for an action in a reply."""

MAX_ARGS = 1_000
"""Characters of a call's arguments that are shown; a person must see what they approve, a chat has limits."""

_WITH_MORE: Final = {
    DecisionAction.DECISION_ACTION_EDIT: " {新参数 JSON}",
    DecisionAction.DECISION_ACTION_RESPOND: " 内容",
}


def questions_text(items: Sequence[InterruptItem]) -> str:
    """Return all questions in order, numbered from 1 and one blank line apart; "" when there are none."""
    alone = len(items) == 1
    return "\n\n".join(_question_text(number, item, alone) for number, item in enumerate(items, 1))


def _question_text(number: int, item: InterruptItem, alone: bool) -> str:
    is_question = item.kind == InterruptKind.INTERRUPT_KIND_QUESTION
    fallback = "请补充信息" if is_question else f"是否允许执行 {item.tool_name or '这一步'}？"
    lines = [f"{number}. {item.prompt.strip() or fallback}"]
    if not is_question and item.args_json:
        cut = item.args_json[:MAX_ARGS]
        lines.append(f"参数：{cut}{'…' if len(item.args_json) > MAX_ARGS else ''}")
    lines.append(_how_to_answer(number, item, is_question, alone))
    return "\n".join(lines)


def _how_to_answer(number: int, item: InterruptItem, is_question: bool, alone: bool) -> str:
    usual = (
        [DecisionAction.DECISION_ACTION_RESPOND]
        if is_question
        else [DecisionAction.DECISION_ACTION_APPROVE, DecisionAction.DECISION_ACTION_REJECT]
    )
    # Actions newer than this code have no word here; the others still do.
    actions = [action for action in item.allowed_actions if action in ANSWER_WORDS] or usual
    replies = []
    for action in actions:
        if is_question and action == DecisionAction.DECISION_ACTION_RESPOND:
            replies.append("您的答案" if alone else f"“{number} 您的答案”")
        else:
            replies.append(f"“{number} {ANSWER_WORDS[action]}{_WITH_MORE.get(action, '')}”")
    listed = "或".join(("、".join(replies[:-1]), replies[-1])) if len(replies) > 1 else replies[0]
    return f"请回复{listed}"
