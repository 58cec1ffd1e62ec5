"""Follows the runs a chat is still to hear of, until they have ended: parked ones, and ones that take long.

- A run that is approved on the page, at the command line or in another chat goes on elsewhere; whoever asked hears
  of it where they asked. The watcher attaches after what the chat knows, over parked phases, to the end.
- What it reads goes through the chat's queue like any answer, behind what is being answered there. There the state
  file decides whether the chat knows it already, because a reply of its own has brought it.
- Followed runs are in the state file: after a restart, or when the process that followed them has died, another goes
  on. At most ``max_followed`` streams are open at a time; if there are more runs they take turns.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from dualclaw.errors import EngineError
from dualclaw_clients.engine_client import EngineUnreachable
from dualclaw_clients.im.connector import ChatKey, Connector
from dualclaw_clients.im.outgoing import Outgoing, Told, pieces_of
from dualclaw_clients.im.reading import Reader, is_late
from dualclaw_clients.im.state import RelayState, StateError
from dualclaw_clients.im.state_watches import Watch

log = logging.getLogger(__name__)

Deliver = Callable[[Connector, Watch, Outgoing], Awaitable[None]]
"""Puts what a chat is to hear of a run into the chat's queue."""

TURN: Final = 600.0
SHORT_TURN: Final = 20.0
"""Seconds a run is followed before it makes room, if others wait for a stream."""
_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
_LAST_SEQ = 2**31 - 1


class Watcher:
    """Follows runs; each in a task of its own.

    Args:
        connectors: by name.
        deliver: takes what a chat is to hear.
        max_followed: streams that are open at the same time.
    """

    def __init__(
        self,
        reader: Reader,
        connectors: Mapping[str, Connector],
        deliver: Deliver,
        group: asyncio.TaskGroup,
        *,
        max_followed: int,
    ) -> None:
        self._reader = reader
        self._state: RelayState = reader.state
        self._connectors = connectors
        self._deliver = deliver
        self._group = group
        self._max = max_followed
        self._slots = asyncio.Semaphore(max_followed)
        self._tasks: dict[tuple[ChatKey, str], asyncio.Task[None]] = {}

    async def take_over(self) -> None:
        """Go on with what processes that have died followed."""
        for watch in await self._state.adopt_watches(self._connectors):
            self.follow(watch)

    def follow(self, watch: Watch) -> None:
        """Follow a run, unless it is followed."""
        key = (watch.chat, watch.run_id)
        if key not in self._tasks:
            task = self._tasks[key] = self._group.create_task(self._follow(watch))
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def stop(self) -> None:
        """Follow nothing any more; what was followed stays in the state file."""
        for task in self._tasks.values():
            task.cancel()

    async def _follow(self, first: Watch) -> None:
        connector = self._connectors[first.chat.platform]
        pause = _PAUSE
        try:
            while (watch := await self._state.watched(first.chat, first.run_id)) is not None:
                async with self._slots:
                    problem = await self._read(connector, watch)
                if problem is None:
                    return
                if is_late(problem):
                    pause = _PAUSE
                    continue
                if not isinstance(problem, EngineUnreachable):
                    log.warning("run %s is not followed for now: %s", watch.run_id, problem)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        except StateError as error:
            log.error("run %s is not followed any more: %s", first.run_id, error)
        except Exception:  # one run must not end the relay
            log.exception("run %s is not followed any more", first.run_id)

    async def _read(self, connector: Connector, watch: Watch) -> EngineError | None:
        """Read what a chat has not heard of a run; returns why there may be more, None if there is not."""
        engine = self._reader.engine_for(connector, watch.chat, watch.user_id)
        adapter = self._reader.adapter(connector)
        turn = TURN if len(self._tasks) <= self._max else SHORT_TURN
        try:
            async with engine.attach(watch.run_id, after_seq=watch.told, wait=True, timeout=turn) as run:
                async for event in run:
                    await adapter(event)
                    if event.HasField("done") or event.HasField("error"):
                        outgoing = await self._reader.outgoing(connector, watch.chat, watch.run_id, adapter)
                        await self._deliver(connector, watch, outgoing)
        except EngineError as error:
            if error.reason not in {"UNKNOWN_RUN", "LOG_COMPACTED", "AFTER_SEQ_OUT_OF_RANGE"}:
                return error
            if error.reason == "LOG_COMPACTED":
                text = self._reader.texts.run_lost.format(run=watch.run_id)
                told = (Told(watch.run_id, _LAST_SEQ, over=True),)
                await self._deliver(connector, watch, Outgoing(pieces_of(text, connector.limit), told=told))
                return None
            log.warning("run %s cannot be followed any more: %s", watch.run_id, error)
            await self._state.end_watch(watch.chat, watch.run_id)
        return None
