"""NatsStore: runs, logs, queue and conversations in NATS JetStream, for more than one machine.

Who does what: ``layout`` says where everything lies, ``link`` talks to the servers, ``transaction`` makes several
writes one, and ``known`` spares it questions; on these stand ``appends`` (the log), ``commands`` (what callers do),
``work`` and ``queue`` (who works on what), ``reads`` and ``index`` (what callers see), ``watch`` and ``heart`` (other
processes, leases). ``setup`` and ``address`` are for the start. docs/nats.md is for operators.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from nats.aio.client import Client

from dualclaw import Conversation, Message, Run, RunState
from dualclaw_server.engine.store import (
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
from dualclaw_server.stores.live import MAX_PENDING, Live
from dualclaw_server.stores.nats.address import Address
from dualclaw_server.stores.nats.appends import Appender
from dualclaw_server.stores.nats.commands import Commands
from dualclaw_server.stores.nats.heart import MAX_STALL, Heart
from dualclaw_server.stores.nats.index import Index
from dualclaw_server.stores.nats.layout import Subjects
from dualclaw_server.stores.nats.link import Link
from dualclaw_server.stores.nats.queue import Queue
from dualclaw_server.stores.nats.reads import Reader
from dualclaw_server.stores.nats.setup import prepare
from dualclaw_server.stores.nats.transaction import Transactor
from dualclaw_server.stores.nats.watch import Watch
from dualclaw_server.stores.records import LEASE, Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is there between ``open`` and ``close``."""

    client: Client
    reader: Reader
    index: Index
    commands: Commands
    appender: Appender
    queue: Queue
    heart: Heart
    watch: Watch


