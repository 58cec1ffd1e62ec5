"""The worker: claims runs from the store and brings each to its end, or puts it back.

Rules

- A claimed run is taken over (``takeover``), and its agent goes on from the checkpoint.
- The work item is acknowledged only after this worker's own terminal frame. In every other case it is put
  back: when the agent is not here, when the state is newer than this engine, when the store fails, when the
  process drains. Only to cancel a run its agent is not needed: it may be gone for good.
- Several claims wait side by side (``CLAIMERS``), so that runs that come at once share the store's commits and round
  trips. Each has a place within the capacity before it asks. While the store fails, one of them goes on trying.
- What cannot be worked on is tried again after a delay that grows (``backoff``), so a full disk or a missing agent
  makes no busy loop.
- Whoever claims a run while its last writer still writes is refused, though the run is its own: it looks again soon
  (``_CONTENDED``), for nothing has failed. Who is refused because it has lost the run puts nothing back.
- A run whose lease is lost is dropped: its calls under way are abandoned, and nothing is started for it any more
  (``lease``). Interceptors are told "put_back", for somebody goes on with the run.
- A run that has been recovered MAX_RECOVERIES times without getting any further takes its worker down every time; it
  is failed, whatever fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dualclaw import DisconnectPolicy, RunState, StopReason
from dualclaw.errors import EngineError
from dualclaw_server.engine import questions
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.backoff import FIRST, MISSING_MOST, Backoff
from dualclaw_server.engine.checkpoint import CallPhase, UnreadableState
from dualclaw_server.engine.inbox import find_cancel, is_due, resumes_in
from dualclaw_server.engine.lease import LeaseLost
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.outcome import End, Fail
from dualclaw_server.engine.parked import Parked, Transferred
from dualclaw_server.engine.resume import take_answers
from dualclaw_server.engine.scope import Scope
from dualclaw_server.engine.segment import Segment
from dualclaw_server.engine.store import FINAL, Claim, Fenced, InboxSignal, RunKey, RunStore, StoreError
from dualclaw_server.engine.takeover import Takeover, read_state
from dualclaw_server.engine.watch import Watch

log = logging.getLogger(__name__)

MAX_RECOVERIES = 16
RETRY = FIRST
"""Seconds before an item that cannot be worked on now is delivered again, the first time."""
_CONTENDED, _CONTENDED_MOST = 0.1, 5.0
"""Seconds before a run that another writer was faster at is looked at again; the first time, and at most."""
CLAIMERS = 8
"""Claims under way at most. A process that freezes keeps what these are given for a lease, so they are few."""
_CLAIM_WAIT = 5.0
_CLAIM_RETRY = 1.0
_CLAIM_RETRY_MOST = 30.0
_LOOK = 0.5
"""Seconds between two looks at the leases of runs at work."""
_STOP_TIMEOUT = 10.0


@dataclass(slots=True, eq=False)
class _Work:
    """A run this process works on."""

    claim: Claim
    signalled: bool = False
    """True once something has reached the run's inbox."""
    segment: Segment | None = None
    """What is at work; None: nothing yet."""
    watch: Watch | None = None
    """What its agent can be ended by; None: it is not at work."""


