"""Starts the engine and the web gateway on this machine: what `make run` and `make demo` do.

``python deploy/local.py`` serves until Ctrl-C. ``python deploy/local.py --ask QUESTION`` takes free ports and a
database of its own, asks one question on the terminal and ends. Both are children that are ended with it;
settings come from the environment as for any engine.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
"""Where the agent is that is served unless DUALCLAW_AGENTS names another."""
START_TIMEOUT = 60.0
"""Seconds a service may take to say where it listens."""
STOP_TIMEOUT = 40.0
"""Seconds a service may take to end: its own grace time, and some."""


@contextlib.contextmanager
def service(module: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Run ``python -m module`` while the context lasts; yields the address it says it listens on."""
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this program alone, which ends its children in order
    )
    address: list[str] = []
    said = threading.Event()

    def read() -> None:
        for line in child.stdout or ():
            found = re.search(r"listening on (\S+)", line)
            if found:
                address.append(found[1])
                said.set()
        said.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not said.wait(START_TIMEOUT) or not address:
            sys.exit(f"{module} did not start; its message is above")
        yield address[0]
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def agents() -> dict[str, str]:
    """Return the environment that loads the example assistant; empty when agents were chosen."""
    if os.environ.get("DUALCLAW_AGENTS"):
        return {}
    path = os.pathsep.join(part for part in (str(EXAMPLES), os.environ.get("PYTHONPATH", "")) if part)
    return {"DUALCLAW_AGENTS": "assistant:AGENT", "PYTHONPATH": path}


def note_on_model() -> str:
    """Return what to know about the model in use; empty when one was chosen."""
    if os.environ.get("DUALCLAW_MODEL"):
        return ""
    return (
        "No model is set: answers come from a script that ships (it can calculate, tell the time, search documents).\n"
        "For a real one: DUALCLAW_MODEL=openai:NAME DUALCLAW_MODEL_BASE_URL=... DUALCLAW_MODEL_API_KEY=... make run"
    )


def serve() -> None:
    """Serve at the addresses of the settings until Ctrl-C or SIGTERM."""
    store = os.environ.get("DUALCLAW_STORE", "")
    if not store:
        Path("var").mkdir(exist_ok=True)
    with (
        service("dualclaw_server", {"DUALCLAW_STORE": store or "sqlite:var/dualclaw.db", **agents()}) as engine,
        service("dualclaw_clients.web", {"DUALCLAW_ENGINE": engine}) as page,
    ):
        print(f"\n  engine  {engine}  (gRPC)\n  page    {page}\n\n{note_on_model()}\nCtrl-C ends both.", flush=True)
        done = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: done.set())
        done.wait()
        print("ending ...", flush=True)


def ask(question: str) -> int:
    """Ask one question of an engine of its own; returns the exit code of ``dualclaw ask``."""
    with tempfile.TemporaryDirectory(prefix="dualclaw-demo-") as folder:
        settings = {"DUALCLAW_LISTEN": "127.0.0.1:0", "DUALCLAW_STORE": f"sqlite:{folder}/demo.db", **agents()}
        with service("dualclaw_server", settings) as engine:
            web = {"DUALCLAW_ENGINE": engine, "DUALCLAW_WEB_LISTEN": "127.0.0.1:0"}
            with service("dualclaw_clients.web", web) as page:
                print(f"engine {engine}, page {page}\n{note_on_model()}\n\n> {question}\n", flush=True)
                command = [sys.executable, "-m", "dualclaw_clients.cli", "--engine", engine, "ask", question]
                return subprocess.run(command, check=False).returncode


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Engine and web gateway on this machine.")
    parser.add_argument("--ask", metavar="QUESTION", help="ask one question and end")
    options = parser.parse_args()
    if options.ask:
        return ask(options.ask)
    serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
