"""Who is reading a run: what on_disconnect CANCEL needs to know, also when readers are on other processes.

Rules

- A run started with CANCEL is cancelled once its starter has left and nobody has been attached for PATIENCE seconds.
  Whoever comes back in time saves the run. One that waits for people is not cancelled: who asked it has to leave it
  alone for that.
- Presence counts the readers of this process. As long as there are some, it says so in the store, by writing the run's
  mark anew again and again. Whoever waits for a run's end looks whether the mark has changed since it last looked:
  revisions need no clocks that agree. For a run that was not started with CANCEL nothing is written.
- The worker reports such a run when it takes it up, because its starter may have left before it ever was a reader:
  while the run was being stored, or with the process before this one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager

from dualclaw import DisconnectPolicy, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.checkpoint import UnreadableState, load_record
from dualclaw_server.engine.store import RunKey, RunStore, StoreError

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds without a reader."""
_CANCEL = DisconnectPolicy.DISCONNECT_POLICY_CANCEL
_ABANDONABLE = frozenset({RunState.RUN_STATE_QUEUED, RunState.RUN_STATE_RUNNING})


class Presence:
    """Counts readers; has a run cancelled that nobody reads any more.

    Args:
        store: where marks are kept.
        cancel: stores the wish that a run ends; may raise EngineError and StoreError.
        patience: seconds without a reader.
    """

    def __init__(
        self, store: RunStore, cancel: Callable[[RunKey], Awaitable[None]], patience: float = PATIENCE
    ) -> None:
        self._store = store
        self._cancel = cancel
        self._patience = patience
        self._readers: dict[RunKey, int] = {}
        self._starter_left: set[RunKey] = set()
        self._timers: dict[RunKey, asyncio.TimerHandle] = {}
        self._marking: dict[RunKey, asyncio.Task[None]] = {}
        self._seen: dict[RunKey, int] = {}
        """Revision of the mark that says nothing new: this process's own, or the one it saw last."""
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def attached(self, key: RunKey, policy: DisconnectPolicy.ValueType | None = None) -> Iterator[None]:
        """Count a reader while it is inside; ``policy`` is given by the run's starter, others do not know it."""
        self._readers[key] = self._readers.get(key, 0) + 1
        self._stop_timer(key)
        if key not in self._marking and (policy is None or policy == _CANCEL):
            self._marking[key] = self._start(self._mark(key, known=policy is not None))
        try:
            yield
        finally:
            if policy == _CANCEL:
                self._starter_left.add(key)
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
                if (marking := self._marking.pop(key, None)) is not None:
                    marking.cancel()
                if key in self._starter_left:
                    self._wait(key)
                else:
                    self._seen.pop(key, None)

    def begun(self, key: RunKey) -> None:
        """A run with CANCEL is at work, whether or not anybody reads it yet."""
        self._starter_left.add(key)
        if key not in self._readers and key not in self._timers:
            self._wait(key)

    def forget(self, key: RunKey) -> None:
        """The run has come to rest: nothing is left to cancel."""
        self._starter_left.discard(key)
        self._seen.pop(key, None)
        self._stop_timer(key)

    def close(self) -> None:
        """Drop every timer and every task."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="presence")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop_timer(self, key: RunKey) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def _wait(self, key: RunKey) -> None:
        self._timers[key] = asyncio.get_running_loop().call_later(self._patience, self._look, key)

    def _look(self, key: RunKey) -> None:
        self._timers.pop(key, None)
        self._start(self._give_up(key))

    async def _give_up(self, key: RunKey) -> None:
        """Cancel a run unless somebody reads it on another process."""
        try:
            if (await self._store.head(key)).state not in _ABANDONABLE:
                self.forget(key)
                return
            mark = await self._store.get(key.tenant, _mark_name(key))
            seen, self._seen[key] = self._seen.get(key, 0), mark[1] if mark is not None else 0
            if key in self._readers or key in self._timers:  # somebody came meanwhile
                return
            if self._seen[key] != seen:
                self._wait(key)
                return
            await self._cancel(key)
            self.forget(key)
        except EngineError:  # deleted meanwhile
            self.forget(key)
        except StoreError as error:
            log.warning("run %s, which nobody reads, cannot be cancelled yet: %r", key.run_id, error)
            self.begun(key)  # so that it is tried again

    async def _mark(self, key: RunKey, *, known: bool) -> None:
        """Say again and again that the run is read here, unless it was started without CANCEL.

        Its starter (``known``) has time until a worker that has just taken it up loses its patience.
        """
        if known:
            await asyncio.sleep(self._patience / 3)
        while True:
            try:
                known = known or await self._ends_alone(key)
                if not known:
                    return
                found = await self._store.get(key.tenant, _mark_name(key))
                made = await self._store.put(key.tenant, _mark_name(key), b"", found[1] if found is not None else 0)
                if made is not None:
                    self._seen[key] = made
            except (EngineError, UnreadableState):
                return
            except StoreError as error:
                log.warning("that run %s is read here cannot be told to other processes: %r", key.run_id, error)
            await asyncio.sleep(self._patience / 3)

    async def _ends_alone(self, key: RunKey) -> bool:
        """Tell whether a run was started with CANCEL and is not over."""
        loaded = await self._store.load(key)
        return loaded.head.state in _ABANDONABLE and load_record(loaded.record).request.options.on_disconnect == _CANCEL


def _mark_name(key: RunKey) -> str:
    return f"readers/{key.run_id}"
