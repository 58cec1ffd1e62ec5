"""Adversaries with tools that do everything a tool should not, and models that call them wrongly."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence

from dualclaw import ContentPart, EngineEvent, Media
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Limits
from dualclaw_server.engine.outcome import Ask, End, Fail, Replace, Suspend
from dualclaw_server.engine.tool import Tool, ToolContext, ToolOutput, ToolRaised, tool
from dualclaw_server.interceptors import ToolRetryInterceptor, ToolSanitizerInterceptor

from .adversaries import END, LEAK, Adversary, Entry, Traps, agent, calls, says
from .conftest import echo

PAIR = {"call": "echo", "args": {"text": "beside"}}
"""A good call beside the bad one: one failing sibling hides nothing."""


def _beside(target: Tool, *codes: str, size: int = 1_000_000, **args: object) -> Adversary:
    """Return an adversary that calls a tool beside a good one and then ends."""

    def sibling_is_fine(events: Sequence[EngineEvent]) -> bool:
        return any(event.step.step.result == "<beside>" for event in events)

    limits = Limits(max_steps=6, wall_time=15, max_result=2_000)
    script = [says({"call": target.name, "args": args}, PAIR, step=0), END]
    return Adversary(
        [agent(target, echo, limits=limits)], script, "finished", codes=codes, size=size, holds=sibling_is_fine
    )


# Giants


def ten_megabytes_of_text(_: Traps) -> Adversary:
    @tool(effect="read")
    async def giant() -> str:
        """Say far too much."""
        return "ab\n" * 3_500_000

    return _beside(giant, "result.truncated", size=50_000)


def ten_megabytes_past_the_sanitizer(_: Traps) -> Adversary:
    @tool(effect="read")
    async def giant() -> str:
        """Say far too much, with something secret at both ends."""
        return LEAK + "ab\n" * 3_500_000 + LEAK

    guard = ToolSanitizerInterceptor(1_000)
    script = [says({"call": "giant", "args": {}}, step=0), END]
    return Adversary([agent(giant, guards=[guard])], script, "finished", codes=["result.truncated"], size=100_000)


def a_thousand_parts(_: Traps) -> Adversary:
    @tool(effect="read")
    async def many() -> ToolOutput:
        """Say it in a thousand pieces."""
        return ToolOutput([ContentPart(text="y" * 900) for _ in range(1_000)])

    return _beside(many, "result.truncated", size=50_000)


def a_thousand_images(_: Traps) -> Adversary:
    @tool(effect="read")
    async def album() -> ToolOutput:
        """Show too many images."""
        url = "https://example.com/" + "a" * 1_000
        return ToolOutput([ContentPart(image=Media(media_type="image/png", url=url)) for _ in range(1_000)])

    return _beside(album, "result.truncated", size=500_000)


def an_image_of_twenty_megabytes(_: Traps) -> Adversary:
    @tool(effect="read")
    async def picture() -> ToolOutput:
        """Show one huge image."""
        return ToolOutput([ContentPart(image=Media(media_type="image/png", data=bytes(20_000_000)))])

    return _beside(picture, "result.truncated", size=50_000)


def an_endless_error(_: Traps) -> Adversary:
    @tool(effect="read")
    async def complains() -> str:
        """Complain at length."""
        raise ValueError("x" * 5_000_000)

    return _beside(complains, "tool.failed", size=50_000)


def huge_arguments(_: Traps) -> Adversary:
    return Adversary(
        [agent(echo)], [calls("echo", when={"step": 0}, text="z" * 300_000), END], "finished", size=2_000_000
    )


# Secrets


def _leaking(*targets: Tool) -> Adversary:
    items: list[dict[str, object]] = [{"call": target.name, "args": {}} for target in targets]
    guard = ToolSanitizerInterceptor()
    return Adversary([agent(*targets, guards=[guard])], [says(*items, step=0), END], "finished")


def secrets_in_results(_: Traps) -> Adversary:
    @tool(effect="read")
    async def text() -> str:
        """Say it."""
        return f"found: {LEAK}"

    @tool(effect="read")
    async def data() -> dict[str, str]:
        """Say it as data."""
        return {"password": LEAK, "note": LEAK}

    @tool(effect="read")
    async def parts() -> ToolOutput:
        """Say it in two pieces, and in a name."""
        half = len(LEAK) // 2
        named = Media(media_type="image/png", url="https://example.com/a.png", name=f"{LEAK}.png")
        return ToolOutput([ContentPart(text=LEAK[:half]), ContentPart(text=LEAK[half:]), ContentPart(image=named)])

    return _leaking(text, data, parts)


def secrets_in_errors(_: Traps) -> Adversary:
    @tool(effect="read")
    async def raises() -> str:
        """Say it in an exception."""
        raise ConnectionError(f"cannot reach {LEAK}")

    @tool(effect="read")
    async def chained() -> str:
        """Say it in the cause of an exception, and in its notes."""
        try:
            raise OSError(LEAK)
        except OSError as error:
            worse = RuntimeError("the database is away")
            worse.add_note(LEAK)
            raise worse from error

    @tool(effect="read")
    async def own() -> str:
        """Say it in a tool's own error."""
        raise ToolRaised(LEAK)

    @tool(effect="read")
    def in_a_thread() -> str:
        """Say it in a thread."""
        raise PermissionError(LEAK)

    return _leaking(raises, chained, own, in_a_thread)


