"""Numbered replies in a chat: who decides what, and what reaches the engine. Commands beside them."""

import asyncio

import pytest

from dualclaw import Conversation, Decision, DecisionAction, InterruptItem, InterruptKind, Run, RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw.events import make_delta, make_done, make_interrupt
from dualclaw_clients.im.approvals import resume_id_of
from dualclaw_clients.im.commands import Command, Word, parse_command
from dualclaw_clients.im.connector import ChatKey, MessageKey
from dualclaw_clients.im.reading import MAX_SUBJECT, subject_of
from dualclaw_clients.im.relay import RelayLimits
from dualclaw_clients.im.state import RelayState
from dualclaw_clients.im.texts import TEXTS, ZH

APPROVAL = InterruptItem(
    id="a1", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, tool_name="pay", args_json='{"to": "anna"}', args_hash="h1"
)
QUESTION = InterruptItem(id="q1", kind=InterruptKind.INTERRUPT_KIND_QUESTION, prompt="Which city?", args_hash="h2")


@pytest.fixture
def park(fake_engine):
    """Scripts a Run or Resume that ends with questions."""

    def script(*items, rpc="Run"):
        done = make_done(message_id="x", conversation_id=fake_engine.conversation_id, stop_reason="interrupted")
        fake_engine.on(rpc, [make_interrupt(items), done])
        # The chat waits for the run; without this the fake would end each attach at once, again and again.
        fake_engine.on("Attach", ["headers", "hang"])

    return script


@pytest.fixture
def resumed(fake_engine):
    """Scripts a Resume that answers."""

    def script(text="paid"):
        done = make_done(message_id="y", conversation_id=fake_engine.conversation_id, content=text)
        fake_engine.on("Resume", [make_delta(text), done])

    return script


async def test_a_decision_names_the_question_and_the_hash_that_was_shown(
    relaying, platform, message, ask, park, resumed, fake_engine
):
    """The approver's reply reaches the engine with id, hash, reason and a request_id of the reply's own."""
    park(APPROVAL, QUESTION)
    resumed()
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1", "go"))
        assert await ask(relay, platform, message("m2", "1 同意，备注：票号 5\n2 Paris", user="boss"))
        assert (await relay.accept(platform, message("m2", "1 拒绝", user="boss"))).duplicate
    (call,) = fake_engine.calls_of("Resume")
    approve, respond = DecisionAction.DECISION_ACTION_APPROVE, DecisionAction.DECISION_ACTION_RESPOND
    assert list(call.request.decisions) == [
        Decision(interrupt_id="a1", action=approve, args_hash="h1", comment="票号 5"),
        Decision(interrupt_id="q1", action=respond, args_hash="h2", response_json='"Paris"'),
    ]
    key = MessageKey(ChatKey("test", "b1", "c1"), "m2")
    assert call.request.request_id == resume_id_of(key, fake_engine.run_id)
    assert platform.texts()[-1] == "paid"


async def test_who_may_chat_may_not_approve(relaying, platform, message, ask, park, fake_engine):
    """The person is told, the run stays parked; a question they may answer all the same."""
    park(APPROVAL, QUESTION)
    park(APPROVAL, rpc="Resume")
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m2", "1 ok"))
        assert platform.texts()[-1] == ZH.may_not_approve.format(run=fake_engine.run_id)
        assert fake_engine.calls_of("Resume") == []
        await ask(relay, platform, message("m3", "2 Paris"))
    assert [d.interrupt_id for d in fake_engine.calls_of("Resume")[0].request.decisions] == ["q1"]
    assert "1. 是否允许执行 pay？" in platform.texts()[-1], "what is still open keeps its number"


async def test_ok_said_twice_approves_once(relaying, platform, message, ask, park, fake_engine):
    """The second ok was written before the next question was shown, so it is asked about."""
    park(APPROVAL)
    park(InterruptItem(id="a2", kind=APPROVAL.kind, tool_name="pay", args_hash="h3"), rpc="Resume")
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1"))
        for name in ("m2", "m3"):
            await relay.accept(platform, message(name, "ok", user="boss"))
        await platform.wait_for(3)
    assert len(fake_engine.calls_of("Resume")) == 1
    assert "编号 2 还没有显示" in platform.texts()[2]


async def test_the_next_number_cannot_be_approved_before_it_was_shown(
    relaying, platform, message, ask, park, resumed, fake_engine
):
    """Who approves 1 and 2 when there is only 1 is asked about 2, and may approve it after reading."""
    park(APPROVAL)
    park(InterruptItem(id="a2", kind=APPROVAL.kind, tool_name="pay", args_hash="h3"), rpc="Resume")
    resumed()
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1"))
        for name, text in (("m2", "1 ok"), ("m3", "2 ok")):
            await relay.accept(platform, message(name, text, user="boss"))
        await platform.wait_for(3)
        assert len(fake_engine.calls_of("Resume")) == 1
        assert "编号 2 还没有显示" in platform.texts()[2]
        assert await ask(relay, platform, message("m4", "2 ok", user="boss"))
    assert platform.texts()[-1] == "paid"


