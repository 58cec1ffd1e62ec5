"""Policies: which calls need a yes, how people are asked, and whose yes is remembered."""

import pytest

from dualclaw import RememberScope, StopReason
from dualclaw.errors import FieldError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.call import Call
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.questions import remembered_name
from dualclaw_server.engine.trace import Trace
from dualclaw_server.interceptors.hitl import HitlInterceptor, Opinion, Policy
from dualclaw_server.interceptors.sanitizer import ToolSanitizerInterceptor

from .conftest import CALLER, Opener, turn
from .people import ANNA, DONE, Ledger, answer, asks, checkpoint_of, decide, ids, open_items, pay, resume

CONVERSATION, TENANT = RememberScope.REMEMBER_SCOPE_CONVERSATION, RememberScope.REMEMBER_SCOPE_TENANT
FINISHED = StopReason.STOP_REASON_FINISHED


async def test_the_first_policy_with_an_opinion_decides(open_engine: Opener) -> None:
    """Order decides between exact names, globs and predicates; None passes on; the default is the last word."""

    async def unless_small(call: Call, _: Trace) -> Opinion:
        return None if call.args["to"] == "small" else "Large?"

    ledger = Ledger()
    hitl = HitlInterceptor(
        [
            Policy("free_*", ask=False),
            Policy("pay", ask=unless_small),
            Policy("bank/*", ask=False),
            Policy("p?y", ask=False),
        ],
        default=True,
    )
    tools = [ledger.tool(name) for name in ("free_lunch", "pay", "other")]
    agent = Agent("a", tools=tools, interceptors=[hitl])
    engine = await open_engine(
        agent,
        turn(0, {"call": "free_lunch", "id": "f", "args": {"to": "x"}}, pay("small"), pay("big"),
             {"call": "other", "id": "o", "args": {"to": "y"}}, {"call": "gone", "id": "g"}),
        DONE,
    )  # fmt: skip
    (info,) = await engine.runner.agents_info(CALLER)
    assert {tool.name: tool.needs_approval for tool in info.tools} == {"free_lunch": False, "pay": True, "other": True}
    asked = await engine.ask("go")
    assert [(item.id, item.prompt) for item in open_items(asked)] == [("big", "Large?"), ("o", "Run other?")]


async def test_nothing_is_asked_by_default(open_engine: Opener) -> None:
    """An interceptor without policies lets everything run."""
    ledger = Ledger()
    agent = Agent("a", tools=[ledger.tool()], interceptors=[HitlInterceptor()])
    engine = await open_engine(agent, turn(0, pay("p1")), DONE)
    assert (await engine.ask("go")).last.done.stop_reason == FINISHED
    assert ledger.to == ["p1"]
    assert not (await engine.runner.agents_info(CALLER))[0].tools[0].needs_approval


def test_a_policy_that_cannot_work_is_refused() -> None:
    """Mistakes are found where they are made, and approvals can never be made switchable."""
    for kwargs, problem in (
        ({"tools": ""}, "must name a tool"),
        ({"tools": "x", "expires_in": 0}, "expires_in"),
        ({"tools": "x", "allowed": ()}, "at least one answer"),
        ({"tools": "x", "allowed": ("wave",)}, "wave"),
    ):
        with pytest.raises(ValueError, match=problem):
            Policy(**kwargs)  # type: ignore[arg-type]
    assert HitlInterceptor().fail_closed
    assert not HitlInterceptor().switchable


async def test_a_policy_that_fails_lets_nothing_pass(open_engine: Opener) -> None:
    """An exception in a predicate fails the run; the tool has not run."""

    def broken(call: Call, _: Trace) -> Opinion:
        raise LookupError(call.name)

    ledger = Ledger()
    agent = Agent("a", tools=[ledger.tool()], interceptors=[asks(Policy("*", ask=broken))])
    engine = await open_engine(agent, turn(0, pay("p1")), DONE)
    asked = await engine.ask("go")
    assert asked.last.error.diagnosis.code == "internal"
    assert ledger.entries == []


async def test_secrets_are_masked_for_people_and_hashed_for_real(open_engine: Opener) -> None:
    """The prompt and the arguments of a question show no secret; two calls that look alike have different hashes."""

    class Masks(Interceptor):
        def mask(self, value: object) -> object:
            if isinstance(value, dict):
                return {key: "***" if key == "to" else item for key, item in value.items()}
            return value

    ledger = Ledger()
    policy = Policy("pay", prompt="Pay {{args.to}} with {{args}}?")
    agent = Agent("a", tools=[ledger.tool()], interceptors=[asks(policy), Masks()])
    engine = await open_engine(agent, turn(0, pay("p1", "hunter1"), pay("p2", "hunter2")), DONE)
    asked = await engine.ask("go")
    assert "hunter" not in "".join(map(str, asked.events))
    items = open_items(asked)
    assert items[0].prompt == 'Pay *** with {"to": "***"}?'
    assert items[0].args_hash != items[1].args_hash
    await answer(engine, asked, decide("p1"), decide("p2"))
    assert sorted(map(str, ledger.to)) == ["hunter1", "hunter2"]


