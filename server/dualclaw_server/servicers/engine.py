"""EngineService: starting, following and cancelling runs.

Streaming handlers are async generators that yield nothing: they write to the call themselves
(servicers/streams.py). They are generators only because the tracing interceptor iterates them.
"""

# ruff: noqa: N802  # the names of rpcs are the contract's

from collections.abc import AsyncIterator
from typing import Final

import grpc

from dualclaw import (
    AttachRequest,
    AttachResponse,
    CancelRequest,
    CancelResponse,
    GetRunRequest,
    GetRunResponse,
    ListRunsRequest,
    ListRunsResponse,
    ResumeRequest,
    ResumeResponse,
    RunRequest,
    RunResponse,
    RunState,
)
from dualclaw.rpc import EngineServiceServicer
from dualclaw_server.engine.store import Head, RunKey
from dualclaw_server.servicers import validation
from dualclaw_server.servicers.calls import Call, Calls, Context
from dualclaw_server.servicers.runs import Runs
from dualclaw_server.servicers.streams import Streams, check_position

RUN_ID_KEY: Final = "dualclaw-run-id"
CONVERSATION_ID_KEY: Final = "dualclaw-conversation-id"


class EngineServicer(EngineServiceServicer):
    """Answers EngineService from the engine and its store."""

    def __init__(self, runs: Runs, calls: Calls, streams: Streams) -> None:
        self._runs = runs
        self._calls = calls
        self._streams = streams

    async def Run(self, request: RunRequest, context: Context) -> AsyncIterator[RunResponse]:
        """Start a run and stream its first segment."""

        async def handle(call: Call) -> tuple[RunResponse, ...]:
            nonlocal request
            accepted = validation.run_request(request)
            created = await self._runs.start(call.caller, accepted, call.trace)
            check_position(created.head, created.first_seq - 1)
            with self._runs.attached(created.head.key, starter=accepted):
                await _name(context, created.head)
                segment = self._streams.segment(context, created.head, created.first_seq)
                del request, accepted, created  # they may hold images, and the stream may be open for days
                await segment
            return ()

        for nothing in await self._calls.answer(context, handle):
            yield nothing

    async def Attach(self, request: AttachRequest, context: Context) -> AsyncIterator[AttachResponse]:
        """Stream every event after a position."""

        async def handle(call: Call) -> tuple[AttachResponse, ...]:
            validation.attach_request(request)
            head = await self._runs.store.head(RunKey(call.caller.tenant, request.run_id))
            check_position(head, request.after_seq)
            with self._runs.attached(head.key):
                await _name(context, head)
                await self._streams.log(context, head, request.after_seq, wait=request.wait)
            return ()

        for nothing in await self._calls.answer(context, handle):
            yield nothing

    async def Resume(self, request: ResumeRequest, context: Context) -> AsyncIterator[ResumeResponse]:
        """Answer a run that asked and stream its next segment."""

        async def handle(call: Call) -> tuple[ResumeResponse, ...]:
            nonlocal request
            validation.resume_request(request)
            created = await self._runs.resume(call.caller, request, call.trace)
            check_position(created.head, created.first_seq - 1)
            with self._runs.attached(created.head.key):
                await _name(context, created.head)
                segment = self._streams.segment(context, created.head, created.first_seq)
                del request, created  # as in Run
                await segment
            return ()

        for nothing in await self._calls.answer(context, handle):
            yield nothing

    async def Cancel(self, request: CancelRequest, context: Context) -> CancelResponse:
        """Ask a run to end."""

        async def handle(call: Call) -> CancelResponse:
            validation.cancel_request(request)
            return CancelResponse(run=await self._runs.cancel(call.caller, request.run_id, request.reason, call.trace))

        return await self._calls.answer(context, handle)

    async def GetRun(self, request: GetRunRequest, context: Context) -> GetRunResponse:
        """Return a run."""

        async def handle(call: Call) -> GetRunResponse:
            validation.required_id("run_id", request.run_id)
            head = await self._runs.store.head(RunKey(call.caller.tenant, request.run_id))
            return GetRunResponse(run=head.run)

        return await self._calls.answer(context, handle)

    async def ListRuns(self, request: ListRunsRequest, context: Context) -> ListRunsResponse:
        """List runs, newest first."""

        async def handle(call: Call) -> ListRunsResponse:
            size = validation.list_runs_request(request)
            page = await self._runs.store.list_runs(
                call.caller.tenant,
                states=frozenset(RunState.ValueType(state) for state in request.states),
                conversation_id=request.conversation_id,
                page_size=size,
                page_token=request.page_token,
            )
            return ListRunsResponse(runs=page.items, next_page_token=page.next_token)

        return await self._calls.answer(context, handle)


async def _name(context: Context, head: Head) -> None:
    """Tell the client at once what it will read, also while the run is silent or waits in line."""
    metadata = ((RUN_ID_KEY, head.key.run_id), (CONVERSATION_ID_KEY, head.conversation_id))
    await context.send_initial_metadata(grpc.aio.Metadata(*metadata))
