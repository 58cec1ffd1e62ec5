"""What clients see of a compacted run: through the rpcs, over every store."""

import json

import grpc
import pytest

from dualclaw import AttachRequest, ContentPart, GetRunRequest, ListMessagesRequest, Message, Role, RunRequest, RunState
from dualclaw.rpc import ConversationServiceAsyncStub, EngineServiceAsyncStub
from dualclaw.status import error_from_rpc
from dualclaw_server.app import Parts, engine_server
from dualclaw_server.engine.agent import Agent
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.servicers.access import anonymous_access
from dualclaw_server.settings import Settings

HELLO = ScriptedModel.parse(json.dumps({"name": "script", "turns": [{"say": [{"text": "Hello, world."}]}] * 3}))


@pytest.fixture
async def channel(store):
    """A served engine on each store in turn."""
    parts = Parts(store, HELLO, (Agent(name="assistant"),), anonymous_access(loopback=True))
    async with (
        engine_server(Settings(listen="127.0.0.1:0", store="memory:"), parts) as served,
        grpc.aio.insecure_channel(served.address) as opened,
    ):
        yield opened


async def events_of(call):
    return [event async for message in call for event in message.events]


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(call)
    assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE
    return error_from_rpc(refused.value)


async def test_a_compacted_run_is_log_compacted_below_its_end_and_an_empty_stream_at_it(store, channel):
    """Its messages and its record are still there, and its request_id neither runs it again nor streams a part."""
    engine, conversations = EngineServiceAsyncStub(channel), ConversationServiceAsyncStub(channel)
    ask = RunRequest(
        message=Message(role=Role.ROLE_USER, parts=[ContentPart(text="hello")]), request_id="q", agent="assistant"
    )
    call = engine.Run(ask, timeout=100)
    run_id = dict(await call.initial_metadata())["dualclaw-run-id"]
    events = await events_of(call)
    last = events[-1].seq
    assert await store.compact(4e9) == 1
    for after in (0, last - 1):
        for wait in (False, True):
            error = await refusal(engine.Attach(AttachRequest(run_id=run_id, after_seq=after, wait=wait), timeout=100))
            assert (error.reason, error.metadata["kept_from"]) == ("LOG_COMPACTED", str(last + 1))
    for wait in (False, True):
        attached = engine.Attach(AttachRequest(run_id=run_id, after_seq=last, wait=wait), timeout=100)
        assert await events_of(attached) == []
        assert await attached.code() == grpc.StatusCode.OK
    beyond = await refusal(engine.Attach(AttachRequest(run_id=run_id, after_seq=last + 1), timeout=100))
    assert beyond.reason == "AFTER_SEQ_OUT_OF_RANGE"
    assert (await refusal(engine.Run(ask, timeout=100))).reason == "LOG_COMPACTED"
    run = (await engine.GetRun(GetRunRequest(run_id=run_id), timeout=100)).run
    assert (run.state, run.last_seq) == (RunState.RUN_STATE_SUCCEEDED, last)
    page = await conversations.ListMessages(
        ListMessagesRequest(conversation_id=events[-1].done.conversation_id), timeout=100
    )
    assert [message.parts[0].text for message in page.messages] == ["hello", "Hello, world."]


async def test_a_conversation_goes_on_behind_a_compacted_run(store, channel):
    """The model is given what was said: history is made of messages, not of logs."""
    engine = EngineServiceAsyncStub(channel)
    ask = RunRequest(message=Message(role=Role.ROLE_USER, parts=[ContentPart(text="hello")]), agent="assistant")
    done = (await events_of(engine.Run(ask, timeout=100)))[-1].done
    assert await store.compact(4e9) == 1
    ask.conversation_id = done.conversation_id
    again = (await events_of(engine.Run(ask, timeout=100)))[-1].done
    assert again.content == "Hello, world."
    page = await store.list_messages("default", done.conversation_id, page_size=0, page_token="")
    assert len(page.items) == 4
