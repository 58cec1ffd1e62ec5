"""What a run means to its conversation: its place in the order, what people see of it, who comes next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dualclaw_server.engine.store import RunKey, RunMessage
from dualclaw_server.stores.nats import work
from dualclaw_server.stores.nats.layout import (
    ConversationDoc,
    Found,
    MessagesDoc,
    RecordDoc,
    RunDoc,
    Stored,
)
from dualclaw_server.stores.nats.link import Link, many
from dualclaw_server.stores.nats.transaction import Transaction
from dualclaw_server.stores.records import RUNNING


@dataclass(frozen=True, slots=True)
class Said:
    """A message by its bytes."""

    body: bytes
    scope: str = ""


Messages = dict[int, Said]
"""By position in the run."""


def pack_messages(messages: Mapping[int, Said]) -> tuple[MessagesDoc, bytes]:
    """Return a document of messages, and its body."""
    ordered = sorted(messages.items())
    parts = [(position, said.scope, len(said.body)) for position, said in ordered]
    return MessagesDoc(parts=parts), b"".join(said.body for _, said in ordered)


def unpack_messages(found: Found[MessagesDoc]) -> Messages:
    """Return the messages of a document."""
    messages: Messages = {}
    start = 0
    for position, scope, length in found.doc.parts:
        messages[position] = Said(found.body[start : start + length], scope)
        start += length
    return messages


def said(messages: Iterable[RunMessage]) -> Messages:
    """Return a frame's messages as they are stored."""
    return {one.position: Said(one.message.SerializeToString(), one.scope) for one in messages}


async def own_messages(link: Link, key: RunKey, record: Found[RecordDoc], parts: Iterable[Stored]) -> Messages:
    """Return all messages of a run: the user's, and those its frames brought (``parts``), the later ones winning."""
    messages: Messages = {0: Said(record.body[record.doc.cut :])}
    for stored in many(parts):
        messages |= unpack_messages(await link.open(stored, MessagesDoc))
    return messages


async def read_messages(tx: Transaction, run: Found[RunDoc]) -> Messages:
    """Return all messages of a run as they are before this transaction."""
    key = RunKey(run.doc.tenant, run.doc.run_id)
    record = await tx.constant(tx.subjects.run(key, "rec"), RecordDoc, (run.doc.number or run.seq) - 1)
    if record is None:
        return {}
    parts = await tx.link.snapshot(tx.subjects.run(key, "msg", "*"))
    return await own_messages(tx.link, key, record, parts.values())


async def conversation_of(tx: Transaction, tenant: str, conversation_id: str) -> ConversationDoc | None:
    """Return a conversation's document; None when there is none (any more)."""
    found = await tx.get(tx.subjects.conversation(tenant, conversation_id, "doc"), ConversationDoc)
    if found is None or found.doc.deleted:
        return None
    found.doc.number = found.doc.number or found.seq
    return found.doc


async def store_conversation(tx: Transaction, tenant: str, conversation: ConversationDoc) -> None:
    """Stage a conversation's document."""
    await tx.put(tx.subjects.conversation(tenant, conversation.conversation_id, "doc"), conversation)


async def store_run(tx: Transaction, run: Found[RunDoc], body: bytes | None = None) -> None:
    """Stage a run's document."""
    run.doc.number = run.doc.number or run.seq
    key = RunKey(run.doc.tenant, run.doc.run_id)
    await tx.put(tx.subjects.run(key, "doc"), run.doc, run.body if body is None else body)


async def show(tx: Transaction, run: RunDoc, conversation: ConversationDoc, messages: Mapping[int, Said]) -> None:
    """Make a run's messages part of the conversation, in the place it got when it became active."""
    if not run.activation:
        conversation.activations += 1
        run.activation = conversation.activations
    await store_turn(tx, run, messages)


async def store_turn(tx: Transaction, run: RunDoc, messages: Mapping[int, Said]) -> None:
    """Stage what people see of a run."""
    doc, body = pack_messages({at: said for at, said in messages.items() if not said.scope})
    subject = tx.subjects.conversation(run.tenant, run.conversation, "turn", str(run.activation))
    await tx.put(subject, doc, body, blind=True)


async def change_turn(tx: Transaction, run: RunDoc, messages: Mapping[int, Said]) -> None:
    """Replace, in place, what people see already; what gets a scope goes."""
    if not run.activation:
        return
    subject = tx.subjects.conversation(run.tenant, run.conversation, "turn", str(run.activation))
    found = await tx.link.find(subject, MessagesDoc)
    shown = {} if found is None else unpack_messages(found)
    if shown.keys() & messages.keys():
        await store_turn(tx, run, shown | {at: said for at, said in messages.items() if at in shown})


async def activate(
    tx: Transaction, run: RunDoc, conversation: ConversationDoc, messages: Mapping[int, Said], now: int
) -> None:
    """Make a run the active one of its conversation; its document is still to be stored."""
    run.state, run.updated = RUNNING, now
    conversation.active = run.run_id
    await show(tx, run, conversation, messages)
    await work.make_due(tx, RunKey(run.tenant, run.run_id), run.pool, work.FOR_CERTAIN, now / 1e6)


async def leave(tx: Transaction, run: RunDoc, conversation: ConversationDoc, now: int) -> None:
    """Take a run that ended out of its conversation's order, and start the one that waits behind it."""
    if run.run_id in conversation.queue:
        conversation.queue.remove(run.run_id)
    if conversation.active != run.run_id:
        return
    conversation.active = None
    while conversation.queue and conversation.active is None:
        key = RunKey(run.tenant, conversation.queue.pop(0))
        following = await tx.get(tx.subjects.run(key, "doc"), RunDoc)
        if following is not None and not following.doc.deleted:
            await activate(tx, following.doc, conversation, await read_messages(tx, following), now)
            await store_run(tx, following)
