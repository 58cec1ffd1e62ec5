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
    media_left_out: str
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
    outcome_unknown_ask: str
    """Asked about a call that a crash interrupted, when its tool wants people to settle that."""
    interceptor_withheld: str
    """A guard failed, so a call was not run or its result is withheld."""
    too_deep: str
    transfer_unknown: str
    transfer_limit: str
    transfer_below: str
    """A sub-agent wanted to hand the conversation over, which is not its own."""
    transfer_description: str
    transfer_target: str
    transferred: str
    handoff_unknown: str
    agent_silent: str
    """A sub-agent ended without a word."""
    ended_early: str
    """Result of a call that was not run because the run ended."""
    plan_create: str
    """Description of a tool; so are the next two."""
    plan_update: str
    plan_revise: str
    plan_steps: str
    plan_index: str
    plan_guide: str
    """Added to the instructions while there is no plan."""
    plan_follow: str
    """Stands above the board in the instructions."""
    plan_title: str
    plan_done: str
    plan_current: str
    plan_todo: str
    plan_over: str
    """Told when the last step is done."""
    plan_too_short: str
    plan_too_long: str
    plan_missing: str
    plan_bad_index: str
    plan_nothing_new: str
    plan_changed: str
    """Another call of the same batch changed the plan first."""


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
            media_left_out="[{count} images or files left out: too many or too large]",
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
            outcome_unknown_ask="{name} was started, and nobody knows how it ended. Approve it to run it again, answer "
            "with what came of it, or skip it to go on without knowing.",
            interceptor_withheld="A guard of this engine failed, so {name} is withheld.",
            too_deep="{name} was not run: agents call one another more than {count} deep.",
            transfer_unknown="There is no agent named {name} to hand over to.",
            transfer_limit="Agents have handed over {count} times; no further time.",
            transfer_below="An agent that works for another one cannot hand the conversation over.",
            transfer_description="Hand this conversation over to another agent, which answers from then on: {names}.",
            transfer_target="One of: {names}.",
            transferred="Handed over to {name}.",
            handoff_unknown="A tool's handoff must be transfer or exit, not {kind}.",
            agent_silent="It ended without an answer.",
            ended_early="{name} was not run, because the run ended.",
            plan_create="Make a plan for a task that takes several steps, before you work on it. It replaces any plan "
            "there is.",
            plan_update="Say which step of the plan you work on next; every step before it is done.",
            plan_revise="Replace the plan's steps from one on, when what you learned makes them wrong.",
            plan_steps="Steps in order, a short sentence each, without numbers.",
            plan_index="Number of a step, from 1; one more than the last: after the last step.",
            plan_guide="If the task takes several steps, call create_plan first. If it does not, answer at once.",
            plan_follow="Work along this plan, one step after the other. Call update_plan_progress when a step is "
            "done, and revise_plan when the plan turns out to be wrong. Answer when every step is done.",
            plan_title="Plan, {done} of {count} done:",
            plan_done="done",
            plan_current="now",
            plan_todo="to do",
            plan_over="Every step is done. Answer now.",
            plan_too_short="One step needs no plan, so none was made. Do it, or answer directly.",
            plan_too_long="The plan would have {count} steps; at most {limit} are possible.",
            plan_missing="There is no plan yet; create_plan makes one.",
            plan_bad_index="There is no place {index} in a plan of {count} steps; use 1 to {last} ({last}: after the "
            "last step).",
            plan_nothing_new="No step has any words, so the plan stays as it is.",
            plan_changed="Another call changed the plan at the same time, so this one changed nothing; look at the "
            "plan and try again.",
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
            media_left_out="[省略 {count} 个图片或文件：数量过多或体积过大]",
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
            outcome_unknown_ask="{name} 已开始执行，但结果无法得知。批准则再次执行，"
            "回答则说明其结果，跳过则在结果未知的情况下继续。",
            interceptor_withheld="引擎的防护组件出错，{name} 已被拦下。",
            too_deep="未执行 {name}：智能体嵌套超过 {count} 层。",
            transfer_unknown="没有名为 {name} 的智能体可以移交。",
            transfer_limit="智能体已移交 {count} 次，不再移交。",
            transfer_below="为其他智能体工作的智能体不能移交对话。",
            transfer_description="将本对话移交给另一个智能体，此后由它回答：{names}。",
            transfer_target="可选：{names}。",
            transferred="已移交给 {name}。",
            handoff_unknown="工具的移交类型必须是 transfer 或 exit，而不是 {kind}。",
            agent_silent="它没有给出任何回答。",
            ended_early="运行已结束，未执行 {name}。",
            plan_create="任务需要多个步骤时，先制定计划再开始工作；会替换已有的计划。",
            plan_update="说明接下来执行计划的第几步；它之前的步骤都视为已完成。",
            plan_revise="当新的信息表明计划有误时，从某一步起替换后面的步骤。",
            plan_steps="按顺序列出步骤，每步一句话，不带编号。",
            plan_index="步骤的编号，从 1 开始；最后一步的编号加一表示全部步骤之后。",
            plan_guide="如果任务需要多个步骤，请先调用 create_plan；否则直接回答。",
            plan_follow="请按照以下计划逐步执行。完成一步后调用 update_plan_progress；发现计划有误时调用 revise_plan；"
            "全部完成后再回答。",
            plan_title="计划，已完成 {done}/{count}：",
            plan_done="已完成",
            plan_current="进行中",
            plan_todo="待办",
            plan_over="所有步骤均已完成，请给出回答。",
            plan_too_short="只有一步，无需计划，未制定计划。请直接执行或回答。",
            plan_too_long="计划将有 {count} 步，最多只能有 {limit} 步。",
            plan_missing="还没有计划；请用 create_plan 制定。",
            plan_bad_index="计划共 {count} 步，没有位置 {index}；可用 1 到 {last}（{last} 表示最后一步之后）。",
            plan_nothing_new="步骤没有任何内容，计划保持不变。",
            plan_changed="另一个调用同时修改了计划，本次未做任何更改；请查看计划后重试。",
        ),
    }
)
