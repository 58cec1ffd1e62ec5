"""Agents: frozen values that say who answers, with what model, tools, strategy and limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import dualclaw
from dualclaw_server.engine.chain import warn_of_deprecated
from dualclaw_server.engine.handoff import TRANSFER, transfer_tool
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.node import NodeRegistry
from dualclaw_server.engine.retry import RetryPolicy
from dualclaw_server.engine.strategy import Chat, ReAct, Strategy, tools_of
from dualclaw_server.engine.texts import TEXTS, Locale, Texts
from dualclaw_server.engine.tool import EFFECTS, KINDS, Tool, ToolContext

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run, carried over every resume. Each ends it with a stop reason of its own; none is unlimited."""

    max_steps: int = 20
    """Model calls; then one last call without tools gives the answer (STEP_LIMIT)."""
    wall_time: float = 600.0
    """Seconds from the first claim (BUDGET_EXCEEDED)."""
    max_tokens: int = 1_000_000
    """Input and output tokens as reported by the models (BUDGET_EXCEEDED)."""
    max_tool_calls: int = 200
    """Tool calls, those of sub-agents included (BUDGET_EXCEEDED)."""
    parallel_tools: int = 8
    """Tools at work at once; the others wait."""
    max_result: int = 16_000
    """Characters of a tool's result; of a longer one head and tail are kept."""
    max_depth: int = 4
    """Sub-agents below one another; a call that would go deeper fails."""
    max_transfers: int = 10
    """Transfers from agent to agent; one more fails."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"limit {name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class Agent:
    """An agent. Immutable: changing a field raises; ``dataclasses.replace`` makes another one.

    Raises ValueError for unusable or repeated names, saying which.
    """

    name: str
    """1 to 64 of letters, digits, ``_`` and ``-``."""
    description: str = ""
    instructions: str = ""
    """System text, as it is: braces and percent signs mean nothing."""
    tools: Sequence[Tool] = ()
    models: Sequence[ChatModel] = ()
    """Models a caller may choose from, the default first; empty: the engine's own model."""
    strategy: Strategy | None = None
    """None: ReAct when there are tools, else Chat."""
    interceptors: Sequence[Interceptor] = ()
    """In the order of registration, which decides between those of equal ``order``."""
    sub_agents: Sequence[Agent] = ()
    """Agents it may call like tools; each answers one request and then is gone."""
    transfer_to: Sequence[str] = ()
    """Names of agents of this engine that it may hand the conversation over to."""
    output_key: str = ""
    """Session value its final text is stored under; empty: it is not."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """How patient it is with a model that fails."""
    limits: Limits = field(default_factory=Limits)
    locale: Locale = "en"
    """Language of the engine's own words."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(self.tools))
        object.__setattr__(self, "models", tuple(self.models))
        for name in ("interceptors", "sub_agents", "transfer_to"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"agent name {self.name!r}: use 1 to 64 of letters, digits, _ and -")
        if self.locale not in TEXTS:
            raise ValueError(f"agent {self.name}: locale {self.locale!r} is none of {', '.join(TEXTS)}")
        if self.name in self.transfer_to:
            raise ValueError(f"agent {self.name}: cannot hand over to itself")
        for item in self.interceptors:
            warn_of_deprecated(item)
        for what, names in (
            ("tool", [tool.name for tool in (*self.all_tools, *self.engine_tools)]),
            ("transfer", list(self.transfer_to)),
            ("model", [m.name for m in self.models]),
            ("interceptor", [i.name for i in self.interceptors]),
        ):
            repeated = {name for name in names if names.count(name) > 1}
            if repeated:
                raise ValueError(
                    f"agent {self.name}: {what} names must differ, repeated: {', '.join(sorted(repeated))}"
                )

    @cached_property
    def all_tools(self) -> tuple[Tool, ...]:
        """The tools, its sub-agents among them."""
        return (*self.tools, *(agent_tool(agent) for agent in self.sub_agents))

    @cached_property
    def engine_tools(self) -> tuple[Tool, ...]:
        """The tools that strategy and transfers add to them."""
        transfer = (transfer_tool(self.transfer_to, self.texts),) if self.transfer_to else ()
        return (*tools_of(self.strategy, self.texts), *transfer)

    @cached_property
    def every_interceptor(self) -> tuple[Interceptor, ...]:
        """Its interceptors, and those of the agents it calls like tools."""
        agents = [*self.sub_agents, *(tool.agent for tool in self.tools if isinstance(tool, AgentTool))]
        return (*self.interceptors, *(item for agent in agents for item in agent.every_interceptor))

    @cached_property
    def tools_by_name(self) -> Mapping[str, Tool]:
        """All tools, by name."""
        return MappingProxyType({tool.name: tool for tool in (*self.all_tools, *self.engine_tools)})

    @cached_property
    def models_by_name(self) -> Mapping[str, ChatModel]:
        """The models, by name, the default first."""
        return MappingProxyType({model.name: model for model in self.models})

    @cached_property
    def effective_strategy(self) -> Strategy:
        """The strategy given, or the one that fits the tools."""
        return self.strategy or (ReAct() if self.all_tools or self.transfer_to else Chat())

    @cached_property
    def nodes(self) -> NodeRegistry:
        """The agent's graph, with its sub-agents' graphs in it as deep as calls can go."""
        return self._graph("", self.limits.max_depth)

    def _graph(self, place: str, depth: int) -> NodeRegistry:
        base = f"{place}/{self.name}" if place else self.name
        below = {
            tool.name: tool.agent._graph(
                NodeRegistry.tool_id(base, tool.name), min(depth - 1, tool.agent.limits.max_depth)
            )
            for tool in self.all_tools
            if depth and isinstance(tool, AgentTool)
        }
        tools = [(tool.name, tool.kind) for tool in self._shown_tools(at_root=not place)]
        transfers = (TRANSFER, () if place else self.transfer_to)
        strategy = self.effective_strategy.name
        return NodeRegistry(
            self.name, strategy, self.models_by_name, tools, below=below, transfers=transfers, place=place
        )

    def _shown_tools(self, *, at_root: bool) -> list[Tool]:
        """Return the tools its model is told of; only the agent at the root of a run can hand over."""
        return [tool for tool in (*self.all_tools, *self.engine_tools) if at_root or tool.name != TRANSFER]

    @property
    def texts(self) -> Texts:
        """The engine's words in the agent's language."""
        return TEXTS[self.locale]

    @cached_property
    def info(self) -> dualclaw.Agent:
        """The agent's public record."""
        info = dualclaw.Agent(
            name=self.name, description=self.description, nodes=self.nodes.nodes, models=list(self.models_by_name)
        )
        for tool in (*self.all_tools, *self.engine_tools):
            info.tools.add(
                name=tool.name,
                description=tool.description,
                kind=KINDS[tool.kind],
                server=tool.server,
                parameters_json=tool.parameters_json,
                effect=EFFECTS[tool.effect],
                needs_approval=any(item.enabled and item.needs_approval(tool) for item in self.interceptors),
            )
        for item in sorted(self.interceptors, key=lambda item: item.order):
            info.interceptors.add(name=item.name, order=item.order, enabled=item.enabled, switchable=item.switchable)
        return info


@dataclass(frozen=True)
class AgentTool(Tool):
    """An agent that another one calls like a tool. Made by ``agent_tool``."""

    agent: Agent = field(kw_only=True)


def agent_tool(
    agent: Agent, *, name: str = "", description: str = "", parameters: Mapping[str, object] | None = None
) -> AgentTool:
    """Return an agent as a tool of another one.

    Args:
        agent: what answers.
        name: of the tool; empty: the agent's.
        description: of the tool; empty: the agent's.
        parameters: JSON schema of its arguments; None: one text called "request". What the agent is asked is the
            text "request" when there is one, else the arguments as JSON.
    """
    request = {"type": "string", "description": "What it is asked, with everything it needs to know."}
    schema = {"type": "object", "properties": {"request": request}, "required": ["request"]}
    return AgentTool(
        name=name or agent.name,
        description=description or agent.description or f"Ask the agent {agent.name}.",
        parameters=parameters or schema,
        function=_not_a_function,
        kind="agent",
        effect="read",
        timeout=agent.limits.wall_time,
        agent=agent,
    )


async def _not_a_function(_: ToolContext) -> None:
    raise RuntimeError("an agent is run by the engine, not called")
