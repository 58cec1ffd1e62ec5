"""The relay between a chat platform and an engine, over real sockets and a real state file."""

import asyncio
from dataclasses import replace

import pytest

from dualclaw import BusyPolicy, InterruptItem, InterruptKind, Run, RunState
from dualclaw.errors import EngineError
from dualclaw.events import make_delta, make_done, make_error, make_interrupt
from dualclaw_clients.engine_client import Reconnect
from dualclaw_clients.im.answers import request_id_of
from dualclaw_clients.im.connector import ChatKey, Limit, Media, MessageKey, Overloaded, SendError, Unit
from dualclaw_clients.im.delivery import SendLimits
from dualclaw_clients.im.relay import RelayLimits
from dualclaw_clients.im.texts import ZH

from .conftest import QUICK


def replaced(event, seq):
    """The event, at a place of its own."""
    event.seq = seq
    return event


async def test_a_message_is_answered_with_the_runs_text(relaying, platform, message, answer, ask, fake_engine):
    """One message makes one run labelled with the claw, and its text comes back to the chat."""
    answer("你好，世界")
    async with relaying(platform, agent="helper") as relay:
        assert await ask(relay, platform, message("m1", "hi", user="用户"))
    assert platform.sent == [("c1", "你好，世界")]
    request = fake_engine.calls_of("Run")[0].request
    assert (request.agent, request.claw, request.message.parts[0].text) == ("helper", "im_test", "hi")
    assert (request.metadata["user_id"], request.conversation_id) == ("用户", "")


async def test_the_second_message_goes_on_with_the_conversation(relaying, platform, message, answer, ask, fake_engine):
    """A chat is one conversation, over a restart too; another chat begins its own."""
    answer("ok")
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1"))
        await ask(relay, platform, message("m2"))
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m3"))
        await ask(relay, platform, message("m4", chat="c2"))
    conversations = [call.request.conversation_id for call in fake_engine.calls_of("Run")]
    assert conversations == ["", fake_engine.conversation_id, fake_engine.conversation_id, ""]


async def test_a_chat_is_answered_in_order_and_chats_side_by_side(relaying, platform, message, answer, fake_engine):
    """The second message of a busy chat waits; another chat does not."""
    gate = asyncio.Event()
    answer("first", "headers", gate)
    answer("other")
    answer("second")
    async with relaying(platform) as relay:
        await relay.accept(platform, message("m1", "one"))
        await fake_engine.wait_for_call("Run", 1)
        await relay.accept(platform, message("m2", "two"))
        await relay.accept(platform, message("m1", "three", chat="c2"))
        await platform.wait_for(1)
        assert platform.sent == [("c2", "other")]
        assert len(fake_engine.calls_of("Run")) == 2
        gate.set()
        await platform.wait_for(3)
    assert platform.texts() == ["first", "second"]
    assert [call.request.message.parts[0].text for call in fake_engine.calls_of("Run")] == ["one", "three", "two"]


async def test_a_resent_message_is_answered_once(relaying, platform, message, answer, ask, fake_engine):
    """A platform that delivers again, while the answer is being made, after it and after a restart, gets one."""
    gate = asyncio.Event()
    answer("once", "headers", gate)
    async with relaying(platform) as relay:
        first = await relay.accept(platform, message("m1"))
        repeats = [await relay.accept(platform, message("m1")) for _ in range(2)]
        gate.set()
        assert await first.answered()
        repeats.append(await relay.accept(platform, message("m1")))
    async with relaying(platform) as relay:
        repeats.append(await relay.accept(platform, message("m1")))
        assert await relay.drain(60)
    assert [receipt.duplicate for receipt in [first, *repeats]] == [False, True, True, True, True]
    assert platform.sent == [("c1", "once")]
    assert len(fake_engine.calls_of("Run")) == 1


async def test_accepting_does_not_wait_for_the_answer(relaying, platform, message, answer):
    """The platform gets its acknowledgement while the model still thinks."""
    answer("late", "headers", 90.0)
    async with relaying(platform, limits=RelayLimits(grace=0)) as relay, asyncio.timeout(60):
        assert not (await relay.accept(platform, message("m1"))).duplicate


