"""Plain reads and deletes as JSON: runs, conversations, messages, agents.

Answers are protobuf JSON of the rpc's response with the field names of the proto files (``next_page_token``),
enum values by name and times as RFC 3339. Lists take ``page_size`` and ``page_token``.
"""

from starlette.types import Receive, Scope, Send

from dualclaw import (
    DeleteConversationResponse,
    GetAgentResponse,
    GetConversationResponse,
    GetRunResponse,
    ListAgentsRequest,
    ListConversationsRequest,
    ListMessagesRequest,
    ListRunsRequest,
    RunState,
)
from dualclaw.errors import FieldError
from dualclaw_clients.engine_client import EngineClient
from dualclaw_clients.web.access import bearer_token
from dualclaw_clients.web.bodies import parse_count, parse_query
from dualclaw_clients.web.replies import send_message

_PAGE = {"page_size": False, "page_token": False}


class Resources:
    """Endpoints that answer one question each."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def list_runs(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/runs: ``states`` may be repeated or hold several separated by commas, in any case."""
        query = parse_query(scope, {**_PAGE, "states": True, "conversation_id": False})
        size, page_token = _page(query)
        request = ListRunsRequest(
            page_size=size,
            page_token=page_token,
            states=[_state(name) for text in query.get("states", []) for name in text.split(",") if name],
            conversation_id=query.get("conversation_id", [""])[0],
        )
        await send_message(scope, send, await self._engine.list_runs(request, token=bearer_token(scope)))

    async def get_run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/runs/{run_id}."""
        parse_query(scope, {})
        run = await self._engine.get_run(scope["path_params"]["run_id"], token=bearer_token(scope))
        await send_message(scope, send, GetRunResponse(run=run))

    async def list_conversations(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/conversations."""
        size, page_token = _page(parse_query(scope, _PAGE))
        request = ListConversationsRequest(page_size=size, page_token=page_token)
        await send_message(scope, send, await self._engine.list_conversations(request, token=bearer_token(scope)))

    async def get_conversation(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/conversations/{conversation_id}."""
        parse_query(scope, {})
        conversation = await self._engine.get_conversation(_conversation_id(scope), token=bearer_token(scope))
        await send_message(scope, send, GetConversationResponse(conversation=conversation))

    async def list_messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/conversations/{conversation_id}/messages."""
        size, page_token = _page(parse_query(scope, _PAGE))
        request = ListMessagesRequest(page_size=size, page_token=page_token, conversation_id=_conversation_id(scope))
        await send_message(scope, send, await self._engine.list_messages(request, token=bearer_token(scope)))

    async def delete_conversation(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /v1/conversations/{conversation_id}."""
        parse_query(scope, {})
        await self._engine.delete_conversation(_conversation_id(scope), token=bearer_token(scope))
        await send_message(scope, send, DeleteConversationResponse())

    async def list_agents(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/agents."""
        size, page_token = _page(parse_query(scope, _PAGE))
        request = ListAgentsRequest(page_size=size, page_token=page_token)
        await send_message(scope, send, await self._engine.list_agents(request, token=bearer_token(scope)))

    async def get_agent(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/agents/{agent}."""
        parse_query(scope, {})
        agent = await self._engine.get_agent(scope["path_params"]["agent"], token=bearer_token(scope))
        await send_message(scope, send, GetAgentResponse(agent=agent))


def _page(query: dict[str, list[str]]) -> tuple[int, str]:
    return parse_count(query.get("page_size", ["0"])[0], "page_size"), query.get("page_token", [""])[0]


def _conversation_id(scope: Scope) -> str:
    return str(scope["path_params"]["conversation_id"])


def _state(text: str) -> "RunState.ValueType":
    name = text.strip().upper()
    name = name if name.startswith("RUN_STATE_") else f"RUN_STATE_{name}"
    try:
        return RunState.Value(name)
    except ValueError:
        known = ", ".join(known.removeprefix("RUN_STATE_") for known in RunState.keys()[1:])
        raise FieldError({"states": f"{text!r} is no state; known are {known}"}) from None
