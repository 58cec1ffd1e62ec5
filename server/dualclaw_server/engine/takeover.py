"""Taking a run over: from what is saved of it to a segment at work.

Rules

- A claim is made good by a frame with the next epoch. Whatever another writer does from then on fails. Of two who
  claim at once, one wins; the other has started nothing by then. Only a new run does not wait for its claim, to be
  faster: its first model call may turn out to be for nothing, but a tool starts after a frame of its own.
- A run that had already begun is recovered: the log is folded up to its checkpoint, and text beyond it is withdrawn
  by one rewind.
- A parked run begins a new segment.
- A run's wall time is time that somebody worked on it. While it is parked it stands still, and from the last frame of
  whoever worked on it to its takeover: an engine that was away for an hour does not use up the time of its runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from google.protobuf.timestamp_pb2 import Timestamp

from dualclaw import EngineEvent, Run, RunResponse, RunState
from dualclaw.fold import RunView
from dualclaw_server.engine import questions
from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.checkpoint import (
    FORMAT,
    Checkpoint,
    DamagedState,
    RunRecord,
    Stage,
    load_checkpoint,
    load_record,
)
from dualclaw_server.engine.clock import set_now
from dualclaw_server.engine.frames import FrameWriter
from dualclaw_server.engine.ids import new_trace_id
from dualclaw_server.engine.inbox import find_cancel, resumes_in
from dualclaw_server.engine.interceptor import Interceptor
from dualclaw_server.engine.lease import Lease
from dualclaw_server.engine.model import ChatModel
from dualclaw_server.engine.pace import Pace
from dualclaw_server.engine.salvage import salvage
from dualclaw_server.engine.scope import Scope
from dualclaw_server.engine.segment import Segment
from dualclaw_server.engine.store import Claim, Head, Loaded, RunMessage, RunStore
from dualclaw_server.engine.tool import ToolOutput
from dualclaw_server.engine.trace import ASIDE, Trace

log = logging.getLogger(__name__)


def read_state(loaded: Loaded) -> tuple[RunRecord, Checkpoint]:
    """Return what is saved of a run.

    In the place of a damaged checkpoint there is an empty one when the run is to end, for else nobody could ever end
    it; ``take`` fills it from the log.

    Raises:
        UnreadableState: a newer engine wrote it, or it is damaged and the run is not to end.
    """
    record = load_record(loaded.record)
    try:
        return record, load_checkpoint(loaded.checkpoint)
    except DamagedState as damaged:
        if find_cancel(loaded.unread) is None:
            raise
        log.warning("run %s is cancelled, though %s", loaded.head.key.run_id, damaged)
        return record, Checkpoint(format=FORMAT, trace_id=record.trace_id)


class Takeover:
    """Opens segments of claimed runs.

    Args:
        store, agents, model: as the runner's.
    """

    def __init__(self, store: RunStore, agents: Mapping[str, Agent], model: ChatModel) -> None:
        self._store = store
        self._agents = agents
        self._model = model
        self._abandoned: set[asyncio.Task[ToolOutput]] = set()
        self._pace: Pace | None = None
        """Of the loop that the first run is taken over in."""

    async def take(
        self, claim: Claim, loaded: Loaded, record: RunRecord, checkpoint: Checkpoint
    ) -> tuple[Segment, bool]:
        """Take over the log and bring the run to where its checkpoint says it is.

        Returns the segment, and whether it goes on from a park and has not got beyond its claim.
        """
        key, head = loaded.head.key, loaded.head
        view, text, reasoning = await self._fold(head, loaded.checkpoint_seq)
        cancel = find_cancel(loaded.unread)
        parked = head.state == RunState.RUN_STATE_INTERRUPTED
        if loaded.checkpoint and not checkpoint.segment:
            salvage(checkpoint, loaded, view)
        if not loaded.checkpoint:
            checkpoint.segment, checkpoint.segment_first_seq = 1, 1
            checkpoint.trace_id = record.trace_id
            checkpoint.stage = Stage.STAGE_REASON
            set_now(checkpoint.start_time)
        elif parked:
            checkpoint.segment += 1
            checkpoint.segment_first_seq = head.last_seq + 1
            checkpoint.recoveries = 0
            checkpoint.switches.clear()
            resumed = next((resume.trace_id for _, resume in resumes_in(loaded.unread)), "")
            checkpoint.trace_id = (cancel.trace_id if cancel is not None else resumed) or new_trace_id()
            if checkpoint.HasField("park_time"):
                _leave_out(checkpoint, checkpoint.park_time)
                checkpoint.ClearField("park_time")
        else:
            checkpoint.recoveries += 1
            _leave_out(checkpoint, head.run.update_time)
        begins = parked or (checkpoint.segment > 1 and head.last_seq < checkpoint.segment_first_seq)
        history = await self._store.history(key.tenant, record.request.conversation_id, key.run_id)
        trace = Trace.of_run(loaded, record, checkpoint, history)
        trace.recovered = checkpoint.recoveries > 0
        envelope = EngineEvent(
            trace_id=checkpoint.trace_id, tenant_id=key.tenant, claw=record.request.claw, run_id=key.run_id
        )
        self._pace = self._pace or Pace()
        writer = FrameWriter(
            self._store, key, view, epoch=head.epoch + 1, version=head.version, envelope=envelope, pace=self._pace
        )
        below: dict[str, list[RunMessage]] = {}
        for message in loaded.messages:
            if message.scope not in ("", ASIDE):
                below.setdefault(message.scope, []).append(message)
        trace.take_call_ids(message.message for messages in below.values() for message in messages)
        segment = Segment(
            self._store,
            self._agents if trace.agent in self._agents else {**self._agents, trace.agent: _stand_in(trace.agent)},
            self._model,
            trace,
            writer,
            _copy(head.run),
            lease=Lease(claim, writer),
            below=below,
            abandoned=self._abandoned,
        )
        segment.scope = Scope.bare(segment, segment.agent, trace)
        if head.state == RunState.RUN_STATE_RUNNING:
            if (writer.shown(), writer.shown_reasoning()) != (text, reasoning):
                segment.rewind(text, reasoning, "the engine was restarted", checkpoint.recoveries)
            claimed = segment.save()  # the claim; what is only cancelled is claimed by the frame that ends it
            if loaded.checkpoint:
                await asyncio.shield(claimed)
        elif parked and cancel is None:
            await asyncio.shield(segment.claim())
        return segment, begins

    async def _fold(self, head: Head, checkpoint_seq: int) -> tuple[RunView, str, str]:
        """Fold the whole log; returns the view, and the segment's text and reasoning as they were at the checkpoint."""
        view = RunView()
        text = reasoning = ""
        while view.last_seq < head.last_seq:
            for frame in await self._store.read(head.key, view.last_seq):
                for event in RunResponse.FromString(frame.body).events:
                    view.apply(event)
                    if event.seq == checkpoint_seq and view.terminal is None:  # else they are the segment's before
                        text, reasoning = view.text, view.reasoning
        return view, text, reasoning


class _Withhold(Interceptor):
    """Shows no arguments: whoever knows what may be shown of them is gone with its agent."""

    def mask(self, value: object) -> object:
        return {} if isinstance(value, dict) else value


def _stand_in(name: str) -> Agent:
    """Return an agent that can do nothing, in whose name a run can be cancelled."""
    return Agent(name, interceptors=[_Withhold()])


def _leave_out(checkpoint: Checkpoint, since: Timestamp) -> None:
    """Leave the time since a moment out of a run's wall time."""
    gone = max(0, time.time_ns() // 1_000_000 - since.ToMilliseconds())
    below = (state.child for state in questions.calls_below(checkpoint) if state.HasField("child"))
    for clock in (checkpoint.start_time, *(child.start_time for child in below)):
        clock.FromMilliseconds(clock.ToMilliseconds() + gone)


def _copy(run: Run) -> Run:
    copied = Run()
    copied.CopyFrom(run)
    return copied
