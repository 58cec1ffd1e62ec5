"""Interceptors of an agent: their order, their switches, and what is frozen for a segment."""

import asyncio
from collections.abc import Sequence

import pytest

from dualclaw import ContentPart, RunOptions
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.caller import Caller
from dualclaw_server.engine.chain import Chain
from dualclaw_server.engine.interceptor import Interceptor, ModelCall, Observation, RunConfig, ToolRequest
from dualclaw_server.engine.model import ModelChunk
from dualclaw_server.engine.outcome import Ask, Outcome, Replace, Suspend
from dualclaw_server.engine.tool import ToolContext, tool
from dualclaw_server.engine.trace import Trace

from .conftest import CALLER, Opener, echo, turn
from .probes import HOOKS, FullProbe, Log, Probe, probe, resume

ONE_CALL = (turn(0, {"call": "echo", "id": "c", "args": {"text": "hi"}}), turn(1, {"text": "Done."}))
OTHER = Caller("another tenant", "somebody", frozenset({"user"}))
PAIRS = probe("before_agent", "on_agent_start", "on_agent_end")


async def test_order_then_registration(open_engine: Opener) -> None:
    """Lower orders come first, ties as the agent lists them; ends are called the other way round."""
    log = Log()
    kind = probe("on_agent_start", "on_tool_call_start", "intercept_tool", "on_tool_call_end", "on_agent_end")
    listed = [("late", 5), ("first tie", 0), ("early", -5), ("second tie", 0)]
    interceptors = [kind(log, name=name.replace(" ", "_"), order=order) for name, order in listed]
    engine = await open_engine(Agent("a", tools=[echo], interceptors=interceptors), *ONE_CALL)
    await engine.ask("go")
    inwards = ["early", "first_tie", "second_tie", "late"]
    for hook in ("on_agent_start", "on_tool_call_start", "intercept_tool"):
        assert log.names(hook) == inwards
    for hook in ("on_tool_call_end", "on_agent_end"):
        assert log.names(hook) == inwards[::-1]


def test_names_tell_instances_of_a_class_apart() -> None:
    """A name is made from the class unless one is given; the same twice in an agent is refused."""

    class CostGuardInterceptor(Interceptor):
        pass

    assert CostGuardInterceptor().name == "cost_guard"
    agent = Agent("a", interceptors=[CostGuardInterceptor(name="small"), CostGuardInterceptor(name="big")])
    assert [item.name for item in agent.info.interceptors] == ["small", "big"]
    with pytest.raises(ValueError, match="interceptor names must differ, repeated: cost_guard"):
        Agent("a", interceptors=[CostGuardInterceptor(), CostGuardInterceptor()])
    with pytest.raises(ValueError, match="interceptor name 'not good': use 1 to 64"):
        CostGuardInterceptor(name="not good")


async def test_off_covers_every_hook(open_engine: Opener) -> None:
    """One that is off is called nowhere, masks included, from the beginning of the run to its end."""
    log = Log()

    class Masking(FullProbe):  # type: ignore[misc, valid-type]  # made from the list of hooks
        def mask(self, value: object) -> object:
            raise AssertionError("called although off")

    with pytest.warns(DeprecationWarning, match="is deprecated, override"):
        agent = Agent("a", tools=[echo], interceptors=[Masking(log, enabled=False)])
    engine = await open_engine(agent, *ONE_CALL)
    await engine.ask("go")
    assert log.entries == []


def test_deprecated_hooks_warn_where_the_agent_is_made() -> None:
    """Each old name that is overridden is named with the new one; the warning points at the agent."""

    class Old(Interceptor):
        async def on_thought(self, trace: Trace, thought: str) -> Outcome | None:
            return None

    with pytest.warns(DeprecationWarning, match="old: on_thought is deprecated, override on_reason_end") as caught:
        Agent("a", interceptors=[Old()])
    assert [warning.filename for warning in caught] == [__file__]


