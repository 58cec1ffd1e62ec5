"""Plan and execute: one agent plans and replans, another carries out a step at a time.

The planner is a PlanReAct agent whose plan stands in the instructions of each of its calls. It has no tools for the
work itself: every step goes to the executor, an agent as a tool, whose context is that step alone however long the
whole task gets. When a step turns out other than expected, the planner revises what is still to come. Run it from
the folder above this one:

    DUALCLAW_AGENTS=examples.plan_execute:AGENTS DUALCLAW_MODEL=scripted:examples/plan_execute.json dualclaw-server
"""

from dualclaw_server.engine.agent import Agent, Limits, agent_tool
from dualclaw_server.engine.plan import PlanReAct
from dualclaw_server.tools.assistant import calculate, current_time

EXECUTOR = Agent(
    "executor",
    description="Carries out one step of a plan and says what came of it.",
    instructions="You carry out one step. Use your tools, then answer with the result alone.",
    tools=[calculate, current_time],
    limits=Limits(max_steps=8, wall_time=120),
)
STEP = {
    "type": "object",
    "properties": {
        "step": {"type": "string", "description": "The step, with every number and name it needs."},
    },
    "required": ["step"],
    "additionalProperties": False,
}
PLANNER = Agent(
    "planner",
    description="Solves tasks of several steps by a plan.",
    instructions="You solve tasks by a plan. Give each step to execute_step, mark it done, and revise the plan when a "
    "result calls for it. Answer with the result of the last step.",
    tools=[agent_tool(EXECUTOR, name="execute_step", parameters=STEP)],
    strategy=PlanReAct(),
    limits=Limits(max_steps=40),
)
AGENTS = (PLANNER,)
