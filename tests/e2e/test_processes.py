"""Several processes on one store are one engine: roles, kill -9, frozen owners, people who answer anywhere."""

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualclaw import Decision, DecisionAction, EngineEvent, ResumeRequest, RunState, StopReason
from dualclaw.errors import EngineError
from dualclaw.rules import check_stream
from dualclaw_clients.engine_client import EngineClient, RunStream

from .conftest import Launcher, Process
from .effects import LONG, Effect, effects, go_on, hold, let_go, pause, settings_of
from .test_one_run_everywhere import request

Connect = Callable[[str], EngineClient]
PATIENCE = 100.0
"""Seconds anything may take on a busy machine."""

pytestmark = pytest.mark.timeout(300)


class Watch:
    """A client that reads a run to the end of a segment, in the background; its stream comes back by itself."""

    def __init__(self, stream: RunStream) -> None:
        self.events: list[EngineEvent] = []
        self._stream = stream
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self._stream:
            async for event in self._stream:
                self.events.append(event)

    async def done(self, before: Sequence[EngineEvent] = ()) -> list[EngineEvent]:
        """Wait for the end of the stream; with what came ``before``, what was read is seq 1 to n, by all rules."""
        await asyncio.wait_for(self._task, PATIENCE)
        assert check_stream([*before, *self.events]) == []
        return self.events


async def events_of(stream: RunStream) -> list[EngineEvent]:
    async with asyncio.timeout(PATIENCE), stream:
        return [event async for event in stream]


async def until(found: Callable[[], object]) -> None:
    for _ in range(int(PATIENCE / 0.02)):
        if found():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it did not come to be within {PATIENCE:g} s")


def begun(folder: Path, tool: str) -> list[Effect]:
    return [effect for effect in effects(folder) if (effect.what, effect.tool) == ("begin", tool)]


def pid(process: Process) -> int:
    assert process.child is not None
    return process.child.pid


def answers(events: list[EngineEvent], action: str, **more: str) -> ResumeRequest:
    """Answer everything a segment asks with one action."""
    number = DecisionAction.Value(f"DECISION_ACTION_{action}")
    items = events[-2].interrupt.items
    decisions = [Decision(interrupt_id=item.id, action=number, **more) for item in items]  # type: ignore[arg-type]
    return ResumeRequest(run_id=events[0].run_id, decisions=decisions)


def answers_already(events: Sequence[EngineEvent]) -> bool:
    """Tell whether a run's answer has begun to show."""
    return any(event.WhichOneof("payload") == "delta" for event in events)


def stands_still(number: int) -> bool:
    """Tell whether every thread of a process has stopped."""
    threads = Path(f"/proc/{number}/task").iterdir()
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


@asynccontextmanager
async def frozen(process: Process, folder: Path) -> AsyncIterator[None]:
    """Freeze a process while the context lasts; not while it writes, or it would keep the file from everybody."""
    with closing(sqlite3.connect(folder / "effects.db", timeout=PATIENCE)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        os.kill(pid(process), signal.SIGSTOP)
        await until(lambda: stands_still(pid(process)))
    try:
        yield
    finally:
        os.kill(pid(process), signal.SIGCONT)


# Roles


async def test_an_api_process_streams_and_cancels_what_a_worker_process_works_on(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """A run waits until there is a worker; its stream and its cancel cross processes; the worker serves health only."""
    api = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="api"))
    client = connect(api.address)
    watch = Watch(client.run(request("wait")))
    waiting = Watch(client.run(request("hello")))
    await asyncio.sleep(0.5)
    assert (watch.events, waiting.events) == ([], [])
    worker = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="worker"))
    assert (await waiting.done())[-1].done.content == "You said hello"
    await until(lambda: watch.events)
    await client.cancel(watch.events[0].run_id)
    assert (await watch.done())[-1].done.stop_reason == StopReason.STOP_REASON_CANCELLED
    async with grpc.aio.insecure_channel(worker.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(health_pb2.HealthCheckRequest(service="dualclaw.v1.EngineService"), timeout=PATIENCE)
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await channel.unary_unary("/dualclaw.v1.EngineService/GetRun")(b"", timeout=PATIENCE)
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED


# kill -9


@pytest.mark.parametrize("tool", ["read", "idempotent", "reconcile", "once"])
async def test_a_call_under_a_killed_worker_is_settled_by_its_effect_class(
    tool: str, launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """A client attached to a third process sees one run without gap; the tool runs again only where it may."""
    hold(tmp_path)
    api = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="api"))
    first = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="worker"))
    watch = Watch(connect(api.address).run(request(tool)))
    await until(lambda: begun(tmp_path, tool))
    second = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="worker"))
    first.kill()
    let_go(tmp_path)
    events = await watch.done()
    starts = begun(tmp_path, tool)
    assert starts[0].process == pid(first)
    assert {effect.key for effect in effects(tmp_path)} == {starts[0].key}
    steps = [event.step for event in events if event.WhichOneof("payload") == "step"]
    assert [step.index for step in steps] == [0, 0]
    if tool == "once":
        assert len(starts) == 1
        assert steps[-1].step.diagnosis.code == "tool.outcome_unknown"
        assert "tool.outcome_unknown" in events[-1].done.content
    else:
        assert [effect.process for effect in starts] == [pid(first), pid(second)]
        assert events[-1].done.content == f"Result: {tool} done"
    looked = [effect for effect in effects(tmp_path) if effect.what == "lookup"]
    assert [effect.process for effect in looked] == ([pid(second)] if tool == "reconcile" else [])


