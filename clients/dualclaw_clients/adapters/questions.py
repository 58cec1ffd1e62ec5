"""Open questions as text, for channels without buttons: numbered, each with the words that answer it.

A reply is the question's number, then a word of ``ANSWER_WORDS`` (and what that word needs) or, for a question,
the answer itself: ``1 同意``, ``2 明天下午``. The only open question takes any message for its answer. Whoever reads
replies takes the words from here.

- Nobody approves what they have not seen. Arguments that do not fit are cut, and then only refusing is offered here.
- What is shown is what is there: characters that turn text around or take no space are shown as their escapes.
- Changing a call's arguments needs a place to edit JSON, so it is offered by channels that have one.

A channel that reads no numbered replies says so (``numbered=False``) and promises none: there a message answers the
only question, and everything else is for a channel where it can be decided.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from types import MappingProxyType
from typing import Final, Literal

from dualclaw import DecisionAction, InterruptItem, InterruptKind

Locale = Literal["zh", "en"]

_APPROVE = DecisionAction.DECISION_ACTION_APPROVE
_REJECT = DecisionAction.DECISION_ACTION_REJECT
_EDIT = DecisionAction.DECISION_ACTION_EDIT
_SKIP = DecisionAction.DECISION_ACTION_SKIP
_RESPOND = DecisionAction.DECISION_ACTION_RESPOND

MAX_ARGS: Final = 4_000
"""Characters of a call's arguments that are shown; a person must see what they approve, a chat has limits."""
_UNSEEN = re.compile(
    # Controls but newline and tab; marks and overrides of direction; what takes no space, fillers among them; variation
    # selectors but that of emoji; tags; joiners outside of emoji and of the scripts that need them.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u2060-\u2065\u206a-\u206f\u2800\u3164\ufeff\uffa0"
    "\ufff9-\ufffb\ufe00-\ufe0e\U000e0000-\U000e0fff]"
    "|(?<![\u0590-\u0dff])\u200c|(?<![\u0590-\u0dff\u2600-\u27bf\ufe0f\U0001f000-\U0001faff])\u200d"
)


@dataclass(frozen=True, slots=True)
class Wording:
    """What an assembled answer says in its own words, in one language. ``{...}`` is filled in."""

    words: Mapping[DecisionAction.ValueType, str]
    """The word that stands for an action in a reply."""
    generating: str
    """For an answer whose content is still being made."""
    cut: str
    """Behind a body that was longer than is sent."""
    failed: str
    """For a failure that names no reason."""
    ask: str
    """For a question without a prompt."""
    allow: str
    """For an approval without a prompt."""
    this_step: str
    """For a call without a name."""
    tool: str
    """Names the tool of an approval whose prompt does not."""
    arguments: str
    cut_arguments: str
    """Why an approval cannot be given here."""
    expires: str
    reply: str
    quoted: str
    between: str
    """Between two of several replies."""
    last: str
    """Before the last of several replies."""
    your_answer: str
    text: str
    """Stands for the text a reply needs beside its word."""
    by_message: str
    """Said of the only open question: a message answers it."""
    elsewhere: str
    """Said of a question that no reply in the channel can answer."""


ZH: Final = Wording(
    words=MappingProxyType({_APPROVE: "同意", _REJECT: "拒绝", _EDIT: "修改", _SKIP: "跳过", _RESPOND: "回答"}),
    generating="内容正在生成",
    cut="内容过长已截断",
    failed="❌ 处理失败",
    ask="请补充信息",
    allow="是否允许执行 {tool}？",
    this_step="这一步",
    tool="工具：{tool}",
    arguments="参数：{args}",
    cut_arguments="参数过长，未完整显示，因此不能在这里同意；请在网页或命令行（dualclaw resume）查看后同意",
    expires="有效期至 {time}",
    reply="请回复{replies}",
    quoted="“{reply}”",
    between="、",
    last="或",
    your_answer="您的答案",
    text="内容",
    by_message="请直接回复您的答案",
    elsewhere="请在支持审批的渠道（例如网页）处理",
)
EN: Final = Wording(
    words=MappingProxyType({_APPROVE: "ok", _REJECT: "no", _EDIT: "edit", _SKIP: "skip", _RESPOND: "answer"}),
    generating="The content is still being made",
    cut="The answer was too long and has been cut",
    failed="❌ This failed",
    ask="Please say more",
    allow="Allow {tool} to run?",
    this_step="this step",
    tool="Tool: {tool}",
    arguments="Arguments: {args}",
    cut_arguments="The arguments are too long to be shown whole, so this cannot be approved here; "
    "approve it on the page or with the command line (dualclaw resume)",
    expires="Valid until {time}",
    reply="Reply {replies}",
    quoted='"{reply}"',
    between=", ",
    last=" or ",
    your_answer="YOUR ANSWER",
    text="TEXT",
    by_message="Just reply with your answer",
    elsewhere="This is decided where approvals are supported, such as on the page",
)
WORDINGS: Final[Mapping[Locale, Wording]] = MappingProxyType({"zh": ZH, "en": EN})
"""The one table of these words."""

