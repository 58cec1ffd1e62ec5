"""The agents of the sweep, with failpoints in their model, their tools and every hook of an interceptor.

One agent does the same with tools of each effect class: two calls at once, then one that a person must approve,
then an answer. A second one only talks, long enough to be stopped.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import get_args

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.interceptor import (
    DEPRECATED,
    HOOKS,
    Interceptor,
    ModelCall,
    ModelNext,
    Observation,
    ToolNext,
    ToolRequest,
)
from dualclaw_server.engine.model import (
    ChatModel,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    ModelTraits,
    TextDelta,
    ToolSpec,
)
from dualclaw_server.engine.tool import Effect as EffectName
from dualclaw_server.engine.tool import Tool, ToolContext, tool
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy

from .failpoints import Failpoint
from .ledger import Effect, Ledger

KINDS: tuple[EffectName, ...] = get_args(EffectName)
ITEMS = ("a", "b")
GATED_ITEM = "c"
LOOKING, ASKING = "Looking at a and b.", "One more needs a yes."
SAYING = "All of it is done, as far as I know."
TALK = "一 word at a time, and on. " * 20
_MIDDLE = 3
"""Deltas of an answer after which its middle is reached."""


def script() -> str:
    """Return the script of the model; a user text "work KIND" uses the tools of that effect class, "talk" none."""
    turns: list[dict[str, object]] = []
    for kind in KINDS:
        slow = {"chunk": 4, "delay": 0.01}
        looking: list[dict[str, object]] = [
            {"reasoning": "Both at once.", "chunk": 5},
            {"text": LOOKING, **slow},
            *(_call(kind, item) for item in ITEMS),
        ]
        asking: list[dict[str, object]] = [
            {"text": ASKING, **slow},
            _call(f"{kind}_gated", GATED_ITEM),
        ]
        saying: list[dict[str, object]] = [{"text": SAYING, **slow}]
        for step, say in enumerate((looking, asking, saying)):
            turns.append({"when": {"user": f"work {kind}", "step": step}, "say": say})
    turns.append({"when": {"user": "talk"}, "say": [{"text": TALK, "chunk": 3, "delay": 0.01}]})
    turns.append({"say": [{"text": "You said {{user}}"}]})
    return json.dumps({"name": "sweep", "turns": turns}, ensure_ascii=False)


def _call(tool: str, item: str) -> dict[str, object]:
    return {"call": tool, "args": {"item": item}}


class FailpointModel:
    """A ChatModel around another one: dies before a call, in the middle of an answer, or with it in hand."""

    def __init__(self, model: ChatModel, failpoint: Failpoint) -> None:
        self._model = model
        self._failpoint = failpoint

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def traits(self) -> ModelTraits:
        return self._model.traits

    def with_tools(self, tools: Sequence[ToolSpec]) -> ChatModel:
        return FailpointModel(self._model.with_tools(tools), self._failpoint)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelChunk, None]:
        self._failpoint.at("model:before")
        texts = 0
        async with aclosing(self._model.stream(request)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, ModelResponse):
                    self._failpoint.at("model:after")
                yield chunk
                texts += isinstance(chunk, TextDelta)
                if texts == _MIDDLE:
                    self._failpoint.at("model:mid")

    async def generate(self, request: ModelRequest) -> ModelResponse:
        return await self._model.generate(request)

    async def aclose(self) -> None:
        await self._model.aclose()


def make_agents(failpoint: Failpoint, ledger: Ledger, *, pace: float = 0.0) -> Sequence[Agent]:
    """Return the agents; ``pace`` seconds lie before and after each effect."""
    tools = [made for kind in KINDS for made in _tools(kind, failpoint, ledger, pace)]
    hitl = HitlInterceptor([Policy("*_gated", prompt="May it?", expires_in=3_600)])
    switch = Interceptor(name="spare", switchable=True)
    return [Agent("worker", tools=tools, interceptors=[_points_interceptor(failpoint), hitl, switch]), Agent("talker")]


def _tools(kind: EffectName, failpoint: Failpoint, ledger: Ledger, pace: float) -> Sequence[Tool]:
    def text(item: str) -> str:
        return f"{kind} did {item}"

    async def act(item: str, context: ToolContext) -> str:
        """Do something to an item, for the world to see."""
        failpoint.at("tool:before")
        await asyncio.sleep(pace)
        ledger.add(Effect(context.run_id, kind, item, context.idempotency_key))
        await asyncio.sleep(pace)
        failpoint.at("tool:after")
        return text(item)

    async def lookup(key: str) -> str | None:
        failpoint.at("lookup:before")
        found = [effect for effect in ledger.effects() if effect.key == key]
        failpoint.at("lookup:after")
        return text(found[0].item) if found else None

    asks = lookup if kind == "reconcile" else None
    return [tool(name=name, effect=kind, lookup=asks)(act) for name in (kind, f"{kind}_gated")]


def _points_interceptor(failpoint: Failpoint) -> Interceptor:
    """Return an interceptor that passes a point in each hook."""

    async def intercept_stream(
        self: Interceptor, call: ModelCall, call_next: ModelNext
    ) -> AsyncGenerator[ModelChunk, None]:
        failpoint.at("hook.intercept_stream:at")
        async with aclosing(call_next(call)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def intercept_tool(self: Interceptor, request: ToolRequest, call_next: ToolNext) -> Observation:
        failpoint.at("hook.intercept_tool:before")
        observation = await call_next(request)
        failpoint.at("hook.intercept_tool:after")
        return observation

    def plain(name: str) -> Callable[..., object]:
        async def hook(self: Interceptor, *args: object) -> object:
            failpoint.at(f"hook.{name}:at")
            return await getattr(Interceptor, name)(self, *args)

        return hook

    hooks: dict[str, object] = {name: plain(name) for name in HOOKS if name not in DEPRECATED}
    del hooks["intercept_call"]  # by default that goes through intercept_stream
    hooks |= {"intercept_stream": intercept_stream, "intercept_tool": intercept_tool}
    made: Interceptor = type("PointsInterceptor", (Interceptor,), hooks)(order=100)
    return made
