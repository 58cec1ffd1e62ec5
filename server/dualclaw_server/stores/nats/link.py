"""The connection to NATS: what the store asks of JetStream, and what the answers mean.

Rules:
- What must be current is read from the stream's leader (STREAM.MSG.GET). A direct get may come from a follower that
  is behind; so it is used for many messages at once only, and its answer counts when it is at least as new as
  what the leader knew before. The leader may be behind, too: a replica that is faster delivers to a consumer what the
  leader is about to store. What was delivered, and is not there, may come.
- Every write has one of five ends. Stored. ``Conflict``: somebody else wrote first, nothing was stored. ``Again``:
  the server cannot now, nothing was stored. ``Full``. ``Uncertain``: no answer; only a look at the stream tells,
  and a late write is harmless because each one names the sequence it builds on.
- Reads are asked again for ``patience`` seconds: an election takes seconds, and a run must not fail for it.
- Nothing is buffered while there is no connection. What would go out after its caller has been told that nothing
  was stored could not be taken back.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from dualclaw_server.engine.store import Full, StoreError, Unavailable
from dualclaw_server.stores.nats.cancellation import heed
from dualclaw_server.stores.nats.layout import INLINE, D, Doc, Found, Stored, Subjects, pack, unpack

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT = 5.0
"""Seconds to wait for one answer."""
PATIENCE = 30.0
"""Seconds within which an election or a lost connection is only a delay."""
_PAUSE = 0.1
_DIRECT_SUBJECTS = 500
_CONFLICTS = frozenset({10071, 10164})
_FULL = frozenset({10002, 10023, 10028, 10047, 10077})
_AGAIN = frozenset({10003, 10005, 10008, 10009, 10118, 10176, 10210, 10211})
_NOT_FOUND = frozenset({10037, 10043})


class Conflict(Exception):
    """Somebody else was faster; nothing was stored."""


class Again(Exception):
    """The server could not; nothing was stored."""


class Uncertain(Exception):
    """It is unknown whether it was stored."""


class ApiError(Exception):
    """JetStream refused a request."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"JetStream says: {text} ({code})")
        self.code = code


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct):
    error: _Error | None = None
    seq: int = 0


class _Message(msgspec.Struct):
    subject: str
    seq: int
    data: str = ""


class _GetReply(msgspec.Struct):
    error: _Error | None = None
    message: _Message | None = None


class _State(msgspec.Struct):
    subjects: dict[str, int] | None = None
    last_seq: int = 0


class _InfoReply(msgspec.Struct):
    error: _Error | None = None
    state: _State | None = None
    total: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """One message to store. ``expect``: sequence of the newest message on its subject; None: whatever it is."""

    subject: str
    data: bytes
    expect: int | None
    keep_history: bool = False


