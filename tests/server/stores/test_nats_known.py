"""What a process knows without asking: it saves questions, and is never what anything rests on."""

import time

import pytest
from nats.aio.client import Client

from dualclaw.errors import EngineError
from dualclaw_server.engine.history import History
from dualclaw_server.engine.store import Ambiguous, Fenced, Frame, RunKey, Unavailable
from dualclaw_server.stores.histories import SHORTEST
from dualclaw_server.stores.nats import NatsStore, parse_address
from dualclaw_server.stores.nats.appends import Appender, _Tail
from dualclaw_server.stores.nats.commands import Commands
from dualclaw_server.stores.nats.known import Known
from dualclaw_server.stores.nats.layout import SettingDoc, Stored, Subjects, pack
from dualclaw_server.stores.nats.link import Link, Uncertain, Write
from dualclaw_server.stores.nats.reads import Reader
from dualclaw_server.stores.nats.transaction import Transactor
from dualclaw_server.stores.records import RUNNING


@pytest.fixture(params=["nats_r1", "nats_r3"])
async def processes(request):
    """Two stores on the same runs."""
    cluster = request.getfixturevalue(request.param)
    address = parse_address(cluster.url())
    one, other = (NatsStore(address, accept_loss=True, max_pending=4096) for _ in range(2))
    await one.open()
    await other.open()
    yield one, other
    await other.close()
    await one.close()
    cluster.remove(address.name)


@pytest.fixture
async def link(nats_r1):
    """A link to a store's streams."""
    address = parse_address(nats_r1.url())
    store = NatsStore(address, accept_loss=True)
    await store.open()
    yield Link(store._parts.client, Subjects(address.name), patience=2)
    await store.close()
    nats_r1.remove(address.name)


def expected(last):
    return [name for number in range(last + 1) for name in (f"r{number}-0", f"a{number}")]


class Step:
    """Adds one to a setting, and notes what it saw; ``only_reads`` and ``refuses`` at certain revisions."""

    def __init__(self, link, *, only_reads=(), refuses=()):
        self.subject = link.subjects.setting("t", "x")
        self.only_reads = only_reads
        self.refuses = refuses
        self.saw = []

    async def __call__(self, tx):
        found = await tx.get(self.subject, SettingDoc)
        revision = 0 if found is None else found.doc.revision
        self.saw.append(revision)
        if revision in self.refuses:
            raise Fenced(f"revision {revision}")
        if revision not in self.only_reads:
            await tx.put(self.subject, SettingDoc(revision=revision + 1))
        return revision


async def overtake(link, revision):
    """Another process writes the setting."""
    subject = link.subjects.setting("t", "x")
    await link.write([Write(subject, pack(SettingDoc(revision=revision)), None)])


async def test_what_this_process_wrote_it_need_not_ask_for(link):
    """The next operation sends its write and nothing else."""
    transactor = Transactor(link)
    for number in range(3):
        before = link.client.stats["out_msgs"]
        step = Step(link)
        assert (await transactor.run(f"op{number}", step, believing=True))[0] == number
        assert step.saw == [number]
        assert link.client.stats["out_msgs"] - before == (2 if number == 0 else 1)


async def test_an_operation_that_was_overtaken_runs_anew_on_what_is_there(link):
    """Its belief was wrong, so its write was refused; it never builds on what is gone."""
    transactor = Transactor(link)
    await transactor.run("op1", Step(link), believing=True)
    await overtake(link, 10)
    step = Step(link)
    assert (await transactor.run("op2", step, believing=True))[0] == 10
    assert step.saw == [1, 10]
    assert (await link.find(step.subject, SettingDoc)).doc.revision == 11


async def test_nothing_is_answered_from_a_belief_that_is_not_written(link):
    """What only looks is told by the leader: no write would find out that it has changed."""
    transactor = Transactor(link)
    await transactor.run("op1", Step(link), believing=True)
    await overtake(link, 10)
    step = Step(link, only_reads=(1, 10))
    assert await transactor.run("op2", step, believing=True) == (10, 0)
    assert step.saw == [1, 10]


