"""PlanReAct: a loop of reasoning and acting along a plan that the model makes, follows and revises.

Rules

- The plan is the model's: three tools make it (``create_plan``), say how far it is (``update_plan_progress``) and
  change what is still to come (``revise_plan``). Steps count from 1; a place that the plan does not have is an error
  that says which there are, because a wrong place taken for a near one would mark work as done that was not.
- It lives in the checkpoint of the agent that made it, so it survives crashes and resumes, and agents that work side
  by side have one each. Its board stands in the instructions of every model call, never in the conversation.
- A plan of one step is none: the model is told to answer at once.
- Interceptors review each plan before it counts (``on_plan``). Where two calls of one batch change it, the one whose
  review took longer would undo the other, so it fails instead and can be made again.
- A step keeps its words: only what marks it as a list's item is taken off ("1. ", "- "), not the 3 of "3 retries".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from dualclaw_server.engine.checkpoint import Plan
from dualclaw_server.engine.strategy import ReAct
from dualclaw_server.engine.texts import Texts
from dualclaw_server.engine.tool import NotDone, Tool, ToolContext, ToolFunction

if TYPE_CHECKING:
    from dualclaw_server.engine.scope import Scope

CREATE = "create_plan"
UPDATE = "update_plan_progress"
REVISE = "revise_plan"
MAX_STEPS = 50
"""Steps of a plan."""
MAX_STEP = 500
"""Characters of a step."""

_MARKER = re.compile(
    r"""\s*(?:
        [-*+•·–—‣▪]\s+(?:\[[ xX✓]?\]\s+)?       # - item, * item, - [x] item
      | \[[ xX✓]\]\s+                           # [ ] item
      | [(（]\d{1,3}[)）]\s*                      # (1) item
      | \d{1,3}[.)](?:\s+|(?=[^\x00-\x7f]))      # 1. item, 1) item, 1.项目; not 3.5 of it, not 3.x
      | \d{1,3}[:：](?:\s+|(?=[^\x00-\x7f]))      # 1: item; not 10:30
      | \d{1,3}[、．]\s*                          # 1、项目
      | [一二三四五六七八九十]{1,3}、\s*             # 一、项目
      | (?:step|步骤|第)\s*\d{1,3}\s*步?\s*[:：.)-]\s+|(?:步骤|第)\s*\d{1,3}\s*步?\s*[:：、]\s*
    )""",
    re.VERBOSE | re.IGNORECASE,
)


class PlanReAct(ReAct):
    """Plan first, then reason and act along the plan."""

    name = "plan_react"

    def tools_in(self, texts: Texts) -> Sequence[Tool]:
        """Return the tools that make and change the plan."""
        return _tools(texts)

    def guidance(self, scope: Scope) -> str:
        """Return the board of the plan, or, while there is none, when to make one."""
        checkpoint, texts = scope.trace.checkpoint, scope.texts
        if not checkpoint.HasField("plan"):
            return texts.plan_guide
        return f"{texts.plan_follow}\n\n{board(checkpoint.plan, texts)}"


def board(plan: Plan, texts: Texts) -> str:
    """Return a plan as text: each step with its number and whether it is done, at work or still to come."""
    lines = []
    for number, step in enumerate(plan.steps, 1):
        mark = texts.plan_done if number <= plan.done else texts.plan_todo
        if number == plan.done + 1:
            mark = texts.plan_current
        lines.append(f"{number}. [{mark}] {step}")
    return "\n".join([texts.plan_title.format(done=plan.done, count=len(plan.steps)), *lines])


def clean_step(text: str) -> str:
    """Return a step as one line without what marks it as an item of a list."""
    line = " ".join(text.split())
    for _ in range(3):  # "- 1. item" has two
        marker = _MARKER.match(line)
        if marker is None or marker.end() == len(line):
            break
        line = line[marker.end() :]
    return line if any(character.isalpha() for character in line) else ""


# The tools


@cache
def _tools(texts: Texts) -> tuple[Tool, ...]:
    async def create_plan(steps: list[str], context: ToolContext) -> str:
        made = _cleaned(steps)
        if len(made) <= 1:
            context.trace.checkpoint.ClearField("plan")
            return texts.plan_too_short
        before = _copy(_plan_of(context))
        return board(_set(context, before, await _reviewed(context, made, texts), 0, texts), texts)

    async def update_plan_progress(next_plan_index: int, context: ToolContext) -> str:
        plan = _existing(context, texts)
        count = len(plan.steps)
        if not 1 <= next_plan_index <= count + 1:
            raise NotDone(texts.plan_bad_index.format(index=next_plan_index, count=count, last=count + 1))
        plan.done = next_plan_index - 1
        over = plan.done == count
        return f"{board(plan, texts)}\n{texts.plan_over}" if over else board(plan, texts)

    async def revise_plan(new_steps: list[str], from_index: int, context: ToolContext) -> str:
        plan = _existing(context, texts)
        count = len(plan.steps)
        if not 1 <= from_index <= count + 1:
            raise NotDone(texts.plan_bad_index.format(index=from_index, count=count, last=count + 1))
        added = _cleaned(new_steps)
        if not added:
            raise NotDone(texts.plan_nothing_new)
        steps = [*plan.steps[: from_index - 1], *added]
        if len(steps) > MAX_STEPS:
            raise NotDone(texts.plan_too_long.format(count=len(steps), limit=MAX_STEPS))
        before = _copy(plan)
        done = min(plan.done, from_index - 1)
        return board(_set(context, before, await _reviewed(context, steps, texts), done, texts), texts)

    step = {"type": "string", "minLength": 1, "maxLength": MAX_STEP}
    steps = {"type": "array", "items": step, "maxItems": MAX_STEPS, "description": texts.plan_steps}
    index = {"type": "integer", "description": texts.plan_index}
    return (
        _tool(CREATE, texts.plan_create, {"steps": steps}, create_plan),
        _tool(UPDATE, texts.plan_update, {"next_plan_index": index}, update_plan_progress),
        _tool(REVISE, texts.plan_revise, {"new_steps": steps, "from_index": index}, revise_plan),
    )


def _tool(name: str, description: str, properties: dict[str, object], function: ToolFunction) -> Tool:
    parameters: dict[str, object] = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False
    return Tool(name, description, parameters, function, kind="thinking", effect="read", context_parameter="context")


def _plan_of(context: ToolContext) -> Plan:
    return context.trace.checkpoint.plan


def _existing(context: ToolContext, texts: Texts) -> Plan:
    if not context.trace.checkpoint.HasField("plan"):
        raise NotDone(texts.plan_missing)
    return _plan_of(context)


def _cleaned(steps: Sequence[str]) -> list[str]:
    return [step for step in map(clean_step, steps) if step]


async def _reviewed(context: ToolContext, steps: Sequence[str], texts: Texts) -> list[str]:
    """Return the steps as interceptors want them. Raises Outcome; NotDone when none is left."""
    reviewed = _cleaned(await context.trace.review_plan(steps))
    if not reviewed:
        raise NotDone(texts.plan_nothing_new)
    return reviewed


def _set(context: ToolContext, before: Plan, steps: Sequence[str], done: int, texts: Texts) -> Plan:
    plan = _plan_of(context)
    if plan != before:
        raise NotDone(texts.plan_changed)
    del plan.steps[:]
    plan.steps.extend(steps)
    plan.done = min(done, len(steps))
    return plan


def _copy(plan: Plan) -> Plan:
    copied = Plan()
    copied.CopyFrom(plan)
    return copied
