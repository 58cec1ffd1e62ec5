"""Which tools a caller may use, by the roles it was authenticated with.

Algorithm, for a tool and the roles of who started the run:

1. A ``deny`` rule that names the tool and one of the roles: no.
2. An ``allow`` rule that names the tool and one of the roles: yes.
3. An ``allow`` rule that names the tool, for other roles only: no; the tool is theirs.
4. No rule says anything: the default.

The order of rules means nothing. Roles are those at the start of the run; a sub-agent acts for the same caller, a
resume by somebody else gives the run no other rights.

A tool that may not be used is taken out of the run before the model hears of it, also when another interceptor
brought it in, and a call of it is refused all the same: a model can name a tool it was never told of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal

from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, Prompt, RunConfig
from dualclaw_server.engine.observations import failure
from dualclaw_server.engine.outcome import Replace
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.trace import Trace

Effect = Literal["allow", "deny"]


@dataclass(frozen=True, slots=True)
class PermissionTexts:
    """What a model is told of a refused call."""

    denied: str
    hint: str


PERMISSION_TEXTS: Mapping[Locale, PermissionTexts] = MappingProxyType(
    {
        "en": PermissionTexts(
            denied="The user may not use {name}.",
            hint="Do not call it again. Answer without it, and tell the user that they lack the permission.",
        ),
        "zh": PermissionTexts(
            denied="该用户无权使用 {name}。",
            hint="请勿再次调用。请在不使用它的情况下回答，并告知用户缺少权限。",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Says who may, or may not, use some tools.

    Raises ValueError when it names no tool or no role.
    """

    tools: tuple[str, ...]
    """Globs (``*``, ``?``, ``[...]``) of names; one with a ``/`` is of "server/name" and fits tools of MCP servers."""
    roles: tuple[str, ...] = ("*",)
    """Globs of roles; "*" is everybody, a caller without any role included."""
    effect: Effect = "allow"

    def __post_init__(self) -> None:
        for name in ("tools", "roles"):
            globs = getattr(self, name)
            if isinstance(globs, str) or not globs or not all(isinstance(glob, str) and glob for glob in globs):
                raise ValueError(f"{name} of a rule must be a tuple of globs that are not empty, not {globs!r}")
        if self.effect not in ("allow", "deny"):
            raise ValueError(f"effect of a rule must be 'allow' or 'deny', not {self.effect!r}")

    def names(self, tool: str, server: str) -> bool:
        """Tell whether it is about a tool."""
        full = f"{server}/{tool}"
        return any(fnmatchcase(full if "/" in glob else tool, glob) for glob in self.tools)

    def fits(self, roles: Iterable[str]) -> bool:
        """Tell whether it is about one of the roles."""
        return "*" in self.roles or any(fnmatchcase(role, glob) for role in roles for glob in self.roles)


class PermissionInterceptor(Interceptor):
    """Lets a caller use only the tools its roles allow. A guard: fail-closed, never switched by callers.

    Args:
        rules: who may use what.
        default: of tools that no rule says anything about.
        locale: language of what the model is told.
        order: early by default, so that a call that may not run is neither approved nor counted.

    Raises ValueError for an unknown default.
    """

    guard = True

    def __init__(
        self,
        rules: Iterable[Rule],
        *,
        default: Effect = "deny",
        locale: Locale = "en",
        name: str = "",
        order: int = -500,
        enabled: bool = True,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled)
        if default not in ("allow", "deny"):
            raise ValueError(f"default must be 'allow' or 'deny', not {default!r}")
        self._rules = tuple(rules)
        self._default = default
        self._texts = PERMISSION_TEXTS[locale]

    def may(self, roles: Iterable[str], tool: str, server: str = "") -> bool:
        """Tell whether a caller with these roles may use a tool."""
        return self._verdict(frozenset(roles), tool, server) != "deny"

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        """Take out the tools the caller may not use."""
        return replace(config, tools=tuple(t for t in config.tools if self.may(trace.roles, t.name, t.server)))

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> None:
        """Take out those that came in since."""
        prompt.tools[:] = [t for t in prompt.tools if self.may(trace.roles, t.name, t.server)]

    async def on_tool_call_start(self, trace: Trace, call: Call) -> Replace | None:
        """Refuse a call the caller may not make."""
        server = call.tool.server if call.tool is not None else call.state.call.server
        if self._verdict(trace.roles, call.name, server, unknown=call.tool is None) != "deny":
            return None
        summary = self._texts.denied.format(name=call.name)
        return Replace(failure("PERMISSION_DENIED", summary, hint=self._texts.hint, not_done=True))

    def _verdict(self, roles: frozenset[str], tool: str, server: str, *, unknown: bool = False) -> Effect:
        """Return what the rules say; a tool that does not exist and is in no rule is left to the engine,
        which tells the model the names there are.
        """
        rules = [rule for rule in self._rules if rule.names(tool, server)]
        if any(rule.effect == "deny" and rule.fits(roles) for rule in rules):
            return "deny"
        allowing = [rule for rule in rules if rule.effect == "allow"]
        if allowing:
            return "allow" if any(rule.fits(roles) for rule in allowing) else "deny"
        return "allow" if unknown else self._default
