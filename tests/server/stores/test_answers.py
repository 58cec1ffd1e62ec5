"""answer: what people say to a run that asked is taken once, as a whole, and reaches it."""

import asyncio
from dataclasses import replace

import pytest

from dualclaw import BusyPolicy, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.store import Created

QUEUE, REPLACE = BusyPolicy.BUSY_POLICY_QUEUE, BusyPolicy.BUSY_POLICY_REPLACE
QUEUED, RUNNING = RunState.RUN_STATE_QUEUED, RunState.RUN_STATE_RUNNING
INTERRUPTED, CANCELLED = RunState.RUN_STATE_INTERRUPTED, RunState.RUN_STATE_CANCELLED


@pytest.fixture
def parked(make, writer, claim_now):
    """Makes a run that has asked and rests: parked, its work item done."""

    async def park(store, name="r1", conversation="c", asks=("i1", "i2"), **changes):
        await store.create(make.new(name, conversation, **changes))
        claim = await claim_now(store)
        log = writer(store, claim.key)
        await log.park("call", asks=asks)
        await claim.ack()
        return log

    return park


async def refusal(call):
    """Return the reason and the metadata of a refusal that must come."""
    with pytest.raises(EngineError) as refused:
        await call
    return refused.value.reason, dict(refused.value.metadata)


async def inbox(store, key):
    return [signal.signal_id for signal in (await store.load(key)).unread]


async def test_an_answer_reaches_the_parked_run_and_wakes_it(store, make, parked, claim_now, until):
    """The signal is in the inbox, whoever listens is told, and the run is delivered; its state stays for the worker."""
    reached = []
    store.on_signal(reached.append)
    log = await parked(store)
    assert await store.claim("default", "w", 0) is None
    answered = await store.answer(make.answers(log.key, "i1", "i2"))
    assert answered == Created(await store.head(log.key), 2, existing=False)
    assert answered.head.state == INTERRUPTED
    await until(lambda: reached)
    assert reached == [log.key]
    claim = await claim_now(store)
    assert (claim.key, claim.redelivered) == (log.key, False)
    unread = (await store.load(log.key)).unread
    assert [(signal.signal_id, signal.body) for signal in unread] == [("answer:i1,i2", b"answer:i1,i2")]


async def test_an_answer_wakes_a_waiting_claimer(store, make, parked):
    """No polling between a person's click and the run."""
    log = await parked(store)
    waiting = asyncio.create_task(store.claim("default", "w", 100))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await store.answer(make.answers(log.key, "i1"))
    assert (await asyncio.wait_for(waiting, 100)).key == log.key


async def test_an_answer_between_the_park_and_its_ack_delivers_the_run_again(store, make, writer, claim_now):
    """Who answers the moment the question shows is not lost in the worker's last step."""
    await store.create(make.new("r1"))
    claim = await claim_now(store)
    await writer(store, claim.key).park(asks=["i1"])
    await store.answer(make.answers(claim.key, "i1"))
    assert await store.claim("default", "other", 0) is None
    await claim.ack()
    assert (await claim_now(store)).key == claim.key


async def test_a_run_goes_on_parks_again_and_ends_as_its_answers_come(store, make, parked, claim_now):
    """The whole way: the claiming frame makes it RUNNING with the next epoch, and each answer begins a segment."""
    log = await parked(store, asks=["i1"])
    assert (await store.answer(make.answers(log.key, "i1"))).first_seq == 2
    first = await claim_now(store)
    await log.go_on(2, signals=("answer:i1",))
    assert (await store.head(log.key)).state == RUNNING
    await log.park(asks=["i2"], epoch=2, messages=())
    await first.ack()
    assert await store.claim("default", "w", 0) is None
    assert (await store.answer(make.answers(log.key, "i2"))).first_seq == 3
    second = await claim_now(store)
    assert await inbox(store, log.key) == ["answer:i2"]
    await log.go_on(3, signals=("answer:i2",))
    await log.end(epoch=3)
    await second.ack()
    head = await store.head(log.key)
    assert (head.state, head.last_seq, head.epoch) == (RunState.RUN_STATE_SUCCEEDED, 3, 3)
    assert (await store.get_conversation("acme", "c")).active_run_id == ""
    assert await store.claim("default", "w", 0.02) is None


