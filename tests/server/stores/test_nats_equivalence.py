"""Whatever is done to it, a NATS store answers like the in-memory reference. Time is the servers'; it stands still."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from dualclaw_server.engine.store import Claim, RunKey
from dualclaw_server.stores.nats import NatsStore, parse_address
from tests.nats_servers import NatsServers
from tests.server.stores.test_equivalence import NAMES, TENANTS, Stores

STEP = 1 / 64
"""Seconds of the records' clock between two operations: whole microseconds, and without rounding as a float."""


class NatsStores(Stores):
    """The same machine. What is to happen later happens after the test: nobody can move the servers' clocks."""

    servers: NatsServers

    def __init__(self) -> None:
        super().__init__()
        self.now = float(int(time.time()))
        address = parse_address(self.servers.url())
        self.undo.callback(self.servers.remove, address.name)
        self.pair = (self.pair[0], NatsStore(address, accept_loss=True, clock=lambda: self.now))

    def both(self, do: Callable[..., object]) -> list[object]:
        # What becomes due later is delivered later, so no two things are due at the same time.
        self.now += STEP
        return super().both(do)

    def pass_time(self) -> None:
        """No rule here."""

    @rule(tenant=TENANTS, name=NAMES, after=st.sampled_from([1000.0, 2000.0]))
    def wake(self, tenant: str, name: str, after: float) -> None:
        self.same(lambda store: store.wake(RunKey(tenant, name), self.now + after))

    @rule(at=st.integers(0, 9), delay=st.sampled_from([None, 0.0, 20.0, 3000.0]))
    def give_back(self, at: int, delay: float | None) -> None:
        self.now += STEP
        if self.claims:
            for claim in self.claims.pop(at % len(self.claims)):
                self.runner.run(claim.ack() if delay is None else claim.nak(delay))

    def claims_of_both(self) -> list[Claim | None]:
        # Servers deliver after a moment; where there is something to deliver it is waited for.
        self.now += STEP
        reference, tested = self.pair
        first = self.runner.run(reference.claim("default", "w", 0))
        return [first, self.runner.run(tested.claim("default", "w", 0 if first is None else 100))]

    @rule()
    def reopen(self) -> None:
        if len(self.claims) < 2:
            super().reopen()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("servers", "examples"), [("nats_r1", 12), ("nats_r3", 4)])
def test_a_nats_store_answers_like_the_reference(
    servers: str, examples: int, request: pytest.FixtureRequest, sound: Callable[[Path], None]
) -> None:
    """Random operations on both stores give the same answers, errors and contents."""
    run_state_machine_as_test(
        type(
            "NatsStores",
            (NatsStores,),
            {"servers": request.getfixturevalue(servers), "sound": staticmethod(sound)},
        ),
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a step costs a hundred milliseconds, too long for shrinking
        ),
    )
