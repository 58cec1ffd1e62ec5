"""Models: what answers. Each is an ``engine.model.ChatModel``; ``model_from_spec`` makes one from a setting.

The setting is ``VENDOR:NAME``, with VENDOR from the table in ``vendors.json``; or ``local``, the small model that
runs on this machine; or ``scripted:FILE``, or ``scripted`` for the script of the demo agent. ``auto`` is ``local``
where that is installed, else ``scripted``. Further forms:

- ``VENDOR+text:NAME`` and ``VENDOR+json:NAME`` give tools to a model without tool calls of its own: by text in
  the ReAct form, or by JSON that its endpoint holds it to.
- ``VENDOR:NAME@http://...`` says the address right there, for one of several.
- several, separated by commas, are a router: the first that answers is used.

``openai`` is Chat Completions; OpenAI's other API is ``openai-responses``.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dualclaw_server.engine.model import ChatModel
from dualclaw_server.models.anthropic.dialect import AnthropicDialect
from dualclaw_server.models.anthropic.model import AnthropicModel
from dualclaw_server.models.breaker import Breaker, BreakerPolicy, GuardedModel
from dualclaw_server.models.chat.dialect import ChatDialect
from dualclaw_server.models.chat.model import OpenAIChatModel
from dualclaw_server.models.endpoint import ModelTimeouts
from dualclaw_server.models.http_model import HttpChatModel
from dualclaw_server.models.local.model import NAME as LOCAL
from dualclaw_server.models.local.model import LocalModel
from dualclaw_server.models.local.weights import HOW_TO_INSTALL, is_installed
from dualclaw_server.models.responses.dialect import ResponsesDialect
from dualclaw_server.models.responses.model import ResponsesModel
from dualclaw_server.models.route_metrics import RouteMetrics
from dualclaw_server.models.router import RouteObserver, RouterModel, ignore_route
from dualclaw_server.models.scripted import ScriptedModel, ScriptError
from dualclaw_server.models.vendors import Vendor, find_vendor, shipped_vendors
from dualclaw_server.models.written.json_tools import Example, JsonToolsModel
from dualclaw_server.models.written.text_tools import TextToolsModel

__all__ = [
    "AnthropicDialect",
    "AnthropicModel",
    "Breaker",
    "BreakerPolicy",
    "ChatDialect",
    "Example",
    "GuardedModel",
    "HttpChatModel",
    "JsonToolsModel",
    "LocalModel",
    "ModelTimeouts",
    "OpenAIChatModel",
    "ResponsesDialect",
    "ResponsesModel",
    "RouteMetrics",
    "RouteObserver",
    "RouterModel",
    "ScriptError",
    "ScriptedModel",
    "TextToolsModel",
    "model_from_spec",
]

AUTO: Final = "auto"
"""The model when none is chosen."""
_SCRIPTED = "scripted"
_FORMS = "openai:NAME, scripted:FILE, scripted, local, auto, or VENDOR:NAME"
_FORM = re.compile(r"(?P<vendor>[^:+@\s]+)(?:\+(?P<tools>[^:]*))?:(?P<name>.+?)(?:@(?P<url>https?://.*))?")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One model of a setting."""

    vendor: Vendor | None
    """None: it comes with this package, by ``own``."""
    name: str
    """The model's name, or the script's path."""
    tools: str = ""
    """How it gets tools when it has no calls of its own: "text", "json", or empty."""
    url: str = ""
    """The address said with it."""
    own: str = _SCRIPTED
    """Which of those that come with this package: scripted or local."""

    @property
    def label(self) -> str:
        """What errors, metrics and routers call it."""
        return f"{self.vendor.name}:{self.name}" if self.vendor is not None else self.own


