"""Agents: frozen values that say who answers, with what model, tools, strategy and limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import dualclaw
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.node import NodeRegistry
from dualclaw_server.engine.strategy import Chat, ReAct, Strategy
from dualclaw_server.engine.texts import TEXTS, Locale, Texts
from dualclaw_server.engine.tool import EFFECTS, KINDS, Tool

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
    """Tool calls (BUDGET_EXCEEDED)."""
    parallel_tools: int = 8
    """Tools at work at once; the others wait."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "wall_time", "max_tokens", "max_tool_calls", "parallel_tools"):
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
    limits: Limits = field(default_factory=Limits)
    locale: Locale = "en"
    """Language of the engine's own words."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(self.tools))
        object.__setattr__(self, "models", tuple(self.models))
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"agent name {self.name!r}: use 1 to 64 of letters, digits, _ and -")
        for what, names in (("tool", [t.name for t in self.tools]), ("model", [m.name for m in self.models])):
            repeated = {name for name in names if names.count(name) > 1}
            if repeated:
                raise ValueError(
                    f"agent {self.name}: {what} names must differ, repeated: {', '.join(sorted(repeated))}"
                )
        if self.locale not in TEXTS:
            raise ValueError(f"agent {self.name}: locale {self.locale!r} is none of {', '.join(TEXTS)}")

    @cached_property
    def tools_by_name(self) -> Mapping[str, Tool]:
        """The tools, by name."""
        return MappingProxyType({tool.name: tool for tool in self.tools})

    @cached_property
    def models_by_name(self) -> Mapping[str, ChatModel]:
        """The models, by name, the default first."""
        return MappingProxyType({model.name: model for model in self.models})

    @cached_property
    def effective_strategy(self) -> Strategy:
        """The strategy given, or the one that fits the tools."""
        return self.strategy or (ReAct() if self.tools else Chat())

    @cached_property
    def nodes(self) -> NodeRegistry:
        """The agent's graph."""
        tools = [(tool.name, tool.kind) for tool in self.tools]
        return NodeRegistry(self.name, self.effective_strategy.name, self.models_by_name, tools)

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
        for tool in self.tools:
            info.tools.add(
                name=tool.name,
                description=tool.description,
                kind=KINDS[tool.kind],
                server=tool.server,
                parameters_json=tool.parameters_json,
                effect=EFFECTS[tool.effect],
            )
        return info
