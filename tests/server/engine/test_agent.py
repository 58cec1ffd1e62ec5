"""Agents, their limits and their graph are frozen values that refuse what cannot work."""

import dataclasses
import uuid

import pytest

from dualclaw import EffectClass, StepKind
from dualclaw_server.engine.agent import Agent, Limits
from dualclaw_server.engine.ids import new_id
from dualclaw_server.engine.strategy import Chat, ReAct
from dualclaw_server.engine.tool import tool
from dualclaw_server.tools.assistant import AGENT, calculate


def test_an_agent_never_changes() -> None:
    """Changing a field raises; replace makes another agent, and lists given to it are copied."""
    tools = [calculate]
    agent = Agent("a", tools=tools)
    tools.clear()
    assert agent.tools == (calculate,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        agent.instructions = "new"  # type: ignore[misc]
    assert dataclasses.replace(agent, instructions="new").instructions == "new"


def test_strategy_follows_the_tools() -> None:
    """Without tools there is one straight line, with tools the loop; an explicit choice wins."""
    assert isinstance(Agent("a").effective_strategy, Chat)
    assert isinstance(Agent("a", tools=[calculate]).effective_strategy, ReAct)
    assert isinstance(Agent("a", tools=[calculate], strategy=Chat()).effective_strategy, Chat)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Agent("no spaces"), "agent name"),
        (lambda: Agent("a", tools=[calculate, calculate]), "tool names must differ, repeated: calculate"),
        (lambda: Agent("a", locale="xx"), "locale 'xx'"),
        (lambda: Limits(max_steps=0), "max_steps must be above 0"),
        (lambda: Limits(wall_time=-1), "wall_time must be above 0"),
    ],
)
def test_what_cannot_work_is_named(make, problem: str) -> None:  # type: ignore[no-untyped-def]
    """Unusable names, repeats, locales and limits raise at once, saying which."""
    with pytest.raises(ValueError, match=problem):
        make()


def test_public_record_and_graph_name_everything() -> None:
    """GetAgent shows tools with schema, kind and effect, and a node for the agent, its strategy and each tool."""
    info = AGENT.info
    assert [t.name for t in info.tools] == ["calculate", "current_time"]
    assert info.tools[0].kind == StepKind.STEP_KIND_SKILL
    assert info.tools[0].effect == EffectClass.EFFECT_CLASS_READ
    assert '"expression"' in info.tools[0].parameters_json
    assert [node.id for node in info.nodes] == [
        "assistant",
        "assistant/strategy/react",
        "assistant/tool/calculate",
        "assistant/tool/current_time",
    ]
    chart = AGENT.nodes.mermaid()
    assert chart.startswith("flowchart TD\n")
    assert "n1 --> n2" in chart


def test_the_graph_holds_sub_agents_wherever_they_are_used() -> None:
    """One agent below two others has nodes under each; ids stay unique, and depth ends where calls would."""
    shared = Agent("shared", tools=[calculate])
    left, right = Agent("left", sub_agents=[shared]), Agent("right", sub_agents=[shared])
    agent = Agent("top", sub_agents=[left, right])
    ids = [node.id for node in agent.info.nodes]
    assert len(set(ids)) == len(ids)
    for side in ("left", "right"):
        assert f"top/tool/{side}/{side}/tool/shared/shared/tool/calculate" in ids
    assert agent.nodes.below["left"].below["shared"].agent.type == "agent"
    assert (
        len(agent.nodes.mermaid().splitlines()) == 1 + len(ids) + len(ids) - 1
    )  # every node but the first has one arrow
    bounded = dataclasses.replace(agent, limits=Limits(max_depth=1))
    assert "top/tool/left/left/tool/shared" in [node.id for node in bounded.info.nodes]
    assert not [node for node in bounded.info.nodes if node.label == "calculate"]


def test_node_ids_are_unique() -> None:
    """Two tools of one name would share a node, so the agent is refused before it can run."""
    twice = tool(name="calculate", effect="read")(lambda: "x")
    with pytest.raises(ValueError, match="repeated: calculate"):
        Agent("a", tools=[calculate, twice])


def test_ids_sort_by_time() -> None:
    """Ids are valid UUIDv7 and differ, also within a millisecond."""
    ids = [new_id() for _ in range(500)]
    assert len(set(ids)) == 500
    assert {uuid.UUID(i).version for i in ids} == {7}
    assert [i[:11] for i in ids] == sorted(i[:11] for i in ids)
