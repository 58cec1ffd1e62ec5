"""The state file: who has taken a message, and what survives whom."""

import asyncio
import sqlite3
import subprocess
import sys

import pytest

from dualclaw import InterruptItem
from dualclaw_clients.im import state_schema
from dualclaw_clients.im.connector import ChatKey, IncomingMessage, Media, MessageKey
from dualclaw_clients.im.outgoing import Outgoing, Told
from dualclaw_clients.im.state import RelayState, StateError
from dualclaw_clients.im.state_watches import MAX_PER_CHAT, Watch

CHAT = ChatKey("test", "b1", "c1")
KEY = MessageKey(CHAT, "m1")
MESSAGE = IncomingMessage("b1", "c1", "u1", "m1", "hello")


async def test_of_many_claims_at_once_one_wins(tmp_path):
    """Two processes that get the same message at the same time do not both answer it."""
    async with await RelayState.open(tmp_path / "s") as one, await RelayState.open(tmp_path / "s") as two:
        claims = await asyncio.gather(*(state.claim(KEY, MESSAGE, "engine") for state in [one, two] * 5))
        assert len([claim for claim in claims if claim is not None]) == 1


async def test_a_done_message_is_a_duplicate_also_in_the_next_process(tmp_path):
    """Deduplication is not forgotten with the process."""
    async with await RelayState.open(tmp_path / "s") as state:
        assert await state.claim(KEY, MESSAGE, "engine")
        await state.finish(KEY)
        assert await state.claim(KEY, MESSAGE, "engine") is None
    async with await RelayState.open(tmp_path / "s") as state:
        assert await state.claim(KEY, MESSAGE, "engine") is None


@pytest.mark.parametrize(
    "other",
    [
        MessageKey(ChatKey("test", "b2", "c1"), "m1"),
        MessageKey(ChatKey("test", "b1", "c2"), "m1"),
        MessageKey(ChatKey("other", "b1", "c1"), "m1"),
    ],
)
async def test_the_same_number_in_another_bot_chat_or_platform_is_another_message(other):
    """A message id alone says nothing: bots, chats and platforms count on their own."""
    async with await RelayState.open(":memory:") as state:
        assert await state.claim(KEY, MESSAGE, "engine")
        assert await state.claim(other, MESSAGE, "engine")


async def test_a_failed_message_can_be_claimed_again_and_goes_on_where_it_stopped(tmp_path):
    """A repeat after a failure finds the request and the answer the first try had."""
    async with await RelayState.open(tmp_path / "s") as state:
        await state.claim(KEY, MESSAGE, "legacy")
        await state.save_request(KEY, b"request")
        await state.save_answer(KEY, "u1", Outgoing(("a", "b")))
        await state.save_sent(KEY, 1)
        await state.fail(KEY, "not sent")
        claim = await state.claim(KEY, MESSAGE, "engine")
        assert claim is not None
        assert (claim.request, claim.answer, claim.sent, claim.route) == (b"request", Outgoing(("a", "b")), 1, "legacy")


async def test_a_claim_holds_as_long_as_its_owner_lives_and_no_longer(tmp_path):
    """However long an answer takes, a repeat is a duplicate; the owner's end frees it at once."""
    owner = await RelayState.open(tmp_path / "s")
    await owner.claim(KEY, MESSAGE, "engine")
    async with await RelayState.open(tmp_path / "s") as other:
        assert await other.claim(KEY, MESSAGE, "engine") is None
        assert await other.adopt(["test"]) == []
        await owner.close()
        assert [claim.message for claim in await other.adopt(["test"])] == [MESSAGE]
        assert await other.adopt(["test"]) == []