def secrets_in_arguments(_: Traps) -> Adversary:
    script = [
        says(
            {"call": "echo", "args": {"text": LEAK}},
            {"call": "echo", "args": {"txet": LEAK}},
            {"call": "echo", "raw_args": f'{{"text": "{LEAK}'},
            {"call": "ghost", "args": {"password": LEAK}},
            step=0,
        ),
        END,
    ]
    codes = ["tool.bad_arguments", "tool.unknown"]
    return Adversary([agent(echo, guards=[ToolSanitizerInterceptor()])], script, "finished", codes=codes)


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

    return _beside(hangs, "tool.timeout")


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

    return _beside(stays, "tool.timeout")


def a_tool_that_blocks_its_thread(traps: Traps) -> Adversary:
    @tool(effect="read", timeout=0.05)
    def blocks() -> str:
        """Hold a thread."""
        traps.release_threads.wait(60)
        return "too late"

    return _beside(blocks, "tool.timeout")


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


def results_that_are_none(_: Traps) -> Adversary:
    circle: list[object] = []
    circle.append(circle)
    deep: list[object] = []
    for _level in range(5_000):
        deep = [deep]

    async def generator() -> AsyncGenerator[str, None]:
        yield "a"

    values: Mapping[str, object] = {
        "an_object": object(),
        "a_class": Odd,
        "a_module": sys,
        "a_circle": circle,
        "a_depth": deep,
        "a_generator": generator(),
        "a_call": ToolOutput([ContentPart()]),
        "no_list": ToolOutput(3),  # type: ignore[arg-type]
    }

    def giver(name: str) -> Tool:
        async def gives() -> object:
            return values[name]

        return Tool(name, "Give.", {"type": "object"}, gives, effect="read")

    tools = [giver(name) for name in values]
    items: list[dict[str, object]] = [{"call": each.name, "args": {}} for each in tools]

    def all_failed(events: Sequence[EngineEvent]) -> bool:
        ends = [event.step.step.diagnosis.code for event in events if event.step.step.phase > 1]
        return ends == ["tool.failed"] * len(tools)

    return Adversary([agent(*tools)], [says(*items, step=0), END], "finished", holds=all_failed)


def results_that_are_hardly_text(_: Traps) -> Adversary:
    values: Mapping[str, object] = {
        "surrogate": "a\ud83cb",
        "zero": "a\x00b",
        "not_a_number": float("nan"),
        "odd_keys": {1: float("inf"), "\udc00": "\ud83c"},
        "bytes": bytes(range(256)),
        "a_huge_number": 10**6_000,
        "nothing": None,
        "empty": "",
        "no_parts": ToolOutput([]),
        "empty_parts": ToolOutput([ContentPart(text="")] * 100),
    }

    def giver(name: str) -> Tool:
        async def gives() -> object:
            return values[name]

        return Tool(name, "Give.", {"type": "object"}, gives, effect="read")

    tools = [giver(name) for name in values]
    items: list[dict[str, object]] = [{"call": each.name, "args": {}} for each in tools]
    return Adversary([agent(*tools)], [says(*items, step=0), END], "finished")


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
    adversary = _wishing(Suspend(Ask("May I?", call_id="not mine", allowed=("approve",))), "interrupted")
    return adversary


MISUSING: Sequence[Entry] = (
    ten_megabytes_of_text,
    ten_megabytes_past_the_sanitizer,
    a_thousand_parts,
    a_thousand_images,
    an_image_of_twenty_megabytes,
    an_endless_error,
    huge_arguments,
    secrets_in_results,
    secrets_in_errors,
    secrets_in_arguments,
    truncated_arguments,
    arguments_that_parse_oddly,
    a_tool_that_hangs,
    a_tool_that_ignores_cancellation,
    a_tool_that_blocks_its_thread,
    tools_that_raise_anything,
    results_that_are_none,
    results_that_are_hardly_text,
    a_tool_that_changes_its_arguments,
    a_tool_that_fills_the_session,
    a_tool_that_ends_the_run_twice,
    a_tool_that_fails_the_run,
    a_tool_that_replaces_itself,
)
