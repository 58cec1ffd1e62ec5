"""A server that is frozen for longer than its lease and then goes on: the last row of the crash matrix.

It dies of nothing, so it wakes up in the middle of whatever it did, beside the server that has taken its run. A
tool it had begun is a tool that is at work twice, and the effect class decides; what it writes is refused.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from dualclaw.rules import check_stream
from dualclaw_server.engine.tool import Effect as EffectName

from .judging import tool_steps
from .scenarios import Told, answer, ask, begin
from .stage import AGAIN, PATIENCE, Stage, persist
from .watching import collect

pytestmark = pytest.mark.asyncio(loop_scope="session")

POINTS = ["model:mid:1", "append.answer:before:1", "append.started:after:1", "tool:before:1", "tool:after:1"]


async def appears(path: Path) -> None:
    async with asyncio.timeout(PATIENCE):
        while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240  # a file tells of no change
            await asyncio.sleep(AGAIN)


@pytest.mark.parametrize("kind", ["once", pytest.param("idempotent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", POINTS)
async def test_a_frozen_server_writes_nothing_more_once_another_has_its_run(
    stage: Stage, point: str, kind: EffectName
) -> None:
    """Frozen at a point beyond its lease, then let go on beside its successor: the log stays, "once" happens once."""
    spare = await stage.start("spare", CHAOS_GATE="gate")
    frozen = await stage.start("frozen", FAILPOINT=point, FAILPOINT_FREEZE="1")
    stage.lead_to(spare)  # so that its clients do not freeze with it
    async with stage.client() as client, stage.client(frozen.address.result()) as beside:
        told = Told(ask(f"work {kind}"))
        running = asyncio.create_task(begin(client, told, lambda _: None))
        await appears(stage.folder / "fired")
        (stage.folder / "gate").touch()
        await running
        await answer(client, told)
        log = await collect(client.attach(told.run_id))
        assert [*told.first, *told.second] == log
        frozen.send(signal.SIGCONT)
        assert (await persist(lambda: beside.get_run(told.run_id))).last_seq == len(log)
        again = Told(
            ask(f"work {kind}")
        )  # whatever was left of the first run has had its time when this one is through
        await begin(beside, again, lambda _: None)
        await answer(beside, again)
        assert await collect(beside.attach(told.run_id)) == log
    assert not frozen.ended.done()
    for each, events in ((told, log), (again, [*again.first, *again.second])):
        assert check_stream(events) == []
        for item, step in tool_steps(events).items():
            done = [effect for effect in stage.ledger.effects(each.run_id) if effect.item == item]
            assert len({effect.key for effect in done}) <= 1
            if kind == "once":
                assert len(done) <= 1
                assert step.diagnosis.code in ("", "tool.outcome_unknown")
