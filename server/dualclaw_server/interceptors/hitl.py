"""Approvals: which tool calls need a person's yes, and how it is asked.

Algorithm, for the calls of one model answer, before any of them runs:

1. A call that was asked about before is left alone: its answer holds whatever the policies have become, and the
   engine asks again by itself if its arguments changed since. So is a call of a tool that is not there.
2. The first policy, in the order they were given, that names its tool and has an opinion decides; then the default.
3. A tool that was allowed "always" for this conversation or tenant needs no answer; who allowed it is noted
   under ``remembered/<call id>`` in the trace's extras, and logged.
4. All calls that are left are asked about at once, and the run is parked: no tool of the batch has run.

Just before a call runs it is looked at once more, for the case that an interceptor with a higher order changed its
arguments into such as need approval. Arguments that interceptors change around the tool are the engine's business:
it asks again about every call that people were asked about.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from types import MappingProxyType

from dualclaw import RememberScope
from dualclaw.events import canonical_json
from dualclaw_server.engine import questions
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.outcome import APPROVAL_ACTIONS, Action, Ask, Suspend
from dualclaw_server.engine.texts import Locale
from dualclaw_server.engine.tool import Tool
from dualclaw_server.engine.trace import Trace

log = logging.getLogger(__name__)

Opinion = str | bool | None
"""Text: ask this. True: ask. False: do not ask. None: no opinion, the next policy decides."""
Predicate = Callable[[Call, Trace], Opinion | Awaitable[Opinion]]

PROMPTS: Mapping[Locale, str] = MappingProxyType({"en": "Run {{tool}}?", "zh": "是否执行 {{tool}}？"})
"""Asked where a policy says nothing else; the arguments stand beside it."""
_PLACE = re.compile(r"\{\{(tool|args|args\.[^{}]+)\}\}")
_MAX_VALUE = 200
"""Characters of an argument in a prompt."""
_SCOPES = (RememberScope.REMEMBER_SCOPE_CONVERSATION, RememberScope.REMEMBER_SCOPE_TENANT)


@dataclass(frozen=True, slots=True)
class Policy:
    """Says whether calls of some tools need approval, and how it is asked.

    Raises ValueError for what cannot work, saying what.
    """

    tools: str
    """Name of a tool, or a glob (``*``, ``?``, ``[...]``); with a ``/`` of "server/name", for tools of MCP servers."""
    ask: bool | Predicate = True
    """Whether to ask; a predicate, plain or async, decides call by call. One that fails lets nothing pass."""
    prompt: str = ""
    """Asked unless the predicate gives a text. ``{{tool}}``, ``{{args}}`` and ``{{args.NAME}}`` are filled in, masked
    as people may see them; other braces are just braces. Empty: the default of the locale.
    """
    allowed: Sequence[Action] = APPROVAL_ACTIONS
    """Answers that are taken."""
    expires_in: float | None = None
    """Seconds after which an open question counts as rejected (skipped, if it cannot be rejected); None: never."""
    reject_ends_run: bool = False
    """True: a rejection ends the run (REJECTED). False: the model is told and the run goes on."""

    def __post_init__(self) -> None:
        if not self.tools:
            raise ValueError("a policy must name a tool, or * for all")
        if self.expires_in is not None and self.expires_in <= 0:
            raise ValueError(f"expires_in must be above 0 seconds, not {self.expires_in}")
        if not self.allowed:
            raise ValueError("a policy must allow at least one answer")
        Ask("?", allowed=tuple(self.allowed))  # refuses unknown ones by name

    def names(self, tool: str, server: str) -> bool:
        """Tell whether it is about a tool."""
        return fnmatchcase(f"{server}/{tool}" if "/" in self.tools else tool, self.tools)


class HitlInterceptor(Interceptor):
    """Has people approve tool calls. A guard: fail-closed, never switched by callers. Asks nothing by default.

    Args:
        policies: looked at in their order; see above.
        default: of tools that no policy has an opinion on. True: ask about them.
        locale: language of the prompts.
        order: late by default, so that it sees arguments as other interceptors have left them.
    """

    guard = True

    def __init__(
        self,
        policies: Iterable[Policy] = (),
        *,
        default: bool = False,
        locale: Locale = "en",
        name: str = "",
        order: int = 900,
        enabled: bool = True,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled)
        self._policies = (*policies, Policy("*", ask=default))
        self._prompt = PROMPTS[locale]

    def needs_approval(self, tool: Tool) -> bool:
        """Tell whether people may be asked before a tool runs."""
        for policy in self._policies:
            if policy.names(tool.name, tool.server):
                if callable(policy.ask):
                    return True
                return policy.ask
        return False

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Suspend | None:
        """Ask about every call of the batch that needs it."""
        found = [await self._ask(trace, call) for call in calls]
        asks = [ask for ask in found if ask is not None]
        return Suspend(*asks) if asks else None

    async def on_tool_call_start(self, trace: Trace, call: Call) -> Suspend | None:
        """Ask about a call whose arguments were harmless when the batch was looked at."""
        ask = await self._ask(trace, call)
        return Suspend(ask) if ask is not None else None

    async def _ask(self, trace: Trace, call: Call) -> Ask | None:
        """Return what to ask about a call; None: it may run, or the engine sees to it."""
        if call.tool is None or questions.about(trace.root.checkpoint, call.id):
            return None
        policy, prompt = await self._decide(trace, call)
        if not prompt or await self._remembered(trace, call):
            return None
        expires_in = policy.expires_in
        return Ask(
            prompt,
            call_id=call.id,
            allowed=policy.allowed,
            expire_time=datetime.now(UTC) + timedelta(seconds=expires_in) if expires_in is not None else None,
            reject_ends_run=policy.reject_ends_run,
        )

    async def _decide(self, trace: Trace, call: Call) -> tuple[Policy, str]:
        """Return the policy that decides, and what it asks; empty: nothing."""
        server = call.tool.server if call.tool is not None else ""
        for policy in self._policies:
            if not policy.names(call.name, server):
                continue
            opinion: object = policy.ask
            if callable(opinion):
                opinion = opinion(call, trace)
                if inspect.isawaitable(opinion):
                    opinion = await opinion
            if opinion is None:
                continue
            if isinstance(opinion, str):
                return policy, opinion if opinion.strip() else self._text(policy, trace, call)
            return policy, self._text(policy, trace, call) if opinion else ""
        return self._policies[-1], ""

    def _text(self, policy: Policy, trace: Trace, call: Call) -> str:
        """Return a policy's prompt with its places filled in; what they hold is not looked at again."""
        shown = trace.mask(dict(call.args))
        args = shown if isinstance(shown, dict) else {}

        def fill(place: re.Match[str]) -> str:
            kind, _, name = place[1].partition(".")
            if kind == "tool":
                return call.name
            value = args.get(name, "") if name else args
            text = value if isinstance(value, str) else canonical_json(value)
            return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"

        return _PLACE.sub(fill, policy.prompt or self._prompt)

    async def _remembered(self, trace: Trace, call: Call) -> bool:
        """Tell whether somebody has allowed the tool for good, and note who that was."""
        for scope in _SCOPES:
            name = questions.remembered_name(scope, trace.conversation_id, trace.agent, call.name)
            kept = await trace.recall(name)
            if kept is None:
                continue
            by = json.loads(kept)
            trace.extras(self.name).set(f"remembered/{call.id}", {"scope": RememberScope.Name(scope), **by})
            log.info(
                "call of %s needs no answer: it was approved before by %s",
                call.name,
                by.get("approver", ""),
                extra={"run_id": trace.key.run_id, "tenant": trace.key.tenant, "call_id": call.id, **by},
            )
            return True
        return False
