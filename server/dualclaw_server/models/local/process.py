"""Runs the weights in a child process and says at which loopback address they answer.

A process of its own, and not a thread, because the native code

- holds the interpreter's lock while it loads, for a second in which no run would move and no health check be answered;
- takes SIGTERM and SIGINT for itself, so that the server could not be drained any more;
- ends the process it is in when it finds itself in a state it does not know.

Rules:

- It is started by the first call and stays. One that has ended is started anew by the next call. Several calls
  wait for one start, and whoever stops waiting stops nothing for the others.
- Nobody else can use it: it listens on a free port of 127.0.0.1 and answers only to a key made for this start,
  which reaches it through a pipe, so it is in no list of processes.
- It ends when its stdin ends, however this process ends.
- It is started by the plain subprocess module, which uses vfork: a copy of this process, even for a moment, would
  be one in the middle of gRPC's threads.
"""

import asyncio
import json
import logging
import secrets
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dualclaw_server.engine.model import ModelError

_log = logging.getLogger(__name__)

START_SECONDS: Final = 60.0
"""Until it must answer: reading, checking and loading takes one or two on a machine that is not busy."""
END_SECONDS: Final = 2.0
"""For a child that ends by itself, and for a start that is broken off."""
_CHILD: Final = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True)
class Weights:
    """What is to be run, and how."""

    path: Path
    sha256: str
    name: str
    """What answers call it."""
    slots: int
    """Answers at once."""
    context: int
    """Tokens of each."""


@dataclass(frozen=True, slots=True)
class Served:
    """Where it answers. No repr of the key."""

    address: str
    key: str

    def __repr__(self) -> str:
        return f"Served({self.address!r})"


class WeightsProcess:
    """The child process of one model. For one event loop.

    Args:
        weights: what it runs.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._child: subprocess.Popen[str] | None = None
        self._starting: asyncio.Task[Served] | None = None
        self._closed = False

    async def ready(self) -> Served:
        """Return where it answers, once it does.

        Raises:
            ModelError: MODEL_UNAVAILABLE, it cannot be started; or it is closed.
        """
        if self._closed:
            raise ModelError("MODEL_UNAVAILABLE", "The local model is closed.", retryable=False)
        if self._starting is None or self._is_gone(self._starting):
            self._starting = asyncio.create_task(self._start(), name="local model")
            self._starting.add_done_callback(_look_at)
        return await asyncio.shield(self._starting)

    async def aclose(self) -> None:
        """End the child, also one that is just starting."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting}, timeout=END_SECONDS)
        await self._end()

    def _is_gone(self, starting: "asyncio.Task[Served]") -> bool:
        if not starting.done():
            return False
        failed = starting.cancelled() or starting.exception() is not None
        return failed or self._child is None or self._child.poll() is not None

    async def _start(self) -> Served:
        await self._end()
        _log.info("loading the local model %s ...", self._weights.name)
        key = secrets.token_urlsafe(32)
        wanted = {
            "path": str(self._weights.path),
            "sha256": self._weights.sha256,
            "name": self._weights.name,
            "slots": self._weights.slots,
            "context": self._weights.context,
            "key": key,
        }
        try:
            child = self._child = _spawn()
        except OSError as error:
            raise _failed(str(error)) from None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await asyncio.to_thread(_exchange, child, json.dumps(wanted))
            told = json.loads(line)
        except TimeoutError:
            await self._end()
            raise _failed(f"it did not answer within {START_SECONDS:g} s") from None
        except (OSError, ValueError):  # it ended before it said anything
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(child.wait, END_SECONDS)
            raise _failed(f"its process ended with code {await self._end()}") from None
        if "error" in told:
            raise _failed(str(told["error"]), retryable=False)
        return Served(str(told["address"]), key)

    async def _end(self) -> int | None:
        """End the child if there is one; returns its exit code."""
        child, self._child = self._child, None
        return None if child is None else await asyncio.to_thread(_stop, child)


def _spawn() -> "subprocess.Popen[str]":
    return subprocess.Popen(  # noqa: S603  # this very interpreter with a file of this package
        [sys.executable, "-P", str(_CHILD)],  # -P: the modules beside the script are none of its own
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the server, whose drain may still need it
    )


def _exchange(child: "subprocess.Popen[str]", line: str) -> str:
    """Tell the child a line and return the one it says."""
    if child.stdin is None or child.stdout is None:
        raise OSError("no pipes")
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return child.stdout.readline()


def _stop(child: "subprocess.Popen[str]") -> int:
    child.kill()  # it has nothing to lose, and while it loads it would notice nothing else
    code = child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):  # what was never written has nobody to read it
            if pipe is not None:
                pipe.close()
    return code


def _look_at(task: "asyncio.Task[Served]") -> None:
    """Take a failure that nobody waits for any more, so that it is not reported as lost."""
    if not task.cancelled():
        task.exception()


def _failed(why: str, *, retryable: bool = True) -> ModelError:
    return ModelError(
        "MODEL_UNAVAILABLE",
        f"The local model cannot be started: {why}.",
        retryable=retryable,
        hint="Install it anew with make local, or choose another model with DUALCLAW_MODEL.",
    )