async def test_switches_hold_from_the_next_segment_on(open_engine: Opener) -> None:
    """Switched off in mid-run, a segment keeps its pairs; the resumed segment and other runs are without it."""
    log = Log()

    @tool(effect="read")
    async def ask_people(context: ToolContext) -> str:
        if log.names("on_agent_end"):
            return "asked"
        item.enabled = False
        item.order = 99
        raise Suspend(Ask("Really?"))

    item = PAIRS(log)
    engine = await open_engine(
        Agent("a", tools=[ask_people], interceptors=[item]), turn(0, {"call": "ask_people"}), turn(1, {"text": "Done."})
    )
    asked = await engine.ask("go")
    assert [entry.hook for entry in log.entries] == ["before_agent", "on_agent_start", "on_agent_end"]
    await resume(engine, asked)
    assert len(log.entries) == 3


@pytest.mark.parametrize("on", [True, False])
async def test_callers_switch_what_is_switchable(open_engine: Opener, on: bool) -> None:
    """A request may switch a switchable one, on or off, for itself only."""
    log = Log()
    item = PAIRS(log, enabled=not on)
    item.switchable = True
    engine = await open_engine(Agent("a", interceptors=[item]), turn(0, {"text": "Hello."}))
    await engine.ask("go", options=RunOptions(interceptors={"probe": on}))
    assert bool(log.entries) is on
    log.entries.clear()
    await engine.ask("go")
    assert bool(log.entries) is not on


async def test_others_cannot_be_switched(open_engine: Opener) -> None:
    """Neither a request nor an operator switches one that does not allow it; the answer says which do."""
    item = PAIRS(Log(), name="mine")
    item.switchable = True
    agent = Agent("a", interceptors=[PAIRS(Log()), item])
    engine = await open_engine(agent, turn(0, {"text": "Hello."}))
    for name in ("probe", "nobody"):
        with pytest.raises(EngineError, match="cannot be switched; switchable ones: mine") as refused:
            await engine.ask("go", options=RunOptions(interceptors={name: False}))
        assert refused.value.reason == "NOT_SWITCHABLE"
        with pytest.raises(EngineError) as refused:
            await engine.runner.set_interceptor_enabled(CALLER, "a", name, enabled=False)
        assert refused.value.reason == "NOT_SWITCHABLE"


def test_guards_are_closed_and_never_switchable() -> None:
    """A class that protects something fails closed whatever it is told, and cannot be declared switchable."""

    class Guard(Interceptor):
        guard = True

    assert Guard(fail_closed=False).fail_closed
    with pytest.raises(ValueError, match="guard protects something, so it is never switchable"):
        Guard(switchable=True)


async def test_a_switch_is_not_for_namesakes(open_engine: Opener) -> None:
    """What a caller switches off at an agent stays on at a sub-agent, where that name is not switchable."""
    log, inner_log = Log(), Log()
    item = PAIRS(log)
    item.switchable = True
    below = Agent("below", interceptors=[PAIRS(inner_log)])
    agent = Agent("a", interceptors=[item], sub_agents=[below])
    engine = await open_engine(
        agent,
        {"when": {"user": "^inner$"}, "say": [{"text": "Inner."}]},
        turn(0, {"call": "below", "args": {"request": "inner"}}),
        turn(1, {"text": "Done."}),
    )
    await engine.ask("go", options=RunOptions(interceptors={"probe": False}))
    assert log.entries == []
    assert [entry.hook for entry in inner_log.entries] == ["before_agent", "on_agent_start", "on_agent_end"]


async def test_operators_switch_for_their_tenant(open_engine: Opener) -> None:
    """It is stored, shown, holds for the tenant's runs and for nobody else's, and needs the role."""
    log = Log()
    item = PAIRS(log)
    item.switchable = True
    engine = await open_engine(Agent("a", interceptors=[item]), turn(0, {"text": "Hello."}))
    with pytest.raises(EngineError) as refused:
        await engine.runner.set_interceptor_enabled(OTHER, "a", "probe", enabled=False)
    assert refused.value.reason == "PERMISSION_DENIED"
    info = await engine.runner.set_interceptor_enabled(CALLER, "a", "probe", enabled=False)
    assert (info.name, info.enabled, info.switchable) == ("probe", False, True)
    shown = [(await engine.runner.agents_info(caller))[0].interceptors[0].enabled for caller in (CALLER, OTHER)]
    assert shown == [False, True]
    await engine.ask("go")
    assert log.entries == []
    await engine.ask("go", caller=OTHER)
    assert len(log.entries) == 3
    await engine.ask("go", options=RunOptions(interceptors={"probe": True}))
    assert len(log.entries) == 6


