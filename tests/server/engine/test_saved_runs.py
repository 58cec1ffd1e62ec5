"""Runs that earlier releases have saved are finished by this one, each by the words of its own checkpoint."""

from pathlib import Path

import pytest

from dualclaw import RunState, StopReason
from dualclaw_server.engine.store import Created, RunStore

from .people import Ledger, at_work, decide, resume, segment_of
from .saved_runs import FIXTURES, SCRIPT, agent, restore

RELEASES = sorted(path for path in FIXTURES.iterdir() if path.is_dir())


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
async def test_a_saved_question_is_answered_and_its_run_finished(release: Path, store: RunStore) -> None:
    """The question below a sub-agent keeps its id; what had run does not run again, then the answer comes."""
    key, ledger = await restore(store, (release / "ask.json").read_text()), Ledger()
    head = await store.head(key)
    assert head.state == RunState.RUN_STATE_INTERRUPTED
    assert [item.id for item in head.run.interrupts] == ["p1"]
    async with at_work(store, agent(ledger), *SCRIPT) as engine:
        asked = await segment_of(engine, await resume(engine, key, decide("p1")))
    assert sorted(map(str, ledger.to)) == ["l2", "p1"]
    assert asked.last.done.content == "All done."


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
async def test_a_saved_answer_that_broke_off_is_withdrawn_and_given_anew(release: Path, store: RunStore) -> None:
    """One rewind to what was saved; the finished call is not made again."""
    key, ledger = await restore(store, (release / "crash.json").read_text()), Ledger()
    async with at_work(store, agent(ledger), *SCRIPT) as engine:
        asked = await segment_of(engine, Created(await store.head(key), 1, existing=False))
    assert [e.rewind.content for e in asked.events if e.WhichOneof("payload") == "rewind"] == ["Let me see."]
    assert asked.last.done.content == "Let me see.\n\nAll done."
    assert ledger.to == []


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
async def test_saved_calls_that_were_at_work_are_settled_by_their_effect_class(release: Path, store: RunStore) -> None:
    """What may run again does, what may not is told to be in doubt; both keep their index."""
    key, ledger = await restore(store, (release / "tools.json").read_text()), Ledger()
    async with at_work(store, agent(ledger), *SCRIPT) as engine:
        asked = await segment_of(engine, Created(await store.head(key), 1, existing=False))
    assert ledger.to == ["l6"]
    ends = {(index, code) for index, _, phase, code in asked.steps if phase != "start"}
    assert ends == {(0, "tool.outcome_unknown"), (1, "")}
    assert asked.last.done.stop_reason == StopReason.STOP_REASON_FINISHED
