"""OperatorService: roles and tenants, a look inside, taking a run away, asking again, purging."""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dualclaw import (
    CancelRequest,
    EngineEvent,
    InspectRunRequest,
    InspectRunResponse,
    ListMessagesRequest,
    ListRunsRequest,
    Phase,
    PurgeRunRequest,
    ReleaseRunRequest,
    RetryRunRequest,
    Role,
    RunRequest,
    RunState,
)
from dualclaw.errors import EngineError
from dualclaw.rpc import ConversationServiceAsyncStub, EngineServiceAsyncStub, OperatorServiceAsyncStub
from dualclaw.status import error_from_rpc
from dualclaw_server.app import Parts, engine_server
from dualclaw_server.engine.agent import Agent, agent_tool
from dualclaw_server.engine.caller import Caller
from dualclaw_server.engine.checkpoint import CancelSignal, Signal, load_record
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.store import RunKey
from dualclaw_server.engine.tool import Tool
from dualclaw_server.interceptors import HitlInterceptor
from dualclaw_server.interceptors.hitl import Policy
from dualclaw_server.models.scripted import ScriptedModel
from dualclaw_server.servicers.access import Access, KeyEntry
from dualclaw_server.settings import Settings
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.tools.feedback import feedback_tool
from tests.server.servicers.conftest import Bench, done, question

Metadata = tuple[tuple[str, str], ...]
SUCCEEDED, CANCELLED = RunState.RUN_STATE_SUCCEEDED, RunState.RUN_STATE_CANCELLED
PARKED, RUNNING = RunState.RUN_STATE_INTERRUPTED, RunState.RUN_STATE_RUNNING
NO_ARGUMENTS = {"type": "object", "properties": {}}


def bearer(subject: str) -> Metadata:
    return (("authorization", f"Bearer key-{subject}"),)


USER, OPERATOR, STRANGER = bearer("una"), bearer("olga"), bearer("otto")


def entry(tenant: str, subject: str, *roles: str) -> KeyEntry:
    digest = hashlib.sha256(f"key-{subject}".encode()).digest()
    return KeyEntry(digest, Caller(tenant, subject, frozenset(roles)))


ACCESS = Access(
    keys=(
        entry("acme", "una", "user"),
        entry("acme", "olga", "user", "operator"),
        entry("beta", "otto", "user", "operator"),
    )
)


@dataclass
class Desk:
    """A served engine that does its work, with stubs for users and operators."""

    store: MemoryStore
    channel: grpc.aio.Channel
    engine: EngineServiceAsyncStub = field(init=False)
    operators: OperatorServiceAsyncStub = field(init=False)
    conversations: ConversationServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.engine = EngineServiceAsyncStub(self.channel)
        self.operators = OperatorServiceAsyncStub(self.channel)
        self.conversations = ConversationServiceAsyncStub(self.channel)

    async def ask(self, request: RunRequest | None = None, metadata: Metadata = USER) -> EngineEvent:
        """Ask and return the last event of the segment."""
        call = self.engine.Run(request or question(), metadata=metadata, timeout=60)
        return [event async for message in call for event in message.events][-1]

    async def inspect(self, run_id: str) -> InspectRunResponse:
        return await self.operators.InspectRun(InspectRunRequest(run_id=run_id), metadata=OPERATOR)

    async def retry(self, run_id: str, request_id: str = "") -> str:
        request = RetryRunRequest(run_id=run_id, request_id=request_id)
        return (await self.operators.RetryRun(request, metadata=OPERATOR)).run.id

    async def ended(self, run_id: str, *ends: RunState.ValueType) -> None:
        """Wait until a run is in one of these states."""
        async with asyncio.timeout(60):
            while (await self.store.head(RunKey("acme", run_id))).state not in ends:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


Open = Callable[..., AbstractAsyncContextManager[Desk]]


