"""Strategies, and how little a user's own takes: the one of the examples, held to what it promises."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from dualclaw import StopReason
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.interceptor import Interceptor, Prompt
from dualclaw_server.engine.model import ModelOptions
from dualclaw_server.engine.outcome import Outcome
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.strategy import Strategy
from dualclaw_server.engine.tool import Tool
from dualclaw_server.engine.trace import Trace

from .conftest import at_work_with, echo, scripted, turn
from .teams import NEVER, echo_call

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "own_strategy.py"


def example() -> Agent:
    """Return the agent of the example."""
    spec = importlib.util.spec_from_file_location("own_strategy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.AGENT, Agent)
    return module.AGENT


AGENT = example()
LookFirst = cast("Callable[[str], Strategy]", type(AGENT.strategy))


class Choices(Interceptor):
    """Notes what each model call must call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str | None] = []

    async def on_prepare(self, trace: Trace, options: ModelOptions, prompt: Prompt) -> Outcome | None:
        self.seen.append(options.tool_choice)
        return None


def looks_first(*script: dict[str, object], choices: Choices, **fields: object) -> Agent:
    model = [scripted(*script)]
    return Agent("a", models=model, tools=[echo], strategy=LookFirst("echo"), interceptors=[choices], **fields)  # type: ignore[arg-type]


async def test_an_own_strategy_decides_what_the_model_must_do(store: RunStore) -> None:
    """The first call of a run must be the look-up, those after it are free; the next run begins anew."""
    choices = Choices()
    agent = looks_first(turn(0, echo_call("x")), turn(1, {"text": "seen {{result}}"}), choices=choices)
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
        again = await engine.ask("go", conversation=asked.conversation_id)
    assert asked.last.done.content == again.last.done.content == "seen <x>"
    assert choices.seen == ["echo", None, "echo", None]
    assert agent.nodes.strategy.id == "a/strategy/look_first"


async def test_an_own_strategy_goes_on_where_the_run_stands(store: RunStore) -> None:
    """Whoever takes the run over does not begin it again."""
    choices = Choices()
    hang = (turn(0, echo_call("x")), turn(1, {"text": "se"}, {"hang": True}))
    async with at_work_with(store, [looks_first(*hang, choices=choices)], NEVER) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, lambda events: events[-1].delta.content == "se")
    then = turn(1, {"text": "seen {{result}}"})
    async with at_work_with(store, [looks_first(then, choices=choices)], NEVER) as engine:
        asked = await engine.read(started)
    assert asked.last.done.content == "seen <x>"
    assert choices.seen == ["echo", None, None]


async def test_an_own_strategy_keeps_the_limits_of_what_it_builds_on(store: RunStore) -> None:
    """Steps are counted, its own call among them."""
    loop: dict[str, object] = {"when": {"tools": True}, "say": [{"call": "echo", "args": {"text": "x"}}]}
    last: dict[str, object] = {"when": {"tools": False}, "say": [{"text": "enough"}]}
    agent = looks_first(loop, last, choices=Choices(), limits=Limits(max_steps=3))
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_STEP_LIMIT
    assert len(asked.last.done.process_steps) == 3


async def test_a_model_that_answers_all_the_same_is_not_asked_twice(store: RunStore) -> None:
    """Some models cannot be made to call; their answer is the answer."""
    async with at_work_with(store, [replace(AGENT, models=[scripted(turn(0, {"text": "I know."}))])], NEVER) as engine:
        assert (await engine.ask("go")).last.done.content == "I know."


class Brings:
    """A strategy with a tool of its own."""

    name = "brings"

    def __init__(self, *tools: Tool) -> None:
        self._tools = tools

    def tools_in(self, texts: object) -> tuple[Tool, ...]:
        return self._tools

    async def run(self, scope: object) -> StopReason.ValueType:
        raise NotImplementedError


def test_tools_a_strategy_brings_are_the_agents() -> None:
    """They are in its record and graph, and their names clash with its own ones."""
    agent = Agent("a", strategy=Brings(echo))
    assert [item.name for item in agent.info.tools] == ["echo"]
    assert "a/tool/echo" in [node.id for node in agent.info.nodes]
    with pytest.raises(ValueError, match="repeated: echo"):
        Agent("a", tools=[echo], strategy=Brings(echo))
