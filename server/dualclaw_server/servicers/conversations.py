"""ConversationService: reading and deleting conversations."""

# ruff: noqa: N802  # the names of rpcs are the contract's

from dualclaw import (
    DeleteConversationRequest,
    DeleteConversationResponse,
    GetConversationRequest,
    GetConversationResponse,
    ListConversationsRequest,
    ListConversationsResponse,
    ListMessagesRequest,
    ListMessagesResponse,
)
from dualclaw.rpc import ConversationServiceServicer
from dualclaw_server.engine.store import RunStore
from dualclaw_server.servicers import validation
from dualclaw_server.servicers.calls import Call, Calls, Context


class ConversationServicer(ConversationServiceServicer):
    """Answers ConversationService from the store."""

    def __init__(self, store: RunStore, calls: Calls) -> None:
        self._store = store
        self._calls = calls

    async def ListConversations(self, request: ListConversationsRequest, context: Context) -> ListConversationsResponse:
        """List conversations, the last changed first."""

        async def handle(call: Call) -> ListConversationsResponse:
            size = validation.page(request.page_size, request.page_token)
            page = await self._store.list_conversations(
                call.caller.tenant, page_size=size, page_token=request.page_token
            )
            return ListConversationsResponse(conversations=page.items, next_page_token=page.next_token)

        return await self._calls.answer(context, handle)

    async def GetConversation(self, request: GetConversationRequest, context: Context) -> GetConversationResponse:
        """Return a conversation."""

        async def handle(call: Call) -> GetConversationResponse:
            validation.required_id("conversation_id", request.conversation_id)
            found = await self._store.get_conversation(call.caller.tenant, request.conversation_id)
            return GetConversationResponse(conversation=found)

        return await self._calls.answer(context, handle)

    async def ListMessages(self, request: ListMessagesRequest, context: Context) -> ListMessagesResponse:
        """List the messages of a conversation, the oldest first."""

        async def handle(call: Call) -> ListMessagesResponse:
            size = validation.page_of(request.page_size, request.page_token, conversation_id=request.conversation_id)
            page = await self._store.list_messages(
                call.caller.tenant, request.conversation_id, page_size=size, page_token=request.page_token
            )
            return ListMessagesResponse(messages=page.items, next_page_token=page.next_token)

        return await self._calls.answer(context, handle)

    async def DeleteConversation(
        self, request: DeleteConversationRequest, context: Context
    ) -> DeleteConversationResponse:
        """Delete a conversation with its messages and runs."""

        async def handle(call: Call) -> DeleteConversationResponse:
            validation.required_id("conversation_id", request.conversation_id)
            await self._store.delete_conversation(call.caller.tenant, request.conversation_id)
            return DeleteConversationResponse()

        return await self._calls.answer(context, handle)