# Remembered approvals


@pytest.mark.parametrize(
    ("remember", "here", "elsewhere", "stranger"),
    [(0, True, True, True), (1, True, True, True), (CONVERSATION, False, True, True), (TENANT, False, False, True)],
)
async def test_an_approval_is_remembered_as_far_as_was_said(
    open_engine: Opener, remember: RememberScope.ValueType, here: bool, elsewhere: bool, stranger: bool
) -> None:
    """For this call, the conversation, or the tenant; who had said so is noted with every call that profits."""
    ledger = Ledger()
    agent = Agent("a", tools=[ledger.tool(), ledger.tool("other")], interceptors=[asks(Policy("*"))])
    other = {"when": {"user": "other", "step": 0}, "say": [{"call": "other", "args": {"to": "x"}}]}
    engine = await open_engine(agent, other, turn(0, {"call": "pay", "args": {"to": "x"}}), DONE)
    asked = await engine.ask("go")
    operator = type(CALLER)("tenant", "anna", CALLER.roles)
    await answer(engine, asked, decide(ids(asked)[0], remember=remember), caller=operator)
    conversation = asked.conversation_id

    second = await engine.ask("go", conversation=conversation)
    assert (second.last.done.stop_reason != FINISHED) is here
    if not here:
        notes = {k: v for k, v in (await checkpoint_of(engine.store, second.key)).extras.items() if "remembered" in k}
        assert len(notes) == 1
        assert '"approver": "anna"' in next(iter(notes.values()))
    assert ((await engine.ask("go")).last.done.stop_reason != FINISHED) is elsewhere
    foreign = type(CALLER)("other tenant", "eve", CALLER.roles)
    assert ((await engine.ask("go", caller=foreign)).last.done.stop_reason != FINISHED) is stranger
    assert ids(await engine.ask("other"))
    assert len(ledger.entries) == 1 + (not here) + (not elsewhere)


async def test_a_remembered_approval_is_saved_with_the_answer(open_engine: Opener) -> None:
    """A user may remember for the conversation; a partial answer counts at once, in a run that still waits."""
    ledger = Ledger()
    agent = Agent("a", tools=[ledger.tool()], interceptors=[asks()])
    engine = await open_engine(agent, turn(0, pay("p1"), pay("p2")), DONE)
    asked = await engine.ask("go")
    asked = await answer(engine, asked, decide("p1", remember=CONVERSATION), caller=ANNA)
    assert ids(asked) == ["p2"]  # asked is asked: only later calls profit
    kept = await engine.store.get("tenant", f"kept/approvals/{asked.conversation_id}/a/pay")
    assert kept is not None
    assert b'"approver": "anna"' in kept[0]


@pytest.mark.parametrize("scope", [4, 9, -1])
async def test_a_scope_nobody_knows_remembers_nothing(open_engine: Opener, scope: int) -> None:
    """A number that is no value of the enum is refused, so that a user's yes never comes to hold for the tenant."""
    ledger = Ledger()
    engine = await open_engine(Agent("a", tools=[ledger.tool()], interceptors=[asks()]), turn(0, pay("p1")), DONE)
    asked = await engine.ask("go")
    with pytest.raises(FieldError) as refused_:
        await resume(engine, asked.key, decide("p1", remember=scope), caller=ANNA)
    assert list(refused_.value.fields) == ["decisions[0].remember"]
    with pytest.raises(ValueError, match="remembers nothing"):
        remembered_name(scope, "c", "a", "pay")  # type: ignore[arg-type]  # what the type forbids may come from the wire
    assert ledger.entries == []


async def test_what_was_left_masked_in_an_edit_stays_what_it_is(open_engine: Opener) -> None:
    """People edit what they see; a value they leave as it was shown runs as it really is, never as its mask."""
    ledger = Ledger()
    agent = Agent("a", tools=[ledger.tool()], interceptors=[asks(), ToolSanitizerInterceptor()])
    secret = "password=hunter2"
    engine = await open_engine(agent, turn(0, pay("p1", secret), pay("p2", secret)), DONE)
    asked = await engine.ask("go")
    shown = '{"to": "password=[masked:password]"'
    assert open_items(asked)[0].args_json == shown + "}"
    left, changed = shown + ', "amount": 7}', '{"to": "anna"}'
    await answer(engine, asked, decide("p1", "edit", args_json=left), decide("p2", "edit", args_json=changed))
    paid = sorted(ledger.entries, key=str)
    assert paid == [("pay", {"to": "anna", "amount": 1}), ("pay", {"to": secret, "amount": 7})]