async def test_a_lookup_that_finds_the_effect_gives_the_result_and_the_call_is_not_made_again(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """The killed worker had paid; its successor asks under the same key and takes what it is told."""
    hold(tmp_path)
    engine = launch("dualclaw_server", **settings_of(tmp_path))
    watch = Watch(connect(engine.address).run(request("reconcile")))
    await until(lambda: begun(tmp_path, "reconcile"))
    (tmp_path / "done.log").write_text(f"paid {begun(tmp_path, 'reconcile')[0].key}\n")
    engine.kill()
    launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_LISTEN=engine.address))
    assert (await watch.done())[-1].done.content == "Result: found again"
    assert len(begun(tmp_path, "reconcile")) == 1


@pytest.mark.parametrize(
    ("action", "more", "content", "runs"),
    [
        ("RESPOND", {"response_json": '"it went through"'}, "Result: it went through", 1),
        ("APPROVE", {}, "Result: asking done", 2),
        ("SKIP", {}, "tool.outcome_unknown", 1),
    ],
)
async def test_people_settle_a_call_whose_tool_wants_that(
    action: str, more: dict[str, str], content: str, runs: int, launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """After the crash the run parks; a person says what came of it, has it run again, or leaves it unknown."""
    hold(tmp_path)
    engine = launch("dualclaw_server", **settings_of(tmp_path))
    client = connect(engine.address)
    watch = Watch(client.run(request("asking")))
    await until(lambda: begun(tmp_path, "asking"))
    engine.kill()
    let_go(tmp_path)
    launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_LISTEN=engine.address))
    events = await watch.done()
    (item,) = events[-2].interrupt.items
    assert item.tool_name == "asking"
    assert "nobody knows how it ended" in item.prompt
    events = [*events, *await events_of(client.resume(answers(events, action, **more)))]
    assert check_stream(events) == []
    assert content in events[-1].done.content
    assert len(begun(tmp_path, "asking")) == runs


async def test_a_client_that_moves_to_another_process_sees_one_rewind_and_every_event_once(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """The owner dies in mid-answer; attached at another process from where it was, the client has 1 to n, once."""
    owner = launch("dualclaw_server", **settings_of(tmp_path))
    pause(tmp_path)
    read: list[EngineEvent] = []
    async with asyncio.timeout(PATIENCE), connect(owner.address).run(request("talk")) as stream:
        async for event in stream:
            read.append(event)
            if answers_already(read):
                break
    owner.kill()
    go_on(tmp_path)
    other = launch("dualclaw_server", **settings_of(tmp_path))
    client = connect(other.address)
    read += await events_of(client.attach(read[0].run_id, after_seq=read[-1].seq))
    assert check_stream(read) == []
    payloads = [event.WhichOneof("payload") for event in read]
    assert payloads.count("rewind") == 1
    assert read[-1].done.content == LONG
    for after in (0, 3, len(read) - 1, len(read)):
        assert await events_of(client.attach(read[0].run_id, after_seq=after)) == read[after:]


# Frozen and blocked


@pytest.mark.parametrize("doing", ["once", "talk"])
async def test_a_frozen_owner_that_comes_back_changes_nothing_any_more(
    doing: str, launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """SIGSTOP for longer than the lease: another process finishes; what the first still writes is fenced."""
    hold(tmp_path)
    pause(tmp_path)
    first = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="worker", DUALCLAW_LEASE="4"))
    api = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="api"))
    client = connect(api.address)
    watch = Watch(client.run(request(doing)))
    await until(lambda: begun(tmp_path, "once") if doing == "once" else answers_already(watch.events))
    async with frozen(first, tmp_path):
        go_on(tmp_path)
        launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="worker"))
        events = await watch.done()
        let_go(tmp_path)
    await until(lambda: "is dropped" in first.logged() or "is put back" in first.logged())
    stored = await events_of(client.attach(events[0].run_id))
    assert stored == events
    assert len(begun(tmp_path, "once")) == (1 if doing == "once" else 0)
    assert (await client.get_run(events[0].run_id)).state == RunState.RUN_STATE_SUCCEEDED
    assert (await events_of(client.run(request("hello"))))[-1].done.content == "You said hello"


