"""AgentService: what agents there are."""

# ruff: noqa: N802  # the names of rpcs are the contract's

from dualclaw import (
    GetAgentRequest,
    GetAgentResponse,
    ListAgentsRequest,
    ListAgentsResponse,
    SetInterceptorEnabledRequest,
    SetInterceptorEnabledResponse,
)
from dualclaw.errors import EngineError, FieldError
from dualclaw.rpc import AgentServiceServicer
from dualclaw_server.servicers import validation
from dualclaw_server.servicers.calls import Call, Calls, Context
from dualclaw_server.servicers.runs import Runs


class AgentServicer(AgentServiceServicer):
    """Answers AgentService from the engine."""

    def __init__(self, runs: Runs, calls: Calls) -> None:
        self._runs = runs
        self._calls = calls

    async def ListAgents(self, request: ListAgentsRequest, context: Context) -> ListAgentsResponse:
        """List the agents by name, the default agent first. A page_token is the name the next page begins with."""

        async def handle(call: Call) -> ListAgentsResponse:
            size = validation.page(request.page_size, request.page_token)
            default, *others = await self._runs.agents_info(call.caller)
            agents = [default, *sorted(others, key=lambda agent: agent.name)]
            names = [agent.name for agent in agents]
            if request.page_token and request.page_token not in names:
                raise FieldError({"page_token": "is no token of this list"})
            first = names.index(request.page_token) if request.page_token else 0
            following = names[first + size : first + size + 1]
            return ListAgentsResponse(agents=agents[first : first + size], next_page_token="".join(following))

        return await self._calls.answer(context, handle)

    async def GetAgent(self, request: GetAgentRequest, context: Context) -> GetAgentResponse:
        """Return an agent."""

        async def handle(call: Call) -> GetAgentResponse:
            validation.required_id("agent", request.agent)
            for agent in await self._runs.agents_info(call.caller):
                if agent.name == request.agent:
                    return GetAgentResponse(agent=agent)
            raise EngineError("UNKNOWN_AGENT", f"there is no agent {request.agent!r}")

        return await self._calls.answer(context, handle)

    async def SetInterceptorEnabled(
        self, request: SetInterceptorEnabledRequest, context: Context
    ) -> SetInterceptorEnabledResponse:
        """Switch an interceptor of an agent on or off for the caller's tenant."""

        async def handle(call: Call) -> SetInterceptorEnabledResponse:
            validation.switch_request(request)
            info = await self._runs.set_interceptor_enabled(
                call.caller, request.agent, request.interceptor, enabled=request.enabled
            )
            return SetInterceptorEnabledResponse(interceptor=info)

        return await self._calls.answer(context, handle)