async def test_open_questions_show_while_the_run_is_parked_and_no_longer(store, make, parked):
    """GetRun and ListRuns name them; a run that went on shows none, also when its writer left them in the record."""

    async def shown():
        listed = (await store.list_runs("acme", states=(), conversation_id="c", page_size=0, page_token="")).items
        ids = [[item.id for item in run.interrupts] for run in (listed[0], (await store.head(log.key)).run)]
        assert ids[0] == ids[1]
        return ids[0]

    log = await parked(store)
    assert await shown() == ["i1", "i2"]
    await store.answer(make.answers(log.key, "i1"))
    assert await shown() == ["i1", "i2"]
    await log.go_on(2)
    assert await shown() == []
    await log.park(asks=["i2"], epoch=2)
    assert await shown() == ["i2"]
    await log.add(0, epoch=3, run=make.run("r1", "i2"))
    assert await shown() == []
    await log.end(epoch=3)
    assert await shown() == []


async def test_a_known_request_id_gives_its_segment_again_whatever_became_of_the_run(store, make, parked, claim_now):
    """A lost reply is asked for again; nothing is stored twice, nobody is woken."""
    log = await parked(store)
    answers = make.answers(log.key, "i1", request_id="q")
    assert not (await store.answer(answers)).existing
    again = replace(answers, signal_id="another", signal=b"another")
    later = (
        lambda: log.go_on(2, signals=("answer:i1",)),
        lambda: log.add(3, epoch=2),
        lambda: log.end(epoch=2),
    )
    assert await store.answer(again) == Created(await store.head(log.key), 2, existing=True)
    for step in later:
        await step()
        assert await store.answer(again) == Created(await store.head(log.key), 2, existing=True)
    assert await inbox(store, log.key) == []


async def test_a_request_id_with_another_body_is_refused(store, make, parked):
    """The same id for another answer is a mistake of the caller, named with the run it belongs to."""
    log = await parked(store)
    await store.answer(make.answers(log.key, "i1", request_id="q"))
    other = replace(make.answers(log.key, "i2", request_id="q"), fingerprint="another")
    assert await refusal(store.answer(other)) == ("REQUEST_ID_REUSED", {"run_id": "r1"})
    assert await inbox(store, log.key) == ["answer:i1"]


async def test_answers_and_starts_share_the_request_ids(store, make, parked):
    """An id of a start stays with its run when an answer brings it, and the other way round."""
    log = await parked(store, request_id="start")
    head = await store.head(log.key)
    answers = make.answers(log.key, "i1", request_id="start")
    assert await store.answer(answers) == Created(head, 1, existing=True)
    assert await refusal(store.answer(replace(answers, fingerprint="x"))) == ("REQUEST_ID_REUSED", {"run_id": "r1"})
    assert await inbox(store, log.key) == []
    await store.answer(replace(answers, request_id="answer"))
    assert await store.create(make.new("r2", "d", request_id="answer")) == Created(head, 2, existing=True)
    reused = store.create(make.new("r2", "d", request_id="answer", fingerprint="x"))
    assert await refusal(reused) == ("REQUEST_ID_REUSED", {"run_id": "r1"})
    assert await refusal(store.head(make.key("r2"))) == ("UNKNOWN_RUN", {})


async def test_a_question_is_answered_once_whatever_the_run_does_afterwards(store, make, parked, claim_now):
    """Who is second learns it from the call, not that the run is no longer waiting."""
    log = await parked(store)
    await store.answer(make.answers(log.key, "i1"))
    late = replace(make.answers(log.key, "i2", "i1"), signal_id="late")
    later = (lambda: log.go_on(2), lambda: log.park(asks=["i1", "i2"], epoch=2), lambda: log.end(epoch=2))
    assert await refusal(store.answer(late)) == ("ALREADY_ANSWERED", {"interrupt_id": "i1"})
    for step in later:
        await step()
        assert await refusal(store.answer(late)) == ("ALREADY_ANSWERED", {"interrupt_id": "i1"})
    assert await inbox(store, log.key) == ["answer:i1"]


async def test_of_many_who_answer_at_once_exactly_one_wins(store, make, parked):
    """The others are refused, and only the winner's signal is in the inbox."""
    log = await parked(store)
    calls = [make.answers(log.key, "i1", signal_id=f"by-{n}", request_id=f"q{n}") for n in range(10)]
    outcomes = await asyncio.gather(*(store.answer(call) for call in calls), return_exceptions=True)
    won = [call.signal_id for call, outcome in zip(calls, outcomes, strict=True) if isinstance(outcome, Created)]
    lost = [outcome.reason for outcome in outcomes if isinstance(outcome, EngineError)]
    assert len(won) == 1
    assert lost == ["ALREADY_ANSWERED"] * 9
    assert await inbox(store, log.key) == won