async def test_a_message_cut_off_by_the_end_is_answered_by_the_next_relay(
    relaying, platform, message, answer, fake_engine
):
    """What was under way or waiting is resumed, in order, with the very same request: no second run."""
    answer("one", "headers", 90.0)
    answer("one")
    answer("two")
    fake_engine.on("Run", [EngineError("INTERNAL", "a third run")])
    async with relaying(platform, limits=RelayLimits(grace=0)) as relay:
        await relay.accept(platform, message("m1", "first"))
        await relay.accept(platform, message("m2", "second"))
        await fake_engine.wait_for_call("Run", 1)
    assert platform.sent == []
    async with relaying(platform) as relay:
        receipt = await relay.accept(platform, message("m1", "first"))
        assert receipt.duplicate
        await platform.wait_for(2)
    assert platform.texts() == ["one", "two"]
    before, after, second = (call.request for call in fake_engine.calls_of("Run"))
    assert before == after
    assert second.request_id != before.request_id


async def test_a_relay_beside_it_takes_over_from_a_dead_one(relaying, new_platform, message, answer, fake_engine):
    """With two relays on one state file, the messages of the one that dies are answered by the other."""
    one, two = new_platform(), new_platform()
    answer("text", "headers", 90.0)
    answer("text")
    async with relaying(two):
        async with relaying(one, limits=RelayLimits(grace=0)) as first:
            await first.accept(one, message("m1"))
            await fake_engine.wait_for_call("Run", 1)
        await two.wait_for(1)
    assert (one.sent, two.sent) == ([], [("c1", "text")])


async def test_the_request_id_is_of_the_message_alone():
    """Any process derives the same id, and no two messages share one, however their ids are cut."""
    key = MessageKey(ChatKey("test", "b", "c"), "m")
    others = [
        MessageKey(ChatKey("test", "b", "cm"), ""),
        MessageKey(ChatKey("test", "bc", ""), "m"),
        replace(key, message_id="m2"),
    ]
    assert request_id_of(key) == "im-cbfedff936cf6d7bb0b87d73363e75ed9eafc99a856c97988335f72782edc20c"
    assert len({request_id_of(one) for one in [key, *others]}) == 4


async def test_a_refused_message_says_why_and_can_be_sent_again(relaying, platform, message, answer, ask, fake_engine):
    """The engine's refusal reaches the person; the platform's next delivery tries again under the same id."""
    fake_engine.on("Run", [EngineError("QUOTA_EXCEEDED", "100 runs a minute", retry_after=30)])
    answer("now")
    async with relaying(platform) as relay:
        assert not await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m1"))
    refusal, text = platform.texts()
    assert "30 秒后" in refusal
    assert "100 runs a minute" in refusal
    assert text == "now"
    first, second = (call.request.request_id for call in fake_engine.calls_of("Run"))
    assert first == second


async def test_an_engine_out_of_reach_is_told_in_the_chat(relaying, platform, message, ask, fake_engine):
    """Nobody listens at the engine's address: a clear text instead of silence."""
    await fake_engine.stop()
    async with relaying(platform) as relay:
        assert not await ask(relay, platform, message("m1"))
    assert "无法连接引擎" in platform.texts()[0]
    assert len(platform.sent) == 1


async def test_an_engine_that_is_being_restarted_costs_no_message(relaying, platform, message, answer, fake_engine):
    """A message that comes while the engine is away for a moment is answered when it is back, without a word."""
    await fake_engine.stop()
    answer("back")
    async with relaying(platform, limits=RelayLimits(reach=60)) as relay:
        receipt = await relay.accept(platform, message("m1"))
        await asyncio.sleep(0.3)
        await fake_engine.start()
        async with asyncio.timeout(60):
            assert await receipt.answered()
    assert platform.texts() == ["back"]


async def test_a_stream_lost_for_good_is_told_and_repeated_as_it_was(
    relaying, platform, message, answer, ask, fake_engine
):
    """The run may go on in the engine, so another try sends the same request and gets its segment."""
    fake_engine.on("Run", [make_delta("par"), "cut"])
    answer("partly whole")
    async with relaying(platform, reconnect=Reconnect(total=0)) as relay:
        assert not await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m1", "edited meanwhile"))
        assert platform.texts()[-1] == "partly whole"
        first, second = (call.request for call in fake_engine.calls_of("Run"))
        assert first == second


