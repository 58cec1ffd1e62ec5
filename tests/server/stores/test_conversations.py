"""Conversations: what people see of runs, and in which order."""

import pytest

from dualclaw import BusyPolicy, RunState
from dualclaw.errors import EngineError, FieldError
from dualclaw_server.engine.store import RunMessage

QUEUE = BusyPolicy.BUSY_POLICY_QUEUE
CANCELLED, SUCCEEDED = RunState.RUN_STATE_CANCELLED, RunState.RUN_STATE_SUCCEEDED


async def seen(store, conversation="c", tenant="acme"):
    page = await store.list_messages(tenant, conversation, page_size=0, page_token="")
    return [message.id for message in page.items]


async def test_messages_show_when_the_run_parks_or_ends(store, make, writer):
    """The user's message shows at once, what the run wrote only when it parks or ends."""
    await store.create(make.new("r1", "c"))
    log = writer(store, make.key("r1"))
    assert await seen(store) == ["r1-0"]
    await log.add(0, messages=log.messages("call"))
    assert await seen(store) == ["r1-0"]
    await log.park()
    assert await seen(store) == ["r1-0", "call"]
    await log.add(0, messages=(RunMessage(2, make.message("result")),))
    assert await seen(store) == ["r1-0", "call"]
    await log.add(state=SUCCEEDED, messages=(RunMessage(3, make.message("answer")),))
    assert await seen(store) == ["r1-0", "call", "result", "answer"]


async def test_a_result_that_comes_after_a_park_stands_at_its_own_position(store, make, writer):
    """Two calls, one waits for a person: its result, written after the pause, comes before its finished sibling's."""
    await store.create(make.new("r1", "c"))
    log = writer(store, make.key("r1"))
    await log.park(messages=(RunMessage(1, make.message("calls")), RunMessage(3, make.message("second result"))))
    assert await seen(store) == ["r1-0", "calls", "second result"]
    await log.go_on(2)
    await log.add(1, epoch=2, messages=(RunMessage(2, make.message("first result")),))
    assert await seen(store) == ["r1-0", "calls", "second result"]
    await log.add(1, epoch=2, state=SUCCEEDED, messages=(RunMessage(4, make.message("answer")),))
    in_order = ["r1-0", "calls", "first result", "second result", "answer"]
    assert await seen(store) == in_order
    await store.create(make.new("r2", "c"))
    assert [message.id for message in await store.history("acme", "c", "r2")] == in_order


async def test_messages_of_a_sub_agent_stay_with_the_run(store, make, writer):
    """A worker gets them back with their scope, in place; people and later runs never see them."""
    await store.create(make.new("r1", "c"))
    log = writer(store, make.key("r1"))
    messages = (
        RunMessage(1, make.message("call")),
        RunMessage(2, make.message("inner"), "call_1"),
        RunMessage(3, make.message("inner answer"), "call_1"),
        RunMessage(4, make.message("result")),
    )
    await log.add(0, messages=messages[2:])
    await log.park(messages=messages[:2])
    own = (await store.load(log.key)).messages
    assert own[1:] == messages
    assert await seen(store) == ["r1-0", "call", "result"]
    await log.go_on(2)
    await log.end(epoch=2)
    await store.create(make.new("r2", "c"))
    assert await seen(store) == ["r1-0", "call", "result", "r2-0"]
    assert [message.id for message in await store.history("acme", "c", "r2")] == ["r1-0", "call", "result"]
    await store.delete(log.key)
    assert await seen(store) == ["r1-0", "call", "result", "r2-0"]


async def test_a_message_that_gets_or_loses_its_scope_is_hidden_or_shown(store, make, writer):
    """A step done anew may put another message into a place: what counts is the one that is there now."""
    await store.create(make.new("r1", "c"))
    log = writer(store, make.key("r1"))
    await log.park(messages=(RunMessage(1, make.message("a")), RunMessage(2, make.message("b"), "call_1")))
    await log.add(0, messages=(RunMessage(1, make.message("a2"), "call_1"), RunMessage(2, make.message("b2"))))
    assert await seen(store) == ["r1-0"]
    await log.end()
    assert await seen(store) == ["r1-0", "b2"]
    assert [message.scope for message in (await store.load(log.key)).messages] == ["", "call_1", ""]


async def test_messages_are_ordered_by_activation_not_by_creation(store, make, writer):
    """A queued question comes after the answer it waited for, and shows when its run starts."""
    await store.create(make.new("r1", "c"))
    await store.create(make.new("r2", "c", on_busy=QUEUE))
    assert await seen(store) == ["r1-0"]
    await writer(store, make.key("r1")).end("a1", "a2")
    assert await seen(store) == ["r1-0", "a1", "a2", "r2-0"]
    await writer(store, make.key("r2")).end("b1")
    assert await seen(store) == ["r1-0", "a1", "a2", "r2-0", "b1"]


