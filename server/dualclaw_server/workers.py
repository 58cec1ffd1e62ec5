"""Several processes on one address: ``dualclaw-server --workers N``.

Python runs on one core at a time, so a machine's other cores need processes of their own. They share the store, as any
processes of one engine do, and the port, by SO_REUSEPORT: the system gives each new connection to one of them. Which
one works on a run is decided by the store, whoever was called.

Rules
- The supervisor serves nothing. It holds the port (bound, not listening), so that nobody else takes it while a worker
  is away, and starts what has died again, after a delay that grows.
- The first worker starts alone: what is wrong with a start is said once, and then there is no server.
- A worker is a fresh interpreter in a process group of its own, so that Ctrl-C reaches the supervisor alone, which ends
  them in order. The worker has one end of a socket. It says there that it serves, and it drains when the other end is
  closed: however the supervisor came to its end, no worker stays behind.
- A first SIGTERM or SIGINT has every worker drain, a second one ends them at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dualclaw_server.servicers.listening import StartError, check_free
from dualclaw_server.settings import split_address

WORKER_OF: Final = "--worker-of"
"""The option that makes a process a worker; its value is the descriptor of its end of the socket."""

_READY: Final = b"ready\n"
_START: Final = 60.0
"""Seconds a worker may take until it serves."""
_STABLE: Final = 60.0
"""Seconds after which a death has nothing to do with the start, so that the delay is the first one again."""
_AGAIN, _AGAIN_MOST = 1.0, 30.0
"""Seconds before a dead worker's successor starts; the first time, and at most."""

_log = logging.getLogger(__name__)


class Supervisor:
    """Starts workers, starts them again, and ends them.

    Args:
        count: how many.
        listen: the address as it is set, ``HOST:PORT``; port 0 takes a free one.
        options: the command line of a worker but for its address.
    """

    def __init__(self, count: int, listen: str, options: Sequence[str]) -> None:
        self._listen = listen
        self._options = options
        self._places = [_Place(number) for number in range(count)]
        self._stopping = asyncio.Event()

    async def serve(self, announce: Callable[[str], None]) -> int:
        """Serve until SIGTERM or SIGINT. ``announce`` is told the address once each worker has had its start.

        Returns:
            The exit code: 0; 1 when a worker did not drain; that of the first worker when it cannot start.

        Raises:
            StartError: the address cannot be had.
        """
        await check_free(self._listen, *split_address(self._listen))
        with _held(self._listen) as address, self._signals():
            command = [sys.executable, "-m", "dualclaw_server", *self._options, "--listen", address]
            first, *others = self._places
            keeping = [asyncio.create_task(self._keep(first, command), name="worker 0")]
            await first.tried.wait()
            if first.served:
                keeping += [
                    asyncio.create_task(self._keep(place, command), name=f"worker {place.number}") for place in others
                ]
                await asyncio.gather(*(place.tried.wait() for place in others))
            if first.served and not self._stopping.is_set():
                announce(address)
                _log.info("%d workers serve on %s", len(self._places), address)
            return max(await asyncio.gather(*keeping))

    async def _keep(self, place: "_Place", command: Sequence[str]) -> int:
        """Have a worker in a place until the end; returns the exit code."""
        delay = _AGAIN
        while True:
            began = time.monotonic()
            code = await self._run(place, command)
            if self._stopping.is_set():
                return 0 if code in (0, -signal.SIGTERM) else 1  # the signal ends only whoever does not serve yet
            if place.number == 0 and not place.served:
                return max(code, 1)
            if time.monotonic() - began > _STABLE:
                delay = _AGAIN
            _log.error("worker %d ended with %d; another one starts in %g s", place.number, code, delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
                return 0
            delay = min(2 * delay, _AGAIN_MOST)

    async def _run(self, place: "_Place", command: Sequence[str]) -> int:
        """Start a worker and wait for its end; returns its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command, WORKER_OF, str(theirs.fileno()), pass_fds=[theirs.fileno()], process_group=0
            )
        place.process = process
        if self._stopping.is_set():  # while it was made
            process.terminate()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(_START):
                place.served = await reader.readline() == _READY or place.served
        except TimeoutError:
            _log.error("worker %d does not serve after %g s and is killed", place.number, _START)
            process.kill()
        place.tried.set()
        code = await process.wait()
        place.process = None
        writer.close()
        return code

    def _stop(self) -> None:
        number = signal.SIGKILL if self._stopping.is_set() else signal.SIGTERM
        self._stopping.set()
        for place in self._places:
            if place.process is not None:
                place.process.send_signal(number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


class _Place:
    """One of the places that there are for workers: who is in it, and what is known of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: asyncio.subprocess.Process | None = None
        self.tried = asyncio.Event()
        """Its first worker serves, or will not."""
        self.served = False
        """A worker has served here."""


@contextlib.contextmanager
def _held(listen: str) -> Iterator[str]:
    """Hold an address, so that workers may share it and nobody else may have it. Raises StartError."""
    host, port = split_address(listen)
    with contextlib.ExitStack() as stack:
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found[:1]:
                held = stack.enter_context(socket.socket(family, kind, protocol))
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                held.bind(address)
                port = held.getsockname()[1]
        except OSError as error:
            raise StartError(f"cannot listen on {listen}: {error.strerror or error}") from None
        yield f"{host}:{port}"


def bind_to_supervisor(descriptor: int) -> Callable[[str], None]:
    """Have this process drain when its supervisor ends. Returns what tells the supervisor that this one serves."""
    end = socket.socket(fileno=descriptor)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while end.recv(1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="dualclaw-supervisor-watch", daemon=True).start()

    def announce(_: str) -> None:
        with contextlib.suppress(OSError):
            end.sendall(_READY)

    return announce
