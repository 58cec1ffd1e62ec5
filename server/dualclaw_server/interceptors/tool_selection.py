"""Only the tools that matter are sent to the model: fewer tokens, and fewer wrong choices among look-alikes.

Before each model call with more than ``above`` tools, the ones that stay are

- the k that fit best: by BM25 over name, description and parameter names, or by the likeness of embeddings;
  the question counts twice, the newest messages once. A tool whose name stands in the question comes first;
- those in ``always``;
- those that were called in this run: a model that sees a tool of its own calls vanish is confused;
- those of the engine itself, which do not depend on the topic: plan tools, and ``read_more``.

So it is at most k + always + used (more than k only when the question names more). Ties go to the tool that the
agent lists first, and what stays keeps the agent's order, so the same question gives the same request. Tools
left out can still be run: this chooses what is told, not what is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dualclaw import Message, Role
from dualclaw_server.engine.interceptor import Interceptor, Prompt
from dualclaw_server.engine.model import ToolSpec
from dualclaw_server.engine.outcome import Outcome
from dualclaw_server.engine.tool import Tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.bm25 import Bm25, words
from dualclaw_server.interceptors.overflow import READ_MORE

Embed = Callable[[Sequence[str]], Awaitable[Sequence[Sequence[float]]]]
"""Texts to vectors of one length, in order."""

_INDEXES = 64
"""Sets of tools whose index is remembered."""
_NEWEST = 3
"""Messages beside the question that are looked at."""
_QUERY = 2_000
"""Characters of each that are."""
_NAME_WEIGHT = 3

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Index:
    """What is known of a set of tools; a pure function of them."""

    words: Bm25
    vectors: Sequence[Sequence[float]] | None = None


class ToolSelectionInterceptor(Interceptor):
    """Tells the model of the most relevant tools only.

    Args:
        k: tools chosen by relevance. Default 5.
        above: nothing is chosen among this many tools or fewer. Default 20.
        always: names, or globs such as "db_*", of tools that are never left out.
        embed: makes vectors of texts; relevance is their cosine then. Without one, and when it fails: BM25.
        embed_timeout: seconds it may take. Default 10.

    Raises ValueError when k or above is not positive.
    """

    def __init__(
        self,
        k: int = 5,
        above: int = 20,
        always: Sequence[str] = (),
        *,
        embed: Embed | None = None,
        embed_timeout: float = 10.0,
        name: str = "",
        order: int = 0,
        enabled: bool = True,
        switchable: bool = False,
        fail_closed: bool = False,
    ) -> None:
        super().__init__(name=name, order=order, enabled=enabled, switchable=switchable, fail_closed=fail_closed)
        for what, value in (("k", k), ("above", above), ("embed_timeout", embed_timeout)):
            if not value > 0:
                raise ValueError(f"{what} must be above 0, not {value}")
        self._k, self._above, self._always = k, above, tuple(always)
        self._embed, self._timeout = embed, embed_timeout
        self._indexes: OrderedDict[tuple[ToolSpec, ...], _Index] = OrderedDict()

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        """Cut the prompt's tools down."""
        tools = prompt.tools
        if len(tools) <= self._above:
            return None
        question = trace.user_text[:_QUERY]
        scores = await self._scores(tools, question, _newest(prompt.messages))
        named = {place for place, tool in enumerate(tools) if _named(tool.name, question)}
        ranked = sorted(range(len(tools)), key=lambda place: (place not in named, -scores[place], place))
        chosen = set(ranked[: max(self._k, len(named))])
        used = _used(trace)
        prompt.tools = [
            tool for place, tool in enumerate(tools) if place in chosen or tool.name in used or self._stays(tool)
        ]
        return None

    def _stays(self, tool: Tool) -> bool:
        own = tool.kind == "thinking" or tool.name == READ_MORE
        return own or any(fnmatchcase(tool.name, pattern) for pattern in self._always)

    async def _scores(self, tools: Sequence[Tool], question: str, newest: str) -> list[float]:
        index = self._index(tools)
        if self._embed is not None:
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._likeness(self._embed, index, tools, question, newest)
            except Exception:
                log.warning("tools could not be compared by embeddings; by words instead", exc_info=True)
        asked, seen = index.words.scores(words(question)), index.words.scores(words(newest))
        return [2 * one + other for one, other in zip(asked, seen, strict=True)]

    def _index(self, tools: Sequence[Tool]) -> _Index:
        key = tuple(tool.spec for tool in tools)
        index = self._indexes.pop(key, None)
        if index is None:
            index = _Index(Bm25([list(words(_described(tool, _NAME_WEIGHT))) for tool in tools]))
        self._indexes[key] = index
        if len(self._indexes) > _INDEXES:
            self._indexes.popitem(last=False)
        return index

    async def _likeness(
        self, embed: Embed, index: _Index, tools: Sequence[Tool], question: str, newest: str
    ) -> list[float]:
        if index.vectors is None:
            vectors = await embed([_described(tool, 1) for tool in tools])
            if len(vectors) != len(tools):
                raise ValueError(f"{len(tools)} texts were embedded into {len(vectors)} vectors")
            index.vectors = vectors
        asked, seen = await embed([question, newest or question])
        return [2 * _cosine(asked, vector) + _cosine(seen, vector) for vector in index.vectors]


def _described(tool: Tool, weight: int) -> str:
    """Return the text a tool is found by, its name ``weight`` times."""
    properties = tool.parameters.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    return " ".join([*([tool.name] * weight), tool.description, *names])


def _newest(messages: Sequence[Message]) -> str:
    """Return the text of the newest messages, results of tools included."""
    texts = []
    for message in messages[-_NEWEST:]:
        for part in message.parts:
            texts.append(part.text)
            texts += [inner.text for inner in part.tool_result.parts]
    return " ".join(text[:_QUERY] for text in texts if text)


def _named(name: str, question: str) -> bool:
    """Tell whether a name stands in the question, not as a piece of a longer one."""
    return re.search(rf"(?<![A-Za-z0-9_-]){re.escape(name)}(?![A-Za-z0-9_-])", question, re.IGNORECASE) is not None


def _used(trace: Trace) -> set[str]:
    return {
        part.tool_call.name
        for message in trace.own_messages()
        if message.role == Role.ROLE_ASSISTANT
        for part in message.parts
        if part.WhichOneof("part") == "tool_call"
    }


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    length = math.hypot(*one) * math.hypot(*other)
    cosine = sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0
    return cosine if math.isfinite(cosine) else 0.0
