"""PlanReAct: plans that the model makes, follows and revises, and that outlive crashes and questions."""

import asyncio
from collections.abc import Sequence

import pytest

from dualclaw import StopReason
from dualclaw.errors import EngineError
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.checkpoint import Plan
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.outcome import Ask, End, Fail, Outcome, Replace, Suspend
from dualclaw_server.engine.plan import MAX_STEP, MAX_STEPS, PlanReAct, board, clean_step
from dualclaw_server.engine.store import RunStore
from dualclaw_server.engine.texts import TEXTS
from dualclaw_server.engine.tool import tool
from dualclaw_server.engine.trace import Trace

from .conftest import Opener, at_work_with, echo, results, scripted, turn
from .teams import NEVER, checkpoint_of, resume, thoughts

CREATE: dict[str, object] = {"call": "create_plan", "id": "c", "args": {"steps": ["1. find it", "2. check it"]}}


def update(place: int, name: str = "u") -> dict[str, object]:
    return {"call": "update_plan_progress", "id": name, "args": {"next_plan_index": place}}


def revise(place: int, *steps: str, name: str = "r") -> dict[str, object]:
    return {"call": "revise_plan", "id": name, "args": {"new_steps": list(steps), "from_index": place}}


def planner(*interceptors: Interceptor, **fields: object) -> Agent:
    return Agent("a", strategy=PlanReAct(), interceptors=interceptors, **fields)  # type: ignore[arg-type]


async def test_a_plan_is_made_followed_and_finished(open_engine: Opener, store: RunStore) -> None:
    """Each change is one thinking step with the board; the model sees the board of this moment at every call."""
    engine = await open_engine(
        planner(instructions="Be brief."),
        turn(0, CREATE, system=r"^Be brief\.\n\nIf the task takes several steps, call create_plan"),
        turn(1, update(2), system=r"Plan, 0 of 2 done:\n1\. \[now\] find it\n2\. \[to do\] check it$"),
        turn(2, update(3, "u2"), system=r"1\. \[done\] find it\n2\. \[now\] check it$"),
        turn(3, {"text": "All done."}, system=r"Plan, 2 of 2 done:\n1\. \[done\] find it\n2\. \[done\] check it$"),
    )
    asked = await engine.ask("go")
    assert asked.last.done.content == "All done."
    assert asked.steps == [(0, "thinking", "", ""), (1, "thinking", "", ""), (2, "thinking", "", "")]
    assert [text.splitlines()[0] for text in thoughts(asked)] == [f"Plan, {done} of 2 done:" for done in (0, 1, 2)]
    assert asked.last.done.process_steps[0].node.id == "a/tool/create_plan"
    assert "Every step is done" in results(await engine.messages(asked.conversation_id))["u2"]
    plan = (await checkpoint_of(store, asked.key)).plan
    assert (list(plan.steps), plan.done) == (["find it", "check it"], 2)


async def test_a_plan_of_one_step_is_none(open_engine: Opener, store: RunStore) -> None:
    """The model is told to answer directly, and sees no board."""
    engine = await open_engine(
        planner(),
        turn(0, {"call": "create_plan", "args": {"steps": ["- answer", "  ", "2."]}}),
        turn(1, {"text": "At once."}, system="call create_plan first", tool_result="answer directly"),
    )
    asked = await engine.ask("go")
    assert asked.last.done.content == "At once."
    assert not (await checkpoint_of(store, asked.key)).HasField("plan")