async def test_a_tool_that_blocks_its_process_for_longer_than_the_lease_keeps_the_run(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """The heart beats in a thread of its own: nobody takes the run over, and the tool runs once."""
    owner = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="worker", DUALCLAW_LEASE="5"))
    api = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="api"))
    watch = Watch(connect(api.address).run(request("block")))
    await until(lambda: begun(tmp_path, "block"))
    launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="worker"))
    assert (await watch.done())[-1].done.content == "Result: block done"
    assert [(effect.what, effect.process) for effect in effects(tmp_path)] == [
        ("begin", pid(owner)),
        ("end", pid(owner)),
    ]


# People


async def test_asked_on_one_process_answered_through_a_second_finished_on_a_third(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """The process that asked is dead, the one that takes the answer does not work, the third one does it."""
    first = launch("dualclaw_server", **settings_of(tmp_path))
    events = await events_of(connect(first.address).run(request("guarded")))
    first.kill()
    api = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="api"))
    client = connect(api.address)
    segment = Watch(client.resume(answers(events, "APPROVE")))
    await asyncio.sleep(0.3)
    assert effects(tmp_path) == []
    third = launch("dualclaw_server", **settings_of(tmp_path, DUALCLAW_ROLE="worker"))
    await segment.done(events)
    assert segment.events[-1].done.content == "Result: guarded done"
    assert [effect.process for effect in begun(tmp_path, "guarded")] == [pid(third)]


async def test_of_two_who_answer_at_once_on_two_processes_one_wins(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """The loser gets ALREADY_ANSWERED from the call itself; the tool runs once."""
    engines = [launch("dualclaw_server", **settings_of(tmp_path)) for _ in range(2)]
    clients = [connect(engine.address) for engine in engines]
    events = await events_of(clients[0].run(request("guarded")))
    attempts = [events_of(clients[number % 2].resume(answers(events, "APPROVE"))) for number in range(6)]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert sum(isinstance(outcome, list) for outcome in outcomes) == 1
    assert [error.reason for error in outcomes if isinstance(error, EngineError)] == ["ALREADY_ANSWERED"] * 5
    assert len(begun(tmp_path, "guarded")) == 1


async def test_a_question_expires_though_the_process_that_asked_is_dead(
    launch: Launcher, connect: Connect, tmp_path: Path
) -> None:
    """The timer is in the store: another process that was there all along rejects it in time's name and goes on."""
    first = launch("dualclaw_server", **settings_of(tmp_path))
    events = await events_of(connect(first.address).run(request("short")))
    assert events[-1].done.stop_reason == StopReason.STOP_REASON_INTERRUPTED
    second = launch("dualclaw_server", **settings_of(tmp_path))
    first.kill()
    stored = await events_of(connect(second.address).attach(events[0].run_id, wait=True))
    assert check_stream(stored) == []
    assert "Nobody answered in time" in stored[-1].done.content
    assert begun(tmp_path, "short") == []


async def test_a_question_outlives_the_policy_that_asked_it(launch: Launcher, connect: Connect, tmp_path: Path) -> None:
    """Restarted with an agent that guards nothing any more, the parked call still waits for its answer."""
    settings = settings_of(tmp_path)
    first = launch("dualclaw_server", **settings)
    events = await events_of(connect(first.address).run(request("guarded")))
    first.kill()
    path = tmp_path / "effect_agents.py"
    path.write_text(
        path.read_text("utf-8").replace("interceptors=[HitlInterceptor", "interceptors=[] and [HitlInterceptor")
    )
    second = launch("dualclaw_server", **settings)
    client = connect(second.address)
    assert (await client.get_run(events[0].run_id)).state == RunState.RUN_STATE_INTERRUPTED
    assert begun(tmp_path, "guarded") == []
    events += await events_of(client.resume(answers(events, "REJECT")))
    assert check_stream(events) == []
    assert "tool.rejected" in events[-1].done.content
    assert begun(tmp_path, "guarded") == []