class Worker:
    """Works on runs.

    Args:
        store, agents, model: as the runner's.
        name: name of this process in claims.
        capacity: runs worked on at once; more wait in the store.
        retry: seconds before an item that cannot be worked on now is delivered again, the first time.
        begun: called with each run that is to be cancelled when nobody reads it, as work on it begins.
        ended: called with each run that has come to rest.
    """

    def __init__(
        self,
        store: RunStore,
        agents: Mapping[str, Agent],
        model: ChatModel,
        *,
        name: str,
        capacity: int,
        retry: float,
        begun: Callable[[RunKey], None],
        ended: Callable[[RunKey], None],
    ) -> None:
        self._store = store
        self._agents = agents
        self._name = name
        self._backoff = Backoff(retry)
        self._contended = Backoff(_CONTENDED, _CONTENDED_MOST)
        self._begun = begun
        self._ended = ended
        self._capacity = asyncio.Semaphore(capacity)
        self._works: dict[RunKey, _Work] = {}
        self._under_way: set[_Work] = set()
        """Also works that this very process has lost, and the run of which it may have taken anew."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._store_answers = asyncio.Event()
        self._takeover = Takeover(store, agents, model)
        self._draining = asyncio.Event()
        store.on_signal(self._on_signal)

    async def serve(self) -> None:
        """Claim and work on runs until drained or cancelled."""
        stopping = asyncio.create_task(self._draining.wait(), name="drain")
        try:
            async with asyncio.TaskGroup() as claimers:
                for number in range(CLAIMERS):
                    claimers.create_task(self._claim_on(stopping, scout=number == 0), name=f"claims {number}")
        finally:
            stopping.cancel()

    async def _claim_on(self, stopping: asyncio.Task[Literal[True]], *, scout: bool) -> None:
        """Claim one run after another. After a failure the scout tries again, and the others wait for it."""
        failed = 0
        while not self._draining.is_set():
            await self._capacity.acquire()
            claim = None
            try:
                claim = await self._next_claim(stopping)
            except StoreError as error:
                self._store_answers.clear()
                failed += 1
                problem = error
            else:
                failed = 0
                if scout:
                    self._store_answers.set()
            finally:
                if claim is None:
                    self._capacity.release()
            if claim is not None:
                task = asyncio.create_task(self._work(claim), name=f"run {claim.key.run_id}")
                self._tasks.add(task)
                task.add_done_callback(self._worked)
            elif failed and scout:
                delay = min(_CLAIM_RETRY * 2.0 ** min(failed - 1, 60), _CLAIM_RETRY_MOST)
                log.error("the store gives no work: %r; trying again in %g s", problem, delay)
                await asyncio.wait((stopping,), timeout=delay)
            elif failed:
                answers = asyncio.create_task(self._store_answers.wait(), name="store")
                await asyncio.wait((stopping, answers), return_when=asyncio.FIRST_COMPLETED)
                answers.cancel()

    async def drain(self, grace: float) -> None:
        """Claim no more, give runs ``grace`` seconds to end, then put the rest back for another process."""
        self._draining.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace)
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_STOP_TIMEOUT)

    async def _next_claim(self, stopping: asyncio.Task[Literal[True]]) -> Claim | None:
        """Return the next item; None when there is none, or when the process drains. Raises StoreError."""
        claiming = asyncio.ensure_future(self._store.claim("default", self._name, _CLAIM_WAIT))
        taken = False
        try:
            await asyncio.wait({claiming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            taken = claiming.done() and not self._draining.is_set()
            return claiming.result() if taken else None
        finally:
            if not taken:
                await self._give_back(claiming)

    async def _give_back(self, claiming: asyncio.Future[Claim | None]) -> None:
        """End a claim that is not wanted any more without losing an item that arrives at this very moment."""
        claiming.cancel()
        await asyncio.wait({claiming})
        if not claiming.cancelled() and claiming.exception() is None:
            claim = claiming.result()
            if claim is not None:
                await claim.nak(0)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._capacity.release()
        if not task.cancelled() and task.exception() is not None:
            log.error("a run's worker failed", exc_info=task.exception())

    async def _work(self, claim: Claim) -> None:
        """Work on one item to its end, or put it back."""
        key = claim.key
        work = self._works[key] = _Work(claim)
        self._under_way.add(work)
        self._look_later()
        again: float | None
        try:
            again = await self._work_on(work)
        except EngineError as error:
            if error.reason in ("UNKNOWN_RUN", "UNKNOWN_CONVERSATION"):
                log.info("run %s is gone: %s", key.run_id, error.message)
                again = None
            else:
                again = self._backoff.delay(key)
                log.error("run %s is put back for %g s: %s", key.run_id, again, error.message)
        except UnreadableState as error:
            again = self._backoff.delay(key)
            log.warning("run %s is left as it is, to be looked at again in %g s: %s", key.run_id, again, error)
        except LeaseLost as error:
            again = 0.0
            log.warning("run %s is dropped: %s", key.run_id, error)
        except Fenced as error:
            again = self._contended.delay(key)
            log.warning("run %s is put back for %g s, for another writer was faster: %s", key.run_id, again, error)
        except StoreError as error:
            again = self._backoff.delay(key)
            log.warning("run %s is put back for %g s: %r", key.run_id, again, error)
        except asyncio.CancelledError:
            await asyncio.shield(_settle(key, claim.nak(0)))
            raise
        except BaseException:
            await _settle(key, claim.nak(self._backoff.delay(key)))
            raise
        finally:
            self._under_way.discard(work)
            if self._works.get(key) is work:
                del self._works[key]
        if again is None:
            self._backoff.forget(key)
            self._contended.forget(key)
            self._ended(key)
            await _settle(key, claim.ack())
        else:
            await _settle(key, claim.nak(again))

    async def _work_on(self, work: _Work) -> float | None:
        """Returns None when there is nothing left to do for this item, else in how many seconds to try again."""
        claim = work.claim
        loaded = await self._store.load(claim.key)
        if loaded.head.state in FINAL:
            return None
        record, checkpoint = read_state(loaded)
        now = time.time()
        if loaded.head.state != RunState.RUN_STATE_RUNNING and not is_due(loaded, checkpoint, now):
            expiry = questions.next_expiry(checkpoint)
            # what brought us here may have been the timer of that question, which is gone now, by a clock that is ahead
            return expiry - now if expiry is not None else None
        name = checkpoint.agent or record.request.agent
        if name not in self._agents and find_cancel(loaded.unread) is None:
            delay = self._backoff.delay(claim.key, MISSING_MOST)
            log.warning("run %s is put back for %g s: agent %s is not here", claim.key.run_id, delay, name)
            return delay
        if record.request.options.on_disconnect == DisconnectPolicy.DISCONNECT_POLICY_CANCEL:
            self._begun(claim.key)
        segment, begins = await self._takeover.take(claim, loaded, record, checkpoint)
        work.segment = segment
        unread = loaded.unread
        del loaded, record, checkpoint  # a run may be at work for long, and only its beginning needs them here
        try:
            await self._drive(segment, work, unread, begins=begins)
        finally:
            segment.close()
        return None

    async def _drive(self, segment: Segment, work: _Work, unread: Sequence[InboxSignal], *, begins: bool) -> None:
        """Run the agent to its end, or to a question, a cancel, or the end of its time."""
        if find_cancel(unread) is not None:
            segment.signals = [signal.signal_id for signal in unread]
            await segment.halt(StopReason.STOP_REASON_CANCELLED, segment.texts.cancelled)
            return
        if segment.trace.checkpoint.recoveries > MAX_RECOVERIES:
            await _give_up(segment)
            return
        if begins or questions.open_items(segment.trace.checkpoint) or resumes_in(unread):
            await take_answers(segment, self._store)
            if begins and questions.open_items(segment.trace.checkpoint):
                await segment.park()
                return
        watch = work.watch = Watch(self._store, segment)
        running = asyncio.create_task(_work_agents(segment, watch), name="strategy")
        running.add_done_callback(watch.ended)
        if work.signalled:
            watch.signal()

        def lost(error: BaseException) -> None:
            segment.stopping = "put_back"
            if names := _at_work(segment):
                log.warning("run %s: %r; calls under way are abandoned: %s", work.claim.key.run_id, error, names)
            running.cancel()

        segment.writer.on_failure = lost
        try:
            end = await watch.end()
            if running.done():
                await self._conclude(segment, running)
            elif end == "cancelled":
                segment.signals += watch.signals
                segment.stopping = "cancelled"
                await _stop(running)
                await segment.halt(StopReason.STOP_REASON_CANCELLED, segment.texts.cancelled)
            else:
                segment.stopping = "budget_exceeded"
                await _stop(running)
                await segment.halt(StopReason.STOP_REASON_BUDGET_EXCEEDED, segment.texts.wall_time)
        finally:
            work.watch = None
            watch.close()
            segment.stopping = segment.stopping or "put_back"
            await _stop(running)

    async def _conclude(self, segment: Segment, running: asyncio.Task[StopReason.ValueType]) -> None:
        """End the segment the way its agent ended."""
        if segment.writer.failure is not None:
            raise segment.writer.failure
        if running.cancelled():
            error: BaseException | None = asyncio.CancelledError("cancelled from inside")
        else:
            error = running.exception()
        match error:
            case None:
                await segment.finish(running.result())
            case Parked():
                await segment.park()
            case End():
                await segment.end(error)
            case Fail():
                await segment.fail(error.error)
            case StoreError():
                raise error
            case EngineError():
                await segment.fail(error)
            case _:
                log.error("run %s failed", segment.trace.key.run_id, exc_info=error)
                trace_id = segment.trace.checkpoint.trace_id
                await segment.fail(
                    EngineError("INTERNAL", f"The engine failed on this run; its log has more under trace {trace_id}.")
                )

    def _look_later(self) -> None:
        """See that leases are looked at while there is work."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK, self._look)

    def _look(self) -> None:
        """Have work end whose lease is lost: a call under way may never come to the next check."""
        self._looking = None
        for work in tuple(self._under_way):
            if work.segment is not None:
                with contextlib.suppress(StoreError):
                    work.segment.lease.check()
        if self._under_way:
            self._look_later()

    def _on_signal(self, key: RunKey) -> None:
        work = self._works.get(key)
        if work is not None:
            work.signalled = True
            if work.watch is not None:
                work.watch.signal()