async def test_a_conversation_is_known_from_its_first_moment(relaying, platform, message, answer, ask, fake_engine):
    """Also when the stream is lost before its end, the next message goes on with the conversation."""
    fake_engine.on("Run", [make_delta("par"), "cut"])
    answer("ok")
    async with relaying(platform, reconnect=Reconnect(total=0)) as relay:
        assert not await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m2"))
    assert fake_engine.calls_of("Run")[1].request.conversation_id == fake_engine.conversation_id


async def test_a_failed_runs_text_is_the_answer(relaying, platform, message, ask, fake_engine):
    """A run that fails has been answered: what there is of it is shown, and a repeat is a duplicate."""
    fake_engine.on("Run", [make_delta("so far"), make_error("model gone")])
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1"))
        assert (await relay.accept(platform, message("m1"))).duplicate
    assert platform.texts() == ["so far\n\n❌ model gone"]


async def test_an_empty_answer_is_not_silence(relaying, platform, message, answer, ask):
    """A run without text still gets a message."""
    answer("")
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1"))
    assert platform.texts() == [ZH.empty_answer]


async def test_questions_are_shown_and_the_next_message_answers_them(relaying, platform, message, ask, fake_engine):
    """An interrupt's question reaches the chat; the reply goes to the same conversation."""
    item = InterruptItem(id="q1", kind=InterruptKind.INTERRUPT_KIND_QUESTION, prompt="Which city?")
    parked = make_done(message_id="x", conversation_id=fake_engine.conversation_id, stop_reason="interrupted")
    fake_engine.on("Run", [make_interrupt([item]), parked])
    done = make_done(message_id="y", conversation_id=fake_engine.conversation_id, content="Sunny")
    fake_engine.on("Run", [done])
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1", "Weather?"))
        await ask(relay, platform, message("m2", "Paris"))
    question, text = platform.texts()
    assert question == "1. Which city?\n请直接回复您的答案"
    assert text == "Sunny"
    assert fake_engine.calls_of("Run")[1].request.conversation_id == fake_engine.conversation_id


async def test_a_message_to_a_chat_that_waits_for_approval_is_not_swallowed(
    relaying, platform, message, ask, fake_engine
):
    """Only an approval can move the conversation on, so the person learns what it waits for and what to reply."""
    item = InterruptItem(id="a1", kind=InterruptKind.INTERRUPT_KIND_APPROVAL, prompt="Delete everything?")
    fake_engine.runs["r1"] = Run(id="r1", state=RunState.RUN_STATE_INTERRUPTED, interrupts=[item])
    fake_engine.on("Run", [EngineError("CONVERSATION_BUSY", "busy", {"run_id": "r1"})])
    async with relaying(platform) as relay:
        assert not await ask(relay, platform, message("m1"))
    (text,) = platform.texts()
    assert "这条消息没有处理" in text
    assert "任务 r1" in text
    assert "1. Delete everything?\n请回复“1 同意”或“1 拒绝”" in text


async def test_a_message_to_a_conversation_busy_elsewhere_waits_in_line(
    relaying, platform, message, answer, ask, fake_engine
):
    """A run another channel started is neither cancelled nor a reason to drop the message."""
    fake_engine.runs["r1"] = Run(id="r1", state=RunState.RUN_STATE_RUNNING)
    fake_engine.on("Run", [EngineError("CONVERSATION_BUSY", "busy", {"run_id": "r1"})])
    answer("after it")
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1"))
    policies = [call.request.on_busy for call in fake_engine.calls_of("Run")]
    assert policies == [BusyPolicy.BUSY_POLICY_UNSPECIFIED, BusyPolicy.BUSY_POLICY_QUEUE]
    assert platform.texts() == ["after it"]


async def test_a_conversation_the_engine_has_lost_does_not_silence_the_chat(
    relaying, platform, message, answer, ask, fake_engine
):
    """A new conversation begins, and the person is told."""
    answer("one")
    fake_engine.on("Run", [EngineError("UNKNOWN_CONVERSATION", "no such conversation")])
    answer("two")
    async with relaying(platform) as relay:
        await ask(relay, platform, message("m1"))
        await ask(relay, platform, message("m2"))
    assert platform.texts() == ["one", ZH.new_conversation, "two"]
    assert [call.request.conversation_id == "" for call in fake_engine.calls_of("Run")] == [True, False, True]


