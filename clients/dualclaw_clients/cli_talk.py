"""A run at the command line: its events as they come, Ctrl-C, and what it asks the person at the terminal.

The run is never bound to the terminal: whoever quits, or leaves a question open, can go on with it later, here or in
another channel.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Sequence

from dualclaw import InterruptItem, ResumeRequest, RunRequest, RunState, StopReason
from dualclaw.errors import EngineError, FieldError
from dualclaw_clients.cli_answers import Person
from dualclaw_clients.cli_render import EventPrinter, Terminal, safe, safe_line, short_name, show_question
from dualclaw_clients.engine_client import EngineClient, RunStream

OK, FAILED, WAITS, CTRL_C = 0, 1, 5, 130
_FASTER = frozenset({"ALREADY_ANSWERED", "RUN_NOT_INTERRUPTED"})
"""Refusals of an answer that came too late."""


class Talk:
    """Shows runs, and asks the person what they ask. Methods return the exit code; refusals raise EngineError.

    Args:
        client: the engine.
        terminal: where events are shown.
        person: who can be asked; None: nobody.
        as_json: show events as JSON lines.
    """

    def __init__(self, client: EngineClient, terminal: Terminal, person: Person | None, *, as_json: bool) -> None:
        self._client = client
        self._terminal = terminal
        self._person = person
        self._json = as_json

    async def ask(self, request: RunRequest) -> int:
        """Start a run and show it to its end."""
        try:
            return await self._follow(self._client.run(request))
        except EngineError as error:
            if error.reason == "CONVERSATION_BUSY" and (run_id := error.metadata.get("run_id")):
                with contextlib.suppress(EngineError):  # the refusal itself matters more
                    for item in (await self._client.get_run(run_id)).interrupts:
                        show_question(item, run_id, self._terminal)
            raise

    async def resume(self, request: ResumeRequest) -> int:
        """Answer a run and show how it goes on."""
        return await self._follow(self._client.resume(request))

    async def attach(self, run_id: str, *, after_seq: int, wait: bool) -> int:
        """Show a run from a position on."""
        stream = self._client.attach(run_id, after_seq=after_seq, wait=wait)
        printer = EventPrinter(self._terminal, as_json=self._json, from_start=after_seq == 0)
        return await self._show(stream, printer, cancels=False)

    async def answer(self, run_id: str) -> int:
        """Ask the person everything a run asks, then show how it goes on."""
        run = await self._client.get_run(run_id)
        if run.state != RunState.RUN_STATE_INTERRUPTED:
            state = short_name(RunState.Name, run.state, "RUN_STATE_")
            raise EngineError("RUN_NOT_INTERRUPTED", f"run {run_id} waits for no answer, it is {state}")
        for item in run.interrupts:
            show_question(item, run_id, self._terminal, brief=True)
        return await self._converse(None, run_id, run.interrupts, run.last_seq)

    async def _follow(self, stream: RunStream) -> int:
        return await self._converse(stream, "", (), 0)

    async def _converse(
        self, stream: RunStream | None, run_id: str, items: Sequence[InterruptItem], last_seq: int
    ) -> int:
        """Show segments and ask what they ask, in turn. Without a stream it begins with asking ``items``."""
        while True:
            asks = self._person is not None
            if stream is None:
                request = await self._answers(run_id, items)
                if request is None:
                    return CTRL_C
                if not request.decisions:
                    self._terminal.line(f"the run waits; go on with: dualclaw resume {safe_line(run_id)}", "yellow")
                    return WAITS
                asks = len(request.decisions) == len(items)
                stream = self._client.resume(request)
            printer = EventPrinter(self._terminal, as_json=self._json, asks=asks)
            try:
                code = await self._show(stream, printer, cancels=True)
            except FieldError as error:
                if not items:
                    raise
                self._terminal.line(f"this does not fit: {safe(error.message)}", "red")
                stream = None
                continue
            except EngineError as error:
                if not items or error.reason not in _FASTER:
                    raise
                who = "the question has expired" if any(map(_is_expired, items)) else "somebody else has answered"
                self._terminal.line(f"{who}; this is how it goes on", "yellow")
                # With wait, because what was answered may not have begun yet; it is left at the segment's end.
                stream, items = self._client.attach(run_id, after_seq=last_seq, wait=True), ()
                continue
            if code != WAITS or not asks:
                return code
            run_id, items, last_seq = stream.run_id, printer.questions, stream.last_seq
            stream = None

    async def _answers(self, run_id: str, items: Sequence[InterruptItem]) -> ResumeRequest | None:
        """Have the person answer; None when they pressed Ctrl-C."""
        if self._person is None:
            return ResumeRequest(run_id=run_id)
        async with _CtrlC() as ctrl_c:
            try:
                return await self._person.answers(run_id, items)
            except asyncio.CancelledError:
                ctrl_c.take()
        self._terminal.line(f"quit; the run waits: dualclaw resume {safe_line(run_id)}", "yellow")
        return None

    async def _show(self, stream: RunStream, printer: EventPrinter, *, cancels: bool) -> int:
        """Show a stream; one that ``cancels`` the run with Ctrl-C is left at the end of its segment."""

        async def cancel() -> None:
            self._terminal.line("cancelling the run; Ctrl-C again quits at once", "yellow")
            try:
                await self._client.cancel(stream.run_id, "Ctrl-C at the command line")
            except EngineError as error:
                self._terminal.line(f"dualclaw: not cancelled: {safe(error.message)}", "red")

        async with _CtrlC() as ctrl_c:
            try:
                async with stream:
                    if cancels:
                        ctrl_c.first = cancel
                    async for event in stream:
                        printer.show(event)
                        if cancels and (event.HasField("done") or event.HasField("error")):
                            break
            except asyncio.CancelledError:
                ctrl_c.take()
                if stream.run_id:
                    text = f"quit; the run may go on: dualclaw attach {safe_line(stream.run_id)}"
                    self._terminal.line(text, "yellow")
                return CTRL_C
        printer.finish(stream.run_id, stream.conversation_id)
        if ctrl_c.presses:
            return CTRL_C
        if printer.failed or printer.stop_reason == StopReason.STOP_REASON_CANCELLED:
            return FAILED
        return WAITS if printer.stop_reason == StopReason.STOP_REASON_INTERRUPTED else OK


def _is_expired(item: InterruptItem) -> bool:
    return item.HasField("expire_time") and item.expire_time.seconds <= time.time()


class _CtrlC:
    """What Ctrl-C does: once ``first`` is set the first press calls it, and any later one ends the program."""

    def __init__(self) -> None:
        self.first: Callable[[], Coroutine[None, None, None]] | None = None
        self.presses = 0
        self._task = asyncio.current_task()
        self._first_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "_CtrlC":
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._pressed)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._first_task is not None:  # its answer may come after the stream's end
            await asyncio.wait({self._first_task}, timeout=2)
            self._first_task.cancel()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _pressed(self) -> None:
        self.presses += 1
        if self.presses == 1 and self.first is not None:
            self._first_task = asyncio.create_task(self.first())
        elif self._task is not None:
            self._task.cancel()

    def take(self) -> None:
        """Take the cancellation of this task for Ctrl-C, where it ends; raises it again if it was none."""
        if not self.presses or self._task is None:
            raise asyncio.CancelledError
        self._task.uncancel()