ANSWER_WORDS: Final = ZH.words


def questions_text(
    items: Sequence[InterruptItem],
    *,
    numbered: bool = True,
    numbers: Sequence[int] | None = None,
    wording: Wording = ZH,
) -> str:
    """Return all questions in order, one blank line apart; "" when there are none.

    Args:
        items: the open questions.
        numbered: the channel takes numbered replies.
        numbers: of the items; None: from 1.
        wording: the language.
    """
    answered = only_question(items)
    told = []
    for number, item in zip(numbers or range(1, len(items) + 1), items, strict=True):
        if answered is not None and item.id == answered.id:
            how = _only_question_how(number, item, wording) if numbered else wording.by_message
        else:
            how = _how_to_answer(number, item, wording) if numbered else wording.elsewhere
        told.append("\n".join([*_question_lines(number, item, wording), how]))
    return "\n\n".join(told)


def only_question(items: Sequence[InterruptItem]) -> InterruptItem | None:
    """Return the question that a message answers: the only one of its kind, if words can answer it; else None."""
    asked = [item for item in items if item.kind == InterruptKind.INTERRUPT_KIND_QUESTION]
    if len(asked) != 1:
        return None
    allowed = asked[0].allowed_actions
    return asked[0] if not allowed or _RESPOND in allowed else None


def is_shown_whole(item: InterruptItem) -> bool:
    """Return whether a question is shown with all of its arguments."""
    return len(item.args_json) <= MAX_ARGS


def actions_of(item: InterruptItem) -> list[DecisionAction.ValueType]:
    """Return the actions a question takes that have a word; the usual ones when it names none of them."""
    # Actions newer than this code have no word here; the others still do.
    known = [action for action in item.allowed_actions if action in ANSWER_WORDS]
    return known or ([_RESPOND] if item.kind == InterruptKind.INTERRUPT_KIND_QUESTION else [_APPROVE, _REJECT])


def visible(text: str) -> str:
    """Return a text whose characters that hide or turn around other text are shown as escapes."""
    return _UNSEEN.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    """Return the escape JSON has for a character: one of beyond U+FFFF is two units of UTF-16."""
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _question_lines(number: int, item: InterruptItem, wording: Wording) -> list[str]:
    is_question = item.kind == InterruptKind.INTERRUPT_KIND_QUESTION
    fallback = wording.ask if is_question else wording.allow.format(tool=item.tool_name or wording.this_step)
    lines = [f"{number}. {visible(item.prompt.strip() or fallback)}"]
    if not is_question and not re.search(rf"(?<!\w){re.escape(item.tool_name)}(?!\w)", lines[0]):
        lines.append(wording.tool.format(tool=visible(item.tool_name)))
    if not is_question and item.args_json:
        cut = "" if is_shown_whole(item) else "…"
        lines.append(wording.arguments.format(args=visible(item.args_json[:MAX_ARGS]) + cut))
    if item.HasField("expire_time"):
        try:
            time = item.expire_time.ToDatetime(UTC)
        except ValueError:  # out of the range of dates: as good as never
            return lines
        lines.append(wording.expires.format(time=f"{time:%Y-%m-%d %H:%M} UTC"))
    return lines


def _only_question_how(number: int, item: InterruptItem, wording: Wording) -> str:
    others = [_reply(number, item, action, wording) for action in actions_of(item) if action != _RESPOND]
    return wording.by_message + "".join(wording.last + reply for reply in others)


def _how_to_answer(number: int, item: InterruptItem, wording: Wording) -> str:
    actions = [action for action in actions_of(item) if action != _EDIT]
    lines = []
    if not is_shown_whole(item) and _APPROVE in actions:
        actions.remove(_APPROVE)
        lines.append(wording.cut_arguments)
    replies = [_reply(number, item, action, wording) for action in actions]
    if replies:
        listed = wording.last.join(filter(None, (wording.between.join(replies[:-1]), replies[-1])))
        lines.append(wording.reply.format(replies=listed))
    return "\n".join(lines) or wording.elsewhere


def _reply(number: int, item: InterruptItem, action: DecisionAction.ValueType, wording: Wording) -> str:
    if action != _RESPOND:
        rest = wording.words[action]
    elif item.kind == InterruptKind.INTERRUPT_KIND_QUESTION:
        rest = wording.your_answer
    else:
        rest = f"{wording.words[action]} {wording.text}"
    return wording.quoted.format(reply=f"{number} {rest}")
