"""The shape of a run: what ``before_agent`` makes of instructions, tools, model, limits and strategy, ever anew."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dualclaw import StopReason
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.caller import Caller
from dualclaw_server.engine.checkpoint import load_checkpoint
from dualclaw_server.engine.interceptor import Interceptor, Prompt, RunConfig
from dualclaw_server.engine.model import ToolSpec
from dualclaw_server.engine.outcome import Ask, Outcome, Suspend
from dualclaw_server.engine.plan import PlanReAct
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.tool import ToolContext, tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.models.script_file import parse_script
from dualclaw_server.models.scripted import ScriptedModel

from .conftest import ANSWER, CALLER, Opener, echo, results, turn
from .probes import resume

USER = Caller("tenant", "somebody", frozenset({"user"}))
Shape = Callable[[Trace, RunConfig], RunConfig]


class Shapes(Interceptor):
    """Shapes a run as a test wants it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        return self.shape(trace, config)


@tool(effect="read")
async def drop_tables() -> str:
    """Drop everything."""
    return "dropped"


SCRIPT = (
    {"when": {"tools": "drop_tables", "step": 0}, "say": [{"call": "drop_tables"}]},
    {"when": {"tools": "echo", "step": 0}, "say": [{"call": "echo", "args": {"text": "hi"}}]},
    turn(1, {"text": "{{result}}"}),
    {"when": {"tools": False}, "say": [{"text": "No tools."}]},
)


async def test_tools_by_role_and_by_question(store: RunStore, open_engine: Opener) -> None:
    """Each run has the tools of its caller and question; ReAct when there are some, one straight line when none are."""

    def shape(trace: Trace, config: RunConfig) -> RunConfig:
        allowed = [t for t in config.tools if t.name == "echo" or "operator" in trace.roles]
        return replace(config, tools=tuple(allowed) if "tools" in trace.user_text else ())

    engine = await open_engine(Agent("a", tools=[drop_tables, echo], interceptors=[Shapes(shape)]), *SCRIPT)
    operator = await engine.ask("tools please", caller=CALLER)
    user = await engine.ask("tools please", caller=USER)
    none = await engine.ask("no such thing")
    assert [asked.last.done.content for asked in (operator, user, none)] == ["dropped", "<hi>", "No tools."]
    strategies = [
        load_checkpoint((await store.load(asked.key)).checkpoint).strategy for asked in (operator, user, none)
    ]
    assert strategies == ["react", "react", "chat"]


async def test_tools_that_are_found_make_a_plain_agent_act(open_engine: Opener) -> None:
    """An agent without tools of its own reasons and acts with those a run is given."""
    found = Shapes(lambda trace, config: replace(config, tools=(echo,)))
    engine = await open_engine(Agent("a", interceptors=[found]), *SCRIPT)
    assert (await engine.ask("go")).last.done.content == "<hi>"


async def test_instructions_model_and_limits_by_user(open_engine: Opener) -> None:
    """All of them hold for this run only; the agent stays what it was."""
    other = ScriptedModel.parse('{"name": "other", "turns": [{"when": {"system": "for somebody"}, "say": ['
                                '{"call": "echo", "args": {"text": "on and on"}}]}]}')  # fmt: skip

    def shape(trace: Trace, config: RunConfig) -> RunConfig:
        if trace.subject != "somebody":
            return config
        return replace(config, instructions="for somebody", model=other, limits=Limits(max_steps=2))

    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Shapes(shape)]), *SCRIPT)
    limited = await engine.ask("go", caller=USER)
    assert limited.last.done.stop_reason == StopReason.STOP_REASON_STEP_LIMIT
    assert [step.result for step in limited.last.done.process_steps] == ["<on and on>"] * 2
    assert (await engine.ask("go")).last.done.content == "<hi>"