async def test_switches_at_the_same_moment_lose_nothing(open_engine: Opener) -> None:
    """Many operators switching different interceptors at once all have their way."""
    items = [PAIRS(Log(), name=f"p{number}") for number in range(10)]
    for item in items:
        item.switchable = True
    engine = await open_engine(Agent("a", interceptors=items), turn(0, {"text": "Hello."}))
    await asyncio.gather(
        *(engine.runner.set_interceptor_enabled(CALLER, "a", item.name, enabled=False) for item in items)
    )
    info = (await engine.runner.agents_info(CALLER))[0]
    assert [item.enabled for item in info.interceptors] == [False] * 10


async def test_preparation_is_made_anew_each_time(open_engine: Opener) -> None:
    """before_agent is called on start and on every resume; its failure fails this run and is forgotten."""
    configs: list[str] = []

    class Prepares(Interceptor):
        async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
            configs.append(trace.user_text)
            if trace.user_text == "bad":
                raise LookupError("no such tenant")
            return config

    @tool(effect="read")
    async def ask_people(context: ToolContext) -> str:
        if not context.trace.questions:
            raise Suspend(Ask("Really?"))
        return "asked"

    engine = await open_engine(
        Agent("a", tools=[ask_people], interceptors=[Prepares()]),
        turn(0, {"call": "ask_people"}),
        turn(1, {"text": "Done."}),
    )
    failed = await engine.ask("bad")
    assert failed.last.error.message == "Interceptor prepares failed in before_agent: LookupError."
    asked = await resume(engine, await engine.ask("good"))
    assert asked.last.done.content == "Done."
    assert configs == ["bad", "good", "good"]


class Swaps(Interceptor):
    """Puts other arguments in the place of every call's."""

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        return Replace({call.id: {"text": "rm -rf"} for call in calls})


class Checks(Interceptor):
    """A guard that writes down the arguments it is shown."""

    guard = True
    seen: list[object]

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        self.seen = [dict(call.args) for call in calls]
        return None


async def test_a_replaced_thing_is_still_checked_by_guards(open_engine: Opener) -> None:
    """A Replace stops the interceptors after it, but no guard: it is shown what is there now."""
    log, guard = Log(), Checks(order=1)
    plain = probe("on_action_start")(log, order=2)
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Swaps(), guard, plain]), *ONE_CALL)
    asked = await engine.ask("go")
    assert guard.seen == [{"text": "rm -rf"}]
    assert log.entries == []
    assert asked.last.done.process_steps[0].result == "<rm -rf>"


async def test_replaced_arguments_must_be_of_the_batch(open_engine: Opener) -> None:
    """Arguments for a call that is not there, or that are no object, are a failure and change nothing."""

    class Wrong(Interceptor):
        async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
            return Replace({calls[0].id: {"text": "changed"}, "another": {}})

    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Wrong()]), *ONE_CALL)
    assert (await engine.ask("go")).last.done.process_steps[0].result == "<hi>"
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Wrong(fail_closed=True)]), *ONE_CALL)
    assert "failed in on_action_start: TypeError" in (await engine.ask("go")).last.error.message


def test_nothing_stands_between_without_interceptors() -> None:
    """Where nobody has a hook, the model and the tool are called themselves: not one frame more per token."""

    async def stream(call: ModelCall) -> ModelChunk:
        raise NotImplementedError

    async def run(request: ToolRequest) -> Observation:
        raise NotImplementedError

    for chain in (Chain([]), Chain([probe("on_agent_start")(Log())])):
        assert chain.stream(stream) is stream  # type: ignore[arg-type, comparison-overlap]
        assert chain.tool(run, lambda _: Observation([ContentPart(text="withheld")])) is run


def test_the_chain_knows_every_hook() -> None:
    """A hook that is added to the class is frozen with the others; a probe of all hooks proves it."""
    chain = Chain([FullProbe(Log())])
    assert isinstance(chain.all[0], Probe)
    assert set(HOOKS) == {hook for hook in HOOKS if chain._having[hook]}
