"""The events of a run, kept flowing over lost connections. Knows no gRPC: ``engine_client`` brings the calls.

Rules, and why:

- A start always carries a request_id, so a start whose answer was lost may be sent again: the engine streams
  the same segment once more.
- Any status but OK after the start means "this stream was lost" (contract, 1.4). The stream attaches again
  after the newest seq it holds. Before the first event it repeats the call itself instead: only the engine
  knows at which seq the segment begins.
- But an attach that the engine refuses for good is no lost stream, also when its headers came first: before
  the first message of an attach its own words (OUT_OF_RANGE, NOT_FOUND, ...) count.
- A seq that was seen is dropped, a seq that is missing counts as a loss: every event comes once, in order.
- Trouble ends by progress. Without a new event for ``Reconnect.total`` seconds the stream raises.
- "Nobody listens there" at the very first attempt raises at once: waiting would not help a person who has
  mistyped the address. An engine that this client has reached before is waited for, ``Reconnect.start`` seconds: it
  is being restarted, and a start carries a request_id.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Protocol, Self, TypeVar

from dualclaw import AttachRequest, EngineEvent, ResumeRequest, RunRequest
from dualclaw.errors import EngineError

_T = TypeVar("_T")
StreamRequest = RunRequest | ResumeRequest | AttachRequest

START_TIMEOUT = 30.0
"""Seconds an engine may take to accept a call before the attempt counts as lost."""
_HEADERLESS_WAIT = 1.0
_STATUS_WAIT = 0.5
_CLOCKS_DIFFER = 0.05
"""Seconds by which a call may end of its deadline before our clock says so."""
_TERMINAL = ("done", "error")


class EngineUnreachable(EngineError):
    """There is no connection to an engine. Its ``reason`` is STORE_UNAVAILABLE, the only one with UNAVAILABLE."""

    def __init__(self, message: str, metadata: dict[str, str] | None = None) -> None:
        super().__init__("STORE_UNAVAILABLE", message, {"grpc_code": "UNAVAILABLE", **(metadata or {})})


class NotServed(EngineError):
    """The engine lacks an rpc of the contract. Its ``reason`` is INTERNAL, because the contract has none for it."""

    def __init__(self, place: str, rpc: str, words: str) -> None:
        own = words.strip().rstrip(".")[:300]
        text = f"the engine at {place} does not serve {rpc}" + (f"; it says: {own}" if own else "")
        hint = f"Nothing was changed; an engine that serves {rpc} can do it."
        super().__init__("INTERNAL", text, {"grpc_code": "UNIMPLEMENTED", "rpc": rpc, "hint": hint})


class Lost(Exception):
    """A call ended without OK; what is done about it depends on when.

    Args:
        error: what it means if nothing can be done.
        again: the transport failed, so a start may be sent again.
        attach: an attach may be tried again.
        connected: False when no connection could be made.
        known: an engine has been reached at this place before.
    """

    def __init__(self, error: EngineError, *, again: bool, attach: bool, connected: bool, known: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.again = again
        self.attach = attach
        self.connected = connected
        self.known = known


class StreamCall(Protocol):
    """One streaming call. Implemented by ``engine_client`` over gRPC. Its methods raise Lost."""

    async def accepted(self) -> tuple[str, str] | None:
        """Wait for the server's headers; run id and conversation id, None when they name no run."""

    async def read(self) -> Sequence[EngineEvent] | None:
        """Return the events of the next message; None at an end with OK."""

    async def hang_up(self) -> None:
        """End the call at once and see it end, so that whatever records calls has its end too. Raises nothing."""


@dataclass(frozen=True, slots=True)
class Reconnect:
    """How a lost stream is taken up again; all in seconds."""

    total: float = 60.0
    """Longest time without a new event before the stream raises; 0: never reconnect."""
    start: float = 10.0
    """Longest time a start (run, resume, attach) waits for an engine that was reached before; 0: not at all."""
    first: float = 0.1
    """Wait before the second attempt, doubled each time and spread by chance; the first one is made at once."""
    longest: float = 3.0
    """Longest wait between two attempts."""


