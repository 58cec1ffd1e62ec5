"""Logs of runs that ended long ago are compacted, whatever the store says meanwhile."""

import asyncio
import time

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.retention import BATCH, DAY, Keeper
from dualclaw_server.engine.store import RunStore, Unavailable
from dualclaw_server.stores.memory import MemoryStore

from .conftest import Opener, kinds


async def test_a_run_that_ended_long_ago_keeps_its_messages_only(open_engine: Opener, store: RunStore) -> None:
    """A week later its events are gone; its record, its conversation and the log of a younger run are not."""
    engine = await open_engine(Agent("a"))
    asked = await engine.ask("Hi")
    week = Keeper(store, 7)
    assert await week.compact() == 0
    later = Keeper(store, 7, clock=lambda: time.time() + 8 * DAY)
    assert await later.compact() == 1
    assert await later.compact() == 0
    head = await store.head(asked.key)
    assert (head.kept_from, head.last_seq) == (len(asked.events) + 1, len(asked.events))
    assert kinds(await engine.messages(asked.conversation_id)) == ["user", "assistant"]
    younger = await engine.ask("And?", conversation=asked.conversation_id)
    assert (await store.head(younger.key)).kept_from == 1


class Grudging(MemoryStore):
    """A store that cannot compact the first time, then has two full batches and a rest to compact."""

    def __init__(self) -> None:
        super().__init__()
        self.left = [BATCH, BATCH, 3]
        self.asked = 0
        self.through = asyncio.Event()

    async def compact(self, before: float, limit: int = 100) -> int:
        self.asked += 1
        if self.asked == 1:
            raise Unavailable("planned")
        if not self.left:
            return 0
        done = self.left.pop(0)
        if not self.left:
            self.through.set()
        return done


async def test_a_keeper_goes_on_after_a_failure_and_until_nothing_is_left() -> None:
    """A store that fails is asked again in the next round, and a round takes batch after batch."""
    store = Grudging()
    serve = asyncio.create_task(Keeper(store, 1 / DAY).serve())
    await asyncio.wait_for(store.through.wait(), 60)
    assert not serve.done()
    assert store.asked == 4
    serve.cancel()
    await asyncio.wait({serve}, timeout=5)
    assert serve.cancelled()