@pytest.fixture
def desk() -> Open:
    """Return ``desk(*turns, agents=...)``: serves these agents by a written model, with three people's keys."""

    @contextlib.asynccontextmanager
    async def serving(
        *turns: dict[str, object], agents: Sequence[Agent] = (Agent("assistant"),)
    ) -> AsyncIterator[Desk]:
        store = MemoryStore()
        script = turns or ({"say": [{"text": "Hello."}]},)
        model = ScriptedModel.parse(json.dumps({"name": "script", "turns": script}))
        settings = Settings(listen="127.0.0.1:0", store="memory:", grace=0.0)
        async with (
            engine_server(settings, Parts(store, model, agents, ACCESS)) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            yield Desk(store, channel)

    return serving


async def paid() -> str:
    return "paid"


async def refused(call: Awaitable[object]) -> EngineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


@pytest.mark.parametrize("rpc", ["InspectRun", "ReleaseRun", "RetryRun", "PurgeRun"])
async def test_only_operators_of_the_runs_own_tenant_get_through(desk: Open, rpc: str) -> None:
    """No key, no role and no id are refused, the operator of another tenant finds nothing, its own one gets through."""
    async with desk() as served:
        run_id = (await served.ask()).run_id
        call = getattr(served.operators, rpc)
        kinds = {
            "InspectRun": InspectRunRequest,
            "ReleaseRun": ReleaseRunRequest,
            "RetryRun": RetryRunRequest,
            "PurgeRun": PurgeRunRequest,
        }
        request = kinds[rpc](run_id=run_id)
        assert (await refused(call(request))).reason == "UNAUTHENTICATED"
        assert (await refused(call(request, metadata=USER))).reason == "PERMISSION_DENIED"
        assert (await refused(call(request, metadata=STRANGER))).reason == "UNKNOWN_RUN"
        assert (await refused(call(kinds[rpc](), metadata=OPERATOR))).reason == "INVALID_REQUEST"
        await call(request, metadata=OPERATOR)


async def test_health_and_reflection_know_the_service(desk: Open) -> None:
    """Probes and tools find it beside the others."""
    async with desk() as served:
        request = health_pb2.HealthCheckRequest(service="dualclaw.v1.OperatorService")
        answer = await health_pb2_grpc.HealthStub(served.channel).Check(request)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(served.channel).ServerReflectionInfo(iter([ask]))
        (listed,) = [response async for response in call]
        names = {service.name for service in listed.list_services_response.service}
        assert "dualclaw.v1.OperatorService" in names


async def test_a_run_at_its_end_shows_its_log_and_that_nobody_has_to_work(desk: Open) -> None:
    """The frames hold every event once and in order; there is no worker, no time to wait for and no open call."""
    async with desk() as served:
        last = await served.ask()
        shown = await served.inspect(last.run_id)
        assert (shown.run.id, shown.run.state, shown.run.last_seq) == (last.run_id, SUCCEEDED, last.seq)
        seqs = [seq for frame in shown.frames for seq in range(frame.first_seq, frame.first_seq + frame.event_count)]
        assert seqs == list(range(1, last.seq + 1))
        assert (shown.epoch, shown.segment, shown.recoveries, shown.kept_from_seq) == (1, 1, 0, 1)
        assert shown.version >= len(shown.frames) > 0
        assert (shown.frames[-1].state, shown.frames[-1].durable) == (SUCCEEDED, True)
        assert all(frame.size > 0 for frame in shown.frames if frame.event_count)
        assert (shown.worker, shown.HasField("ready_time"), list(shown.open_calls)) == ("", False, [])


async def test_a_run_at_work_shows_its_worker_its_lease_and_its_calls(desk: Open) -> None:
    """A call that has ended, failed, begun or not begun is told apart, that of a sub-agent stands below its caller."""
    begun = asyncio.Event()

    async def quick() -> str:
        return "ok"

    async def breaks() -> str:
        raise ZeroDivisionError

    async def hangs() -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    clerk = Agent("clerk", tools=[Tool("hangs", "x", NO_ARGUMENTS, hangs)], instructions="clerk")
    boss = Agent(
        "boss",
        tools=[
            Tool("quick", "x", NO_ARGUMENTS, quick),
            Tool("breaks", "x", NO_ARGUMENTS, breaks),
            agent_tool(clerk),
        ],
    )
    calls = [
        {"call": "quick", "id": "c1", "args": {}},
        {"call": "breaks", "id": "c2", "args": {}},
        {"call": "clerk", "id": "c3", "args": {"request": "go"}},
    ]
    turns = (
        {"when": {"user": "^go$", "step": 0}, "say": [{"call": "hangs", "id": "d1", "args": {}}]},
        {"when": {"step": 0}, "say": calls},
        {"say": [{"text": "done"}]},
    )
    async with desk(*turns, agents=[boss]) as served:
        call = served.engine.Run(question("start"), metadata=USER)
        await asyncio.wait_for(begun.wait(), 60)
        run_id = dict(await call.initial_metadata())["dualclaw-run-id"]
        phases: dict[str, Phase.ValueType] = {}
        wanted = {"quick": Phase.PHASE_OK, "breaks": Phase.PHASE_FAIL, "clerk": Phase.PHASE_START}
        async with asyncio.timeout(60):
            while phases != {**wanted, "hangs": Phase.PHASE_START}:
                shown = await served.inspect(run_id)
                phases = {item.tool_name: item.phase for item in shown.open_calls}
                await asyncio.sleep(0.01)
        assert [item.tool_name for item in shown.open_calls] == ["quick", "breaks", "clerk", "hangs"]
        assert (shown.run.state, shown.deliveries) == (RUNNING, 1)
        assert shown.worker
        assert shown.ready_time.seconds > time.time()
        call.cancel()


async def test_a_parked_run_shows_what_wakes_it(desk: Open) -> None:
    """The call that waits for a person has begun for its readers; the expiry of its question is its timer."""
    tool = Tool("pay", "x", NO_ARGUMENTS, paid, effect="once")
    agent = Agent("payer", tools=[tool], interceptors=[HitlInterceptor([Policy("pay", expires_in=3_600)])])
    turn: dict[str, object] = {"say": [{"call": "pay", "id": "c1", "args": {}}]}
    async with desk(turn, agents=[agent]) as served:
        shown = await served.inspect((await served.ask()).run_id)
        assert (shown.run.state, shown.HasField("ready_time"), shown.worker) == (PARKED, False, "")
        assert [(call.call_id, call.phase) for call in shown.open_calls] == [("c1", Phase.PHASE_START)]
        (item,) = shown.run.interrupts
        assert [at.seconds for at in shown.timer_times] == [item.expire_time.seconds]


async def test_saved_state_nobody_can_read_is_told_and_hides_nothing_else(bench: Bench) -> None:
    """The record of this run is no record: its error says so though it runs, and its inbox and frames are shown."""
    run = await bench.new_run()
    operators = OperatorServiceAsyncStub(bench.channel)
    signal = Signal(cancel=CancelSignal(reason="x"))
    await bench.runs.store.signal(run, signal.SerializeToString(), "cancel")
    shown = await operators.InspectRun(InspectRunRequest(run_id=run.run_id))
    assert "its saved state cannot be read" in shown.run.error.message.lower()
    assert shown.run.error.diagnosis.hint
    assert (shown.run.state, list(shown.unread_signals)) == (RUNNING, ["cancel"])
    await bench.runs.write(run, done(), state=SUCCEEDED)
    error = await refused(operators.RetryRun(RetryRunRequest(run_id=run.run_id)))
    assert (error.reason, "cannot be asked again" in error.message) == ("INTERNAL", True)


async def test_a_released_run_is_taken_from_its_worker_and_delivered_anew(bench: Bench) -> None:
    """The holder has lost it, the next claim gets it; a run nobody has to work on stays as it is."""
    run = await bench.new_run()
    store, operators = bench.runs.store, OperatorServiceAsyncStub(bench.channel)
    held = await store.claim("default", "first", 0)
    assert held is not None
    shown = await operators.InspectRun(InspectRunRequest(run_id=run.run_id))
    assert (shown.worker, shown.deliveries) == ("first", 1)
    assert await store.claim("default", "second", 0) is None
    answer = await operators.ReleaseRun(ReleaseRunRequest(run_id=run.run_id))
    assert (answer.released, answer.run.id) == (True, run.run_id)
    again = await store.claim("default", "second", 0)
    assert (held.lost, again is not None and again.key == run) == (True, True)
    shown = await operators.InspectRun(InspectRunRequest(run_id=run.run_id))
    assert (shown.worker, shown.deliveries) == ("second", 2)
    await bench.runs.write(run, done(), state=SUCCEEDED)
    assert again is not None
    await again.ack()
    answer = await operators.ReleaseRun(ReleaseRunRequest(run_id=run.run_id))
    assert (answer.released, answer.run.state) == (False, SUCCEEDED)


async def test_a_retried_run_asks_the_same_for_the_same_person(desk: Open) -> None:
    """Message, agent, options and metadata are those of the first; so are subject and roles, whoever had it retried."""
    agents = [Agent("assistant"), Agent("other", interceptors=[Switchable()])]
    async with desk(agents=agents) as served:
        request = question("how much?", agent="other", claw="web", request_id="r-1")
        request.options.max_steps = 3
        request.options.interceptors["switch"] = True
        request.metadata["ticket"] = "7"
        first = (await served.ask(request)).run_id
        second = await served.retry(first)
        await served.ended(second, SUCCEEDED)
        assert first != second
        records = [load_record((await served.store.load(RunKey("acme", run_id))).record) for run_id in (first, second)]
        assert [(record.subject, list(record.roles)) for record in records] == [("una", ["user"])] * 2
        before, after = (record.request for record in records)
        assert (after.request_id, before.request_id) == ("", "r-1")
        assert (after.message.parts, after.message.role) == (before.message.parts, Role.ROLE_USER)
        assert after.message.id != before.message.id
        for name in ("agent", "conversation_id", "claw", "options", "metadata"):
            assert getattr(after, name) == getattr(before, name), name
        listed = ListMessagesRequest(conversation_id=before.conversation_id)
        messages = (await served.conversations.ListMessages(listed, metadata=USER)).messages
        assert [part.text for message in messages for part in message.parts] == ["how much?", "Hello."] * 2


class Switchable(Interceptor):
    """An interceptor that callers may switch, and nothing else."""

    def __init__(self) -> None:
        super().__init__(name="switch", switchable=True)


async def test_the_same_request_id_retries_once(desk: Open) -> None:
    """A repeated call finds the run it has made; the id of the first run itself, or of another retry, is used up."""
    async with desk() as served:
        conversation_id = (await served.ask()).done.conversation_id
        asked = question(request_id="own", agent="assistant", conversation_id=conversation_id)
        first = (await served.ask(asked)).run_id
        second = await served.retry(first, "again")
        await served.ended(second, SUCCEEDED)
        assert await served.retry(first, "again") == second
        third = await served.retry(first)
        await served.ended(third, SUCCEEDED)
        assert len({first, second, third}) == 3
        for run_id, used in ((first, "own"), (second, "again"), (third, "again")):
            request = RetryRunRequest(run_id=run_id, request_id=used)
            error = await refused(served.operators.RetryRun(request, metadata=OPERATOR))
            assert error.reason == "REQUEST_ID_REUSED"
        assert len((await served.engine.ListRuns(ListRunsRequest(), metadata=USER)).runs) == 4


async def test_only_a_run_at_its_end_is_retried_or_purged(desk: Open) -> None:
    """A parked one is refused with its state; once it is cancelled both work."""
    tool = Tool("pay", "x", NO_ARGUMENTS, paid, effect="once")
    agent = Agent("payer", tools=[tool], interceptors=[HitlInterceptor([Policy("pay")])])
    turn: dict[str, object] = {"say": [{"call": "pay", "args": {}}]}
    async with desk(turn, agents=[agent]) as served:
        run_id = (await served.ask()).run_id
        retry, purge = RetryRunRequest(run_id=run_id), PurgeRunRequest(run_id=run_id)
        for call in (
            served.operators.RetryRun(retry, metadata=OPERATOR),
            served.operators.PurgeRun(purge, metadata=OPERATOR),
        ):
            error = await refused(call)
            assert (error.reason, error.metadata["state"], error.metadata["run_id"]) == (
                "RUN_NOT_FINAL",
                "INTERRUPTED",
                run_id,
            )
        await served.engine.Cancel(CancelRequest(run_id=run_id), metadata=USER)
        await served.ended(run_id, CANCELLED)
        await served.retry(run_id)
        await served.operators.PurgeRun(purge, metadata=OPERATOR)


async def test_a_retry_never_answers_the_question_another_run_asks(desk: Open) -> None:
    """Its words are no answer: while a run of the conversation waits for one, the retry is refused as busy."""
    asks = {"call": "ask_user", "args": {"question": "Which colour?"}}
    turns = ({"when": {"user": "^plain$"}, "say": [{"text": "Hello."}]}, {"say": [asks]})
    async with desk(*turns, agents=[Agent("asker", tools=[feedback_tool()])]) as served:
        first = await served.ask(question("plain"))
        conversation_id = first.done.conversation_id
        parked = await served.ask(question("ask me", conversation_id=conversation_id))
        assert (await served.inspect(parked.run_id)).run.state == PARKED
        request = RetryRunRequest(run_id=first.run_id)
        error = await refused(served.operators.RetryRun(request, metadata=OPERATOR))
        assert (error.reason, error.metadata["run_id"]) == ("CONVERSATION_BUSY", parked.run_id)
        assert len(json.loads(error.metadata["interrupts"])) == 1
        assert (await served.inspect(parked.run_id)).run.state == PARKED


async def test_a_purged_run_is_gone_and_its_messages_stay(desk: Open) -> None:
    """Whoever looks for it finds nothing, a second purge neither; the conversation reads as before."""
    async with desk() as served:
        last = await served.ask()
        request = PurgeRunRequest(run_id=last.run_id)
        await served.operators.PurgeRun(request, metadata=OPERATOR)
        for gone in (
            served.operators.PurgeRun(request, metadata=OPERATOR),
            served.operators.InspectRun(InspectRunRequest(run_id=last.run_id), metadata=OPERATOR),
        ):
            assert (await refused(gone)).reason == "UNKNOWN_RUN"
        listed = ListMessagesRequest(conversation_id=last.done.conversation_id)
        messages = (await served.conversations.ListMessages(listed, metadata=USER)).messages
        assert [part.text for message in messages for part in message.parts] == ["hello", "Hello."]