async def test_nothing_is_refused_because_of_a_belief(link):
    """Fenced, busy or unknown is what the leader says, not what was so once."""
    transactor = Transactor(link)
    await transactor.run("op1", Step(link), believing=True)
    await overtake(link, 10)
    step = Step(link, refuses=(1,))
    assert (await transactor.run("op2", step, believing=True))[0] == 10
    step = Step(link, refuses=(11,))
    with pytest.raises(Fenced, match="revision 11"):
        await transactor.run("op3", step, believing=True)
    assert step.saw == [11, 11]


async def test_what_is_presumed_not_to_be_there_is_found_when_it_is(link):
    """The write that expects nothing is refused, and the operation looks."""
    await overtake(link, 10)
    step = Step(link)

    async def presuming(tx):
        tx.presume_none(step.subject)
        return await step(tx)

    assert (await Transactor(link).run("op", presuming, believing=True))[0] == 10
    assert step.saw == [0, 10]
    assert (await link.find(step.subject, SettingDoc)).doc.revision == 11


async def test_others_operations_believe_nothing_and_leave_nothing_to_believe(link):
    """Only who says so begins with what is known; what anyone else writes is asked for by the next."""
    transactor = Transactor(link)
    await transactor.run("op1", Step(link), believing=True)
    await overtake(link, 10)
    step = Step(link)
    assert (await transactor.run("op2", step))[0] == 10
    assert step.saw == [10]
    assert transactor.known.find(step.subject) is None


def test_the_newest_of_a_subject_is_known_within_a_bound_and_for_one_connection():
    """A late answer replaces nothing; the one not used for the longest goes; a new connection begins with nothing."""
    client = Client()
    known = Known(client, most_bytes=10_000)
    known.note(Stored("a", 2, b"new"))
    known.note(Stored("a", 1, b"old"))
    assert known.find("a") == Stored("a", 2, b"new")
    for number in range(50):
        known.note(Stored(f"b{number}", number + 1, b"x" * 100))
        known.find("b0")
        assert 0 < known.size <= 10_000
    assert known.find("a") is None
    assert known.find("b0") is not None
    assert known.find("b49") is not None
    known.note(Stored("b0", 100, b"x" * 100_000))
    assert known.find("b0") is None
    client.stats["reconnects"] += 1
    assert known.find("b49") is None
    assert known.size == 0


async def test_a_start_whose_answer_was_lost_is_told_of_its_run(link, make, writer):
    """It asks without beliefs then; that a worker has taken the run up meanwhile makes it nobody else's."""

    class Deaf(Link):
        heard = False

        async def write(self, writes):
            seq = await super().write(writes)
            if not self.heard:
                self.heard = True
                raise Uncertain("the answer was lost")
            return seq

    deaf = Deaf(link.client, link.subjects, patience=2)
    transactor = Transactor(deaf)
    commands = Commands(link, transactor, Reader(link, transactor.known), time.time)
    created = (await commands.create(make.new("r"))).created
    assert not created.existing
    assert created.head.key == make.key("r")
    with pytest.raises(ValueError, match="exists"):
        await commands.create(make.new("r"))


async def test_a_frame_of_text_whose_answer_was_lost_is_in_doubt_as_long_as_nobody_answers(link):
    """It may be in the log, so its writer is not told that nothing was stored."""

    class Gone(Link):
        async def write(self, writes):
            await super().write(writes)
            raise Uncertain("the answer was lost")

        async def last(self, subject):
            raise Unavailable("nobody answers")

    gone = Gone(link.client, link.subjects, patience=2)
    told = []
    appender = Appender(gone, Transactor(gone), time.time, lambda *frame: told.append(frame), "writer")
    key = RunKey("t", "r")
    appender._tails[key] = _Tail(0, 1, 1, 1, RUNNING, 1)
    with pytest.raises(Ambiguous):
        await appender.append(key, Frame(1, 2, 1, b"text", RUNNING), 1)
    assert told == []
    assert (await link.last(link.subjects.run(key, "log"))) is not None
    await appender.close()


async def test_who_was_overtaken_settles_nothing(processes, make, claim_now):
    """It knows its claim as it was; that somebody else has the item by now it is told by the refusal of its write."""
    first, second = processes
    for settle in (lambda claim: claim.ack(), lambda claim: claim.nak(0)):
        name = f"r{time.monotonic_ns()}"
        await first.create(make.new(name))
        claim = await claim_now(first)
        assert await second.release(make.key(name))
        taken = await claim_now(second)
        assert taken.key == claim.key
        claim._lost, claim.until = False, time.monotonic() + 60  # it believes otherwise
        await settle(claim)
        found = await second.inspect(claim.key)
        assert found.worker == "worker"
        assert not taken.lost
        await taken.nak(0)
        assert (await claim_now(first)).key == claim.key


