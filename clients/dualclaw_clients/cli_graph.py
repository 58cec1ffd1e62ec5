"""An agent as a Mermaid flowchart, from its public record.

- Nodes come with ids that are paths (``assistant/tool/search``), so what hangs from what is in the ids. A node that
  hangs from nothing is an agent that is handed over to.
- Names are other people's. Nothing of a name but letters, digits and a few harmless signs stands in the chart as it
  is: all else is written as an entity (``#34;``), so no name can end a label, begin a statement or carry markup.

OutputProblem   the file that was named cannot be written
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dualclaw import Agent, EffectClass, ListAgentsRequest, Node, Tool
from dualclaw.errors import EngineError
from dualclaw_clients.cli_render import Terminal, safe_line, short_name
from dualclaw_clients.engine_client import EngineClient

MAX_LABEL = 80
"""Characters of a name that are shown."""
_PLAIN = frozenset(" _-.,()")
_SHAPES: Mapping[str, tuple[str, str]] = {
    "agent": ("([", "])"),
    "strategy": ("{{", "}}"),
    "model": ("[(", ")]"),
    "interceptor": ("[/", "/]"),
}
_HANDS_OVER = "transfer_to_agent"


class OutputProblem(Exception):
    """A file that was named cannot be written."""


async def draw(client: EngineClient, terminal: Terminal, name: str, output: str) -> None:
    """Write the flowchart of an agent (empty: the default one) to stdout, or to the file ``output``.

    Raises:
        EngineError: UNKNOWN_AGENT and whatever the engine refuses.
        OutputProblem: the file cannot be written.
    """
    if not name:
        agents = (await client.list_agents(ListAgentsRequest(page_size=1))).agents
        if not agents:
            raise EngineError("UNKNOWN_AGENT", "the engine has no agent")
        name = agents[0].name
    chart = mermaid(await client.get_agent(name))
    if not output:
        terminal.answer(chart)
        return
    try:
        await asyncio.to_thread(Path(output).write_text, chart, "utf-8")
    except OSError as error:
        raise OutputProblem(f"{output} cannot be written: {error.strerror}") from None
    terminal.line(f"the flowchart of {safe_line(name)} is in {safe_line(output)}", "dim")


def mermaid(agent: Agent) -> str:
    """Return the flowchart of an agent: interceptors in their order, then the agent and what it is made of."""
    names = {node.id: f"n{number}" for number, node in enumerate(agent.nodes)}
    tools = {tool.name: tool for tool in agent.tools}
    root = agent.nodes[0].id if agent.nodes else ""
    lines = ["flowchart TD"]
    if not agent.nodes:
        lines.append(f"  n0{_box('agent', [agent.name])}")
    lines += _around(agent)
    for node in agent.nodes:
        parts = [node.label, node.type]
        tool = tools.get(node.label)
        if tool is not None and node.id == f"{root}/tool/{node.label}":
            parts += _about(tool)
        lines.append(f"  {names[node.id]}{_box(node.type, parts)}")
    for source, target in _arrows(agent.nodes):
        lines.append(f"  {names[source]} --> {names[target]}")
    asks = [names[node.id] for node in agent.nodes if _asks(node, root, tools)]
    if asks:
        lines += ["  classDef asks stroke-width:3px", f"  class {','.join(asks)} asks"]
    return "\n".join(lines) + "\n"


def _around(agent: Agent) -> Iterator[str]:
    """Yield the interceptors as a chain that leads to the agent; those that are off are dashed."""
    ordered = sorted(agent.interceptors, key=lambda item: item.order)
    for number, item in enumerate(ordered):
        switch = ["on" if item.enabled else "off"] + (["switchable"] if item.switchable else [])
        box = _box("interceptor", [item.name, "interceptor", f"order {item.order}", *switch])
        yield f"  i{number}{box}"
    for number, item in enumerate(ordered):
        target = f"i{number + 1}" if number + 1 < len(ordered) else "n0"
        yield f"  i{number} {'-->' if item.enabled else '-.->'} {target}"
    off = [f"i{number}" for number, item in enumerate(ordered) if not item.enabled]
    if off:
        yield "  classDef off stroke-dasharray:4 4"
        yield f"  class {','.join(off)} off"


def _about(tool: Tool) -> Iterator[str]:
    if tool.server:
        yield f"server {tool.server}"
    yield f"effect {short_name(EffectClass.Name, tool.effect, 'EFFECT_CLASS_') or 'once'}"
    if tool.needs_approval:
        yield "may ask for approval"


def _asks(node: Node, root: str, tools: Mapping[str, Tool]) -> bool:
    tool = tools.get(node.label)
    return tool is not None and tool.needs_approval and node.id == f"{root}/tool/{node.label}"


def _arrows(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Yield what hangs from what: strategies from their agent, models and tools from the strategy, sub-agents from
    the tool that calls them, and agents that are handed over to from the tool that does it.
    """
    agents = [node.id for node in nodes if node.type == "agent"]
    strategies = {_within(node.id, agents): node.id for node in nodes if node.type == "strategy"}
    tools = [node.id for node in nodes if node.type.startswith("tool")]
    for node in nodes[1:]:
        if node.type == "agent":
            caller = _within(node.id, tools) or next((each for each in tools if each.endswith(f"/{_HANDS_OVER}")), "")
        elif node.type == "strategy":
            caller = _within(node.id, agents)
        else:
            owner = _within(node.id, agents)
            caller = strategies.get(owner, owner)
        yield caller or nodes[0].id, node.id


def _within(node_id: str, ids: Sequence[str]) -> str:
    """Return the innermost of some nodes that a node lies below; empty: none."""
    return max((each for each in ids if node_id.startswith(f"{each}/")), key=len, default="")


def _box(kind: str, parts: Sequence[str]) -> str:
    left, right = _SHAPES.get(kind, ("[", "]"))
    label = "<br/>".join(_escaped(part) for part in parts)
    return f'{left}"{label}"{right}'


def _escaped(text: str) -> str:
    line = safe_line(text, MAX_LABEL) or "(no name)"
    return "".join(sign if sign.isalnum() or sign in _PLAIN else f"#{ord(sign)};" for sign in line)