class Link:
    """One connection and the questions the store has.

    Args:
        client: connected.
        subjects: where things lie.
        patience: seconds within which an election is only a delay.
        timeout: seconds to wait for one answer.
    """

    def __init__(
        self, client: Client, subjects: Subjects, *, patience: float = PATIENCE, timeout: float = TIMEOUT
    ) -> None:
        self.client = client
        self.subjects = subjects
        self.patience = patience
        self.timeout = timeout
        self._inbox = client.new_inbox()
        self._numbers = itertools.count(1)

    @property
    def connection(self) -> int:
        """Number of the connection: with a new one, servers may have lost what they had and give a sequence again."""
        return self.client.stats["reconnects"]

    # Requests

    async def ask(self, subject: str, body: Mapping[str, object], timeout: float | None = None) -> bytes:
        """Return the answer of the JetStream API, once. Raises Again."""
        data = json.dumps(body).encode() if body else b""
        try:
            reply = await heed(self.client.request(f"$JS.API.{subject}", data, timeout=timeout or self.timeout))
        except (nats.errors.Error, OSError) as error:
            raise Again(f"no answer to {subject}: {error}") from error
        return reply.data

    async def insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Do it until it is not Again; Unavailable when that takes longer than ``patience``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.patience
        while True:
            try:
                return await attempt()
            except Again as error:
                if loop.time() > deadline or self.client.is_closed:
                    raise Unavailable(f"NATS does not answer: {error}") from error
                await asyncio.sleep(_PAUSE)

    async def call(self, subject: str, body: Mapping[str, object]) -> bytes:
        """Ask until there is an answer. Raises ApiError, Unavailable."""

        async def attempt() -> bytes:
            data = await self.ask(subject, body)
            reply = msgspec.json.decode(data, type=_Reply)
            if reply.error is not None:
                if reply.error.err_code in _AGAIN:
                    raise Again(reply.error.description)
                raise ApiError(reply.error.err_code, reply.error.description)
            return data

        return await self.insist(attempt)

    # Reads

    async def _get(self, body: Mapping[str, object]) -> Stored | None:
        async def attempt() -> Stored | None:
            data = await self.ask(f"STREAM.MSG.GET.{self.subjects.stream}", body)
            reply = msgspec.json.decode(data, type=_GetReply)
            if reply.message is not None:
                one = reply.message
                return Stored(one.subject, one.seq, base64.b64decode(one.data))
            error = reply.error or _Error()
            if error.err_code in _NOT_FOUND:
                return None
            raise Again(error.description)

        return await self.insist(attempt)

    async def last(self, subject: str) -> Stored | None:
        """Return the newest message of a subject, or of a filter, as the leader knows it."""
        return await self._get({"last_by_subj": subject})

    async def next(self, subject: str, seq: int) -> Stored | None:
        """Return the first message of a subject from a sequence on, as the leader knows it."""
        return await self._get({"seq": max(seq, 1), "next_by_subj": subject})

    async def find(self, subject: str, kind: type[D], *, bare: bool = False) -> Found[D] | None:
        """Return the document of a subject, as the leader knows it; None when there is none."""
        stored = await self.last(subject)
        return None if stored is None else await self.open(stored, kind, bare=bare)

    async def open(self, stored: Stored, kind: type[D], *, bare: bool = False) -> Found[D]:
        """Return what a message holds, its chunks joined (not if ``bare``). Raises StoreError for a damaged one."""
        try:
            doc, body = unpack(stored.data, kind)
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreError(f"message {stored.seq} of stream {self.subjects.stream} is damaged: {error}") from error
        if doc.blob is not None and not bare:
            body = await self.chunks(stored.subject, doc.blob)
        return Found(stored.seq, doc, body)

    async def chunks(self, owner: str, blob: tuple[str, int]) -> bytes:
        """Return a body that was put into chunks."""
        digest, count = blob
        found = await asyncio.gather(
            *(self.last(self.subjects.blob(owner, digest, str(number))) for number in range(count))
        )
        parts = [chunk.data for chunk in found if chunk is not None]
        if len(parts) != count:
            raise StoreError("a stored payload is missing: the stream is damaged, or its run was deleted meanwhile")
        return b"".join(parts)

    async def snapshot(self, *filters: str, fresh: str = "") -> dict[str, Stored]:
        """Return the newest message of every subject of the filters, at least as new as the leader knows it now.

        ``fresh``: the filter whose newest message must be in it; the first one when it is empty.
        """
        newest = await self.last(fresh or filters[0])
        if newest is None:
            return {}

        async def attempt() -> dict[str, Stored]:
            found, upto, too_many = await self._direct({"multi_last": list(filters)})
            if too_many:
                subjects = [name for each in filters for name in await self.names(each)]
                found = []
                for start in range(0, len(subjects), _DIRECT_SUBJECTS):
                    some, upto, _ = await self._direct({"multi_last": subjects[start : start + _DIRECT_SUBJECTS]})
                    if upto < newest.seq:
                        break
                    found += some
            if upto < newest.seq:
                for each in filters:
                    if await self.last(each) is not None:
                        raise Again("a follower is behind")
                return {}  # purged meanwhile; how far a replica is that found nothing it does not say
            return {one.subject: one for one in found}

        return await self._follow_up(attempt)

    async def newest(self, subjects: Sequence[str]) -> list[Stored]:
        """Return the newest messages of up to 500 subjects, as any replica knows them, once. Raises Again."""
        return (await self._direct({"multi_last": list(subjects)}))[0]

    async def batch_from(self, subject: str, seq: int, count: int, size: int = 0) -> list[Stored]:
        """Return stored messages of a filter from a sequence on, in order, about ``size`` bytes; may be behind."""
        body: dict[str, object] = {"seq": max(seq, 1), "next_by_subj": subject, "batch": count}
        if size:
            body["max_bytes"] = size
        return (await self.insist(lambda: self._direct(body)))[0]

    async def _follow_up(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """As ``insist``, but soon again at first: followers are behind by milliseconds."""
        for pause in (0.002, 0.005, 0.01, 0.02, 0.05):
            try:
                return await attempt()
            except Again:
                await asyncio.sleep(pause)
        return await self.insist(attempt)

    async def _direct(self, body: Mapping[str, object]) -> tuple[list[Stored], int, bool]:
        """Ask any replica for many messages; with the sequence it knows of, and whether there are too many subjects."""
        inbox = f"{self._inbox}.{next(self._numbers)}"
        found: list[Stored] = []
        subscription: Subscription | None = None
        try:
            subscription = await self.client.subscribe(inbox)
            await self.client.publish(
                f"$JS.API.DIRECT.GET.{self.subjects.stream}", json.dumps(body).encode(), reply=inbox
            )
            while True:
                message = await heed(subscription.next_msg(timeout=self.timeout))
                headers = message.headers or {}
                match headers.get("Status"):
                    case None:
                        found.append(Stored(headers["Nats-Subject"], int(headers["Nats-Sequence"]), message.data))
                    case "204":
                        return found, int(headers.get("Nats-UpTo-Sequence", "0")), False
                    case "404":
                        return [], 0, False
                    case "413":
                        return [], 0, True
                    case status:
                        raise Again(f"a direct get ended with status {status}")
        except (nats.errors.Error, OSError) as error:
            raise Again(str(error) or type(error).__name__) from error
        finally:
            if subscription is not None and not self.client.is_closed:
                await subscription.unsubscribe()

    async def names(self, subject: str) -> list[str]:
        """Return all subjects of a filter that have messages, as the leader knows them."""
        found: list[str] = []
        while True:
            data = await self.call(
                f"STREAM.INFO.{self.subjects.stream}", {"subjects_filter": subject, "offset": len(found)}
            )
            reply = msgspec.json.decode(data, type=_InfoReply)
            some = (reply.state.subjects if reply.state else None) or {}
            found += some
            if not some or len(found) >= reply.total:
                return found

    async def reached(self, seq: int) -> bool:
        """Tell whether the leader itself has stored as much; a replica may be ahead of it by milliseconds."""
        reply = msgspec.json.decode(await self.call(f"STREAM.INFO.{self.subjects.stream}", {}), type=_InfoReply)
        return reply.state is not None and reply.state.last_seq >= seq

    # Writes

    async def write(self, writes: Sequence[Write]) -> int:
        """Store messages, all of them or none; returns the sequence of the last one.

        Raises:
            Conflict, Again, Full, Uncertain: see above.
        """
        if not self.client.is_connected:
            raise Again("there is no connection")
        batch = secrets.token_hex(12)
        sent = False
        try:
            for number, write in enumerate(writes, 1):
                headers = {} if write.keep_history else {"Nats-Rollup": "sub"}
                if write.expect is not None:
                    headers["Nats-Expected-Last-Subject-Sequence"] = str(write.expect)
                if len(writes) > 1:
                    headers["Nats-Batch-Id"] = batch
                    headers["Nats-Batch-Sequence"] = str(number)
                if number < len(writes):
                    await self.client.publish(write.subject, write.data, headers=headers)
                    continue
                if len(writes) > 1:
                    headers["Nats-Batch-Commit"] = "1"
                sent = True
                reply = await heed(
                    self.client.request(write.subject, write.data, timeout=self.timeout, headers=headers)
                )
        except nats.errors.NoRespondersError as error:
            raise Again("no stream listens") from error
        except nats.errors.OutboundBufferLimitError as error:
            raise Again("the connection was lost") from error
        except nats.errors.MaxPayloadError as error:
            raise StoreError("a message is larger than the server's max_payload") from error
        except (nats.errors.Error, OSError) as error:
            raise (Uncertain if sent else Again)(str(error) or type(error).__name__) from error
        return _stored(reply)

    async def put_chunks(self, owner: str, body: bytes) -> tuple[str, int]:
        """Put a body into chunks, before the message that names them; a repeat changes nothing."""
        digest = hashlib.sha256(owner.encode() + b"\0" + body).hexdigest()
        step = min(INLINE, self.client.max_payload - 16 * 1024)
        pieces = [body[start : start + step] for start in range(0, len(body), step)]
        for number, piece in enumerate(pieces):
            write = Write(self.subjects.blob(owner, digest, str(number)), piece, None)
            await self._certainly(write)
        return digest, len(pieces)

    async def _certainly(self, write: Write) -> None:
        """Store a message that may be stored twice."""

        async def attempt() -> None:
            try:
                await self.write([write])
            except Uncertain as error:
                raise Again(str(error)) from error

        await self.insist(attempt)

    async def publish(self, subject: str, doc: Doc, headers: Mapping[str, str]) -> None:
        """Store a message with headers of its own that may be stored twice, in whatever stream listens."""

        async def attempt() -> None:
            if not self.client.is_connected:
                raise Again("there is no connection")
            try:
                reply = await heed(self.client.request(subject, pack(doc), timeout=self.timeout, headers=dict(headers)))
                _stored(reply)
            except (nats.errors.Error, OSError, Uncertain) as error:
                raise Again(str(error) or type(error).__name__) from error

        await self.insist(attempt)

    async def purge(self, subject: str, *, upto: int = 0, keep: int = 0, stream: str = "") -> None:
        """Remove the messages of a filter: those up to a sequence, or all but the newest ``keep``."""
        body: dict[str, object] = {"filter": subject}
        if upto:
            body["seq"] = upto + 1
        if keep:
            body["keep"] = keep
        await self.call(f"STREAM.PURGE.{stream or self.subjects.stream}", body)

    async def remove(self, seq: int) -> None:
        """Remove one message, without waiting for it to be done; what is left over is found stale."""
        body = json.dumps({"seq": seq, "no_erase": True}).encode()
        await self.tell(f"$JS.API.STREAM.MSG.DELETE.{self.subjects.stream}", body)

    async def tell(self, subject: str, data: bytes) -> None:
        """Send a message nobody answers; lost when there is no connection."""
        try:
            await self.client.publish(subject, data)
        except (nats.errors.Error, OSError) as error:
            log.debug("a note was lost: %s", error)


def _stored(reply: Msg) -> int:
    try:
        answer = msgspec.json.decode(reply.data, type=_Reply)
    except msgspec.DecodeError as error:
        raise Uncertain(f"an answer that is none: {error}") from error
    if answer.error is None:
        return answer.seq
    code, text = answer.error.err_code, answer.error.description
    if code in _CONFLICTS:
        raise Conflict(text)
    if code in _FULL:
        raise Full(f"the stream has no room: {text}")
    if code in _AGAIN:
        raise Again(text)
    raise StoreError(f"JetStream refused a message: {text} ({code})")


def many(found: Iterable[Stored]) -> list[Stored]:
    """Return messages in the order they were stored."""
    return sorted(found, key=lambda one: one.seq)