async def test_a_run_that_stays_in_a_process_is_worked_on_with_few_questions(processes, make, writer, claim_now):
    """From start to rest the whole run takes fewer messages than its reads alone did when each was a question."""
    store, _ = processes
    client = store._parts.client
    for name in ("first", "second"):  # by the second one the consumer is there
        before = client.stats["out_msgs"]
        await store.create(make.new(name))
        claim = await claim_now(store)
        await store.load(claim.key)
        assert await store.history("acme", f"c-{name}", name) == ()
        log = writer(store, claim.key)
        await log.add(checkpoint=b"state", durable=True)
        await log.end("answer", checkpoint=b"state")
        await claim.ack()
        sent = client.stats["out_msgs"] - before
    assert sent < 40


async def test_a_signal_of_another_process_is_not_lost_to_what_the_worker_knew(processes, make, writer, claim_now):
    """The item it acks is not the one it took: the note that a signal left must turn into a new delivery."""
    worker, other = processes
    await worker.create(make.new("r"))
    claim = await claim_now(worker)
    await worker.load(claim.key)
    log = writer(worker, claim.key)
    await log.add(durable=True, checkpoint=b"state")
    await other.signal(claim.key, b"text", "s1")
    await log.park("q", asks=("i1",))
    await claim.ack()
    again = await claim_now(worker)
    assert again.key == claim.key
    assert [one.body for one in (await worker.load(again.key)).unread] == [b"text"]


async def test_a_conversation_that_grew_elsewhere_is_gone_on_with(processes, make, writer):
    """Two processes take turns in it; each finds what the other one did, whatever it knew."""
    one, other = processes
    for number in range(6):
        store = (one, one, other)[number % 3]
        name = f"r{number}"
        await store.create(make.new(name, "c"))
        history = await store.history("acme", "c", name)
        assert [m.id for m in history] == expected(number - 1)
        await writer(store, make.key(name)).end(f"a{number}")
    conversation = await one.get_conversation("acme", "c")
    assert conversation.active_run_id == ""


async def test_a_run_of_a_deleted_name_is_another_one(processes, make, writer):
    """What was known of the first one, here and elsewhere, is no part of it, and removes nothing of it."""
    one, other = processes
    for number in range(3):
        await one.create(make.new("r", record=b"%d" % number))
        assert (await one.load(make.key("r"))).record == b"%d" % number
        await writer(one, make.key("r")).end()
        await other.delete(make.key("r"))
        with pytest.raises(EngineError):
            await one.head(make.key("r"))
        await other.create(make.new("r", record=b"other"))
        with pytest.raises(ValueError, match="exists"):
            await one.create(make.new("r"))
        assert (await one.load(make.key("r"))).record == b"other"
        await one.delete(make.key("r"))


async def test_each_turn_is_given_the_messages_of_the_one_before_and_only_reads_the_new_ones(processes, make, writer):
    """The very same objects come again, whoever took the turns between; a deleted conversation is another one."""
    one, other = processes
    before = History()
    for number in range(SHORTEST):
        store = other if number % 4 == 3 else one
        await store.create(make.new(f"r{number}", "c"))
        history = await one.history("acme", "c", f"r{number}")
        assert [m.id for m in history] == expected(number - 1)
        if len(before) >= SHORTEST:
            assert all(a is b for a, b in zip(before, history, strict=False))
        before = history
        await writer(store, make.key(f"r{number}")).end(f"a{number}")
    assert [m.id for m in await one.history("acme", "c", "r3")] == ["r0-0", "a0", "r1-0", "a1", "r2-0", "a2"]
    await other.delete_conversation("acme", "c")
    for number in range(SHORTEST):
        await other.create(make.new(f"n{number}", "c"))
        await writer(other, make.key(f"n{number}")).end(f"b{number}")
    await one.create(make.new("last", "c"))
    history = await one.history("acme", "c", "last")
    assert [m.id for m in history] == [name for n in range(SHORTEST) for name in (f"n{n}-0", f"b{n}")]
