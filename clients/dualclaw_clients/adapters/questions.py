"""Open questions as text, for channels without buttons: numbered, each with the words that answer it.

A reply is the question's number, then a word of ``ANSWER_WORDS`` (and what that word needs) or, for a question,
the answer itself: ``1 同意``, ``1 修改 {"city": "上海"}``, ``2 明天下午``. A single question takes any message for its
answer. Whoever reads replies takes the words from here.

A channel that reads no numbered replies says so (``numbered=False``) and promises none: there a message answers the
only question, and everything else is for a channel where it can be decided.
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


ELSEWHERE: Final = "请在支持审批的渠道（例如网页）处理"
"""Said of a question that no reply in the channel can answer."""
BY_MESSAGE: Final = "请直接回复您的答案"


def questions_text(items: Sequence[InterruptItem], *, numbered: bool = True) -> str:
    """Return all questions in order, numbered from 1 and one blank line apart; "" when there are none.

    ``numbered``: the channel takes numbered replies.
    """
    alone = len(items) == 1
    if numbered:
        how = [_how_to_answer(number, item, alone) for number, item in enumerate(items, 1)]
    else:
        answered = only_question(items)
        how = [BY_MESSAGE if answered is not None and item.id == answered.id else ELSEWHERE for item in items]
    told = [_question_text(number, item) for number, item in enumerate(items, 1)]
    return "\n\n".join(f"{question}\n{answer}" for question, answer in zip(told, how, strict=True))


def only_question(items: Sequence[InterruptItem]) -> InterruptItem | None:
    """Return the question that a message answers: the only one of its kind, if words can answer it; else None."""
    asked = [item for item in items if item.kind == InterruptKind.INTERRUPT_KIND_QUESTION]
    if len(asked) != 1:
        return None
    allowed = asked[0].allowed_actions
    return asked[0] if not allowed or DecisionAction.DECISION_ACTION_RESPOND in allowed else None


def _question_text(number: int, item: InterruptItem) -> str:
    is_question = item.kind == InterruptKind.INTERRUPT_KIND_QUESTION
    fallback = "请补充信息" if is_question else f"是否允许执行 {item.tool_name or '这一步'}？"
    lines = [f"{number}. {item.prompt.strip() or fallback}"]
    if not is_question and item.args_json:
        cut = item.args_json[:MAX_ARGS]
        lines.append(f"参数：{cut}{'…' if len(item.args_json) > MAX_ARGS else ''}")
    return "\n".join(lines)


def _how_to_answer(number: int, item: InterruptItem, alone: bool) -> str:
    is_question = item.kind == InterruptKind.INTERRUPT_KIND_QUESTION
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
