"""The engine's own words, in one table per language; an agent chooses its locale."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Locale = Literal["en", "zh"]


@dataclass(frozen=True, slots=True)
class Texts:
    """Every text the engine writes by itself. ``{}`` places are filled with ``str.format``."""

    last_answer: str
    """Added to the instructions of the last, tool-less call."""
    step_limit: str
    """Shown when even the last call gave no text."""
    cancelled: str
    """Closes a cancelled turn in the transcript, so that the model does not take it up again."""
    failed: str
    """Closes a failed turn in the transcript."""
    no_answer: str
    """Closes a turn in the transcript whose last model call added no words."""
    tool_unknown: str
    tool_bad_arguments: str
    tool_failed: str
    tool_timeout: str
    tool_abandoned: str
    tool_not_run: str
    tool_outcome_unknown: str
    result_truncated: str
    empty_result: str
    budget_tokens: str
    budget_tool_calls: str
    wall_time: str
    how_to_approve: str
    """Hint of a step that waits for an approval."""
    how_to_respond: str
    """Hint of a step that waits for an answer."""
    rejected: str
    """Shown when a rejection ends the run."""
    tool_rejected: str
    tool_skipped: str
    approval_expired: str
    edited: str
    """Tells the model that a person changed the arguments; ``args`` is what they are now."""
    comment: str
    """Tells the model what a person said with their decision."""
    outcome_unknown_again: str
    """Asked before a call is repeated whose first outcome nobody knows."""
    interceptor_withheld: str
    """A guard failed, so a call was not run or its result is withheld."""
    too_deep: str
    transfer_unknown: str
    transfer_limit: str
    ended_early: str
    """Result of a call that was not run because the run ended."""


TEXTS: Mapping[Locale, Texts] = MappingProxyType(
    {
        "en": Texts(
            last_answer="You have no steps left and tools are no longer available. Answer now with what you know.",
            step_limit="The limit of steps was reached before an answer was found.",
            cancelled="[This turn was cancelled before it was finished.]",
            failed="[This turn failed before it was finished.]",
            no_answer="[Nothing was added.]",
            tool_unknown="There is no tool named {name}.",
            tool_bad_arguments="The arguments of {name} do not fit its schema.",
            tool_failed="{name} failed.",
            tool_timeout="{name} did not end within {seconds:g} s.",
            tool_abandoned="The run was stopped while {name} was at work; its result is unknown.",
            tool_not_run="{name} was not run.",
            tool_outcome_unknown="{name} was started, and nobody knows how it ended. It was not run again.",
            result_truncated="[{count} characters left out]",
            empty_result="[no output]",
            budget_tokens="The token budget of this run is used up.",
            budget_tool_calls="The tool calls of this run are used up.",
            wall_time="The time of this run is used up.",
            how_to_approve="Approve or reject it, or change its arguments.",
            how_to_respond="Answer it; a message in the conversation does.",
            rejected="It was not done: {name} was rejected.",
            tool_rejected="A person rejected {name}.",
            tool_skipped="A person skipped {name}.",
            approval_expired="Nobody answered in time.",
            edited="A person changed the arguments before it was run, to: {args}",
            comment="A person said: {comment}",
            outcome_unknown_again="{name} was started before with these arguments and nobody knows how it ended. "
            "Run it again?",
            interceptor_withheld="A guard of this engine failed, so {name} is withheld.",
            too_deep="{name} was not run: agents call one another more than {count} deep.",
            transfer_unknown="There is no agent named {name} to hand over to.",
            transfer_limit="Agents have handed over {count} times; no further time.",
            ended_early="{name} was not run, because the run ended.",
        ),
        "zh": Texts(
            last_answer="步骤已用完，工具不再可用。请根据已知信息直接回答。",
            step_limit="在得到答案之前已达到步骤上限。",
            cancelled="[本轮在完成前被取消。]",
            failed="[本轮在完成前失败。]",
            no_answer="[没有补充内容。]",
            tool_unknown="没有名为 {name} 的工具。",
            tool_bad_arguments="{name} 的参数不符合其模式。",
            tool_failed="{name} 执行失败。",
            tool_timeout="{name} 未在 {seconds:g} 秒内完成。",
            tool_abandoned="运行停止时 {name} 仍在执行，其结果未知。",
            tool_not_run="{name} 未执行。",
            tool_outcome_unknown="{name} 已开始执行，但结果无法得知，未再次执行。",
            result_truncated="[省略 {count} 个字符]",
            empty_result="[无输出]",
            budget_tokens="本次运行的令牌预算已用完。",
            budget_tool_calls="本次运行的工具调用次数已用完。",
            wall_time="本次运行的时间已用完。",
            how_to_approve="请批准、拒绝，或修改参数。",
            how_to_respond="请回答；在对话中发送消息即可。",
            rejected="未执行：{name} 被拒绝。",
            tool_rejected="{name} 被人工拒绝。",
            tool_skipped="{name} 被人工跳过。",
            approval_expired="未在期限内得到答复。",
            edited="执行前参数已被人工修改为：{args}",
            comment="人工意见：{comment}",
            outcome_unknown_again="{name} 之前已用相同参数开始执行，但结果无人知晓。是否再次执行？",
            interceptor_withheld="引擎的防护组件出错，{name} 已被拦下。",
            too_deep="未执行 {name}：智能体嵌套超过 {count} 层。",
            transfer_unknown="没有名为 {name} 的智能体可以移交。",
            transfer_limit="智能体已移交 {count} 次，不再移交。",
            ended_early="运行已结束，未执行 {name}。",
        ),
    }
)
