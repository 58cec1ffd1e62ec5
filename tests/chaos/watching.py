"""Clients of a run that was started elsewhere: how they stay with it, and what each of them saw."""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import grpc

from dualclaw import AttachRequest, AttachResponse, EngineEvent
from dualclaw.rpc import EngineServiceStub
from dualclaw_clients.engine_client import RunStream

from .stage import AGAIN, PATIENCE


async def collect(stream: RunStream, at_event: Callable[[EngineEvent], None] | None = None) -> list[EngineEvent]:
    """Read a stream to its end."""
    events = []
    async with asyncio.timeout(PATIENCE), stream:
        async for event in stream:
            events.append(event)
            if at_event is not None:
                at_event(event)
    return events


async def watch(address: Callable[[], str], run_id: str, timeout: float = PATIENCE) -> Sequence[EngineEvent]:
    """Follow a run to its end with nothing but the generated stub, attaching anew as often as the stream is lost.

    It trusts the server: what comes is taken as it comes, repeated or not, so that the caller can see.

    Args:
        address: asked before each attach.
        run_id: the run.
        timeout: seconds for all of it.
    """
    events: list[EngineEvent] = []
    async with asyncio.timeout(timeout):
        while True:
            async with grpc.aio.insecure_channel(address(), [("grpc.use_local_subchannel_pool", 1)]) as channel:
                last = events[-1].seq if events else 0
                call = EngineServiceStub(channel).Attach(AttachRequest(run_id=run_id, after_seq=last, wait=True))
                try:
                    while (message := await call.read()) is not grpc.aio.EOF:
                        events.extend(cast("AttachResponse", message).events)
                    return events
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
            await asyncio.sleep(AGAIN)