async def test_a_plan_is_revised_from_a_step_on(open_engine: Opener, store: RunStore) -> None:
    """Steps before stay, the rest is replaced; where the plan is moves back only as far as what was replaced."""
    engine = await open_engine(
        planner(),
        turn(0, {"call": "create_plan", "id": "c", "args": {"steps": ["a", "b", "c", "d"]}}),
        turn(1, update(4)),
        turn(2, revise(4, "e", "f")),
        turn(3, revise(2, "g", name="r2")),
        turn(4, revise(3, "h", name="r3")),
        turn(5, {"text": "ok"}),
    )
    asked = await engine.ask("go")
    boards = [text.splitlines()[1:] for text in thoughts(asked)]
    assert boards[2] == ["1. [done] a", "2. [done] b", "3. [done] c", "4. [now] e", "5. [to do] f"]
    assert boards[3] == ["1. [done] a", "2. [now] g"]
    assert boards[4] == ["1. [done] a", "2. [now] g", "3. [to do] h"]
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (update(0), "no place 0 in a plan of 2 steps; use 1 to 3"),
        (update(4), "no place 4 in a plan of 2 steps; use 1 to 3"),
        (update(-1), "no place -1"),
        (revise(0, "x"), "no place 0"),
        (revise(9, "x"), "no place 9"),
        (revise(1, "-", " * "), "No step has any words"),
        (revise(3, *["x"] * MAX_STEPS), f"The plan would have {MAX_STEPS + 2} steps; at most {MAX_STEPS}"),
        (revise(1, "x" * (MAX_STEP + 1)), "is too long"),
        ({"call": "create_plan", "id": "n", "args": {"steps": ["x"] * (MAX_STEPS + 1)}}, "is too long"),
        ({"call": "create_plan", "id": "n", "args": {"steps": "1. a\n2. b"}}, "is not of type 'array'"),
        ({"call": "update_plan_progress", "id": "n", "args": {"next_plan_index": "two"}}, "is not of type 'integer'"),
    ],
)
async def test_what_a_plan_cannot_be_is_told_to_the_model(
    open_engine: Opener, store: RunStore, call: dict[str, object], told: str
) -> None:
    """A place that is not there, no words, too many of them: an error that says what would be right; the plan stays."""
    engine = await open_engine(planner(), turn(0, CREATE), turn(1, call), turn(2, {"text": "I see"}))
    asked = await engine.ask("go")
    assert told in list(results(await engine.messages(asked.conversation_id)).values())[1]
    assert told in thoughts(asked)[1]
    assert asked.last.done.content == "I see"
    assert list((await checkpoint_of(store, asked.key)).plan.steps) == ["find it", "check it"]


@pytest.mark.parametrize("call", [update(1), revise(1, "x")])
async def test_there_is_no_progress_without_a_plan(open_engine: Opener, call: dict[str, object]) -> None:
    """Updating or revising a plan that was never made is an error that names the tool that makes one."""
    engine = await open_engine(planner(), turn(0, call), turn(1, {"text": "{{result}}"}))
    assert "create_plan makes one" in (await engine.ask("go")).last.done.content


async def test_calls_of_one_batch_change_the_plan_in_their_order(open_engine: Opener) -> None:
    """A plan and its progress may come in one answer."""
    engine = await open_engine(planner(), turn(0, CREATE, update(2)), turn(1, {"text": "ok"}, system=r"1\. \[done\]"))
    assert (await engine.ask("go")).last.done.content == "ok"


async def test_the_plans_words_follow_the_agents_language(open_engine: Opener) -> None:
    """Board, guidance and errors are Chinese for a Chinese agent, and so are the tools."""
    agent = planner(locale="zh")
    engine = await open_engine(
        agent,
        turn(0, CREATE, system="请先调用 create_plan"),
        turn(1, update(7), system=r"计划，已完成 0/2：\n1\. \[进行中\] find it\n2\. \[待办\] check it$"),
        turn(2, {"text": "{{result}}"}),
    )
    assert "没有位置 7" in (await engine.ask("go")).last.done.content
    assert agent.info.tools[0].description == TEXTS["zh"].plan_create


async def test_a_plan_survives_its_process(store: RunStore) -> None:
    """Whoever takes the run over goes on along the plan, and makes it no second time."""
    first = scripted(turn(0, CREATE), turn(1, update(2)), turn(2, {"hang": True}))
    async with at_work_with(store, [planner(models=[first])], NEVER) as engine:
        started = await engine.start("go")
        await engine.wait_for(started.head.key, lambda events: len(events) == 2)
    then = scripted(turn(2, {"text": "went on"}, system=r"1\. \[done\] find it\n2\. \[now\] check it"))
    async with at_work_with(store, [planner(models=[then])], NEVER) as engine:
        asked = await engine.read(started)
    assert asked.last.done.content == "went on"
    assert len(thoughts(asked)) == 2


