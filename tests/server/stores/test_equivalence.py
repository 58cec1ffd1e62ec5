"""Whatever is done to a store, it answers like the in-memory reference."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dualclaw import BusyPolicy, Delta, EngineEvent, InterruptItem, Message, Run, RunResponse, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.store import (
    Answers,
    Claim,
    Frame,
    Inspection,
    NewRun,
    RunKey,
    RunMessage,
    RunStore,
    StoreError,
    Sync,
)
from dualclaw_server.stores.memory import MemoryStore
from dualclaw_server.stores.records import Clock
from dualclaw_server.stores.sqlite import SqliteStore

NAMES = st.sampled_from(["r1", "r2", "r3", "r4", "r5"])
TENANTS = st.sampled_from(["t", "u"])
CONVERSATIONS = st.sampled_from(["c", "d"])
QUESTIONS = st.lists(st.sampled_from(["i1", "i2", "i3"]), max_size=3)
MESSAGES = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["", "", "call_1"])), max_size=2, unique_by=lambda message: message[0]
)
STATES = st.sampled_from([state for state in RunState.values() if state])

TESTED: dict[str, Callable[[Path, Clock], RunStore]] = {
    "sqlite": lambda folder, clock: SqliteStore(folder / "runs.db", clock=clock, lease=1e6),
}
"""Every store that is compared with the reference: made in a folder, with a clock the test moves by hand."""


class Stores(RuleBasedStateMachine):
    """Does the same to both stores and compares every answer, every error, and all that can be read."""

    tested = "sqlite"
    sound: Callable[[Path], None]

    def __init__(self) -> None:
        super().__init__()
        self.undo = ExitStack()
        self.runner = self.undo.enter_context(asyncio.Runner())
        folder = self.undo.enter_context(tempfile.TemporaryDirectory())
        self.file = Path(folder) / "runs.db"
        self.now = 1_700_000_000.0
        self.pair: tuple[RunStore, RunStore] = (
            MemoryStore(clock=lambda: self.now),
            TESTED[self.tested](Path(folder), lambda: self.now),
        )
        self.claims: list[tuple[Claim, Claim]] = []
        self.keys: set[RunKey] = set()

    @initialize(parked=st.integers(0, 3))
    def open(self, parked: int) -> None:
        """Begin with runs, some of them parked: from nothing, random steps seldom get as far as an answer."""
        for store in self.pair:
            self.runner.run(store.open())
        for n in range(3):
            self.create("tu"[n // 2], f"r{n + 1}", "cd"[n % 2], BusyPolicy.BUSY_POLICY_QUEUE, "", "f", True)
            if n < parked:
                self.park(n, ["i1", "i2"], [(1, ""), (2, "call_1")])

    def teardown(self) -> None:
        for store in self.pair:
            self.runner.run(store.close())
        if self.file.exists():
            self.sound(self.file)
        self.undo.close()

    def both(self, do: Callable[[RunStore], Awaitable[Any]]) -> list[Any]:
        async def called(store: RunStore) -> Any:
            return await outcome(do(store))

        return [self.runner.run(called(store)) for store in self.pair]

    def same(self, do: Callable[[RunStore], Awaitable[Any]]) -> Any:
        reference, tested = self.both(do)
        assert reference == tested
        return reference

    @rule(
        tenant=TENANTS,
        name=NAMES,
        conversation=CONVERSATIONS,
        policy=st.sampled_from(BusyPolicy.values()),
        request_id=st.sampled_from(["", "q1", "q2"]),
        fingerprint=st.sampled_from(["f", "g"]),
        fresh=st.booleans(),
    )
    def create(
        self, tenant: str, name: str, conversation: str, policy: Any, request_id: str, fingerprint: str, fresh: bool
    ) -> None:
        key = RunKey(tenant, name)
        self.keys.add(key)
        self.same(
            lambda store: store.create(
                NewRun(
                    key,
                    conversation,
                    fresh,
                    "title",
                    request_id,
                    fingerprint,
                    b"record",
                    Run(id=name),
                    Message(id=f"{name}-0"),
                    policy,
                    b"replaced",
                )
            )
        )

    @rule(
        at=st.integers(0, 9),
        count=st.integers(0, 3),
        state=STATES | st.just(RunState.RUN_STATE_RUNNING),
        wrong=st.sampled_from([0, 0, 0, 0, 1, -1]),
        gap=st.sampled_from([0, 0, 0, 0, 1]),
        epoch=st.sampled_from([1, 1, 1, 2]),
        checkpoint=st.sampled_from([b"", b"one", b"two", b"x" * 300_000]),
        messages=MESSAGES,
        signals=st.lists(st.sampled_from(["s1", "s2", "replace:r2"]), max_size=2),
        marks=st.tuples(st.booleans(), st.booleans(), st.sampled_from(Sync)),
        record=st.booleans(),
    )
    def append(
        self,
        at: int,
        count: int,
        state: Any,
        wrong: int,
        gap: int,
        epoch: int,
        checkpoint: bytes,
        messages: list[tuple[int, str]],
        signals: list[str],
        marks: tuple[bool, bool, Sync],
        record: bool,
    ) -> None:
        key = self.pick(at, *RunState.values())
        name = key.run_id

        async def append(store: RunStore) -> int:
            try:
                head = await store.head(key)
                version, first = head.version, head.last_seq + 1
            except EngineError:
                version, first = 0, 1
            events = [EngineEvent(seq=first + n, delta=Delta(content="x")) for n in range(count)]
            frame = Frame(
                epoch,
                first + gap,
                count,
                RunResponse(events=events).SerializeToString(),
                state,
                durable=marks[0],
                ends_segment=marks[1],
                checkpoint=checkpoint,
                messages=tuple(RunMessage(n, Message(id=f"{name}-{n}-{version}"), scope) for n, scope in messages),
                signals=tuple(signals),
                run=Run(id=name, agent=f"at {version}") if record else None,
                sync=marks[2],
            )
            return await store.append(key, frame, version + wrong)

        self.same(append)

    def pick(self, at: int, *states: RunState.ValueType) -> RunKey:
        """Return a run in one of the states, so that rare ones are met; any name when there is none."""
        wanted = []
        for key in sorted(self.keys, key=lambda key: (key.tenant, key.run_id)):
            with suppress(EngineError):
                if self.runner.run(self.pair[0].head(key)).state in states:
                    wanted.append(key)
        return wanted[at % len(wanted)] if wanted else RunKey("t", f"r{at % 5 + 1}")

    @rule(at=st.integers(0, 9), asks=QUESTIONS, messages=MESSAGES)
    def park(self, at: int, asks: list[str], messages: list[tuple[int, str]]) -> None:
        key = self.pick(at, RunState.RUN_STATE_RUNNING, RunState.RUN_STATE_INTERRUPTED)
        name = key.run_id

        async def park(store: RunStore) -> int:
            head = await store.head(key)
            frame = Frame(
                head.epoch + 1,
                head.last_seq + 1,
                0,
                b"",
                RunState.RUN_STATE_INTERRUPTED,
                messages=tuple(RunMessage(n, Message(id=f"{name}-{n}-p"), scope) for n, scope in messages),
                run=Run(id=name, interrupts=[InterruptItem(id=one) for one in asks]),
            )
            return await store.append(key, frame, head.version)

        self.same(park)

    @rule(
        at=st.integers(0, 9),
        anyone=st.sampled_from([False, False, False, True]),
        said=st.lists(
            st.tuples(
                QUESTIONS,
                st.sampled_from(["s1", "a1", "a2", "a3"]),
                st.sampled_from(["", "", "q1", "q2"]),
                st.sampled_from(["f", "f", "g"]),
            ),
            min_size=1,
            max_size=4,
        ),
    )
    def answer(self, at: int, anyone: bool, said: list[tuple[list[str], str, str, str]]) -> None:
        key = self.pick(at, *(RunState.values() if anyone else [RunState.RUN_STATE_INTERRUPTED]))
        for questions, signal_id, request_id, fingerprint in said:
            answers = Answers(key, tuple(questions), signal_id, b"answer", request_id, fingerprint)
            self.same(lambda store, answers=answers: store.answer(answers))

    @rule(tenant=TENANTS, name=NAMES, signal_id=st.sampled_from(["s1", "s2"]), body=st.binary(max_size=3))
    def signal(self, tenant: str, name: str, signal_id: str, body: bytes) -> None:
        self.same(lambda store: store.signal(RunKey(tenant, name), body, signal_id))

    @rule(tenant=TENANTS, name=NAMES, after=st.sampled_from([-1.0, 0.0, 5.0, 20.0]))
    def wake(self, tenant: str, name: str, after: float) -> None:
        self.same(lambda store: store.wake(RunKey(tenant, name), self.now + after))

    @rule(seconds=st.sampled_from([0.5, 5.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def claim(self) -> None:
        reference, tested = self.claims_of_both()
        assert (reference is None) == (tested is None)
        if reference is not None:
            assert (reference.key, reference.redelivered) == (tested.key, tested.redelivered)
            self.claims.append((reference, tested))

    def claims_of_both(self) -> list[Claim | None]:
        return self.both(lambda store: store.claim("default", "w", 0))

    @rule(at=st.integers(0, 9), delay=st.sampled_from([None, 0.0, 3.0]))
    def give_back(self, at: int, delay: float | None) -> None:
        if not self.claims:
            return
        for claim in self.claims.pop(at % len(self.claims)):
            self.runner.run(claim.ack() if delay is None else claim.nak(delay))

    @rule(tenant=TENANTS, name=NAMES)
    def release(self, tenant: str, name: str) -> None:
        self.same(lambda store: store.release(RunKey(tenant, name)))

    @rule(ago=st.sampled_from([-1.0, 0.0, 5.0]), limit=st.sampled_from([0, 1, 100]))
    def compact(self, ago: float, limit: int) -> None:
        self.same(lambda store: store.compact(self.now - ago, limit))

    @rule(tenant=TENANTS, name=NAMES)
    def delete(self, tenant: str, name: str) -> None:
        self.same(lambda store: store.delete(RunKey(tenant, name)))

    @rule(tenant=TENANTS, conversation=CONVERSATIONS)
    def delete_conversation(self, tenant: str, conversation: str) -> None:
        self.same(lambda store: store.delete_conversation(tenant, conversation))

    @rule(tenant=TENANTS, value=st.binary(max_size=2), revision=st.integers(-1, 3))
    def put(self, tenant: str, value: bytes, revision: int) -> None:
        self.same(lambda store: store.put(tenant, "setting", value, revision))
        self.same(lambda store: store.get(tenant, "setting"))

    @rule()
    def reopen(self) -> None:
        for store in self.pair:
            self.runner.run(store.close())
            self.runner.run(store.open())
        self.claims.clear()

    @invariant()
    def everything_reads_the_same(self) -> None:
        reference, tested = (self.runner.run(asyncio.wait_for(self.everything(store), 100)) for store in self.pair)
        assert reference == tested
        for tenant in ("t", "u"):
            running = [run for run in reference[tenant, "runs"] if run.state in (2, 3)]
            active = [it for it in reference[tenant, "conversations"] if it.active_run_id]
            assert len(running) == len(active)

    async def everything(self, store: RunStore) -> dict[tuple[str, ...], Any]:
        """Read all there is; one journey for both, because each call by itself would cost a step most of its time."""
        found: dict[tuple[str, ...], Any] = {}
        for key in self.keys:
            found[key.tenant, key.run_id, "load"] = await outcome(store.load(key))
            found[key.tenant, key.run_id, "read"] = await outcome(store.read(key, 2))
            found[key.tenant, key.run_id, "inspect"] = settled(await outcome(store.inspect(key)))
        for tenant in ("t", "u"):
            found[tenant, "runs"] = await _items(store.list_runs, tenant, states=(), conversation_id="")
            found[tenant, "conversations"] = await _items(store.list_conversations, tenant)
            for name in ("c", "d"):
                found[tenant, name, "messages"] = await outcome(_items(store.list_messages, tenant, name))
                found[tenant, name, "history"] = await outcome(store.history(tenant, name, "r1"))
        return found


async def outcome(call: Awaitable[Any]) -> Any:
    """Return what a call gives, its refusal included."""
    try:
        return await asyncio.wait_for(call, 100)
    except EngineError as error:
        return error.reason, dict(error.metadata)
    except (StoreError, ValueError) as error:
        return type(error)


def settled(seen: Any) -> Any:
    """Return an inspection without the end of a lease, which each store keeps in its own way."""
    return replace(seen, ready_time=0.0) if isinstance(seen, Inspection) and seen.worker else seen


async def _items(listing: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> list[Any]:
    return list((await listing(*args, page_size=0, page_token="", **kwargs)).items)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tested", TESTED)
def test_a_store_answers_like_the_reference(tested: str, sound: Callable[[Path], None]) -> None:
    """Random operations on both stores give the same answers, errors and contents, and leave a sound file."""
    run_state_machine_as_test(
        type("Stores", (Stores,), {"tested": tested, "sound": staticmethod(sound)}),
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=True,
            database=None,
        ),
    )