async def test_a_pending_call_whose_tool_is_gone_fails_clearly(open_engine: Opener) -> None:
    """A resumed run that meets other tools says so about the call, names those there are, and goes on."""

    @tool(effect="read")
    async def asking(context: ToolContext) -> str:
        raise Suspend(Ask("Really?"))

    def shape(trace: Trace, config: RunConfig) -> RunConfig:
        return replace(config, tools=(echo,)) if trace.questions else config

    script = (turn(0, {"call": "asking", "id": "c"}), turn(1, {"text": "Too bad."}))
    engine = await open_engine(Agent("a", tools=[asking], interceptors=[Shapes(shape)]), *script)
    asked = await resume(engine, await engine.ask("go"))
    assert asked.last.done.content == "Too bad."
    assert asked.last.done.process_steps[-1].diagnosis.code == "tool.unknown"
    assert "Tools there are: echo" in results(await engine.messages(asked.conversation_id))["c"]


async def test_a_batch_is_finished_by_a_run_without_tools(open_engine: Opener) -> None:
    """Left with no tools at all, the resumed run gives its open call a result and answers."""

    @tool(effect="read")
    async def asking(context: ToolContext) -> str:
        raise Suspend(Ask("Really?"))

    def shape(trace: Trace, config: RunConfig) -> RunConfig:
        return replace(config, tools=()) if trace.questions else config

    script = (turn(0, {"call": "asking", "id": "c"}), turn(1, {"text": "On my own, then."}))
    engine = await open_engine(Agent("a", tools=[asking], interceptors=[Shapes(shape)]), *script)
    asked = await resume(engine, await engine.ask("go"))
    assert asked.last.done.content == "On my own, then."
    assert asked.last.done.process_steps[-1].diagnosis.code == "tool.unknown"


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (lambda trace, config: replace(config, tools=(echo, echo)), "several tools named echo"),
        (lambda trace, config: replace(config, tools=("echo",)), "failed in before_agent: TypeError"),
        (lambda trace, config: None, "failed in before_agent: TypeError"),
        (lambda trace, config: replace(config, limits=Limits(max_steps=0)), "failed in before_agent: ValueError"),
    ],
)
async def test_a_shape_that_cannot_be_fails_the_run(open_engine: Opener, shape: Shape, problem: str) -> None:
    """What is wrong with it is said, and the next run is prepared anew."""
    item = Shapes(shape)
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[item]), ANSWER)
    assert problem in (await engine.ask("go")).last.error.message
    item.shape = lambda trace, config: config
    assert (await engine.ask("go")).last.done.content == "Hello, world"


async def test_the_strategy_may_be_chosen_for_a_run(store: RunStore, open_engine: Opener) -> None:
    """A strategy given by before_agent brings its own tools; the callers' limit on steps stays in force."""
    item = Shapes(lambda trace, config: replace(config, strategy=PlanReAct() if trace.user_text == "big" else None))
    script = ({"when": {"tools": "create_plan"}, "say": [{"text": "Planned."}]}, ANSWER)
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[item]), *script)
    assert (await engine.ask("big")).last.done.content == "Planned."
    assert (await engine.ask("small")).last.done.content == "Hello, world"


class Telling(ScriptedModel):
    """Keeps what it was told of tools."""

    told: list[str]

    def with_tools(self, tools: Sequence[ToolSpec]) -> ScriptedModel:
        self.told.extend(spec.description for spec in tools)
        return super().with_tools(tools)


async def test_a_tool_that_changes_is_told_to_the_model_anew(open_engine: Opener) -> None:
    """A tool described otherwise for one call is told that way for that call, though its name is the same."""

    class Describes(Interceptor):
        async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
            prompt.tools = [replace(one, description=f"Call {trace.model_calls}.") for one in prompt.tools]
            return None

    script = parse_script(json.dumps({"name": "told", "turns": list(SCRIPT)}))
    model = Telling(script)
    model.told = []
    engine = await open_engine(Agent("a", tools=[echo], models=[model], interceptors=[Describes()]), ANSWER)
    assert (await engine.ask("go")).last.done.content == "<hi>"
    assert model.told == ["Call 0.", "Call 1."]
