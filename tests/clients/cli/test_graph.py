"""``dualclaw graph``: a Mermaid flowchart whose lines are all of a few known forms, whatever names there are."""

import re

import pytest

from dualclaw import Agent, EffectClass, InterceptorInfo, Node, Tool
from dualclaw_clients.cli_graph import mermaid

LABEL = r'"(?:[\w \-.,()]|#\d+;|<br/>|[^\x00-\x7f])+"'
LINES = (
    re.compile(rf"  [ni]\d+(?:\(\[{LABEL}\]\)|\{{\{{{LABEL}\}}\}}|\[\({LABEL}\)\]|\[/{LABEL}/\]|\[{LABEL}\])"),
    re.compile(r"  [ni]\d+ (?:-->|-\.->) [ni]\d+"),
    re.compile(r"  classDef (?:off stroke-dasharray:4 4|asks stroke-width:3px)"),
    re.compile(r"  class [ni]\d+(?:,[ni]\d+)* (?:off|asks)"),
)
HOSTILE = [
    'a"]; click n0 href "javascript:alert(1)"',
    "end",
    "x<br/><script>alert(1)</script>",
    "`**md**`",
    "#quot;#35;",
    "two\nlines\x1b[2J",
    "style x:#fff;",
    "%%{init: {}}%%",
    "上海 \u202e绕",
    "",
    "subgraph a --> b",
    "x" * 10_000,
]


def boss() -> Agent:
    """An agent with everything: a sub-agent as a tool, one to hand over to, interceptors on and off."""
    nodes = [
        Node(id="boss", type="agent", label="boss"),
        Node(id="boss/strategy/react", type="strategy", label="react"),
        Node(id="boss/model/small", type="model", label="small"),
        Node(id="boss/tool/pay", type="tool.mcp", label="pay"),
        Node(id="boss/tool/clerk", type="tool.agent", label="clerk"),
        Node(id="boss/tool/transfer_to_agent", type="tool.agent", label="transfer_to_agent"),
        Node(id="boss/tool/clerk/clerk", type="agent", label="clerk"),
        Node(id="boss/tool/clerk/clerk/strategy/react", type="strategy", label="react"),
        Node(id="boss/tool/clerk/clerk/tool/pay", type="tool.skill", label="pay"),
        Node(id="other", type="agent", label="other"),
    ]
    tools = [
        Tool(name="pay", server="bank", effect=EffectClass.EFFECT_CLASS_ONCE, needs_approval=True),
        Tool(name="clerk", effect=EffectClass.EFFECT_CLASS_READ),
    ]
    interceptors = [
        InterceptorInfo(name="inner", order=900, enabled=True),
        InterceptorInfo(name="outer", order=1, enabled=False, switchable=True),
    ]
    return Agent(name="boss", nodes=nodes, tools=tools, interceptors=interceptors)


def check(chart: str) -> None:
    """Fail at a line that is of none of the forms, or an arrow to what was never drawn."""
    first, *lines = chart.splitlines()
    assert first == "flowchart TD"
    wrong = [line for line in lines if not any(form.fullmatch(line) for form in LINES)]
    assert wrong == []
    drawn = {line.split("[")[0].split("(")[0].split("{")[0].strip() for line in lines if LINES[0].fullmatch(line)}
    named = {name for line in lines if LINES[1].fullmatch(line) for name in re.findall(r"[ni]\d+", line)}
    assert named <= drawn


def test_what_hangs_from_what_is_drawn() -> None:
    """Strategy from agent, models and tools from it, sub-agents from their tool, the one handed over to from its."""
    chart = mermaid(boss())
    check(chart)
    arrows = set(re.findall(r"^  (n\d+) --> (n\d+)$", chart, re.MULTILINE))
    assert arrows == {
        ("n0", "n1"), ("n1", "n2"), ("n1", "n3"), ("n1", "n4"), ("n1", "n5"), ("n4", "n6"), ("n6", "n7"), ("n7", "n8"),
        ("n5", "n9"),
    }  # fmt: skip


def test_tools_say_kind_effect_and_approval_and_only_the_agents_own_do() -> None:
    """A tool of the same name in a sub-agent is another one, of which the record says nothing."""
    chart = mermaid(boss())
    assert '  n3["pay<br/>tool.mcp<br/>server bank<br/>effect once<br/>may ask for approval"]\n' in chart
    assert '  n8["pay<br/>tool.skill"]\n' in chart
    assert "  class n3 asks\n" in chart


def test_interceptors_lead_to_the_agent_in_their_order() -> None:
    """The outermost comes first; one that is off is dashed."""
    chart = mermaid(boss())
    assert '  i0[/"outer<br/>interceptor<br/>order 1<br/>off<br/>switchable"/]\n' in chart
    assert "  i0 -.-> i1\n  i1 --> n0\n" in chart
    assert "  class i0 off\n" in chart


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_the_chart(name: str) -> None:
    """Quotes, brackets, keywords, markup, directives and controls stay inside a label, as entities."""
    nodes = [Node(id=name, type=name, label=name), Node(id=f"{name}/tool/{name}", type="tool", label=name)]
    agent = Agent(
        name=name,
        nodes=nodes,
        tools=[Tool(name=name, server=name, needs_approval=True)],
        interceptors=[InterceptorInfo(name=name)],
    )
    check(mermaid(agent))
    assert len(mermaid(agent)) < 5_000


def test_an_agent_without_nodes_is_one_box() -> None:
    """An engine that tells none still gives a chart."""
    assert mermaid(Agent(name="a")) == 'flowchart TD\n  n0(["a"])\n'


async def test_the_chart_goes_to_stdout_or_into_a_file(fake_engine, dualclaw, tmp_path) -> None:
    """Without a name it is the default agent; a file that cannot be written is a line and exit code 2."""
    fake_engine.agents = {"boss": boss(), "other": Agent(name="other")}
    ended = await dualclaw("graph")
    assert (ended.code, ended.out) == (0, mermaid(boss()))
    file = tmp_path / "graph.mmd"
    ended = await dualclaw("graph", "other", "--output", str(file))
    assert (ended.code, ended.out, file.read_text()) == (0, "", mermaid(Agent(name="other")))
    ended = await dualclaw("graph", "--output", str(tmp_path / "none" / "graph.mmd"))
    assert (ended.code, ended.out) == (2, "")
    assert "cannot be written: No such file or directory" in ended.err
    ended = await dualclaw("graph", "nobody")
    assert (ended.code, "UNKNOWN_AGENT" in ended.err) == (3, True)
