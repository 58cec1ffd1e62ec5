"""Looks at the ends of followed logs: how many are looked at, and when."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from dualclaw_server.engine.store import RunKey
from dualclaw_server.stores.live import Live
from dualclaw_server.stores.nats import NatsStore, parse_address
from dualclaw_server.stores.nats.layout import Subjects
from dualclaw_server.stores.nats.link import Link
from dualclaw_server.stores.nats.watch import Watch


class Looking(Link):
    """A link that notes how many logs each look was at."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.looks = []

    async def newest(self, subjects):
        self.looks.append(len(subjects))
        return await super().newest(subjects)


@pytest.fixture
async def link(nats_r1):
    """A link to a store's streams."""
    address = parse_address(nats_r1.url())
    store = NatsStore(address, accept_loss=True)
    await store.open()
    yield Looking(store._parts.client, Subjects(address.name), patience=2)
    await store.close()
    nats_r1.remove(address.name)


async def test_a_run_that_begins_has_its_own_log_looked_at_and_all_are_from_time_to_time(link, until):
    """Where runs begin all the time, looking at all of them each time would cost more than the runs themselves."""
    watch = Watch(link, Live(), "me", lambda key: None, lambda token: None)
    await watch.open()
    async with AsyncExitStack() as followed:
        for number in range(20):
            await followed.enter_async_context(watch.following(RunKey("t", f"r{number}")))
        await until(lambda: 20 in link.looks)
        link.looks.clear()
        async with asyncio.timeout(60):
            for number in range(20, 500):  # the look at all of them may be due at that very moment
                if 1 in link.looks:
                    break
                looked = len(link.looks)
                await followed.enter_async_context(watch.following(RunKey("t", f"r{number}")))
                await until(lambda: len(link.looks) > looked)  # noqa: B023
        assert 1 in link.looks
        await until(lambda: max(link.looks) > 20)
    await watch.close()