async def test_an_answer_may_come_before_the_platform_has_acknowledged_the_question(
    relaying, platform, message, ask, park, resumed, fake_engine
):
    """A person, or a bot, that is faster than the platform has read the question all the same."""
    park(APPROVAL)
    resumed()
    platform.refusals.append(0.2)  # the platform takes its time
    async with relaying(platform) as relay:
        first = await relay.accept(platform, message("m1"))
        async with asyncio.timeout(60):
            while not platform.sendings:  # noqa: ASYNC110  # it has a list and no event
                await asyncio.sleep(0.005)
        await ask(relay, platform, message("m2", "ok", user="boss"))
        assert await first.answered()
    assert platform.texts()[-1] == "paid"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EngineError("ALREADY_ANSWERED", "x"), ZH.answered_already),
        (EngineError("RUN_NOT_INTERRUPTED", "x"), ZH.run_waits_not[:6]),
        (EngineError("UNKNOWN_RUN", "x"), ZH.run_unknown[:5]),
        (FieldError({"decisions[0].args_hash": "is of other arguments"}), ZH.changed),
        (FieldError({"decisions[0].response_json": "7 is too large"}), "7 is too large"),
    ],
)
async def test_what_the_engine_does_not_take_is_told_with_what_is_still_open(
    relaying, platform, message, ask, park, fake_engine, error, told
):
    """Answered, expired, changed, gone: friendly words, the rest of the questions, and no second try by itself."""
    park(APPROVAL)
    fake_engine.on("Resume", [error])
    changed = InterruptItem(id="a1", kind=APPROVAL.kind, tool_name="pay", args_json='{"to": "eve"}', args_hash="h9")
    fake_engine.runs[fake_engine.run_id] = Run(
        id=fake_engine.run_id, state=RunState.RUN_STATE_INTERRUPTED, interrupts=[changed]
    )
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m2", "1 ok", user="boss"))
    assert told in platform.texts()[-1]
    assert '2. 是否允许执行 pay？\n参数：{"to": "eve"}' in platform.texts()[-1]
    assert len(fake_engine.calls_of("Resume")) == 1


async def test_a_reply_cut_off_by_the_end_of_the_process_decides_once(
    relaying, platform, message, park, resumed, fake_engine, ask
):
    """The next relay sends the very same request, though by then the question is not open any more."""
    park(APPROVAL)
    fake_engine.on("Resume", ["headers", "hang"])
    resumed()
    async with relaying(platform, limits=RelayLimits(grace=0)) as relay:
        await ask(relay, platform, message("m1"))
        await relay.accept(platform, message("m2", "1 ok", user="boss"))
        await fake_engine.wait_for_call("Resume", 1)
    async with relaying(platform):
        await platform.wait_for(2)
    before, after = (call.request for call in fake_engine.calls_of("Resume"))
    assert before == after
    assert platform.texts()[-1] == "paid"


async def test_approvals_of_the_tenant_are_listed_for_approvers_only(
    relaying, new_platform, message, ask, resumed, fake_engine
):
    """Runs of other channels, numbered here; their questions are the approver's alone, and asked in their name."""
    platform = new_platform(tenant="acme")
    for number in (1, 2):
        fake_engine.runs[f"r{number}"] = Run(
            id=f"r{number}", agent="clerk", claw="web", state=RunState.RUN_STATE_INTERRUPTED,
            interrupts=[APPROVAL, QUESTION],
        )  # fmt: skip
    resumed()
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1", "/approvals"))
        assert "没有审批权限" in platform.texts()[-1]
        await ask(relay, platform, message("m2", "/approvals", user="boss"))
        assert "任务 r2（clerk，来自 web）\n\n3. " in platform.texts()[-1]
        await ask(relay, platform, message("m3", "4 Paris"))
        assert "没有审批权限" in platform.texts()[-1]
        await ask(relay, platform, message("m4", "3 ok 4 Paris", user="boss"))
    (call,) = fake_engine.calls_of("Resume")
    assert (call.request.run_id, call.metadata["dualclaw-subject"]) == ("r2", "test:boss")