async def test_parts_are_sent_in_order_each_after_the_one_before(relaying, new_platform, message, answer, ask):
    """A slow first part does not let the second one overtake; the parts joined are the answer."""
    platform = new_platform(limit=Limit(16, Unit.BYTES))
    platform.refusals = [0.1, 0.05, None]
    text = "".join(f"{number:03} 中文\n" for number in range(9))
    answer(text)
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1"))
    assert "".join(str(part) for part in platform.texts()) == text
    assert len(platform.sent) > 3


async def test_a_part_that_may_be_tried_again_is(relaying, platform, message, answer, ask):
    """A platform that is certain it delivered nothing gets the part once more."""
    platform.refusals = [SendError("rate limited", retryable=True)]
    answer("text")
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1"))
    assert platform.texts() == ["text"]


async def test_sending_stops_at_a_failed_part_and_goes_on_there(
    relaying, new_platform, message, answer, ask, fake_engine
):
    """After a failure nothing overtakes; a repeat sends the rest without asking the engine again."""
    platform = new_platform(limit=Limit(16, Unit.CHARACTERS))
    platform.refusals = [None, SendError("gone")]
    answer("first part here\nsecond part now\nthird")
    async with relaying(platform) as relay:
        assert not await ask(relay, platform, message("m1"))
        assert platform.texts() == ["first part here\n"]
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1"))
    assert platform.texts() == ["first part here\n", "second part now\n", "third"]
    assert len(fake_engine.calls_of("Run")) == 1


async def test_a_platform_that_does_not_take_a_part_in_time_counts_as_failed(relaying, platform, message, answer, ask):
    """A send that hangs does not hang the chat for ever; whether it arrived is unknown, so it is not repeated."""
    platform.refusals = [90.0]
    answer("text")
    async with relaying(platform, limits=replace(QUICK, send=SendLimits(timeout=2, tries=2))) as relay:
        assert not await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m2"))
    assert platform.texts() == ["text"]


async def test_media_is_sent_as_media(relaying, platform, message, answer, ask):
    """An answer that is an image goes out as one, without text beside it."""
    answer('<img src="https://example.com/a.png">')
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1"))
    assert platform.texts() == [Media("image", "https://example.com/a.png")]


async def test_media_the_platform_refuses_goes_as_text_that_says_so(relaying, platform, message, answer, ask):
    """The person gets the address and learns that sending failed."""
    platform.refusals = [SendError("too big")]
    answer('<video src="https://example.com/a.mp4"></video>')
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1"))
    assert platform.texts() == [ZH.media_as_text("video", "https://example.com/a.mp4")]


async def test_a_full_queue_refuses_with_a_text(relaying, platform, message, answer, fake_engine):
    """More messages than a chat may hold are told so; the others are all answered."""
    gate = asyncio.Event()
    answer("ok", "headers", gate)
    async with relaying(platform, limits=RelayLimits(max_waiting=2)) as relay:
        receipts = [await relay.accept(platform, message(f"m{number}")) for number in range(3)]
        await platform.wait_for(1)
        assert platform.texts() == [ZH.too_many_waiting]
        gate.set()
        assert [await receipt.answered() for receipt in receipts] == [True, True, False]


async def test_a_flood_that_is_refused_is_bounded_too(relaying, platform, message, answer, fake_engine):
    """Notices that go out more slowly than messages come count as open; beyond the bound the platform keeps them."""
    gate = asyncio.Event()
    answer("ok", "headers", gate)
    platform.refusals += [gate] * 3
    async with relaying(platform, limits=RelayLimits(max_waiting=1, max_open=4)) as relay:
        receipts = [await relay.accept(platform, message(f"m{number}")) for number in range(4)]
        with pytest.raises(Overloaded):
            await relay.accept(platform, message("m4"))
        gate.set()
        assert [await receipt.answered() for receipt in receipts] == [True, False, False, False]
        answer("ok")
        assert await (await relay.accept(platform, message("m4"))).answered()


