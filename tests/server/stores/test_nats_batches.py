"""Batches on their way: operations that are stored together, each with a fate of its own."""

import asyncio

import pytest

from dualclaw_server.engine.store import Full, StoreError
from dualclaw_server.stores.nats import NatsStore, parse_address
from dualclaw_server.stores.nats.batches import Batches
from dualclaw_server.stores.nats.layout import Subjects
from dualclaw_server.stores.nats.link import Conflict, Link, Uncertain, Write


class Counting(Link):
    """A link that notes how many messages went out together; the first time it waits for the gate."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.sizes = []
        self.gate = asyncio.Event()

    async def write(self, writes):
        self.sizes.append(len(writes))
        if len(self.sizes) == 1:
            await asyncio.wait_for(self.gate.wait(), 100)
        return await super().write(writes)


@pytest.fixture(params=["nats_r1", "nats_r3"])
async def link(request):
    """A link to a store's streams."""
    cluster = request.getfixturevalue(request.param)
    address = parse_address(cluster.url())
    store = NatsStore(address, accept_loss=True)
    await store.open()
    yield Counting(store._parts.client, Subjects(address.name), timeout=60)
    await store.close()
    cluster.remove(address.name)


def pair(link, name, expect=0, text=b"1\n"):
    """The writes of an operation on two subjects."""
    return [Write(link.subjects.setting("t", f"{name}{part}"), text, expect) for part in "ab"]


async def begin(batches, *operations):
    """Start operations one after the other; the first is on its way, the others wait for it."""
    tasks = []
    for writes in operations:
        tasks.append(asyncio.create_task(batches.store(writes)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return tasks


async def test_what_waits_goes_out_together_and_each_learns_its_own_sequence(link):
    """Frames of text, and operations of several parts; the numbers are those of the messages themselves."""
    operations = [pair(link, f"{number}.")[: 1 + number % 2] for number in range(1, 21)]
    tasks = await begin(Batches(link), *operations)
    link.gate.set()
    seqs = await asyncio.wait_for(asyncio.gather(*tasks), 100)
    assert link.sizes == [2, 28]
    assert seqs == [(await link.last(writes[-1].subject)).seq for writes in operations]
    assert len(set(seqs)) == 20


async def test_a_refusal_is_that_of_the_one_who_caused_it(link):
    """The others of its batch are stored, all of them once; halves make that few attempts, however many they are."""
    tasks = await begin(Batches(link), *[pair(link, name, 7 * (name == "c")) for name in "abcde"])
    link.gate.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 100)
    assert [type(result) for result in results] == [int, int, Conflict, int, int]
    assert link.sizes == [2, 8, 4, 2, 2, 4]
    assert [await link.last(write.subject) for write in pair(link, "c")] == [None, None]
    assert (await link.last(pair(link, "e")[-1].subject)).seq == results[-1]


async def test_two_writes_to_one_subject_follow_each_other(link):
    """The second has read what was there before the first, and must be refused, alone."""
    tasks = await begin(Batches(link), pair(link, "x"), pair(link, "y"), pair(link, "y", text=b"2\n"), pair(link, "z"))
    link.gate.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 100)
    assert [type(result) for result in results] == [int, int, Conflict, int]
    assert link.sizes == [2, 4, 2]
    assert (await link.last(pair(link, "y")[0].subject)).data == b"1\n"


async def test_a_lost_answer_is_unknown_to_each(link):
    """Each has an error of its own, for each finds out for itself."""

    class Deaf(Counting):
        async def write(self, writes):
            seq = await super().write(writes)
            if len(self.sizes) == 2:
                raise Uncertain("the answer was lost")
            return seq

    deaf = Deaf(link.client, link.subjects, timeout=60)
    tasks = await begin(Batches(deaf), *[pair(link, name) for name in "abc"])
    deaf.gate.set()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 100)
    assert [type(result) for result in results[1:]] == [Uncertain, Uncertain]
    assert results[1] is not results[2]
    assert deaf.sizes == [2, 4]


async def test_a_stream_without_room_for_all_takes_what_fits(link):
    """What is too much for all together need not be too much for one."""

    class Small(Counting):
        async def write(self, writes):
            if len(writes) > 2:
                self.sizes.append(len(writes))
                raise Full("no room")
            return await super().write(writes)

    small = Small(link.client, link.subjects, timeout=60)
    tasks = await begin(Batches(small), *[pair(link, name) for name in "abc"])
    small.gate.set()
    assert all(await asyncio.wait_for(asyncio.gather(*tasks), 100))
    assert small.sizes == [2, 4, 2, 2]


async def test_whoever_leaves_before_its_turn_writes_nothing_and_takes_nobody_along(link):
    """A cancelled operation that waits is dropped; one on its way is stored, and the next ones follow."""
    first, left, last = await begin(Batches(link), *[pair(link, name) for name in "abc"])
    first.cancel()
    left.cancel()
    await asyncio.wait({first, left}, timeout=100)
    link.gate.set()
    assert await asyncio.wait_for(last, 100)
    assert link.sizes == [2, 2]
    assert [await link.last(pair(link, name)[0].subject) is not None for name in "abc"] == [True, False, True]


async def test_batches_have_their_bounds(link):
    """One of a thousand messages may be, one more is refused by name; and large ones do not wait to become larger."""
    batches = Batches(link)
    link.gate.set()
    names = [link.subjects.setting("t", str(number)) for number in range(1001)]
    with pytest.raises(StoreError, match="1001 parts"):
        await batches.store([Write(name, b"1\n", 0) for name in names])
    assert await batches.store([Write(name, b"1\n", 0) for name in names[:-1]])
    large = [[Write(link.subjects.setting("t", f"{n}.{part}"), b"x" * 200_000, 0) for part in "ab"] for n in range(4)]
    await asyncio.wait_for(asyncio.gather(*[batches.store(writes) for writes in large]), 100)
    assert link.sizes == [1000, 4, 4]