async def test_a_killed_process_leaves_its_messages_to_others_in_order(tmp_path):
    """After kill -9 the next process gets every open message, the oldest first, and no lock file is left."""
    program = f"""
import asyncio, os, signal
from dualclaw_clients.im.connector import *
from dualclaw_clients.im.outgoing import Outgoing
from dualclaw_clients.im.state import RelayState
async def main():
    state = await RelayState.open({str(tmp_path / "s")!r})
    for number in (3, 1, 2):
        message = IncomingMessage("b1", "c1", "u1", str(number), "text")
        await state.claim(MessageKey(ChatKey("test", "b1", "c1"), str(number)), message, "engine")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == -9, errors
    async with await RelayState.open(tmp_path / "s") as state:
        assert await state.adopt(["other"]) == []
        assert [claim.key.message_id for claim in await state.adopt(["test"])] == ["3", "1", "2"]
        assert len(list(tmp_path.glob("*.lock"))) == 1
    assert list(tmp_path.glob("*.lock")) == []


async def test_texts_are_wiped_when_a_message_is_done(tmp_path):
    """What people wrote does not stay on the disk of the relay."""
    async with await RelayState.open(tmp_path / "s") as state:
        await state.claim(KEY, MESSAGE, "engine")
        await state.save_answer(KEY, "u1", Outgoing(("secret",)))
        await state.finish(KEY)
    with sqlite3.connect(tmp_path / "s") as database:
        row = database.execute("SELECT text, request, answer FROM messages").fetchone()
    database.close()
    assert row == ("", b"", None)


async def test_old_messages_are_forgotten_but_never_claimed_ones(tmp_path):
    """Pruning takes what is done or failed, and leaves what is being answered."""
    async with await RelayState.open(tmp_path / "s") as state:
        for number, end in enumerate([state.finish, lambda key: state.fail(key, "x"), None]):
            key = MessageKey(CHAT, str(number))
            await state.claim(key, MESSAGE, "engine")
            if end:
                await end(key)
        await state.prune(keep=3600)
        assert await state.claim(MessageKey(CHAT, "0"), MESSAGE, "engine") is None
        await state.prune(keep=-1)
        found = [await state.claim(MessageKey(CHAT, str(number)), MESSAGE, "engine") for number in range(3)]
        assert [claim is not None for claim in found] == [True, True, False]


async def test_a_chat_keeps_its_conversation_over_a_restart(tmp_path):
    """Each chat has its own conversation, also in the next process."""
    async with await RelayState.open(tmp_path / "s") as state:
        assert await state.conversation_of(CHAT) == ""
        await state.save_conversation(CHAT, "first")
        await state.save_conversation(CHAT, "second")
    async with await RelayState.open(tmp_path / "s") as state:
        assert await state.conversation_of(CHAT) == "second"
        assert await state.conversation_of(ChatKey("test", "b1", "c2")) == ""


@pytest.mark.parametrize("content", [b"this is no database, but it is longer than nothing" * 50, None])
async def test_a_path_that_is_no_state_file_is_refused_with_its_name(tmp_path, content):
    """A wrong path is a sentence to the operator, and the file is left as it is."""
    path = tmp_path / "s"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StateError, match=str(path)):
        await RelayState.open(path)
    assert content is None or path.read_bytes() == content


async def test_a_state_file_of_a_newer_version_is_refused(tmp_path):
    """An old program does not write into what it does not understand."""
    database = sqlite3.connect(tmp_path / "s")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StateError, match="version 99"):
        await RelayState.open(tmp_path / "s")


async def test_a_file_of_the_first_version_is_brought_up_to_date(tmp_path):
    """Messages under way keep request, answer and progress; what was done stays done."""
    database = sqlite3.connect(tmp_path / "s")
    for statement in state_schema._FIRST.split(";\n"):
        database.execute(statement)
    rows = [("m1", "claimed", '["a", ["image", "https://x/y"], "c"]', 1), ("m2", "done", None, 0)]
    for message_id, state, answer, sent in rows:
        database.execute(
            "INSERT INTO messages (platform, bot, chat_id, message_id, user_id, text, route, state, owner, request,"
            " answer, sent, update_time) VALUES ('test', 'b1', 'c1', ?, 'u1', 'hello', 'engine', ?, 'dead', x'07', ?,"
            " ?, 0)",
            (message_id, state, answer, sent),
        )
    database.execute("INSERT INTO chats VALUES ('test', 'b1', 'c1', 'conversation')")
    database.execute("PRAGMA user_version = 1")
    database.commit()
    database.close()
    async with await RelayState.open(tmp_path / "s") as state:
        (claim,) = await state.adopt(["test"])
        assert claim.answer == Outgoing(("a", Media("image", "https://x/y"), "c"))
        assert (claim.request, claim.sent, claim.started, claim.unsure) == (b"\x07", 1, 1, 0)
        assert await state.claim(MessageKey(CHAT, "m2"), MESSAGE, "engine") is None
        assert await state.conversation_of(CHAT) == "conversation"


async def test_a_question_keeps_its_number_and_a_number_its_question(tmp_path):
    """Over restarts and pruning; another hash of arguments is another question."""
    item = InterruptItem(id="a", args_hash="h1")
    other = InterruptItem(id="a", args_hash="h2")
    async with await RelayState.open(tmp_path / "s") as state:
        assert await state.number(CHAT, "r1", [item, other]) == [1, 2]
        assert await state.number(ChatKey("test", "b1", "c2"), "r1", [item]) == [1]
        await state.prune(keep=-1)
    async with await RelayState.open(tmp_path / "s") as state:
        assert await state.number(CHAT, "r1", [other, item, InterruptItem(id="b")]) == [2, 3, 4]


async def test_what_was_asked_is_wiped_when_it_is_answered(tmp_path):
    """Arguments of calls do not stay on the disk of the relay; the number is known as used."""
    async with await RelayState.open(tmp_path / "s") as state:
        await state.number(CHAT, "r1", [InterruptItem(id="a", args_json='{"secret": 1}')])
        await state.close_others(CHAT, "r1", [])
        (asked,) = await state.asked(CHAT, 1)
        assert (asked.number, asked.is_open, asked.item.args_json) == (1, False, "")


async def test_a_chat_is_told_each_segment_of_a_run_once(tmp_path):
    """Whoever is first, a reply's own job or the watcher, in whatever process; also after the run is over."""
    async with await RelayState.open(tmp_path / "s") as one, await RelayState.open(tmp_path / "s") as two:
        await one.claim(KEY, MESSAGE, "engine")
        parked = Outgoing(("ask",), told=(Told("r1", 5, over=False),))
        ended = Outgoing(("end",), told=(Told("r1", 9, over=True),))
        assert (await one.save_answer(KEY, "u1", parked)).pieces == ("ask",)
        heard = MessageKey(CHAT, "run:r1:9")
        claims = [await state.claim_told(heard, "u1", ended) for state in (one, two, one)]
        assert [claim is not None for claim in claims] == [True, False, False]
        assert (await one.save_answer(KEY, "u1", ended)).pieces == ()
        assert await one.watched(CHAT, "r1") is None


async def test_watched_runs_of_a_dead_process_are_taken_over(tmp_path):
    """And of a chat no more than a few; the ones it waited for longest go first."""
    owner = await RelayState.open(tmp_path / "s")
    for number in range(MAX_PER_CHAT + 2):
        await owner.watch(Watch(CHAT, f"r{number}", "u1", number))
    async with await RelayState.open(tmp_path / "s") as other:
        assert await other.adopt_watches(["test"]) == []
        await owner.close()
        found = await other.adopt_watches(["test"])
        assert [(watch.run_id, watch.told) for watch in found] == [(f"r{n}", n) for n in range(2, MAX_PER_CHAT + 2)]
        assert await other.adopt_watches(["test"]) == []
