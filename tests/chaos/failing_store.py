"""A store with a failpoint before and after each of its calls."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from dualclaw import Role, RunState
from dualclaw_server.engine.checkpoint import CallPhase, Checkpoint, load_checkpoint
from dualclaw_server.engine.store import Claim, Frame, RunKey, RunStore

from .failpoints import Failpoint

T = TypeVar("T")

_ENDS = {
    RunState.RUN_STATE_SUCCEEDED: "done",
    RunState.RUN_STATE_FAILED: "failed",
    RunState.RUN_STATE_CANCELLED: "cancelled",
    RunState.RUN_STATE_INTERRUPTED: "parked",
}
_GATE_POLL = 0.02


class Kinds:
    """Tells frames apart by what they carry."""

    def __init__(self) -> None:
        self._epochs: dict[RunKey, int] = {}
        self._started: dict[RunKey, frozenset[str]] = {}

    def of(self, key: RunKey, frame: Frame) -> str:
        """Return what a frame is, in the order of the rows here: the first that fits."""
        claims = frame.epoch > self._epochs.get(key, 0)
        self._epochs[key] = frame.epoch
        before = frozenset[str]() if claims else self._started.get(key, frozenset())
        checkpoint = load_checkpoint(frame.checkpoint)
        if frame.checkpoint:
            self._started[key] = _started(checkpoint)
        roles = {message.message.role for message in frame.messages}
        if frame.ends_segment:
            return f"{_ENDS[frame.state]}_parked" if claims else _ENDS[frame.state]
        if claims:
            if checkpoint.recoveries or not frame.checkpoint:  # a rewind may go out before the checkpoint does
                return "recovery"
            return "resume" if checkpoint.segment > 1 else "claim"
        if not frame.durable:
            return "text"
        if self._started[key] - before:
            return "started"
        if Role.ROLE_TOOL in roles:
            return "finished"
        return "answer" if Role.ROLE_ASSISTANT in roles else "checkpoint"


def _started(checkpoint: Checkpoint) -> frozenset[str]:
    return frozenset(
        state.call.id for state in checkpoint.calls if state.phase != CallPhase.CALL_PHASE_WAITING
    )  # fmt: skip


class FailpointStore:
    """A RunStore around another one. Calls that are not named here pass points too, by their names.

    Args:
        store: the real one.
        failpoint: where to die.
        gate: nothing is claimed before this file exists; None: at once.
        delay: seconds by which each append is late, so that whoever does not wait for one is found out.
    """

    def __init__(self, store: RunStore, failpoint: Failpoint, gate: Path | None = None, delay: float = 0.0) -> None:
        self._store = store
        self._failpoint = failpoint
        self._gate = gate
        self._kinds = Kinds()
        self._delay = delay
        self._last: asyncio.Future[int] | None = None

    def __getattr__(self, name: str) -> object:
        method = getattr(self._store, name)
        return self._around(name, method) if inspect.iscoroutinefunction(method) else method

    async def open(self) -> None:
        """Not a point: there is no server yet."""
        self._failpoint.collect_connections()
        await self._store.open()
        self._failpoint.watch_statements()

    async def close(self) -> None:
        """Not a point: nothing is at work any more."""
        await self._store.close()

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        """Takes effect in call order: it reaches the real store before this returns, or after those before it."""
        what = f"append.{self._kinds.of(key, frame)}"
        self._failpoint.at(f"{what}:before")
        if self._delay:
            committed: Awaitable[int] = asyncio.create_task(self._late(self._last, key, frame, expect))
            self._last = asyncio.ensure_future(committed)
        else:
            committed = self._store.append(key, frame, expect)
        return self._after(what, committed) if self._failpoint.watches(what) else committed

    async def claim(self, pool: str, worker: str, wait: float) -> "FailpointClaim | None":
        """The point after it is passed when there is an item."""
        while self._gate is not None and not self._gate.exists():  # noqa: ASYNC110  # a file tells of no change
            await asyncio.sleep(_GATE_POLL)
        self._failpoint.at("claim:before")
        claim = await self._store.claim(pool, worker, wait)
        if claim is None:
            return None
        self._failpoint.at("claim:after")
        return FailpointClaim(claim, self._failpoint)

    async def follow(self, key: RunKey, after: int) -> AsyncGenerator[Sequence[Frame], None]:
        """The second point is passed with the first frames in hand."""
        self._failpoint.at("follow:before")
        async with aclosing(self._store.follow(key, after)) as batches:
            async for frames in batches:
                self._failpoint.at("follow:first")
                yield frames

    def _around(self, name: str, method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def call(*args: object, **kwargs: object) -> T:
            self._failpoint.at(f"{name}:before")
            result = await method(*args, **kwargs)
            self._failpoint.at(f"{name}:after")
            return result

        return call

    async def _late(self, before: asyncio.Future[int] | None, key: RunKey, frame: Frame, expect: int) -> int:
        if before is not None:
            await asyncio.wait({before})
        await asyncio.sleep(self._delay)
        return await self._store.append(key, frame, expect)

    async def _after(self, what: str, committed: Awaitable[int]) -> int:
        version = await committed
        self._failpoint.at(f"{what}:after")
        return version


class FailpointClaim:
    """A claim with points around its end."""

    def __init__(self, claim: Claim, failpoint: Failpoint) -> None:
        self._claim = claim
        self._failpoint = failpoint

    def __getattr__(self, name: str) -> object:
        return getattr(self._claim, name)

    async def ack(self) -> None:
        """As the real one."""
        self._failpoint.at("ack:before")
        await self._claim.ack()
        self._failpoint.at("ack:after")

    async def nak(self, delay: float) -> None:
        """As the real one."""
        self._failpoint.at("nak:before")
        await self._claim.nak(delay)
        self._failpoint.at("nak:after")
