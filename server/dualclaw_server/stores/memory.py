"""MemoryStore: the reference. Everything in plain dictionaries, every method whole between two awaits.

It is what the other stores are compared with, so it does the obvious thing everywhere; nothing survives
the process. Protobuf messages are kept as bytes, so a caller who changes one afterwards changes nothing here
(what ``history`` gives is never changed by anyone, see ``histories``).
Leases have no clock: whoever could take over lives in the same process, and its death ends everything. To
operators each looks as if it had just been renewed.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from itertools import islice

from dualclaw import BusyPolicy, Conversation, Message, Run, RunState
from dualclaw_server.engine.history import History
from dualclaw_server.engine.store import (
    FINAL,
    MAX_QUEUED,
    Answers,
    Claim,
    Created,
    Frame,
    Head,
    Inspection,
    Loaded,
    NewRun,
    Page,
    RunKey,
    Unavailable,
)
from dualclaw_server.stores import records
from dualclaw_server.stores.bell import Bell
from dualclaw_server.stores.histories import Histories
from dualclaw_server.stores.live import MAX_PENDING, Live
from dualclaw_server.stores.memory_state import (
    StoredConversation,
    StoredMessage,
    StoredRun,
    StoredSignal,
    page_of,
)
from dualclaw_server.stores.memory_work import Work
from dualclaw_server.stores.records import INTERRUPTED, LEASE, QUEUED, RUNNING, Clock


class MemoryStore:
    """A RunStore in memory.

    Args:
        clock: seconds since the epoch.
        max_pending: bytes of live frames one follower may keep waiting.
    """

    def __init__(self, *, clock: Clock = time.time, max_pending: int = MAX_PENDING) -> None:
        self._clock = clock
        self._live = Live(max_pending)
        self._bell = Bell(clock)
        self._work = Work(clock, self._bell)
        self._histories = Histories()
        self._callbacks: list[Callable[[RunKey], None]] = []
        self._opened = False
        self._numbers = 0
        self._conversations: dict[tuple[str, str], StoredConversation] = {}
        self._runs: dict[RunKey, StoredRun] = {}
        self._requests: dict[tuple[str, str], tuple[StoredRun, int, str]] = {}
        self._settings: dict[tuple[str, str], tuple[bytes, int]] = {}

    async def open(self) -> None:
        """Make it ready."""
        self._opened = True

    async def close(self) -> None:
        """End followers and claims; what is stored stays until the object goes."""
        if not self._opened:
            return
        self._opened = False
        self._live.close()
        self._bell.close()
        self._work.release(self._runs.values())

    def _check_open(self) -> None:
        if not self._opened:
            raise Unavailable("the store is not open")

    def _run(self, key: RunKey) -> StoredRun:
        self._check_open()
        run = self._runs.get(key)
        if run is None:
            raise records.unknown_run()
        return run

    def _conversation(self, tenant: str, conversation_id: str) -> StoredConversation:
        self._check_open()
        conversation = self._conversations.get((tenant, conversation_id))
        if conversation is None:
            raise records.unknown_conversation()
        return conversation

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def create(self, new: NewRun) -> Created:
        """Store a new run with its work item, or return the one its request_id already made."""
        self._check_open()
        tenant = new.key.tenant
        if known := self._known(tenant, new.request_id, new.fingerprint):
            return known
        if new.key in self._runs:
            raise ValueError("a run with this id exists")
        conversation = self._conversations.get((tenant, new.conversation_id))
        if conversation is None and not new.new_conversation:
            raise records.unknown_conversation()
        rivals: list[StoredRun] = []
        if conversation is not None and conversation.active is not None:
            waiting = conversation.queue
            if new.on_busy == BusyPolicy.BUSY_POLICY_REPLACE:
                rivals = [conversation.active, *waiting]
            elif new.on_busy != BusyPolicy.BUSY_POLICY_QUEUE:
                raise records.conversation_busy(conversation.active.key.run_id)
            elif len(waiting) >= MAX_QUEUED:
                raise records.overloaded(len(waiting))
        now = records.micros(self._clock)
        if conversation is None:
            conversation = StoredConversation(self._number(), tenant, new.conversation_id, new.title, now, now)
            self._conversations[tenant, new.conversation_id] = conversation
        run = StoredRun(
            number=self._number(),
            key=new.key,
            conversation=conversation,
            pool=new.pool,
            record=new.record,
            info=new.run.SerializeToString(),
            created=now,
            updated=now,
            state=QUEUED,
            messages={0: StoredMessage(new.message.SerializeToString())},
        )
        self._runs[new.key] = run
        self._remember(new.request_id, run, 1, new.fingerprint)
        conversation.updated = now
        if conversation.active is None:
            self._activate(run)
        else:
            conversation.queue.append(run)
        for rival in rivals:
            self._put_signal(rival, new.replace_signal, f"replace:{new.key.run_id}")
        return Created(run.head(), 1, existing=False)

    def _known(self, tenant: str, request_id: str, fingerprint: str) -> Created | None:
        """Return the segment that a request_id has begun; None when there is none, or no id."""
        known = self._requests.get((tenant, request_id)) if request_id else None
        if known is None:
            return None
        run, first_seq, earlier = known
        if earlier != fingerprint:
            raise records.request_id_reused(run.key.run_id)
        return Created(run.head(), first_seq, existing=True)

    def _remember(self, request_id: str, run: StoredRun, first_seq: int, fingerprint: str) -> None:
        if request_id:
            self._requests[run.key.tenant, request_id] = (run, first_seq, fingerprint)

    def _activate(self, run: StoredRun) -> None:
        run.state = RUNNING
        run.updated = records.micros(self._clock)
        run.conversation.active = run
        run.show()
        self._work.make_due(run, for_signal=False)

    async def signal(self, key: RunKey, body: bytes, signal_id: str) -> bytes | None:
        """Put a wish into the run's inbox and wake it."""
        return self._put_signal(self._run(key), body, signal_id)

    def _put_signal(self, run: StoredRun, body: bytes, signal_id: str) -> bytes | None:
        if earlier := run.inbox.get(signal_id):
            return earlier.body
        if run.state in FINAL:
            return None
        run.inbox[signal_id] = StoredSignal(body)
        self._work.make_due(run, for_signal=True)
        for callback in self._callbacks:
            asyncio.get_running_loop().call_soon(callback, run.key)
        return None

    async def answer(self, answers: Answers) -> Created:
        """Record that questions of a parked run are answered, put the signal into its inbox and wake it."""
        run = self._run(answers.key)
        if known := self._known(answers.key.tenant, answers.request_id, answers.fingerprint):
            return known
        head = run.head()
        records.check_answers(answers, run.answered, head, signal_known=answers.signal_id in run.inbox)
        run.answered.update(answers.interrupt_ids)
        self._remember(answers.request_id, run, head.last_seq + 1, answers.fingerprint)
        self._put_signal(run, answers.signal, answers.signal_id)
        return Created(head, head.last_seq + 1, existing=False)

    def on_signal(self, callback: Callable[[RunKey], None]) -> None:
        """Have ``callback`` called whenever a signal reached a run's inbox."""
        self._callbacks.append(callback)

    async def wake(self, key: RunKey, at: float) -> None:
        """Have the run claimed at ``at``, whatever else happens."""
        run = self._run(key)
        if run.state not in FINAL:
            self._work.wake(run, at)

    async def claim(self, pool: str, worker: str, wait: float) -> Claim | None:
        """Return the next work item, waiting up to ``wait`` seconds for one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            self._check_open()
            ticket = self._bell.ticket(pool)
            claim = self._work.claim(pool, worker)
            if claim is not None or not await self._bell.wait(pool, ticket, deadline - loop.time()):
                return claim

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        """Store a frame on top of version ``expect``; the awaitable is already done."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self._append(key, frame, expect))
        except Exception as error:
            future.set_exception(error)
        return future

    def _append(self, key: RunKey, frame: Frame, expect: int) -> int:
        self._check_open()
        run = self._runs.get(key)
        if run is None:
            raise records.gone()
        state = records.next_state(
            frame, expect, version=run.version, last_seq=run.last_seq, epoch=run.epoch, state=run.state
        )
        run.version += 1
        run.last_seq = frame.last_seq
        run.epoch = frame.epoch
        run.state = state
        run.updated = records.micros(self._clock)
        public = records.public_frame(frame)
        if frame.count:
            run.frames.append(public)
        if frame.checkpoint:
            run.checkpoint = frame.checkpoint
            run.checkpoint_seq = frame.last_seq
        for message in frame.messages:
            run.store_message(message)
        for signal_id in frame.signals:
            if signal := run.inbox.get(signal_id):
                signal.taken = True
        if frame.run is not None:
            run.info = frame.run.SerializeToString()
        if state == INTERRUPTED or state in FINAL:
            run.show()
            run.conversation.updated = run.updated
        if state in FINAL:
            run.rested = run.updated
            self._work.drop(run, held_too=False)
            self._leave(run)
        if frame.count:
            self._live.publish(key, public)
        return run.version

    def _leave(self, run: StoredRun) -> None:
        """Take a run that ended out of its conversation's order, and start the one that waits behind it."""
        conversation = run.conversation
        if run in conversation.queue:
            conversation.queue.remove(run)
        if conversation.active is run:
            conversation.active = None
            if conversation.queue:
                self._activate(conversation.queue.pop(0))

    async def head(self, key: RunKey) -> Head:
        """Return where a run stands."""
        return self._run(key).head()

    async def load(self, key: RunKey) -> Loaded:
        """Return what a worker needs to go on."""
        run = self._run(key)
        return Loaded(
            run.head(),
            run.record,
            run.checkpoint,
            run.checkpoint_seq,
            run.own_messages(),
            run.unread(),
        )

    async def read(self, key: RunKey, after: int, limit: int = 262_144) -> Sequence[Frame]:
        """Return stored frames with events after seq ``after``."""
        return (await self._read(key, after, limit))[0]

    async def _read(self, key: RunKey, after: int, limit: int = 262_144) -> tuple[Sequence[Frame], bool]:
        run = self._run(key)
        if after + 1 < run.kept_from:
            raise records.log_compacted(run.kept_from)
        stored = run.frames
        begin = bisect_right(stored, after, key=lambda frame: frame.last_seq)
        end, size = begin, 0
        while end < len(stored) and (end == begin or size + len(stored[end].body) <= limit):
            size += len(stored[end].body)
            end += 1
        frames = stored[begin:end]
        if frames:
            frames[0] = frames[0].after(after)
        return frames, end == len(stored)

    def follow(self, key: RunKey, after: int) -> AsyncGenerator[Sequence[Frame], None]:
        """Yield frames with events after seq ``after``: stored ones, then live ones."""
        return self._live.follow(key, after, self._read)

    async def list_runs(
        self,
        tenant: str,
        *,
        states: Collection[RunState.ValueType],
        conversation_id: str,
        page_size: int,
        page_token: str,
    ) -> Page[Run]:
        """List runs, newest first."""
        self._check_open()

        def wanted(run: StoredRun) -> bool:
            return (
                run.key.tenant == tenant
                and (not states or run.state in states)
                and (not conversation_id or run.conversation.conversation_id == conversation_id)
            )

        runs = [((-run.number,), run) for run in self._runs.values() if wanted(run)]
        page = page_of(runs, page_size, page_token, 1)
        return Page([run.head().run for run in page.items], page.next_token)

    async def inspect(self, key: RunKey) -> Inspection:
        """Return what an operator wants to know of a run."""
        return self._run(key).inspect(self._clock() + LEASE)

    async def release(self, key: RunKey) -> bool:
        """Take the run from whoever works on it and deliver its work item anew at once."""
        return self._work.take_back(self._run(key))

    async def compact(self, before: float, limit: int = 100) -> int:
        """Drop the logs of final runs that came to rest before that time, the oldest first."""
        self._check_open()
        old = [(run.rested, run.number, run) for run in self._runs.values() if run.rested is not None]
        chosen = sorted(item for item in old if item[0] < before * 1e6)[: max(limit, 0)]
        for _, _, run in chosen:
            run.compact()
        return len(chosen)

    async def delete(self, key: RunKey) -> None:
        """Purge a run's log and record."""
        self._check_open()
        run = self._runs.pop(key, None)
        if run is None:
            return
        self._requests = {name: known for name, known in self._requests.items() if known[0] is not run}
        self._work.drop(run, held_too=True)
        self._leave(run)
        self._live.reread(key)

    async def get_conversation(self, tenant: str, conversation_id: str) -> Conversation:
        """Return a conversation."""
        return self._conversation(tenant, conversation_id).public()

    async def list_conversations(self, tenant: str, *, page_size: int, page_token: str) -> Page[Conversation]:
        """List conversations, the last changed first."""
        self._check_open()
        mine = [((-it.updated, -it.number), it) for it in self._conversations.values() if it.tenant == tenant]
        page = page_of(mine, page_size, page_token, 2)
        return Page([conversation.public() for conversation in page.items], page.next_token)

    async def list_messages(
        self, tenant: str, conversation_id: str, *, page_size: int, page_token: str
    ) -> Page[Message]:
        """List messages, the oldest first."""
        messages = self._conversation(tenant, conversation_id).messages
        page = page_of(list(messages.items()), page_size, page_token, 2)
        return Page([Message.FromString(body) for body in page.items], page.next_token)

    async def history(self, tenant: str, conversation_id: str, before_run: str) -> Sequence[Message]:
        """Return all messages of a conversation that came before the given run became active."""
        conversation = self._conversation(tenant, conversation_id)
        run = self._run(RunKey(tenant, before_run))
        place, active = run.activation, run.activation and conversation.active is run
        known = self._histories.find(conversation.number, place) if active else None
        # What is settled was there before anything that came later, so it stands at the beginning.
        later = islice(conversation.messages.items(), known.count if known is not None else 0, None)
        bodies = [body for (at, _), body in sorted(later) if not place or at < place]
        added = History(map(Message.FromString, bodies))
        if not active:
            return added
        count = len(added) + (known.count if known is not None else 0)
        return self._histories.keep(conversation.number, known, place, count, added, sum(map(len, bodies)))

    async def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation, its messages, runs and request ids."""
        conversation = self._conversation(tenant, conversation_id)
        if conversation.active is not None:
            raise records.conversation_busy(conversation.active.key.run_id)
        for run in [run for run in self._runs.values() if run.conversation is conversation]:
            await self.delete(run.key)
        del self._conversations[tenant, conversation_id]

    async def get(self, tenant: str, name: str) -> tuple[bytes, int] | None:
        """Return a small setting and its revision."""
        self._check_open()
        return self._settings.get((tenant, name))

    async def put(self, tenant: str, name: str, value: bytes, revision: int) -> int | None:
        """Store a setting if its revision still is ``revision``."""
        self._check_open()
        if self._settings.get((tenant, name), (b"", 0))[1] != revision:
            return None
        self._settings[tenant, name] = (value, revision + 1)
        return revision + 1
