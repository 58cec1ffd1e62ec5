"""The child process that runs the weights; started by ``process``, and of no use to anybody else.

It reads one line of JSON from stdin (path, sha256, key, slots, context, name), writes one line of JSON to stdout
(address, or error), and serves until stdin ends. That happens however its parent ends, so none is left behind.

It imports nothing of this project: it is a script, there in a tenth of a second.
"""

import hashlib
import importlib
import json
import os
import sys
from typing import Protocol, TypedDict

_MOST_THREADS = 4
"""Half the cores, and at most these: the threads wait for each other at full speed, many times per token, so where
one is kept from its core all of them crawl, and the engine needs a core too. So small a model gains little by more.
"""
_KEPT_MIB = 128
"""Memory for prompts of conversations that are not at work, which go on without being read anew."""


class Wanted(TypedDict):
    """What it is told."""

    path: str
    sha256: str
    key: str
    slots: int
    context: int
    name: str


class Server(Protocol):
    """What it makes; it ends with the process."""

    listening_address: str


def main() -> None:
    """Load, tell the address, serve until stdin ends."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the native code writes, it is no line of ours
    wanted: Wanted = json.loads(sys.stdin.readline())
    try:
        with open(wanted["path"], "rb") as weights:
            if hashlib.file_digest(weights, "sha256").hexdigest() != wanted["sha256"]:
                raise OSError("the file of the weights is damaged, or another one; install it anew")
        server = _serve(wanted)
    except Exception as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), file=said, flush=True)
        return
    print(json.dumps({"address": server.listening_address}), file=said, flush=True)
    sys.stdin.read()
    os._exit(0)  # freeing memory politely has its own ways to hang


def _serve(wanted: Wanted) -> Server:
    xllamacpp = importlib.import_module("xllamacpp")  # it has no types, and takes a while
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    params = xllamacpp.CommonParams()
    params.model.path = wanted["path"]
    params.model_alias = {wanted["name"]}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [wanted["key"]]
    params.n_parallel = wanted["slots"]
    params.n_ctx = wanted["slots"] * wanted["context"]
    params.cpuparams.poll = 0
    params.cpuparams.n_threads = max(1, min(_MOST_THREADS, cores // 2))
    params.cache_ram_mib = _KEPT_MIB
    params.use_jinja = True
    params.offline = True
    params.endpoint_slots = False
    params.verbosity = 0
    server: Server = xllamacpp.Server(params)
    return server


if __name__ == "__main__":
    main()
