"""Lists: an index in memory, brought up to date from the stream by whoever asks for a list.

Rules:
- The stream is the index's only source: what is new since the last look is read, in order, from the documents of a
  tenant's runs or conversations. Nothing is written for it, nothing needs a rebuild, and a lost index costs one read
  of these documents.
- The index says which items there are, and in which order. The items themselves are read when a page is made; what
  is gone meanwhile, for another process has deleted it, is left out and forgotten.
- Histories are kept (``histories``). Nothing is ever taken from the turns of runs that are final, but the whole
  conversation, so nothing is counted again.
- With a new connection nothing is kept (see ``Link.connection``).
- At most ``_TENANTS`` tenants are kept; the one not asked for the longest goes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dualclaw import Conversation, Message, Run, RunState
from dualclaw.errors import EngineError
from dualclaw_server.engine.history import History
from dualclaw_server.engine.store import Page, RunKey, Unavailable
from dualclaw_server.stores import records
from dualclaw_server.stores.histories import Histories
from dualclaw_server.stores.nats import turns
from dualclaw_server.stores.nats.layout import ConversationDoc, Found, MessagesDoc, RunDoc, unpack
from dualclaw_server.stores.nats.link import Link
from dualclaw_server.stores.nats.reads import Reader
from dualclaw_server.stores.pages import make_token, page_key, page_length

_TENANTS = 64
_AT_ONCE = 1000
_TRIES = 200
_NAMED = 400
"""Places of a conversation that are asked for one by one; more are asked for as all."""
K = TypeVar("K", RunDoc, ConversationDoc)


@dataclass(slots=True)
class _Known(Generic[K]):
    """What is known of one tenant's runs, or conversations."""

    upto: int = 0
    docs: dict[str, K] = field(default_factory=dict)
    """By subject, ``number`` filled in."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Index:
    """The lists of all tenants."""

    def __init__(self, link: Link, reader: Reader) -> None:
        self._link = link
        self._reader = reader
        self._runs: OrderedDict[str, _Known[RunDoc]] = OrderedDict()
        self._conversations: OrderedDict[str, _Known[ConversationDoc]] = OrderedDict()
        self._histories = Histories()
        self._connection = 0

    def _look_at_connection(self) -> None:
        if self._connection != self._link.connection:
            self._connection = self._link.connection
            self._runs.clear()
            self._conversations.clear()
            self._histories = Histories()

    async def runs_of(self, tenant: str, conversation_id: str) -> list[str]:
        """Return the ids of all runs of a conversation."""
        known = await self._known(self._runs, self._link.subjects.runs(tenant), RunDoc)
        return [doc.run_id for doc in known.docs.values() if doc.conversation == conversation_id]

    async def list_runs(
        self, tenant: str, states: Collection[RunState.ValueType], conversation_id: str, size: int, token: str
    ) -> Page[Run]:
        """List runs, newest first."""
        after = page_key(token, 1)
        known = await self._known(self._runs, self._link.subjects.runs(tenant), RunDoc)
        wanted = sorted(
            (
                (-doc.number, subject, doc.run_id)
                for subject, doc in known.docs.items()
                if (after is None or -doc.number > after[0])
                and (not states or doc.state in states)
                and (not conversation_id or doc.conversation == conversation_id)
            ),
        )
        length = page_length(size)
        found: list[tuple[int, Run]] = []
        while wanted and len(found) <= length:
            batch, wanted = wanted[: length + 1 - len(found)], wanted[length + 1 - len(found) :]
            heads = await asyncio.gather(*(self._run(RunKey(tenant, run_id)) for _, _, run_id in batch))
            for (key, subject, _), run in zip(batch, heads, strict=True):
                if run is None:
                    known.docs.pop(subject, None)
                else:
                    found.append((key, run))
        token = make_token(found[length - 1][0]) if len(found) > length else ""
        return Page([run for _, run in found[:length]], token)

    async def _run(self, key: RunKey) -> Run | None:
        try:
            return (await self._reader.position(key)).head().run
        except EngineError:
            return None

    async def list_conversations(self, tenant: str, size: int, token: str) -> Page[Conversation]:
        """List conversations, the last changed first."""
        after = page_key(token, 2)
        known = await self._known(self._conversations, self._link.subjects.conversations(tenant), ConversationDoc)
        wanted = sorted(
            ((-doc.updated, -doc.number), subject)
            for subject, doc in known.docs.items()
            if after is None or (-doc.updated, -doc.number) > after
        )
        length = page_length(size)
        found: list[tuple[tuple[int, int], Conversation]] = []
        while wanted and len(found) <= length:
            batch, wanted = wanted[: length + 1 - len(found)], wanted[length + 1 - len(found) :]
            docs = await asyncio.gather(*(self._link.find(subject, ConversationDoc) for _, subject in batch))
            for (key, subject), doc in zip(batch, docs, strict=True):
                if doc is None or doc.doc.deleted:
                    known.docs.pop(subject, None)
                else:
                    found.append((key, _public(doc.doc)))
        token = make_token(*found[length - 1][0]) if len(found) > length else ""
        return Page([conversation for _, conversation in found[:length]], token)

    async def _known(self, all_known: OrderedDict[str, _Known[K]], subject: str, kind: type[K]) -> _Known[K]:
        """Return what is known of a tenant, up to what the leader knows now."""
        self._look_at_connection()
        known = all_known.setdefault(subject, _Known())
        all_known.move_to_end(subject)
        while len(all_known) > _TENANTS:
            all_known.popitem(last=False)
        async with known.lock:
            newest = await self._link.last(subject)
            tries = 0
            while newest is not None and known.upto < newest.seq:
                found = await self._link.batch_from(subject, known.upto + 1, _AT_ONCE)
                for one in found:
                    doc = unpack(one.data, kind)[0]
                    doc.number = doc.number or one.seq
                    if doc.deleted:
                        known.docs.pop(one.subject, None)
                    else:
                        known.docs[one.subject] = doc
                    known.upto = one.seq
                if not found:
                    tries += 1
                    await asyncio.sleep(0.005)
                    newest = await self._link.last(subject)
                    if tries > _TRIES:
                        raise Unavailable("no replica has what the leader knows")
        return known

    # One conversation

    async def conversation(self, tenant: str, conversation_id: str) -> ConversationDoc:
        """Return a conversation's document. Raises EngineError UNKNOWN_CONVERSATION."""
        return (await self._conversation(tenant, conversation_id)).doc

    async def _conversation(self, tenant: str, conversation_id: str) -> Found[ConversationDoc]:
        subject = self._link.subjects.conversation(tenant, conversation_id, "doc")
        found = await self._link.find(subject, ConversationDoc)
        if found is None or found.doc.deleted:
            raise records.unknown_conversation()
        return found

    async def get_conversation(self, tenant: str, conversation_id: str) -> Conversation:
        """Return a conversation."""
        return _public(await self.conversation(tenant, conversation_id))

    async def messages(self, tenant: str, conversation_id: str) -> list[tuple[tuple[int, int], bytes]]:
        """Return all messages people see, each with its place, in order."""
        await self.conversation(tenant, conversation_id)
        return await self._turns(tenant, conversation_id)

    async def _turns(
        self, tenant: str, conversation_id: str, first: int = 0, before: int = 0
    ) -> list[tuple[tuple[int, int], bytes]]:
        """Return the messages people see of the runs in some places, each with its place; without ``first`` of all."""
        subjects = self._link.subjects
        places = [str(place) for place in range(first, before)] if first and before - first <= _NAMED else ["*"]
        if not places:
            return []
        found = await self._link.snapshot(
            *(subjects.conversation(tenant, conversation_id, "turn", place) for place in places),
            fresh=subjects.conversation(tenant, conversation_id, ">"),
        )
        messages = []
        for stored in found.values():
            activation = int(stored.subject.rpartition(".")[2])
            turn = turns.unpack_messages(await self._link.open(stored, MessagesDoc))
            messages += [((activation, position), said.body) for position, said in turn.items()]
        return sorted(one for one in messages if one[0][0] >= first)

    async def list_messages(self, tenant: str, conversation_id: str, size: int, token: str) -> Page[Message]:
        """List messages, the oldest first."""
        after = page_key(token, 2)
        length = page_length(size)
        rest = [one for one in await self.messages(tenant, conversation_id) if after is None or one[0] > after]
        token = make_token(*rest[length - 1][0]) if len(rest) > length else ""
        return Page([Message.FromString(body) for _, body in rest[:length]], token)

    async def history(self, tenant: str, conversation_id: str, before_run: str) -> History:
        """Return the messages that came before a run became active; all of them while it waits."""
        self._look_at_connection()
        histories = self._histories  # what is read of servers before a reconnect is not kept beyond it
        key = RunKey(tenant, before_run)
        home, place = self._reader.known_place(key)
        if home == conversation_id and place == 1:
            return History()  # nothing was ever before it
        found = await self._conversation(tenant, conversation_id)
        place = place or (await self._reader.position(key)).run.doc.activation
        number = found.doc.number or found.seq
        active = bool(place) and found.doc.active == before_run
        kept = histories.find(number, place) if active else None
        said = await self._turns(tenant, conversation_id, kept.place if kept is not None else 0, place)
        bodies = [body for (at, _), body in said if not place or at < place]
        added = History(map(Message.FromString, bodies))
        if not active:
            return added
        count = len(added) + (kept.count if kept is not None else 0)
        return histories.keep(number, kept, place, count, added, sum(map(len, bodies)))


def _public(doc: ConversationDoc) -> Conversation:
    return records.public_conversation(doc.conversation_id, doc.title, doc.created, doc.updated, doc.active or "")
