"""Adversaries in company: agents that call one another for ever, ever deeper, ever more, and hand over in circles."""

from collections.abc import Sequence
from dataclasses import replace

from dualclaw import EngineEvent
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Agent, Limits, agent_tool
from dualclaw_server.engine.handoff import TRANSFER, exit_tool
from dualclaw_server.engine.interceptor import Interceptor, RunConfig
from dualclaw_server.engine.outcome import End, Fail
from dualclaw_server.engine.tool import ToolContext, tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.models.scripted import ScriptedModel

from .adversaries import END, QUICK, Adversary, Entry, Traps, agent, calls, says
from .conftest import echo, scripted

BELOW = Limits(max_steps=3, wall_time=50)


class Mirrors(Interceptor):
    """Gives an agent itself as a tool."""

    def __init__(self, mirrored: list[Agent]) -> None:
        super().__init__()
        self._mirrored = mirrored

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        return replace(config, tools=(*config.tools, agent_tool(self._mirrored[0])))


def an_agent_that_calls_itself(_: Traps) -> Adversary:
    mirrored: list[Agent] = []
    made = agent(name="a", guards=[Mirrors(mirrored)], limits=Limits(max_steps=2, wall_time=50, max_depth=3))
    mirrored.append(made)
    script = [says({"text": "So."}, tools=False), calls("a", request="again")]
    return Adversary([made], script, "step_limit", codes=["tool.failed"])


def agents_below_agents(_: Traps) -> Adversary:
    made = agent(echo, name="bottom")
    for depth in range(8):
        model = scripted(calls(made.name, when={"step": 0}, request="on"), END, name=f"m{depth}")
        made = Agent(f"level{depth}", models=[model], sub_agents=[made], retry=QUICK, limits=BELOW)
    root = replace(made, models=())
    script = [calls("level6", when={"step": 0}, request="on"), END]
    return Adversary([root], script, "finished", codes=["tool.failed"])


def agents_that_fan_out(_: Traps) -> Adversary:
    """Each calls five, and they five each, and so on: 781 calls, were there no limit for the run as a whole."""
    made = agent(echo, name="leaf", limits=BELOW)
    items: list[dict[str, object]] = [{"call": "echo", "args": {"text": "a"}}] * 5
    made = replace(made, models=[scripted(says(*items, step=0), END, name="leaves")])
    for depth in range(3):
        below: list[dict[str, object]] = [{"call": made.name, "args": {"request": "go"}}] * 5
        model = scripted(says(*below, step=0), END, name=f"m{depth}")
        made = Agent(f"level{depth}", models=[model], sub_agents=[made], retry=QUICK, limits=BELOW)
    root = replace(made, models=(), limits=Limits(max_steps=3, wall_time=50, max_tool_calls=40))
    script = [says(*[{"call": "level1", "args": {"request": "go"}}] * 5, step=0), END]
    return Adversary([root], script, "finished", holds=lambda events: _started(events) <= 40)


def _started(events: Sequence[EngineEvent]) -> int:
    """Count calls that were not refused before they began."""
    last = {event.step.index: event.step.step for event in events if event.WhichOneof("payload") == "step"}
    return sum(step.phase > 0 and step.diagnosis.code != "tool.skipped" for step in last.values())


def a_sub_agent_that_never_ends(_: Traps) -> Adversary:
    below = agent(echo, name="below", limits=BELOW)
    below = replace(below, models=[scripted(calls("echo", text="a"), name="loops")])
    script = [says({"text": "So."}, tools=False), calls("below", request="go")]
    return Adversary([agent(sub_agents=[below], limits=BELOW)], script, "step_limit")


def a_sub_agent_that_wants_the_end(_: Traps) -> Adversary:
    @tool(effect="read")
    async def ends() -> str:
        """End the run, if it can."""
        raise End("over", "loop_detected")

    @tool(effect="read")
    async def fails() -> str:
        """Fail the run, if it can."""
        raise Fail(EngineError("QUOTA_EXCEEDED", "No more."))

    def below(name: str) -> Agent:
        model = scripted(calls(name, when={"step": 0}), END, name=f"model_{name}")
        return Agent(f"agent_{name}", models=[model], tools=[ends, fails], retry=QUICK, limits=BELOW)

    items: list[dict[str, object]] = [
        {"call": f"agent_{name}", "args": {"request": "go"}} for name in ("ends", "fails")
    ]
    made = agent(sub_agents=[below("ends"), below("fails")])
    return Adversary([made], [says(*items, step=0), END], "finished", codes=["tool.failed"], says="end")


def a_sub_agent_whose_model_fails(_: Traps) -> Adversary:
    below = Agent("below", models=[scripted(says({"fail": "MODEL_AUTH"}), name="fails")], retry=QUICK)
    script = [calls("below", when={"step": 0}, request="go"), END]
    return Adversary([agent(sub_agents=[below])], script, "finished", codes=["tool.failed"])


def handing_over_in_circles(_: Traps) -> Adversary:
    limits = Limits(max_steps=12, wall_time=50, max_transfers=4)
    one = replace(agent(name="one", transfer_to=["other"], limits=limits), models=[_to("other")])
    other = replace(agent(name="other", transfer_to=["one"], limits=limits), models=[_to("one")])
    return Adversary([one, other], [], "step_limit", codes=["tool.failed"])


def _to(name: str) -> ScriptedModel:
    return scripted(
        says({"text": "fine"}, user="^next$"),
        says({"text": "So."}, tools=False),
        calls(TRANSFER, agent=name),
        name=f"to_{name}",
    )


def handing_over_to_nobody(_: Traps) -> Adversary:
    script = [says({"text": "So."}, tools=False), calls(TRANSFER, agent="nobody")]
    return Adversary(
        [agent(name="one", transfer_to=["gone"]), agent(name="two")], script, "step_limit", codes=["tool.failed"]
    )


def leaving_twice_and_handing_over(_: Traps) -> Adversary:
    items: list[dict[str, object]] = [
        {"call": "exit", "args": {"answer": "first"}},
        {"call": TRANSFER, "args": {"agent": "two"}},
        {"call": "exit", "args": {"answer": "second"}},
    ]
    return Adversary(
        [agent(exit_tool, name="one", transfer_to=["two"]), agent(name="two")], [says(*items)], "exited", says="first"
    )


def a_tool_that_reaches_into_the_checkpoint(_: Traps) -> Adversary:
    @tool(effect="read")
    async def meddles(context: ToolContext) -> str:
        """Change what it should only read."""
        context.trace.session.set("/wanted", ["end", "hijacked", "STOP_REASON_EXITED"])
        context.trace.extras("").set("wanted", ["end", "hijacked", "STOP_REASON_EXITED"])
        return "done"

    return Adversary([agent(meddles)], [calls("meddles", when={"step": 0}), END], "finished", says="end")


TEAMS: Sequence[Entry] = (
    an_agent_that_calls_itself,
    agents_below_agents,
    agents_that_fan_out,
    a_sub_agent_that_never_ends,
    a_sub_agent_that_wants_the_end,
    a_sub_agent_whose_model_fails,
    handing_over_in_circles,
    handing_over_to_nobody,
    leaving_twice_and_handing_over,
    a_tool_that_reaches_into_the_checkpoint,
)
