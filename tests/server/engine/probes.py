"""Interceptors that write down every hook they are called with, and do one chosen thing at one of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from dualclaw import ContentPart, Decision, DecisionAction, Message, ResumeRequest, RunResponse, Usage
from dualclaw.errors import EngineError
from dualclaw.rules import check_stream
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, ModelCall, ModelNext, Observation, Prompt
from dualclaw_server.engine.model import ModelChunk, ModelOptions, ModelResponse
from dualclaw_server.engine.outcome import Ask, End, Fail, Outcome, Replace, Suspend

from .conftest import CALLER, TIMEOUT, TRACE, Asked, Engine

HOOKS = [name for name in vars(Interceptor) if name.startswith(("before_", "on_", "intercept_"))]
"""Every hook of the class, read from the class, so that a new one cannot be forgotten here."""

_RAISED = ("before_agent", "on_reason_retry", "intercept_stream", "intercept_call", "intercept_tool")
"""Hooks whose return value is taken: what they want is raised."""


@dataclass(frozen=True)
class Entry:
    """One hook of one interceptor."""

    hook: str
    name: str
    call_id: str = ""
    over: bool = False
    """False: it begins."""


@dataclass
class Log:
    """What all probes of a test write, in order, and what holds them up."""

    entries: list[Entry] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def names(self, hook: str) -> list[str]:
        """Who was called at a hook, in order."""
        return [entry.name for entry in self.entries if entry.hook == hook and not entry.over]


class Probe(Interceptor):
    """Writes down its hooks. ``does`` is done at the first call of ``at``; everywhere else it goes on."""

    def __init__(
        self,
        log: Log,
        *,
        name: str = "probe",
        order: int = 0,
        at: str = "",
        does: str = "ok",
        fail_closed: bool = False,
        enabled: bool = True,
    ) -> None:
        super().__init__(name=name, order=order, fail_closed=fail_closed, enabled=enabled)
        self.log = log
        self.at = at
        self.does = does

    async def meet(self, hook: str, args: Sequence[object]) -> Outcome | None:
        """A hook has been called; returns what it wants."""
        call = next((arg for arg in args if isinstance(arg, Call)), None)
        call_id = call.id if call is not None else ""
        self.log.entries.append(Entry(hook, self.name, call_id))
        if hook == self.at:
            self.at = ""
            return await self._act(hook, args)
        return None

    async def _act(self, hook: str, args: Sequence[object]) -> Outcome | None:
        match self.does:
            case "raises":
                raise ValueError("a probe's own failure")
            case "cancels itself":
                raise asyncio.CancelledError
            case "misuses":
                return Outcome()
            case "suspends":
                return Suspend(Ask("Go on?"))
            case "ends":
                return End("That is all.", "exited")
            case "fails":
                return Fail(EngineError("QUOTA_EXCEEDED", "Enough."))
            case "replaces":
                return Replace(instead(hook, args))
            case "hangs":
                self.log.reached.set()
                await self.log.gate.wait()
                self.log.entries.append(Entry(hook, self.name, over=True))
        return None


def instead(hook: str, args: Sequence[object]) -> object:
    """A value that a hook may be replaced by; where nothing can be replaced, any."""
    match hook:
        case "on_reason_start":
            prompt = args[1]
            assert isinstance(prompt, Prompt)
            return Prompt(prompt.messages, "Be brief.", prompt.tools)
        case "on_prepare":
            return ModelOptions(temperature=0.5)
        case "on_reason_end" | "on_thought":
            return Message(parts=[ContentPart(text="Replaced.")])
        case "intercept_stream" | "intercept_call":
            return ModelResponse(Message(parts=[ContentPart(text="Replaced.")]), "stop", Usage())
        case "on_action_start":
            calls = args[1]
            assert isinstance(calls, Sequence)
            return {call.id: {"text": "replaced"} for call in calls}
        case "on_plan":
            return ["another", "plan"]
        case "on_tool_call_start" | "on_action" | "intercept_tool" | "on_tool_call_end" | "on_observation":
            return Observation([ContentPart(text="replaced")])
    return "something"


def _hook(hook: str) -> Callable[..., object]:
    """A method that meets one hook and goes on as the engine's own would."""
    if hook == "intercept_stream":

        async def stream(self: Probe, call: ModelCall, call_next: ModelNext) -> AsyncGenerator[ModelChunk, None]:
            wanted = await self.meet(hook, (call,))
            if wanted is not None:
                raise wanted
            async with aclosing(call_next(call)) as chunks:
                async for chunk in chunks:
                    yield chunk

        return stream

    async def method(self: Probe, *args: object) -> object:
        wanted = await self.meet(hook, args)
        if wanted is not None and hook in _RAISED:
            raise wanted
        if wanted is not None or hook not in _RAISED:
            return wanted
        if hook == "before_agent":
            return args[1]
        if hook == "on_reason_retry":
            return False
        call_next = args[1]
        assert callable(call_next)
        return await call_next(args[0])

    return method


FullProbe: type[Probe] = type("FullProbe", (Probe,), {hook: _hook(hook) for hook in HOOKS})
"""A probe that overrides every hook, deprecated ones too."""


def probe(*hooks: str) -> type[Probe]:
    """A class of probes that overrides these hooks only."""
    return type("SomeProbe", (Probe,), {hook: _hook(hook) for hook in hooks})


async def read(engine: Engine, asked: Asked, segments: int) -> Asked:
    """Follow a run to the end of a segment and hold all of it against the rules of a stream."""
    asked.events.clear()
    ends = 0
    async with asyncio.timeout(TIMEOUT), aclosing(engine.store.follow(asked.key, 0)) as batches:
        async for frames in batches:
            for frame in frames:
                asked.events += RunResponse.FromString(frame.body).events
                ends += frame.ends_segment
                if ends == segments:
                    assert check_stream(asked.events) == []
                    return asked
    raise AssertionError("the stream ended early")


async def resume(
    engine: Engine, asked: Asked, action: DecisionAction.ValueType = DecisionAction.DECISION_ACTION_APPROVE
) -> Asked:
    """Answer every open question of a parked run and read it to the end of its next segment."""
    run = (await engine.store.head(asked.key)).run
    decisions = [Decision(interrupt_id=item.id, action=action) for item in run.interrupts]
    segments = sum(event.WhichOneof("payload") in ("done", "error") for event in asked.events)
    await engine.runner.resume(CALLER, ResumeRequest(run_id=asked.key.run_id, decisions=decisions), TRACE)
    return await read(engine, asked, segments + 1)
