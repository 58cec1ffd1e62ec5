import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dualclaw import (
    AttachRequest,
    CancelRequest,
    DeleteConversationRequest,
    GetAgentRequest,
    GetConversationRequest,
    GetRunRequest,
    ListAgentsRequest,
    ListConversationsRequest,
    ListMessagesRequest,
    ListRunsRequest,
    RunState,
    SetInterceptorEnabledRequest,
)
from dualclaw_server.engine.caller import Caller
from dualclaw_server.servicers.access import Access, KeyEntry
from tests.server.servicers.conftest import SUCCEEDED, Bench, Serve, done, question

ACME, BETA = (("authorization", "Bearer key-acme"),), (("authorization", "Bearer key-beta"),)


def key(tenant: str, *roles: str) -> KeyEntry:
    digest = hashlib.sha256(f"key-{tenant}".encode()).digest()
    return KeyEntry(digest, Caller(tenant, "somebody", frozenset(roles)))


@pytest.fixture
async def keyed(serve: Serve) -> AsyncIterator[Bench]:
    """A server with two tenants."""
    async with serve(access=Access(keys=(key("acme", "user"), key("beta", "user", "operator")))) as made:
        yield made


async def code_of(call: Awaitable[object]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_runs_are_read_and_listed_with_their_state(bench: Bench) -> None:
    """GetRun gives the record with state and last event; ListRuns filters by state and pages."""
    runs = [await bench.new_run() for _ in range(3)]
    await bench.runs.write(runs[0], done(), state=SUCCEEDED)
    run = (await bench.engine.GetRun(GetRunRequest(run_id=runs[0].run_id))).run
    assert (run.state, run.last_seq) == (SUCCEEDED, 1)
    running = await bench.engine.ListRuns(ListRunsRequest(states=[RunState.RUN_STATE_RUNNING]))
    assert {run.id for run in running.runs} == {runs[1].run_id, runs[2].run_id}
    first = await bench.engine.ListRuns(ListRunsRequest(page_size=2))
    second = await bench.engine.ListRuns(ListRunsRequest(page_size=2, page_token=first.next_page_token))
    assert [run.id for run in (*first.runs, *second.runs)] == [run.run_id for run in reversed(runs)]
    assert second.next_page_token == ""


async def test_conversations_are_read_and_deleted(bench: Bench) -> None:
    """List, get, messages and delete work on the store; what is deleted is NOT_FOUND, a busy one refused."""
    run = await bench.new_run()
    (conversation,) = (await bench.conversations.ListConversations(ListConversationsRequest())).conversations
    one = GetConversationRequest(conversation_id=conversation.id)
    assert (await bench.conversations.GetConversation(one)).conversation == conversation
    messages = await bench.conversations.ListMessages(ListMessagesRequest(conversation_id=conversation.id))
    assert [message.parts[0].text for message in messages.messages] == ["hello"]
    delete = DeleteConversationRequest(conversation_id=conversation.id)
    assert await code_of(bench.conversations.DeleteConversation(delete)) == grpc.StatusCode.FAILED_PRECONDITION
    await bench.runs.write(run, done(), state=SUCCEEDED)
    await bench.conversations.DeleteConversation(delete)
    assert await code_of(bench.conversations.GetConversation(one)) == grpc.StatusCode.NOT_FOUND


async def test_agents_are_listed_the_default_first_then_by_name(bench: Bench) -> None:
    """Pages go on where the last one ended; a token nobody gave is refused."""
    first = await bench.agents.ListAgents(ListAgentsRequest(page_size=2))
    second = await bench.agents.ListAgents(ListAgentsRequest(page_size=2, page_token=first.next_page_token))
    assert [agent.name for agent in (*first.agents, *second.agents)] == ["main", "ant", "zebra"]
    assert second.next_page_token == ""
    assert await code_of(bench.agents.ListAgents(ListAgentsRequest(page_token="x"))) == grpc.StatusCode.INVALID_ARGUMENT
    assert (await bench.agents.GetAgent(GetAgentRequest(agent="ant"))).agent.name == "ant"
    assert await code_of(bench.agents.GetAgent(GetAgentRequest(agent="bee"))) == grpc.StatusCode.NOT_FOUND


async def test_switching_an_interceptor_is_the_engines_decision(keyed: Bench) -> None:
    """The request reaches the engine with its caller, its refusal and its answer reach the client."""
    request = SetInterceptorEnabledRequest(agent="main", interceptor="loop", enabled=True)
    switch = keyed.agents.SetInterceptorEnabled
    assert await code_of(switch(request, metadata=ACME)) == grpc.StatusCode.PERMISSION_DENIED
    info = (await switch(request, metadata=BETA)).interceptor
    assert (info.name, info.enabled) == ("main/loop", True)
    request.interceptor = ""
    assert await code_of(switch(request, metadata=BETA)) == grpc.StatusCode.INVALID_ARGUMENT


async def test_agents_are_shown_as_they_are_for_the_callers_tenant(keyed: Bench) -> None:
    """The engine is told who asks."""
    shown = await keyed.agents.GetAgent(GetAgentRequest(agent="ant"), metadata=BETA)
    assert shown.agent.description == "beta"


@pytest.mark.parametrize(
    "field", ["GetRun", "Cancel", "Attach", "GetConversation", "ListMessages", "DeleteConversation"]
)
async def test_what_belongs_to_another_tenant_does_not_exist(keyed: Bench, field: str) -> None:
    """The owner gets through, the other tenant gets NOT_FOUND from the same call, and a missing id is INVALID."""
    run = await keyed.new_run("acme")
    await keyed.runs.write(run, done(), state=SUCCEEDED)
    conversation_id = (await keyed.runs.store.head(run)).conversation_id
    engine, conversations = keyed.engine, keyed.conversations

    async def attach(run_id: str, metadata: tuple[tuple[str, str], ...]) -> None:
        async for _ in engine.Attach(AttachRequest(run_id=run_id), metadata=metadata):
            pass

    calls: dict[str, tuple[str, Callable[[str, tuple[tuple[str, str], ...]], Awaitable[object]]]] = {
        "GetRun": (run.run_id, lambda i, m: engine.GetRun(GetRunRequest(run_id=i), metadata=m)),
        "Cancel": (run.run_id, lambda i, m: engine.Cancel(CancelRequest(run_id=i), metadata=m)),
        "Attach": (run.run_id, attach),
        "GetConversation": (
            conversation_id,
            lambda i, m: conversations.GetConversation(GetConversationRequest(conversation_id=i), metadata=m),
        ),
        "ListMessages": (
            conversation_id,
            lambda i, m: conversations.ListMessages(ListMessagesRequest(conversation_id=i), metadata=m),
        ),
        "DeleteConversation": (
            conversation_id,
            lambda i, m: conversations.DeleteConversation(DeleteConversationRequest(conversation_id=i), metadata=m),
        ),
    }
    identity, call = calls[field]
    assert await code_of(call(identity, BETA)) == grpc.StatusCode.NOT_FOUND
    assert await code_of(call("", ACME)) == grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(call(identity, ())) == grpc.StatusCode.UNAUTHENTICATED
    await call(identity, ACME)


async def test_lists_show_ones_own_tenant_alone(keyed: Bench) -> None:
    """Runs and conversations of another tenant are in no list."""
    await keyed.new_run("acme")
    for metadata, count in ((ACME, 1), (BETA, 0)):
        assert len((await keyed.engine.ListRuns(ListRunsRequest(), metadata=metadata)).runs) == count
        listed = await keyed.conversations.ListConversations(ListConversationsRequest(), metadata=metadata)
        assert len(listed.conversations) == count


async def test_a_run_is_started_for_the_caller_the_key_stands_for(keyed: Bench) -> None:
    """Tenant and subject come from the key; a streaming call without one is refused before it starts anything."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await keyed.engine.Run(question()).read()
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert keyed.runs.started == []
    call = keyed.engine.Run(question(), metadata=BETA)
    await call.initial_metadata()
    assert keyed.runs.started[0][0] == Caller("beta", "somebody", frozenset({"user", "operator"}))
    call.cancel()


async def test_health_and_reflection_need_no_key(keyed: Bench) -> None:
    """Probes and tools see the server and its services without credentials."""
    health = health_pb2_grpc.HealthStub(keyed.channel)
    for service in ("", "dualclaw.v1.EngineService", "dualclaw.v1.ConversationService", "dualclaw.v1.AgentService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    call = reflection_pb2_grpc.ServerReflectionStub(keyed.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    (answer,) = [response async for response in call]
    names = {service.name for service in answer.list_services_response.service}
    assert {"dualclaw.v1.EngineService", "grpc.health.v1.Health"} <= names
    assert keyed.spans.get_finished_spans() == ()
