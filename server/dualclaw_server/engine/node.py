"""Nodes: what an agent is made of, with ids that steps can point at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from dualclaw import Node


class NodeRegistry:
    """The graph of an agent: nodes for it, its strategy, models, tools and sub-agents, and the arrows between them.

    Ids are paths, such as ``assistant/tool/calculate``. A sub-agent's begin with the tool it is called by
    (``assistant/tool/search/researcher/model/small``), so an agent that is used in two places has two of each. An
    agent that can be handed over to is a node with its own graph's id. A second node of an id raises ValueError.
    """

    def __init__(
        self,
        agent: str,
        strategy: str,
        models: Iterable[str],
        tools: Iterable[tuple[str, str]],
        *,
        below: Mapping[str, NodeRegistry] = MappingProxyType({}),
        transfers: tuple[str, Iterable[str]] = ("", ()),
        place: str = "",
    ) -> None:
        """Make the graph.

        Args:
            agent: its name.
            strategy: name of its strategy.
            models: names of its models.
            tools: pairs of name and kind.
            below: graphs of sub-agents by the tool that calls them, each made with that tool's id as its place.
            transfers: the tool that hands over, and the agents it can hand over to.
            place: id of the node this agent hangs from; empty: it is the root.
        """
        self._nodes: dict[str, Node] = {}
        self._arrows: list[tuple[str, str]] = []
        self._base = f"{place}/{agent}" if place else agent
        self.agent = self._add(self._base, "agent", agent)
        self.strategy = self._add(f"{self._base}/strategy/{strategy}", "strategy", strategy)
        self._arrows.append((self.agent.id, self.strategy.id))
        self._models = {name: self._child(self._model_id(name), "model", name) for name in models}
        self.tools: Mapping[str, Node] = MappingProxyType(
            {name: self._child(self.tool_id(self._base, name), f"tool.{kind}", name) for name, kind in tools}
        )
        self.below = MappingProxyType(dict(below))
        for name, graph in below.items():
            for node in graph.nodes:
                self._add(node.id, node.type, node.label)
            self._arrows += [(self.tools[name].id, graph.agent.id), *graph._arrows]
        tool, targets = transfers
        for target in targets:
            self._arrows.append((self.tools[tool].id, self._add(target, "agent", target).id))

    @staticmethod
    def tool_id(base: str, name: str) -> str:
        """Return the id of a tool of the agent whose id is ``base``."""
        return f"{base}/tool/{name}"

    def model(self, name: str) -> Node:
        """Return the node of a model; the engine's own, which no agent names, is not in the graph."""
        return self._models.get(name) or Node(id=self._model_id(name), type="model", label=name)

    def _model_id(self, name: str) -> str:
        return f"{self._base}/model/{name}"

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
