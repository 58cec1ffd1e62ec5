"""Hooks around calls, batches and approvals: behaviours that docs/parity.md promises and no other test shows."""

import json
from collections.abc import Sequence

import pytest

from dualclaw import ContentPart, StopReason
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor, Observation, Prompt, ToolNext, ToolRequest
from dualclaw_server.engine.outcome import Outcome, Replace
from dualclaw_server.engine.plan import PlanReAct
from dualclaw_server.engine.tool import tool
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.hitl import HitlInterceptor, Policy
from dualclaw_server.interceptors.permission import PermissionInterceptor, Rule

from .conftest import Opener, echo, results, turn
from .people import DONE, Ledger, answer, decide, ids, open_items, pay
from .probes import Log, probe

ONE_CALL = (turn(0, {"call": "echo", "id": "c", "args": {"text": "hi"}}), turn(1, {"text": "{{result}}"}))
FINISHED = StopReason.STOP_REASON_FINISHED


class Prefills(Interceptor):
    """Answers every call in the tool's place."""

    async def on_tool_call_start(self, trace: Trace, call: Call) -> Outcome | None:
        return Replace(Observation([ContentPart(text="from the cache")]))


async def test_a_call_answered_by_an_interceptor_runs_no_tool(open_engine: Opener) -> None:
    """Neither the tool nor what stands around it is reached; the end hook is, and model and people have the answer."""
    ledger, log = Ledger(), Log()
    watching = probe("on_tool_call_start", "intercept_tool", "on_tool_call_end")(log, order=-1)
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[watching, Prefills()]),
        turn(0, pay("p1")),
        turn(1, {"text": "{{result}}"}),
    )
    asked = await engine.ask("go")
    assert ledger.entries == []
    assert [entry.hook for entry in log.entries] == ["on_tool_call_start", "on_tool_call_end"]
    assert asked.last.done.process_steps[0].result == "from the cache"
    assert asked.last.done.content == "from the cache"


class Shortens(Interceptor):
    """Puts another result in the place of every one."""

    async def on_tool_call_end(
        self, trace: Trace, call: Call, observation: Observation, error: BaseException | None, duration: float
    ) -> Outcome | None:
        return Replace(Observation([ContentPart(text=f"short for {observation.text}")]))


async def test_a_result_put_in_place_of_another_is_the_one_everybody_has(open_engine: Opener) -> None:
    """Step, transcript and the next model call have the new one; the old one is nowhere."""
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Shortens()]), *ONE_CALL)
    asked = await engine.ask("go")
    assert asked.last.done.process_steps[0].result == "short for <hi>"
    assert asked.last.done.content == "short for <hi>"
    assert results(await engine.messages(asked.conversation_id)) == {"c": "short for <hi>"}


async def test_the_end_of_a_batch_is_told_once_and_not_while_it_waits(open_engine: Opener) -> None:
    """A suspended batch has begun and not ended; with the answer it is begun again and ends."""
    ledger, log = Ledger(), Log()
    watching = probe("on_action_start", "on_action_end")(log, order=-1)
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[watching, HitlInterceptor([Policy("pay")])]),
        turn(0, pay("p1")),
        DONE,
    )
    asked = await engine.ask("go")
    assert [entry.hook for entry in log.entries] == ["on_action_start"]
    await answer(engine, asked, decide("p1"))
    assert [entry.hook for entry in log.entries].count("on_action_end") == 1
    assert log.entries[-1].hook == "on_action_end"


@pytest.mark.parametrize(
    ("call", "code", "hint"),
    [
        ({"call": "gone"}, "tool.unknown", "Tools there are: echo"),
        ({"call": "echo", "args": {"text": 5}}, "tool.bad_arguments", "Schema of echo: {"),
        ({"call": "echo", "raw_args": '{"text": "cu'}, "tool.bad_arguments", "Schema of echo: {"),
    ],
)
async def test_what_cannot_run_passes_the_hooks_and_says_what_would_be_right(
    open_engine: Opener, call: dict[str, object], code: str, hint: str
) -> None:
    """Its hooks are called like any other call's, no tool is reached, and the model gets code, retryable and hint."""
    log = Log()
    watching = probe("on_tool_call_start", "intercept_tool", "on_tool_call_end")(log)
    agent = Agent("a", tools=[echo], interceptors=[watching])
    engine = await open_engine(agent, turn(0, {**call, "id": "c"}), turn(1, {"text": "I see."}))
    asked = await engine.ask("go")
    assert [(entry.hook, entry.call_id) for entry in log.entries] == [
        ("on_tool_call_start", "c"),
        ("on_tool_call_end", "c"),
    ]
    error = json.loads(results(await engine.messages(asked.conversation_id))["c"])["error"]
    assert error["code"] == code
    assert error["retryable"] is (code == "tool.bad_arguments")
    assert error["hint"].startswith(hint)
    assert error["message"]


@tool(effect="read")
def in_a_thread() -> str:
    """Work in a thread."""
    return "threaded"


class Marks(Interceptor):
    """Marks whatever comes out of a tool."""

    async def intercept_tool(self, request: ToolRequest, call_next: ToolNext) -> Observation:
        observation = await call_next(request)
        return Observation([ContentPart(text=f"{request.tool.name} via {self.name}")], observation.diagnosis)


