"""What servers say that are behind, have lost what they had or do not answer; and what goes away under a reader."""

import asyncio
import shutil
import time
from functools import partial

import pytest

from dualclaw.errors import EngineError
from dualclaw_server.engine.store import RunKey, Unavailable
from dualclaw_server.stores.histories import SHORTEST
from dualclaw_server.stores.nats import NatsStore, parse_address, work
from dualclaw_server.stores.nats.commands import Commands
from dualclaw_server.stores.nats.heart import Heart
from dualclaw_server.stores.nats.layout import Mark, SettingDoc, Stored, Subjects, WorkDoc, pack
from dualclaw_server.stores.nats.link import Link, Uncertain, Write
from dualclaw_server.stores.nats.reads import Reader
from dualclaw_server.stores.nats.transaction import Transactor
from tests.nats_servers import NatsServers


@pytest.fixture
async def stores(nats_r1):
    """Two stores on the same runs."""
    address = parse_address(nats_r1.url())
    one, other = (NatsStore(address, accept_loss=True) for _ in range(2))
    await one.open()
    await other.open()
    yield one, other
    await other.close()
    await one.close()
    nats_r1.remove(address.name)


@pytest.fixture
def link(stores):
    """A link to these stores' streams."""
    parts = stores[0]._parts
    return Link(parts.client, Subjects(stores[0]._address.name), patience=2)


KEY = RunKey("t", "r")
MINE = work.Delivery(KEY, "default", "mine", 2, 1)
"""The second item of a run, in hand."""
BEFORE = WorkDoc(generation=1)
"""What a leader says that was frozen since: the first item is done."""
HELD = WorkDoc(generation=2, token="mine", worker="me", deliveries=1)


class Frozen(Link):
    """A link to a server that was frozen, and for one more moment takes itself for the leader."""

    behind = 1

    async def last(self, subject):
        stored = await super().last(subject)
        if stored is not None and subject.endswith(".work") and self.behind:
            self.behind -= 1
            return Stored(subject, 1, pack(BEFORE))
        return stored


@pytest.mark.parametrize("settle", [partial(work.ack, now=1.0), partial(work.nak, delay=0.0, now=1.0, long=9.0)])
async def test_an_item_in_hand_is_not_over_because_a_server_does_not_know_of_it_yet(link, settle):
    """Its message would be taken off the queue while the run still counts as held: nobody would ever wake it."""
    subject = link.subjects.run(KEY, "work")
    await link.write([Write(subject, pack(HELD), 0)])
    frozen = Frozen(link.client, link.subjects, patience=2)
    done, _ = await Transactor(frozen).run("mine", lambda tx: settle(tx, MINE))
    assert frozen.behind == 0
    assert done is False or done is None
    done, _ = await Transactor(link).run("mine", lambda tx: settle(tx, MINE))
    assert done is True or done == 0.0
    assert not (await link.find(subject, WorkDoc)).doc.token


async def test_a_claim_is_not_lost_because_a_server_does_not_know_of_it_yet(link):
    """What a follower says that was frozen is older than the claim."""

    class Claim:
        delivery = MINE
        lost = False

        def lose(self):
            self.lost = True

    async def connect(name):
        raise OSError(name)

    heart = Heart(connect, link.subjects, 30.0, 60.0, lambda key: None)
    claim = Claim()
    heart.hold(claim)
    heart._judge(claim, Stored("work", 1, pack(BEFORE)))
    assert not claim.lost
    heart._judge(claim, Stored("work", 2, pack(WorkDoc(generation=2))))
    assert claim.lost


async def test_an_item_put_back_whose_answer_was_lost_comes_again_when_it_should(link):
    """The server is told when to deliver it; else it would wait until the lease is over."""

    class Deaf(Link):
        heard = False

        async def write(self, writes):
            seq = await super().write(writes)
            if not self.heard:
                self.heard = True
                raise Uncertain("the answer was lost")
            return seq

    await link.write([Write(link.subjects.run(KEY, "work"), pack(HELD), 0)])
    deaf = Deaf(link.client, link.subjects, patience=2)
    after, _ = await Transactor(deaf).run("mine", lambda tx: work.nak(tx, MINE, 3.0, 100.0, long=9.0))
    assert after == 3.0


async def test_what_was_stored_is_so_even_if_nobody_answers_the_tidying_after_it(link):
    """Unavailable says that nothing was stored; a writer would take its own frame for another writer's."""
    subject = link.subjects.setting("t", "x")
    tidied = []

    async def fail():
        tidied.append(subject)
        raise Unavailable("nobody answers")

    async def step(tx):
        assert await tx.get(subject, SettingDoc) is None
        await tx.put(subject, SettingDoc(revision=1))
        tx.after += [fail, fail]
        return "stored"

    result, seq = await Transactor(link).run("op", step)
    assert (result, len(tidied)) == ("stored", 2)
    assert (await link.last(subject)).seq == seq