async def test_a_message_replaced_after_it_showed_stays_in_its_place(store, make, writer):
    """Redoing a step changes the text, not the order."""
    await store.create(make.new("r1", "c"))
    log = writer(store, make.key("r1"))
    await log.park("one", "two")
    await log.add(0, messages=(RunMessage(1, make.message("changed")),))
    assert await seen(store) == ["r1-0", "changed", "two"]


async def test_a_question_cancelled_in_the_queue_is_part_of_the_conversation(store, make, writer):
    """What a person said stays said."""
    for name in ("r1", "r2"):
        await store.create(make.new(name, "c", on_busy=QUEUE))
    await writer(store, make.key("r2")).end(state=CANCELLED)
    await writer(store, make.key("r1")).end("a1")
    assert await seen(store) == ["r1-0", "a1", "r2-0"]


async def test_history_is_what_came_before_the_run_became_active(store, make, writer):
    """A run sees the conversation without itself and without what comes later."""
    for name in ("r1", "r2", "r3"):
        await store.create(make.new(name, "c", on_busy=QUEUE))
        if name != "r3":
            await writer(store, make.key(name)).end(f"answer-{name}")

    async def before(run):
        return [message.id for message in await store.history("acme", "c", run)]

    assert await before("r1") == []
    assert await before("r2") == ["r1-0", "answer-r1"]
    assert await before("r3") == ["r1-0", "answer-r1", "r2-0", "answer-r2"]
    for conversation, run, reason in (("c", "nobody", "UNKNOWN_RUN"), ("d", "r1", "UNKNOWN_CONVERSATION")):
        with pytest.raises(EngineError) as refused:
            await store.history("acme", conversation, run)
        assert refused.value.reason == reason


async def test_a_conversation_says_who_is_active_and_when_it_changed(store, make, writer):
    """The list of conversations is kept right by every step."""
    await store.create(make.new("r1", "c"))
    made = await store.get_conversation("acme", "c")
    assert (made.id, made.title, made.active_run_id) == ("c", "title of c", "r1")
    log = writer(store, make.key("r1"))
    await log.park()
    parked = await store.get_conversation("acme", "c")
    assert parked.active_run_id == "r1"
    await log.end()
    ended = await store.get_conversation("acme", "c")
    assert ended.active_run_id == ""
    assert ended.create_time == made.create_time
    times = [it.update_time.ToMicroseconds() for it in (made, parked, ended)]
    assert times[0] < times[1] < times[2]
    with pytest.raises(EngineError) as refused:
        await store.get_conversation("acme", "nowhere")
    assert refused.value.reason == "UNKNOWN_CONVERSATION"


async def test_conversations_are_listed_the_last_changed_first(store, make, writer):
    """What people used last is on top."""
    for name in ("a", "b", "c"):
        await store.create(make.new(f"r-{name}", name))
    await writer(store, make.key("r-a")).end()
    page = await store.list_conversations("acme", page_size=0, page_token="")
    assert [conversation.id for conversation in page.items] == ["a", "c", "b"]
    assert page.next_token == ""


async def walk(list_page):
    names, token, pages = [], "", 0
    while True:
        page = await list_page(token)
        names += [item.id for item in page.items]
        pages += 1
        token = page.next_token
        if not token:
            return names, pages


async def test_pages_join_to_the_whole_list(store, make, writer):
    """Every item exactly once, in order, over all three lists."""
    for n in range(7):
        await store.create(make.new(f"r{n}", f"c{n}"))
    await writer(store, make.key("r0")).end(*(f"m{n}" for n in range(6)))

    async def runs(token):
        return await store.list_runs("acme", states=(), conversation_id="", page_size=3, page_token=token)

    assert await walk(runs) == ([f"r{n}" for n in range(6, -1, -1)], 3)
    conversations, pages = await walk(lambda token: store.list_conversations("acme", page_size=2, page_token=token))
    assert (conversations, pages) == (["c0", *(f"c{n}" for n in range(6, 0, -1))], 4)
    messages, pages = await walk(lambda token: store.list_messages("acme", "c0", page_size=7, page_token=token))
    assert (messages, pages) == (["r0-0", *(f"m{n}" for n in range(6))], 1)


async def test_pages_are_stable_when_items_are_added(store, make):
    """A new run shifts no page."""
    for n in range(4):
        await store.create(make.new(f"r{n}"))
    first = await store.list_runs("acme", states=(), conversation_id="", page_size=2, page_token="")
    await store.create(make.new("new"))
    second = await store.list_runs("acme", states=(), conversation_id="", page_size=2, page_token=first.next_token)
    assert [run.id for run in [*first.items, *second.items]] == ["r3", "r2", "r1", "r0"]
    assert second.next_token == ""