async def test_two_agents_have_a_plan_each(store: RunStore) -> None:
    """A sub-agent's plan is its own: neither sees the other's board."""
    inner = scripted(
        turn(0, {"call": "create_plan", "args": {"steps": ["inner one", "inner two"]}}, system="create_plan first"),
        turn(1, {"text": "inner done"}, system=r"inner one\n2\. \[to do\] inner two$"),
    )
    outer = scripted(
        turn(0, CREATE),
        turn(1, {"call": "b", "args": {"request": "do it"}}),
        turn(2, {"text": "outer done"}, system=r"\[now\] find it\n2\. \[to do\] check it$"),
    )
    agent = Agent("a", strategy=PlanReAct(), models=[outer], sub_agents=[
        Agent("b", strategy=PlanReAct(), models=[inner])
    ])  # fmt: skip
    async with at_work_with(store, [agent], NEVER) as engine:
        asked = await engine.ask("go")
    assert asked.last.done.content == "outer done"
    assert ["inner" in text for text in thoughts(asked)] == [False, True]


# Interceptors


class Reviewer(Interceptor):
    """Says what it is told to say to each plan, once."""

    def __init__(self, outcome: Outcome | None, *, fail: bool = False, closed: bool = False) -> None:
        super().__init__(name="reviewer", fail_closed=closed)
        self.outcome, self.fail = outcome, fail
        self.seen: list[list[str]] = []

    async def on_plan(self, trace: Trace, plan: Sequence[str]) -> Outcome | None:
        self.seen.append(list(plan))
        if self.fail:
            raise LookupError("broken")
        return None if trace.answer_to(self.name) is not None else self.outcome


async def test_interceptors_correct_a_plan(open_engine: Opener, store: RunStore) -> None:
    """What on_plan puts in place of a new or revised plan is the plan, for people and for the model."""
    reviewer = Reviewer(Replace(["look twice", "check it", "ask"]))
    engine = await open_engine(planner(reviewer), turn(0, CREATE), turn(1, revise(2, "x")), turn(2, {"text": "ok"}))
    asked = await engine.ask("go")
    assert reviewer.seen == [["find it", "check it"], ["look twice", "x"]]
    assert "[to do] ask" in thoughts(asked)[1]
    assert list((await checkpoint_of(store, asked.key)).plan.steps) == ["look twice", "check it", "ask"]


async def test_people_may_be_asked_about_a_plan(store: RunStore) -> None:
    """A suspended plan does not count until people have answered; then the call is done, once, also elsewhere."""
    script = scripted(turn(0, CREATE, {"call": "echo", "id": "e", "args": {"text": "x"}}), turn(1, {"text": "ok"}))

    def agent() -> Agent:
        return planner(Reviewer(Suspend(Ask("Is this plan good?"))), models=[script], tools=[echo])

    async with at_work_with(store, [agent()], NEVER) as engine:
        asked = await engine.ask("go")
        assert asked.last.done.stop_reason == StopReason.STOP_REASON_INTERRUPTED
        assert not (await checkpoint_of(store, asked.key)).HasField("plan")
        (item,) = asked.events[-2].interrupt.items
    async with at_work_with(store, [agent()], NEVER) as engine:
        asked = await resume(engine, asked, **{item.id: "approve"})
    assert asked.last.done.content == "ok"
    assert len(thoughts(asked)) == 1
    assert list((await checkpoint_of(store, asked.key)).plan.steps) == ["find it", "check it"]


@pytest.mark.parametrize(
    ("outcome", "payload"),
    [(End("no plans here", "exited"), "done"), (Fail(EngineError("INTERNAL", "no plans here")), "error")],
)
async def test_a_plan_can_end_the_run(open_engine: Opener, outcome: Outcome, payload: str) -> None:
    """End and Fail in on_plan are obeyed: the run ends with that answer, or that error."""
    engine = await open_engine(planner(Reviewer(outcome)), turn(0, CREATE), turn(1, {"text": "went on"}))
    last = (await engine.ask("go")).last
    assert last.WhichOneof("payload") == payload
    assert (last.done.content or last.error.message) == "no plans here"