async def test_one_hook_stands_around_every_kind_of_tool(open_engine: Opener) -> None:
    """Coroutines, plain functions, agents and tools of the strategy all pass the same hook; none is missed silently."""
    below = Agent("helper")
    plan: dict[str, object] = {"call": "create_plan", "id": "p", "args": {"steps": ["one", "two"]}}
    engine = await open_engine(
        Agent("a", tools=[echo, in_a_thread], sub_agents=[below], strategy=PlanReAct(), interceptors=[Marks()]),
        {"when": {"user": "^inner$"}, "say": [{"text": "Inner."}]},
        turn(0, {"call": "echo", "id": "e", "args": {"text": "hi"}}, {"call": "in_a_thread", "id": "t"},
             {"call": "helper", "id": "h", "args": {"request": "inner"}}, plan),
        turn(1, {"text": "Done."}),
    )  # fmt: skip
    asked = await engine.ask("go")
    assert results(await engine.messages(asked.conversation_id)) == {
        "e": "echo via marks",
        "t": "in_a_thread via marks",
        "h": "helper via marks",
        "p": "create_plan via marks",
    }


class Hides(Interceptor):
    """Tells the model of no tool at all."""

    async def on_reason_start(self, trace: Trace, prompt: Prompt) -> Outcome | None:
        prompt.tools = []
        return None


async def test_what_is_hidden_from_the_model_can_still_be_called(open_engine: Opener) -> None:
    """Hiding chooses what is told, and is no permission: a call the model makes all the same is run."""
    script = (
        {"when": {"tools": False, "step": 0}, "say": [{"call": "echo", "id": "c", "args": {"text": "hi"}}]},
        turn(1, {"text": "{{result}}"}),
    )
    engine = await open_engine(Agent("a", tools=[echo], interceptors=[Hides()]), *script)
    assert (await engine.ask("go")).last.done.content == "<hi>"


async def test_two_approvers_of_one_agent_ask_for_themselves(open_engine: Opener) -> None:
    """Both instances are at work, each with its policies; nothing runs before both have been answered."""
    ledger = Ledger()
    money = HitlInterceptor([Policy("pay", prompt="Pay?")], name="money")
    mail = HitlInterceptor([Policy("send", prompt="Send?")], name="mail")
    engine = await open_engine(
        Agent("a", tools=[ledger.tool("pay"), ledger.tool("send")], interceptors=[money, mail]),
        turn(0, pay("p1"), {"call": "send", "id": "s1", "args": {"to": "anna"}}),
        DONE,
    )
    asked = await engine.ask("go")
    prompts = {}
    while asked.last.done.stop_reason == StopReason.STOP_REASON_INTERRUPTED:
        assert ledger.entries == []
        prompts.update({item.id: item.prompt for item in open_items(asked)})
        asked = await answer(engine, asked, *(decide(name) for name in ids(asked)))
    assert prompts == {"p1": "Pay?", "s1": "Send?"}
    assert sorted(name for name, _ in ledger.entries) == ["pay", "send"]


async def test_what_nobody_here_may_use_is_not_asked_about(open_engine: Opener) -> None:
    """A denied tool is refused at once; people are asked about the others only."""
    ledger = Ledger()
    guards = [
        PermissionInterceptor([Rule(("wipe",), effect="deny")], default="allow"),
        HitlInterceptor([Policy("*")]),
    ]
    engine = await open_engine(
        Agent("a", tools=[ledger.tool("pay"), ledger.tool("wipe")], interceptors=guards),
        turn(0, pay("p1"), {"call": "wipe", "id": "w1", "args": {"to": "disk"}}),
        DONE,
    )
    asked = await engine.ask("go")
    assert ids(asked) == ["p1"]
    ended = await answer(engine, asked, decide("p1"))
    assert [name for name, _ in ledger.entries] == ["pay"]
    codes = {step.name: step.diagnosis.code for step in ended.last.done.process_steps}
    assert codes == {"pay": "", "wipe": "permission.denied"}


async def test_refusals_are_errors_to_the_model_and_answers_are_not(open_engine: Opener) -> None:
    """Rejected and skipped calls are flagged as errors; what a person answered in a tool's place is a result."""
    ledger = Ledger()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[HitlInterceptor([Policy("pay")])]),
        turn(0, *map(pay, ("no", "later", "told"))),
        DONE,
    )
    asked = await engine.ask("go")
    decisions = (decide("no", "reject"), decide("later", "skip"), decide("told", "respond", response_json='"paid"'))
    await answer(engine, asked, *decisions)
    parts = [part for m in await engine.messages(asked.conversation_id) for part in m.parts]
    flagged = {p.tool_result.call_id: p.tool_result.is_error for p in parts if p.WhichOneof("part") == "tool_result"}
    assert flagged == {"no": True, "later": True, "told": False}
    assert ledger.entries == []


class Decided(Interceptor):
    """Notes what people said to each call, before any of it runs."""

    def __init__(self) -> None:
        super().__init__(order=1000)
        self.heard: list[tuple[str, str, str]] = []

    async def on_action_start(self, trace: Trace, calls: Sequence[Call]) -> Outcome | None:
        self.heard += [(c.id, c.decision.approver, c.decision.comment) for c in calls if c.decision is not None]
        return None


async def test_an_interceptor_hears_of_an_approval_before_the_call_runs(open_engine: Opener) -> None:
    """Who approved and what they remarked is at the call; what was refused is not among the batch any more."""
    ledger, decided = Ledger(), Decided()
    engine = await open_engine(
        Agent("a", tools=[ledger.tool()], interceptors=[HitlInterceptor([Policy("pay")]), decided]),
        turn(0, pay("p1"), pay("p2")),
        DONE,
    )
    asked = await engine.ask("go")
    assert decided.heard == []
    ended = await answer(engine, asked, decide("p1", comment="fine"), decide("p2", "reject"))
    assert decided.heard == [("p1", "subject", "fine")]
    assert ended.last.done.stop_reason == FINISHED
