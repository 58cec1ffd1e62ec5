"""Adversaries that never come to an end: loops, floods of calls, plans without end."""

import asyncio
from collections.abc import Mapping, Sequence

from dualclaw import EngineEvent
from dualclaw_server.engine.agent import Limits
from dualclaw_server.engine.plan import PlanReAct
from dualclaw_server.engine.tool import tool
from dualclaw_server.interceptors import StopLoopInterceptor

from .adversaries import END, Adversary, Entry, Traps, agent, calls, says
from .conftest import echo

TIGHT = StopLoopInterceptor(2, 2)
LOOPS = Limits(max_steps=20, wall_time=50)


@tool(effect="read")
async def pair(first: int, second: int) -> str:
    """Say two numbers."""
    return f"{first} {second}"


@tool
async def act(text: str) -> str:
    """Do something that counts each time it is done."""
    return f"did {text}"


def _ends_of(events: Sequence[EngineEvent]) -> int:
    return sum(event.step.step.phase > 1 for event in events)


def the_same_call(_: Traps) -> Adversary:
    return Adversary([agent(echo, guards=[TIGHT], limits=LOOPS)], [calls("echo", text="a")], "loop_detected")


def the_same_call_without_a_guard(_: Traps) -> Adversary:
    return Adversary([agent(echo)], [says({"text": "So."}, tools=False), calls("echo", text="a")], "step_limit")


def a_then_b(_: Traps) -> Adversary:
    script = [calls("echo", when={"tool_result": "^<a>"}, text="b"), calls("echo", text="a")]
    return Adversary([agent(echo, guards=[TIGHT], limits=LOOPS)], script, "loop_detected")


def another_order_of_keys(_: Traps) -> Adversary:
    one, other = '{"first": 1, "second": 2}', '{ "second":2,"first":1 }'
    script = [calls("pair", when={"step": step}, raw=other if step % 2 else one) for step in range(20)]
    return Adversary([agent(pair, guards=[TIGHT], limits=LOOPS)], [*script, END], "loop_detected")


def an_act_again_and_again(_: Traps) -> Adversary:
    return Adversary(
        [agent(act, guards=[TIGHT], limits=LOOPS)], [calls("act", text="a")], "loop_detected", codes=["loop.warned"]
    )


def one_unknown_tool(_: Traps) -> Adversary:
    return Adversary(
        [agent(echo, guards=[TIGHT], limits=LOOPS)], [calls("ghost")], "loop_detected", codes=["tool.unknown"]
    )


def ever_new_unknown_tools(_: Traps) -> Adversary:
    script = [calls(f"ghost_{step}", when={"step": step}) for step in range(20)]
    return Adversary([agent(echo, guards=[TIGHT])], [*script, END], "step_limit", codes=["tool.unknown"])


def bad_arguments_again_and_again(_: Traps) -> Adversary:
    return Adversary(
        [agent(echo, guards=[TIGHT], limits=LOOPS)],
        [calls("echo", raw='{"text": ')],
        "loop_detected",
        codes=["tool.bad_arguments"],
    )


def polling(_: Traps) -> Adversary:
    guard = StopLoopInterceptor(2, 2, allow={"echo": 4})
    return Adversary([agent(echo, guards=[guard], limits=LOOPS)], [calls("echo", text="pending")], "loop_detected")


def polling_what_changes(traps: Traps) -> Adversary:
    @tool(effect="read")
    async def poll() -> str:
        """Say something new each time."""
        return f"{traps.count('poll')} % done"

    return Adversary([agent(poll, guards=[TIGHT])], [calls("poll")], "step_limit")


def calls_where_there_are_no_tools(_: Traps) -> Adversary:
    return Adversary(
        [agent(echo)], [says({"text": "Once more."}, {"call": "echo", "args": {"text": "a"}})], "step_limit"
    )


def calls_of_an_agent_without_tools(_: Traps) -> Adversary:
    return Adversary([agent()], [says({"text": "hm"}, {"call": "echo", "args": {"text": "a"}})], "finished", says="hm")


def _many(name: str, count: int, **args: object) -> list[dict[str, object]]:
    return [{"call": name, "args": {**args, "text": str(number)}} for number in range(count)]


def five_hundred_calls_at_once(traps: Traps) -> Adversary:
    return Adversary(
        [agent(act)],
        [says(*_many("act", 500))],
        "budget_exceeded",
        codes=["tool.skipped"],
        holds=lambda events: _ends_of(events) == 500,
    )


def more_than_may_run_side_by_side(traps: Traps) -> Adversary:
    at_work: list[str] = []

    @tool(effect="read")
    async def slow(text: str) -> str:
        """Note how many are at work."""
        at_work.append(text)
        traps.values.append(len(at_work))
        await asyncio.sleep(0.001)
        at_work.remove(text)
        return text

    limits = Limits(parallel_tools=3, wall_time=50)
    script = [says(*_many("slow", 60), step=0), END]
    return Adversary([agent(slow, limits=limits)], script, "finished", holds=lambda _: set(traps.values) == {1, 2, 3})


def a_flood_in_every_step(_: Traps) -> Adversary:
    limits = Limits(max_tool_calls=30, wall_time=50)
    return Adversary(
        [agent(act, limits=limits)], [says(*_many("act", 12))], "budget_exceeded", holds=lambda e: _ends_of(e) == 36
    )


def a_flood_of_tokens(_: Traps) -> Adversary:
    usage: Mapping[str, object] = {"input_tokens": 2**31 - 1, "output_tokens": 2**31 - 1}
    turn = says({"usage": usage}, {"call": "echo", "args": {"text": "a"}})
    return Adversary([agent(echo)], [turn], "budget_exceeded")


def a_plan_revised_for_ever(_: Traps) -> Adversary:
    made: dict[str, object] = {"steps": ["look", "tell"]}
    script = [
        says({"text": "So far."}, tools=False),
        says({"call": "create_plan", "args": made}, step=0),
        calls("revise_plan", new_steps=["look again", "tell"], from_index=1),
    ]
    return Adversary([agent(echo, strategy=PlanReAct())], script, "step_limit", says="So far.")


def a_plan_that_is_nonsense(_: Traps) -> Adversary:
    script = [
        says({"text": "So."}, tools=False),
        calls("create_plan", when={"step": 0}, steps=["x" * 500] * 50),
        calls("create_plan", when={"step": 1}, steps=["x"] * 1_000),
        calls("update_plan_progress", when={"step": 2}, next_plan_index=-(10**30)),
        calls("revise_plan", when={"step": 3}, new_steps=["y"] * 50, from_index=50),
        calls("revise_plan", raw='{"new_steps": null, "from_index": 1e400}'),
    ]
    return Adversary([agent(echo, strategy=PlanReAct())], script, "step_limit")


LOOPING: Sequence[Entry] = (
    the_same_call,
    the_same_call_without_a_guard,
    a_then_b,
    another_order_of_keys,
    an_act_again_and_again,
    one_unknown_tool,
    ever_new_unknown_tools,
    bad_arguments_again_and_again,
    polling,
    polling_what_changes,
    calls_where_there_are_no_tools,
    calls_of_an_agent_without_tools,
    five_hundred_calls_at_once,
    more_than_may_run_side_by_side,
    a_flood_in_every_step,
    a_flood_of_tokens,
    a_plan_revised_for_ever,
    a_plan_that_is_nonsense,
)