async def test_answers_given_one_by_one_add_up(store, make, parked, claim_now):
    """Both are taken before the run is claimed, and both begin after its last event; ids stay valid over a new park."""
    log = await parked(store, asks=["i1", "i2", "i3"])
    for name in ("i1", "i2"):
        answered = await store.answer(make.answers(log.key, name))
        assert (answered.first_seq, answered.existing) == (2, False)
    claim = await claim_now(store)
    assert await inbox(store, log.key) == ["answer:i1", "answer:i2"]
    await log.go_on(2, signals=("answer:i1", "answer:i2"))
    await log.park(asks=["i3"], epoch=2)
    await claim.ack()
    assert await store.claim("default", "w", 0.02) is None
    assert (await store.answer(make.answers(log.key, "i3"))).first_seq == 3
    assert (await claim_now(store)).key == log.key


@pytest.mark.parametrize("asked", [(), ("i1",), ("nobody asked",)])
async def test_a_run_that_waits_for_no_answer_takes_none(store, make, writer, claim_now, asked):
    """Running, queued or final: the refusal names the state; nothing is stored."""
    await store.create(make.new("r1", "c"))
    await store.create(make.new("r2", "c", on_busy=QUEUE))
    log = writer(store, make.key("r1"))
    for name, state in (("r1", "RUNNING"), ("r2", "QUEUED")):
        answers = make.answers(make.key(name), *asked, request_id="q")
        assert await refusal(store.answer(answers)) == ("RUN_NOT_INTERRUPTED", {"state": state})
        assert await inbox(store, make.key(name)) == []
    await log.end()
    answers = make.answers(log.key, *asked, request_id="q")
    assert await refusal(store.answer(answers)) == ("RUN_NOT_INTERRUPTED", {"state": "SUCCEEDED"})
    assert await inbox(store, log.key) == []


async def test_a_question_nobody_asked_takes_no_answer_and_none_of_the_call_counts(store, make, parked):
    """All or nothing: the good answer beside the bad one can be given again, with the same request_id."""
    log = await parked(store)
    reached = []
    store.on_signal(reached.append)
    bad = make.answers(log.key, "i1", "i9", request_id="q")
    assert await refusal(store.answer(bad)) == ("UNKNOWN_INTERRUPT", {"interrupt_id": "i9"})
    await asyncio.sleep(0.01)
    assert reached == []
    assert await inbox(store, log.key) == []
    assert await store.claim("default", "w", 0.02) is None
    assert not (await store.answer(make.answers(log.key, "i1", request_id="q"))).existing


async def test_refusals_come_in_one_order(store, make, parked):
    """Unknown run, request id, already answered, not interrupted, unknown question: the first that holds."""
    log = await parked(store)
    await store.answer(make.answers(log.key, "i1", request_id="q"))
    wrong = replace(make.answers(log.key, "i9", "i1", request_id="q"), fingerprint="x", signal_id="s")

    async def reason(answers):
        return (await refusal(store.answer(answers)))[0]

    assert await reason(replace(wrong, key=make.key("nobody"))) == "UNKNOWN_RUN"
    assert await reason(wrong) == "REQUEST_ID_REUSED"
    assert await reason(replace(wrong, request_id="")) == "ALREADY_ANSWERED"
    assert await reason(replace(wrong, request_id="", interrupt_ids=("i9",))) == "UNKNOWN_INTERRUPT"
    await log.go_on(2)
    assert await reason(wrong) == "REQUEST_ID_REUSED"
    assert await reason(replace(wrong, request_id="")) == "ALREADY_ANSWERED"
    assert await reason(replace(wrong, request_id="", interrupt_ids=("i9",))) == "RUN_NOT_INTERRUPTED"


async def test_an_answer_to_no_question_is_a_signal_with_a_segment(store, make, parked, claim_now):
    """A resume without decisions (only an edit of the history) wakes the run and leaves every question open."""
    log = await parked(store)
    for n in range(2):
        assert (await store.answer(make.answers(log.key, signal_id=f"edit-{n}"))).first_seq == 2
    assert await inbox(store, log.key) == ["edit-0", "edit-1"]
    assert (await claim_now(store)).key == log.key
    assert not (await store.answer(make.answers(log.key, "i1", "i2"))).existing