async def test_cancel_overtakes_the_run_it_cancels(relaying, platform, message, answer, fake_engine, tmp_path):
    """It does not wait behind the message that is being answered, and says what it did."""
    gate = asyncio.Event()
    done = make_done(message_id="x", conversation_id="c", content="half", stop_reason="cancelled")
    fake_engine.on("Run", [make_delta("half"), gate, done])
    async with relaying(platform) as relay:
        await relay.accept(platform, message("m1"))
        async with asyncio.timeout(60), await RelayState.open(tmp_path / "im.sqlite") as noted:
            while not await noted.conversation_of(ChatKey("test", "b1", "c1")):  # noqa: ASYNC110  # no event tells
                await asyncio.sleep(0.01)  # until the answer's stream is open, and the relay knows its run
        await relay.accept(platform, message("m2", "取消"))
        await asyncio.wait_for(fake_engine.cancelled.wait(), 60)
        await platform.wait_for(1)
        gate.set()
        await platform.wait_for(2)
    assert platform.texts() == [ZH.cancelling.format(run=fake_engine.run_id), f"half\n\n{ZH.cancelled}"]


async def test_cancel_ends_a_message_whose_run_has_not_begun(relaying, platform, message, fake_engine):
    """While the engine is out of reach there is no run to cancel; the message ends all the same."""
    await fake_engine.stop()
    async with relaying(platform, limits=RelayLimits(reach=100)) as relay:
        receipt = await relay.accept(platform, message("m1"))
        await asyncio.sleep(0.3)
        await relay.accept(platform, message("m2", "/cancel"))
        async with asyncio.timeout(60):
            assert await receipt.answered()
    assert ZH.cancelled in platform.texts()


async def test_cancel_of_nothing_and_help_say_so(relaying, platform, message, ask, fake_engine, answer):
    """A chat without a run, and one whose conversation has none."""
    answer("hi")
    fake_engine.conversations[fake_engine.conversation_id] = Conversation(id=fake_engine.conversation_id)
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1", "/cancel"))
        await ask(relay, platform, message("m2", "hi"))
        await ask(relay, platform, message("m3", "/stop"))
        await ask(relay, platform, message("m4", "/help"))
    assert platform.texts() == [ZH.nothing_to_cancel, "hi", ZH.nothing_to_cancel, ZH.help]
    assert fake_engine.calls_of("Cancel") == []


async def test_new_begins_another_conversation_behind_what_waits(relaying, platform, message, answer, fake_engine):
    """A message before it is still asked in the old conversation."""
    answer("a")
    async with relaying(platform) as relay:
        for number, text in enumerate(["one", "two", "/new", "three"]):
            await relay.accept(platform, message(f"m{number}", text))
        await platform.wait_for(4)
    conversations = [call.request.conversation_id for call in fake_engine.calls_of("Run")]
    assert conversations == ["", fake_engine.conversation_id, ""]


@pytest.mark.parametrize(
    "text", ["/etc/hosts what is it", "cancel", "取消订单", "/cancel 5", "/approvals a b", "", "新"]
)
def test_what_is_no_command_is_a_message(text):
    """Only the whole message is a command."""
    assert parse_command(text) is None


def test_commands_are_read_in_any_case_and_width():
    """People type as they type."""
    assert parse_command(" ／Cancel ") == Command(Word.CANCEL)
    assert parse_command("取消。") == Command(Word.CANCEL)
    assert parse_command("/approve 0190-a") == Command(Word.APPROVALS, "0190-a")


async def test_empty_and_huge_messages_get_a_text(relaying, platform, message, ask, fake_engine):
    """The engine would refuse both; nobody is left without an answer."""
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1", " \n"))
        assert await ask(relay, platform, message("m2", "x" * 300_000))
    assert platform.texts()[0] == ZH.empty_message
    assert "太长" in platform.texts()[1]
    assert fake_engine.calls_of("Run") == []


def test_every_text_has_the_same_blanks_in_every_language():
    """A translation that forgets the run's id is a dead end."""
    import string

    def blanks(value):
        return {name for _, name, _, _ in string.Formatter().parse(value) if name}

    english = TEXTS["en"]
    for name in ZH.__slots__:
        zh, en = getattr(ZH, name), getattr(english, name)
        if isinstance(zh, str):
            assert blanks(zh) == blanks(en), name
    assert {p: blanks(t) - {"numbers"} for p, t in ZH.problems.items()} == {p: set() for p in english.problems}


def test_people_have_names_the_engine_takes():
    """Any id becomes printable ASCII of bounded length, and two people never share one."""
    hostile = ["张" * 100, "张" * 99 + "三", "a\nb", "x" * 500, "x" * 501, "a:b", "\ufffd"]
    names = [subject_of("test", user) for user in hostile]
    assert len(set(names)) == len(hostile)
    assert all(name.isascii() and name.isprintable() and 0 < len(name) <= MAX_SUBJECT for name in names)
