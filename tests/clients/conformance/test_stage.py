"""What a scene starts beside itself is over when the scene is, however it ends."""

import asyncio

import pytest

from dualclaw_clients.conformance.seen import Exchange
from dualclaw_clients.conformance.stage import BrokeOff, beside


async def test_a_scene_that_breaks_off_leaves_no_call_behind() -> None:
    """Also one that breaks off before all of its calls were begun."""

    async def silent() -> Exchange:
        await asyncio.Event().wait()
        raise AssertionError

    calls = []

    async def scene() -> None:
        async with beside() as begin:
            calls.append(begin(silent()))
            await asyncio.sleep(0)
            raise BrokeOff("no run came of it")

    with pytest.raises(BrokeOff):
        await scene()
    assert [call.cancelled() for call in calls] == [True]


async def test_a_scene_waits_for_the_calls_beside_it() -> None:
    """What they have seen is there when the block ends."""
    went_on = asyncio.Event()

    async def slow() -> Exchange:
        await asyncio.sleep(0)
        went_on.set()
        return Exchange("Run", None)

    async with beside() as begin:
        call = begin(slow())
    assert went_on.is_set()
    assert call.result().rpc == "Run"
