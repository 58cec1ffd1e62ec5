"""A fake of OperatorService alone, scripted by plain attributes; ``calls`` has what it was asked."""

# ruff: noqa: N802  # the servicer's methods are named by the protos

from typing import TypeVar

import grpc
from google.protobuf.message import Message

from dualclaw import (
    InspectRunRequest,
    InspectRunResponse,
    PurgeRunRequest,
    PurgeRunResponse,
    ReleaseRunRequest,
    ReleaseRunResponse,
    RetryRunRequest,
    RetryRunResponse,
    Run,
)
from dualclaw.errors import EngineError
from dualclaw.rpc import OperatorServiceServicer, add_operator_service
from dualclaw.status import code_of, trailing_of

_T = TypeVar("_T")
Context = grpc.aio.ServicerContext


class OperatorEngine(OperatorServiceServicer):
    """See the module's text."""

    def __init__(self) -> None:
        self.calls: list[Message] = []
        self.shown = InspectRunResponse()
        self.released = True
        self.run = Run()
        self.refusal: EngineError | None = None
        self.target = ""
        self._server = grpc.aio.server()

    async def start(self) -> None:
        """Listen at ``target``."""
        add_operator_service(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def close(self) -> None:
        """Stop for good."""
        await self._server.stop(grace=None)

    async def _answer(self, request: Message, answer: _T, context: Context) -> _T:
        self.calls.append(request)
        if self.refusal is not None:
            await context.abort(code_of(self.refusal.reason), self.refusal.message, trailing_of(self.refusal))
        return answer

    async def InspectRun(self, request: InspectRunRequest, context: Context) -> InspectRunResponse:
        return await self._answer(request, self.shown, context)

    async def ReleaseRun(self, request: ReleaseRunRequest, context: Context) -> ReleaseRunResponse:
        return await self._answer(request, ReleaseRunResponse(run=self.run, released=self.released), context)

    async def RetryRun(self, request: RetryRunRequest, context: Context) -> RetryRunResponse:
        return await self._answer(request, RetryRunResponse(run=self.run), context)

    async def PurgeRun(self, request: PurgeRunRequest, context: Context) -> PurgeRunResponse:
        return await self._answer(request, PurgeRunResponse(), context)
