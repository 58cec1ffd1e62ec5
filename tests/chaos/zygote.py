"""The process that servers are forked from: orders come as lines of JSON on stdin, news go out on stdout.

An order is ``{"folder", "environment"}``; the news are ``{"started": PID}`` in the order of the orders,
``{"pid", "address"}`` from the server itself, and ``{"pid", "ended": STATUS}``. A line is written at once, so the
lines of several processes do not mix. At the end of stdin every child that is left is killed.
"""

import ctypes
import gc
import json
import os
import select
import signal
import sys
import threading
import traceback
from typing import NoReturn

from . import server

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Fork servers until stdin ends."""
    assert threading.active_count() == 1, "a process with threads must not fork"
    gc.freeze()
    wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    children: set[int] = set()
    rest = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap(children)
        if 0 in ready:
            data = os.read(0, 65_536)
            if not data:
                break
            *orders, rest = (rest + data).split(b"\n")
            for order in orders:
                _fork(order, children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _say(**news: object) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def _reap(children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        _say(pid=pid, ended=os.waitstatus_to_exitcode(status))


def _fork(order: bytes, children: set[int]) -> None:
    asked = json.loads(order)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # so that no end is told before its start
    pid = os.fork()
    if pid == 0:
        _serve(asked["folder"], asked["environment"])
    children.add(pid)
    _say(started=pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _serve(folder: str, environment: dict[str, str]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(folder)
        os.environ |= environment
        log = os.open("server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 2)
        server.main(os.environ, lambda address: _say(pid=os.getpid(), address=address))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