def model_from_spec(
    spec: str,
    *,
    base_url: str = "",
    api_key: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    timeouts: ModelTimeouts | None = None,
    headers: Mapping[str, str] | None = None,
    context_window: int | None = None,
    breaker: BreakerPolicy | None = None,
    observe: RouteObserver = ignore_route,
) -> ChatModel:
    """Return the model that a setting names.

    Several models may be of several vendors. What belongs to one vendor (``base_url``, ``api_key``, ``headers``
    and ``context_window``) is for the first vendor named and all its models; no other gets to see it.

    Args:
        spec: as above.
        base_url: the endpoint's address; empty: the vendor's own.
        api_key: its key; empty: that of the vendor's own variable.
        environment: values of the vendors' own variables, such as OPENAI_API_KEY.
        timeouts: bounds of the waits.
        headers: sent in addition.
        context_window: tokens of input and output together; None: what the table of vendors says.
        breaker: when the circuit of a model opens.
        observe: is told how every attempt at a model ended.

    Raises:
        ValueError: with everything that is wrong: forms, vendors, addresses, keys, scripts.
    """
    choices: list[_Choice] = []
    problems: list[str] = []
    vendors = shipped_vendors()
    for part in (_usual() if spec.strip() == AUTO else spec).split(","):
        try:
            choices.append(_choice(part.strip(), vendors))
        except ValueError as error:
            problems.append(str(error))
    first = next((choice.vendor for choice in choices if choice.vendor is not None), None)
    made: list[ChatModel] = []
    for choice in choices:
        ours = choice.vendor is first
        try:
            if choice.vendor is None and choice.own == _SCRIPTED:
                made.append(ScriptedModel.load(choice.name) if choice.name else ScriptedModel.shipped())
                continue
            if choice.vendor is None:
                window = context_window if first is None else None
                local = LocalModel(timeouts=timeouts, context_window=window)
                made.append(GuardedModel(local, Breaker(choice.label, breaker)))
                continue
            model = choice.vendor.make_model(
                choice.name,
                base_url=choice.url or (base_url if ours else ""),
                key=api_key if ours else None,
                environment=environment,
                timeouts=timeouts,
                headers=headers if ours else None,
                context_window=context_window if ours else None,
            )
        except (ValueError, OSError) as error:
            problems.append(str(error) if len(choices) == 1 else f"{choice.label}: {error}")
            continue
        # The circuit is about the endpoint: it lies under the form of tools, which a small model may miss often.
        made.append(_with_tool_form(GuardedModel(model, Breaker(choice.label, breaker)), choice.tools))
    if problems:
        raise ValueError("; ".join(problems))
    if len(made) == 1 and isinstance(made[0], ScriptedModel):
        return made[0]
    return RouterModel(made, labels=[choice.label for choice in choices], breaker=None, observe=observe)


def _usual() -> str:
    """Return what is used when no model is chosen, and say so where it is not the local one."""
    if is_installed():
        return LOCAL
    _log.warning(
        "no model is chosen and the local one is not installed (%s): answers come from a script; "
        "choose a model by DUALCLAW_MODEL=VENDOR:NAME",
        HOW_TO_INSTALL,
    )
    return _SCRIPTED


def _choice(part: str, vendors: Mapping[str, Vendor]) -> _Choice:
    kind, colon, rest = part.partition(":")
    if kind == _SCRIPTED:
        return _Choice(None, rest)
    if kind == LOCAL:
        if colon:
            raise ValueError(f"model {part!r}: there is one local model, and it is called local")
        return _Choice(None, "", own=LOCAL)
    shown = part.partition("@")[0] if "://" in part else part  # an address may hold a key
    found = _FORM.fullmatch(part)
    if found is None:
        raise ValueError(f"model {shown!r} is not known; a model is one of {_FORMS}")
    try:
        vendor = find_vendor(vendors, found["vendor"].lower())
    except ValueError as error:
        raise ValueError(f"model {shown!r}: {error}; a model is one of {_FORMS}") from None
    tools = found["tools"]
    if tools is not None and tools not in ("text", "json"):
        raise ValueError(f"model {shown!r}: after the + of a vendor comes text or json, not {tools!r}")
    if "://" in found["name"]:
        raise ValueError(f"model {shown!r}: it must be VENDOR:NAME@http://... or VENDOR:NAME@https://...")
    return _Choice(vendor, found["name"], tools or "", found["url"] or "")


def _with_tool_form(model: ChatModel, form: str) -> ChatModel:
    match form:
        case "text":
            return TextToolsModel(model)
        case "json":
            return JsonToolsModel(model)
    return model
