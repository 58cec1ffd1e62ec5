"""Nodes: what an agent is made of, with ids that steps can point at."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from dualclaw import Node


class NodeRegistry:
    """The graph of an agent: its agent, model, strategy and tool nodes, and the arrows between them.

    Ids are paths below the agent's name, such as ``assistant/tool/calculate``, and unique: a second node of
    the same id raises ValueError.
    """

    def __init__(self, agent: str, strategy: str, models: Iterable[str], tools: Iterable[tuple[str, str]]) -> None:
        """``tools`` are pairs of name and kind."""
        self._nodes: dict[str, Node] = {}
        self._arrows: list[tuple[str, str]] = []
        self.agent = self._add(agent, "agent", agent)
        self.strategy = self._add(f"{agent}/strategy/{strategy}", "strategy", strategy)
        self._arrows.append((self.agent.id, self.strategy.id))
        self.models: Mapping[str, Node] = MappingProxyType(
            {name: self._child(f"{agent}/model/{name}", "model", name) for name in models}
        )
        self.tools: Mapping[str, Node] = MappingProxyType(
            {name: self._child(f"{agent}/tool/{name}", f"tool.{kind}", name) for name, kind in tools}
        )

    def _add(self, node_id: str, node_type: str, label: str) -> Node:
        if node_id in self._nodes:
            raise ValueError(f"two nodes have the id {node_id!r}; names must be unique within an agent")
        node = Node(id=node_id, type=node_type, label=label)
        self._nodes[node_id] = node
        return node

    def _child(self, node_id: str, node_type: str, label: str) -> Node:
        node = self._add(node_id, node_type, label)
        self._arrows.append((self.strategy.id, node_id))
        return node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, the agent first."""
        return tuple(self._nodes.values())

    def mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart."""
        names = {node_id: f"n{number}" for number, node_id in enumerate(self._nodes)}
        lines = ["flowchart TD"]
        for node_id, node in self._nodes.items():
            label = node.label.replace('"', "#quot;")
            lines.append(f'  {names[node_id]}["{label}<br/><small>{node.type}</small>"]')
        lines += [f"  {names[source]} --> {names[target]}" for source, target in self._arrows]
        return "\n".join(lines) + "\n"
