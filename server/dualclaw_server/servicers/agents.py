"""AgentService: what agents there are."""

# ruff: noqa: N802  # the names of rpcs are the contract's

from collections.abc import Sequence

from dualclaw import (
    Agent,
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
from dualclaw_server.servicers.calls import Call, Calls, Context, NotServed
from dualclaw_server.servicers.runs import Runs


class AgentServicer(AgentServiceServicer):
    """Answers AgentService from the engine."""

    def __init__(self, runs: Runs, calls: Calls) -> None:
        self._runs = runs
        self._calls = calls

    async def ListAgents(self, request: ListAgentsRequest, context: Context) -> ListAgentsResponse:
        """List the agents by name, the default agent first. A page_token is the name the next page begins with."""

        async def handle(_call: Call) -> ListAgentsResponse:
            size = validation.page(request.page_size, request.page_token)
            agents = self._agents()
            names = [agent.name for agent in agents]
            if request.page_token and request.page_token not in names:
                raise FieldError({"page_token": "is no token of this list"})
            first = names.index(request.page_token) if request.page_token else 0
            following = names[first + size : first + size + 1]
            return ListAgentsResponse(agents=agents[first : first + size], next_page_token="".join(following))

        return await self._calls.answer(context, handle)

    async def GetAgent(self, request: GetAgentRequest, context: Context) -> GetAgentResponse:
        """Return an agent."""

        async def handle(_call: Call) -> GetAgentResponse:
            validation.required_id("agent", request.agent)
            return GetAgentResponse(agent=self._agent(request.agent))

        return await self._calls.answer(context, handle)

    async def SetInterceptorEnabled(
        self, request: SetInterceptorEnabledRequest, context: Context
    ) -> SetInterceptorEnabledResponse:
        """Refuse: this engine has no interceptors to switch yet."""

        async def handle(call: Call) -> SetInterceptorEnabledResponse:
            validation.switch_request(request)
            if "operator" not in call.caller.roles:
                raise EngineError("PERMISSION_DENIED", "switching an interceptor needs the role operator")
            self._agent(request.agent)
            raise NotServed("SetInterceptorEnabled is not served by this version of the engine")

        return await self._calls.answer(context, handle)

    def _agents(self) -> Sequence[Agent]:
        default, *others = self._runs.agents_info()
        return [default, *sorted(others, key=lambda agent: agent.name)]

    def _agent(self, name: str) -> Agent:
        for agent in self._runs.agents_info():
            if agent.name == name:
                return agent
        raise EngineError("UNKNOWN_AGENT", f"there is no agent {name!r}")
