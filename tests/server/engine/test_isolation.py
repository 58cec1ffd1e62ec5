"""Many runs on one agent at once: none ever sees anything of another's."""

import asyncio
import contextvars
from collections.abc import Sequence

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.caller import Caller
from dualclaw_server.engine.interceptor import Interceptor, Observation, Prompt, RunConfig, ToolNext, ToolRequest
from dualclaw_server.engine.outcome import Outcome
from dualclaw_server.engine.tool import Tool, ToolContext, tool
from dualclaw_server.engine.trace import Trace

from .conftest import Opener, results, turn

RUNS = 100
WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


def tool_of(owner: str, leaks: list[str]) -> Tool:
    """A tool that is bound to one user, and looks around for traces of others."""

    @tool(name="mine", effect="read")
    async def mine(context: ToolContext) -> str:
        """Say whose this is."""
        await asyncio.sleep(0)
        seen = {
            "subject": f"{context.tenant}/{context.subject}",
            "session": context.trace.session.get("who"),
            "extras": context.trace.extras("binds").get("who"),
            "context": WHO.get(),
            "metadata": context.trace.user_text,
        }
        leaks.extend(f"{owner} sees {what} {found}" for what, found in seen.items() if found != owner)
        context.trace.session.set("result", owner)
        return owner

    return tool_of_thread(owner, leaks) if owner.endswith("7") else mine


def tool_of_thread(owner: str, leaks: list[str]) -> Tool:
    """The same in a thread."""

    @tool(name="mine", effect="read")
    def mine(context: ToolContext) -> str:
        """Say whose this is."""
        if WHO.get() != owner or context.trace.session.get("who") != owner:
            leaks.append(f"{owner} in a thread sees {WHO.get()}")
        return owner

    return mine


class Binds(Interceptor):
    """Gives every user a tool of their own, and keeps who it is wherever something can be kept."""

    def __init__(self, leaks: list[str]) -> None:
        super().__init__()
        self.leaks = leaks

    async def before_agent(self, trace: Trace, config: RunConfig) -> RunConfig:
        owner = f"{trace.key.tenant}/{trace.subject}"
        if list(trace.session) or list(trace.extras(self.name)):
            self.leaks.append(f"{owner} begins with values")
        WHO.set(owner)
        trace.session.set("who", owner)
        trace.extras(self.name).set("who", owner)
        await asyncio.sleep(0)
        return RunConfig(f"For {owner}.", (tool_of(owner, self.leaks),), config.model, config.limits, None)

    def look(self, trace: Trace, where: str) -> None:
        """Whatever is kept must be the run's own."""
        owner = f"{trace.key.tenant}/{trace.subject}"
        found = {WHO.get(), trace.session.get("who"), trace.extras(self.name).get("who"), trace.user_text}
        if found != {owner}:
            self.leaks.append(f"{owner} in {where} finds {found}")

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        self.look(trace, "on_reason_start")
        texts = " ".join(part.text for message in prompt.messages for part in message.parts)
        owner = f"{trace.key.tenant}/{trace.subject}"
        if prompt.instructions != f"For {owner}." or owner not in texts:
            self.leaks.append(f"{owner} is prompted with {prompt.instructions} {texts}")
        return None

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        self.look(trace, "on_action_start")
        return None

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        self.look(request.trace, "intercept_tool")
        return await call_next(request)

    async def on_tool_call_end(
        self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
    ) -> Outcome | None:
        self.look(trace, "on_tool_call_end")
        return None

    async def on_agent_end(self, trace: Trace) -> None:
        self.look(trace, "on_agent_end")


async def test_a_hundred_runs_see_nothing_of_each_other(open_engine: Opener) -> None:
    """Tools bound per user, session, extras, context variables, prompts and answers are each run's own, on two tenants
    with the same users.
    """
    leaks: list[str] = []
    engine = await open_engine(
        Agent("a", interceptors=[Binds(leaks)]),
        turn(0, {"text": "I ask, "}, {"sleep": 0.001}, {"call": "mine", "id": "same id for all"}),
        turn(1, {"text": "{{result}}", "chunk": 2}),
    )
    callers = [Caller(f"tenant{number % 2}", f"user{number // 2}", frozenset({"user"})) for number in range(RUNS)]
    started = [await engine.start(f"{caller.tenant}/{caller.subject}", caller=caller) for caller in callers]
    for caller, asked in zip(callers, await asyncio.gather(*map(engine.read, started)), strict=True):
        owner = f"{caller.tenant}/{caller.subject}"
        assert asked.last.done.content == f"I ask, \n\n{owner}"
        assert {event.tenant_id for event in asked.events} == {caller.tenant}
        page = await engine.store.list_messages(caller.tenant, asked.conversation_id, page_size=100, page_token="")
        assert list(results(list(page.items)).values()) == [owner]
    assert leaks == []
    assert WHO.get() == "nobody"


async def test_a_run_after_another_begins_empty(open_engine: Opener) -> None:
    """Values are of a run, not of its conversation: the next question finds none of them."""
    found: list[object] = []

    class Leaves(Interceptor):
        async def on_agent_start(self, trace: Trace) -> Outcome | None:
            found.append(trace.session.get("left"))
            found.append(trace.extras(self.name).get("left"))
            trace.session.set("left", 1)
            trace.extras(self.name).set("left", 1)
            return None

    engine = await open_engine(Agent("a", interceptors=[Leaves()]), turn(0, {"text": "Hello."}))
    first = await engine.ask("one")
    await engine.ask("two", conversation=first.conversation_id)
    assert found == [None] * 4
