"""Adversaries whose tools give what nobody can take: giants, secrets, and what is no result at all."""

import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

from dualclaw import ContentPart, EngineEvent, Media
from dualclaw.errors import EngineError
from dualclaw_server.engine.outcome import End, Fail
from dualclaw_server.engine.tool import Tool, ToolOutput, ToolRaised, tool
from dualclaw_server.interceptors import ToolSanitizerInterceptor

from .adversaries import END, LEAK, Adversary, Entry, Traps, agent, calls, says
from .adversaries_tools import Odd, beside
from .conftest import echo

# Giants


def ten_megabytes_of_text(_: Traps) -> Adversary:
    @tool(effect="read")
    async def giant() -> str:
        """Say far too much."""
        return "ab\n" * 3_500_000

    return beside(giant, "result.truncated", size=50_000)


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

    return beside(many, "result.truncated", size=50_000)


def a_thousand_images(_: Traps) -> Adversary:
    @tool(effect="read")
    async def album() -> ToolOutput:
        """Show too many images."""
        url = "https://example.com/" + "a" * 1_000
        return ToolOutput([ContentPart(image=Media(media_type="image/png", url=url)) for _ in range(1_000)])

    return beside(album, "result.truncated", size=500_000)


def an_image_of_twenty_megabytes(_: Traps) -> Adversary:
    @tool(effect="read")
    async def picture() -> ToolOutput:
        """Show one huge image."""
        return ToolOutput([ContentPart(image=Media(media_type="image/png", data=bytes(20_000_000)))])

    return beside(picture, "result.truncated", size=50_000)


def an_endless_error(_: Traps) -> Adversary:
    @tool(effect="read")
    async def complains() -> str:
        """Complain at length."""
        raise ValueError("x" * 5_000_000)

    return beside(complains, "tool.failed", size=50_000)


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


def a_secret_in_the_last_word(_: Traps) -> Adversary:
    @tool(effect="read")
    async def ends() -> str:
        """End the run with it."""
        raise End(f"here it is: {LEAK}", "exited")

    return replace(_leaking(ends), ends="exited", says="here it is")


def a_secret_in_the_reason(_: Traps) -> Adversary:
    @tool(effect="read")
    async def fails() -> str:
        """Fail the run with it."""
        raise Fail(EngineError("QUOTA_EXCEEDED", f"no more of {LEAK}", {"hint": LEAK}))

    return replace(_leaking(fails), ends="quota.exceeded")


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


# No results


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


GIVING: Sequence[Entry] = (
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
    a_secret_in_the_last_word,
    a_secret_in_the_reason,
    results_that_are_none,
    results_that_are_hardly_text,
)