class NatsStore:
    """A RunStore in NATS JetStream.

    Args:
        address: servers and settings.
        accept_loss: whether servers that could lose acknowledged data will do.
        clock: seconds since the epoch, for what is written; timers and leases go by the servers' clocks.
        lease: seconds a run stays with a process that shows no sign of life, unless the address says.
        max_stall: seconds without a tick of the event loop after which this process gives up its runs.
        max_pending: bytes of live frames one follower may keep waiting.
    """

    def __init__(
        self,
        address: Address,
        *,
        accept_loss: bool = False,
        clock: Clock = time.time,
        lease: float = LEASE,
        max_stall: float = MAX_STALL,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._address = address
        self._accept_loss = accept_loss
        self._clock = clock
        self._lease = lease if address.lease is None else address.lease
        self._max_stall = max_stall
        self._max_pending = max_pending
        self._live = Live(max_pending)
        self._callbacks: list[Callable[[RunKey], None]] = []
        self._parts: _Parts | None = None

    async def open(self) -> None:
        """Connect and make the streams ready. Work items of processes that are gone come when their lease ends."""
        if self._parts is not None:
            return
        client = await self._address.connect("store")
        try:
            self._parts = await self._make_parts(client)
        except BaseException:
            await client.close()
            raise

    async def _make_parts(self, client: Client) -> _Parts:
        subjects = Subjects(self._address.name)
        link = Link(client, subjects, patience=self._address.patience)
        replicas = await prepare(link, self._address, accept_loss=self._accept_loss)
        origin = secrets.token_hex(8)
        self._live = Live(self._max_pending)
        transactor = Transactor(link)
        reader = Reader(link, transactor.known)
        heart = Heart(self._address.connect, subjects, self._lease, self._max_stall, self._tell_signal)
        watch = Watch(link, self._live, origin, self._tell_signal, heart.lose)

        def told(key: RunKey, frame: Frame, seq: int) -> None:
            reader.remember(key, frame.last_seq, seq)
            watch.told(key, seq)
            self._live.publish(key, frame)

        parts = _Parts(
            client,
            reader,
            Index(link, reader),
            Commands(link, transactor, reader, self._clock),
            Appender(link, transactor, self._clock, told, origin),
            Queue(link, transactor, heart, self._clock, self._lease, self._address.max_running, replicas),
            heart,
            watch,
        )
        await watch.open()
        heart.start()
        return parts

    async def close(self) -> None:
        """Finish what was begun, put back what is in hand, end followers."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        self._live.close()
        await parts.appender.close()
        await parts.queue.close()
        await parts.watch.close()
        await parts.heart.close()
        await parts.client.close()

    def _open_parts(self) -> _Parts:
        if self._parts is None:
            raise Unavailable("the store is not open")
        return self._parts

    def _tell_signal(self, key: RunKey) -> None:
        for callback in self._callbacks:
            callback(key)

    async def _tell_signals(self, parts: _Parts, keys: Sequence[RunKey]) -> None:
        for key in keys:
            asyncio.get_running_loop().call_soon(self._tell_signal, key)
            await parts.watch.tell_signal(key)

    async def create(self, new: NewRun) -> Created:
        """Store a new run with its work item, or return the one its request_id already made."""
        parts = self._open_parts()
        done = await parts.commands.create(new)
        await self._tell_signals(parts, done.signalled)
        return done.created

    async def signal(self, key: RunKey, body: bytes, signal_id: str) -> bytes | None:
        """Put a wish into the run's inbox and wake it."""
        parts = self._open_parts()
        earlier, stored = await parts.commands.signal(key, body, signal_id)
        if stored:
            await self._tell_signals(parts, [key])
        return earlier

    async def answer(self, answers: Answers) -> Created:
        """Record that questions of a parked run are answered, put the signal into its inbox and wake it."""
        parts = self._open_parts()
        done = await parts.commands.answer(answers)
        await self._tell_signals(parts, done.signalled)
        return done.created

    def on_signal(self, callback: Callable[[RunKey], None]) -> None:
        """Have ``callback`` called whenever a signal reached a run's inbox, by whatever process."""
        self._callbacks.append(callback)

    async def wake(self, key: RunKey, at: float) -> None:
        """Have the run claimed at ``at``, whatever else happens."""
        await self._open_parts().commands.wake(key, at)

    async def claim(self, pool: str, worker: str, wait: float) -> Claim | None:
        """Return the next work item, waiting up to ``wait`` seconds for one."""
        return await self._open_parts().queue.claim(pool, worker, wait)

    def append(self, key: RunKey, frame: Frame, expect: int) -> Awaitable[int]:
        """Store a frame on top of version ``expect``."""
        if self._parts is None:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            future.set_exception(Unavailable("the store is not open"))
            return future
        return self._parts.appender.append(key, frame, expect)

    async def head(self, key: RunKey) -> Head:
        """Return where a run stands."""
        return (await self._open_parts().reader.position(key)).head()

    async def load(self, key: RunKey) -> Loaded:
        """Return what a worker needs to go on."""
        return await self._open_parts().reader.load(key)

    async def read(self, key: RunKey, after: int, limit: int = 262_144) -> Sequence[Frame]:
        """Return stored frames with events after seq ``after``."""
        return (await self._read(key, after, limit))[0]

    async def _read(self, key: RunKey, after: int, limit: int = 262_144) -> tuple[Sequence[Frame], bool]:
        return await self._open_parts().reader.read(key, after, limit)

    async def follow(self, key: RunKey, after: int) -> AsyncGenerator[Sequence[Frame], None]:
        """Yield frames with events after seq ``after``: stored ones, then live ones, whoever writes them."""
        parts = self._open_parts()
        async with parts.watch.following(key), aclosing(self._live.follow(key, after, self._read)) as frames:
            async for some in frames:
                yield some

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
        return await self._open_parts().index.list_runs(tenant, states, conversation_id, page_size, page_token)

    async def inspect(self, key: RunKey) -> Inspection:
        """Return what an operator wants to know of a run."""
        return await self._open_parts().reader.inspect(key)

    async def release(self, key: RunKey) -> bool:
        """Take the run from whoever works on it and deliver its work item anew at once."""
        parts = self._open_parts()
        void = await parts.commands.release(key)
        await self._void(parts, void or "")
        return void is not None

    async def _void(self, parts: _Parts, token: str) -> None:
        """Tell whoever holds an item that it is taken away."""
        if token:
            parts.heart.lose(token)
            await parts.watch.tell_release(token)

    async def compact(self, before: float, limit: int = 100) -> int:
        """Drop the logs of final runs that came to rest before that time."""
        parts = self._open_parts()
        return len(await parts.commands.compact(before, limit))

    async def delete(self, key: RunKey) -> None:
        """Purge a run's log and record."""
        parts = self._open_parts()
        await self._void(parts, await parts.commands.delete(key))
        parts.appender.forget(key)
        self._live.reread(key)

    async def get_conversation(self, tenant: str, conversation_id: str) -> Conversation:
        """Return a conversation."""
        return await self._open_parts().index.get_conversation(tenant, conversation_id)

    async def list_conversations(self, tenant: str, *, page_size: int, page_token: str) -> Page[Conversation]:
        """List conversations, the last changed first."""
        return await self._open_parts().index.list_conversations(tenant, page_size, page_token)

    async def list_messages(
        self, tenant: str, conversation_id: str, *, page_size: int, page_token: str
    ) -> Page[Message]:
        """List messages, the oldest first."""
        return await self._open_parts().index.list_messages(tenant, conversation_id, page_size, page_token)

    async def history(self, tenant: str, conversation_id: str, before_run: str) -> Sequence[Message]:
        """Return all messages of a conversation that came before the given run became active."""
        return await self._open_parts().index.history(tenant, conversation_id, before_run)

    async def delete_conversation(self, tenant: str, conversation_id: str) -> None:
        """Delete a conversation, its messages, runs and request ids."""
        parts = self._open_parts()
        await parts.commands.end_conversation(tenant, conversation_id)
        for run_id in await parts.index.runs_of(tenant, conversation_id):
            await self.delete(RunKey(tenant, run_id))
        await parts.commands.purge_conversation(tenant, conversation_id)

    async def get(self, tenant: str, name: str) -> tuple[bytes, int] | None:
        """Return a small setting and its revision."""
        return await self._open_parts().commands.get(tenant, name)

    async def put(self, tenant: str, name: str, value: bytes, revision: int) -> int | None:
        """Store a setting if its revision still is ``revision``."""
        return await self._open_parts().commands.put(tenant, name, value, revision)
