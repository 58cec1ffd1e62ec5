"""OperatorService: what operators do with single runs."""

# ruff: noqa: N802  # the names of rpcs are the contract's

from dualclaw import (
    InspectRunRequest,
    InspectRunResponse,
    PurgeRunRequest,
    PurgeRunResponse,
    ReleaseRunRequest,
    ReleaseRunResponse,
    RetryRunRequest,
    RetryRunResponse,
)
from dualclaw.rpc import OperatorServiceServicer
from dualclaw_server.engine.operators import Operators
from dualclaw_server.servicers import validation
from dualclaw_server.servicers.calls import Call, Calls, Context


class OperatorServicer(OperatorServiceServicer):
    """Answers OperatorService from the engine."""

    def __init__(self, operators: Operators, calls: Calls) -> None:
        self._operators = operators
        self._calls = calls

    async def InspectRun(self, request: InspectRunRequest, context: Context) -> InspectRunResponse:
        """Look inside a run."""

        async def handle(call: Call) -> InspectRunResponse:
            validation.required_id("run_id", request.run_id)
            return await self._operators.inspect(call.caller, request.run_id)

        return await self._calls.answer(context, handle)

    async def ReleaseRun(self, request: ReleaseRunRequest, context: Context) -> ReleaseRunResponse:
        """Take a run from the process that works on it."""

        async def handle(call: Call) -> ReleaseRunResponse:
            validation.required_id("run_id", request.run_id)
            return await self._operators.release(call.caller, request.run_id, call.trace)

        return await self._calls.answer(context, handle)

    async def RetryRun(self, request: RetryRunRequest, context: Context) -> RetryRunResponse:
        """Ask the question of a final run again."""

        async def handle(call: Call) -> RetryRunResponse:
            validation.retry_request(request)
            run = await self._operators.retry(call.caller, request.run_id, request.request_id, call.trace)
            return RetryRunResponse(run=run)

        return await self._calls.answer(context, handle)

    async def PurgeRun(self, request: PurgeRunRequest, context: Context) -> PurgeRunResponse:
        """Purge a final run."""

        async def handle(call: Call) -> PurgeRunResponse:
            validation.required_id("run_id", request.run_id)
            await self._operators.purge(call.caller, request.run_id, call.trace)
            return PurgeRunResponse()

        return await self._calls.answer(context, handle)
