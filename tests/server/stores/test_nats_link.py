"""The parts of the NATS store by themselves: subjects, and what the answers of JetStream mean."""

import asyncio
from contextlib import aclosing
from functools import partial

import pytest

from dualclaw_server.engine.store import RunKey, StoreError, Unavailable
from dualclaw_server.stores.nats import NatsStore, parse_address
from dualclaw_server.stores.nats.layout import ItemDoc, Mark, SettingDoc, Subjects, WorkDoc, pack, token
from dualclaw_server.stores.nats.link import Conflict, Link, Uncertain, Write
from dualclaw_server.stores.nats.queue import _take
from dualclaw_server.stores.nats.transaction import Transactor


@pytest.fixture
async def link(nats_r1):
    """A link to a store's streams."""
    address = parse_address(nats_r1.url())
    store = NatsStore(address, accept_loss=True)
    await store.open()
    yield Link(store._parts.client, Subjects(address.name), timeout=60)
    await store.close()
    nats_r1.remove(address.name)


def test_ids_become_tokens_that_reach_no_other_subject():
    """No dot, no wildcard, no white space; different ids, different tokens; bounded, and never empty."""
    ids = ["", " ", "a", "A", "a.b", "*", ">", "a\r\nPUB x 1", "\0", "é", "e\u0301", "x" * 80, "x" * 81, "x" * 9000]
    tokens = [token(name) for name in ids]
    assert len(set(tokens)) == len(ids)
    assert all(one.isascii() and one.isalnum() and 0 < len(one) < 140 for one in tokens)


async def test_a_batch_is_stored_as_a_whole_or_not_at_all(link):
    """One stale expectation refuses all of it."""
    names = [link.subjects.setting("t", name) for name in "abc"]
    await link.write([Write(name, b"1\n", 0) for name in names])
    seqs = [(await link.last(name)).seq for name in names]
    with pytest.raises(Conflict):
        await link.write([Write(names[0], b"2\n", seqs[0]), Write(names[1], b"2\n", seqs[1] - 1)])
    assert [(await link.last(name)).data for name in names] == [b"1\n"] * 3
    await link.write([Write(name, b"2\n", seq) for name, seq in zip(names, seqs, strict=True)])
    assert [(await link.last(name)).data for name in names] == [b"2\n"] * 3


async def test_a_snapshot_of_more_subjects_than_one_answer_has_is_whole(link):
    """The server answers for 1,024 subjects at most; a long conversation has more."""
    names = [link.subjects.conversation("t", "c", "turn", str(n)) for n in range(1100)]
    for start in range(0, 1100, 550):
        await link.write([Write(name, pack(Mark()), None) for name in names[start : start + 550]])
    found = await link.snapshot(link.subjects.conversation("t", "c", "turn", "*"))
    assert set(found) == set(names)


async def test_what_a_follower_that_is_behind_says_does_not_count(link):
    """A direct get may come from any replica; it is asked again until it knows what the leader knew."""
    subject = link.subjects.setting("t", "x")
    await link.write([Write(subject, pack(SettingDoc(revision=1)), 0)])
    asked = []

    class Behind(Link):
        async def _direct(self, body):
            found, upto, too_many = await super()._direct(body)
            asked.append(upto)
            return ([], upto - 1, False) if len(asked) < 3 else (found, upto, too_many)

    behind = Behind(link.client, link.subjects, timeout=60)
    assert set(await behind.snapshot(subject)) == {subject}
    assert len(asked) == 3


async def test_an_operation_whose_answer_was_lost_is_done_once(link):
    """It runs anew and recognises its own write."""
    subject = link.subjects.setting("t", "x")
    lost = []

    class Deaf(Link):
        async def write(self, writes):
            seq = await super().write(writes)
            if not lost:
                lost.append(seq)
                raise Uncertain("the answer was lost")
            return seq

    deaf = Deaf(link.client, link.subjects, timeout=60)
    attempts = []

    async def step(tx):
        attempts.append(tx.attempt)
        found = await tx.get(subject, SettingDoc)
        if found is not None and found.doc.op == tx.op:
            return found.doc.revision
        await tx.put(subject, SettingDoc(revision=1 if found is None else found.doc.revision + 1))
        return 1

    assert await Transactor(deaf).run("op", step) == (1, 0)
    assert attempts == [0, 1]
    assert (await link.find(subject, SettingDoc)).doc.revision == 1