async def test_a_run_that_takes_too_long_is_told_frees_the_chat_and_is_heard_of_later(
    relaying, platform, message, answer, ask, fake_engine
):
    """The chat is not blocked by one silent run, and hears its end, with the text from its beginning, once."""
    fake_engine.on("Run", [make_delta("at "), "hang"])
    done = make_done(message_id="x", conversation_id="c", content="at last")
    fake_engine.on("Attach", [make_delta("at ", seq=1), 0.3, make_delta("last", seq=2), replaced(done, 3)])
    async with relaying(platform, limits=RelayLimits(run_timeout=3)) as relay:
        assert await ask(relay, platform, message("m1"))
        (text,) = platform.texts()
        assert "超时" in str(text)
        assert fake_engine.run_id in str(text)
        await platform.wait_for(2)
        assert (await relay.accept(platform, message("m1"))).duplicate
    assert platform.texts()[1:] == ["at last"]


async def test_a_connector_that_breaks_does_not_end_the_relay(relaying, new_platform, message, answer, ask):
    """A mistake in a connector costs its own answer, no other chat's."""

    class Broken(new_platform):
        async def send_text(self, chat, text, sending):
            if chat.chat_id == "c1":
                raise RuntimeError("a mistake")
            await super().send_text(chat, text, sending)

    platform = Broken()
    answer("text")
    async with relaying(platform) as relay:
        assert not await ask(relay, platform, message("m1"))
        assert await ask(relay, platform, message("m1", chat="c2"))
    assert platform.sent == [("c2", "text")]


async def test_a_caller_that_is_cancelled_leaves_no_message_without_a_worker(relaying, platform, message, answer):
    """A web request that ends early does not strand the message it has already handed in."""
    answer("text")
    async with relaying(platform) as relay:
        task = asyncio.ensure_future(relay.accept(platform, message("m1")))
        await asyncio.sleep(0)
        task.cancel()
        await platform.wait_for(1)
        assert await relay.drain(60)
    assert platform.texts() == ["text"]


async def test_a_message_that_comes_while_the_relay_ends_does_not_hold_it_up(
    relaying, platform, message, answer, fake_engine
):
    """It is stored and stays claimed; the next relay answers it."""
    answer("later")
    tasks = []

    async def hand_in_and_break() -> None:
        async with relaying(platform) as relay:
            tasks.append(asyncio.ensure_future(relay.accept(platform, message("m1"))))
            await asyncio.sleep(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(hand_in_and_break(), 60)
    receipt = await tasks[0]
    assert (receipt.duplicate, await receipt.answered()) == (False, False)
    assert fake_engine.calls_of("Run") == []
    async with relaying(platform):
        await platform.wait_for(1)
    assert platform.texts() == ["later"]


async def test_bad_text_does_not_cross(relaying, platform, message, answer, ask, fake_engine):
    """Halves of surrogate pairs in a platform's JSON become U+FFFD instead of an error."""
    answer("ok")
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m\ud83c", "a\ud83cb", user="\ud83c"))
    assert fake_engine.calls_of("Run")[0].request.message.parts[0].text == "a\ufffdb"


async def test_a_tenants_messages_are_asked_in_the_name_of_tenant_and_person(
    relaying, new_platform, message, answer, ask, fake_engine
):
    """A connector with a tenant names it and the person; names that are no ASCII are quoted."""
    platform = new_platform(tenant="acme")
    answer("ok")
    async with relaying(platform) as relay:
        assert await ask(relay, platform, message("m1", user="张三"))
    metadata = fake_engine.calls_of("Run")[0].metadata
    assert metadata["dualclaw-tenant"] == "acme"
    assert metadata["dualclaw-subject"] == "test:%E5%BC%A0%E4%B8%89"


async def test_two_connectors_of_one_name_are_refused(relaying, new_platform):
    """Their messages could not be told apart in the state file."""
    with pytest.raises(ValueError, match="one name"):
        async with relaying(new_platform(), new_platform()):
            pass


async def test_listening_ends_when_every_connector_has_ended(relaying, new_platform, message, answer):
    """The relay hands in what connectors bring, and drains when they are through."""
    one, two = new_platform("one"), new_platform("two")
    answer("ok")
    for platform in (one, two):
        platform.arrivals.put_nowait(message("m1"))
        platform.arrivals.put_nowait(None)
    async with relaying(one, two) as relay, asyncio.timeout(60):
        await relay.listen()
        assert await relay.drain()
    assert (one.texts(), two.texts()) == (["ok"], ["ok"])