async def _settle(key: RunKey, settling: Awaitable[None]) -> None:
    """Give a work item back to a store that may not answer: then its lease runs out by itself."""
    try:
        await settling
    except StoreError as error:
        log.warning("the work item of run %s cannot be given back before its lease ends: %r", key.run_id, error)


def _at_work(segment: Segment) -> str:
    """Return the names of the calls that have begun and not ended."""
    calls = questions.calls_below(segment.trace.checkpoint)
    return ", ".join(state.call.name for state in calls if state.phase == CallPhase.CALL_PHASE_STARTED)


async def _give_up(segment: Segment) -> None:
    """End a run that takes every worker down, in the plainest way if the usual one does it."""
    error = EngineError("INTERNAL", "The run was given up after too many restarts of its engine.")
    try:
        await segment.fail(error)
    except StoreError:
        raise
    except Exception:
        log.exception("run %s cannot even be failed; its turn stays as it is", segment.trace.key.run_id)
        await segment.fail_plainly(error)


async def _work_agents(segment: Segment, watch: Watch) -> StopReason.ValueType:
    """Have the agent in control work, and whoever it hands over to after it."""
    trace = segment.trace
    while True:
        segment.scope = scope = await Scope.open(segment, segment.agent, trace)
        watch.set_clock()
        try:
            return await scope.run()
        except Transferred as transferred:
            trace.checkpoint.agent = trace.agent = transferred.agent
            trace.checkpoint.transfers += 1
            trace.checkpoint.ClearField("plan")  # it was the other's
            segment.save()


async def _stop(task: asyncio.Task[object]) -> None:
    """Cancel a task and wait until it has ended, whatever with; one that does not obey is left behind."""
    task.cancel()
    if not task.done():
        await asyncio.wait({task}, timeout=_STOP_TIMEOUT)
    if not task.done():
        log.error("task %s ignores its cancellation and is left behind", task.get_name())
    elif not task.cancelled():
        task.exception()