async def test_a_damaged_message_is_named_and_ends_nothing_else(link, make):
    """Where it lies is in the text; the store answers on."""
    subject = link.subjects.setting("t", "x")
    await link.write([Write(subject, b"\xff no document", 0)])
    with pytest.raises(StoreError, match=rf"message \d+ of stream {link.subjects.stream} is damaged"):
        await link.find(subject, SettingDoc)
    assert await link.find(link.subjects.setting("t", "y"), SettingDoc) is None


async def test_a_connection_that_is_gone_is_unavailable(link):
    """Nothing is buffered for later, and no call waits for ever."""
    await link.client.close()
    for call in (link.last(link.subjects.setting("t", "x")), link.call("STREAM.NAMES", {})):
        with pytest.raises(Unavailable):
            await asyncio.wait_for(call, 100)


class Late(Link):
    """A link to a leader that has not stored yet what a faster replica has delivered already."""

    behind = 2

    async def find(self, subject, kind, *, bare=False):
        if kind is WorkDoc and self.behind:
            self.behind -= 1
            return None
        return await super().find(subject, kind, bare=bare)

    async def reached(self, seq):
        return not self.behind and await super().reached(seq)


async def test_an_item_the_leader_does_not_know_of_yet_is_not_dropped(link):
    """It is looked at again; dropped as stale, nobody would ever work on that run."""
    key = RunKey("t", "r")
    item = ItemDoc(tenant="t", run_id="r", generation=1)
    writes = [
        Write(link.subjects.run(key, "work"), pack(WorkDoc(generation=1, waiting=True)), 0),
        Write(link.subjects.item("default", key), pack(item), None),
    ]
    seq = await link.write(writes)
    step = partial(_take, item, seq, "default", "w", "token", 9e9)
    delivery, _ = await Transactor(Late(link.client, link.subjects, timeout=60)).run("op", step)
    assert delivery is not None
    assert (delivery.key, delivery.generation, delivery.number) == (key, 1, 1)


async def test_an_item_whose_run_is_gone_is_dropped(link):
    """The leader has stored as much, and still knows nothing of the run."""
    item = ItemDoc(tenant="t", run_id="r", generation=1)
    seq = await link.write([Write(link.subjects.item("default", RunKey("t", "r")), pack(item), None)])
    assert not await link.reached(seq + 1)
    step = partial(_take, item, seq, "default", "w", "token", 9e9)
    assert await Transactor(link).run("op", step) == (None, 0)


async def test_a_cancellation_that_comes_together_with_the_answer_is_not_lost(link):
    """A task that was told to end must not go on because of what it was waiting for just then."""
    went_on = []

    async def ask():
        await link.last(link.subjects.setting("t", "x"))
        went_on.append(True)

    task = asyncio.create_task(ask())
    for _ in range(20):
        if not link.client._resp_map:
            await asyncio.sleep(0)
    (answer,) = link.client._resp_map.values()
    answer.add_done_callback(lambda _: task.cancel())
    await asyncio.wait({task}, timeout=100)
    assert task.cancelled()
    assert went_on == []


async def test_who_cleans_up_after_a_cancellation_may_still_ask(link):
    """The cancellation that is over already is none of what is awaited after it."""
    found = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            found.append(await link.last(link.subjects.setting("t", "x")))

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=100)
    assert task.cancelled()
    assert found == [None]


async def test_a_follower_that_leaves_at_once_takes_nothing_with_it(nats_r1, make, until):
    """However far it has come: the connection serves everybody, goes on at once and hears no more of the run."""
    address = parse_address(nats_r1.url())
    store = NatsStore(address, accept_loss=True)
    await store.open()
    try:
        await store.create(make.new("r1"))
        idle = len(store._parts.client._subs)
        for turns in range(12):
            async with aclosing(store.follow(make.key("r1"), 0)) as frames:
                waiting = asyncio.ensure_future(anext(frames))
                for _ in range(turns):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait({waiting})
            assert (await store.head(make.key("r1"))).version == 0
        assert store._parts.client.stats["reconnects"] == 0
        async with asyncio.timeout(100):
            while len(store._parts.client._subs) > idle:  # noqa: ASYNC110  # the client tells nobody
                await asyncio.sleep(0.01)
    finally:
        await store.close()
        nats_r1.remove(address.name)
