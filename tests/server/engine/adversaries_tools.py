"""Adversaries with tools that do everything a tool should not, and models that call them wrongly."""

import asyncio
from collections.abc import Mapping, Sequence

from dualclaw import EngineEvent
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Limits
from dualclaw_server.engine.outcome import Ask, End, Fail, Replace, Suspend
from dualclaw_server.engine.tool import Tool, ToolContext, tool
from dualclaw_server.interceptors import ToolRetryInterceptor

from .adversaries import END, Adversary, Entry, Traps, agent, calls, says
from .conftest import echo

PAIR = {"call": "echo", "args": {"text": "beside"}}
"""A good call beside the bad one: one failing sibling hides nothing."""


def beside(target: Tool, *codes: str, size: int = 1_000_000, **args: object) -> Adversary:
    """Return an adversary that calls a tool beside a good one and then ends."""

    def sibling_is_fine(events: Sequence[EngineEvent]) -> bool:
        return any(event.step.step.result == "<beside>" for event in events)

    limits = Limits(max_steps=6, wall_time=50, max_result=2_000)
    script = [says({"call": target.name, "args": args}, PAIR, step=0), END]
    return Adversary(
        [agent(target, echo, limits=limits)], script, "finished", codes=codes, size=size, holds=sibling_is_fine
    )


# Calls that are broken


def truncated_arguments(_: Traps) -> Adversary:
    raws = ["{", '{"text": "a', "null", "[]", '"text"', "{}{}", "\x00", '{"text": "a"} trailing', "[" * 5_000]
    items: list[dict[str, object]] = [{"call": "echo", "raw_args": raw} for raw in raws]
    return Adversary([agent(echo)], [says(*items, step=0), END], "finished", codes=["tool.bad_arguments"])


def arguments_that_parse_oddly(_: Traps) -> Adversary:
    async def anything(value: object = None) -> str:
        return "taken"

    taker = Tool("anything", "Take anything.", {"type": "object"}, anything, effect="read")
    deep = '{"value":' * 3_000 + "1" + "}" * 3_000
    raws = [
        deep,
        '{"value": 1e999}',
        '{"value": NaN}',
        '{"value": ' + "9" * 5_000 + "}",
        '{"value": 1, "value": 2}',
        '{"value": "\\ud83c"}',
        '{"value": "\\u0000"}',
    ]
    items: list[dict[str, object]] = [{"call": "anything", "raw_args": raw} for raw in raws]
    return Adversary([agent(taker)], [says(*items, step=0), END], "finished")


# Tools that do not do their part


def a_tool_that_hangs(_: Traps) -> Adversary:
    @tool(effect="read", timeout=0.05)
    async def hangs() -> str:
        """Never answer."""
        await asyncio.sleep(600)
        return ""

    return beside(hangs, "tool.timeout")


def a_tool_that_ignores_cancellation(traps: Traps) -> Adversary:
    @tool(effect="read", timeout=0.05)
    async def stays() -> str:
        """Stay, whatever happens."""
        while not traps.release.is_set():
            try:
                await traps.release.wait()
            except asyncio.CancelledError:
                traps.count("cancelled")
        raise ValueError("long after")

    return beside(stays, "tool.timeout")


def a_tool_that_blocks_its_thread(traps: Traps) -> Adversary:
    @tool(effect="read", timeout=0.05)
    def blocks() -> str:
        """Hold a thread."""
        traps.release_threads.wait(60)
        return "too late"

    return beside(blocks, "tool.timeout")


class Odd(BaseException):
    """Nothing that anybody expects."""