@pytest.mark.parametrize(
    "token", ["x", "!!", "bnVsbA", "W10", "WyJhIl0", "W3RydWVd", "Wzk5OTk5OTk5OTk5OTk5OTk5OTk5XQ", "\u00e9"]
)
async def test_a_token_that_is_none_is_refused(store, make, token):
    """Garbage is INVALID_REQUEST and names the field; no list reads it as the first page."""
    await store.create(make.new("r1", "c"))
    calls = (
        store.list_runs("acme", states=(), conversation_id="", page_size=2, page_token=token),
        store.list_conversations("acme", page_size=2, page_token=token),
        store.list_messages("acme", "c", page_size=2, page_token=token),
    )
    for call in calls:
        with pytest.raises(FieldError) as refused:
            await call
        assert set(refused.value.fields) == {"page_token"}


async def test_runs_are_filtered_by_state_and_conversation(store, make, writer):
    """Filters join, and only narrow."""
    for name, conversation in (("r1", "c"), ("r2", "d"), ("r3", "d")):
        await store.create(make.new(name, conversation, on_busy=QUEUE))
    await writer(store, make.key("r1")).end()

    async def ids(states=(), conversation_id=""):
        page = await store.list_runs("acme", states=states, conversation_id=conversation_id, page_size=0, page_token="")
        return [run.id for run in page.items]

    assert await ids() == ["r3", "r2", "r1"]
    assert await ids((SUCCEEDED,)) == ["r1"]
    assert await ids((RunState.RUN_STATE_QUEUED, RunState.RUN_STATE_RUNNING)) == ["r3", "r2"]
    assert await ids((), "d") == ["r3", "r2"]
    assert await ids((RunState.RUN_STATE_RUNNING,), "d") == ["r2"]
    assert await ids((), "nowhere") == []


async def test_page_sizes_have_a_default_and_a_limit(store, make, writer):
    """0 means 50, and nobody gets more than 500 at once."""
    await store.create(make.new("r1", "c"))
    await writer(store, make.key("r1")).end(*(f"m{n}" for n in range(520)))
    sizes = []
    for size in (0, 1000, -3):
        page = await store.list_messages("acme", "c", page_size=size, page_token="")
        sizes.append(len(page.items))
        assert page.next_token
    assert sizes == [50, 500, 50]


async def test_deleting_a_conversation_deletes_everything_in_it(store, make, writer):
    """Messages, runs, request ids; the same ids can be used again."""
    for name in ("r1", "r2"):
        await store.create(make.new(name, "c", request_id=f"q-{name}"))
        await writer(store, make.key(name)).end(f"a-{name}")
    await store.create(make.new("other", "d"))
    await store.delete(make.key("r1"))
    await store.delete_conversation("acme", "c")
    for call in (
        store.get_conversation("acme", "c"),
        store.list_messages("acme", "c", page_size=0, page_token=""),
        store.delete_conversation("acme", "c"),
    ):
        with pytest.raises(EngineError) as refused:
            await call
        assert refused.value.reason == "UNKNOWN_CONVERSATION"
    with pytest.raises(EngineError):
        await store.head(make.key("r2"))
    assert not (await store.create(make.new("r2", "c", request_id="q-r2"))).existing
    assert await seen(store) == ["r2-0"]
    assert (await store.get_conversation("acme", "d")).active_run_id == "other"


async def test_a_busy_conversation_is_not_deleted(store, make, writer):
    """First the run must end."""
    await store.create(make.new("r1", "c"))
    with pytest.raises(EngineError) as refused:
        await store.delete_conversation("acme", "c")
    assert refused.value.reason == "CONVERSATION_BUSY"
    assert refused.value.metadata["run_id"] == "r1"
    assert await seen(store) == ["r1-0"]


async def test_settings_are_stored_by_compare_and_set(store):
    """Of two who change a setting at once one is told to look again."""
    assert await store.get("acme", "switch") is None
    assert await store.put("acme", "switch", b"on", 1) is None
    assert await store.put("acme", "switch", b"on", 0) == 1
    assert await store.put("acme", "switch", b"twice", 0) is None
    assert await store.put("acme", "switch", b"off", 1) == 2
    assert await store.put("acme", "switch", b"late", 1) is None
    assert await store.get("acme", "switch") == (b"off", 2)
    assert await store.get("globex", "switch") is None
    assert await store.put("globex", "switch", b"mine", 0) == 1
    assert await store.get("acme", "switch") == (b"off", 2)
