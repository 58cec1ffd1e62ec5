"""What callers have done to runs: started, signalled, answered, woken, deleted."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dualclaw import BusyPolicy
from dualclaw_server.engine.store import FINAL, MAX_QUEUED, Answers, Created, NewRun, RunKey
from dualclaw_server.stores import records
from dualclaw_server.stores.nats import turns, work
from dualclaw_server.stores.nats.layout import (
    ConversationDoc,
    DueDoc,
    Found,
    LogEntry,
    Mark,
    RecordDoc,
    RequestDoc,
    RestDoc,
    RunDoc,
    SettingDoc,
    SignalDoc,
    state_of,
    token,
)
from dualclaw_server.stores.nats.link import Conflict, Link
from dualclaw_server.stores.nats.reads import Position, Reader
from dualclaw_server.stores.nats.transaction import Transaction, Transactor
from dualclaw_server.stores.records import QUEUED, Clock


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a command, and whose inbox got a signal."""

    created: Created
    signalled: Sequence[RunKey] = ()


class Commands:
    """Changes runs and conversations.

    Args:
        link, transactor, reader: of this store.
        clock: seconds since the epoch.
    """

    def __init__(self, link: Link, transactor: Transactor, reader: Reader, clock: Clock) -> None:
        self._link = link
        self._transactor = transactor
        self._reader = reader
        self._clock = clock

    async def create(self, new: NewRun) -> Done:
        """Store a new run with its work item, or return the one its request_id already made."""
        return (await self._transactor.run(secrets.token_hex(8), partial(self._create, new), believing=True))[0]

    async def _create(self, new: NewRun, tx: Transaction) -> Done:
        key, tenant = new.key, new.key.tenant
        if known := await self._known(tx, tenant, new.request_id, new.fingerprint):
            return Done(known)
        subject = tx.subjects.conversation(tenant, new.conversation_id, "doc")
        tx.presume_none(*(tx.subjects.run(key, part) for part in ("doc", "rec")))
        if new.new_conversation:
            tx.presume_none(subject)
        if await self._is_mine(tx, key):
            return Done(Created((await self._reader.position(key)).head(), 1, existing=False))
        found = await tx.get(subject, ConversationDoc)
        if found is not None and found.doc.deleted:
            if not tx.believed:
                await self._purge_conversation(tenant, new.conversation_id, found.seq)
            raise Conflict("a conversation of that id was being deleted")
        conversation = await turns.conversation_of(tx, tenant, new.conversation_id)
        if conversation is None and not new.new_conversation:
            raise records.unknown_conversation()
        rivals = _rivals(new, conversation)
        now = records.micros(self._clock)
        if conversation is None:
            conversation = ConversationDoc(
                conversation_id=new.conversation_id, title=new.title, created=now, updated=now
            )
        conversation.updated = now
        run = RunDoc(
            tenant=tenant,
            run_id=key.run_id,
            conversation=new.conversation_id,
            pool=new.pool,
            state=QUEUED,
            created=now,
            updated=now,
        )
        message = new.message.SerializeToString()
        record = RecordDoc(cut=len(new.record), request=new.request_id and token(new.request_id))
        await self._remember(tx, key, new.request_id, 1, new.fingerprint)
        if conversation.active is None:
            tx.presume_none(tx.subjects.run(key, "work"))
            await turns.activate(tx, run, conversation, {0: turns.Said(message)}, now)
        else:
            conversation.queue.append(key.run_id)
        keys = [RunKey(tenant, rival) for rival in rivals]
        signalled = [rival for rival in keys if await self._signal_rival(tx, rival, new, now)]
        info = new.run.SerializeToString()
        await turns.store_conversation(tx, tenant, conversation)
        # One right behind the other: so the document tells which record is its own.
        await tx.put(tx.subjects.run(key, "rec"), record, new.record + message)
        await tx.put(tx.subjects.run(key, "doc"), run, info)
        return Done(Created(Position(key, Found(0, run, info), 0, None).head(), 1, existing=False), signalled)

    async def _is_mine(self, tx: Transaction, key: RunKey) -> bool:
        """Make sure that there is no such run but the one that an earlier attempt has stored after all.

        What was being deleted is purged first.
        """
        found = await tx.get(tx.subjects.run(key, "doc"), RunDoc)
        record = await tx.get(tx.subjects.run(key, "rec"), RecordDoc)
        if found is not None and not found.doc.deleted:
            if record is not None and record.doc.op == tx.op:  # the document may be a worker's by now
                return True
            raise ValueError("a run with this id exists")
        if found is not None or record is not None:
            if not tx.believed:
                await self._purge_run(key)
            raise Conflict("a run of that id was being deleted")
        return False

    async def _signal_rival(self, tx: Transaction, rival: RunKey, new: NewRun, now: int) -> bool:
        found = await tx.get(tx.subjects.run(rival, "doc"), RunDoc)
        if found is None or found.doc.deleted or state_of(found.doc.state) in FINAL:
            return False
        await work.put_signal(tx, rival, found, new.replace_signal, f"replace:{new.key.run_id}", now / 1e6)
        return True

    async def _known(self, tx: Transaction, tenant: str, request_id: str, fingerprint: str) -> Created | None:
        """Return the segment that a request_id has begun; None when there is none, or no id."""
        if not request_id:
            return None
        known = await tx.get(tx.subjects.request(tenant, request_id), RequestDoc)
        if known is None:
            return None
        key = RunKey(tenant, known.doc.run_id)
        run = await self._link.find(tx.subjects.run(key, "doc"), RunDoc)
        if run is None or run.doc.deleted:
            return None
        if known.doc.fingerprint != fingerprint:
            raise records.request_id_reused(key.run_id)
        head = (await self._reader.position(key)).head()
        return Created(head, known.doc.first_seq, existing=known.doc.op != tx.op)

    async def _remember(self, tx: Transaction, key: RunKey, request_id: str, first_seq: int, fingerprint: str) -> None:
        if request_id:
            request = RequestDoc(run_id=key.run_id, first_seq=first_seq, fingerprint=fingerprint)
            await tx.put(tx.subjects.request(key.tenant, request_id), request)
            await tx.put(tx.subjects.run(key, "req", token(request_id)), Mark(), blind=True)

    async def signal(self, key: RunKey, body: bytes, signal_id: str) -> tuple[bytes | None, bool]:
        """Put a wish into the run's inbox and wake it; with whether it was stored."""

        async def step(tx: Transaction) -> tuple[bytes | None, bool]:
            run = await self._run(tx, key)
            earlier = await work.put_signal(tx, key, run, body, signal_id, self._clock())
            return earlier, earlier is None and state_of(run.doc.state) not in FINAL

        return (await self._transactor.run(secrets.token_hex(8), step))[0]

    async def _run(self, tx: Transaction, key: RunKey) -> Found[RunDoc]:
        run = await tx.get(tx.subjects.run(key, "doc"), RunDoc)
        if run is None or run.doc.deleted:
            raise records.unknown_run()
        return run

    async def answer(self, answers: Answers) -> Done:
        """Record that questions of a parked run are answered, put the signal into its inbox and wake it."""
        return (await self._transactor.run(secrets.token_hex(8), partial(self._answer, answers)))[0]

    async def _answer(self, answers: Answers, tx: Transaction) -> Done:
        key = answers.key
        run = await self._run(tx, key)
        if known := await self._known(tx, key.tenant, answers.request_id, answers.fingerprint):
            return Done(known)
        position = await self._reader.position(key)
        head = position.head()
        created = Created(head, head.last_seq + 1, existing=False)
        names = tuple(dict.fromkeys(answers.interrupt_ids))
        marks = {name: tx.subjects.run(key, "ans", token(name)) for name in names}
        found = await asyncio.gather(*(tx.get(subject, Mark) for subject in marks.values()))
        answered = {name for name, mark in zip(names, found, strict=True) if mark and mark.doc.op != tx.op}
        inbox = tx.subjects.run(key, "in", tx.subjects.signal(answers.signal_id))
        earlier = await tx.get(inbox, SignalDoc)
        if earlier is not None and earlier.doc.op == tx.op:
            return Done(created, (key,))
        records.check_answers(answers, answered, head, signal_known=earlier is not None)
        for subject in marks.values():
            await tx.put(subject, Mark())
        await self._remember(tx, key, answers.request_id, head.last_seq + 1, answers.fingerprint)
        # Written again as it is: nobody may take the run on, or end it, at the same moment.
        await turns.store_run(tx, run)
        await work.put_signal(tx, key, run, answers.signal, answers.signal_id, self._clock())
        return Done(created, (key,))

    async def wake(self, key: RunKey, at: float) -> None:
        """Have the run claimed at a time."""
        now = self._clock()
        scheduled = False

        async def step(tx: Transaction) -> None:
            nonlocal scheduled
            run = await self._run(tx, key)
            if state_of(run.doc.state) in FINAL:
                return
            if at <= now:
                await work.make_due(tx, key, run.doc.pool, work.FOR_CERTAIN, now)
                return
            if not scheduled:
                await work.schedule(self._link, key, DueDoc(tenant=key.tenant, run_id=key.run_id, at=at))
                scheduled = True
            await work.add_timer(tx, key, at)

        await self._transactor.run(secrets.token_hex(8), step)

    async def release(self, key: RunKey) -> str | None:
        """Take the run from whoever works on it; the token that is void now, None when there is no work item."""

        async def step(tx: Transaction) -> str | None:
            run = await self._run(tx, key)
            return await work.release(tx, key, run.doc.pool, self._clock())

        return (await self._transactor.run(secrets.token_hex(8), step))[0]

    # What goes away

    async def delete(self, key: RunKey) -> str:
        """Purge a run; the messages people may see stay. Returns the token of whoever worked on it."""

        async def step(tx: Transaction) -> str | None:
            run = await tx.get(tx.subjects.run(key, "doc"), RunDoc)
            if run is None:
                return None
            if run.doc.deleted:
                return ""
            conversation = await turns.conversation_of(tx, key.tenant, run.doc.conversation)
            if conversation is not None:
                await turns.leave(tx, run.doc, conversation, records.micros(self._clock))
                await turns.store_conversation(tx, key.tenant, conversation)
            void = (await work.item_of(tx, key)).token
            await work.drop(tx, key, held_too=True)
            log = await tx.get(tx.subjects.run(key, "log"), LogEntry, bare=True)
            run.doc.deleted = True
            await turns.store_run(tx, run, b"")
            end = LogEntry(version=0, first=1, count=0, epoch=0, state=run.doc.state, at=0, gone=True)
            end.version = 1 if log is None else log.doc.version + 1
            await tx.put(tx.subjects.run(key, "log"), end, last=True, history=True)
            return void

        void, _ = await self._transactor.run(secrets.token_hex(8), step)
        if void is not None:
            await self._purge_run(key)
        return void or ""

    async def _purge_run(self, key: RunKey) -> None:
        """Remove all messages of a run that is marked as deleted. Killed in between, the next call goes on with it."""
        subjects, link = self._link.subjects, self._link
        mark = await link.last(subjects.run(key, ">"))
        run = await link.find(subjects.run(key, "doc"), RunDoc)
        if mark is None or (run is not None and not run.doc.deleted):  # gone, or made anew by who was faster
            return
        for name in await link.names(subjects.run(key, "req", "*")):
            subject = subjects.request_of(key.tenant, name.rpartition(".")[2])
            request = await link.find(subject, RequestDoc)
            if request is not None and request.doc.run_id == key.run_id:
                await link.purge(subject, upto=request.seq)
        if run is not None:
            await link.purge(subjects.item(run.doc.pool, key), upto=mark.seq)
        await link.purge(subjects.rest(key), upto=mark.seq)
        for owner in (subjects.run(key, "doc"), subjects.run(key, "log")):
            await link.purge(subjects.blobs(owner), upto=mark.seq)
        await link.purge(subjects.timers_of(key), stream=subjects.timers_stream)
        # Last: while its document is there, a run of that id finds out that there is something to purge.
        await link.purge(subjects.run(key, ">"), upto=mark.seq)

    async def end_conversation(self, tenant: str, conversation_id: str) -> None:
        """Mark a conversation as deleted, so that no run starts in it."""

        async def step(tx: Transaction) -> None:
            conversation = await turns.conversation_of(tx, tenant, conversation_id)
            if conversation is None:
                if tx.attempt:
                    return
                raise records.unknown_conversation()
            if conversation.active is not None:
                raise records.conversation_busy(conversation.active)
            conversation.deleted = True
            await turns.store_conversation(tx, tenant, conversation)

        await self._transactor.run(secrets.token_hex(8), step)

    async def _purge_conversation(self, tenant: str, conversation_id: str, upto: int) -> None:
        """Remove a conversation's messages that are older than its mark, and the mark."""
        subjects = self._link.subjects
        await self._link.purge(subjects.blobs(subjects.conversation(tenant, conversation_id, "doc")), upto=upto)
        await self._link.purge(subjects.conversation(tenant, conversation_id, ">"), upto=upto)

    async def purge_conversation(self, tenant: str, conversation_id: str) -> None:
        """Remove what is left of a conversation that ``end_conversation`` has marked, after its runs."""
        subject = self._link.subjects.conversation(tenant, conversation_id, "doc")
        mark = await self._link.find(subject, ConversationDoc)
        if mark is not None and mark.doc.deleted:
            await self._purge_conversation(tenant, conversation_id, mark.seq)

    async def compact(self, before: float, limit: int) -> list[RunKey]:
        """Drop the logs of final runs that came to rest before that time, the oldest first."""
        found = await self._link.batch_from(self._link.subjects.rests(), 1, limit) if limit > 0 else []
        compacted = []
        for stored in found:
            rest = (await self._link.open(stored, RestDoc)).doc
            if rest.rested >= before * 1e6:
                break
            key = RunKey(rest.tenant, rest.run_id)
            if await self._compact(key):
                compacted.append(key)
            await self._link.purge(stored.subject, upto=stored.seq)
        return compacted

    async def _compact(self, key: RunKey) -> bool:
        subjects = self._link.subjects

        async def step(tx: Transaction) -> bool:
            run = await tx.get(subjects.run(key, "doc"), RunDoc)
            if run is None or run.doc.deleted or await self._link.last(subjects.rest(key)) is None:
                return False
            position = await self._reader.position(key)
            run.doc.kept_from = position.last_seq + 1
            run.doc.checkpoint = None
            await turns.store_run(tx, run)
            return True

        if not (await self._transactor.run(secrets.token_hex(8), step))[0]:
            return False
        for part in ("in", "tk"):
            await self._link.purge(subjects.run(key, part, "*"))
        await self._link.purge(subjects.run(key, "cp"))
        # The last message stays: where the log ends is told by it.
        await self._link.purge(subjects.run(key, "log"), keep=1)
        await self._link.purge(subjects.blobs(subjects.run(key, "log")))
        return True

    # Settings

    async def get(self, tenant: str, name: str) -> tuple[bytes, int] | None:
        """Return a small setting and its revision."""
        found = await self._link.find(self._link.subjects.setting(tenant, name), SettingDoc)
        return None if found is None else (found.body, found.doc.revision)

    async def put(self, tenant: str, name: str, value: bytes, revision: int) -> int | None:
        """Store a setting if its revision still is ``revision``."""

        async def step(tx: Transaction) -> int | None:
            subject = tx.subjects.setting(tenant, name)
            found = await tx.get(subject, SettingDoc)
            if found is not None and found.doc.op == tx.op:
                return found.doc.revision
            if revision != (0 if found is None else found.doc.revision):
                return None
            await tx.put(subject, SettingDoc(revision=revision + 1), value)
            return revision + 1

        return (await self._transactor.run(secrets.token_hex(8), step))[0]


def _rivals(new: NewRun, conversation: ConversationDoc | None) -> list[str]:
    """Return the runs a new one replaces, or refuse it."""
    if conversation is None or conversation.active is None:
        return []
    if new.on_busy == BusyPolicy.BUSY_POLICY_REPLACE:
        return [conversation.active, *conversation.queue]
    if new.on_busy != BusyPolicy.BUSY_POLICY_QUEUE:
        raise records.conversation_busy(conversation.active)
    if len(conversation.queue) >= MAX_QUEUED:
        raise records.overloaded(len(conversation.queue))
    return []