@pytest.mark.parametrize(("closed", "steps"), [(False, 2), (True, 0)])
async def test_a_reviewer_that_fails_closed_withholds_the_plan(
    open_engine: Opener, store: RunStore, closed: bool, steps: int
) -> None:
    """A failure of a guard fails the call and stores no plan; another interceptor's failure is passed over."""
    engine = await open_engine(
        planner(Reviewer(None, fail=True, closed=closed)), turn(0, CREATE), turn(1, {"text": "ok"})
    )
    asked = await engine.ask("go")
    assert asked.last.done.content == "ok"
    assert len((await checkpoint_of(store, asked.key)).plan.steps) == steps


class Slow(Interceptor):
    """Lets the later review overtake the earlier one."""

    async def on_plan(self, trace: Trace, plan: Sequence[str]) -> Outcome | None:
        for _ in range(20 if "slow" in plan else 1):
            await asyncio.sleep(0)
        return None


async def test_a_change_that_was_overtaken_undoes_nothing(open_engine: Opener, store: RunStore) -> None:
    """Of two changes in one batch the one whose review took longer fails and can be made again."""
    engine = await open_engine(
        planner(Slow()), turn(0, CREATE), turn(1, revise(2, "slow", name="s"), revise(2, "quick", name="q")),
        turn(2, {"text": "ok"}),
    )  # fmt: skip
    asked = await engine.ask("go")
    assert "changed the plan at the same time" in results(await engine.messages(asked.conversation_id))["s"]
    assert list((await checkpoint_of(store, asked.key)).plan.steps) == ["find it", "quick"]


# Words


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("1. find it", "find it"),
        ("2) find it", "find it"),
        ("(3) find it", "find it"),
        ("4: find it", "find it"),
        ("- find it", "find it"),
        ("* find it", "find it"),
        ("• find it", "find it"),
        ("- [ ] find it", "find it"),
        ("[x] find it", "find it"),
        ("- 1. find it", "find it"),
        ("Step 2: find it", "find it"),
        ("1、查资料", "查资料"),
        ("1.查资料", "查资料"),
        ("（2）查资料", "查资料"),
        ("三、查资料", "查资料"),
        ("步骤1：查资料", "查资料"),
        ("第2步：查资料", "查资料"),
        ("  find\n it ", "find it"),
        ("3 retries", "3 retries"),
        ("3.5 of them", "3.5 of them"),
        ("3.x branch", "3.x branch"),
        ("10:30 meeting", "10:30 meeting"),
        ("-5 degrees", "-5 degrees"),
        ("**bold** words", "**bold** words"),
        ("2024 report", "2024 report"),
        ("1.", ""),
        ("- ", ""),
        ("***", ""),
    ],
)
def test_only_what_marks_an_item_is_taken_off(text: str, step: str) -> None:
    """Numbers and signs that mean something stay."""
    assert clean_step(text) == step


def test_the_board_marks_each_step() -> None:
    """Done, at work, to do; after the last step everything is done."""
    plan = Plan(steps=["a", "b", "c"], done=1)
    assert board(plan, TEXTS["en"]).splitlines()[1:] == ["1. [done] a", "2. [now] b", "3. [to do] c"]
    plan.done = 3
    assert "now" not in board(plan, TEXTS["en"])


def test_plan_tools_are_in_the_graph_and_clash_with_none() -> None:
    """GetAgent shows the strategy's tools; an agent's own tool of such a name is refused."""
    info = planner(tools=[echo]).info
    assert [item.name for item in info.tools] == ["echo", "create_plan", "update_plan_progress", "revise_plan"]
    assert "a/tool/revise_plan" in [node.id for node in info.nodes]
    mine = tool(name="create_plan", effect="read")(lambda: "x")
    with pytest.raises(ValueError, match="repeated: create_plan"):
        planner(tools=[mine])