def tools_that_raise_anything(_: Traps) -> Adversary:
    errors: Mapping[str, BaseException] = {
        "exits": SystemExit(3),
        "interrupts": KeyboardInterrupt(),
        "stops": StopIteration(1),
        "stops_async": StopAsyncIteration(),
        "closes": GeneratorExit(),
        "cancels": asyncio.CancelledError(),
        "odd": Odd("odd"),
        "group": BaseExceptionGroup("several", [Odd("one"), ValueError("two")]),
        "memory": MemoryError(),
        "deep": RecursionError("too deep"),
    }

    def raiser(name: str, *, threaded: bool) -> Tool:
        async def raises() -> str:
            raise errors[name]

        def raises_in_a_thread() -> str:
            raise errors[name]

        function = raises_in_a_thread if threaded else raises
        return Tool(f"{name}_{threaded}", "Raise.", {"type": "object"}, function, effect="read")

    tools = [raiser(name, threaded=threaded) for name in errors for threaded in (False, True)]
    items: list[dict[str, object]] = [{"call": each.name, "args": {}} for each in tools]

    def all_failed(events: Sequence[EngineEvent]) -> bool:
        ends = [event.step.step.diagnosis.code for event in events if event.step.step.phase > 1]
        return ends == ["tool.failed"] * len(tools)

    return Adversary([agent(*tools)], [says(*items, step=0), END], "finished", holds=all_failed)


def a_tool_that_changes_its_arguments(traps: Traps) -> Adversary:
    async def eats(value: dict[str, object], items: list[object]) -> str:
        """Take its arguments apart and fail."""
        traps.values.append((dict(value), list(items)))
        value.clear()
        items.append("more")
        raise ConnectionError("gone")

    parameters: Mapping[str, object] = {"type": "object", "required": ["value", "items"]}
    eater = Tool("eats", "Eat.", parameters, eats, effect="read")
    script = [calls("eats", when={"step": 0}, value={"a": 1}, items=[1]), END]
    return Adversary(
        [agent(eater, guards=[ToolRetryInterceptor(3, 0.001)])],
        script,
        "finished",
        codes=["tool.failed"],
        holds=lambda _: traps.values == [({"a": 1}, [1])] * 3,
    )


def a_tool_that_fills_the_session(_: Traps) -> Adversary:
    @tool(effect="read")
    async def hoards(context: ToolContext) -> str:
        """Keep as much as it can."""
        for number in range(200):
            context.trace.session.set(f"hoard{number}", "h" * 100_000)
        return "kept"

    return Adversary(
        [agent(hoards)], [calls("hoards", when={"step": 0}), END], "finished", codes=["tool.failed"], size=10_000_000
    )


# Tools with wishes at bad moments


def _wishing(wish: BaseException, ends: str, says_: str = "") -> Adversary:
    @tool(effect="read")
    async def wishes() -> str:
        """Want something."""
        raise wish

    script = [says({"call": "wishes", "args": {}}, PAIR, {"call": "wishes", "args": {}}, step=0), END]
    return Adversary([agent(wishes, echo)], script, ends, says=says_)


def a_tool_that_ends_the_run_twice(_: Traps) -> Adversary:
    return _wishing(End("enough", "exited"), "exited", "enough")


def a_tool_that_fails_the_run(_: Traps) -> Adversary:
    return _wishing(Fail(EngineError("QUOTA_EXCEEDED", "No more of this.")), "quota.exceeded")


def a_tool_that_replaces_itself(_: Traps) -> Adversary:
    return _wishing(Replace(object()), "finished")


def a_tool_that_asks_about_another_call(_: Traps) -> Adversary:
    return _wishing(Suspend(Ask("May I?", call_id="not mine", allowed=("approve",))), "interrupted")


def a_tool_that_asks_beside_one_that_ends(_: Traps) -> Adversary:
    @tool(effect="read")
    async def asks() -> str:
        """Ask people."""
        raise Suspend(Ask("May I?", kind="question"))

    @tool(effect="read")
    async def ends() -> str:
        """End the run while its sibling asks."""
        await asyncio.sleep(0.01)
        raise End("over", "exited")

    script = [says({"call": "asks", "args": {}}, {"call": "ends", "args": {}}, PAIR, step=0), END]
    return Adversary([agent(asks, ends, echo)], script, "exited", says="over")


MISUSING: Sequence[Entry] = (
    truncated_arguments,
    arguments_that_parse_oddly,
    a_tool_that_hangs,
    a_tool_that_ignores_cancellation,
    a_tool_that_blocks_its_thread,
    tools_that_raise_anything,
    a_tool_that_changes_its_arguments,
    a_tool_that_fills_the_session,
    a_tool_that_ends_the_run_twice,
    a_tool_that_fails_the_run,
    a_tool_that_replaces_itself,
    a_tool_that_asks_about_another_call,
    a_tool_that_asks_beside_one_that_ends,
)