async def test_a_question_named_twice_in_one_call_counts_once(store, make, parked):
    """A repeat is no second answer."""
    log = await parked(store)
    assert not (await store.answer(make.answers(log.key, "i1", "i1"))).existing
    assert await refusal(store.answer(make.answers(log.key, "i1", signal_id="s"))) == (
        "ALREADY_ANSWERED",
        {"interrupt_id": "i1"},
    )


async def test_a_signal_id_that_was_used_is_refused_before_anything_is_stored(store, make, parked):
    """Else the question would count as answered and the answer would be lost behind the earlier signal."""
    log = await parked(store)
    await store.signal(log.key, b"earlier", "s")
    with pytest.raises(ValueError, match="'s' exists"):
        await store.answer(make.answers(log.key, "i1", signal_id="s", request_id="q"))
    assert not (await store.answer(make.answers(log.key, "i1", request_id="q"))).existing


async def test_the_questions_of_another_tenant_do_not_exist(store, make, parked):
    """Neither the run nor its request ids; each tenant answers its own."""
    for tenant in ("acme", "globex"):
        await parked(store, tenant=tenant)
    stranger = make.answers(make.key("r1", "initech"), "i1", request_id="q")
    assert await refusal(store.answer(stranger)) == ("UNKNOWN_RUN", {})
    for tenant in ("acme", "globex"):
        answers = make.answers(make.key("r1", tenant), "i1", request_id="q")
        assert not (await store.answer(answers)).existing


async def test_answers_are_remembered_until_the_run_is_purged(store, make, parked, writer):
    """Over a restart and the end of the run; a run of the same id made later has none of it."""
    log = await parked(store)
    answers = make.answers(log.key, "i1", request_id="q")
    await store.answer(answers)
    await store.close()
    await store.open()
    assert (await store.answer(answers)).existing
    again = make.answers(log.key, "i1", signal_id="s")
    assert (await refusal(store.answer(again)))[0] == "ALREADY_ANSWERED"
    await log.end(epoch=2)
    await store.delete(log.key)
    assert (await refusal(store.answer(answers)))[0] == "UNKNOWN_RUN"
    await store.create(make.new("r1", "d"))
    await writer(store, log.key).park(asks=["i1"])
    assert not (await store.answer(answers)).existing


async def test_a_parked_run_can_be_cancelled(store, make, parked, claim_now):
    """The signal delivers it, and the frame that ends it needs no claim before; answers come too late then."""
    log = await parked(store)
    assert await store.signal(log.key, b"cancel", "cancel") is None
    claim = await claim_now(store)
    assert await inbox(store, claim.key) == ["cancel"]
    await log.end(state=CANCELLED, epoch=2, signals=("cancel",))
    await claim.ack()
    late = make.answers(log.key, "i1")
    assert await refusal(store.answer(late)) == ("RUN_NOT_INTERRUPTED", {"state": "CANCELLED"})
    assert await store.claim("default", "w", 0.02) is None


async def test_runs_wait_behind_a_parked_one_until_it_ends(store, make, parked, claim_now):
    """Neither an answer nor a segment that goes on lets the next one in."""
    log = await parked(store)
    await store.create(make.new("r2", "c", on_busy=QUEUE))
    await store.answer(make.answers(log.key, "i1"))
    claim = await claim_now(store)
    assert claim.key == log.key
    await log.go_on(2)
    await log.park(asks=["i2"], epoch=2)
    await claim.ack()
    assert await store.claim("default", "w", 0.02) is None
    assert (await store.head(make.key("r2"))).state == QUEUED
    await log.end(epoch=3)
    assert (await claim_now(store)).key == make.key("r2")


async def test_replace_cancels_a_parked_run(store, make, parked, claim_now):
    """It gets the cancel signal and is delivered; the new run starts when it has ended."""
    log = await parked(store)
    assert (await store.create(make.new("r2", "c", on_busy=REPLACE))).head.state == QUEUED
    claim = await claim_now(store)
    assert claim.key == log.key
    assert [(signal.signal_id, signal.body) for signal in (await store.load(log.key)).unread] == [
        ("replace:r2", b"replaced")
    ]
    await log.end(state=CANCELLED, epoch=2, signals=("replace:r2",))
    await claim.ack()
    assert (await claim_now(store)).key == make.key("r2")
    assert (await store.head(make.key("r2"))).state == RUNNING