class RunStream:
    """The events of a run or segment, each once and in order, over lost connections.

    Use it as an async context manager: entering waits until the engine has accepted the call and raises
    EngineError when it refuses; leaving ends the call at once (not the run). Iterate it for events, or
    ``batches()`` for what came together. One task reads; cancelling a read ends the call, so wait for a task
    with ``asyncio.wait`` when you need a timer beside it.

    Args:
        open_call: opens a call for a request, with so many seconds left (None: no limit).
        request: the start; with a request_id unless it is an attach.
        reconnect: how it is taken up again.
        timeout: seconds the whole stream may take.
        place: the engine's address, for texts.
    """

    __slots__ = (
        "_accepted", "_attempts", "_buffer", "_call", "_closed", "_deadline", "_first", "_gap", "_one_segment",
        "_open_call", "_place", "_reconnect", "_refusable", "_request", "_seen", "_stalled", "_timeout",
        "_trouble_since", "conversation_id", "ended", "last_seq", "reconnects", "run_id",
    )  # fmt: skip

    def __init__(
        self,
        open_call: Callable[[StreamRequest, float | None], StreamCall],
        request: StreamRequest,
        *,
        reconnect: Reconnect,
        timeout: float | None,
        place: str,
    ) -> None:
        self._open_call = open_call
        self._request = request
        self._reconnect = reconnect
        self._timeout = timeout
        self._place = place
        self._deadline: float | None = None
        self._one_segment = not isinstance(request, AttachRequest)
        self._call: StreamCall | None = None
        self._first: asyncio.Task[Sequence[EngineEvent] | None] | None = None
        self._buffer: list[EngineEvent] = []
        """Events that were read and not handed out, the next one last."""
        self._seen = request.after_seq if isinstance(request, AttachRequest) else 0
        self._accepted = self._closed = self._stalled = self._gap = False
        self._refusable = False
        """An attach is open and has brought no message yet."""
        self._attempts = 0
        self._trouble_since: float | None = None
        self.run_id = "" if isinstance(request, RunRequest) else request.run_id
        self.conversation_id = request.conversation_id if isinstance(request, RunRequest) else ""
        self.last_seq = self._seen
        """Seq of the newest event handed out; ``after_seq`` of an attach before the first."""
        self.reconnects = 0
        """How often the stream was lost and taken up again."""
        self.ended = False
        """The last event has been handed out, or is about to be: no other comes after it."""

    async def __aenter__(self) -> Self:
        if self._timeout is not None:
            self._deadline = time.monotonic() + self._timeout
        try:
            await self._connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the call at once; the run goes on. Whoever still reads sees the end of the stream."""
        self._closed = True
        await self._hang_up()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineEvent:
        if not self._buffer:
            last = self.last_seq
            self._buffer.extend(reversed(await self.next_batch()))
            self.last_seq = last  # nothing of it has been handed out yet
        if not self._buffer:
            raise StopAsyncIteration
        event = self._buffer.pop()
        self.last_seq = max(self.last_seq, event.seq)
        return event

    async def batches(self) -> AsyncGenerator[Sequence[EngineEvent], None]:
        """Yield the events that came in one message, for readers that handle them together."""
        while events := await self.next_batch():
            yield events

    async def next_batch(self) -> Sequence[EngineEvent]:
        """Return the next new events, those that came in one message; none at the end.

        Lost streams are taken up again as often as it takes. Of a segment ``ended`` tells already with its last
        events that there are no more.
        """
        if self._buffer:
            rest = self._buffer[::-1]
            self._buffer.clear()
            self.last_seq = max(self.last_seq, rest[-1].seq)
            return rest
        while not (self.ended or self._closed):
            try:
                call = self._call
                events = await (self._reach() if call is None or self._first is not None else call.read())
                new = self._take(events)
                if self._gap:
                    self._gap = False
                    await self._hang_up()
                if new:
                    self._attempts, self._trouble_since, self._stalled = 0, None, False
                    self.last_seq = self._seen
                    return new
            except Lost as lost:
                await self._recover(lost)
        if not self._closed:
            await self._await_status()
        return ()

    async def _reach(self) -> Sequence[EngineEvent] | None:
        """Return the next message where it takes more than to read it: a new call, or a message asked for before."""
        if self._call is None:
            await self._connect()
        if self._first is not None:
            first = self._first
            await asyncio.wait({first})
            self._first = None
            return await first
        if self._call is None:  # closed by another task
            self.ended = True
            return ()
        return await self._call.read()

    async def _recover(self, lost: Lost) -> None:
        """Get ready for another attempt; raises when there is to be none."""
        self._check_deadline(_CLOCKS_DIFFER)
        await self._hang_up()
        if self.ended or self._closed:
            return
        if self._refusable and not lost.attach:
            raise lost.error from None
        await self._pause(lost)

    def _take(self, events: Sequence[EngineEvent] | None) -> Sequence[EngineEvent]:
        """Return what is new of a message and note where the stream stands."""
        self._refusable = False
        if events is None:
            if self._one_segment:
                self._stall("the engine ended the stream before the end of the segment")
            self.ended = True
            return ()
        new: list[EngineEvent] = []
        seen = self._seen
        for event in events:
            seq = event.seq
            if 0 < seq <= seen:
                continue
            if seq > seen + 1 and (seen or not self._one_segment):
                if not new:
                    self._stall(f"the engine left out event {seen + 1}")
                self._gap = True  # what came before it is good; after it the next read attaches
                break
            new.append(event)
            if seq > seen:
                self._seen = seen = seq
            if self._one_segment and event.WhichOneof("payload") in _TERMINAL:
                self.ended = True
                break
        return new

    def _stall(self, problem: str) -> NoReturn:
        """Count a stream that the engine spoilt as lost, once; spoilt again at the same place it raises."""
        error = EngineError("INTERNAL", f"{problem} ({self._position()})", self._where())
        if self._stalled:
            raise error
        self._stalled = True
        raise Lost(error, again=True, attach=True, connected=True)

    async def _connect(self) -> None:
        """Open a call and wait until the engine has accepted it, as often as it takes."""
        while True:
            try:
                await self._open()
            except Lost as lost:
                await self._hang_up()
                if not self._may_repeat(lost):
                    raise lost.error from None
                await self._pause(lost)
            else:
                self.reconnects += self._accepted
                self._accepted = True
                return

    def _may_repeat(self, lost: Lost) -> bool:
        if self._closed:
            return False
        if self._accepted:
            return lost.attach
        return lost.again and (lost.connected or lost.known or self._trouble_since is not None)

    async def _open(self) -> None:
        request = self._request
        if self._accepted and (self._seen or not self._one_segment):
            wait = isinstance(request, AttachRequest) and request.wait
            request = AttachRequest(run_id=self.run_id, after_seq=self._seen, wait=wait)
        self._refusable = isinstance(request, AttachRequest)
        remaining = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        self._call = self._open_call(request, remaining)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                if (ids := await self._guard(self._call.accepted())) is not None:
                    self.run_id = ids[0]
                    self.conversation_id = ids[1] or self.conversation_id
                    return
                # No run id: a refusal without headers, or a foreign engine that sends none. The first message
                # or the status tells which; an attach to a silent run may wait for that for ever.
                self._first = first = asyncio.ensure_future(self._call.read())
                first.add_done_callback(_retrieve)
                await asyncio.wait({first}, timeout=None if self._one_segment else _HEADERLESS_WAIT)
        except TimeoutError:
            problem = f"the engine at {self._place} did not answer within {START_TIMEOUT:g} s"
            raise Lost(EngineUnreachable(problem), again=True, attach=True, connected=True) from None
        if first.done() and (events := await self._guard(first)):
            self.run_id = events[0].run_id or self.run_id

    async def _guard(self, step: Awaitable[_T]) -> _T:
        """Await a step of the call; raise if it was lost because the time was up."""
        try:
            return await step
        except Lost:
            self._check_deadline(_CLOCKS_DIFFER)
            raise

    async def _pause(self, lost: Lost) -> None:
        """Wait before the next attempt; raises when there is none left."""
        now, limits = time.monotonic(), self._reconnect
        self._trouble_since = since = now if self._trouble_since is None else self._trouble_since
        delay = 0.0
        if self._attempts:
            delay = min(limits.longest, limits.first * 2 ** min(self._attempts - 1, 30)) * random.uniform(0.5, 1.5)
            delay = max(delay, lost.error.retry_after or 0.0)
        self._attempts += 1
        starts = not (self._accepted or lost.connected)
        if now + delay - since >= (min(limits.start, limits.total) if starts else limits.total):
            if not self._accepted:
                raise lost.error from None
            text = f"the stream was lost and not taken up again within {limits.total:g} s ({self._position()})"
            raise EngineUnreachable(f"{text}; last: {lost.error.message}", self._where()) from lost.error
        if self._deadline is not None:
            delay = min(delay, max(0.0, self._deadline - now))
        await asyncio.sleep(delay)
        self._check_deadline()

    def _check_deadline(self, margin: float = 0.0) -> None:
        if self._deadline is not None and time.monotonic() + margin >= self._deadline:
            text = f"the stream did not end within {self._timeout:g} s; the run goes on ({self._position()})"
            raise EngineError("INTERNAL", text, {**self._where(), "grpc_code": "DEADLINE_EXCEEDED"})

    def _position(self) -> str:
        return f"run {self.run_id or 'unknown'}, after event {self._seen}"

    def _where(self) -> dict[str, str]:
        return {"run_id": self.run_id, "last_seq": str(self._seen)} if self.run_id else {}

    async def _await_status(self) -> None:
        """Let the call end by itself after its last event, so that both sides record OK and no cancellation."""
        if self._call is None:
            return
        with contextlib.suppress(TimeoutError, Lost):
            async with asyncio.timeout(_STATUS_WAIT):
                if await self._call.read() is None:
                    self._call = None
        await self._hang_up()

    async def _hang_up(self) -> None:
        call, self._call, self._first = self._call, None, None
        if call is not None:
            await call.hang_up()


def _retrieve(task: asyncio.Task[Sequence[EngineEvent] | None]) -> None:
    """Look at a task's exception, so that one nobody waits for any more is not logged as forgotten."""
    if not task.cancelled():
        task.exception()