async def test_what_is_purged_while_it_is_read_is_gone(link):
    """A reader learns so at once, not after all patience that no replica has what the leader knew."""
    names = [link.subjects.conversation("t", "c", part) for part in ("doc", "turn.1")]
    await link.write([Write(name, pack(Mark()), None) for name in names])

    class Purged(Link):
        async def _direct(self, body):
            await link.purge(link.subjects.conversation("t", "c", ">"))
            return await super()._direct(body)

    purged = Purged(link.client, link.subjects, patience=2)
    fresh = link.subjects.conversation("t", "c", ">")
    assert await purged.snapshot(names[1], fresh=fresh) == {}


async def test_a_run_made_anew_while_the_old_one_is_deleted_stays(stores, link, make):
    """Whoever makes it purges what was left; the one that deletes finds a run that is nobody's to purge."""
    one, other = stores
    await one.create(make.new("r", request_id="first"))

    class Slow(Link):
        made = False

        async def last(self, subject):
            if subject.endswith(".>") and not self.made:
                self.made = True
                await other.create(make.new("r", "c-other", request_id="second", record=b"other"))
            return await super().last(subject)

    slow = Slow(link.client, link.subjects, patience=2)
    transactor = Transactor(slow)
    await Commands(slow, transactor, Reader(slow, transactor.known), time.time).delete(make.key("r"))
    assert slow.made
    assert (await other.load(make.key("r"))).record == b"other"
    assert (await other.create(make.new("r", "c-other", request_id="second"))).existing


@pytest.mark.parametrize("queued", [True, False])
async def test_what_a_user_said_to_a_deleted_run_is_not_shown_of_another_one_of_its_name(stores, make, writer, queued):
    """What this process knows of the record belongs to one run, not to a name."""
    one, other = stores
    if queued:
        await one.create(make.new("first", "c"))
    said = partial(make.new, "r", "c", on_busy=2)
    await one.create(said())
    await one.delete(make.key("r"))
    await other.create(said(message=make.message("another")))
    if queued:
        await writer(one, make.key("first")).end()
    else:
        await writer(one, make.key("r")).end()
    page = await one.list_messages("acme", "c", page_size=100, page_token="")
    assert [message.id for message in page.items][-1] == "another"


@pytest.mark.timeout(300)
async def test_servers_that_have_lost_what_they_had_are_believed(tmp_path, make, writer, collect):
    """A process that knew more begins anew with its next connection: it shows and builds on what there is."""
    servers = NatsServers(tmp_path, 1)
    kept = tmp_path / "kept"
    address = parse_address(servers.url())
    try:
        one, other = (NatsStore(address, accept_loss=True) for _ in range(2))
        await one.open()
        await other.open()

        async def turn(store, number, text):
            name = f"{text}{number}"
            await store.create(make.new(name, "c"))
            log = writer(store, make.key(name))
            await log.add(number, text=text)
            await log.end(f"{text}-answer{number}")

        def restart(restore):
            servers.kill(0)
            if restore:
                shutil.rmtree(servers.folder / "0")
                shutil.copytree(kept, servers.folder / "0")
            else:
                shutil.copytree(servers.folder / "0", kept)
            servers.start(0)
            servers.wait()

        async def shown(store):
            assert await store.list_conversations("acme", page_size=9, page_token="")
            runs = await store.list_runs("acme", states=(), conversation_id="", page_size=99, page_token="")
            return [run.id for run in runs.items]

        await one.create(make.new("open"))
        await writer(one, make.key("open")).add()
        for number in range(SHORTEST):
            await turn(one, number, "a")
        await asyncio.to_thread(restart, False)
        for number in range(SHORTEST, SHORTEST + 3):
            await turn(one, number, "a")
        await one.create(make.new("last", "c"))
        log = writer(one, make.key("open"))
        log.version = log.last_seq = 1
        for _ in range(9):
            await log.add()
        assert f"a-answer{SHORTEST + 2}" in [m.id for m in await one.history("acme", "c", "last")]
        assert "last" in await shown(one)
        await asyncio.to_thread(restart, True)
        log = writer(other, make.key("open"))
        log.version = log.last_seq = 1
        for _ in range(3):
            await log.add(3, text="b")
        for after in range(10):
            frames = await one.read(make.key("open"), after)
            assert (frames[0].first_seq, frames[-1].last_seq) == (after + 1, 10)
        for number in range(SHORTEST, SHORTEST + 3):
            await turn(other, number, "b")
        await other.create(make.new("then", "c"))
        assert await shown(one) == await shown(other)
        history = await one.history("acme", "c", "then")
        assert [m.id for m in history] == [m.id for m in await other.history("acme", "c", "then")]
        assert f"b-answer{SHORTEST + 2}" in [m.id for m in history]
        with pytest.raises(EngineError):
            await one.head(make.key("last"))
        await one.close()
        await other.close()
    finally:
        servers.stop()
