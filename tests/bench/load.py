"""The load client, in a process of its own: nobody's CPU but the servers' is measured, and it must not be theirs.

It reads commands from stdin, one JSON object a line, does one after the other, and answers each with one line; before
that come lines with a ``mark`` where one was asked for.

run      so many answers at once (or ``one_by_one``), from our engine over so many ``channels``; with ``window`` a mark
         when all have begun and when the first is about to end, each with the pieces and tokens that had come
turns    so many turns of one conversation
hold     answers that stay open; the reply comes when all have begun
release  has the provider end them, and waits for their ends
replay   reads a stored run from its beginning, or as many raw messages

Run as ``python -m tests.bench.load``.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import uvloop

from dualclaw import AttachRequest
from dualclaw.rpc import EngineServiceAsyncStub
from tests.bench.load_sources import Ask, Progress, Sources, WrongAnswer, release

Command = Mapping[str, Any]
LEAD = 2
"""Pieces after which an answer has begun, and tokens before its end at which the window closes."""


def _say(line: Mapping[str, object]) -> None:
    sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
    sys.stdout.buffer.flush()


class Window:
    """Tells when a set of answers is in full flow: after all have begun, before the first one ends."""

    def __init__(self) -> None:
        self.answers: Sequence[Progress] = ()
        self._next = "begun"

    def look(self) -> None:
        """Say the mark that is due."""
        if self._next == "begun":
            due = all(answer.events >= LEAD for answer in self.answers)
        else:
            due = self._next == "ending" and any(a.tokens >= a.ask.tokens - LEAD for a in self.answers)
        if due:
            events, tokens = sum(a.events for a in self.answers), sum(a.tokens for a in self.answers)
            _say({"mark": self._next, "events": events, "tokens": tokens, "time": time.perf_counter()})
            self._next = "ending" if self._next == "begun" else ""


class Load:
    """What the commands do."""

    def __init__(self) -> None:
        self._sources = Sources()
        self._held: list[asyncio.Task[None]] = []

    async def run(self, command: Command) -> dict[str, object]:
        """Get so many answers; returns the seconds to the first text of each, and the pieces in all."""
        window = Window()
        answers = [Progress(_ask(command), window.look if command.get("window") else _nothing)]
        answers += [Progress(answers[0].ask, answers[0].noticed) for _ in range(command["runs"] - 1)]
        window.answers = answers
        began = time.perf_counter()
        if command.get("one_by_one"):
            for answer in answers:
                answer.begun = time.perf_counter()
                await self._sources.answer(command["kind"], command["address"], answer)
        else:
            async with asyncio.TaskGroup() as group:
                for number, answer in enumerate(answers):
                    answer.begun = time.perf_counter()
                    channel = number % command.get("channels", 1)
                    group.create_task(self._sources.answer(command["kind"], command["address"], answer, channel))
                    if command.get("window"):  # not all at once, for streams that tick together share wake-ups
                        await asyncio.sleep(answer.ask.pace / 1000 / len(answers))
        seconds = time.perf_counter() - began
        events = sum(answer.events for answer in answers)
        return {"seconds": seconds, "events": events, "firsts": [answer.first for answer in answers]}

    async def turns(self, command: Command) -> dict[str, object]:
        """Take so many turns of a conversation, one after the other; returns its id."""
        conversation = command["conversation"]
        began = time.perf_counter()
        for _ in range(command["turns"]):
            answer = Progress(Ask(command["tokens"], conversation=conversation), _nothing)
            await self._sources.answer("engine", command["address"], answer)
            conversation = answer.conversation
        return {"seconds": time.perf_counter() - began, "conversation": conversation}

    async def hold(self, command: Command) -> dict[str, object]:
        """Open so many answers and leave them open."""
        begun = asyncio.Event()
        answers: list[Progress] = []

        def look() -> None:
            if all(answer.events for answer in answers):
                begun.set()

        ask = replace(_ask(command), held=True)
        answers += [Progress(ask, look) for _ in range(command["runs"])]
        opened = [
            asyncio.create_task(self._sources.answer(command["kind"], command["address"], answer)) for answer in answers
        ]
        self._held += opened
        waiting = asyncio.create_task(begun.wait())
        done, _ = await asyncio.wait({waiting, *opened}, return_when=asyncio.FIRST_COMPLETED)
        if waiting not in done:
            waiting.cancel()
            await next(iter(done))
            raise WrongAnswer("an answer that was to stay open has ended")
        return {"open": len(self._held)}

    async def release(self, command: Command) -> dict[str, object]:
        """Have every answer that is held come to its end, so that no server goes on with it; returns how many did."""
        held, self._held = self._held, []
        await release(command["provider"])
        await asyncio.gather(*held)
        return {"ended": len(held)}

    async def replay(self, command: Command) -> dict[str, object]:
        """Read a stored run, or as many raw messages; returns the events, and the seconds all took."""
        began = time.perf_counter()
        if command["kind"] == "raw":
            answer = Progress(Ask(command["events"]), _nothing)
            await self._sources.answer("raw", command["address"], answer)
            return {"seconds": time.perf_counter() - began, "events": answer.events}
        events = 0
        stub = EngineServiceAsyncStub(self._sources.channel(command["address"]))
        async for response in stub.Attach(AttachRequest(run_id=command["run_id"])):
            events += len(response.events)
        return {"seconds": time.perf_counter() - began, "events": events}

    async def serve(self) -> None:
        """Do what stdin says until it ends."""
        does: Mapping[str, Callable[[Command], Awaitable[dict[str, object]]]] = {
            "run": self.run, "turns": self.turns, "hold": self.hold, "release": self.release, "replay": self.replay,
        }  # fmt: skip
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            command = orjson.loads(line)
            try:
                async with asyncio.timeout(command["timeout"]):
                    _say(await does[command["do"]](command))
            except TimeoutError:
                _say({"error": f"not done after {command['timeout']:g} s"})
            except Exception as error:
                _say({"error": _told(error)})
        for task in self._held:
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)
        await self._sources.close()


def _ask(command: Command) -> Ask:
    return Ask(command["tokens"], command["pace"], command.get("mixed", False))


def _nothing() -> None:
    """Nobody waits for a mark."""


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    uvloop.run(Load().serve())
